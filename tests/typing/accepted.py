"""How users write it. Type checkers must have nothing to say about any of it; nothing here is called."""

import dataclasses
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, assert_type

import pydantic
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

import queue_core as qc
from queue_core import (
    Context,
    Delivery,
    Enqueued,
    EnqueueStatus,
    Fixed,
    FullJitter,
    FunctionJob,
    Job,
    JobId,
    JobOptions,
    JobStatus,
    Linear,
    PowersOfTwo,
    Queue,
    QueueCounts,
    Request,
    StoredJob,
    Transactional,
    job,
)

# Classes


class SendEmail(Job, queue="mail", max_attempts=5, timeout=30, priority=7, name="send_email", aliases=["Email"]):
    to: str
    subject: str = "Welcome"
    tags: list[str] = dataclasses.field(default_factory=list[str])

    async def run(self, ctx: Context) -> None:
        assert_type(self.to, str)
        assert_type(ctx.job_id, JobId)
        assert_type(ctx.deadline_at, datetime | None)


class Newsletter(SendEmail, timeout=timedelta(minutes=5), backoff=FullJitter(base=1, cap=60)):
    issue: int = 1


class Translate(Job[str], backoff=lambda attempt: attempt * 10.5):
    text: str

    async def run(self, ctx: Context) -> str:
        return self.text


class Resize(Job[int], backoff=Linear(5)):
    """A plain method, which runs in a thread."""

    width: int

    def run(self, ctx: Context) -> int:
        return self.width


@dataclasses.dataclass(frozen=True, kw_only=True)
class Archive(Job, backoff=PowersOfTwo()):
    year: int

    async def run(self, ctx: Context) -> None: ...


class Report(pydantic.BaseModel, Job[int], queue="reports"):
    year: int

    async def run(self, ctx: Context) -> int:
        return self.year


# Functions


@job
async def greet(ctx: Context, name: str, times: int = 1) -> str:
    return name * times


@job
async def sweep(folder: str) -> None: ...


@job
def count(ctx: Context, words: Sequence[str]) -> int:
    return len(words)


@job
def add(left: int, right: int) -> int:
    return left + right


@job(queue="mail", max_attempts=3, backoff=Fixed(60))
async def remind(ctx: Context, to: str, *, days: int = 7) -> bool:
    return days > 0


@job(name="total", aliases=["sum"], timeout=timedelta(seconds=5))
def total(numbers: list[int]) -> int:
    return sum(numbers)


@job(priority=-5)
def shout(ctx: Context, text: str) -> str:
    return text.upper()


@job()
async def tidy() -> None: ...


def makes_jobs() -> None:
    SendEmail("ada", "hello")
    SendEmail(to="ada", tags=["a"])
    Newsletter("ada", issue=3)
    Archive(year=2030)
    Report(year=2030)
    assert_type(greet("ada", times=2), Job[str])
    assert_type(sweep(folder="old"), Job[None])
    assert_type(count(["a"]), Job[int])
    assert_type(add(1, right=2), Job[int])
    assert_type(remind("ada", days=1), Job[bool])
    assert_type(total([1]), Job[int])
    assert_type(shout(text="hey"), Job[str])
    assert_type(tidy(), Job[None])
    assert_type(SendEmail.__job_options__, JobOptions)


async def runs_a_job_in_a_test(ctx: Context) -> None:
    assert_type(await Translate("hello").run(ctx), str)
    assert_type(Resize(5).run(ctx), int)
    assert_type(await Report(year=1).run(ctx), int)
    assert_type(await greet.function(ctx, "ada"), Any)


# Queues


