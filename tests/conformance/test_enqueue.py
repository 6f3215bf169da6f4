"""Enqueueing: what is stored, in which order, and that a repetition makes no second job."""

from datetime import timedelta

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from queue_core import Fixed, Queue
from queue_core.backend import Backend
from queue_core.model import EnqueueStatus, JobId, JobStatus
from tests.support.clock import ManualClock
from tests.support.databases import Database
from tests.support.jobs import Note, Other, new_job
from tests.support.spy import Spy


async def test_jobs_get_ids_in_their_order(backend: Backend, database: Database) -> None:
    answers = await backend.enqueue_many([new_job(payload=f'"{number}"') for number in range(5)])
    assert [answer.status for answer in answers] == [EnqueueStatus.INSERTED] * 5
    assert database.jobs("id, payload") == [(answer.job_id, f'"{number}"') for number, answer in enumerate(answers)]


async def test_a_job_that_is_due_is_pending_and_one_of_the_future_is_scheduled(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    second = timedelta(seconds=1)
    await backend.enqueue_many(
        [
            new_job(),
            new_job(delay=second),
            new_job(run_at=clock.now()),
            new_job(run_at=clock.now() - second),
            new_job(run_at=clock.now() + second),
        ]
    )
    assert database.jobs("status") == [("pending",), ("scheduled",), ("pending",), ("pending",), ("scheduled",)]


async def test_a_job_is_stored_with_all_that_its_delivery_says(backend: Backend, clock: ManualClock) -> None:
    (answer,) = await backend.enqueue_many(
        [
            new_job(
                job_type="Report",
                queue="slow",
                payload='{"a":1}',
                priority=-7,
                max_attempts=3,
                timeout=timedelta(seconds=30),
                backoff='{"policy":"fixed","wait":1.0}',
                key="k",
                unique_key='["type","Report","k"]',
                tenant="acme",
                context="asked for by ada",
                headers='{"trace":"1"}',
                delay=timedelta(minutes=5),
                expires_after=timedelta(hours=1),
            )
        ]
    )
    stored = await backend.get(answer.job_id)
    assert stored is not None
    assert (stored.job_type, stored.queue, stored.payload, stored.status) == (
        "Report",
        "slow",
        '{"a":1}',
        JobStatus.SCHEDULED,
    )
    assert (stored.priority, stored.max_attempts, stored.attempt, stored.crashes) == (-7, 3, 0, 0)
    assert (stored.timeout, stored.backoff) == (timedelta(seconds=30), '{"policy":"fixed","wait":1.0}')
    assert (stored.key, stored.unique_key, stored.tenant) == ("k", '["type","Report","k"]', "acme")
    assert (stored.context, stored.headers) == ("asked for by ada", {"trace": "1"})
    assert stored.created_at == clock.now()
    assert stored.available_at == clock.now() + timedelta(minutes=5)
    assert stored.expires_at == clock.now() + timedelta(hours=1)
    assert (stored.worker_id, stored.claimed_at, stored.deadline_at) == (None, None, None)


async def test_an_instant_is_stored_to_the_microsecond(backend: Backend, clock: ManualClock) -> None:
    moment = clock.now() + timedelta(days=400, microseconds=123_457)
    (answer,) = await backend.enqueue_many([new_job(run_at=moment, expires_at=moment)])
    stored = await backend.get(answer.job_id)
    assert stored is not None
    assert (stored.available_at, stored.expires_at) == (moment, moment)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\x00",
        "\x00\x1f\x7f",
        "'; DROP TABLE queue_jobs; --",
        "\u202e\u2028😀",
        "\\u0000",
        '"',
        "%s ? :name $1",
        "é" * 5_000,
    ],
    ids=["empty", "nul", "control", "injection", "unicode", "escaped", "quote", "placeholders", "long"],
)
async def test_a_text_comes_back_as_it_was(queue: Queue, text: str) -> None:
    enqueued = await queue.enqueue(Note(text=text))
    stored = await queue.get(enqueued.job_id)
    assert stored is not None
    assert Note(text=text) == queue.registry.decode(stored.job_type, stored.payload)


