"""Starting and stopping: the default queue, further ones, the registry, and engines that are refused."""

import asyncio
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from socket import socket
from types import SimpleNamespace
from typing import cast

import pytest
from sqlalchemy import create_engine, event, make_url
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from queue_core import (
    AlreadyInitialized,
    BackendError,
    BackendUnavailable,
    ConfigurationError,
    Context,
    Job,
    NotInitialized,
    Queue,
    SchemaError,
    UnsupportedDatabase,
)
from tests.support.application import engine_to
from tests.support.databases import Database, SqliteDatabase
from tests.support.jobs import Note, Other
from tests.support.processes import output_of
from tests.support.servers import Server

# The default queue


async def test_init_makes_the_queue_that_jobs_are_enqueued_on(engine: AsyncEngine, database: Database) -> None:
    assert not Queue.is_initialized()
    queue = await Queue.init(engine, jobs=[Note])
    assert Queue.is_initialized()
    assert Queue.default() is queue
    await Note().enqueue()
    await queue.close()
    assert not Queue.is_initialized()
    assert database.jobs("job_type") == [("Note",)]


async def test_a_second_init_is_refused_until_the_first_queue_is_closed(engine: AsyncEngine) -> None:
    first = await Queue.init(engine)
    with pytest.raises(AlreadyInitialized) as refusal:
        await Queue.init(engine)
    assert str(refusal.value) == (
        "there is a default queue already: call 'await queue.close()' before a second Queue.init,"
        " or open a further one with 'async with Queue(engine) as queue'"
    )
    assert Queue.default() is first
    await first.close()
    second = await Queue.init(engine)
    assert Queue.default() is second
    await second.close()


async def test_of_several_inits_at_once_one_wins(engine: AsyncEngine) -> None:
    ends = await asyncio.gather(*(Queue.init(engine) for _ in range(5)), return_exceptions=True)
    (queue,) = [end for end in ends if isinstance(end, Queue)]
    assert [type(end) for end in ends if end is not queue] == [AlreadyInitialized] * 4
    assert Queue.default() is queue
    await queue.close()


async def test_an_init_that_fails_leaves_no_default_queue_and_no_connection(empty_database: Database) -> None:
    async with engine_to(empty_database) as engine:
        with pytest.raises(SchemaError):
            await Queue.init(engine, migrate=False)
        assert not Queue.is_initialized()
        await _until_nobody_is_connected(empty_database)
        await (await Queue.init(engine)).close()


async def test_an_init_that_is_cancelled_leaves_no_default_queue_and_no_connection(empty_database: Database) -> None:
    connected = asyncio.Event()
    async with engine_to(empty_database) as engine:
        event.listen(engine.sync_engine, "connect", lambda *_: connected.set())
        start = asyncio.create_task(Queue.init(engine))
        await connected.wait()
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        assert not Queue.is_initialized()
        await _until_nobody_is_connected(empty_database)
        await (await Queue.init(engine)).close()


async def test_use_before_init_is_an_error_that_names_it(engine: AsyncEngine) -> None:
    message = (
        "there is no default queue yet: call 'await Queue.init(engine, jobs=[…])' first, at the application's start"
    )
    with pytest.raises(NotInitialized) as refusal:
        Queue.default()
    assert str(refusal.value) == message
    with pytest.raises(NotInitialized) as refusal:
        await Note().enqueue()
    assert str(refusal.value) == message
    with pytest.raises(NotInitialized, match=r"Queue\.init"):
        await Queue(engine).enqueue(Note())


async def test_a_queue_that_is_still_starting_is_no_default_yet(engine: AsyncEngine) -> None:
    start = asyncio.create_task(Queue.init(engine))
    await asyncio.sleep(0)
    assert not Queue.is_initialized()
    with pytest.raises(NotInitialized):
        Queue.default()
    await (await start).close()


# Further queues


async def test_several_queues_live_in_one_process(
    engine: AsyncEngine, database: Database, another_database: Database
) -> None:
    default = await Queue.init(engine, jobs=[Note])
    async with engine_to(another_database) as other, Queue(other, jobs=[Note]) as further:
        assert Queue.default() is default
        await Note(text="for the default one").enqueue()
        await further.enqueue(Note(text="for the further one"))
        await further.enqueue(Note(text="and another"))
    assert Queue.default() is default
    await default.close()
    assert (database.count(), another_database.count()) == (1, 2)


