"""All that is particular to Postgres but the statements of each operation.

Our own statements run on the driver's connection. A batch that is one statement commits by itself,
without a BEGIN and a COMMIT of its own. Time is the database's.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Generator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import asyncpg
import msgspec
from sqlalchemy import Connection, Engine, NestedTransaction, PoolProxiedConnection, inspect, text
from sqlalchemy.dialects.postgresql.asyncpg import dialect as asyncpg_dialect
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.schema import CreateSchema

from queue_core.clock import Clock
from queue_core.config import QueueConfig
from queue_core.errors import ConfigurationError, UnsupportedDatabase, WrongDatabase
from queue_core.ids import time_ordered_uuid
from queue_core.model import QueueName, Wakeup, Worker, WorkerId

from .base import time_left
from .engines import checkout, give_back, own_engine, turn
from .insertion import Insertion
from .keeping import Keeping
from .looking import Looking
from .postgres_claim import PostgresClaim
from .postgres_enqueue import PostgresEnqueue
from .postgres_listen import CHANNEL, Listener
from .postgres_settle import PostgresSettle
from .postgres_upkeep import PostgresUpkeep
from .producing import AUTOCOMMIT, WRONG_DATABASE
from .statement import Call, Statement
from .steps import Steps
from .tables import build_tables

T = TypeVar("T")

_CONNECTIONS = 4
_CONNECT_TIMEOUT = 10.0
_STATEMENT_TIMEOUT = 15.0
_OLDEST_SERVER = 140_000
_SCHEMA_LOCK = 0x71756575
_PLAN_AGE = 1.0
_NOTIFY_WITHIN = 2.0
_LAST_WORD = 1.0
_PLANNED_UNTIL = "queue_core_planned_until"

_SERVER = text("SELECT CAST(current_setting('server_version_num') AS integer), current_schema()")

# The same server may go by several names (localhost, 127.0.0.1, a socket, a pooler); this it has only once.
_IDENTITY = text("SELECT current_database(), CAST(system_identifier AS text) FROM pg_control_system()")

_NOTIFY = Statement("SELECT pg_notify(:channel, hint) FROM unnest(CAST(:hints AS text[])) AS hint", asyncpg_dialect())

_encode = msgspec.json.Encoder().encode
_decode_hint = msgspec.json.Decoder(tuple[str, str, str]).decode


class PostgresBackend(Keeping, Looking):
    """A queue in Postgres 14 or newer, through asyncpg."""

    def __init__(self, engine: AsyncEngine, config: QueueConfig, clock: Clock | None) -> None:
        super().__init__(engine, config)
        self._clock = clock
        self._engine = own_engine(engine)
        # The copied pool has the size of the application's: the queue takes a few at most.
        self._slots = asyncio.Semaphore(_CONNECTIONS)
        self._identity: Sequence[str] | None = None
        self._history = config.history
        self._place = ""
        self._sender = time_ordered_uuid()
        self._listener = Listener(self._listening_connection, self._on_hint, self._hub.announce_all)

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
        self._place = self._schema or schema
        self._tables = build_tables(self._place)
        self._enqueue_sql = PostgresEnqueue(self._tables, self._clock)
        self._claim_sql = PostgresClaim(self._tables, self._clock, self._history)
        self._settle_sql = PostgresSettle(self._tables, self._clock, self._history)
        self._upkeep_sql = PostgresUpkeep(self._tables, self._clock, self._history)
        with contextlib.suppress(DBAPIError):  # not everybody may ask
            async with self._reader(deadline) as connection:
                self._identity = tuple((await connection.execute(_IDENTITY)).one())

    async def _disconnect(self) -> None:
        await self._listener.close()
        await self._engine.dispose()

    @asynccontextmanager
    async def _reader(self, deadline: float) -> AsyncGenerator[AsyncConnection]:
        limit = asyncio.timeout_at(deadline + _LAST_WORD)
        async with turn(self._slots, deadline), limit, self._engine.connect() as connection:
            driver: Any = (await connection.get_raw_connection()).driver_connection
            with _cut_off(driver):
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
                await self._refresh_plans(connection, driver, deadline)
                yield driver
            except asyncpg.PostgresError:
                # The server's answer: the connection is as good as before, unless it ended with it.
                await give_back(connection, broken=driver.is_closed() or driver.is_in_transaction())
                raise
            except BaseException:
                await give_back(connection, broken=True)
                raise
            await give_back(connection)

    async def _refresh_plans(self, connection: PoolProxiedConnection, driver: Any, deadline: float) -> None:
        """Let statements be planned again from time to time, for the table as it is then.

        A plan is kept with its prepared statement until somebody analyses the table. One that was made while the
        queue was empty reads the whole table; after a burst of a million jobs each claim would, for a minute.
        """
        now = asyncio.get_running_loop().time()
        if now >= connection.info.get(_PLANNED_UNTIL, 0.0):
            if _PLANNED_UNTIL in connection.info:
                await driver.execute("DISCARD PLANS", timeout=time_left(deadline) + _LAST_WORD)
            connection.info[_PLANNED_UNTIL] = now + _PLAN_AGE

    async def _run(self, steps: Steps[T], deadline: float, *, transaction: bool) -> T:
        async with self._driver(deadline) as driver:
            if not transaction:
                return await self._drive(steps, driver, deadline)
            # BEGIN, COMMIT and ROLLBACK have no time limit of their own.
            async with asyncio.timeout_at(deadline + _LAST_WORD), driver.transaction(isolation="read_committed"):
                with _cut_off(driver):
                    return await self._drive(steps, driver, deadline)

    async def _drive(self, steps: Steps[T], driver: Any, deadline: float) -> T:
        try:
            statement, parameters = next(steps)
            while True:
                # A second more than the server's own limit for locks, whose error says more.
                limit = min(_STATEMENT_TIMEOUT, time_left(deadline) + 1)
                rows = await driver.fetch(statement.driver_sql, *statement.arguments(parameters), timeout=limit)
                statement, parameters = steps.send(rows)
        except StopIteration as stop:
            answer: T = stop.value
            return answer

    # Wake-ups

    @asynccontextmanager
    async def wakeups(self, queues: Collection[QueueName]) -> AsyncGenerator[AsyncIterator[Wakeup]]:
        async with AsyncExitStack() as stack:
            if self._telling is not None:
                await stack.enter_async_context(self._listener.listening())
            yield await stack.enter_async_context(self._hub.wakeups(queues))

    async def _tell_others(self, queues: frozenset[QueueName]) -> None:
        hints = [_encode((self._place, self._sender, queue)).decode() for queue in queues]
        # Tried once: nobody waits for it, and a hint that comes late is of no use.
        await self._run(_notify(hints), asyncio.get_running_loop().time() + _NOTIFY_WITHIN, transaction=False)

    def _on_hint(self, payload: str) -> None:
        try:
            place, sender, queue = _decode_hint(payload)
        except msgspec.DecodeError:
            return  # somebody else's use of the channel
        if place == self._place and sender != self._sender:
            self._hub.announce([queue])

    async def _listening_connection(self) -> Any:
        """A connection that belongs to no pool: it is never given back."""
        async with asyncio.timeout(_CONNECT_TIMEOUT):
            connection = await checkout(self._engine)
        driver: Any = connection.driver_connection
        connection.detach()
        return driver

    # Workers: their lease is all that others know of them

    def _equip(self, worker: Worker) -> Worker:
        return worker

    def _unequip(self, worker: WorkerId) -> None: ...

    def _has_let_go(self, worker: Worker) -> bool:
        return False

    def _clean_up_after(self, lock_files: Sequence[str]) -> None: ...

    # In the caller's transaction

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


@contextmanager
def _cut_off(driver: Any) -> Generator[None]:
    """End the connection at once when its time is up: a rollback on one that does not answer would wait for ever."""
    try:
        yield
    except asyncio.CancelledError:
        driver.terminate()
        raise


def _notify(hints: Sequence[str]) -> Steps[None]:
    yield Call(_NOTIFY, {"channel": CHANNEL, "hints": hints})


def _address(engine: Engine) -> str:
    url = engine.url
    return f"{url.database} on {url.host or 'the local socket'}:{url.port or 5432}"


def _has_schema(connection: Connection, name: str) -> bool:
    return inspect(connection).has_schema(name)
