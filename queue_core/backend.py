"""The seam between the queue and a database: the contract that every backend keeps.

A backend moves jobs between states and nothing else. Policy (when to retry, how long to wait) stays
above it. For every method:

- It is one transaction, and takes or returns a batch.
- Time is the backend's: the database's clock on Postgres, the process's on SQLite, or the clock that the
  backend was opened with. No method takes a `now`.
- A job that is pending is due. One whose time has not come is scheduled, until it is promoted.
- A write about a claimed job names its `Claim`. When the job has since been taken away the write changes
  nothing for it, and the answer says so; it is not an error.
- A write runs to its end when its caller is cancelled.
- A driver's error comes out as a `BackendError`; as `BackendUnavailable` when the same call may succeed
  later. Methods that are safe to repeat repeat themselves for a bounded time first.
- After any error the connection goes back with no open transaction.

The parts are cut by who calls them: a producer, a worker, the maintenance services, an operator who acts or looks.
`tests/conformance` is the definition in code, and runs on every backend.
"""

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from datetime import datetime, timedelta
from typing import Protocol

from sqlalchemy import Connection

from queue_core.model import (
    Beat,
    CancelStatus,
    Claim,
    Claimed,
    Enqueued,
    Holder,
    JobId,
    JobTypeName,
    Known,
    NewJob,
    Outcome,
    QueueCounts,
    QueueName,
    Reaped,
    StoredJob,
    Token,
    Wakeup,
    Worker,
    WorkerId,
)


class Producer(Protocol):
    """What enqueueing needs."""

    async def enqueue_many(self, jobs: Sequence[NewJob], *, patience: timedelta | None = None) -> Sequence[Enqueued]:
        """Insert the jobs in a transaction of its own; the answers are in the order of the jobs.

        When it returns, they are durable and idle workers have been told. Jobs with the same unique key are
        treated as if they had come one after the other. Repeating the call with the same `request_id`s makes no
        second job while the first lives. A unique key that somebody's open transaction holds is waited for as
        long as `patience` (None: as long as the backend repeats a call), and is then a `KeyLocked`.
        """
        ...

    def enqueue_on(self, connection: Connection, jobs: Sequence[NewJob]) -> Sequence[Enqueued]:
        """Insert the jobs in the caller's transaction: they are there if and only if that commits.

        Synchronous, because a caller may have a synchronous session; an asynchronous one comes through
        `run_sync`. Idle workers are told after the commit, and not when a savepoint is released. A connection to
        another database is a `WrongDatabase` and nothing is written.
        """
        ...

    def wakeups(self, queues: Collection[QueueName]) -> AbstractAsyncContextManager[AsyncIterator[Wakeup]]:
        """Hints that these queues may have something to claim.

        Hints only: one may be missing, late or for nothing, and several may come as one. Correctness rests on
        `next_due` and polling.
        """
        ...


class JobStore(Producer, Protocol):
    """What a worker needs."""

    async def claim(
        self,
        worker: Worker,
        token: Token,
        wanted: Mapping[QueueName, int],
        job_types: Collection[JobTypeName],
    ) -> Claimed:
        """Take pending jobs of these types, at most so many of each queue, by priority, `available_at` and id.

        Attempt, owner, token and deadline are set, and the worker's row is written or renewed when it is missing or
        has used up half of its lease, in the same transaction. The token is made by the caller, for this call alone,
        and registered there *before* the call: it finds the rows again when the answer was lost. Paused queues give
        nothing. A job that has expired and of which no attempt counts, or that was called off, is ended instead of
        claimed, and takes nobody's room: the claim goes on, in a further transaction. A claim whose caller is
        cancelled gives back what it took, unless its answer reaches the caller all the same.
        """
        ...

    async def settle(self, outcomes: Sequence[Outcome], *, repeated: bool = False) -> frozenset[JobId]:
        """Record a mixed batch of outcomes; returns the jobs that still held their claim.

        It can't fail on content. Parking writes the dead letter and removes the job; a success removes the dead
        letter of the same identity too. A job that would go again but was called off meanwhile is pending at once,
        for a claim to end it. A repetition after a lost answer that finds no row counts as settled; whoever calls
        again after a `BackendUnavailable` says that it is `repeated`.
        """
        ...

    async def extend(self, claims: Collection[Claim], timeout: timedelta) -> frozenset[JobId]:
        """Let the time limit of these jobs end that long from now; returns those that still held their claim.

        It is counted from the claim: a job that waits before it is started needs this.
        """
        ...

    async def beat(self, worker: Worker, known: Callable[[], Known]) -> Beat:
        """Renew the worker's lease.

        Returns the claims that are no longer ours and the ones that an operator asked to stop; both have to be
        stopped by the caller. Rows claimed by this worker that are neither held nor of a token whose answer is
        still out are released and reported as unknown. The worker's own claims go on meanwhile, so it is asked what
        it knows before its rows are read, for what is lost, and again after, for what is unknown. Each answer has
        to be of one moment, and may be asked for on another thread than the worker's. No beat may follow
        `forget_worker`.
        """
        ...

    async def next_due(self, queues: Collection[QueueName]) -> timedelta | None:
        """How long until the next scheduled job of these queues is due, zero when it is; None when there is none."""
        ...


