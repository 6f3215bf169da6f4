"""A caller that is cancelled breaks nothing: its write is carried through, and the connection stays clean."""

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal

import anyio
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from queue_core import Queue
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


async def cancelled(way: Way, call: Awaitable[object], once: Callable[[], Awaitable[None]]) -> None:
    """Run the call, cancel it when `once` has returned, and wait for its end."""
    if way == "native":
        task = asyncio.ensure_future(call)
        await once()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    else:
        async with anyio.create_task_group() as group:

            async def run() -> None:
                await call

            group.start_soon(run)
            await once()
            group.cancel_scope.cancel()


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


@pytest.mark.parametrize("way", ["native", "anyio"])
@pytest.mark.parametrize("bulk", [False, True], ids=["single", "bulk"])
async def test_a_write_that_was_sent_is_carried_through(queue: Queue, database: Database, way: Way, bulk: bool) -> None:
    request = Note(text="kept").with_delivery(key="k")
    call = queue.enqueue_many([request]) if bulk else queue.enqueue(Note(text="kept"), key="k")
    async with held_up(database, "k") as holder:

        async def once_it_waits() -> None:
            await is_waiting(database)
            # A moment after the cancellation, which a carried-through write outlasts.
            asyncio.get_running_loop().call_later(0.05, holder.rollback)

        await cancelled(way, call, once_it_waits)
    for _ in range(2_000):
        if database.count():
            break
        await asyncio.sleep(0.001)
    assert database.jobs("payload") == [('{"text":"kept"}',)]
    await queue.enqueue(Note())


@pytest.mark.parametrize("way", ["native", "anyio"])
async def test_cancelling_at_any_moment_leaves_no_lock_and_no_half_of_a_bulk(
    queue: Queue, engine: AsyncEngine, database: Database, way: Way
) -> None:
    generator = random.Random(20261118)
    for number in range(100):
        delay = generator.random() * 0.004

        async def once(wait: float = delay) -> None:
            await asyncio.sleep(wait)

        jobs = [Note().with_delivery(key=f"{number} {place}", key_mode=mode) for place, mode in enumerate(MODES)]
        await cancelled(way, queue.enqueue_many(jobs), once)
        # A lock that was left behind would stop this until the garbage collector runs.
        observer = database.connect()
        observer.execute("DELETE FROM queue_jobs WHERE queue = 'nobody'")
        observer.commit()
        observer.close()
        assert database.count() % len(MODES) == 0
    async with AsyncSession(engine) as session, session.begin():
        await queue.enqueue(Note(), session=session)


MODES: list[Any] = ["keep", "replace", "preserve_run_at"]
