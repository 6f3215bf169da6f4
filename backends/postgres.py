"""All that is particular to Postgres but the statements of each operation.

Our own statements run on the driver's connection. A batch that is one statement commits by itself,
without a BEGIN and a COMMIT of its own. Time is the database's.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from typing import Any

import asyncpg
from sqlalchemy import Connection, Engine, NestedTransaction, inspect, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.schema import CreateSchema

from queue_core.clock import Clock
from queue_core.config import QueueConfig
from queue_core.errors import ConfigurationError, UnsupportedDatabase, WrongDatabase
from queue_core.model import Enqueued

from .base import AUTOCOMMIT, WRONG_DATABASE, SqlBackend, time_left
from .engines import checkout, give_back, own_engine, turn
from .insertion import Insertion
from .postgres_enqueue import PostgresEnqueue
from .tables import build_tables

_CONNECTIONS = 4
_CONNECT_TIMEOUT = 10.0
_STATEMENT_TIMEOUT = 15.0
_OLDEST_SERVER = 140_000
_SCHEMA_LOCK = 0x71756575

_SERVER = text("SELECT CAST(current_setting('server_version_num') AS integer), current_schema()")

# The same server may go by several names (localhost, 127.0.0.1, a socket, a pooler); this it has only once.
_IDENTITY = text("SELECT current_database(), CAST(system_identifier AS text) FROM pg_control_system()")


class PostgresBackend(SqlBackend):
    """A queue in Postgres 14 or newer, through asyncpg."""

    def __init__(self, engine: AsyncEngine, config: QueueConfig, clock: Clock | None) -> None:
        super().__init__(engine, config)
        self._clock = clock
        self._engine = own_engine(engine)
        # The copied pool has the size of the application's: the queue takes a few at most.
        self._slots = asyncio.Semaphore(_CONNECTIONS)
        self._identity: Sequence[str] | None = None

    async def _connect(self, deadline: float) -> None:
        async with self._reader(deadline) as connection:
            number, schema = (await connection.execute(_SERVER)).one()
        if number < _OLDEST_SERVER:
            raise UnsupportedDatabase(
                f"queue-core needs Postgres 14 or newer, and this server is {number // 10_000}: upgrade it"
            )
        if self._schema is None and schema is None:
            raise ConfigurationError(
                "no schema of the search_path exists, so the tables have no place to be: give schema=, or create one"
            )
        # Named from here on: a caller's transaction may have another search_path, and tables of the same name there.
        self._tables = build_tables(self._schema or schema)
        self._enqueue_sql = PostgresEnqueue(self._tables, self._clock)
        with contextlib.suppress(DBAPIError):  # not everybody may ask
            async with self._reader(deadline) as connection:
                self._identity = tuple((await connection.execute(_IDENTITY)).one())

    async def _disconnect(self) -> None:
        await self._engine.dispose()

    @asynccontextmanager
    async def _reader(self, deadline: float) -> AsyncGenerator[AsyncConnection]:
        async with turn(self._slots, deadline), self._engine.connect() as connection:
            yield connection

    @asynccontextmanager
    async def _schema_transaction(self) -> AsyncGenerator[AsyncConnection]:
        # READ COMMITTED, whatever the application uses: with an older snapshot whoever waited for the lock would not
        # see the tables that were made meanwhile, and in AUTOCOMMIT the lock would be gone at once.
        engine = self._engine.execution_options(isolation_level="READ COMMITTED")
        async with self._slots, engine.begin() as connection:
            # Held until the commit. One for all schemas: two names may mean the same one.
            await connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _SCHEMA_LOCK})
            # Looked for first: IF NOT EXISTS wants the right to make schemas even when there is nothing to make.
            if self._schema is not None and not await connection.run_sync(_has_schema, self._schema):
                await connection.execute(CreateSchema(self._schema))
            yield connection

    @asynccontextmanager
    async def _driver(self, deadline: float) -> AsyncGenerator[Any]:
        """The driver's own connection, out of our pool."""
        async with turn(self._slots, deadline):
            async with asyncio.timeout(min(_CONNECT_TIMEOUT, time_left(deadline))):
                connection = await checkout(self._engine)
            driver: Any = connection.driver_connection
            try:
                yield driver
            except asyncpg.PostgresError:
                # The server's answer: the connection is as good as before, unless it ended with it.
                await give_back(connection, broken=driver.is_closed() or driver.is_in_transaction())
                raise
            except BaseException:
                await give_back(connection, broken=True)
                raise
            await give_back(connection)

    async def _insert(self, insertion: Insertion, patience: timedelta, deadline: float) -> Sequence[Enqueued]:
        async with self._driver(deadline) as driver:
            if insertion.is_one_statement:
                return await self._run(insertion, patience, driver, deadline)
            async with driver.transaction(isolation="read_committed"):
                return await self._run(insertion, patience, driver, deadline)

    async def _run(self, insertion: Insertion, patience: timedelta, driver: Any, deadline: float) -> Sequence[Enqueued]:
        steps = insertion.steps(self._enqueue_sql, patience)
        try:
            statement, parameters = next(steps)
            while True:
                # A second more than the server's own limit for locks, whose error says more.
                limit = min(_STATEMENT_TIMEOUT, time_left(deadline) + 1)
                rows = await driver.fetch(statement.driver_sql, *statement.arguments(parameters), timeout=limit)
                statement, parameters = steps.send(rows)
        except StopIteration as stop:
            answers: Sequence[Enqueued] = stop.value
            return answers

    @contextmanager
    def _bounded_wait(self, connection: Connection, insertion: Insertion) -> Generator[timedelta | None]:
        """A lock timeout of the caller's own is left alone; where there is none, ours holds for this enqueue."""
        if not insertion.has_keys or connection.scalar(text("SELECT current_setting('lock_timeout')")) != "0":
            yield None
            return
        yield self._give_up_after
        connection.execute(text("SELECT set_config('lock_timeout', '0', true)"))

    def _savepoint(self, connection: Connection) -> NestedTransaction:
        return connection.begin_nested()

    def _refuse_autocommit(self, connection: Connection) -> None:
        if getattr(connection.connection.dbapi_connection, "autocommit", False) is True:
            raise ConfigurationError(AUTOCOMMIT)

    def _compare_database(self, connection: Connection) -> None:
        theirs, ours = _address(connection.engine), _address(self._users_engine.sync_engine)
        if theirs == ours:
            return
        if self._identity is None:
            raise WrongDatabase(
                f"the session or connection goes to {theirs} and this queue to {ours}, and this role may not ask"
                " whether they are the same: use the same address for both, or grant it pg_control_system()"
            )
        if tuple(connection.execute(_IDENTITY).one()) != self._identity:
            raise WrongDatabase(WRONG_DATABASE.format(theirs=theirs, ours=ours))

    def refuse_own_lock(self) -> None:
        """Postgres locks rows and not the database: the caller's own transaction is in nobody's way."""


def _address(engine: Engine) -> str:
    url = engine.url
    return f"{url.database} on {url.host or 'the local socket'}:{url.port or 5432}"


def _has_schema(connection: Connection, name: str) -> bool:
    return inspect(connection).has_schema(name)
