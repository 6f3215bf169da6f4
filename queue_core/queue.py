"""Queue: what an application holds."""

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, Self, TypeVar, Unpack

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from queue_core.backend import Backend
from queue_core.checks import shown
from queue_core.clock import Clock
from queue_core.config import QueueConfig, QueueSettings
from queue_core.connect import connect
from queue_core.delivery import Delivery, Request, Transactional, new_job
from queue_core.errors import AlreadyInitialized, ConfigurationError, NotInitialized, WrongThread
from queue_core.intake import Intake
from queue_core.job import Job
from queue_core.model import Enqueued, JobId, NewJob, QueueCounts, StoredJob
from queue_core.registry import Registrable, Registry
from queue_core.shield import finish

P = ParamSpec("P")
T = TypeVar("T")

_BREATHE = 500
_log = logging.getLogger(__name__)


class _OnRegistry(Generic[P, T]):
    """A method of a registry: of the queue's own one, or, on the class, of the default queue's."""

    def __init__(self, method: Callable[Concatenate[Registry, P], T]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __get__(self, queue: "Queue | None", owner: type["Queue"]) -> Callable[P, T]:
        registry = owner.application_registry() if queue is None else queue.registry
        return partial(self._method, registry)


class Queue:
    """A durable job queue in the application's database.

    `await Queue.init(engine, jobs=[…])` opens the application's default queue, the one that `job.enqueue()`
    uses. Further ones, in other databases or in tests, are opened with `async with Queue(engine) as queue`.
    """

    _default: ClassVar["Queue | None"] = None
    _declared: ClassVar[Registry] = Registry()
    """What was registered on the class while there was no default queue; each `init` starts with it."""

    register = _OnRegistry(Registry.register)
    has_registered_jobs = _OnRegistry(Registry.has_jobs)

    def __init__(
        self,
        engine: AsyncEngine,
        *,
        jobs: Iterable[Registrable] = (),
        clock: Clock | None = None,
        **settings: Unpack[QueueSettings],
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._config = QueueConfig.of(settings)
        self.registry = Registry(jobs)
        self._backend: Backend | None = None
        self._intake: Intake | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        self._unregistered: set[type[Job[Any]]] = set()

    # The default queue

    @classmethod
    async def init(
        cls,
        engine: AsyncEngine,
        *,
        jobs: Iterable[Registrable] = (),
        clock: Clock | None = None,
        **settings: Unpack[QueueSettings],
    ) -> Self:
        """Open the application's default queue: check the database, create or upgrade the tables, register the jobs."""
        if Queue._default is not None:
            raise AlreadyInitialized(
                "there is a default queue already: call 'await queue.close()' before a second Queue.init,"
                " or open a further one with 'async with Queue(engine) as queue'"
            )
        queue = cls(engine, jobs=[*Queue._declared, *jobs], clock=clock, **settings)
        Queue._default = queue
        try:
            await queue.open()
        except BaseException:
            Queue._default = None
            raise
        return queue

    @staticmethod
    def is_initialized() -> bool:
        """Whether there is a default queue."""
        return Queue._default is not None and Queue._default.is_open

    @staticmethod
    def default() -> "Queue":
        """The default queue; a `NotInitialized` error before `Queue.init`."""
        if Queue._default is None or not Queue._default.is_open:
            raise NotInitialized(
                "there is no default queue yet: call 'await Queue.init(engine, jobs=[…])' first, at the application's"
                " start"
            )
        return Queue._default

    @staticmethod
    def application_registry() -> Registry:
        """The registry of the default queue, or the one that the next `init` starts with."""
        return Queue._declared if Queue._default is None else Queue._default.registry

    # Opening and closing

    @property
    def is_open(self) -> bool:
        return self._intake is not None

    async def open(self) -> Self:
        """Open a queue that is not the default one; `async with` does the same and closes it too."""
        if self._backend is not None:
            raise AlreadyInitialized("this queue is open already: close it before opening it again")
        backend = connect(self._engine, self._config, self._clock)
        self._backend = backend
        try:
            await backend.open(migrate=self._config.migrate)
        except BaseException:
            self._backend = None
            raise
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._intake = Intake(backend, key_patience=self._config.key_patience, give_up_after=self._config.give_up_after)
        return self

    async def close(self) -> None:
        """Write what is on its way in, then give every connection back. The engine stays the application's."""
        intake, self._intake = self._intake, None
        backend, self._backend = self._backend, None
        if Queue._default is self:
            Queue._default = None
        if backend is not None:
            await finish(_close(backend, intake), name="queue-core close")

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    # Enqueueing

    async def enqueue(self, job: Job[Any], **delivery: Unpack[Transactional]) -> Enqueued:
        """Put a job on the queue.

        Returns when it is durable. With `session=` or `connection=` it becomes part of that transaction instead:
        it exists if and only if that commits. When the call is cancelled the job may still have been enqueued.
        """
        backend, intake = self._opened()
        session, connection = delivery.pop("session", None), delivery.pop("connection", None)
        new = self._new_job(job, delivery)
        if session is not None or connection is not None:
            return (await self._join([new], session, connection))[0]
        backend.refuse_own_lock()
        return await intake.submit(new)

    async def enqueue_many(
        self, jobs: Iterable[Job[Any] | Request], **delivery: Unpack[Transactional]
    ) -> Sequence[Enqueued]:
        """Put many jobs on the queue in one transaction; the answers are in the order of the jobs.

        The keywords hold for all of them; `job.with_delivery(…)` gives one of them its own on top.
        """
        self._opened()
        session, connection = delivery.pop("session", None), delivery.pop("connection", None)
        new = await self._new_jobs(jobs, delivery)
        backend, _ = self._opened()  # again: it may have been closed meanwhile
        if session is not None or connection is not None:
            return await self._join(new, session, connection)
        backend.refuse_own_lock()
        return await backend.enqueue_many(new)

    def enqueue_sync(self, job: Job[Any], **delivery: Unpack[Transactional]) -> Enqueued:
        """Put a job on the queue from synchronous code.

        Without a session it has to be called from another thread than the event loop's. With `session=` or
        `connection=`, which are synchronous ones here, it joins that transaction on any thread.
        """
        backend = self._backend
        if backend is None or self._loop is None:
            raise NotInitialized("this queue is not open: call 'await Queue.init(engine)' first")
        self._refuse_other_process()
        session, connection = delivery.pop("session", None), delivery.pop("connection", None)
        if session is not None or connection is not None:
            new = self._new_job(job, delivery)
            with backend.callers_transaction():
                theirs = _sync_connection(session, connection)
            return backend.enqueue_on(theirs, [new])[0]
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise WrongThread(
                "enqueue_sync() was called on a thread that runs an event loop, which would wait for itself:"
                " use 'await queue.enqueue(job)' there"
            )
        if not self._loop.is_running():
            raise WrongThread(
                "enqueue_sync() needs the event loop that opened the queue, and that is not running any more"
            )
        # Delivery here has neither session nor connection.
        return asyncio.run_coroutine_threadsafe(self.enqueue(job, **delivery), self._loop).result()

    # Looking

    async def get(self, job_id: JobId | int) -> StoredJob | None:
        """One job that is waiting or running; None when it is finished, dead, or was never there."""
        backend, _ = self._opened()
        return await backend.get(JobId(job_id))

    async def counts(self) -> Mapping[str, QueueCounts]:
        """How many jobs each queue has in each status."""
        backend, _ = self._opened()
        return await backend.counts()

    # Inside

    def _opened(self) -> tuple[Backend, Intake]:
        if self._backend is None or self._intake is None:
            raise NotInitialized(
                "this queue is not open: call 'await Queue.init(engine)', or 'async with Queue(engine) as queue'"
            )
        self._refuse_other_process()
        if asyncio.get_running_loop() is not self._loop:
            raise WrongThread(
                "this queue was opened on another event loop: use it there, or open one on this loop;"
                " from other threads call enqueue_sync"
            )
        return self._backend, self._intake

    def _refuse_other_process(self) -> None:
        if os.getpid() != self._pid:
            raise WrongThread(
                "this queue was opened in another process, before a fork, and its connections belong there:"
                " open one in this process"
            )

    def _new_job(self, job: Job[Any], delivery: Delivery) -> NewJob:
        if not isinstance(job, Job):
            raise ConfigurationError(
                f"only instances of job classes can be enqueued, got {shown(job)}: write SendEmail(to=…)"
            )
        if not self.registry.knows(type(job)) and type(job) not in self._unregistered:
            self._unregistered.add(type(job))
            _log.warning(
                "%s is enqueued but not registered on this queue: it waits until a worker has it in jobs=[…]",
                type(job).__name__,
            )
        return new_job(job, delivery, max_payload=self._config.max_payload)

    async def _new_jobs(self, jobs: Iterable[Job[Any] | Request], shared: Delivery) -> Sequence[NewJob]:
        new: list[NewJob] = []
        for number, item in enumerate(jobs, 1):
            if isinstance(item, Request):
                new.append(self._new_job(item.job, {**shared, **item.delivery}))
            else:
                new.append(self._new_job(item, shared))
            if number % _BREATHE == 0:
                await asyncio.sleep(0)  # the rest of the application goes on meanwhile
        return new

    async def _join(self, jobs: Sequence[NewJob], session: object, connection: object) -> Sequence[Enqueued]:
        backend, _ = self._opened()
        with backend.callers_transaction():
            theirs = await _async_connection(session, connection)
            if not theirs.in_transaction():
                # Here and not in the task below, so that the transaction is known as this caller's own.
                await theirs.begin()
        return await finish(theirs.run_sync(backend.enqueue_on, jobs), name="queue-core enqueue in a transaction")


async def _close(backend: Backend, intake: Intake | None) -> None:
    try:
        if intake is not None:
            await intake.close()
    finally:
        await backend.close()


async def _async_connection(session: object, connection: object) -> AsyncConnection:
    _refuse_both(session, connection)
    if isinstance(session, AsyncSession):
        return await session.connection()
    if isinstance(connection, AsyncConnection):
        return connection
    if isinstance(session, Session) or isinstance(connection, Connection):
        raise ConfigurationError(
            "the session or connection is a synchronous one: call queue.enqueue_sync(job, session=…) instead"
        )
    raise _not_a_transaction(session, connection, "AsyncSession", "AsyncConnection")


def _sync_connection(session: object, connection: object) -> Connection:
    _refuse_both(session, connection)
    if isinstance(session, Session):
        return session.connection()
    if isinstance(connection, Connection):
        return connection
    if isinstance(session, AsyncSession) or isinstance(connection, AsyncConnection):
        raise ConfigurationError(
            "the session or connection is an asynchronous one: use 'await queue.enqueue(job, session=…)' instead"
        )
    raise _not_a_transaction(session, connection, "Session", "Connection")


def _refuse_both(session: object, connection: object) -> None:
    if session is not None and connection is not None:
        raise ConfigurationError("give session or connection, not both: a job is part of one transaction")


def _not_a_transaction(session: object, connection: object, *kinds: str) -> ConfigurationError:
    if session is not None:
        return ConfigurationError(f"session must be a SQLAlchemy {kinds[0]}, got {shown(session)}")
    return ConfigurationError(f"connection must be a SQLAlchemy {kinds[1]}, got {shown(connection)}")
