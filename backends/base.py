"""What both backends share: opening and closing, enqueueing in one go, looking, repeating what failed.

What differs is left to the subclasses as abstract methods; neither of them is asked which one it is.
"""

import asyncio
import random
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

import msgspec
from sqlalchemy import Connection, Engine, Executable, RowMapping, func, literal, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from queue_core import schema as revisions
from queue_core.config import QueueConfig
from queue_core.errors import BackendUnavailable, KeyLocked, WrongDatabase
from queue_core.model import Enqueued, JobId, JobStatus, NewJob, QueueCounts, QueueName, StoredJob, Wakeup
from queue_core.shield import finish

from .committed import CommitWatch
from .faults import origin, translate, translate_in_transaction
from .hub import Hub
from .insertion import EnqueueSql, Insertion
from .tables import Tables, build_tables

T = TypeVar("T")

AUTOCOMMIT = (
    "the session or connection is in AUTOCOMMIT mode, where a rollback would leave the job: use one with a transaction"
    ' (leave isolation_level="AUTOCOMMIT" out), or enqueue without it'
)
WRONG_DATABASE = (
    "the session or connection belongs to {theirs}, and this queue is in {ours}:"
    " enqueue without it, or open a queue in that database"
)
_FIRST_PAUSE = 0.02
_LONGEST_PAUSE = 1.0


