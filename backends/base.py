"""What every part of both backends shares: opening and closing, running steps, looking, repeating what failed.

What differs between the databases is left to the subclasses as abstract methods; neither of them is
asked which one it is. The parts of the seam are subclasses of their own, cut by who calls them.
"""

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

from sqlalchemy import Engine, Executable, RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from queue_core import schema as revisions
from queue_core.config import QueueConfig
from queue_core.errors import BackendUnavailable, KeyLocked
from queue_core.model import QueueName
from queue_core.shield import finish

from .committed import CommitWatch
from .faults import is_answer, origin, translate
from .hub import Hub
from .statement import Call
from .steps import Rows, Steps
from .tables import Tables, build_tables
from .telling import Telling

T = TypeVar("T")

_FIRST_PAUSE = 0.02
_LONGEST_PAUSE = 1.0


class SqlBase(ABC):
    """An open database. One event loop uses it."""

    def __init__(self, engine: AsyncEngine, config: QueueConfig) -> None:
        self._users_engine = engine
        self._schema = config.schema
        self._give_up_after = config.give_up_after
        self._tables: Tables = build_tables(config.schema)
        self._hub = Hub()
        self._telling = Telling(self._tell_others) if config.notify else None
        self._commits: CommitWatch | None = None
        self._writing: set[asyncio.Task[Any]] = set()
        self._same_database: WeakSet[Engine] = WeakSet([engine.sync_engine])

    # Opening and closing

    async def open(self, *, migrate: bool) -> None:
        self._commits = CommitWatch(self._announce)
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
        if self._telling is not None:
            await self._telling.close()
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

    # Wake-ups

    def _announce(self, queues: Collection[QueueName]) -> None:
        """Say that these queues have something to claim, now that it is committed: here, and in other processes."""
        if queues:
            self._hub.announce(queues)
            if self._telling is not None:
                self._telling.announce(queues)

    @abstractmethod
    async def _tell_others(self, queues: frozenset[QueueName]) -> None:
        """Wake the workers of other processes that wait for these queues."""

    # Running

    @abstractmethod
    async def _run(self, steps: Steps[T], deadline: float, *, transaction: bool) -> T:
        """Run the steps on the driver's own connection, in one transaction or with one for each statement."""

    async def _perform(
        self, steps: Callable[[], Steps[T]], *, name: str, transaction: bool, doubt: "Doubt | None" = None
    ) -> T:
        """Run the steps to their end, whatever happens to the caller, and again while the database is away."""

        async def run(deadline: float) -> T:
            try:
                return await self._run(steps(), deadline, transaction=transaction)
            except Exception as error:
                if doubt is not None and not is_answer(error):
                    doubt.is_there = True
                raise

        return await finish(self._repeat(run), name=f"queue-core {name}", among=self._writing)

    async def _call(self, call: Callable[[], Call], *, name: str, doubt: "Doubt | None" = None) -> Rows:
        """One statement, which is a transaction by itself. Made when its turn comes, so that its time is right."""
        return await self._perform(partial(_one, call), name=name, transaction=False, doubt=doubt)

    async def _look(self, statement: Executable) -> Sequence[RowMapping]:
        async def read(deadline: float) -> Sequence[RowMapping]:
            async with self._reader(deadline) as connection:
                rows: Sequence[RowMapping] = (await connection.execute(statement)).mappings().all()
                return rows

        # Shielded as well: a cancelled read keeps its snapshot, and with it the write-ahead log, until it is collected.
        return await finish(self._repeat(read), name="queue-core read", among=self._writing)

    # Trouble

    async def _repeat(self, operation: Callable[[float], Awaitable[T]], *, keyed: bool = False) -> T:
        """Do it, and again while the database is away, until the deadline that it is given as well.

        Only for what is safe to repeat. Where it is `keyed`, a lock that is waited for in vain is a key, and the
        caller decides whether to wait on.
        """
        deadline = asyncio.get_running_loop().time() + self._give_up_after.total_seconds()
        pause = _FIRST_PAUSE
        while True:
            try:
                return await operation(deadline)
            except Exception as error:
                told = translate(error)
                if isinstance(told, KeyLocked) and not keyed:
                    told = BackendUnavailable(f"another transaction holds a lock ({origin(error)}): end it")
                final = not isinstance(told, BackendUnavailable) or isinstance(told, KeyLocked)
                if final or time_left(deadline) < pause:
                    if told is error:
                        raise
                    raise told from origin(error)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 spreads callers out
            pause = min(pause * 2, _LONGEST_PAUSE)


class Doubt:
    """Whether an earlier try may have been carried out, with only its answer lost."""

    def __init__(self, is_there: bool = False) -> None:
        self.is_there = is_there


def _one(call: Callable[[], Call]) -> Steps[Rows]:
    return (yield call())


def time_left(deadline: float) -> float:
    """Seconds; a moment at the least, so that what has come this far is tried."""
    return max(deadline - asyncio.get_running_loop().time(), 0.01)
