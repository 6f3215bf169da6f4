"""What jobs cost in statements and commits, counted at the driver; docs/store.md has the figures."""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from queue_core.backend import Backend
from queue_core.config import QueueConfig
from queue_core.connect import connect
from queue_core.model import ClaimedJob, Retried, Succeeded
from tests.support.clock import ManualClock
from tests.support.databases import Database
from tests.support.jobs import new_job
from tests.support.spy import Spy
from tests.support.store import LEASE, claim, failure, knowing, new_worker

DOCS = Path(__file__).parents[2] / "docs" / "store.md"


@pytest.fixture
def spy(engine: AsyncEngine) -> Spy:
    return Spy(engine)


@pytest.fixture
async def watched(engine: AsyncEngine, spy: Spy, clock: ManualClock) -> AsyncGenerator[Backend]:
    backend = connect(engine, QueueConfig(notify=False), clock)
    await backend.open(migrate=True)
    spy.reset()
    yield backend
    await backend.close()


def check(what: str, database: Database, spy: Spy) -> None:
    """The figures of this database are in the row of that name, and count from now on anew."""
    row = next(line for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {what} |"))
    documented = dict(zip(("postgres", "sqlite"), row.split("|")[2:4], strict=True))
    counted = f"{len([sql for sql in spy.statements if sql != 'DISCARD PLANS'])} / {spy.commits}"
    assert documented[database.kind].strip() == counted, what
    spy.reset()


async def claimed(backend: Backend, batch: int) -> list[list[ClaimedJob]]:
    worker = new_worker()
    return [list(await claim(backend, worker, batch)) for _ in range(1_000 // batch)]


async def test_a_thousand_jobs_cost_what_the_documentation_says(watched: Backend, database: Database, spy: Spy) -> None:
    await watched.enqueue_many([new_job() for _ in range(1_000)])
    check("enqueue, in one bulk", database, spy)
    batches = await claimed(watched, 100)
    assert sum(map(len, batches)) == 1_000
    check("claim, 100 at a time", database, spy)
    for batch in batches[:5]:
        await watched.settle([Succeeded(job.claim) for job in batch])
    for batch in batches[5:]:
        await watched.settle([Retried(job.claim, failure(), LEASE) for job in batch])
    check("settle, 100 at a time", database, spy)


async def test_a_thousand_jobs_one_by_one_cost_what_the_documentation_says(
    watched: Backend, database: Database, spy: Spy
) -> None:
    for _ in range(1_000):
        await watched.enqueue_many([new_job()])
    check("enqueue, one after the other", database, spy)
    singles = await claimed(watched, 1)
    check("claim, one at a time", database, spy)
    for (job,) in singles:
        await watched.settle([Succeeded(job.claim)])
    check("settle, one at a time", database, spy)


async def test_an_idle_worker_costs_what_the_documentation_says(watched: Backend, database: Database, spy: Spy) -> None:
    worker = await watched.register_worker(new_worker())
    spy.reset()
    await watched.beat(worker, knowing([], []))
    check("a beat, whatever is held", database, spy)
    await claim(watched, worker)
    spy.reset()
    await claim(watched, worker)
    assert spy.commits == (0 if database.kind == "sqlite" else 1)
    spy.reset()
    await watched.next_due(["notes"])
    await watched.reap(["notes"], limit=100)
    assert (len(spy.statements), spy.commits) == (2, 0 if database.kind == "sqlite" else spy.commits)
