"""The parts of the seam for the maintenance services, and for operators who act."""

from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Protocol

from sqlalchemy import select

from queue_core.failures import storable
from queue_core.model import (
    CancelStatus,
    Enqueued,
    EnqueueStatus,
    Holder,
    JobId,
    JobStatus,
    NewJob,
    QueueName,
    Reaped,
    Worker,
    WorkerId,
)

from .base import Doubt
from .insertion import Insertion
from .producing import Producing
from .rows import worker_of
from .statement import Call
from .steps import Rows, Steps
from .storing import Storing
from .taking_back import Abandoned, TakenBack, take_back


class UpkeepSql(Protocol):
    """A dialect's statements."""

    one_statement: bool
    """Whether a pause and a cancel are a single statement each, and so a transaction by themselves."""

    def stop_worker(self, worker: WorkerId) -> Call: ...

    def is_abandoned(self, queues: Collection[QueueName]) -> Call:
        """Gives a row when there is anything to reap."""
        ...

    def lock_silent(self, queues: Collection[QueueName], limit: int) -> Call:
        """Gives the ids of workers with claims whose lease ran out or that have stopped, their rows locked."""
        ...

    def lock_dead(self, workers: Collection[WorkerId]) -> Call:
        """Marks these workers as stopped and gives their ids, their rows locked."""
        ...

    def lock_abandoned(
        self, queues: Collection[QueueName], workers: Collection[WorkerId], limit: int, *, only_theirs: bool
    ) -> Call:
        """Gives the jobs that these workers hold, locked; unless `only_theirs`, also overdue and ownerless ones."""
        ...

    def read_abandoned(self, rows: Rows) -> Sequence[Abandoned]: ...

    def promote(self, queues: Collection[QueueName], limit: int) -> Call:
        """Gives the queue of each job that was promoted."""
        ...

    def prune_history(self, age: timedelta, limit: int) -> Call: ...

    def prune_ticks(self, age: timedelta, limit: int) -> Call: ...

    def prune_workers(self, age: timedelta, limit: int) -> Call:
        """Gives the lock file of each."""
        ...

    def fire_tick(self, schedule: str, tick_at: datetime) -> Call:
        """Gives a row when the tick had not fired yet."""
        ...

    def note_tick(self, schedule: str, tick_at: datetime, job_id: JobId) -> Call: ...

    def pause(self, queue: QueueName, reason: str | None) -> Steps[bool]: ...

    def resume(self, queue: QueueName) -> Call: ...

    def cancel(self, job_id: JobId) -> Steps[str | None]:
        """Gives the status that the job had."""
        ...


