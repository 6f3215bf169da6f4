"""All that is particular to SQLite but the statements of each operation.

SQLite has one writer at a time. Inside a process our writes share one connection and queue up in
Python, because SQLite's own waiting is an unfair sleep; between processes the busy timeout waits. Every
transaction of more than one statement begins IMMEDIATE: one that reads first and writes later fails with
SQLITE_BUSY_SNAPSHOT, which no timeout waits for. Readers have connections of their own that can't write.
"""

import asyncio
import logging
import sqlite3
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from sqlalchemy import Connection, PoolProxiedConnection, event, select, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from queue_core.clock import Clock, SystemClock
from queue_core.config import QueueConfig
from queue_core.errors import ConfigurationError, TransactionOpen, UnsupportedDatabase, WrongDatabase
from queue_core.model import Claimed, JobTypeName, QueueName, Token, Wakeup, Worker, WorkerId

from .engines import checkout, give_back, own_engine, turn
from .insertion import Insertion
from .keeping import Keeping
from .looking import Looking
from .own_transactions import OwnTransactions
from .producing import AUTOCOMMIT, WRONG_DATABASE
from .sqlite_changes import Changes
from .sqlite_claim import SqliteClaim
from .sqlite_enqueue import SqliteEnqueue
from .sqlite_file import file_name, prepare_file
from .sqlite_presence import Doorbell, LockFile, is_free, remove_free, ring
from .sqlite_settle import SqliteSettle
from .sqlite_upkeep import SqliteUpkeep
from .steps import Steps

_BUSY_TIMEOUT = timedelta(seconds=5)
_OLDEST = (3, 35, 0)
_SAFE = (3, 51, 3)

_log = logging.getLogger(__name__)
_names = msgspec.json.Decoder(list[str]).decode
T = TypeVar("T")


class _Equipment(NamedTuple):
    """What one worker has outside the database."""

    lock_file: LockFile
    lock_name: str | None
    doorbell: Doorbell
    address: str | None


