"""The data that crosses the seam: frozen, without behaviour, importing nothing from this package.

Instants are aware and in UTC, durations are `timedelta`. Structs rather than dataclasses because one
is made for every job on the hot path, and a frozen dataclass of this size costs six times as much.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Literal, NewType, TypeAlias

from msgspec import Struct

JobId = NewType("JobId", int)
DeadJobId = NewType("DeadJobId", int)
WorkerId = NewType("WorkerId", str)
RequestId = NewType("RequestId", str)
Token = NewType("Token", str)
QueueName: TypeAlias = str
JobTypeName: TypeAlias = str

KeyMode: TypeAlias = Literal["keep", "replace", "preserve_run_at"]
KeyScope: TypeAlias = Literal["type", "tenant", "queue"]


class JobStatus(StrEnum):
    """Where a live job is; finished ones are gone, dead ones have a table of their own."""

    SCHEDULED = "scheduled"
    PENDING = "pending"
    CLAIMED = "claimed"


class EnqueueStatus(StrEnum):
    """What an enqueue did."""

    INSERTED = "inserted"
    DUPLICATE = "duplicate"
    REPLACED = "replaced"
    RUNNING = "running"


class Enqueued(Struct, frozen=True):
    """The answer to an enqueue: what it did, and the job that now stands for it.

    For a `duplicate` and for `running`, `job_id` is the job that holds the key.
    """

    job_id: JobId
    status: EnqueueStatus


class NewJob(Struct, frozen=True, kw_only=True):
    """A job on its way in: checked, encoded, nothing left for the database to refuse."""

    request_id: RequestId
    job_type: JobTypeName
    queue: QueueName
    payload: str
    priority: int
    max_attempts: int
    timeout: timedelta | None = None
    backoff: str | None = None
    key: str | None = None
    unique_key: str | None = None
    key_mode: KeyMode = "keep"
    tenant: str | None = None
    context: str | None = None
    headers: str | None = None
    delay: timedelta = timedelta(0)
    run_at: datetime | None = None
    expires_after: timedelta | None = None
    expires_at: datetime | None = None


class Claim(Struct, frozen=True):
    """The right to write about a job. The token is new at each claim, so a late holder's writes match nothing."""

    job_id: JobId
    token: Token


class ClaimedJob(Struct, frozen=True, kw_only=True):
    """A job as a worker gets it, with all that one attempt needs."""

    claim: Claim
    job_type: JobTypeName
    queue: QueueName
    payload: str
    attempt: int
    max_attempts: int
    crashes: int
    priority: int
    timeout: timedelta | None
    backoff: str | None
    key: str | None
    tenant: str | None
    context: str | None
    headers: str | None
    created_at: datetime
    available_at: datetime
    deadline_at: datetime | None
    runs_alone: bool


class Claimed(Struct, frozen=True):
    """The answer to a claim: the jobs to run, in their order, and how many were ended instead.

    Ended are those that had expired before they were first started, and those that an operator had called off.
    """

    jobs: Sequence[ClaimedJob] = ()
    ended: int = 0


class Failure(Struct, frozen=True, kw_only=True):
    """What went wrong in one attempt. Whatever the texts hold is stored, cleaned and cut to size."""

    attempt: int
    kind: str
    message: str
    traceback: str
    causes: Sequence[str]
    failed_at: datetime


class Succeeded(Struct, frozen=True):
    """The attempt ended well: the job is gone, or in the history."""

    claim: Claim
    result: str | None = None


class Retried(Struct, frozen=True):
    """The attempt failed and another one follows."""

    claim: Claim
    failure: Failure
    retry_after: timedelta


class Parked(Struct, frozen=True):
    """The last attempt failed, or the handler gave up: the job becomes a dead letter."""

    claim: Claim
    failure: Failure
    reason: str
    parked_by: str = "worker"


class Snoozed(Struct, frozen=True):
    """The handler asked for a later run; the attempt is given back."""

    claim: Claim
    snooze_for: timedelta


class Cancelled(Struct, frozen=True):
    """The job was called off; it leaves no dead letter."""

    claim: Claim
    reason: str


class Released(Struct, frozen=True):
    """The job was not run, or not to its end, through no fault of its own; the attempt is given back."""

    claim: Claim


Outcome: TypeAlias = Succeeded | Retried | Parked | Snoozed | Cancelled | Released


class Worker(Struct, frozen=True, kw_only=True):
    """Who holds claims: one start of one worker loop, and what proves that its process is still there.

    `wakeup_address` and `lock_file` are the backend's: `register_worker` fills them in where it has them.
    """

    id: WorkerId
    host: str
    boot_id: str
    pid_namespace: str
    pid: int
    process_started: str
    version: str
    queues: Sequence[QueueName]
    job_types: Sequence[JobTypeName]
    lease: timedelta
    wakeup_address: str | None = None
    lock_file: str | None = None


class Holder(Struct, frozen=True):
    """A worker that holds claims, and what the database knows about its end.

    `stopped`: it said so itself. `let_go`: the lock that its process held on a file beside the database is free.
    """

    worker: Worker
    lease_until: datetime
    stopped: bool
    let_go: bool


class Known(Struct, frozen=True):
    """The claims that a worker holds until they are settled, and the tokens whose answer is still out."""

    held: Collection[Claim] = ()
    pending: Collection[Token] = ()


class Beat(Struct, frozen=True):
    """What a beat brought back: claims that are ours no longer, ones to stop, rows we did not know of."""

    lost: Sequence[Claim]
    to_cancel: Sequence[Claim]
    unknown: Sequence[Claim]


class Reaped(Struct, frozen=True):
    """The claims of silent or dead workers that were taken back, and what became of the jobs.

    A parked job is told as it was while it was claimed: with its payload, and the attempt that was its last.
    """

    requeued: Sequence[JobId] = ()
    parked: Sequence["StoredJob"] = ()

    def __len__(self) -> int:
        return len(self.requeued) + len(self.parked)


class CancelStatus(StrEnum):
    """What a request to cancel did: the job was waiting and is gone, or its worker will be told to stop it."""

    CANCELLED = "cancelled"
    REQUESTED = "requested"


class Wakeup(Struct, frozen=True):
    """A hint that a queue may have something to claim. It may be missing and it may be wrong."""

    queue: QueueName


class StoredJob(Struct, frozen=True, kw_only=True):
    """A live job as an operator sees it."""

    id: JobId
    job_type: JobTypeName
    queue: QueueName
    status: JobStatus
    payload: str
    priority: int
    attempt: int
    max_attempts: int
    crashes: int
    timeout: timedelta | None
    backoff: str | None
    key: str | None
    unique_key: str | None
    tenant: str | None
    context: str | None
    headers: Mapping[str, str]
    created_at: datetime
    available_at: datetime
    expires_at: datetime | None
    claimed_at: datetime | None
    deadline_at: datetime | None
    worker_id: WorkerId | None


class QueueCounts(Struct, frozen=True, kw_only=True):
    """How many jobs of one queue are in each status."""

    scheduled: int = 0
    pending: int = 0
    claimed: int = 0
    dead: int = 0