async def test_two_queues_may_share_an_engine(engine: AsyncEngine, database: Database) -> None:
    async with Queue(engine, jobs=[Note]) as one:
        async with Queue(engine, jobs=[Note]) as two:
            await two.enqueue(Note())
        await one.enqueue(Note())
    assert database.count() == 2


async def test_an_open_queue_is_not_opened_again_but_a_closed_one_is(engine: AsyncEngine, database: Database) -> None:
    queue = Queue(engine, jobs=[Note])
    async with queue:
        with pytest.raises(AlreadyInitialized) as refusal:
            await queue.open()
        assert str(refusal.value) == "this queue is open already: close it before opening it again"
        await queue.enqueue(Note())
    async with queue:
        await queue.enqueue(Note())
    assert database.count() == 2


# The registry


async def test_a_queue_knows_the_jobs_that_it_was_given(engine: AsyncEngine) -> None:
    queue = await Queue.init(engine, jobs=[Note])
    assert Queue.has_registered_jobs()
    Queue.register(Other)
    assert queue.registry.names() == ["Note", "Other"]
    async with Queue(engine) as further:
        assert not further.has_registered_jobs()
        further.register(Note)
        assert further.has_registered_jobs()
        assert further.registry.names() == ["Note"]
    await queue.close()


def test_what_is_registered_before_init_is_there_after_every_init(database: Database, tmp_path: Path) -> None:
    # In a process of its own: what is registered on the class stays.
    assert json.loads(output_of("-c", _REGISTER, database.url, cwd=tmp_path)) == {
        "at first": False,
        "registered": True,
        "after init": ["Early", "Given"],
        "registered later": ["Early", "Given", "Late"],
        "after close and init": ["Early"],
        "of a further queue": [],
    }


async def test_a_job_type_keeps_its_stored_name_when_its_class_moves(engine: AsyncEngine, database: Database) -> None:
    class Renamed(Job, name="letters.SendLetter", aliases=["SendLetter"]):
        async def run(self, ctx: Context) -> None: ...

    async with Queue(engine, jobs=[Renamed, Note]) as queue:
        await queue.enqueue(Renamed())
        await queue.enqueue(Note())
        assert database.jobs("job_type") == [("letters.SendLetter",), ("Note",)]
        assert queue.registry.get("letters.SendLetter") is queue.registry.get("SendLetter") is Renamed


# Closing


async def test_closing_twice_is_fine(engine: AsyncEngine) -> None:
    queue = await Queue.init(engine)
    await queue.close()
    await queue.close()
    never_opened = Queue(engine)
    await never_opened.close()


async def test_closing_an_old_queue_again_leaves_the_new_default_alone(engine: AsyncEngine) -> None:
    old = await Queue.init(engine)
    await old.close()
    new = await Queue.init(engine, jobs=[Note])
    await old.close()
    assert Queue.default() is new
    await new.close()


async def test_a_closed_queue_takes_no_more_jobs(engine: AsyncEngine, database: Database) -> None:
    async with Queue(engine, jobs=[Note]) as queue:
        pass
    message = "this queue is not open: call 'await Queue.init(engine)', or 'async with Queue(engine) as queue'"
    for use in (queue.enqueue(Note()), queue.enqueue_many([Note()]), queue.get(1), queue.counts()):
        with pytest.raises(NotInitialized) as refusal:
            await use
        assert str(refusal.value) == message
    with pytest.raises(NotInitialized, match="this queue is not open"):
        queue.enqueue_sync(Note())
    assert database.count() == 0


async def test_what_is_on_its_way_in_when_the_queue_closes_is_written(engine: AsyncEngine, database: Database) -> None:
    async with Queue(engine, jobs=[Note]) as queue:
        enqueues = [asyncio.create_task(queue.enqueue(Note())) for _ in range(20)]
        await asyncio.sleep(0)
    assert len({enqueued.job_id for enqueued in await asyncio.gather(*enqueues)}) == 20
    assert database.count() == 20


