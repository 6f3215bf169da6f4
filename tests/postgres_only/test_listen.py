"""LISTEN and NOTIFY: one connection that is kept up while somebody waits, and few, honest hints after the commit."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from typing import Any

import pytest
from sqlalchemy import NullPool, event, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from queue_core import Queue
from queue_core.backend import Backend
from queue_core.config import QueueConfig
from queue_core.connect import connect
from queue_core.model import Succeeded, Wakeup
from tests.support.databases import PostgresDatabase
from tests.support.ears import PostgresEars, listening_on
from tests.support.jobs import Note, new_job
from tests.support.postgres import PostgresServer, StopMode
from tests.support.spy import Spy
from tests.support.store import claim, listening, new_worker

pytestmark = pytest.mark.postgres_only("only its server passes hints on")

LOGGER = "queue_core.backends.postgres_listen"
MODES: list[StopMode] = ["fast", "immediate"]


@pytest.fixture
async def store(engine: AsyncEngine) -> AsyncGenerator[Backend]:
    async with opened(engine) as store:
        yield store


@pytest.fixture
async def other(engine: AsyncEngine, store: Backend) -> AsyncGenerator[Backend]:
    """What another process would be: it shares nothing with `store` but the database."""
    del store  # it makes the tables
    async with opened(engine) as other:
        yield other


@pytest.fixture
def ears(database: PostgresDatabase) -> Generator[PostgresEars]:
    with listening_on(database) as ears:
        yield ears


@pytest.fixture(scope="module")
def own_server() -> Generator[PostgresServer]:
    with closing(PostgresServer.start()) as server:
        yield server


@asynccontextmanager
async def opened(engine: AsyncEngine, **settings: Any) -> AsyncGenerator[Backend]:
    backend = connect(engine, QueueConfig(**settings), None)
    await backend.open(migrate=True)
    try:
        yield backend
    finally:
        await backend.close()


def listeners(database: PostgresDatabase) -> Sequence[int]:
    """The server's processes that serve a backend which listens; the ears of a test are not among them."""
    rows = database.query(
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN \"%'"
    )
    return [pid for (pid,) in rows]


async def until(holds: Callable[[], bool]) -> None:
    """Wait for what a query shows; the server hears of a connection's end a little later than we do."""
    async with asyncio.timeout(30):
        while not await asyncio.to_thread(holds):
            pass


# The connection


async def test_there_is_one_connection_however_many_wait(store: Backend, database: PostgresDatabase) -> None:
    async with AsyncExitStack() as stack:
        for number in range(20):
            await stack.enter_async_context(store.wakeups([f"queue {number}"]))
        assert len(listeners(database)) == 1


async def test_there_is_one_connection_for_those_who_begin_to_wait_at_the_same_time(
    store: Backend, other: Backend, database: PostgresDatabase
) -> None:
    async with AsyncExitStack() as stack:
        waiting = await asyncio.gather(*(stack.enter_async_context(store.wakeups(["notes"])) for _ in range(20)))
        assert len(listeners(database)) == 1
        await other.enqueue_many([new_job()])
        for hints in waiting:
            assert await asyncio.wait_for(anext(hints), 10) == Wakeup("notes")


async def test_nobody_listens_when_nobody_waits_any_more(store: Backend, database: PostgresDatabase) -> None:
    assert listeners(database) == []
    for _ in range(3):
        async with store.wakeups(["notes"]):
            async with store.wakeups(["notes"]):
                pass
            assert len(listeners(database)) == 1
        await until(lambda: not listeners(database))


async def test_whoever_begins_to_wait_while_the_last_one_stops_is_heard(
    store: Backend, other: Backend, database: PostgresDatabase
) -> None:
    first = store.wakeups(["notes"])
    await first.__aenter__()
    async with AsyncExitStack() as stack:
        leaving = asyncio.create_task(first.__aexit__(None, None, None))
        hints = await stack.enter_async_context(store.wakeups(["notes"]))
        await leaving
        await other.enqueue_many([new_job()])
        assert await asyncio.wait_for(anext(hints), 10) == Wakeup("notes")
        await until(lambda: len(listeners(database)) == 1)


async def test_whoever_is_cancelled_while_it_begins_to_wait_leaves_no_connection(
    store: Backend, database: PostgresDatabase
) -> None:
    async def wait() -> None:
        async with store.wakeups(["notes"]):
            await asyncio.Event().wait()

    for steps in range(12):
        waiting = asyncio.create_task(wait())
        for _ in range(steps):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    await until(lambda: not listeners(database))


