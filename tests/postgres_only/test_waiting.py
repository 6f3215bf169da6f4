"""Nothing waits for ever: for a server that does not answer, or for somebody's open transaction."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest
from sqlalchemy import create_engine, make_url
from sqlalchemy.ext.asyncio import create_async_engine

from queue_core.backend import Backend
from queue_core.config import QueueConfig
from queue_core.connect import connect
from queue_core.errors import BackendUnavailable
from queue_core.model import EnqueueStatus, Succeeded
from tests.support.databases import PostgresDatabase
from tests.support.jobs import new_job
from tests.support.spy import Spy
from tests.support.store import claim, knowing, new_worker

pytestmark = pytest.mark.postgres_only("a server that can be out of reach, and locks of single rows")


class Line:
    """A line to the server on which the answers stop when the test says so."""

    def __init__(self, database: PostgresDatabase) -> None:
        self._url = make_url(database.url)
        self._open = asyncio.Event()
        self._open.set()
        self._pumps: set[asyncio.Task[None]] = set()

    def stall(self) -> None:
        self._open.clear()

    @asynccontextmanager
    async def url(self) -> AsyncGenerator[str]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        yield self._url.set(host="127.0.0.1", port=port).render_as_string(hide_password=False)
        server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection(self._url.host, self._url.port)
        for source, sink, stalls in ((reader, ours, False), (theirs, writer, True)):
            self._pumps.add(asyncio.create_task(self._pump(source, sink, stalls=stalls)))

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, stalls: bool) -> None:
        try:
            while data := await source.read(65_536):
                if stalls:
                    await self._open.wait()
                sink.write(data)
                await sink.drain()
        except ConnectionError:
            pass
        finally:
            sink.close()


@asynccontextmanager
async def opened(url: str, *, lock_timeout: str = "0") -> AsyncGenerator[tuple[Backend, Spy]]:
    engine = create_async_engine(url, connect_args={"server_settings": {"lock_timeout": lock_timeout}})
    spy = Spy(engine)
    backend = connect(engine, QueueConfig(notify=False, give_up_after=timedelta(seconds=1)), None)
    await backend.open(migrate=True)
    yield backend, spy
    await backend.close()
    await engine.dispose()


async def test_a_server_that_stops_answering_is_given_up_and_left(database: PostgresDatabase) -> None:
    line = Line(database)
    worker = new_worker()
    # A bound for a test that would hang, and no measurement.
    async with asyncio.timeout(60), line.url() as url, opened(url) as (backend, _):
        await backend.beat(worker, knowing())
        await backend.counts()
        line.stall()
        calls = (
            backend.beat(worker, knowing()),
            backend.counts(),
            backend.settle([]),
            claim(backend, worker),
            backend.reap(["notes"], limit=1),
            backend.prune(older_than=timedelta(1), limit=1),
        )
        answers = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(answer) for answer in answers] == [
        BackendUnavailable,
        BackendUnavailable,
        frozenset,
        BackendUnavailable,
        BackendUnavailable,
        BackendUnavailable,
    ]


@pytest.mark.parametrize("mode", ["replace", "preserve_run_at"])
async def test_a_transaction_that_would_replace_a_running_job_does_not_keep_it_from_being_settled(
    database: PostgresDatabase, mode: str
) -> None:
    async with opened(database.url) as (backend, _):
        await backend.enqueue_many([new_job(key="k", unique_key="k"), new_job()])
        jobs = await claim(backend, new_worker(), 2)
        engine = create_engine(database.sync_url)
        with engine.begin() as connection:
            (answer,) = backend.enqueue_on(connection, [new_job(key="k", unique_key="k", key_mode=mode)])
            assert answer.status is EnqueueStatus.RUNNING
            settled = await backend.settle([Succeeded(job.claim) for job in jobs])
        engine.dispose()
    assert settled == {job.claim.job_id for job in jobs}


async def test_a_lock_timeout_of_the_applications_own_is_waited_out(database: PostgresDatabase) -> None:
    async with opened(database.url, lock_timeout="50") as (backend, spy):
        await backend.enqueue_many([new_job()])
        (job,) = await claim(backend, new_worker())
        holder = database.connect()
        holder.execute("SELECT FROM queue_jobs FOR UPDATE")
        settling = asyncio.create_task(backend.settle([Succeeded(job.claim)]))
        tried = 0
        while tried < 2 and not settling.done():
            await asyncio.sleep(0.01)
            tried = sum("DELETE FROM" in statement for statement in spy.statements)
        holder.close()
        assert await settling == {job.claim.job_id}


async def test_a_lock_that_is_never_given_up_is_told_as_what_it_is(database: PostgresDatabase) -> None:
    async with opened(database.url, lock_timeout="50") as (backend, _):
        await backend.enqueue_many([new_job()])
        (job,) = await claim(backend, new_worker())
        holder = database.connect()
        holder.execute("SELECT FROM queue_jobs FOR UPDATE")
        with pytest.raises(BackendUnavailable, match="another transaction holds a lock"):
            await backend.settle([Succeeded(job.claim)])
        holder.close()