class Keeping(Producing, Storing):
    """What the maintenance services and an operator who acts need."""

    _upkeep_sql: UpkeepSql

    # Workers

    async def register_worker(self, worker: Worker) -> Worker:
        equipped = self._equip(worker)
        await self._call(partial(self._claim_sql.register_worker, equipped), name="register")
        return equipped

    async def forget_worker(self, worker: WorkerId) -> None:
        await self._call(partial(self._upkeep_sql.stop_worker, worker), name="forget")
        self._unequip(worker)

    @abstractmethod
    def _equip(self, worker: Worker) -> Worker:
        """Give the worker what other processes can reach it by, and see its end by."""

    @abstractmethod
    def _unequip(self, worker: WorkerId) -> None: ...

    @abstractmethod
    def _has_let_go(self, worker: Worker) -> bool:
        """Whether the lock of the worker's process is free."""

    @abstractmethod
    def _clean_up_after(self, lock_files: Sequence[str]) -> None:
        """Remove what dead workers have left behind."""

    async def holders(self, queues: Collection[QueueName]) -> Sequence[Holder]:
        jobs, workers = self._tables.jobs, self._tables.workers
        claimed = select(jobs.c.worker_id).where(jobs.c.status == JobStatus.CLAIMED, jobs.c.queue.in_(list(queues)))
        rows = await self._look(select(workers).where(workers.c.id.in_(claimed)).order_by(workers.c.id))
        found: list[Holder] = []
        for row in rows:
            worker = worker_of(row)
            found.append(Holder(worker, row["lease_until"], row["stopped_at"] is not None, self._has_let_go(worker)))
        return found

    # Claims that nobody vouches for

    async def reap(self, queues: Collection[QueueName], *, limit: int) -> Reaped:
        if not queues or not await self._call(
            partial(self._upkeep_sql.is_abandoned, queues), name="look for silent workers"
        ):
            return Reaped()
        return await self._take_back(partial(self._reap, queues, limit), queues, name="reap")

    def _reap(self, queues: Collection[QueueName], limit: int) -> Steps[TakenBack]:
        silent = [row[0] for row in (yield self._upkeep_sql.lock_silent(queues, limit))]
        rows = yield self._upkeep_sql.lock_abandoned(queues, silent, limit, only_theirs=False)
        abandoned = self._upkeep_sql.read_abandoned(rows)
        return (yield from take_back(abandoned, self._settle_sql, taken_by="reaper"))

    async def sweep_orphans(
        self, queues: Collection[QueueName], dead: Collection[WorkerId], *, park: bool, limit: int
    ) -> Reaped:
        if not queues or not dead:
            return Reaped()
        return await self._take_back(partial(self._sweep, queues, dead, park, limit), queues, name="sweep")

    def _sweep(
        self, queues: Collection[QueueName], dead: Collection[WorkerId], park: bool, limit: int
    ) -> Steps[TakenBack]:
        locked = [row[0] for row in (yield self._upkeep_sql.lock_dead(dead))]
        rows = yield self._upkeep_sql.lock_abandoned(queues, locked, limit, only_theirs=True)
        orphans = [each._replace(cause="dead") for each in self._upkeep_sql.read_abandoned(rows)]
        return (yield from take_back(orphans, self._settle_sql, taken_by="orphan sweep", park=park))

    async def _take_back(
        self, steps: Callable[[], Steps[TakenBack]], queues: Collection[QueueName], *, name: str
    ) -> Reaped:
        doubt = Doubt()
        taken = await self._perform(steps, name=name, transaction=True, doubt=doubt)
        self._announce(frozenset(queues) if doubt.is_there else taken.woken)
        return taken.reaped

    # Time

    async def promote(self, queues: Collection[QueueName], *, limit: int) -> int:
        if not queues:
            return 0
        doubt = Doubt()
        rows = await self._call(partial(self._upkeep_sql.promote, queues, limit), name="promote", doubt=doubt)
        self._announce(frozenset(queues) if doubt.is_there else frozenset(row[0] for row in rows))
        return len(rows)

    async def prune(self, *, older_than: timedelta, limit: int) -> int:
        files: list[str] = []

        def steps() -> Steps[int]:
            files.clear()
            left = limit
            left -= len((yield self._upkeep_sql.prune_history(older_than, left)))
            left -= len((yield self._upkeep_sql.prune_ticks(older_than, left)))
            workers = yield self._upkeep_sql.prune_workers(older_than, left)
            files.extend(row[0] for row in workers if row[0] is not None)
            return limit - left + len(workers)

        pruned = await self._perform(steps, name="prune", transaction=True)
        self._clean_up_after(files)
        return pruned

    async def enqueue_tick(self, schedule: str, tick_at: datetime, job: NewJob) -> Enqueued | None:
        insertion = Insertion([job])

        def steps() -> Steps[Enqueued | None]:
            if not (yield self._upkeep_sql.fire_tick(schedule, tick_at)):
                # Somebody else's, or our own earlier try whose answer was lost.
                ours = yield self._enqueue_sql.find_jobs([job.request_id], [])
                return Enqueued(ours[0][0], EnqueueStatus.INSERTED) if ours else None
            (enqueued,) = yield from insertion.steps(self._enqueue_sql, self._give_up_after)
            yield self._upkeep_sql.note_tick(schedule, tick_at, enqueued.job_id)
            return enqueued

        enqueued = await self._perform(steps, name="tick", transaction=True)
        if enqueued is not None:
            self._announce(insertion.woken_queues([enqueued]))
        return enqueued

    # Control

    async def pause(self, queue: QueueName, *, reason: str | None = None) -> bool:
        steps = partial(self._upkeep_sql.pause, queue, None if reason is None else storable(reason))
        return await self._perform(steps, name="pause", transaction=not self._upkeep_sql.one_statement)

    async def resume(self, queue: QueueName) -> bool:
        doubt = Doubt()
        resumed = bool(await self._call(partial(self._upkeep_sql.resume, queue), name="resume", doubt=doubt))
        if resumed or doubt.is_there:
            self._announce([queue])
        return resumed or doubt.is_there

    async def cancel(self, job_id: JobId) -> CancelStatus | None:
        doubt = Doubt()
        steps = partial(self._upkeep_sql.cancel, job_id)
        status = await self._perform(steps, name="cancel", transaction=not self._upkeep_sql.one_statement, doubt=doubt)
        if status is None:
            # Perhaps our own earlier try has ended it. It is not there, which is what was asked for.
            return CancelStatus.CANCELLED if doubt.is_there else None
        return CancelStatus.REQUESTED if status == JobStatus.CLAIMED else CancelStatus.CANCELLED
