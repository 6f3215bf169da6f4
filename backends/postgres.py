"""All that is particular to Postgres but the statements of each operation.

Our own statements run on the driver's connection. A batch that is one statement commits by itself,
without a BEGIN and a COMMIT of its own. Time is the database's.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import asyncpg
from sqlalchemy import Connection, Engine, inspect, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.schema import CreateSchema

from queue_core.clock import Clock
from queue_core.config import QueueConfig
from queue_core.errors import UnsupportedDatabase, WrongDatabase
from queue_core.model import Enqueued

from .base import SqlBackend
from .engines import checkout, give_back, own_engine
from .insertion import Insertion
from .postgres_enqueue import PostgresEnqueue

_CONNECTIONS = 4
_CONNECT_TIMEOUT = 10.0
_STATEMENT_TIMEOUT = 15.0
_OLDEST_SERVER = 140_000
_SCHEMA_LOCK = 0x71756575

# The same server may go by several names (localhost, 127.0.0.1, a socket, a pooler); this it has only once.
_IDENTITY = text("SELECT current_database(), CAST(system_identifier AS text) FROM pg_control_system()")


class PostgresBackend(SqlBackend):
    """A queue in Postgres 14 or newer, through asyncpg."""

    def __init__(self, engine: AsyncEngine, config: QueueConfig, clock: Clock | None) -> None:
        super().__init__(engine, config)
        self._enqueue_sql = PostgresEnqueue(self._tables, clock)
        self._engine = own_engine(engine)
        # The copied pool has the size of the application's: the queue takes a few at most.
        self._slots = asyncio.Semaphore(_CONNECTIONS)
        self._identity: Sequence[str] = ()
        self._same_database: WeakSet[Engine] = WeakSet([engine.sync_engine])

    async def _connect(self) -> None:
        async with self._driver() as driver:
            number: str = await driver.fetchval("SHOW server_version_num", timeout=_STATEMENT_TIMEOUT)
        if int(number) < _OLDEST_SERVER:
            raise UnsupportedDatabase(
                f"queue-core needs Postgres 14 or newer, and this server is {int(number) // 10_000}: upgrade it"
            )
        async with self._reader() as connection:
            self._identity = tuple((await connection.execute(_IDENTITY)).one())

    async def _disconnect(self) -> None:
        await self._engine.dispose()

    @asynccontextmanager
    async def _reader(self) -> AsyncGenerator[AsyncConnection]:
        async with self._slots, self._engine.connect() as connection:
            yield connection

    @asynccontextmanager
    async def _schema_transaction(self) -> AsyncGenerator[AsyncConnection]:
        async with self._slots, self._engine.begin() as connection:
            # Held until the commit, so that whoever comes second sees the finished tables.
            await connection.execute(
                text("SELECT pg_advisory_xact_lock(:lock, hashtext(:schema))"),
                {"lock": _SCHEMA_LOCK, "schema": self._schema or ""},
            )
            # Looked for first: IF NOT EXISTS wants the right to make schemas even when there is nothing to make.
            if self._schema is not None and not await connection.run_sync(_has_schema, self._schema):
                await connection.execute(CreateSchema(self._schema))
            yield connection

    @asynccontextmanager
    async def _driver(self) -> AsyncGenerator[Any]:
        """The driver's own connection, out of our pool."""
        async with self._slots:
            async with asyncio.timeout(_CONNECT_TIMEOUT):
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

    async def _insert(self, insertion: Insertion, patience: timedelta) -> Sequence[Enqueued]:
        async with self._driver() as driver:
            if insertion.is_one_statement:
                return await self._run(insertion, patience, driver)
            async with driver.transaction(isolation="read_committed"):
                return await self._run(insertion, patience, driver)

    async def _run(self, insertion: Insertion, patience: timedelta, driver: Any) -> Sequence[Enqueued]:
        steps = insertion.steps(self._enqueue_sql, patience)
        try:
            statement, parameters = next(steps)
            while True:
                rows = await driver.fetch(
                    statement.driver_sql, *statement.arguments(parameters), timeout=_STATEMENT_TIMEOUT
                )
                statement, parameters = steps.send(rows)
        except StopIteration as stop:
            answers: Sequence[Enqueued] = stop.value
            return answers

    def _refuse_other_database(self, connection: Connection) -> None:
        engine = connection.engine
        if engine in self._same_database:
            return
        if engine.dialect.name != self._users_engine.dialect.name:
            raise WrongDatabase(
                f"the session or connection is one of {engine.dialect.name}, and this queue is in Postgres:"
                " enqueue without it, or open a queue in that database"
            )
        theirs = tuple(connection.execute(_IDENTITY).one())
        if theirs != self._identity:
            raise WrongDatabase(
                f"the session or connection belongs to the database {theirs[0]!r} of {_server(engine)}, and this queue"
                f" is in {self._identity[0]!r} of {_server(self._users_engine.sync_engine)}:"
                " enqueue without it, or open a queue in that database"
            )
        self._same_database.add(engine)

    async def refuse_own_lock(self) -> None:
        """Postgres locks rows and not the database: the caller's own transaction is in nobody's way."""


def _has_schema(connection: Connection, name: str) -> bool:
    return inspect(connection).has_schema(name)


def _server(engine: Engine) -> str:
    return f"{engine.url.host or 'the local socket'}:{engine.url.port or 5432}"
