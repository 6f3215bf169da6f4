"""A tick of a schedule enqueues its job once, whoever comes first and however often it is tried."""

import asyncio
from datetime import timedelta, timezone

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from queue_core import JobRefused
from queue_core.backend import Backend
from queue_core.model import EnqueueStatus, JobStatus, Succeeded, Wakeup
from tests.support.clock import ManualClock
from tests.support.databases import Database
from tests.support.jobs import new_job
from tests.support.store import claim_again, enqueue, listening, moment, opened_backend, stored

HOUR = timedelta(hours=1)


async def test_a_tick_enqueues_its_job(backend: Backend, clock: ManualClock, database: Database) -> None:
    tick_at = clock.now() - timedelta(microseconds=123_457)
    answer = await backend.enqueue_tick("hourly", tick_at, new_job(payload='"tick"'))
    assert answer is not None
    assert answer.status is EnqueueStatus.INSERTED
    job = await stored(backend, answer.job_id)
    assert (job.payload, job.status) == ('"tick"', JobStatus.PENDING)
    ((schedule, at, job_id, fired_at),) = database.query("SELECT schedule, tick_at, job_id, fired_at FROM queue_ticks")
    assert (schedule, moment(at), job_id, moment(fired_at)) == ("hourly", tick_at, answer.job_id, clock.now())


async def test_a_tick_that_has_fired_fires_no_more(backend: Backend, clock: ManualClock, database: Database) -> None:
    first = await backend.enqueue_tick("hourly", clock.now(), new_job())
    assert first is not None
    assert await backend.enqueue_tick("hourly", clock.now(), new_job()) is None
    # Nor after its job has ended.
    job = await claim_again(backend, first.job_id)
    await backend.settle([Succeeded(job.claim)])
    assert await backend.enqueue_tick("hourly", clock.now(), new_job()) is None
    assert (database.count(), database.count("queue_ticks")) == (0, 1)


async def test_other_ticks_and_other_schedules_fire_on_their_own(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    for schedule in ("hourly", "Hourly", "hourly "):
        for tick_at in (clock.now(), clock.now() + HOUR, clock.now() + timedelta(microseconds=1)):
            assert await backend.enqueue_tick(schedule, tick_at, new_job()) is not None
    assert database.count() == 9


async def test_a_tick_is_an_instant_whatever_its_time_zone(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    assert await backend.enqueue_tick("daily", clock.now(), new_job()) is not None
    elsewhere = clock.now().astimezone(timezone(timedelta(hours=5, minutes=30)))
    assert await backend.enqueue_tick("daily", elsewhere, new_job()) is None
    assert database.count() == 1


async def test_a_tick_that_is_repeated_after_a_lost_answer_gives_the_same_answer(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    job = new_job()
    first = await backend.enqueue_tick("hourly", clock.now(), job)
    assert first is not None
    assert await backend.enqueue_tick("hourly", clock.now(), job) == first
    assert (database.count(), database.count("queue_ticks")) == (1, 1)


async def test_of_many_that_fire_a_tick_at_once_one_enqueues_its_job(
    backend: Backend, engine: AsyncEngine, clock: ManualClock, database: Database
) -> None:
    async with opened_backend(engine, clock) as other:
        for number in range(10):
            tick_at = clock.now() + number * HOUR
            answers = await asyncio.gather(
                *(each.enqueue_tick("hourly", tick_at, new_job()) for each in (backend, other) for _ in range(4))
            )
            (won,) = [answer for answer in answers if answer is not None]
            assert won.status is EnqueueStatus.INSERTED
    assert (database.count(), database.count("queue_ticks")) == (10, 10)


async def test_a_tick_whose_key_is_taken_has_fired_all_the_same(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    (live,) = await enqueue(backend, new_job(key="k", unique_key="k"))
    answer = await backend.enqueue_tick("hourly", clock.now(), new_job(key="k", unique_key="k"))
    assert answer is not None
    assert (answer.job_id, answer.status) == (live, EnqueueStatus.DUPLICATE)
    assert await backend.enqueue_tick("hourly", clock.now(), new_job()) is None
    assert database.count() == 1


async def test_a_tick_whose_job_is_refused_has_not_fired(
    backend: Backend, clock: ManualClock, database: Database, refusing_13: None
) -> None:
    with pytest.raises(JobRefused):
        await backend.enqueue_tick("hourly", clock.now(), new_job(tenant="13"))
    assert (database.count(), database.count("queue_ticks")) == (0, 0)
    assert await backend.enqueue_tick("hourly", clock.now(), new_job()) is not None


async def test_the_job_of_a_tick_may_have_a_time_of_its_own(backend: Backend, clock: ManualClock) -> None:
    answer = await backend.enqueue_tick("hourly", clock.now(), new_job(delay=HOUR))
    assert answer is not None
    job = await stored(backend, answer.job_id)
    assert (job.status, job.available_at) == (JobStatus.SCHEDULED, clock.now() + HOUR)


async def test_a_tick_wakes_whoever_waits_for_the_queue_of_its_job(engine: AsyncEngine, clock: ManualClock) -> None:
    async with opened_backend(engine, clock, notify=False) as backend:
        await backend.enqueue_tick("hourly", clock.now(), new_job())
        async with listening(backend) as woken:
            await backend.enqueue_tick("hourly", clock.now(), new_job())
            await asyncio.sleep(0)
            assert not woken.done()
            await backend.enqueue_tick("hourly", clock.now() + HOUR, new_job())
            assert await asyncio.wait_for(woken, 10) == Wakeup("notes")