class Upkeep(Protocol):
    """What the maintenance services need. What has a limit is called until it did less than that."""

    async def register_worker(self, worker: Worker) -> Worker:
        """Write the worker's row with a fresh lease. Returns it as it has to be named from now on."""
        ...

    async def forget_worker(self, worker: WorkerId) -> None:
        """Mark the worker as stopped: whatever it still holds may be taken at once."""
        ...

    async def reap(self, queues: Collection[QueueName], *, limit: int) -> Reaped:
        """Take back the claims of these queues whose worker's lease ran out, the worker's row locked first.

        Also those whose worker has stopped or has no row, and those that are well past their own time limit. Each
        counts as a crash; without attempts left the job is parked. Writes nothing when there is nothing to take. The
        report is lost with a lost answer, its effects are not.
        """
        ...

    async def holders(self, queues: Collection[QueueName]) -> Sequence[Holder]:
        """The workers that hold claims of these queues."""
        ...

    async def sweep_orphans(
        self, queues: Collection[QueueName], dead: Collection[WorkerId], *, park: bool, limit: int
    ) -> Reaped:
        """Take back the claims of workers that are proved dead, whatever their lease says, and mark them stopped.

        Each counts as a crash; without attempts left, or with `park`, the job is parked.
        """
        ...

    async def promote(self, queues: Collection[QueueName], *, limit: int) -> int:
        """Make scheduled jobs of these queues that are due pending."""
        ...

    async def prune(self, *, older_than: timedelta, limit: int) -> int:
        """Delete history, fired ticks (never a schedule's last) and rows of workers that ended that long ago."""
        ...

    async def enqueue_tick(self, schedule: str, tick_at: datetime, job: NewJob) -> Enqueued | None:
        """Enqueue the job of one tick; None when that tick has fired already."""
        ...


class Control(Protocol):
    """What an operator may do to queues and jobs."""

    async def pause(self, queue: QueueName, *, reason: str | None = None) -> bool:
        """Let nobody claim from the queue; False when it was paused already (the reason is then the new one)."""
        ...

    async def resume(self, queue: QueueName) -> bool:
        """Let workers claim from the queue again; False when it was not paused."""
        ...

    async def cancel(self, job_id: JobId) -> CancelStatus | None:
        """End a job that waits; ask the worker of one that runs to stop it. None when there is no such job."""
        ...


class Inspection(Protocol):
    """What operators need. Nothing here writes or waits for a lock."""

    async def get(self, job_id: JobId) -> StoredJob | None:
        """One live job; None when it is not in the jobs table (finished, dead, or never there)."""
        ...

    async def counts(self) -> Mapping[QueueName, QueueCounts]:
        """How many jobs each queue has in each status; queues without any are left out."""
        ...


class Backend(JobStore, Upkeep, Control, Inspection, Protocol):
    """An open database: what `connect` returns."""

    async def open(self, *, migrate: bool) -> None:
        """Check the database and its settings, and make or upgrade the tables; with `migrate=False` only check."""
        ...

    async def close(self) -> None:
        """Give back every connection. May be called twice."""
        ...

    def callers_transaction(self) -> AbstractContextManager[None]:
        """What the driver raises in here, about a transaction of the caller's, comes out as a `QueueError`."""
        ...

    def refuse_own_lock(self) -> None:
        """Raise `TransactionOpen` when the calling task's own open transaction would keep `enqueue_many` waiting."""
        ...