async def test_a_backend_that_closes_stops_listening_though_somebody_still_waits(
    engine: AsyncEngine, database: PostgresDatabase
) -> None:
    async with AsyncExitStack() as stack:
        async with opened(engine) as backend:
            await stack.enter_async_context(backend.wakeups(["notes"]))
            assert len(listeners(database)) == 1
        await until(lambda: not listeners(database))


async def test_a_backend_that_is_not_to_notify_does_not_listen_either(
    engine: AsyncEngine, database: PostgresDatabase
) -> None:
    async with opened(engine, notify=False) as backend, listening(backend) as woken:
        assert listeners(database) == []
        await backend.enqueue_many([new_job()])
        assert await asyncio.wait_for(woken, 10) == Wakeup("notes")


async def test_a_pool_of_one_connection_carries_those_who_wait_and_those_who_work(
    database: PostgresDatabase, other: Backend
) -> None:
    """The connection that listens is taken out of the pool for good: it leaves its place to another."""
    engine = create_async_engine(database.url, pool_size=1, max_overflow=0, pool_timeout=2)
    async with opened(engine, give_up_after=5) as backend, backend.wakeups(["notes", "mails"]) as hints:
        worker = new_worker()
        for _ in range(3):
            await backend.enqueue_many([new_job()])
            (job,) = await claim(backend, worker)
            assert await backend.settle([Succeeded(job.claim)]) == {job.claim.job_id}
        assert await asyncio.wait_for(anext(hints), 10) == Wakeup("notes")
        await other.enqueue_many([new_job(queue="mails")])
        while await asyncio.wait_for(anext(hints), 10) != Wakeup("mails"):
            pass
        async with engine.connect() as connection:
            assert await connection.scalar(text("SELECT 1")) == 1
    await engine.dispose()


# When it breaks


async def test_a_connection_that_was_ended_is_made_again_and_wakes_everybody_once(
    store: Backend, other: Backend, database: PostgresDatabase
) -> None:
    async with store.wakeups(["notes"]) as notes, store.wakeups(["mails"]) as mails:
        for _ in range(3):
            (pid,) = listeners(database)
            database.query("SELECT pg_terminate_backend(?)", pid)
            # Nobody enqueued anything: something may have been missed.
            assert await asyncio.wait_for(anext(notes), 30) == Wakeup("notes")
            assert await asyncio.wait_for(anext(mails), 30) == Wakeup("mails")
            assert pid not in listeners(database)
        async with listening(store, "mails") as woken:
            await other.enqueue_many([new_job()])
            assert await asyncio.wait_for(anext(notes), 10) == Wakeup("notes")
            assert not woken.done()
            await other.enqueue_many([new_job(queue="mails")])
            assert await asyncio.wait_for(anext(mails), 10) == Wakeup("mails")


@pytest.mark.parametrize("mode", MODES)
async def test_after_a_restart_of_the_server_everybody_is_woken_and_hints_come_again(
    own_server: PostgresServer, mode: StopMode
) -> None:
    database = PostgresDatabase(own_server.url())
    engine = create_async_engine(database.url)
    async with (
        opened(engine, give_up_after=60) as store,
        opened(engine, give_up_after=60) as other,
        store.wakeups(["notes"]) as notes,
        store.wakeups(["mails"]) as mails,
    ):
        await asyncio.to_thread(own_server.restart, mode)
        assert await asyncio.wait_for(anext(notes), 60) == Wakeup("notes")
        assert await asyncio.wait_for(anext(mails), 60) == Wakeup("mails")
        await other.enqueue_many([new_job()])
        assert await asyncio.wait_for(anext(notes), 30) == Wakeup("notes")
        assert len(listeners(database)) == 1
    await engine.dispose()


