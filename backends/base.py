"""What both backends share: opening and closing, enqueueing in one go, looking, repeating what failed.

What differs is left to the subclasses as abstract methods; neither of them is asked which one it is.
"""

import asyncio
import random
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
from sqlalchemy import Connection, Executable, RowMapping, func, literal, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from queue_core import schema as revisions
from queue_core.config import QueueConfig
from queue_core.errors import BackendUnavailable, KeyLocked
from queue_core.model import Enqueued, JobId, JobStatus, NewJob, QueueCounts, QueueName, StoredJob, Wakeup
from queue_core.shield import finish

from .committed import CommitWatch
from .faults import translate
from .hub import Hub
from .insertion import EnqueueSql, Insertion
from .tables import Tables, build_tables

T = TypeVar("T")

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

    # Opening and closing

    async def open(self, *, migrate: bool) -> None:
        self._commits = CommitWatch(self._hub.announce)
        try:
            await self._repeat(self._connect)
            await finish(self._repeat(lambda: self._prepare_schema(migrate)), name="queue-core schema")
        except BaseException:
            await self.close()
            raise

    async def _prepare_schema(self, migrate: bool) -> None:
        async with self._reader() as connection:
            # Looked at first: a database that is up to date needs no lock, and no right to change tables.
            if revisions.is_current(await connection.run_sync(revisions.current_revision, self._schema)):
                return
            if not migrate:
                await connection.run_sync(revisions.check, self._schema)
        async with self._schema_transaction() as connection:
            await connection.run_sync(revisions.upgrade, self._schema)

    async def close(self) -> None:
        if self._commits is not None:
            await self._commits.close()
        await finish(self._disconnect(), name="queue-core disconnect")

    @abstractmethod
    async def _connect(self) -> None:
        """Make the engines, and check that the database's settings are what we rely on."""

    @abstractmethod
    async def _disconnect(self) -> None: ...

    @abstractmethod
    def _reader(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """A connection that looks and writes nothing."""

    @abstractmethod
    def _schema_transaction(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """A transaction that only one process at a time can be in."""

    # Enqueueing

    async def enqueue_many(self, jobs: Sequence[NewJob], *, patience: timedelta | None = None) -> Sequence[Enqueued]:
        if not jobs:
            return []
        return await finish(self._enqueue_and_tell(jobs, patience), name="queue-core enqueue")

    async def _enqueue_and_tell(self, jobs: Sequence[NewJob], patience: timedelta | None) -> Sequence[Enqueued]:
        wait = self._give_up_after if patience is None else patience
        insertion, answers = await self._repeat(lambda: self._enqueue(jobs, wait))
        self._hub.announce(insertion.woken_queues(answers))
        return answers

    async def _enqueue(self, jobs: Sequence[NewJob], patience: timedelta) -> tuple[Insertion, Sequence[Enqueued]]:
        insertion = Insertion(jobs)
        return insertion, await self._insert(insertion, patience)

    @abstractmethod
    async def _insert(self, insertion: Insertion, patience: timedelta) -> Sequence[Enqueued]:
        """Run the insertion's steps on the driver's connection, in one transaction."""

    def enqueue_on(self, connection: Connection, jobs: Sequence[NewJob]) -> Sequence[Enqueued]:
        self._refuse_other_database(connection)
        insertion = Insertion(jobs)
        steps = insertion.steps(self._enqueue_sql, None)
        try:
            call = next(steps)
            while True:
                rows = connection.execute(call.statement.clause, call.parameters).all()
                call = steps.send(rows)
        except StopIteration as stop:
            answers: Sequence[Enqueued] = stop.value
        except Exception as error:
            raise translate(error) from error
        if self._commits is not None:
            self._commits.expect(connection, insertion.woken_queues(answers))
        return answers

    @abstractmethod
    def _refuse_other_database(self, connection: Connection) -> None: ...

    @abstractmethod
    async def refuse_own_lock(self) -> None: ...

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
        async def read() -> Sequence[RowMapping]:
            async with self._reader() as connection:
                rows: Sequence[RowMapping] = (await connection.execute(statement)).mappings().all()
                return rows

        return await self._repeat(read)

    # Trouble

    async def _repeat(self, operation: Callable[[], Awaitable[T]]) -> T:
        """Do it, and again while the database is away, for a bounded time. Only for what is safe to repeat."""
        give_up_at = time.monotonic() + self._give_up_after.total_seconds()
        pause = _FIRST_PAUSE
        while True:
            try:
                return await operation()
            except Exception as error:
                told = translate(error)
                final = not isinstance(told, BackendUnavailable) or isinstance(told, KeyLocked)
                if final or time.monotonic() + pause > give_up_at:
                    if told is error:
                        raise
                    raise told from error
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 spreads callers out
            pause = min(pause * 2, _LONGEST_PAUSE)


def _stored_job(row: RowMapping) -> StoredJob:
    values: dict[str, Any] = {name: row[name] for name in StoredJob.__struct_fields__}
    headers = values.pop("headers")
    return StoredJob(
        status=JobStatus(values.pop("status")),
        headers={} if headers is None else msgspec.json.decode(headers, type=dict[str, str]),
        **values,
    )
