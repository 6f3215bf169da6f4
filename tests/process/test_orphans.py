"""Jobs of workers that were killed: taken back at once where the death can be proved, and never from a living one."""

import asyncio
import logging
import socket
import sys
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from queue_core.backend import Backend
from queue_core.config import QueueConfig
from queue_core.connect import connect
from queue_core.liveness import new_worker
from queue_core.maintenance.orphans import Orphans
from queue_core.model import JobId, Reaped
from tests.support.children import PID_NAMESPACE, Child, running, running_inside
from tests.support.databases import Database
from tests.support.jobs import new_job
from tests.support.spy import Spy
from tests.support.store import claim

NOTHING = Reaped()


@pytest.fixture
def spy(engine: AsyncEngine) -> Spy:
    return Spy(engine)


@pytest.fixture
async def store(engine: AsyncEngine, spy: Spy) -> AsyncGenerator[Backend]:
    """The seam, with the time that the children have."""
    del spy  # it sees connections that are made after it
    store = connect(engine, QueueConfig(), None)
    await store.open(migrate=True)
    yield store
    await store.close()


# The living


async def test_a_living_worker_keeps_its_jobs(store: Backend, database: Database) -> None:
    await _enqueue(store, 2)
    with _worker(database):
        assert await Orphans(store, ["notes"]).run_once() == NOTHING
        assert _jobs(database) == [("claimed", 1, 0)] * 2


async def test_a_worker_that_was_stopped_for_a_while_keeps_its_jobs(store: Backend, database: Database) -> None:
    await _enqueue(store, 2)
    with _worker(database) as child:
        child.stop()
        assert await Orphans(store, ["notes"]).run_once() == NOTHING
        assert _jobs(database) == [("claimed", 1, 0)] * 2


async def test_a_worker_takes_nothing_from_itself(store: Backend, database: Database) -> None:
    await _enqueue(store, 1)
    worker = await store.register_worker(
        new_worker(queues=["notes"], job_types=["Note"], lease=timedelta(minutes=10), version="0")
    )
    assert len(await claim(store, worker)) == 1
    assert await Orphans(store, ["notes"]).run_once() == NOTHING
    assert _jobs(database) == [("claimed", 1, 0)]


# The dead


async def test_the_jobs_of_a_killed_worker_are_pending_at_once(store: Backend, database: Database) -> None:
    ids = await _enqueue(store, 2)
    with _worker(database) as child:
        child.kill()
    assert (await Orphans(store, ["notes"]).run_once()).requeued == ids
    assert _jobs(database) == [("pending", 1, 1)] * 2
    with _worker(database):
        assert _jobs(database) == [("claimed", 2, 1)] * 2


async def test_a_worker_whose_parent_never_waits_for_it_is_dead_too(store: Backend, database: Database) -> None:
    ids = await _enqueue(store, 2)
    with _worker(database) as child:
        child.kill_without_waiting()
        assert (await Orphans(store, ["notes"]).run_once()).requeued == ids
    assert _jobs(database) == [("pending", 1, 1)] * 2


async def test_what_was_running_may_be_parked_instead(store: Backend, database: Database) -> None:
    ids = await _enqueue(store, 2)
    with _worker(database) as child:
        child.kill()
    taken = await Orphans(store, ["notes"], park=True).run_once()
    assert [job.id for job in taken.parked] == ids
    assert not taken.requeued
    assert _jobs(database) == []
    assert sorted(database.query("SELECT job_id, parked_by FROM queue_dead_jobs")) == [
        (job_id, "orphan sweep") for job_id in ids
    ]


async def test_a_job_without_attempts_left_is_parked(store: Backend, database: Database) -> None:
    (last,) = await store.enqueue_many([new_job(max_attempts=1)])
    (other,) = await _enqueue(store, 1)
    with _worker(database) as child:
        child.kill()
    taken = await Orphans(store, ["notes"]).run_once()
    assert ([job.id for job in taken.parked], taken.requeued) == ([last.job_id], [other])


async def test_a_living_worker_beside_a_dead_one_keeps_its_jobs(store: Backend, database: Database) -> None:
    dead_ones = await _enqueue(store, 2)
    with _worker(database) as dead:
        living_ones = await _enqueue(store, 2)
        with _worker(database):
            dead.kill()
            assert (await Orphans(store, ["notes"]).run_once()).requeued == dead_ones
            states = dict(database.jobs("id, status"))
    assert states == {**dict.fromkeys(dead_ones, "pending"), **dict.fromkeys(living_ones, "claimed")}


async def test_only_the_named_queues_are_touched(store: Backend, database: Database) -> None:
    notes, mails = await _enqueue(store, 2), await _enqueue(store, 2, queue="mails")
    with _worker(database) as first, _worker(database, queue="mails") as second:
        first.kill()
        second.kill()
    assert await Orphans(store, ["others"]).run_once() == NOTHING
    assert (await Orphans(store, ["mails", "others"]).run_once()).requeued == mails
    assert dict(database.jobs("id, status")) == {
        **dict.fromkeys(notes, "claimed"),
        **dict.fromkeys(mails, "pending"),
    }
    assert (await Orphans(store, ["notes"]).run_once()).requeued == notes