async def test_a_close_leaves_no_connection_no_thread_and_no_task(engine: AsyncEngine, database: Database) -> None:
    threads, tasks = set(threading.enumerate()), asyncio.all_tasks()
    queue = await Queue.init(engine, jobs=[Note])
    await asyncio.gather(*(Note().enqueue(key=str(number)) for number in range(10)))
    await queue.enqueue_many([Note(), Note()])
    async with engine.begin() as connection:
        await queue.enqueue(Note(), connection=connection)
    assert await queue.counts()
    assert _connections_to(database) > 0
    await queue.close()
    await engine.dispose()
    assert asyncio.all_tasks() == tasks
    await _until_nobody_is_connected(database)
    await _until(lambda: {thread for thread in threading.enumerate() if not _is_the_loops(thread)} <= threads)


async def test_a_close_leaves_the_applications_engine_to_the_application(engine: AsyncEngine) -> None:
    async with engine.connect() as connection:
        async with Queue(engine):
            pass
        assert (await connection.exec_driver_sql("SELECT 1")).scalar_one() == 1


# Engines that are refused


@pytest.mark.parametrize(
    ("url", "working"),
    [
        ("sqlite:///jobs.db", "sqlite+aiosqlite:///jobs.db"),
        ("sqlite+pysqlite:////srv/jobs.db", "sqlite+aiosqlite:////srv/jobs.db"),
        ("sqlite://", "sqlite+aiosqlite:///jobs.db"),
        ("sqlite:///:memory:", "sqlite+aiosqlite:///jobs.db"),
        ("postgresql+psycopg://db.example/app", "postgresql+asyncpg://db.example/app"),
        ("postgresql+psycopg://app:secret@db.example/app", "postgresql+asyncpg://app:***@db.example/app"),
    ],
)
async def test_a_synchronous_engine_is_refused_with_the_url_that_would_work(url: str, working: str) -> None:
    with pytest.raises(UnsupportedDatabase) as refusal:
        await Queue.init(cast("AsyncEngine", create_engine(url)))
    assert str(refusal.value) == (
        f"Queue needs an asynchronous engine and got a synchronous one: use create_async_engine({working!r})"
    )


async def test_another_asynchronous_driver_is_refused_with_the_url_that_would_work() -> None:
    engine = create_async_engine("postgresql+psycopg://app:secret@db.example/app")
    with pytest.raises(UnsupportedDatabase) as refusal:
        await Queue.init(engine)
    assert str(refusal.value) == (
        "queue-core can't use postgresql+psycopg: use create_async_engine('postgresql+asyncpg://app:***@db.example/app')"
    )


async def test_another_dialect_is_refused_with_the_urls_that_would_work() -> None:
    # The dialect is a real one. Its driver is not installed and never called, so that a bare name stands in for it.
    driver = SimpleNamespace(paramstyle="qmark", version="5.0", Error=Exception, Cursor=object)
    engine = create_async_engine("mssql+aioodbc://app:secret@db.example/app?driver=any", module=driver)
    with pytest.raises(UnsupportedDatabase) as refusal:
        await Queue.init(engine)
    assert str(refusal.value) == (
        "queue-core can't use mssql+aioodbc: use create_async_engine('sqlite+aiosqlite:///jobs.db')"
        " or create_async_engine('postgresql+asyncpg://user@host/database')"
    )


@pytest.mark.parametrize("thing", [None, 42, object])
async def test_something_that_is_no_engine_is_refused(thing: object) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        await Queue.init(cast("AsyncEngine", thing))
    assert str(refusal.value) == (
        f"engine must be the result of create_async_engine('sqlite+aiosqlite:///jobs.db'), got {thing!r}"
    )


async def test_a_url_in_the_place_of_an_engine_is_refused_without_telling_its_password() -> None:
    for url in ("postgresql+asyncpg://app:secret@db/app", make_url("postgresql+asyncpg://app:secret@db/app")):
        with pytest.raises(ConfigurationError, match="create_async_engine") as refusal:
            await Queue.init(cast("AsyncEngine", url))
        assert "secret" not in str(refusal.value)


@pytest.mark.parametrize(
    "url",
    [
        "sqlite+aiosqlite://",
        "sqlite+aiosqlite:///:memory:",
        "sqlite+aiosqlite:///file::memory:?cache=shared&uri=true",
    ],
)
async def test_a_sqlite_database_in_memory_is_refused_with_the_reason(url: str) -> None:
    await _refused(
        url,
        UnsupportedDatabase,
        "a SQLite database in memory can't carry a queue: each connection would have one of its own, and shared"
        " ones ignore the busy timeout. Use a file, such as sqlite+aiosqlite:///jobs.db;"
        " for tests, one in a temporary folder",
    )


