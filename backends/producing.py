"""The producer's part of the seam: enqueueing, in a transaction of its own or in the caller's."""

from abc import abstractmethod
from collections.abc import AsyncIterator, Collection, Generator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta

from sqlalchemy import Connection

from queue_core.errors import BackendUnavailable, KeyLocked, WrongDatabase
from queue_core.model import Enqueued, NewJob, QueueName, Wakeup
from queue_core.shield import finish

from .base import SqlBase, time_left
from .faults import origin, translate, translate_in_transaction
from .insertion import EnqueueSql, Insertion

AUTOCOMMIT = (
    "the session or connection is in AUTOCOMMIT mode, where a rollback would leave the job: use one with a transaction"
    ' (leave isolation_level="AUTOCOMMIT" out), or enqueue without it'
)
WRONG_DATABASE = (
    "the session or connection belongs to {theirs}, and this queue is in {ours}:"
    " enqueue without it, or open a queue in that database"
)


class Producing(SqlBase):
    """What enqueueing needs. `enqueue_on` may be called from any thread."""

    _enqueue_sql: EnqueueSql

    async def enqueue_many(self, jobs: Sequence[NewJob], *, patience: timedelta | None = None) -> Sequence[Enqueued]:
        if not jobs:
            return []
        return await finish(self._enqueue(jobs, patience), name="queue-core enqueue", among=self._writing)

    async def _enqueue(self, jobs: Sequence[NewJob], patience: timedelta | None) -> Sequence[Enqueued]:
        insertion = Insertion(jobs)

        async def insert(deadline: float) -> Sequence[Enqueued]:
            wait = timedelta(seconds=time_left(deadline)) if patience is None else patience
            try:
                steps = insertion.steps(self._enqueue_sql, wait)
                return await self._run(steps, deadline, transaction=not insertion.is_one_statement)
            except Exception as error:
                told = translate(error)
                if isinstance(told, KeyLocked) and not insertion.has_keys:
                    raise BackendUnavailable(
                        "another transaction keeps the whole table locked (a migration, VACUUM FULL, LOCK TABLE):"
                        " wait for its end and try again"
                    ) from origin(error)
                raise

        answers = await self._repeat(insert, keyed=True)
        self._announce(insertion.woken_queues(answers))
        return answers

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

    @abstractmethod
    def wakeups(self, queues: Collection[QueueName]) -> AbstractAsyncContextManager[AsyncIterator[Wakeup]]: ...