async def test_any_number_is_taken_back_in_rounds(store: Backend, database: Database) -> None:
    ids = await _enqueue(store, 7)
    with _worker(database, count=4) as first, _worker(database, count=3) as second:
        first.kill()
        second.kill()
    taken = await Orphans(store, ["notes"], limit=2).run_once()
    assert sorted(taken.requeued) == ids
    assert _jobs(database) == [("pending", 1, 1)] * 7


async def test_two_that_clean_up_at_once_take_each_job_once(
    store: Backend, engine: AsyncEngine, database: Database
) -> None:
    ids = await _enqueue(store, 20)
    with _worker(database, count=20) as child:
        child.kill()
    others = [connect(engine, QueueConfig(), None) for _ in range(3)]
    for other in others:
        await other.open(migrate=False)
    reports = await asyncio.gather(*(Orphans(each, ["notes"], limit=3).run_once() for each in (store, *others)))
    for other in others:
        await other.close()
    assert sorted(job_id for report in reports for job_id in report.requeued) == ids
    assert _jobs(database) == [("pending", 1, 1)] * 20


# What it says and costs


async def test_each_dead_worker_is_one_line_in_the_log(
    store: Backend, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    await _enqueue(store, 4)
    with _worker(database) as dead, _worker(database):
        dead.kill()
        await Orphans(store, ["notes"], limit=1).run_once()
        await Orphans(store, ["notes"]).run_once()
    (line,) = [each for each in caplog.records if each.name == "queue_core.maintenance.orphans"]
    assert line.levelno == logging.WARNING
    assert f"(pid {dead.pid} on {socket.gethostname()}) is dead" in line.getMessage()
    proof = "the lock on its file is free" if database.kind == "sqlite" else "its process is gone"
    assert line.getMessage().endswith(f"taken back: {proof}")


async def test_without_queues_the_database_is_not_even_asked(store: Backend, database: Database, spy: Spy) -> None:
    await _enqueue(store, 2)
    with _worker(database) as child:
        child.kill()
    spy.reset()
    assert await Orphans(store, []).run_once() == NOTHING
    assert spy.statements == []


async def test_nothing_is_written_while_everybody_lives(store: Backend, database: Database, spy: Spy) -> None:
    await _enqueue(store, 2)
    with _worker(database):
        spy.reset()
        await Orphans(store, ["notes"]).run_once()
    words = {sql.split(None, 1)[0] for sql in spy.statements}
    assert "SELECT" in words
    assert words.isdisjoint({"INSERT", "UPDATE", "DELETE", "WITH"})


# Another container


@pytest.mark.sqlite_only("the lock on a file beside the database is seen from any pid namespace")
async def test_a_worker_killed_in_another_container_is_known_by_its_lock(store: Backend, database: Database) -> None:
    ids = await _enqueue(store, 2)
    with running_inside(PID_NAMESPACE, *_command(database)) as child:
        assert child.says() == "ready"
        assert await Orphans(store, ["notes"]).run_once() == NOTHING
        child.kill()
    assert (await Orphans(store, ["notes"]).run_once()).requeued == ids
    assert _jobs(database) == [("pending", 1, 1)] * 2


@pytest.mark.postgres_only("there is no file to hold a lock on")
async def test_a_worker_killed_in_another_container_is_left_to_its_lease(store: Backend, database: Database) -> None:
    await _enqueue(store, 2)
    with running_inside(PID_NAMESPACE, *_command(database)) as child:
        assert child.says() == "ready"
        child.kill()
    assert await Orphans(store, ["notes"]).run_once() == NOTHING
    assert _jobs(database) == [("claimed", 1, 0)] * 2


# Helpers


async def _enqueue(store: Backend, count: int, *, queue: str = "notes") -> Sequence[JobId]:
    return [each.job_id for each in await store.enqueue_many([new_job(queue=queue) for _ in range(count)])]


def _jobs(database: Database) -> Sequence[tuple[str, int, int]]:
    return [(status, attempt, crashes) for status, attempt, crashes in database.jobs("status, attempt, crashes")]


@contextmanager
def _worker(database: Database, *, queue: str = "notes", count: int = 2) -> Generator[Child]:
    """A process that has claimed so many jobs, and would keep them for minutes."""
    with running(*_command(database, queue=queue, count=count)) as child:
        assert child.says() == "ready"
        yield child


def _command(database: Database, *, queue: str = "notes", count: int = 2) -> Sequence[str]:
    return [sys.executable, "-c", _CLAIM, database.url, queue, str(count)]


_CLAIM = """
import asyncio, sys
from datetime import timedelta
from sqlalchemy.ext.asyncio import create_async_engine
from queue_core.config import QueueConfig
from queue_core.connect import connect
from queue_core.ids import time_ordered_uuid
from queue_core.liveness import new_worker

async def main(url, queue, count):
    store = connect(create_async_engine(url), QueueConfig(), None)
    await store.open(migrate=False)
    worker = await store.register_worker(
        new_worker(queues=[queue], job_types=["Note"], lease=timedelta(minutes=10), version="0")
    )
    claimed = await store.claim(worker, time_ordered_uuid(), {queue: count}, ["Note"])
    assert len(claimed.jobs) == count, claimed
    print("ready", flush=True)
    sys.stdin.read()

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""