@pytest.mark.parametrize("number", [2**53 + 1, -(2**63), 2**70, 10**40])
async def test_an_integer_of_any_size_comes_back_exactly(queue: Queue, number: int) -> None:
    enqueued = await queue.enqueue(Other(number=number))
    stored = await queue.get(enqueued.job_id)
    assert stored is not None
    assert queue.registry.decode(stored.job_type, stored.payload) == Other(number=number)


async def test_the_class_gives_what_the_delivery_leaves_out(queue: Queue) -> None:
    plain = await queue.get((await queue.enqueue(Note())).job_id)
    changed = await queue.get(
        (await queue.enqueue(Note(), queue="q", priority=9, max_attempts=2, timeout=3, backoff=Fixed(1))).job_id
    )
    assert plain is not None
    assert changed is not None
    assert (plain.queue, plain.priority, plain.max_attempts, plain.timeout, plain.backoff) == (
        "notes",
        0,
        5,
        None,
        None,
    )
    assert (changed.queue, changed.priority, changed.max_attempts) == ("q", 9, 2)
    assert (changed.timeout, changed.backoff) == (timedelta(seconds=3), '{"policy":"fixed","wait":1.0}')


async def test_a_repeated_request_makes_no_second_job(backend: Backend, database: Database) -> None:
    jobs = [new_job(), new_job(key="k", unique_key="k"), new_job(key="r", unique_key="r", key_mode="replace")]
    first = await backend.enqueue_many(jobs)
    again = await backend.enqueue_many(jobs)
    assert first == again
    assert database.count() == 3


async def test_a_bulk_of_ten_thousand_is_one_transaction_and_a_handful_of_statements(
    engine: AsyncEngine, database: Database
) -> None:
    spy = Spy(engine)
    async with Queue(engine, jobs=[Note]) as queue:
        await queue.enqueue(Note())
        spy.reset()
        answers = await queue.enqueue_many(Note(text=str(number)) for number in range(10_000))
        assert spy.commits == 1
        assert len(spy.statements) <= 10
    assert len({answer.job_id for answer in answers}) == 10_000
    assert database.count() == 10_001


async def test_a_bulk_that_is_refused_leaves_nothing(queue: Queue, database: Database) -> None:
    jobs = [Note(text=str(number)) for number in range(3_000)]
    jobs.append(Note(text=7))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="does not fit its class"):
        await queue.enqueue_many(jobs)
    assert database.count() == 0


async def test_a_bulk_of_nothing_writes_nothing(queue: Queue, database: Database) -> None:
    assert list(await queue.enqueue_many([])) == []
    assert database.count() == 0


async def test_in_a_bulk_each_job_may_have_a_delivery_of_its_own(queue: Queue, database: Database) -> None:
    await queue.enqueue_many(
        [Note(), Note().with_delivery(priority=5), Other().with_delivery(queue="own", tenant="t")], priority=1
    )
    assert database.jobs("queue, priority, tenant") == [("notes", 1, None), ("notes", 5, None), ("own", 1, "t")]


async def test_counts_are_by_queue_and_status(backend: Backend, database: Database) -> None:
    await backend.enqueue_many(
        [new_job(queue="a"), new_job(queue="a"), new_job(queue="a", delay=timedelta(1)), new_job(queue="b")]
    )
    database.query("UPDATE queue_jobs SET status = 'claimed' WHERE queue = 'b'")
    counts = await backend.counts()
    assert list(counts) == ["a", "b"]
    assert (counts["a"].pending, counts["a"].scheduled, counts["a"].claimed, counts["a"].dead) == (2, 1, 0, 0)
    assert (counts["b"].pending, counts["b"].scheduled, counts["b"].claimed, counts["b"].dead) == (0, 0, 1, 0)


async def test_a_job_that_is_not_there_is_none(backend: Backend) -> None:
    assert await backend.get(JobId(4711)) is None
