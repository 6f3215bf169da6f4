"""What every test can ask for: a fresh database of each kind, an engine, a queue, a backend.

The run starts one Postgres server by itself. Without one it fails, it does not skip. `TEST_DATABASE_URL`
names a server to use instead (databases are created and dropped there), `PG_BINDIR` the binaries.
"""

import asyncio
import itertools
import os
from collections.abc import AsyncGenerator, Callable, Generator
from pathlib import Path

import pytest
from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from queue_core import Queue
from queue_core.backend import Backend
from queue_core.config import QueueConfig
from queue_core.connect import connect
from tests.support.clock import ManualClock
from tests.support.databases import Database, Kind, PostgresDatabase, SqliteDatabase
from tests.support.jobs import Note, Other
from tests.support.postgres import NoPostgres, PostgresServer
from tests.support.servers import ExternalServer, Server

_SERVER = pytest.StashKey[Server]()
_numbers = itertools.count(1)


def pytest_configure(config: pytest.Config) -> None:
    if config.option.collectonly:
        return
    url = os.environ.get("TEST_DATABASE_URL")
    try:
        config.stash[_SERVER] = ExternalServer(url) if url else PostgresServer.start()
    except NoPostgres as error:
        raise pytest.UsageError(str(error)) from error


def pytest_unconfigure(config: pytest.Config) -> None:
    if _SERVER in config.stash:
        config.stash[_SERVER].close()


def pytest_report_header(config: pytest.Config) -> str:
    import sqlite3

    server = config.stash.get(_SERVER, None)
    postgres = "not started" if server is None else f"{server.version} at {make_url(server.url()).host}"
    return f"databases: SQLite {sqlite3.sqlite_version}, Postgres {postgres}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes a database on both, unless it says which one and why."""
    if "database_kind" in metafunc.fixturenames:
        kinds = ["sqlite", "postgres"]
        for mark in metafunc.definition.iter_markers():
            if mark.name in ("sqlite_only", "postgres_only"):
                kinds = [mark.name.removesuffix("_only")]
        metafunc.parametrize("database_kind", kinds)


@pytest.fixture(scope="session")
def server(pytestconfig: pytest.Config) -> Server:
    return pytestconfig.stash[_SERVER]


@pytest.fixture(scope="session")
def new_postgres(server: Server) -> Generator[Callable[[], PostgresDatabase]]:
    """Makes empty databases, and leaves none behind."""
    names: list[str] = []

    def create() -> PostgresDatabase:
        name = f"queue_core_test_{os.getpid()}_{next(_numbers)}"
        server.create_database(name)
        names.append(name)
        return PostgresDatabase(server.url(name))

    yield create
    # Our own server's folder is deleted with all that is in it; to drop one by one would take seconds.
    if isinstance(server, ExternalServer):
        for name in names:
            server.drop_database(name)


@pytest.fixture(scope="session")
def migrated_postgres(new_postgres: Callable[[], PostgresDatabase]) -> PostgresDatabase:
    """One database with our tables, which each test gets emptied: much cheaper than one for each."""
    database = new_postgres()

    async def migrate() -> None:
        engine = create_async_engine(database.url)
        async with Queue(engine):
            pass
        await engine.dispose()

    asyncio.run(migrate())
    return database


@pytest.fixture
def database(database_kind: Kind, request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    """A database that is ours alone; its tables, if there are any, are empty."""
    if database_kind == "sqlite":
        return SqliteDatabase(tmp_path / "jobs.db")
    postgres: PostgresDatabase = request.getfixturevalue("migrated_postgres")
    postgres.truncate()
    return postgres


@pytest.fixture
def empty_database(database_kind: Kind, request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    """A database with nothing in it."""
    return _new_database(database_kind, request, tmp_path / "empty.db")


@pytest.fixture
def another_database(database_kind: Kind, request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    """A second database of the same kind, with nothing in it."""
    return _new_database(database_kind, request, tmp_path / "another.db")


def _new_database(kind: Kind, request: pytest.FixtureRequest, file: Path) -> Database:
    if kind == "sqlite":
        return SqliteDatabase(file)
    create: Callable[[], PostgresDatabase] = request.getfixturevalue("new_postgres")
    return create()


@pytest.fixture
async def engine(database: Database) -> AsyncGenerator[AsyncEngine]:
    """The application's engine; at the end no connection of it may still be out."""
    engine = create_async_engine(database.url)
    yield engine
    pool = engine.sync_engine.pool
    assert getattr(pool, "checkedout", lambda: 0)() == 0, "a connection was not given back"
    await engine.dispose()


@pytest.fixture
async def queue(engine: AsyncEngine) -> AsyncGenerator[Queue]:
    async with Queue(engine, jobs=[Note, Other]) as queue:
        yield queue


@pytest.fixture
async def default_queue(engine: AsyncEngine) -> AsyncGenerator[Queue]:
    queue = await Queue.init(engine, jobs=[Note, Other])
    yield queue
    await queue.close()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def backend(engine: AsyncEngine, clock: ManualClock) -> AsyncGenerator[Backend]:
    """The seam, with a clock that the test moves; in its own process only, so that what a test counts is its own."""
    backend = connect(engine, QueueConfig(notify=False), clock)
    await backend.open(migrate=True)
    yield backend
    await backend.close()


@pytest.fixture(autouse=True)
async def nothing_left_behind() -> AsyncGenerator[None]:
    """No test may leave a task of ours running, or a default queue behind."""
    yield
    running = [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("queue-core")]
    assert not running, f"still running: {running}"
    assert not Queue.is_initialized(), "the default queue was not closed"


@pytest.fixture
async def refusing_13(queue: Queue, database: Database) -> AsyncGenerator[None]:
    """A rule that the application added to our table: no jobs of tenant 13."""
    del queue  # the tables are there
    if database.kind == "sqlite":
        condition, action = "WHEN new.tenant = '13'", "BEGIN SELECT RAISE(ABORT, 'no 13 here'); END"
        refuse = f"CREATE TRIGGER no_13 BEFORE INSERT ON queue_jobs {condition} {action}"
        allow = "DROP TRIGGER no_13"
    else:
        refuse = "ALTER TABLE queue_jobs ADD CONSTRAINT no_13 CHECK (tenant <> '13')"
        allow = "ALTER TABLE queue_jobs DROP CONSTRAINT no_13"
    database.query(refuse)
    yield
    database.query(allow)