class SqliteBackend(Keeping, Looking):
    """A queue in a SQLite file, through aiosqlite."""

    def __init__(self, engine: AsyncEngine, config: QueueConfig, clock: Clock | None) -> None:
        if config.schema is not None:
            raise ConfigurationError(f"schema={config.schema!r} is for Postgres; SQLite has none: leave it out")
        self._file = file_name(engine.url)
        super().__init__(engine, config)
        time = clock or SystemClock()
        self._enqueue_sql = SqliteEnqueue(time)
        self._claim_sql = self._looking_sql = SqliteClaim(time, config.history)
        self._settle_sql = SqliteSettle(time, config.history)
        self._upkeep_sql = SqliteUpkeep(time, config.history)
        self._last_was_empty = False
        self._equipment: dict[WorkerId, _Equipment] = {}
        self._synchronous = config.synchronous
        self._creates = config.migrate
        self._path = Path()
        self._busy_timeout = min(_BUSY_TIMEOUT, config.give_up_after)
        self._writer = self._own_engine("IMMEDIATE")
        self._readers = self._own_engine("DEFERRED", query_only=True)
        self._write_turn = asyncio.Lock()
        self._pinned: PoolProxiedConnection | None = None
        self._own_transactions: OwnTransactions | None = None
        self._changes = Changes(lambda: self._path, self._hub.announce_all)

    def _own_engine(self, begin: str, *, query_only: bool = False) -> AsyncEngine:
        engine = own_engine(self._users_engine)
        pragmas = (
            f"busy_timeout={self._busy_timeout // timedelta(milliseconds=1)}",
            "journal_mode=WAL",
            f"synchronous={self._synchronous.upper()}",
            "foreign_keys=ON",
            "journal_size_limit=67108864",
            f"query_only={'ON' if query_only else 'OFF'}",
        )

        def on_connect(connection: Any, _record: object) -> None:
            connection.isolation_level = None  # the driver sends no BEGIN of its own
            cursor = connection.cursor()
            for pragma in pragmas:
                cursor.execute(f"PRAGMA {pragma}")
            cursor.close()

        def on_begin(connection: Connection) -> None:
            connection.exec_driver_sql(f"BEGIN {begin}")

        event.listen(engine.sync_engine, "connect", on_connect)
        event.listen(engine.sync_engine, "begin", on_begin)
        return engine

    async def _connect(self, deadline: float) -> None:
        self._path = prepare_file(self._file, create=self._creates)
        if sqlite3.sqlite_version_info < _OLDEST:
            raise UnsupportedDatabase(
                f"queue-core needs SQLite 3.35 or newer, and this Python has {sqlite3.sqlite_version}: use a newer one"
            )
        async with self._reader(deadline) as connection:
            mode = (await connection.execute(text("PRAGMA journal_mode"))).scalar_one()
        if mode != "wal":
            raise UnsupportedDatabase(
                f"SQLite refused the write-ahead log for {self._file} (it answered {mode!r}):"
                " put the file on a local disk that allows shared memory"
            )
        if sqlite3.sqlite_version_info < _SAFE:
            _log.warning(
                "SQLite %s can corrupt a database when two connections write and checkpoint at once, which is rare;"
                " 3.51.3 mends it: use a Python that is built with a newer one",
                sqlite3.sqlite_version,
            )
        if self._own_transactions is None:
            self._own_transactions = OwnTransactions(self._users_engine.sync_engine)

    async def _disconnect(self) -> None:
        if self._own_transactions is not None:
            self._own_transactions.close()
            self._own_transactions = None
        for worker in list(self._equipment):
            self._unequip(worker)
        await self._changes.close()
        async with self._write_turn:
            await self._unpin(broken=False)
        for engine in (self._writer, self._readers):
            await engine.dispose()

    @asynccontextmanager
    async def _reader(self, deadline: float) -> AsyncGenerator[AsyncConnection]:
        async with self._readers.connect() as connection:
            yield connection

    @asynccontextmanager
    async def _schema_transaction(self) -> AsyncGenerator[AsyncConnection]:
        async with self._writer.begin() as connection:
            yield connection

    @asynccontextmanager
    async def _write(self, deadline: float, *, transaction: bool) -> AsyncGenerator[Any]:
        """The driver's own connection, ours alone; in a transaction, or with one for each statement."""
        async with turn(self._write_turn, deadline):
            if self._pinned is None:
                self._pinned = await checkout(self._writer)
            driver: Any = self._pinned.driver_connection
            try:
                if transaction:
                    await driver.execute_fetchall("BEGIN IMMEDIATE")
                yield driver
                if transaction:
                    await driver.commit()
            except sqlite3.Error:
                # SQLite's answer: the connection is as good as before, unless it can't roll back either.
                try:
                    await driver.rollback()
                except sqlite3.Error:
                    await self._unpin(broken=True)
                raise
            except BaseException:
                await self._unpin(broken=True)
                raise

    async def _unpin(self, *, broken: bool) -> None:
        pinned, self._pinned = self._pinned, None
        if pinned is not None:
            await give_back(pinned, broken=broken)

    async def _run(self, steps: Steps[T], deadline: float, *, transaction: bool) -> T:
        # A single statement is a transaction of its own, and takes the write lock as it starts.
        async with self._write(deadline, transaction=transaction) as driver:
            try:
                statement, parameters = next(steps)
                while True:
                    # All rows before the commit: SQLite refuses to commit under an open RETURNING cursor.
                    rows = await driver.execute_fetchall(statement.driver_sql, statement.arguments(parameters))
                    statement, parameters = steps.send(rows)
            except StopIteration as stop:
                answer: T = stop.value
                return answer

    # Claiming

    async def claim(
        self,
        worker: Worker,
        token: Token,
        wanted: Mapping[QueueName, int],
        job_types: Collection[JobTypeName],
    ) -> Claimed:
        claimed = await super().claim(worker, token, wanted, job_types)
        self._last_was_empty = not claimed.jobs
        return claimed

    async def _may_find(self, wanted: Mapping[QueueName, int], job_types: Collection[JobTypeName]) -> bool:
        # Even an empty claim takes the write lock of the whole file. Whoever found nothing looks first.
        if not self._last_was_empty:
            return True
        return bool(
            await self._call(partial(self._looking_sql.is_anything_pending, wanted, job_types), name="look for jobs")
        )

    # Wake-ups

    @asynccontextmanager
    async def wakeups(self, queues: Collection[QueueName]) -> AsyncGenerator[AsyncIterator[Wakeup]]:
        async with AsyncExitStack() as stack:
            if self._telling is not None:
                await stack.enter_async_context(self._changes.watched())
            yield await stack.enter_async_context(self._hub.wakeups(queues))

    async def _tell_others(self, queues: frozenset[QueueName]) -> None:
        workers = self._tables.workers
        live = select(workers.c.wakeup_address, workers.c.queues).where(
            workers.c.stopped_at.is_(None), workers.c.wakeup_address.is_not(None)
        )
        own = {equipment.address for equipment in self._equipment.values()}
        rows = await self._look(live)
        addresses = {row["wakeup_address"] for row in rows if not queues.isdisjoint(_names(row["queues"]))}
        ring(addresses - own)

    # Workers

    def _equip(self, worker: Worker) -> Worker:
        equipment = self._equipment.get(worker.id)
        if equipment is None:
            lock_file = LockFile(self._path, worker.id)
            doorbell = Doorbell(worker.id, partial(self._hub.announce, tuple(worker.queues)))
            equipment = _Equipment(lock_file, lock_file.hold(), doorbell, doorbell.open())
            self._equipment[worker.id] = equipment
        return msgspec.structs.replace(worker, lock_file=equipment.lock_name, wakeup_address=equipment.address)

    def _unequip(self, worker: WorkerId) -> None:
        equipment = self._equipment.pop(worker, None)
        if equipment is not None:
            equipment.lock_file.let_go()
            equipment.doorbell.close()

    def _has_let_go(self, worker: Worker) -> bool:
        return worker.lock_file is not None and is_free(self._path, worker.lock_file)

    def _clean_up_after(self, lock_files: Sequence[str]) -> None:
        remove_free(self._path, lock_files)

    # In the caller's transaction

    def _compare_database(self, connection: Connection) -> None:
        opened = next((row[2] for row in connection.exec_driver_sql("PRAGMA database_list") if row[1] == "main"), "")
        if not opened or not self._path.samefile(opened):
            raise WrongDatabase(WRONG_DATABASE.format(theirs=opened or "a database in memory", ours=self._path))

    def _refuse_autocommit(self, connection: Connection) -> None:
        driver: Any = connection.connection.driver_connection
        # Without an isolation level the driver sends no BEGIN; with a "begin" event of the application's it is there.
        if driver.isolation_level is None and not driver.in_transaction:
            raise ConfigurationError(AUTOCOMMIT)

    @contextmanager
    def _savepoint(self, connection: Connection) -> Generator[None]:
        driver: Any = connection.connection.driver_connection
        if not driver.in_transaction:
            # The driver sends BEGIN only before a write; the release of a savepoint without it is a commit.
            connection.exec_driver_sql("BEGIN")
        with connection.begin_nested():
            yield

    @contextmanager
    def _bounded_wait(self, connection: Connection, insertion: Insertion) -> Generator[timedelta | None]:
        """The busy timeout of the caller's connection bounds it."""
        yield None

    def refuse_own_lock(self) -> None:
        if self._own_transactions is not None and self._own_transactions.has_written():
            raise TransactionOpen(
                "enqueue() was called inside your own open transaction, which keeps the SQLite file locked and would"
                " wait for itself: pass session= (or connection=) to enqueue in that transaction, or commit it first"
            )