async def test_to_begin_to_wait_while_the_server_is_away_neither_fails_nor_hangs(
    own_server: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    database = PostgresDatabase(own_server.url())
    engine = create_async_engine(database.url)
    async with opened(engine, give_up_after=60) as store, opened(engine, give_up_after=60) as other:
        await asyncio.to_thread(own_server.stop)
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(60):
                notes = await stack.enter_async_context(store.wakeups(["notes"]))
                mails = await stack.enter_async_context(store.wakeups(["mails"]))
            await asyncio.to_thread(own_server.start_again)
            assert await asyncio.wait_for(anext(notes), 60) == Wakeup("notes")
            assert await asyncio.wait_for(anext(mails), 60) == Wakeup("mails")
            await other.enqueue_many([new_job()])
            assert await asyncio.wait_for(anext(notes), 30) == Wakeup("notes")
    await engine.dispose()
    trouble, end = [each for each in caplog.records if each.name == LOGGER]
    assert (trouble.levelno, end.levelno) == (logging.WARNING, logging.INFO)
    assert trouble.getMessage().startswith("can't listen for new jobs (")
    assert "): polling until" in trouble.getMessage()


async def test_whoever_stops_waiting_while_the_server_is_away_is_not_kept(own_server: PostgresServer) -> None:
    engine = create_async_engine(own_server.url())
    async with opened(engine, give_up_after=60) as store:
        async with asyncio.timeout(60), store.wakeups(["notes"]):
            await asyncio.to_thread(own_server.stop)
        async with asyncio.timeout(60), store.wakeups(["notes"]):
            pass
        await asyncio.to_thread(own_server.start_again)
    await engine.dispose()


async def test_a_server_that_goes_away_while_somebody_listens_is_told_in_the_log(
    own_server: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    engine = create_async_engine(own_server.url(), poolclass=NullPool)
    tries = asyncio.Semaphore(0)
    async with opened(engine, give_up_after=60) as store, store.wakeups(["notes"]):

        @event.listens_for(engine.sync_engine, "do_connect")
        def connect(*_: object) -> None:
            tries.release()

        await asyncio.to_thread(own_server.stop)
        for _ in range(2):  # who tries a second time has failed the first time
            await asyncio.wait_for(tries.acquire(), 30)
        said = [each.levelno for each in caplog.records if each.name == LOGGER]
        await asyncio.to_thread(own_server.start_again)
    await engine.dispose()
    assert said == [logging.WARNING]


async def test_an_error_of_the_applications_own_while_it_connects_keeps_nobody_waiting(
    database: PostgresDatabase,
) -> None:
    """Such as a token for the password that could not be had."""
    engine = create_async_engine(database.url, poolclass=NullPool)
    async with opened(engine) as store:

        @event.listens_for(engine.sync_engine, "do_connect")
        def connect(*_: object) -> None:
            raise RuntimeError("no token today")

        async with asyncio.timeout(5):
            with suppress(RuntimeError):
                async with store.wakeups(["notes"]):
                    pass
    await engine.dispose()


# What is said, and to whom


async def test_a_backend_hears_of_its_own_enqueue_once(store: Backend, other: Backend, ears: PostgresEars) -> None:
    """Its own NOTIFY comes back to it, and is no second hint."""
    async with store.wakeups(["notes", "last"]) as hints:
        await store.enqueue_many([new_job()])
        assert await asyncio.wait_for(anext(hints), 10) == Wakeup("notes")
        assert await ears.next_heard() == ["notes"]
        # What comes after it on the same channel has been heard, and so has it.
        await other.enqueue_many([new_job(queue="last")])
        assert await asyncio.wait_for(anext(hints), 10) == Wakeup("last")
        async with listening(store, "notes") as woken:
            await other.enqueue_many([new_job(queue="last")])
            assert await asyncio.wait_for(anext(hints), 10) == Wakeup("last")
            assert not woken.done()


@pytest.mark.parametrize(
    "payload",
    ["", "notes", "{", "[]", "null", '["public", "x"]', '["public", 1, "notes"]', '{"queue": "notes"}', "\N{SNOWMAN}"],
)
async def test_what_others_use_the_channel_for_is_passed_over(
    store: Backend, other: Backend, ears: PostgresEars, payload: str
) -> None:
    async with listening(store) as woken, store.wakeups(["last"]) as hints:
        ears.say(payload)
        await other.enqueue_many([new_job(queue="last")])
        assert await asyncio.wait_for(anext(hints), 10) == Wakeup("last")
        assert not woken.done()
        await other.enqueue_many([new_job()])
        assert await asyncio.wait_for(woken, 10) == Wakeup("notes")


async def test_queues_of_the_same_name_in_two_schemas_do_not_wake_each_other(
    store: Backend, other: Backend, engine: AsyncEngine, ears: PostgresEars
) -> None:
    async with (
        opened(engine, schema="elsewhere") as there,
        opened(engine, schema="elsewhere") as theirs,
        listening(store) as woken,
        store.wakeups(["last"]) as hints,
        there.wakeups(["notes"]) as heard,
    ):
        await theirs.enqueue_many([new_job()])
        assert await asyncio.wait_for(anext(heard), 10) == Wakeup("notes")
        await other.enqueue_many([new_job(queue="last")])
        assert await asyncio.wait_for(anext(hints), 10) == Wakeup("last")
        assert not woken.done()
        await other.enqueue_many([new_job()])
        assert await asyncio.wait_for(woken, 10) == Wakeup("notes")
    assert set(ears.heard()) == {"notes", "last"}
    assert {(hint.place, hint.queue) for hint in ears.hints} == {
        ("elsewhere", "notes"),
        ("public", "last"),
        ("public", "notes"),
    }


async def test_two_databases_of_one_server_do_not_wake_each_other(
    store: Backend, other: Backend, new_postgres: Callable[[], PostgresDatabase]
) -> None:
    engine = create_async_engine(new_postgres().url)
    async with opened(engine) as elsewhere, listening(store) as woken, store.wakeups(["last"]) as hints:
        await elsewhere.enqueue_many([new_job()])
        await elsewhere.close()
        await other.enqueue_many([new_job(queue="last")])
        assert await asyncio.wait_for(anext(hints), 10) == Wakeup("last")
        assert not woken.done()
    await engine.dispose()


async def test_a_queue_with_an_unusual_name_is_told_of_as_it_is(store: Backend, other: Backend) -> None:
    names = ['it\'s "quoted"', "über, straße", "a\\b"]
    async with store.wakeups(names) as hints:
        await other.enqueue_many([new_job(queue=name) for name in names])
        heard = {(await asyncio.wait_for(anext(hints), 10)).queue for _ in names}
    assert heard == set(names)


# How much is said, and when


async def test_a_burst_of_enqueues_is_two_hints_the_last_of_them_after_the_last_enqueue(
    store: Backend, ears: PostgresEars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at once and one at the end of the rest, which is stretched here to be longer than the burst."""
    monkeypatch.setattr("queue_core.backends.telling.REST", 3600)
    for number in range(200):
        await store.enqueue_many([new_job(queue="notes" if number % 2 else "mails")])
    # The first of each, which may have come at different times.
    told = set(await ears.next_heard())
    while len(told) < 2:
        told.update(await ears.next_heard())
    await store.enqueue_many([new_job(), new_job(queue="mails")])
    assert ears.heard() == []
    await store.close()
    assert sorted(ears.heard()) == ["mails", "notes"]


async def test_a_burst_is_far_fewer_hints_than_enqueues_with_the_rest_as_it_is(
    store: Backend, ears: PostgresEars, database: PostgresDatabase
) -> None:
    for _ in range(200):
        await store.enqueue_many([new_job()])
    ears.heard()
    await store.enqueue_many([new_job()])
    assert database.count() == 201
    await store.close()
    assert ears.heard() in (["notes"], ["notes", "notes"])


async def test_nothing_is_said_inside_the_callers_transaction_nor_before_its_commit(
    store: Backend, engine: AsyncEngine, ears: PostgresEars
) -> None:
    """In it, a NOTIFY would make the commits of the whole server's database wait for one another."""
    async with AsyncSession(engine) as session:
        connection = await session.connection()
        await connection.run_sync(store.enqueue_on, [new_job()])
        pid = await session.scalar(text("SELECT pg_backend_pid()"))
        # What is said is said in order: had there been something, it would have come before these two.
        for queue in ("first", "second"):
            await store.enqueue_many([new_job(queue=queue)])
            assert await ears.next_heard() == [queue]
        await session.commit()
    assert await ears.next_heard() == ["notes"]
    assert ears.hints[0].pid != pid


@pytest.mark.parametrize("count", [1, 2_500])
async def test_nothing_is_said_inside_our_own_transaction_nor_before_its_commit(
    engine: AsyncEngine, ears: PostgresEars, count: int
) -> None:
    spy = Spy(engine)
    async with opened(engine) as store:
        spy.reset()
        await store.enqueue_many([new_job() for _ in range(count)])
    assert ears.heard() == ["notes"]
    *written, said = (each for each in spy.statements if not each.startswith("DISCARD"))
    assert "pg_notify" in said
    assert all("notify" not in each.lower() for each in written)
    # One statement is a transaction by itself.
    assert len(written) == 1 if count == 1 else written[-1].startswith("COMMIT")


async def test_the_queue_of_an_application_wakes_another_one(engine: AsyncEngine, store: Backend) -> None:
    async with Queue(engine, jobs=[Note]) as queue, store.wakeups(["notes"]) as hints:
        await queue.enqueue(Note())
        assert await asyncio.wait_for(anext(hints), 10) == Wakeup("notes")
        async with AsyncSession(engine) as session, session.begin():
            await queue.enqueue(Note(), session=session)
        assert await asyncio.wait_for(anext(hints), 10) == Wakeup("notes")
