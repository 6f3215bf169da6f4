"""SQLite's one write lock: who has it, from when, and what a caller hears who would wait for itself."""

import asyncio
import gc
import random
import stat
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
from sqlalchemy import Connection, event, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from queue_core import BackendUnavailable, Queue, TransactionOpen
from queue_core.backend import Backend
from tests.support.databases import SqliteDatabase
from tests.support.jobs import Note, new_job
from tests.support.processes import output_of
from tests.support.spy import Spy

pytestmark = pytest.mark.sqlite_only("row locks: Postgres has them, SQLite has one lock for all")


@contextmanager
def locked(database: SqliteDatabase) -> Generator[None]:
    """Somebody's open write transaction."""
    with closing(database.connect()) as holder:
        holder.execute("BEGIN IMMEDIATE")
        yield


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
        await session.commit()
        await queue.enqueue(Note())
    assert database.count() == 2


async def test_another_task_waits_for_the_transaction_to_end(
    queue: Queue, engine: AsyncEngine, database: SqliteDatabase
) -> None:
    async with AsyncSession(engine) as session:
        await queue.enqueue(Note(), session=session)
        child = asyncio.create_task(queue.enqueue(Note()))
        await asyncio.sleep(0)
        await session.commit()
    await child
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
        with locked(database), pytest.raises(BackendUnavailable, match="pass session= or connection= to enqueue"):
            await queue.enqueue(Note())
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
    async with opened._reader(asyncio.get_running_loop().time() + 10) as connection:
        with pytest.raises(Exception, match="readonly database"):
            await connection.execute(text("DELETE FROM queue_jobs"))
    assert database.query("PRAGMA journal_mode") == [("wal",)]


async def test_a_cancelled_look_keeps_no_snapshot_open(queue: Queue, database: SqliteDatabase) -> None:
    """One that is left to the garbage collector keeps the write-ahead log from being emptied."""
    await queue.enqueue_many([Note() for _ in range(500)])
    generator = random.Random(20261118)
    gc.disable()
    try:
        for _ in range(200):
            look = asyncio.create_task(queue.counts())
            await asyncio.sleep(generator.random() * 0.006)
            look.cancel()
            await asyncio.gather(look, return_exceptions=True)
        await queue.enqueue(Note())
        ((busy, _, _),) = database.query("PRAGMA wal_checkpoint(TRUNCATE)")
        assert busy == 0
    finally:
        gc.enable()


async def test_whoever_queues_for_a_locked_file_hears_of_it_in_time(
    engine: AsyncEngine, database: SqliteDatabase
) -> None:
    """Ten bulks wait for each other and for the file: none gets the time of all of them."""
    async with Queue(engine, jobs=[Note], give_up_after=0.3) as queue:
        with locked(database):
            answers = await asyncio.gather(*(queue.enqueue_many([Note()]) for _ in range(10)), return_exceptions=True)
        assert all(isinstance(answer, BackendUnavailable) for answer in answers)
        # Most gave up while they waited for their turn, and not after a wait of their own for the file.
        assert [type(answer.__cause__) for answer in answers if isinstance(answer, Exception)].count(TimeoutError) >= 5


OPENED_AND_CLOSED = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
print(connection.execute("SELECT count(*) FROM queue_jobs").fetchone()[0])
connection.close()
"""


async def test_a_file_that_is_in_use_already_keeps_its_locks_when_a_queue_is_opened_on_it(
    database: SqliteDatabase, engine: AsyncEngine, tmp_path: Path
) -> None:
    """Without them another process removes the write-ahead log when it leaves, with what was committed to it."""
    async with Queue(engine, jobs=[Note]) as first:
        await first.enqueue(Note())
        async with Queue(engine, jobs=[Note]) as second:
            output_of("-c", OPENED_AND_CLOSED, str(database.path), cwd=tmp_path)
            assert database.path.with_name("jobs.db-wal").exists()
            await first.enqueue(Note())
            await second.enqueue(Note())
            assert output_of("-c", OPENED_AND_CLOSED, str(database.path), cwd=tmp_path) == "3\n"