async def opens_queues(engine: AsyncEngine) -> None:
    queue = await Queue.init(engine, jobs=[SendEmail, Report, greet, add], schema="jobs", max_payload=1_000)
    assert_type(queue, Queue)
    assert_type(Queue.default(), Queue)
    assert_type(Queue.is_initialized(), bool)
    await queue.close()
    async with Queue(engine, migrate=False, synchronous="normal", key_patience=0.5, give_up_after=5) as other:
        assert_type(other, Queue)
    await (await Queue(engine, jobs=(each for each in [Translate, Resize])).open()).close()


def registers(queue: Queue) -> None:
    Queue.register(SendEmail)
    Queue.register(greet)
    queue.register(Report)
    queue.register(remind)
    assert_type(Queue.has_registered_jobs(), bool)
    assert_type(queue.has_registered_jobs(), bool)


def wraps(function: FunctionJob[[str], None]) -> Job[None]:
    return function("a")


# Enqueueing


async def enqueues(queue: Queue, tenant: str | None) -> None:
    answer = await SendEmail("ada").enqueue(delay=60, key="welcome:ada")
    assert_type(answer, Enqueued)
    assert_type(answer.job_id, JobId)
    assert_type(answer.status, EnqueueStatus)
    await greet("ada").enqueue(delay=timedelta(minutes=5), priority=3)
    await Report(year=2030).enqueue(run_at=datetime.now(UTC), expires_in=3_600, timeout=None)
    await queue.enqueue(
        Archive(year=1),
        queue="slow",
        key="archive",
        key_mode="replace",
        key_scope="tenant",
        tenant=tenant,
        max_attempts=1,
        timeout=5,
        backoff=Linear(5),
        context="asked for by ada",
        headers={"trace": "1"},
        expires_at=datetime.now(UTC),
    )


async def enqueues_many(queue: Queue, names: Sequence[str]) -> None:
    request = SendEmail("ada").with_delivery(priority=5, delay=1)
    assert_type(request, Request)
    answers = await queue.enqueue_many([SendEmail("bob"), request, greet("ada")], context="the whole batch")
    assert_type(answers, Sequence[Enqueued])
    await queue.enqueue_many(SendEmail(name) for name in names)


async def joins_transactions(queue: Queue, session: AsyncSession, connection: AsyncConnection) -> None:
    await SendEmail("ada").enqueue(session=session)
    await queue.enqueue(greet("ada"), connection=connection, key="k")
    await queue.enqueue_many([SendEmail("ada")], session=session, priority=1)


def enqueues_from_a_thread(queue: Queue, session: Session, connection: Connection) -> None:
    assert_type(queue.enqueue_sync(SendEmail("ada"), delay=5), Enqueued)
    queue.enqueue_sync(add(1, 2), session=session)
    queue.enqueue_sync(add(1, 2), connection=connection)


async def passes_keywords_on(queue: Queue, delivery: Delivery, transactional: Transactional) -> None:
    mine: Delivery = {"priority": 1, "key": None}
    await SendEmail("ada").enqueue(**delivery)
    await queue.enqueue(SendEmail("ada").with_delivery(**mine).job, **transactional)


# Looking


async def looks(queue: Queue) -> None:
    found = await queue.get(5)
    assert_type(found, StoredJob | None)
    assert_type(await queue.counts(), Mapping[str, QueueCounts])
    if found is not None:
        assert_type(found.status, JobStatus)
        assert_type(found.headers, Mapping[str, str])


# Errors


async def handles_errors() -> str:
    try:
        await SendEmail("ada").enqueue()
    except (qc.NotInitialized, qc.AlreadyInitialized, qc.WrongThread, qc.WrongDatabase) as error:
        return str(error)
    except (qc.PayloadError, qc.UnsupportedDatabase, qc.ConfigurationError) as error:
        return str(error)
    except (qc.UnknownJobType, qc.SchemaError) as error:
        return str(error)
    except (qc.TransactionOpen, qc.JobRefused, qc.KeyLocked, qc.BackendUnavailable, qc.BackendError) as error:
        return str(error.__cause__)
    except qc.QueueError as error:
        return str(error)
    return "enqueued"