async def test_a_sqlite_file_in_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "missing" / "jobs.db"
    await _refused(
        f"sqlite+aiosqlite:///{file}",
        ConfigurationError,
        f"the folder of the SQLite file {file} does not exist: create {file.parent} first",
    )
    assert not file.parent.exists()


async def test_a_folder_in_the_place_of_a_sqlite_file_is_refused(tmp_path: Path) -> None:
    await _refused(
        f"sqlite+aiosqlite:///{tmp_path}",
        ConfigurationError,
        f"{tmp_path} is a folder: name a file in it, such as {tmp_path.name}/jobs.db",
    )


async def test_a_file_that_is_no_sqlite_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("Dear diary, " * 100)
    url = f"sqlite+aiosqlite:///{file}"
    await _refused(url, BackendError, "the database refused (DatabaseError: file is not a database)")
    assert file.read_text() == "Dear diary, " * 100


async def test_a_postgres_database_that_does_not_exist_is_refused_at_once(server: Server) -> None:
    await _refused(
        server.url("no_such_database"),
        BackendError,
        'the database refused (InvalidCatalogNameError: database "no_such_database" does not exist)',
    )


async def test_a_server_that_is_not_there_is_tried_for_a_while_and_then_unavailable() -> None:
    attempts: list[object] = []
    with socket() as nobody_listens:
        nobody_listens.bind(("127.0.0.1", 0))
        port = nobody_listens.getsockname()[1]
        engine = create_async_engine(f"postgresql+asyncpg://app@127.0.0.1:{port}/app")
        event.listen(engine.sync_engine, "do_connect", lambda *arguments: attempts.append(arguments))
        with pytest.raises(BackendUnavailable, match="the database can't be reached or is busy") as refusal:
            await Queue.init(engine, give_up_after=0.2)
    assert isinstance(refusal.value.__cause__, ConnectionRefusedError)
    assert len(attempts) > 1


# Helpers


async def _refused(url: str, kind: type[Exception], message: str) -> None:
    engine = create_async_engine(url)
    with pytest.raises(kind) as refusal:
        await Queue.init(engine)
    assert str(refusal.value) == message
    assert type(refusal.value) is kind
    assert not Queue.is_initialized()
    await engine.dispose()


async def _until(state: Callable[[], bool]) -> None:
    """Wait for what the system does by itself a moment later."""
    async with asyncio.timeout(10):
        while not state():  # noqa: ASYNC110 nobody signals it
            await asyncio.sleep(0.005)


async def _until_nobody_is_connected(database: Database) -> None:
    await _until(lambda: _connections_to(database) == 0)


def _connections_to(database: Database) -> int:
    """How many connections the server has, or how often this process has the file open."""
    if isinstance(database, SqliteDatabase):
        return sum(_is_open_as(int(entry.name), database.path) for entry in Path("/dev/fd").iterdir())
    rows = database.query(
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
        " AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
    )
    return len(rows)


def _is_open_as(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:  # the listing's own descriptor, which is closed by now
        return False


def _is_the_loops(thread: threading.Thread) -> bool:
    """Whether a thread belongs to the event loop's own pool, which looks up host names."""
    return thread.name.startswith("asyncio_")


_REGISTER = """
import asyncio, json, sys
from sqlalchemy.ext.asyncio import create_async_engine
from queue_core import Context, Job, Queue

class Early(Job):
    async def run(self, ctx: Context) -> None: ...

class Given(Job):
    async def run(self, ctx: Context) -> None: ...

class Late(Job):
    async def run(self, ctx: Context) -> None: ...

async def main():
    engine = create_async_engine(sys.argv[1])
    seen = {"at first": Queue.has_registered_jobs()}
    Queue.register(Early)
    seen["registered"] = Queue.has_registered_jobs()
    queue = await Queue.init(engine, jobs=[Given])
    seen["after init"] = queue.registry.names()
    Queue.register(Late)
    seen["registered later"] = queue.registry.names()
    await queue.close()
    queue = await Queue.init(engine)
    seen["after close and init"] = queue.registry.names()
    async with Queue(engine) as further:
        seen["of a further queue"] = further.registry.names()
    await queue.close()
    await engine.dispose()
    print(json.dumps(seen))

asyncio.run(main())
"""
