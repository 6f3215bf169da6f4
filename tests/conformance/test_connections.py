"""The queue's own connections: made like the application's, but never shared with it."""

import asyncio
from typing import Any

import pytest
from sqlalchemy import NullPool, event, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from queue_core import BackendError, Queue
from tests.support.databases import Database
from tests.support.jobs import Note
from tests.support.spy import Spy

POOLS: dict[str, dict[str, Any]] = {
    "none": {"poolclass": NullPool},
    "one": {"pool_size": 1, "max_overflow": 0, "pool_timeout": 60},
    "checked": {"pool_pre_ping": True, "pool_recycle": 1},
}


@pytest.mark.parametrize("pool", POOLS)
async def test_any_pool_of_the_application_will_do(database: Database, pool: str) -> None:
    engine = create_async_engine(database.url, **POOLS[pool])
    async with Queue(engine, jobs=[Note]) as queue:
        await asyncio.gather(*(queue.enqueue(Note(), key=f"{n}" if n % 2 else None) for n in range(20)))
        await asyncio.gather(
            *(queue.enqueue_many([Note(), Note()]) for _ in range(10)), *(queue.counts() for _ in "abc")
        )
    await engine.dispose()
    assert database.count() == 40


async def test_an_exhausted_pool_of_the_application_does_not_stop_the_queue(database: Database) -> None:
    engine = create_async_engine(database.url, pool_size=1, max_overflow=0, pool_timeout=60)
    async with Queue(engine, jobs=[Note]) as queue, engine.connect() as connection:
        await connection.execute(text("SELECT 1"))
        await asyncio.wait_for(queue.enqueue(Note(), key="k"), 30)
        await asyncio.wait_for(queue.counts(), 30)
    await engine.dispose()
    assert database.count() == 1


async def test_our_connections_are_made_as_the_application_says(database: Database) -> None:
    """A `connect` event sets passwords, keys and search paths: ours go through it as well."""
    engine = create_async_engine(database.url)
    made: list[object] = []

    @event.listens_for(engine.sync_engine, "connect")
    def count(connection: object, _record: object) -> None:
        made.append(connection)

    async with Queue(engine, jobs=[Note]) as queue:
        await queue.enqueue(Note())
        ours = len(made)
        assert ours >= 1
    async with engine.connect():
        assert len(made) == ours + 1
    await engine.dispose()


async def test_after_an_error_the_connection_has_no_open_transaction(engine: AsyncEngine, database: Database) -> None:
    """The second statement of a bulk is refused by a rule of the application's: the first one's rows are gone."""
    if database.kind == "sqlite":
        refuse = (
            "CREATE TRIGGER refuse BEFORE INSERT ON queue_jobs WHEN new.tenant = '13'"
            " BEGIN SELECT RAISE(ABORT, 'no'); END"
        )
        allow = "DROP TRIGGER refuse"
    else:
        refuse = "ALTER TABLE queue_jobs ADD CONSTRAINT refuse CHECK (tenant <> '13')"
        allow = "ALTER TABLE queue_jobs DROP CONSTRAINT refuse"
    async with Queue(engine, jobs=[Note]) as queue:
        database.query(refuse)
        for _ in range(8):
            with pytest.raises(BackendError, match="the database refused"):
                await queue.enqueue_many([Note(), Note().with_delivery(key="k", key_mode="replace", tenant="13")])
        assert database.count() == 0
        # Another writer gets in at once, and takes away what refused.
        database.query(allow)
        await queue.enqueue_many([Note(), Note().with_delivery(key="k", key_mode="replace", tenant="13")])
    assert database.count() == 2


@pytest.mark.sqlite_only("Postgres has no lock that a caller could hold against itself")
async def test_inside_a_transaction_that_has_only_read_an_enqueue_is_still_one_statement(engine: AsyncEngine) -> None:
    spy = Spy(engine)
    async with Queue(engine, jobs=[Note]) as queue, engine.connect() as connection:
        await queue.enqueue(Note())
        await connection.execute(text("SELECT count(*) FROM queue_jobs"))
        spy.reset()
        await queue.enqueue(Note())
        assert len(spy.statements) == 1
        await connection.rollback()
