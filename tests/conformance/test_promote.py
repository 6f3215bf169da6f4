"""Scheduled jobs become pending when they are due, and a worker can ask when that will be."""

import asyncio
from datetime import timedelta

from sqlalchemy.ext.asyncio import AsyncEngine

from queue_core.backend import Backend
from queue_core.model import JobStatus, Retried, Snoozed, Wakeup
from tests.support.clock import ManualClock
from tests.support.databases import Database
from tests.support.jobs import new_job
from tests.support.store import claim, claimed, enqueue, failure, listening, new_worker, opened_backend, stored

MOMENT = timedelta(microseconds=1)
MINUTE = timedelta(minutes=1)


# Promoting


async def test_a_scheduled_job_is_pending_from_the_moment_that_it_is_due(backend: Backend, clock: ManualClock) -> None:
    (job_id,) = await enqueue(backend, new_job(delay=MINUTE))
    due_at = clock.now() + MINUTE
    clock.advance(MINUTE - MOMENT)
    assert await backend.promote(["notes"], limit=10) == 0
    assert (await stored(backend, job_id)).status is JobStatus.SCHEDULED
    clock.advance(MOMENT)
    assert await backend.promote(["notes"], limit=10) == 1
    job = await stored(backend, job_id)
    assert (job.status, job.available_at, job.attempt) == (JobStatus.PENDING, due_at, 0)
    assert await backend.promote(["notes"], limit=10) == 0


async def test_a_scheduled_job_is_not_claimed_before_it_is_promoted(backend: Backend, clock: ManualClock) -> None:
    (job_id,) = await enqueue(backend, new_job(delay=MINUTE))
    assert await claim(backend, new_worker()) == []
    clock.advance(MINUTE)
    await backend.promote(["notes"], limit=10)
    assert [job.claim.job_id for job in await claim(backend, new_worker())] == [job_id]


async def test_a_retry_is_promoted_like_any_job_and_keeps_its_attempt(backend: Backend, clock: ManualClock) -> None:
    job = await claimed(backend)
    await backend.settle([Retried(job.claim, failure(), MINUTE)])
    clock.advance(MINUTE)
    assert await backend.promote(["notes"], limit=10) == 1
    again = await stored(backend, job.claim.job_id)
    assert (again.status, again.attempt) == (JobStatus.PENDING, 1)


async def test_promoted_jobs_are_claimed_in_the_order_in_which_they_were_due(
    backend: Backend, clock: ManualClock
) -> None:
    late, early, between = await enqueue(backend, *(new_job(delay=number * MINUTE) for number in (3, 1, 2)))
    clock.advance(3 * MINUTE)
    (now,) = await enqueue(backend, new_job())
    await backend.promote(["notes"], limit=10)
    jobs = await claim(backend, new_worker(), 4)
    assert [job.claim.job_id for job in jobs] == [early, between, late, now]


async def test_jobs_that_are_pending_or_claimed_are_not_promoted(backend: Backend, clock: ManualClock) -> None:
    job = await claimed(backend)
    (waiting,) = await enqueue(backend, new_job())
    clock.advance(MINUTE)
    assert await backend.promote(["notes"], limit=10) == 0
    assert (await stored(backend, job.claim.job_id)).status is JobStatus.CLAIMED
    assert (await stored(backend, waiting)).status is JobStatus.PENDING


async def test_only_the_named_queues_are_promoted(backend: Backend, clock: ManualClock) -> None:
    here, there = await enqueue(backend, new_job(delay=MINUTE), new_job(delay=MINUTE, queue="other"))
    clock.advance(MINUTE)
    assert await backend.promote([], limit=10) == 0
    assert await backend.promote(["notes", "unheard of"], limit=10) == 1
    assert (await stored(backend, here)).status is JobStatus.PENDING
    assert (await stored(backend, there)).status is JobStatus.SCHEDULED


async def test_a_promotion_takes_no_more_than_its_limit_and_the_next_one_the_rest(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    queues = ("notes", "other", "third")
    await enqueue(backend, *(new_job(queue=queue, delay=MINUTE) for queue in queues for _ in range(4)))
    clock.advance(MINUTE)
    assert [await backend.promote(queues, limit=5) for _ in range(4)] == [5, 5, 2, 0]
    assert database.query("SELECT DISTINCT status FROM queue_jobs") == [("pending",)]


async def test_two_promotions_at_once_count_each_job_once(
    backend: Backend, engine: AsyncEngine, clock: ManualClock, database: Database
) -> None:
    await enqueue(backend, *(new_job(delay=MINUTE) for _ in range(60)))
    clock.advance(MINUTE)
    promoted = 0
    async with opened_backend(engine, clock) as other:
        while sum(counts := await asyncio.gather(*(each.promote(["notes"], limit=7) for each in (backend, other)))):
            promoted += sum(counts)
    assert promoted == 60
    assert database.query("SELECT DISTINCT status FROM queue_jobs") == [("pending",)]


async def test_a_promotion_wakes_whoever_waits_for_the_queue(engine: AsyncEngine, clock: ManualClock) -> None:
    async with opened_backend(engine, clock, notify=False) as backend:
        await enqueue(backend, new_job(delay=MINUTE), new_job(delay=MINUTE, queue="other"))
        async with listening(backend) as woken:
            await backend.promote(["notes"], limit=10)
            clock.advance(MINUTE)
            await backend.promote(["other"], limit=10)
            await asyncio.sleep(0)
            assert not woken.done()
            await backend.promote(["notes"], limit=10)
            assert await asyncio.wait_for(woken, 10) == Wakeup("notes")


# How long until the next one


async def test_the_next_due_job_is_the_earliest_scheduled_one_of_the_queues(
    backend: Backend, clock: ManualClock
) -> None:
    soon = timedelta(seconds=20, microseconds=123_457)
    await enqueue(
        backend,
        new_job(delay=MINUTE),
        new_job(delay=soon, queue="other"),
        new_job(delay=timedelta(seconds=1), queue="third"),
    )
    assert await backend.next_due(["notes"]) == MINUTE
    assert await backend.next_due(["notes", "other"]) == soon
    clock.advance(MOMENT)
    assert await backend.next_due(["notes", "other"]) == soon - MOMENT


async def test_nothing_is_due_next_where_nothing_is_scheduled(backend: Backend) -> None:
    await claimed(backend)
    await enqueue(backend, new_job(), new_job(queue="other", delay=MINUTE))
    assert await backend.next_due(["notes"]) is None
    assert await backend.next_due([]) is None


async def test_what_is_overdue_is_due_in_no_time(backend: Backend, clock: ManualClock) -> None:
    await enqueue(backend, new_job(delay=MINUTE), new_job(delay=2 * MINUTE))
    clock.advance(MINUTE)
    assert await backend.next_due(["notes"]) == timedelta(0)
    clock.advance(MINUTE / 2)
    assert await backend.next_due(["notes"]) == timedelta(0)
    await backend.promote(["notes"], limit=10)
    assert await backend.next_due(["notes"]) == MINUTE / 2


async def test_what_comes_back_later_is_due_then(backend: Backend) -> None:
    retried, snoozed = await claimed(backend), await claimed(backend)
    await backend.settle([Retried(retried.claim, failure(), 2 * MINUTE)])
    assert await backend.next_due(["notes"]) == 2 * MINUTE
    await backend.settle([Snoozed(snoozed.claim, MINUTE)])
    assert await backend.next_due(["notes"]) == MINUTE
