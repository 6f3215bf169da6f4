"""A server of its own that is stopped and started: enqueues wait for it, and say so when it does not come back."""

import asyncio
from collections.abc import Generator
from contextlib import closing

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from queue_core import BackendUnavailable, Queue, QueueError
from tests.support.databases import PostgresDatabase
from tests.support.jobs import Note
from tests.support.postgres import PostgresServer, StopMode

MODES: list[StopMode] = ["fast", "immediate"]


@pytest.fixture(scope="module")
def own_server() -> Generator[PostgresServer]:
    with closing(PostgresServer.start()) as server:
        yield server


@pytest.mark.parametrize("mode", MODES)
async def test_enqueues_during_a_restart_wait_and_go_through_once(own_server: PostgresServer, mode: StopMode) -> None:
    database = PostgresDatabase(own_server.url())
    engine = create_async_engine(database.url)
    async with Queue(engine, jobs=[Note], give_up_after=60) as queue:
        await queue.enqueue(Note())
        database.truncate()
        stop = asyncio.Event()

        async def produce(name: int) -> int:
            count = 0
            while not stop.is_set():
                await queue.enqueue(Note(), key=f"{name} {count}" if name % 2 else None)
                count += 1
            return count

        async with asyncio.TaskGroup() as tasks:
            producers = [tasks.create_task(produce(name)) for name in range(8)]
            bulk = tasks.create_task(queue.enqueue_many([Note() for _ in range(5_000)]))
            for _ in range(3):
                await asyncio.to_thread(own_server.restart, mode)
                await queue.enqueue(Note())
            stop.set()
        assert database.count() == sum(producer.result() for producer in producers) + len(bulk.result()) + 3
    await engine.dispose()


async def test_a_server_that_stays_away_is_an_error_that_says_so(own_server: PostgresServer) -> None:
    engine = create_async_engine(own_server.url())
    async with Queue(engine, jobs=[Note], give_up_after=0.2) as queue:
        await asyncio.to_thread(own_server.stop)
        for call in (queue.enqueue(Note()), queue.enqueue_many([Note()]), queue.counts()):
            with pytest.raises(BackendUnavailable, match=r"can't be reached or is busy \(.+\): try again later"):
                await call
        await asyncio.to_thread(own_server.start_again)
        await queue.enqueue(Note())
    await engine.dispose()


async def test_opening_waits_for_a_server_that_is_starting(own_server: PostgresServer) -> None:
    await asyncio.to_thread(own_server.stop)
    engine = create_async_engine(own_server.url())
    opening = asyncio.create_task(Queue(engine, jobs=[Note], give_up_after=60).open())
    await asyncio.to_thread(own_server.start_again)
    queue = await opening
    await queue.enqueue(Note())
    await queue.close()
    await engine.dispose()


async def test_a_database_that_does_not_exist_is_an_error_at_once(own_server: PostgresServer) -> None:
    engine = create_async_engine(own_server.url("nowhere"))
    with pytest.raises(QueueError, match='database "nowhere" does not exist'):
        await Queue(engine, give_up_after=60).open()
    await engine.dispose()
