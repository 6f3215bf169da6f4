"""What each statement of the hot path reads, by Postgres's own account, in a table that is full of other things.

Two queues with 50,000 jobs, 100,000 scheduled ones and 100,000 of types that no worker here has, which are
older and more urgent. Read with statistics from when the table was nearly empty, which is a queue's normal
life, and with fresh ones; with plans for the values at hand, and with the plan that a prepared statement keeps.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from importlib import import_module
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from queue_core.config import QueueConfig
from queue_core.connect import connect
from queue_core.model import Claim, JobId
from tests.support.databases import PostgresDatabase
from tests.support.jobs import new_job
from tests.support.spy import Spy
from tests.support.store import failure, new_token, new_worker

pytestmark = pytest.mark.postgres_only("EXPLAIN")

WORKER = new_worker(queues=["a", "b"], job_types=["Note", "Other"])
TOKEN = new_token()
ROOM = 50
FILLING = """
INSERT INTO queue_jobs (
    request_id, queue, job_type, status, priority, max_attempts, available_at, created_at, payload, worker_id,
    claim_token, claimed_at, attempt
)
SELECT gen_random_uuid(), CASE WHEN n % 2 = 0 THEN 'a' ELSE 'b' END, {job_type}, '{status}', {priority}, 5,
       now() + {after}, now(), '{{}}', {worker}, {token}, {claimed_at}, {attempt}
FROM generate_series(1, {count}) AS n
"""
EMPTY = {
    "job_type": "'Note'",
    "status": "pending",
    "priority": "n % 3",
    "after": "interval '0'",
    "worker": "NULL",
    "token": "NULL",
    "claimed_at": "NULL",
    "attempt": "0",
    "count": 1,
}
HELD = {
    **EMPTY,
    "status": "claimed",
    "worker": f"'{WORKER.id}'",
    "token": f"'{TOKEN}'",
    "claimed_at": "now()",
    "attempt": "1",
    "count": ROOM,
}


def fill(connection: "psycopg.Connection[Any]", **changes: object) -> None:
    connection.execute(FILLING.format(**{**EMPTY, **changes}).encode())


@contextmanager
def nearly_empty(database: PostgresDatabase) -> Generator["psycopg.Connection[Any]"]:
    """A connection to a database with one job, which nobody looks after by itself."""
    engine = create_engine(database.sync_url)
    import_module("queue_core.backends.tables").build_tables().metadata.create_all(engine)
    engine.dispose()
    with closing(database.connect()) as connection:
        connection.autocommit = True
        connection.execute("ALTER TABLE queue_jobs SET (autovacuum_enabled = false)")
        fill(connection)
        connection.execute("ANALYZE")
        yield connection


@pytest.fixture(scope="module", params=["old statistics", "fresh statistics"])
def full(
    request: pytest.FixtureRequest, new_postgres: Callable[[], PostgresDatabase]
) -> Generator["psycopg.Connection[Any]"]:
    with nearly_empty(new_postgres()) as connection:
        fill_up(connection)
        if request.param == "fresh statistics":
            connection.execute("ANALYZE")
        yield connection


def fill_up(connection: "psycopg.Connection[Any]") -> None:
    fill(connection, count=50_000, job_type="CASE WHEN n % 5 = 0 THEN 'Other' ELSE 'Note' END")
    fill(connection, count=100_000, status="scheduled", after="n * interval '1 second' - interval '100 s'")
    fill(connection, count=100_000, job_type="'Unknown' || n % 7", priority="100", after="interval '-1 day'")
    fill(connection, **HELD)


def calls() -> Iterator[tuple[str, Any]]:
    """Every call of the hot path and of what runs all the time."""
    tables = import_module("queue_core.backends.tables").build_tables()
    claim_sql: Any = import_module("queue_core.backends.postgres_claim").PostgresClaim(tables, None, False)
    settle_sql: Any = import_module("queue_core.backends.postgres_settle").PostgresSettle(tables, None, False)
    upkeep_sql: Any = import_module("queue_core.backends.postgres_upkeep").PostgresUpkeep(tables, None, False)
    settlement: Any = import_module("queue_core.backends.settlement")
    held = [Claim(JobId(250_001 + number), TOKEN) for number in range(1, ROOM + 1)]
    record: Any = import_module("queue_core.failures").record
    second = timedelta(seconds=1)
    yield "claim", next(claim_sql.claim(WORKER, new_token(), {"a": ROOM, "b": ROOM}, ["Note", "Other", "Third"]))
    yield "claim of one type", next(claim_sql.claim(WORKER, new_token(), {"a": ROOM}, ["Note"]))
    yield "find claimed", next(claim_sql.find_claimed(WORKER.id, TOKEN))
    yield "give back", claim_sql.give_back(WORKER.id, TOKEN)
    yield "extend", claim_sql.extend(held, second)
    yield "find mine", claim_sql.find_mine(WORKER.id)
    yield "release unknown", claim_sql.release(held)
    yield "next due", claim_sql.next_due(["a", "b", "c"])
    yield "end", next(settle_sql.end([settlement.Ended(claim, True, None, None) for claim in held]))
    yield "go again", next(settle_sql.go_again([settlement.Again(claim, second, 0, 0, "{}") for claim in held]))
    letters = [settlement.DeadLetter(claim, "why", "worker", record(failure())) for claim in held]
    yield "park", next(settle_sql.park(letters))
    yield "promote", upkeep_sql.promote(["a", "b"], ROOM)
    yield "is abandoned", upkeep_sql.is_abandoned(["a", "b"])
    yield "lock silent", upkeep_sql.lock_silent(["a", "b"], ROOM)
    yield "lock abandoned", upkeep_sql.lock_abandoned(["a", "b"], [WORKER.id], ROOM, only_theirs=False)
    yield "cancel", next(upkeep_sql.cancel(held[0].job_id))


CALLS = dict(calls())


def prepare(connection: "psycopg.Connection[Any]", call: Any, *, generic: bool) -> None:
    """asyncpg's $1 is also what PREPARE takes."""
    mode = "force_generic_plan" if generic else "force_custom_plan"
    connection.execute(f"SET plan_cache_mode = {mode}".encode())
    connection.execute(f"PREPARE it AS {call.statement.driver_sql}".encode())