class SqlBackend(ABC):
    """An open database. One event loop uses it; `enqueue_on` may be called from any thread."""

    _enqueue_sql: EnqueueSql

    def __init__(self, engine: AsyncEngine, config: QueueConfig) -> None:
        self._users_engine = engine
        self._schema = config.schema
        self._give_up_after = config.give_up_after
        self._tables: Tables = build_tables(config.schema)
        self._hub = Hub()
        self._commits: CommitWatch | None = None
        self._writing: set[asyncio.Task[Any]] = set()
        self._same_database: WeakSet[Engine] = WeakSet([engine.sync_engine])

    # Opening and closing

    async def open(self, *, migrate: bool) -> None:
        self._commits = CommitWatch(self._hub.announce)
        try:
            await finish(self._repeat(self._connect), name="queue-core connect")
            await finish(self._repeat(partial(self._prepare_schema, migrate)), name="queue-core schema")
        except BaseException:
            await self.close()
            raise

    async def _prepare_schema(self, migrate: bool, deadline: float) -> None:
        async with self._reader(deadline) as connection:
            # Looked at first: a database that is up to date needs no lock, and no right to change tables.
            if revisions.is_current(await connection.run_sync(revisions.current_revision, self._schema)):
                return
            if not migrate:
                await connection.run_sync(revisions.check, self._schema)
        async with self._schema_transaction() as connection:
            await connection.run_sync(revisions.upgrade, self._schema)

    async def close(self) -> None:
        await finish(self._close(), name="queue-core disconnect")

    async def _close(self) -> None:
        if self._writing:
            # They would open connections again after the pools were closed.
            await asyncio.wait(self._writing)
        if self._commits is not None:
            await self._commits.close()
        await self._disconnect()

    @abstractmethod
    async def _connect(self, deadline: float) -> None:
        """Make the first connection, and check that the database's settings are what we rely on."""

    @abstractmethod
    async def _disconnect(self) -> None: ...

    @abstractmethod
    def _reader(self, deadline: float) -> AbstractAsyncContextManager[AsyncConnection]:
        """A connection that looks and writes nothing."""

    @abstractmethod
    def _schema_transaction(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """A transaction that only one process at a time can be in."""

    # Enqueueing

    async def enqueue_many(self, jobs: Sequence[NewJob], *, patience: timedelta | None = None) -> Sequence[Enqueued]:
        if not jobs:
            return []
        return await finish(self._enqueue(jobs, patience), name="queue-core enqueue", among=self._writing)

    async def _enqueue(self, jobs: Sequence[NewJob], patience: timedelta | None) -> Sequence[Enqueued]:
        insertion = Insertion(jobs)

        async def insert(deadline: float) -> Sequence[Enqueued]:
            wait = timedelta(seconds=time_left(deadline)) if patience is None else patience
            try:
                return await self._insert(insertion, wait, deadline)
            except Exception as error:
                told = translate(error)
                if isinstance(told, KeyLocked) and not insertion.has_keys:
                    raise BackendUnavailable(
                        "another transaction keeps the whole table locked (a migration, VACUUM FULL, LOCK TABLE):"
                        " wait for its end and try again"
                    ) from origin(error)
                raise

        answers = await self._repeat(insert)
        self._hub.announce(insertion.woken_queues(answers))
        return answers

    @abstractmethod
    async def _insert(self, insertion: Insertion, patience: timedelta, deadline: float) -> Sequence[Enqueued]:
        """Run the insertion's steps on the driver's connection, in one transaction."""

    def enqueue_on(self, connection: Connection, jobs: Sequence[NewJob]) -> Sequence[Enqueued]:
        if not jobs:
            return []
        with self.callers_transaction():
            if not connection.in_transaction():
                connection.begin()
            self._refuse_other_database(connection)
            self._refuse_autocommit(connection)
            return self._insert_on(connection, Insertion(jobs))

    @contextmanager
    def callers_transaction(self) -> Generator[None]:
        try:
            yield
        except Exception as error:
            told = translate_in_transaction(error)
            if told is error:
                raise
            raise told from origin(error)

    def _insert_on(self, connection: Connection, insertion: Insertion) -> Sequence[Enqueued]:
        # A savepoint, so that a bulk which fails in the middle leaves nothing of itself in the caller's transaction.
        whole = nullcontext() if insertion.is_one_statement else self._savepoint(connection)
        with self._bounded_wait(connection, insertion) as patience, whole:
            steps = insertion.steps(self._enqueue_sql, patience)
            try:
                call = next(steps)
                while True:
                    call = steps.send(connection.execute(call.statement.clause, call.parameters).all())
            except StopIteration as stop:
                answers: Sequence[Enqueued] = stop.value
        if self._commits is not None:
            self._commits.expect(connection, insertion.woken_queues(answers))
        return answers

    @abstractmethod
    def _bounded_wait(self, connection: Connection, insertion: Insertion) -> AbstractContextManager[timedelta | None]:
        """Keep the wait for a key in the caller's transaction short of for ever; gives the patience to use."""

    @abstractmethod
    def _savepoint(self, connection: Connection) -> AbstractContextManager[object]:
        """A savepoint in the caller's transaction."""

    @abstractmethod
    def _refuse_autocommit(self, connection: Connection) -> None:
        """Refuse a connection that commits each statement: a rollback would leave the job."""

    def _refuse_other_database(self, connection: Connection) -> None:
        engine = connection.engine
        if engine in self._same_database:
            return
        theirs, ours = engine.dialect.name, self._users_engine.dialect.name
        if theirs != ours:
            raise WrongDatabase(WRONG_DATABASE.format(theirs=theirs, ours=ours))
        self._compare_database(connection)
        self._same_database.add(engine)

    @abstractmethod
    def _compare_database(self, connection: Connection) -> None:
        """Raise `WrongDatabase` for another one of the same kind, by whatever name it goes."""

    @abstractmethod
    def refuse_own_lock(self) -> None: ...

    def wakeups(self, queues: Collection[QueueName]) -> AbstractAsyncContextManager[AsyncIterator[Wakeup]]:
        return self._hub.wakeups(queues)

    # Looking

    async def get(self, job_id: JobId) -> StoredJob | None:
        jobs = self._tables.jobs
        rows = await self._look(select(jobs).where(jobs.c.id == job_id))
        return _stored_job(rows[0]) if rows else None

    async def counts(self) -> Mapping[QueueName, QueueCounts]:
        jobs, dead = self._tables.jobs, self._tables.dead_jobs
        count = func.count().label("count")
        # One statement, so that a job which is parked meanwhile is counted once.
        rows = await self._look(
            select(jobs.c.queue, jobs.c.status, count)
            .group_by(jobs.c.queue, jobs.c.status)
            .union_all(select(dead.c.queue, literal("dead"), count).group_by(dead.c.queue))
        )
        found: defaultdict[QueueName, dict[str, int]] = defaultdict(dict)
        for row in rows:
            found[row["queue"]][row["status"]] = row["count"]
        return {queue: QueueCounts(**counts) for queue, counts in sorted(found.items())}

    async def _look(self, statement: Executable) -> Sequence[RowMapping]:
        async def read(deadline: float) -> Sequence[RowMapping]:
            async with self._reader(deadline) as connection:
                rows: Sequence[RowMapping] = (await connection.execute(statement)).mappings().all()
                return rows

        # Shielded as well: a cancelled read keeps its snapshot, and with it the write-ahead log, until it is collected.
        return await finish(self._repeat(read), name="queue-core read")

    # Trouble

    async def _repeat(self, operation: Callable[[float], Awaitable[T]]) -> T:
        """Do it, and again while the database is away, until the deadline that it is given as well.

        Only for what is safe to repeat.
        """
        deadline = asyncio.get_running_loop().time() + self._give_up_after.total_seconds()
        pause = _FIRST_PAUSE
        while True:
            try:
                return await operation(deadline)
            except Exception as error:
                told = translate(error)
                final = not isinstance(told, BackendUnavailable) or isinstance(told, KeyLocked)
                if final or time_left(deadline) < pause:
                    if told is error:
                        raise
                    raise told from origin(error)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 spreads callers out
            pause = min(pause * 2, _LONGEST_PAUSE)


def time_left(deadline: float) -> float:
    """Seconds; a moment at the least, so that what has come this far is tried."""
    return max(deadline - asyncio.get_running_loop().time(), 0.01)


def _stored_job(row: RowMapping) -> StoredJob:
    values: dict[str, Any] = {name: row[name] for name in StoredJob.__struct_fields__}
    headers = values.pop("headers")
    return StoredJob(
        status=JobStatus(values.pop("status")),
        headers={} if headers is None else msgspec.json.decode(headers, type=dict[str, str]),
        **values,
    )
