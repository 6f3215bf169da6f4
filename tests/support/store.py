"""Builders and short forms for tests of the seam: workers, tokens, claims, failures."""

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from sqlalchemy.ext.asyncio import AsyncEngine

from queue_core.backend import Backend
from queue_core.clock import Clock, instant
from queue_core.config import QueueConfig
from queue_core.connect import connect
from queue_core.ids import time_ordered_uuid
from queue_core.model import (
    Cancelled,
    Claim,
    ClaimedJob,
    Failure,
    Holder,
    JobId,
    Known,
    NewJob,
    Outcome,
    Parked,
    Released,
    Retried,
    Snoozed,
    StoredJob,
    Succeeded,
    Token,
    Wakeup,
    Worker,
    WorkerId,
)
from tests.support.databases import Database
from tests.support.jobs import new_job
from tests.support.spy import Spy

LEASE = timedelta(seconds=60)


def new_worker(**changes: Any) -> Worker:
    """A worker on another machine: nothing proves its death but its lease."""
    values: dict[str, Any] = {
        "id": WorkerId(time_ordered_uuid()),
        "host": "elsewhere",
        "boot_id": "another boot",
        "pid_namespace": "pid:[1]",
        "pid": 1,
        "process_started": "1",
        "version": "0",
        "queues": ["notes"],
        "job_types": ["Note"],
        "lease": LEASE,
    }
    return Worker(**{**values, **changes})


def new_token() -> Token:
    return Token(time_ordered_uuid())


async def claim(
    backend: Backend, worker: Worker, room: int = 1, *, queue: str = "notes", job_types: Sequence[str] = ("Note",)
) -> Sequence[ClaimedJob]:
    """Up to that many jobs of one queue, under a token of their own."""
    return (await backend.claim(worker, new_token(), {queue: room}, job_types)).jobs


def failure(message: str = "it broke", *, attempt: int = 1, kind: str = "ValueError") -> Failure:
    return Failure(
        attempt=attempt,
        kind=kind,
        message=message,
        traceback='Traceback (most recent call last):\n  File "orders.py", line 7, in charge\nValueError: it broke',
        causes=(),
        failed_at=datetime(2030, 1, 1, tzinfo=UTC),
    )


@asynccontextmanager
async def opened_backend(engine: AsyncEngine, clock: Clock, **settings: Any) -> AsyncGenerator[Backend]:
    """A backend with settings of its own, or one whose every connection a spy has seen.

    It tells other processes nothing: what it sends is what its caller asked for, and it hears of nobody's commits.
    """
    settings.setdefault("notify", False)
    backend = connect(engine, QueueConfig(**settings), clock)
    await backend.open(migrate=True)
    try:
        yield backend
    finally:
        await backend.close()


async def enqueue(backend: Backend, *jobs: NewJob) -> Sequence[JobId]:
    return [answer.job_id for answer in await backend.enqueue_many(jobs)]


async def stored(backend: Backend, job_id: JobId) -> StoredJob:
    """A job that has to be there."""
    job = await backend.get(job_id)
    assert job is not None
    return job


async def claimed(backend: Backend, worker: Worker | None = None, **changes: Any) -> ClaimedJob:
    """A new job, claimed at once; nothing else may be waiting in its queue."""
    job = new_job(**changes)
    (job_id,) = await enqueue(backend, job)
    (taken,) = await claim(backend, worker or new_worker(), queue=job.queue, job_types=[job.job_type])
    assert taken.claim.job_id == job_id
    return taken


async def claim_again(backend: Backend, job_id: JobId) -> ClaimedJob:
    """The next attempt of a job that went back, whatever its time is; nothing else may be waiting in its queue."""
    job = await stored(backend, job_id)
    (taken,) = await claim(backend, new_worker(), queue=job.queue, job_types=[job.job_type])
    assert taken.claim.job_id == job_id
    return taken


def one_of_each(now: bool = True) -> Mapping[str, Callable[[Claim], Outcome]]:
    """Every outcome by its name, made of a claim; what goes again does so at once, or in an hour."""
    later = timedelta(0) if now else timedelta(hours=1)
    return {
        "succeeded": lambda claim: Succeeded(claim, '"done"'),
        "retried": lambda claim: Retried(claim, failure("retried"), later),
        "parked": lambda claim: Parked(claim, failure("parked"), "no attempts left"),
        "snoozed": lambda claim: Snoozed(claim, later),
        "cancelled": lambda claim: Cancelled(claim, "called off"),
        "released": Released,
    }


def failures(errors: str | None) -> Sequence[Failure]:
    """What a column of errors holds: one object a line. Not `splitlines`, which also breaks at U+2028."""
    found = [msgspec.json.decode(line, type=Failure) for line in errors.split("\n")] if errors else []
    return [msgspec.structs.replace(failure, causes=tuple(failure.causes)) for failure in found]


def moment(value: Any) -> datetime | None:
    """An instant as it comes out of either database."""
    return instant(value) if isinstance(value, int) else value


def everything(database: Database) -> Mapping[str, Sequence[tuple[Any, ...]]]:
    """All that is known about jobs: the live, the dead and the finished. For comparing before with after."""
    tables = ("queue_jobs", "queue_dead_jobs", "queue_history")
    return {table: database.query(f"SELECT * FROM {table} ORDER BY id") for table in tables}


def errors_of(database: Database, job_id: JobId) -> Sequence[Failure]:
    """The failures that a live job has behind it, the newest last."""
    ((errors,),) = database.query("SELECT errors FROM queue_jobs WHERE id = ?", job_id)
    return failures(errors)


async def holder_of(backend: Backend, worker: Worker, queue: str = "notes") -> Holder:
    """A worker that has to hold claims of that queue, as the database knows it."""
    (holder,) = [holder for holder in await backend.holders([queue]) if holder.worker.id == worker.id]
    return holder


@asynccontextmanager
async def listening(backend: Backend, queue: str = "notes") -> AsyncGenerator["asyncio.Task[Wakeup]"]:
    """A task that ends with the first wake-up of the queue."""
    async with backend.wakeups([queue]) as hints:

        async def first() -> Wakeup:
            return await anext(hints)

        task = asyncio.create_task(first())
        await asyncio.sleep(0)
        yield task
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def writes(spy: Spy) -> Sequence[str]:
    """The statements that wrote, locked rows, or took SQLite's write lock; a WITH that only looks is none of them."""
    words = r"\b(INSERT INTO|UPDATE|DELETE FROM|BEGIN IMMEDIATE)\b"
    return [statement for statement in spy.statements if re.search(words, statement)]


def knowing(held: Collection[Claim] = (), pending: Collection[Token] = ()) -> Callable[[], Known]:
    """A worker that knows of these claims and tokens, whenever a beat asks."""
    return lambda: Known(list(held), list(pending))
