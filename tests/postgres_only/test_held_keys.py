"""A key that somebody's open transaction holds: its enqueue waits, its neighbours do not."""

import asyncio
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from queue_core import BackendUnavailable, EnqueueStatus, KeyLocked, Queue
from tests.support.databases import PostgresDatabase
from tests.support.jobs import Note

pytestmark = pytest.mark.postgres_only("SQLite has one lock for all writers, not one for each key")


def hold(database: PostgresDatabase, key: str) -> Any:
    """An open transaction that has enqueued this key and not ended."""
    holder = database.connect()
    holder.execute(
        "INSERT INTO queue_jobs (request_id, queue, job_type, status, priority, max_attempts, available_at, created_at,"
        " payload, unique_key) VALUES (gen_random_uuid(), 'x', 'Note', 'pending', 0, 1, now(), now(), '{}', %s)",
        [f'["type","Note","{key}"]'],
    )
    return holder


async def test_neighbours_are_written_while_a_key_is_held(queue: Queue, database: PostgresDatabase) -> None:
    holder = hold(database, "held")
    stuck = [asyncio.create_task(queue.enqueue(Note(text="stuck"), key="held")) for _ in range(3)]
    neighbours = await asyncio.wait_for(
        asyncio.gather(*(queue.enqueue(Note(), key=f"k{number}") for number in range(50)), queue.enqueue(Note())), 30
    )
    assert {answer.status for answer in neighbours} == {EnqueueStatus.INSERTED}
    # The lane is free again: who comes later does not wait for the held key either.
    assert (await queue.enqueue(Note(), key="later")).status is EnqueueStatus.INSERTED
    assert not any(task.done() for task in stuck)
    holder.rollback()
    holder.close()
    answers = await asyncio.gather(*stuck)
    assert sorted(answer.status for answer in answers) == ["duplicate", "duplicate", "inserted"]
    assert (await queue.enqueue(Note(), key="held")).status is EnqueueStatus.DUPLICATE
    assert database.count() == 53


async def test_when_the_holder_commits_the_waiting_enqueue_is_a_duplicate(
    queue: Queue, database: PostgresDatabase
) -> None:
    holder = hold(database, "held")
    stuck = asyncio.create_task(queue.enqueue(Note(), key="held"))
    await queue.enqueue(Note(), key="neighbour")
    holder.commit()
    holder.close()
    assert (await stuck).status is EnqueueStatus.DUPLICATE


async def test_a_key_that_is_held_too_long_is_an_error_that_says_so(
    engine: AsyncEngine, database: PostgresDatabase
) -> None:
    holder = hold(database, "held")
    async with Queue(engine, jobs=[Note], give_up_after=0.3, key_patience=0.05) as queue:
        with pytest.raises(KeyLocked, match="holds the same unique key and has not ended"):
            await queue.enqueue(Note(), key="held")
        with pytest.raises(KeyLocked):
            await queue.enqueue_many([Note(), Note().with_delivery(key="held")])
        assert database.count() == 0
        holder.rollback()
        holder.close()
        assert (await queue.enqueue(Note(), key="held")).status is EnqueueStatus.INSERTED


async def test_the_newest_replace_of_a_held_key_wins(queue: Queue, database: PostgresDatabase) -> None:
    for number in range(5):
        key = f"held {number}"
        holder = hold(database, key)
        old = asyncio.create_task(queue.enqueue(Note(text="old"), key=key, key_mode="replace"))
        await queue.enqueue(Note(), key=f"neighbour {number}")
        new = asyncio.create_task(queue.enqueue(Note(text="new"), key=key, key_mode="replace"))
        await queue.enqueue(Note(), key=f"another {number}")
        holder.commit()
        holder.close()
        await asyncio.gather(old, new)
        assert database.query("SELECT payload FROM queue_jobs WHERE unique_key LIKE ?", f"%{key}%") == [
            ('{"text":"new"}',)
        ]


async def test_in_the_callers_transaction_the_wait_for_a_key_is_bounded_too(
    engine: AsyncEngine, database: PostgresDatabase
) -> None:
    holder = hold(database, "held")
    async with Queue(engine, jobs=[Note], give_up_after=0.2) as queue, engine.connect() as connection:
        with pytest.raises(KeyLocked, match="has not ended"):
            await queue.enqueue(Note(), key="held", connection=connection)
        await connection.rollback()
        holder.rollback()
        holder.close()
        await queue.enqueue(Note(), key="held", connection=connection)
        assert (await connection.execute(text("SHOW lock_timeout"))).scalar_one() == "0"
        await connection.commit()
    assert database.count() == 1


@pytest.mark.parametrize("key", [None, "k"])
async def test_a_locked_table_is_an_error_for_everyone_that_says_so(
    database: PostgresDatabase, key: str | None
) -> None:
    """With a lock timeout of the application's own, and without: nobody waits for ever."""
    for settings in ({}, {"lock_timeout": "50"}):
        engine = create_async_engine(database.url, connect_args={"server_settings": settings})
        async with Queue(engine, jobs=[Note], give_up_after=0.3) as queue:
            await queue.enqueue(Note())
            holder = database.connect()
            holder.execute("LOCK TABLE queue_jobs")
            calls = [queue.enqueue(Note(), key=key) for _ in range(3)]
            errors = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(error, BackendUnavailable) for error in errors), errors
            holder.rollback()
            holder.close()
            assert await queue.enqueue(Note(), key=key)
        await engine.dispose()


async def test_the_callers_own_lock_timeout_is_left_alone(queue: Queue, engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await connection.execute(text("SET LOCAL lock_timeout = '1234ms'"))
        await queue.enqueue(Note(), connection=connection, key="k")
        assert (await connection.execute(text("SHOW lock_timeout"))).scalar_one() == "1234ms"


async def test_our_lock_timeout_stays_in_our_statement(queue: Queue, database: PostgresDatabase) -> None:
    opened: Any = queue
    await queue.enqueue(Note(), key="k")
    async with opened._backend._driver(asyncio.get_running_loop().time() + 10) as driver:
        assert await driver.fetchval("SHOW lock_timeout") == "0"
