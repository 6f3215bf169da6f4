"""How SQLite finds what each statement of the hot path is about, by its own account.

In a table with 50,000 jobs of two queues, 100,000 scheduled ones and 100,000 of types that no worker here has;
with the statistics of a table that was nearly empty, with fresh ones, and with none.
"""

import sqlite3
from collections.abc import Generator, Iterator
from contextlib import closing
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine

from queue_core.clock import SystemClock
from queue_core.model import Claim, JobId, NewJob
from tests.support.jobs import new_job
from tests.support.store import failure, new_token, new_worker

WORKER = new_worker(queues=["a", "b"], job_types=["Note", "Other"])
TOKEN = new_token()
FILLING = """
WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < :count)
INSERT INTO queue_jobs (
    request_id, queue, job_type, status, priority, max_attempts, available_at, created_at, payload, worker_id,
    claim_token, claimed_at, attempt
)
SELECT hex(randomblob(16)), CASE WHEN n % 2 = 0 THEN 'a' ELSE 'b' END, :job_type, :status, n % 3, 5, n, 0, '{}',
       :worker, :token, 0, 0
FROM numbers
"""


def fill(
    connection: sqlite3.Connection,
    count: int,
    *,
    status: str = "pending",
    job_type: str = "Note",
    worker: str | None = None,
    token: str | None = None,
) -> None:
    values = {"count": count, "status": status, "job_type": job_type, "worker": worker, "token": token}
    connection.execute(FILLING, values)


@pytest.fixture(scope="module", params=["old statistics", "fresh statistics", "no statistics"])
def full(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator[sqlite3.Connection]:
    path = tmp_path_factory.mktemp("plans") / "jobs.db"
    with closing(made(path)) as connection:
        fill(connection, 1)
        if request.param == "old statistics":
            connection.execute("ANALYZE")
        fill(connection, 50_000)
        fill(connection, 100_000, status="scheduled")
        fill(connection, 100_000, job_type="Unknown")
        fill(connection, 50, status="claimed", worker=WORKER.id, token=TOKEN)
        if request.param == "fresh statistics":
            connection.execute("ANALYZE")
        yield connection


def made(path: Path) -> sqlite3.Connection:
    engine = create_engine(f"sqlite:///{path}")
    import_module("queue_core.backends.tables").build_tables().metadata.create_all(engine)
    engine.dispose()
    return sqlite3.connect(path, isolation_level=None)


def calls() -> Iterator[tuple[str, Any]]:
    """Every call of the hot path and of what runs all the time."""
    clock = SystemClock()
    enqueue_sql: Any = import_module("queue_core.backends.sqlite_enqueue").SqliteEnqueue(clock)
    claim_sql: Any = import_module("queue_core.backends.sqlite_claim").SqliteClaim(clock, True)
    settle_sql: Any = import_module("queue_core.backends.sqlite_settle").SqliteSettle(clock, True)
    upkeep_sql: Any = import_module("queue_core.backends.sqlite_upkeep").SqliteUpkeep(clock, True)
    settlement: Any = import_module("queue_core.backends.settlement")
    record: Any = import_module("queue_core.failures").record
    held = [Claim(JobId(number), TOKEN) for number in range(1, 51)]
    second = timedelta(seconds=1)
    jobs: list[NewJob] = [new_job()]
    claiming = claim_sql.claim(WORKER, TOKEN, {"a": 50, "b": 50}, ["Note", "Other"])
    ended = [settlement.Ended(claim, True, None, None) for claim in held]
    parking = settle_sql.park([settlement.DeadLetter(claim, "why", "worker", record(failure())) for claim in held])
    ending = settle_sql.end(ended)
    yield "enqueue", enqueue_sql.insert_jobs("keep", jobs, None)
    yield "find a key", enqueue_sql.find_jobs([jobs[0].request_id], ["k"])
    yield "renew", next(claiming)
    yield "claim", claiming.send([])
    yield "is anything pending", claim_sql.is_anything_pending({"a": 1}, ["Note"])
    yield "find claimed", next(claim_sql.find_claimed(WORKER.id, TOKEN))
    yield "give back", claim_sql.give_back(WORKER.id, TOKEN)
    yield "extend", claim_sql.extend(held, second)
    yield "renew lease", claim_sql.renew_lease(WORKER)
    yield "find mine", claim_sql.find_mine(WORKER.id)
    yield "release unknown", claim_sql.release(held)
    yield "next due", claim_sql.next_due(["a", "b", "c"])
    yield "keep", next(ending)
    yield "end", ending.send([])
    yield "clear", ending.send([(1, "k")])
    yield "go again", next(settle_sql.go_again([settlement.Again(claim, second, 0, 0, "{}") for claim in held]))
    yield "park", next(parking)
    yield "remove parked", parking.send([(1,)])
    yield "promote", upkeep_sql.promote(["a", "b"], 50)
    yield "is abandoned", upkeep_sql.is_abandoned(["a", "b"])
    yield "lock silent", upkeep_sql.lock_silent(["a", "b"], 50)
    yield "lock abandoned", upkeep_sql.lock_abandoned(["a", "b"], [WORKER.id], 50, only_theirs=False)


CALLS = dict(calls())
SMALL = (
    "VIRTUAL TABLE",
    "CONSTANT ROW",
    "SCAN ranked",
    "SCAN (subquery",
    "SCAN workers",
    # A partial index of what is running, in all.
    "USING INDEX queue_jobs_claimed",
)


@pytest.mark.parametrize("name", CALLS)
def test_a_statement_scans_no_table_that_may_be_long(full: sqlite3.Connection, name: str) -> None:
    call = CALLS[name]
    arguments = call.statement.arguments(call.parameters)
    plan = [row[3] for row in full.execute(f"EXPLAIN QUERY PLAN {call.statement.driver_sql}", arguments)]
    long = [line for line in plan if line.startswith("SCAN") and not any(small in line for small in SMALL)]
    assert not long, "\n".join(plan)


def test_a_claim_goes_by_the_index_of_pending_jobs(full: sqlite3.Connection) -> None:
    call = CALLS["claim"]
    arguments = call.statement.arguments(call.parameters)
    plan = [row[3] for row in full.execute(f"EXPLAIN QUERY PLAN {call.statement.driver_sql}", arguments)]
    assert "SEARCH front USING INDEX queue_jobs_pending (queue=? AND job_type=?)" in [
        line.replace("COVERING ", "") for line in plan
    ]
    # The best of what each queue and type has in front are sorted, which are few; never the jobs themselves.
    assert [line for line in plan if "TEMP B-TREE" in line] == ["USE TEMP B-TREE FOR ORDER BY"]
