"""A caller that is cancelled breaks nothing: its write is carried through, and the connection stays clean."""

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable
from contextlib import asynccontextmanager
from typing import Any, Literal

import anyio
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from queue_core import EnqueueStatus, Queue
from tests.support.databases import Database
from tests.support.jobs import Note

Way = Literal["native", "anyio"]


@asynccontextmanager
async def held_up(database: Database, key: str) -> AsyncGenerator[Any]:
    """Somebody's open transaction that an enqueue of this key has to wait for."""
    holder = database.connect()
    columns = (
        "request_id, queue, job_type, status, priority, max_attempts, available_at, created_at, payload, unique_key"
    )
    now = "0" if database.kind == "sqlite" else "now()"
    request = "'00000000-0000-7000-8000-000000000000'"
    holder.execute(
        f"INSERT INTO queue_jobs ({columns})"
        f" VALUES ({request}, 'x', 'x', 'pending', 0, 1, {now}, {now}, '', '[\"type\",\"Note\",\"{key}\"]')"
    )
    try:
        yield holder
    finally:
        holder.close()


class Call:
    """A call in a task of its own, which can be cancelled in either way."""

    def __init__(self, way: Way, call: Awaitable[object]) -> None:
        self._way = way
        self._scope = anyio.CancelScope()
        self.task = asyncio.create_task(self._run(call))

    async def _run(self, call: Awaitable[object]) -> None:
        with self._scope:
            await call

    def cancel(self) -> None:
        if self._way == "native":
            self.task.cancel()
        else:
            self._scope.cancel()

    async def end(self) -> None:
        await asyncio.gather(self.task, return_exceptions=True)


async def is_waiting(database: Database) -> None:
    """Until the enqueue has been sent, and waits in the database for the transaction that is in its way."""
    for _ in range(2_000):
        await asyncio.sleep(0.001)
        if database.kind == "sqlite":
            if any(task.get_name().startswith("queue-core enqueue") for task in asyncio.all_tasks()):
                return
        elif database.query("SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%INSERT%'"):
            return
    raise AssertionError("the enqueue never came to wait")


async def let_it_be_felt() -> None:
    """Enough turns of the loop for a cancellation to reach whatever it can reach."""
    for _ in range(50):
        await asyncio.sleep(0)


@pytest.mark.parametrize("way", ["native", "anyio"])
async def test_a_bulk_that_was_sent_outlasts_its_cancellation(queue: Queue, database: Database, way: Way) -> None:
    async with held_up(database, "k") as holder:
        call = Call(way, queue.enqueue_many([Note(text="kept").with_delivery(key="k")]))
        await is_waiting(database)
        call.cancel()
        await let_it_be_felt()
        assert not call.task.done(), "the caller went away, and nobody knows what became of the write"
        holder.rollback()
        await call.end()
    assert database.jobs("payload") == [('{"text":"kept"}',)]
    await queue.enqueue(Note())


@pytest.mark.parametrize("way", ["native", "anyio"])
async def test_a_single_enqueue_that_was_sent_is_written_without_its_caller(
    queue: Queue, database: Database, way: Way
) -> None:
    async with held_up(database, "k") as holder:
        call = Call(way, queue.enqueue(Note(text="kept"), key="k"))
        await is_waiting(database)
        call.cancel()
        await call.end()
        holder.rollback()
    assert (await queue.enqueue(Note(text="later"), key="k")).status is EnqueueStatus.DUPLICATE
    assert database.jobs("payload") == [('{"text":"kept"}',)]


@pytest.mark.parametrize("way", ["native", "anyio"])
async def test_cancelling_at_any_moment_leaves_no_lock_and_no_half_of_a_bulk(
    queue: Queue, engine: AsyncEngine, database: Database, way: Way
) -> None:
    generator = random.Random(20261118)
    for number in range(100):
        jobs = [Note().with_delivery(key=f"{number} {place}", key_mode=mode) for place, mode in enumerate(MODES)]
        call = Call(way, queue.enqueue_many(jobs))
        await asyncio.sleep(generator.random() * 0.004)
        call.cancel()
        await call.end()
        # A lock that was left behind would stop this until the garbage collector runs.
        database.query("DELETE FROM queue_jobs WHERE queue = 'nobody'")
        assert database.count() % len(MODES) == 0
    async with AsyncSession(engine) as session, session.begin():
        await queue.enqueue(Note(), session=session)


MODES: list[Any] = ["keep", "replace", "preserve_run_at"]
