"""Enqueueing inside the caller's own transaction, and the wake-up after its commit."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine, event, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from queue_core import BackendError, ConfigurationError, EnqueueStatus, JobRefused, Queue, WrongDatabase, WrongThread
from queue_core.backend import Backend
from queue_core.model import Wakeup
from tests.support.databases import Database, PostgresDatabase, SqliteDatabase
from tests.support.jobs import Note, Other, new_job


async def test_a_rollback_leaves_nothing(queue: Queue, engine: AsyncEngine, database: Database) -> None:
    async with AsyncSession(engine) as session:
        assert (await queue.enqueue(Note(), session=session)).status is EnqueueStatus.INSERTED
        await queue.enqueue_many([Note(), Other()], session=session)
        await session.rollback()
    async with engine.connect() as connection:
        await queue.enqueue(Note(), connection=connection, key="k")
        await connection.rollback()
    assert database.count() == 0


async def test_a_commit_makes_the_job_and_the_applications_rows_visible_together(
    queue: Queue, engine: AsyncEngine, database: Database
) -> None:
    database.query("CREATE TABLE IF NOT EXISTS orders (id integer)")
    database.query("DELETE FROM orders")
    async with AsyncSession(engine) as session, session.begin():
        await session.execute(text("INSERT INTO orders VALUES (1)"))
        await queue.enqueue(Note(), session=session)
        assert (database.count("orders"), database.count()) == (0, 0)
    assert (database.count("orders"), database.count()) == (1, 1)


async def test_the_first_statement_of_a_transaction_may_be_the_enqueue(
    queue: Queue, engine: AsyncEngine, database: Database
) -> None:
    """With asyncpg BEGIN is sent late: a statement that went around SQLAlchemy would be outside of it."""
    async with engine.connect() as connection:
        await queue.enqueue(Note(), connection=connection)
        await connection.rollback()
    assert database.count() == 0
    async with engine.begin() as connection:
        await queue.enqueue(Note(), connection=connection)
    assert database.count() == 1


async def test_a_savepoint_that_is_rolled_back_takes_its_job_with_it(
    queue: Queue, engine: AsyncEngine, database: Database
) -> None:
    async with AsyncSession(engine) as session, session.begin():
        await queue.enqueue(Note(text="outer"), session=session)
        savepoint = await session.begin_nested()
        await queue.enqueue(Note(text="inner"), session=session)
        await savepoint.rollback()
    assert database.jobs("payload") == [('{"text":"outer"}',)]


async def test_keys_hold_inside_a_transaction(queue: Queue, engine: AsyncEngine, database: Database) -> None:
    first = await queue.enqueue(Note(text="1"), key="k")
    async with AsyncSession(engine) as session, session.begin():
        kept = await queue.enqueue(Note(text="2"), key="k", session=session)
        replaced = await queue.enqueue(Note(text="3"), key="k", key_mode="replace", session=session)
    assert (kept.job_id, kept.status) == (first.job_id, EnqueueStatus.DUPLICATE)
    assert (replaced.job_id, replaced.status) == (first.job_id, EnqueueStatus.REPLACED)
    assert database.jobs("payload") == [('{"text":"3"}',)]


async def test_many_jobs_join_a_transaction_together(queue: Queue, engine: AsyncEngine, database: Database) -> None:
    async with engine.begin() as connection:
        answers = await queue.enqueue_many([Note(text=str(number)) for number in range(2_500)], connection=connection)
    assert [answer.job_id for answer in answers] == [row[0] for row in database.jobs("id")]
    assert database.count() == 2_500


async def test_job_enqueue_joins_on_the_default_queue(
    default_queue: Queue, engine: AsyncEngine, database: Database
) -> None:
    async with AsyncSession(engine) as session:
        await Note().enqueue(session=session)
        await session.rollback()
        await Note().enqueue(session=session)
        await session.commit()
    assert database.count() == 1
    assert (await default_queue.counts())["notes"].pending == 1


async def test_a_bulk_that_fails_leaves_nothing_in_the_callers_transaction(
    queue: Queue, engine: AsyncEngine, database: Database, refusing_13: None
) -> None:
    jobs = [Note().with_delivery(tenant="13" if number == 2_400 else "1") for number in range(2_500)]
    async with AsyncSession(engine) as session, session.begin():
        await queue.enqueue(Note(text="mine"), session=session)
        with pytest.raises(JobRefused):
            await queue.enqueue_many(jobs, session=session)
    assert database.jobs("payload") == [('{"text":"mine"}',)]


# Wake-ups


@asynccontextmanager
async def listening(backend: Backend) -> AsyncGenerator["asyncio.Task[Wakeup]"]:
    """A task that ends with the first wake-up of the queue "notes"."""
    async with backend.wakeups(["notes"]) as hints:

        async def first() -> Wakeup:
            return await anext(hints)

        task = asyncio.create_task(first())
        await asyncio.sleep(0)
        yield task
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_an_enqueue_wakes_whoever_waits_for_its_queue(backend: Backend) -> None:
    async with listening(backend) as woken:
        await backend.enqueue_many([new_job(queue="other")])
        assert not woken.done()
        await backend.enqueue_many([new_job(queue="other"), new_job(queue="notes")])
        assert await asyncio.wait_for(woken, 10) == Wakeup("notes")


async def test_a_duplicate_wakes_nobody(backend: Backend) -> None:
    await backend.enqueue_many([new_job(key="k", unique_key="k")])
    async with listening(backend) as woken:
        await backend.enqueue_many([new_job(key="k", unique_key="k")])
        await asyncio.sleep(0)
        assert not woken.done()


async def test_a_commit_wakes_a_worker_after_the_row_can_be_seen(
    backend: Backend, engine: AsyncEngine, database: Database
) -> None:
    async with listening(backend) as woken, AsyncSession(engine) as session:
        connection = await session.connection()
        await connection.run_sync(backend.enqueue_on, [new_job()])
        assert not woken.done()
        seen: list[int] = []
        woken.add_done_callback(lambda _: seen.append(database.count()))
        await session.commit()
        await asyncio.wait_for(woken, 10)
        await asyncio.sleep(0)
        assert seen == [1]


async def test_a_commit_that_has_not_returned_yet_wakes_nobody(backend: Backend, database: Database) -> None:
    sync_engine = create_engine(database.sync_url)
    begun, may_commit = threading.Event(), threading.Event()
    dialect: Any = sync_engine.dialect
    commit = dialect.do_commit

    def held_back(connection: Any) -> None:
        begun.set()
        assert may_commit.wait(30)
        commit(connection)

    def work() -> None:
        with sync_engine.begin() as connection:
            backend.enqueue_on(connection, [new_job()])
            # From here on, so that the commits of the engine's own start are not held.
            dialect.do_commit = held_back

    async with listening(backend) as woken:
        working = asyncio.gather(asyncio.to_thread(work))
        await asyncio.to_thread(begun.wait, 30)
        for _ in range(50):
            await asyncio.sleep(0)
        assert not woken.done()
        may_commit.set()
        assert await asyncio.wait_for(woken, 10) == Wakeup("notes")
        assert database.count() == 1
        await working
    sync_engine.dispose()


async def test_a_connection_that_stays_open_after_its_commit_wakes_as_well(
    backend: Backend, engine: AsyncEngine
) -> None:
    async with listening(backend) as woken, engine.connect() as connection:
        await connection.run_sync(backend.enqueue_on, [new_job()])
        await connection.commit()
        assert await asyncio.wait_for(woken, 10) == Wakeup("notes")
        await connection.execute(text("SELECT 1"))


async def test_neither_a_savepoint_nor_a_rollback_wakes(backend: Backend, engine: AsyncEngine) -> None:
    async with listening(backend) as woken:
        async with AsyncSession(engine) as session:
            async with session.begin_nested():
                await (await session.connection()).run_sync(backend.enqueue_on, [new_job()])
            await session.rollback()
        # What follows is told in order, so the first thing heard shows that nothing came before it.
        assert not woken.done()
        async with engine.connect() as connection:
            await connection.run_sync(backend.enqueue_on, [new_job()])
            await connection.rollback()
            await connection.execute(text("SELECT 1"))
            await connection.commit()
        assert not woken.done()
        await backend.enqueue_many([new_job()])
        await asyncio.wait_for(woken, 10)


# Synchronous code


async def test_a_thread_enqueues_through_the_loop(queue: Queue, database: Database) -> None:
    answers = await asyncio.gather(*(asyncio.to_thread(queue.enqueue_sync, Note(), key=str(n)) for n in range(8)))
    assert {answer.status for answer in answers} == {EnqueueStatus.INSERTED}
    assert database.count() == 8


async def test_a_synchronous_session_joins_and_wakes(backend: Backend, database: Database) -> None:
    sync_engine = create_engine(database.sync_url)

    def work(end: Callable[[Session], None]) -> None:
        with Session(sync_engine) as session:
            backend.enqueue_on(session.connection(), [new_job(key="k", unique_key="k")])
            end(session)

    async with listening(backend) as woken:
        await asyncio.to_thread(work, Session.rollback)
        assert database.count() == 0
        assert not woken.done()
        await asyncio.to_thread(work, Session.commit)
        assert await asyncio.wait_for(woken, 10) == Wakeup("notes")
    assert database.count() == 1
    sync_engine.dispose()


async def test_enqueue_sync_joins_a_synchronous_session_or_connection(queue: Queue, database: Database) -> None:
    sync_engine = create_engine(database.sync_url)

    def work() -> None:
        with Session(sync_engine) as session, session.begin():
            queue.enqueue_sync(Note(), session=session, key="k", headers={"a": "b"}, delay=5, expires_in=60)
        with sync_engine.begin() as connection:
            queue.enqueue_sync(Other(), connection=connection)

    await asyncio.to_thread(work)
    assert database.count() == 2
    sync_engine.dispose()


async def test_enqueue_sync_on_the_loops_own_thread_says_what_to_do(queue: Queue, database: Database) -> None:
    with pytest.raises(WrongThread, match=r"use 'await queue.enqueue\(job\)' there"):
        queue.enqueue_sync(Note())
    assert database.count() == 0


# What is refused


async def test_a_session_of_another_database_is_refused(
    queue: Queue, database: Database, tmp_path: Path, new_postgres: Callable[[], PostgresDatabase]
) -> None:
    others = [SqliteDatabase(tmp_path / "other.db"), new_postgres()]
    for other in others:
        engine = create_async_engine(other.url)
        async with AsyncSession(engine) as session:
            with pytest.raises(WrongDatabase, match="enqueue without it, or open a queue in that database"):
                await queue.enqueue(Note(), session=session)
            await session.rollback()
        await engine.dispose()
    assert database.count() == 0


async def test_another_engine_on_the_same_database_is_welcome(queue: Queue, database: Database) -> None:
    """By any name: the same file through a link, the same server as localhost."""
    if isinstance(database, SqliteDatabase):
        link = database.path.with_name("link.db")
        link.symlink_to(database.path)
        url = f"sqlite+aiosqlite:///{link}"
    else:
        url = database.url.replace("127.0.0.1", "localhost")
    engine = create_async_engine(url)
    for _ in range(2):
        async with AsyncSession(engine) as session, session.begin():
            await queue.enqueue(Note(), session=session)
    await engine.dispose()
    assert database.count() == 2


async def test_what_is_no_session_is_refused(queue: Queue, engine: AsyncEngine, database: Database) -> None:
    async with AsyncSession(engine) as session, engine.connect() as connection:
        with pytest.raises(ConfigurationError, match="session or connection, not both"):
            await queue.enqueue(Note(), session=session, connection=connection)
        with pytest.raises(ConfigurationError, match=r"await queue.enqueue\(job, session=…\)"):
            queue.enqueue_sync(Note(), session=session)
        with pytest.raises(ConfigurationError, match="must be a SQLAlchemy AsyncSession, got 'x'"):
            await queue.enqueue(Note(), session="x")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    sync_engine = create_engine(database.sync_url)
    with Session(sync_engine) as sync_session, pytest.raises(ConfigurationError, match=r"call queue\.enqueue_sync"):
        await queue.enqueue(Note(), session=sync_session)
    sync_engine.dispose()
    assert database.count() == 0


@pytest.mark.parametrize("mode", ["engine", "connection"])
async def test_a_connection_without_a_transaction_is_refused(database: Database, mode: str) -> None:
    """In AUTOCOMMIT mode a rollback would leave the job."""
    engine = create_async_engine(database.url, **({"isolation_level": "AUTOCOMMIT"} if mode == "engine" else {}))
    async with Queue(engine, jobs=[Note]) as queue:
        options = {} if mode == "engine" else {"isolation_level": "AUTOCOMMIT"}
        async with engine.execution_options(**options).connect() as connection:
            with pytest.raises(ConfigurationError, match="is in AUTOCOMMIT mode, where a rollback would leave the job"):
                await queue.enqueue(Note(), connection=connection)
            await connection.rollback()
        assert (await queue.enqueue(Note())).status is EnqueueStatus.INSERTED
    await engine.dispose()
    assert database.count() == 1


async def test_a_begin_of_the_applications_own_is_a_transaction(database: Database) -> None:
    """The recipe for SQLite: no BEGIN of the driver's, one from an event."""
    engine = create_async_engine(database.url)
    if database.kind == "sqlite":

        @event.listens_for(engine.sync_engine, "connect")
        def connect(connection: Any, _record: object) -> None:
            connection.isolation_level = None

        @event.listens_for(engine.sync_engine, "begin")
        def begin(connection: Connection) -> None:
            connection.exec_driver_sql("BEGIN")

    async with Queue(engine, jobs=[Note]) as queue:
        for end in (AsyncSession.rollback, AsyncSession.commit):
            async with AsyncSession(engine) as session:
                await queue.enqueue(Note(), session=session)
                await queue.enqueue_many([Note() for _ in range(2_001)], session=session)
                await end(session)
    await engine.dispose()
    assert database.count() == 2_002


async def test_what_is_wrong_with_a_transaction_is_told_as_our_error(
    queue: Queue, engine: AsyncEngine, database: Database
) -> None:
    async with engine.connect() as connection:
        pass
    with pytest.raises(BackendError, match="This Connection is closed"):
        await queue.enqueue(Note(), connection=connection)
    async with AsyncSession() as session:
        with pytest.raises(BackendError, match="This session is not bound to a single Engine"):
            await queue.enqueue(Note(), session=session)
    assert database.count() == 0
