"""The queue's own connections: made like the application's, but never shared with it."""

import asyncio
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import NullPool, StaticPool, event, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from queue_core import JobRefused, NotInitialized, Queue, Request, UnsupportedDatabase
from tests.support.databases import Database
from tests.support.jobs import Note
from tests.support.processes import output_of
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


async def test_after_an_error_the_connection_has_no_open_transaction(
    queue: Queue, database: Database, refusing_13: None
) -> None:
    """The second statement of a bulk is refused: the first one's rows are gone, and another writer gets in at once."""
    bulk: list[Note | Request] = [Note(), Note().with_delivery(key="k", key_mode="replace", tenant="13")]
    for _ in range(8):
        with pytest.raises(JobRefused, match=r"the database refused the job \(.*\): see the rules"):
            await queue.enqueue_many(bulk)
    assert database.count() == 0
    database.query("DELETE FROM queue_jobs WHERE queue = 'nobody'")
    await queue.enqueue_many(bulk[:1])
    assert database.count() == 1


async def test_no_error_shows_a_payload(queue: Queue, engine: AsyncEngine, refusing_13: None) -> None:
    secret = Note(text="card 4111").with_delivery(tenant="13", headers={"authorization": "Bearer tok"})
    async with engine.connect() as connection:
        for joined in (None, connection):
            with pytest.raises(JobRefused) as refused:
                await queue.enqueue_many([secret], connection=joined)
            told = "".join(traceback.format_exception(refused.value))
            assert "4111" not in told
            assert "Bearer" not in told


async def test_one_connection_for_everybody_is_refused(database: Database) -> None:
    engine = create_async_engine(database.url, poolclass=StaticPool)
    with pytest.raises(UnsupportedDatabase, match="leave poolclass out, or use NullPool"):
        await Queue(engine).open()
    await engine.dispose()


async def test_closing_waits_for_a_bulk_that_is_on_its_way(database: Database) -> None:
    engine = create_async_engine(database.url)
    made: list[object] = []

    @event.listens_for(engine.sync_engine, "connect")
    def count(connection: object, _record: object) -> None:
        made.append(connection)

    queue = await Queue(engine, jobs=[Note]).open()
    bulks = [asyncio.create_task(queue.enqueue_many([Note() for _ in range(1_000)])) for _ in range(12)]
    for _ in range(10):
        await asyncio.sleep(0)  # the first of them have gone out
    await queue.close()
    connections = len(made)
    done = await asyncio.gather(*bulks, return_exceptions=True)
    assert len(made) == connections
    sizes = [len(answers) for answers in done if not isinstance(answers, BaseException)]
    assert database.count() == sum(sizes) > 0
    await engine.dispose()


async def test_a_bulk_that_is_still_being_prepared_when_the_queue_closes_writes_nothing(
    engine: AsyncEngine, database: Database
) -> None:
    queue = await Queue(engine, jobs=[Note]).open()
    bulks = [asyncio.create_task(queue.enqueue_many([Note() for _ in range(5_000)]))]
    await asyncio.sleep(0)
    await queue.close()
    (told,) = await asyncio.gather(*bulks, return_exceptions=True)
    assert isinstance(told, NotInitialized)
    assert database.count() == 0


async def test_a_cancelled_close_closes_all_the_same(engine: AsyncEngine, database: Database) -> None:
    queue = await Queue(engine, jobs=[Note]).open()
    waiting = asyncio.create_task(queue.enqueue(Note()))
    await asyncio.sleep(0)
    closing = asyncio.create_task(queue.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await waiting
    await queue.open()
    await queue.enqueue(Note())
    await queue.close()
    assert database.count() == 2


@pytest.mark.sqlite_only("Postgres has no lock that a caller could hold against itself")
async def test_inside_a_transaction_that_has_only_read_an_enqueue_is_still_one_statement(engine: AsyncEngine) -> None:
    spy = Spy(engine)
    async with Queue(engine, jobs=[Note], notify=False) as queue, engine.connect() as connection:
        await queue.enqueue(Note())
        await connection.execute(text("SELECT count(*) FROM queue_jobs"))
        spy.reset()
        await queue.enqueue(Note())
        assert len(spy.statements) == 1
        await connection.rollback()


FORKED = """
import asyncio, os, sys
from sqlalchemy.ext.asyncio import create_async_engine
from queue_core import Job, Queue, WrongThread

class Note(Job):
    async def run(self, ctx): ...

async def main():
    engine = create_async_engine(sys.argv[1])
    async with Queue(engine, jobs=[Note]) as queue:
        await queue.enqueue(Note())
        child = os.fork()
        if child == 0:
            try:
                queue.enqueue_sync(Note())
            except WrongThread as error:
                print(error, flush=True)
                os._exit(0)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status))
        await queue.enqueue(Note())
    await engine.dispose()

asyncio.run(main())
"""


def test_after_a_fork_the_child_is_told_to_open_its_own(database: Database, tmp_path: Path) -> None:
    printed = output_of("-W", "ignore", "-c", FORKED, database.url, cwd=tmp_path)
    told, status = printed.splitlines()
    assert told.startswith("this queue was opened in another process, before a fork")
    assert told.endswith("open one in this process")
    assert status == "0"
    assert database.count() == 2


@pytest.mark.postgres_only("codecs of asyncpg")
async def test_a_codec_of_the_applications_does_not_reach_our_values(database: Database) -> None:
    engine = create_async_engine(database.url)

    async def set_codec(driver: Any) -> None:
        await driver.set_type_codec("interval", encoder=str, decoder=str, schema="pg_catalog", format="text")

    @event.listens_for(engine.sync_engine, "connect")
    def connect(connection: Any, _record: object) -> None:
        connection.run_async(set_codec)

    async with Queue(engine, jobs=[Note]) as queue:
        enqueued = await queue.enqueue(Note(), delay=60, expires_in=120)
        stored = await queue.get(enqueued.job_id)
    await engine.dispose()
    assert stored is not None
    assert stored.available_at - stored.created_at == timedelta(seconds=60)
