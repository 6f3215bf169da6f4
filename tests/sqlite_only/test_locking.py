"""SQLite's one write lock: who has it, from when, and what a caller hears who would wait for itself."""

import asyncio
import stat
from typing import Any, Literal

import pytest
from sqlalchemy import Connection, event, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from queue_core import BackendUnavailable, Queue, TransactionOpen
from queue_core.backend import Backend
from tests.support.databases import SqliteDatabase
from tests.support.jobs import Note, new_job
from tests.support.spy import Spy

pytestmark = pytest.mark.sqlite_only("row locks: Postgres has them, SQLite has one lock for all")


async def test_a_write_transaction_has_the_lock_from_its_first_moment(
    engine: AsyncEngine, database: SqliteDatabase
) -> None:
    """Begun deferred, the first read would fix a snapshot that a later write can't be made from."""
    spy = Spy(engine)
    async with Queue(engine, jobs=[Note]) as queue:
        spy.reset()
        await queue.enqueue_many([Note().with_delivery(key="a"), Note().with_delivery(key="b", key_mode="replace")])
        begins = [statement for statement in spy.statements if statement.startswith("BEGIN")]
    assert begins == ["BEGIN IMMEDIATE"]


async def test_the_schema_transaction_has_the_lock_from_its_first_moment(
    engine: AsyncEngine, database: SqliteDatabase
) -> None:
    spy = Spy(engine)
    async with Queue(engine):
        writes = [sql for sql in spy.statements if sql.strip().startswith(("BEGIN IMMEDIATE", "CREATE TABLE"))]
    assert writes[0] == "BEGIN IMMEDIATE"
    assert len(writes) > 1


async def test_the_error_inside_ones_own_transaction_names_session(
    queue: Queue, engine: AsyncEngine, database: SqliteDatabase
) -> None:
    async with AsyncSession(engine) as session:
        await queue.enqueue(Note(), session=session)
        for call in (queue.enqueue(Note()), queue.enqueue_many([Note()])):
            with pytest.raises(TransactionOpen, match=r"pass session= \(or connection=\)"):
                await call
        # A child task would wait for its parent just the same.
        with pytest.raises(TransactionOpen):
            await asyncio.create_task(queue.enqueue(Note()))
        await session.commit()
        await queue.enqueue(Note())
    assert database.count() == 2


async def test_a_transaction_that_only_reads_is_in_nobodys_way(
    queue: Queue, engine: AsyncEngine, database: SqliteDatabase
) -> None:
    reading = create_async_engine(database.url)

    @event.listens_for(reading.sync_engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    async with Queue(reading, jobs=[Note]) as own, reading.connect() as connection:
        await connection.execute(text("SELECT count(*) FROM queue_jobs"))
        assert (await own.enqueue(Note())).job_id
        await connection.rollback()
    await reading.dispose()
    assert database.count() == 1


async def test_somebody_elses_long_transaction_is_an_error_that_says_what_to_do(
    engine: AsyncEngine, database: SqliteDatabase
) -> None:
    async with Queue(engine, jobs=[Note], give_up_after=0.05) as queue:
        holder = database.connect()
        holder.execute("BEGIN IMMEDIATE")
        with pytest.raises(BackendUnavailable, match="pass session= or connection= to enqueue inside it"):
            await queue.enqueue(Note())
        holder.rollback()
        holder.close()
        await queue.enqueue(Note())
    assert database.count() == 1


@pytest.mark.parametrize("synchronous", ["full", "normal"])
async def test_the_settings_are_what_was_asked_for(engine: AsyncEngine, synchronous: Literal["full", "normal"]) -> None:
    spy = Spy(engine)
    async with Queue(engine, jobs=[Note], synchronous=synchronous) as queue:
        await queue.enqueue(Note())
    pragmas = {statement for statement in spy.statements if statement.startswith("PRAGMA synchronous")}
    assert pragmas == {f"PRAGMA synchronous={synchronous.upper()}"}
    assert "PRAGMA journal_mode=WAL" in spy.statements


async def test_a_new_file_is_its_owners_alone(backend: Backend, database: SqliteDatabase) -> None:
    await backend.enqueue_many([new_job()])
    for suffix in ("", "-wal", "-shm"):
        mode = stat.S_IMODE(database.path.with_name(database.path.name + suffix).stat().st_mode)
        assert oct(mode) == "0o600", suffix


async def test_readers_cannot_write(backend: Backend, database: SqliteDatabase) -> None:
    opened: Any = backend
    async with opened._reader() as connection:
        with pytest.raises(Exception, match="readonly database"):
            await connection.execute(text("DELETE FROM queue_jobs"))
    assert database.query("PRAGMA journal_mode") == [("wal",)]