def explain_prepared(connection: "psycopg.Connection[Any]", call: Any) -> dict[str, Any]:
    """The plan, carried out and undone."""
    arguments = call.statement.arguments(call.parameters)
    with psycopg.ClientCursor(connection) as cursor, connection.transaction(force_rollback=True):
        values = cursor.mogrify(", ".join(["%s"] * len(arguments)).encode(), arguments)
        cursor.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) EXECUTE it({values})".encode())
        (row,) = cursor.fetchall()
    plan: dict[str, Any] = row[0][0]["Plan"]
    return plan


def explain(connection: "psycopg.Connection[Any]", call: Any, *, generic: bool) -> dict[str, Any]:
    prepare(connection, call, generic=generic)
    try:
        return explain_prepared(connection, call)
    finally:
        connection.execute("DEALLOCATE it")


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


def rows_read(plan: dict[str, Any]) -> float:
    """How many rows of the jobs were looked at, those that were passed over included."""
    return sum(
        float(node["Actual Loops"]) * float(node["Actual Rows"] + node.get("Rows Removed by Filter", 0))
        for node in nodes(plan)
        if "Scan" in node["Node Type"] and node.get("Relation Name") == "queue_jobs"
    )


@pytest.mark.parametrize("generic", [False, True], ids=["custom plan", "generic plan"])
@pytest.mark.parametrize("name", CALLS)
def test_a_statement_reads_no_more_jobs_than_it_is_about(
    full: "psycopg.Connection[Any]", name: str, generic: bool
) -> None:
    plan = explain(full, CALLS[name], generic=generic)
    scans = [node for node in nodes(plan) if node.get("Relation Name") == "queue_jobs"]
    assert scans, "the statement has nothing to do with jobs"
    assert "Seq Scan" not in {node["Node Type"] for node in scans}
    # A claim looks twice at the front of each of two queues and three types, and once at what it takes.
    assert rows_read(plan) <= 10 * ROOM


@pytest.mark.parametrize("name", ["claim", "claim of one type"])
def test_a_claim_goes_by_the_index_of_pending_jobs(full: "psycopg.Connection[Any]", name: str) -> None:
    plan = explain(full, CALLS[name], generic=True)
    indexes = {node.get("Index Name") for node in nodes(plan) if "Index" in node["Node Type"]}
    assert {"queue_jobs_pending", "queue_jobs_pkey"} <= indexes
    assert "Sort" not in {node["Node Type"] for node in nodes(plan) if node.get("Relation Name") == "queue_jobs"}


@pytest.mark.parametrize("name", ["claim", "end"])
def test_a_plan_kept_from_when_the_queue_was_empty_is_good_again_once_it_is_discarded(
    new_postgres: Callable[[], PostgresDatabase], name: str
) -> None:
    with nearly_empty(new_postgres()) as connection:
        prepare(connection, CALLS[name], generic=True)
        explain_prepared(connection, CALLS[name])
        fill_up(connection)
        kept = rows_read(explain_prepared(connection, CALLS[name]))
        connection.execute("DISCARD PLANS")
        assert rows_read(explain_prepared(connection, CALLS[name])) <= 10 * ROOM < kept


async def test_a_connection_has_its_plans_discarded_from_time_to_time(
    database: PostgresDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("queue_core.backends.postgres._PLAN_AGE", 0.0)
    engine = create_async_engine(database.url)
    spy = Spy(engine)
    backend = connect(engine, QueueConfig(notify=False), None)
    await backend.open(migrate=True)
    for _ in range(2):
        await backend.claim(WORKER, new_token(), {"a": 1}, ["Note"])
    await backend.close()
    await engine.dispose()
    assert "DISCARD PLANS" in spy.statements


@pytest.mark.parametrize("analysed_at", [0, 1, 20])
async def test_a_claim_takes_exactly_what_it_asks_for_whatever_the_planner_believes(
    new_postgres: Callable[[], PostgresDatabase], analysed_at: int
) -> None:
    """A LIMIT that the planner carries out once for each row of a join takes as many jobs as there are rows."""
    database = new_postgres()
    engine = create_async_engine(database.url)
    backend = connect(engine, QueueConfig(notify=False), None)
    await backend.open(migrate=True)
    database.query("ALTER TABLE queue_jobs SET (autovacuum_enabled = false)")
    await backend.enqueue_many([new_job() for _ in range(analysed_at)])
    database.query("ANALYZE")
    await backend.enqueue_many([new_job() for _ in range(40)])
    # More often than it takes for a prepared statement to keep its plan.
    taken = [len((await backend.claim(WORKER, new_token(), {"notes": 1}, ["Note", "Other"])).jobs) for _ in range(8)]
    await backend.close()
    await engine.dispose()
    assert taken == [1] * 8
    assert database.query("SELECT count(*) FROM queue_jobs WHERE status = 'claimed'") == [(8,)]
