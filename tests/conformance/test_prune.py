"""What is old is deleted in small batches: finished jobs, fired ticks, workers that ended. Nothing else is."""

import asyncio
from datetime import timedelta

from sqlalchemy.ext.asyncio import AsyncEngine

from queue_core.backend import Backend
from queue_core.model import JobId, Succeeded, WorkerId
from tests.support.clock import ManualClock
from tests.support.databases import Database
from tests.support.jobs import new_job
from tests.support.store import LEASE, claimed, enqueue, knowing, new_worker, opened_backend

MOMENT = timedelta(microseconds=1)
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)


async def finish(backend: Backend, count: int = 1) -> list[JobId]:
    """Let that many jobs end now."""
    jobs = await enqueue(backend, *(new_job() for _ in range(count)))
    for job_id in jobs:
        await backend.cancel(job_id)
    return list(jobs)


def finished(database: Database) -> list[JobId]:
    return [row[0] for row in database.query("SELECT job_id FROM queue_history ORDER BY job_id")]


def workers(database: Database) -> set[WorkerId]:
    return {WorkerId(str(row[0])) for row in database.query("SELECT id FROM queue_workers")}


# History


async def test_jobs_that_finished_that_long_ago_are_forgotten(
    engine: AsyncEngine, clock: ManualClock, database: Database
) -> None:
    async with opened_backend(engine, clock, history=True) as backend:
        await finish(backend)
        clock.advance(HOUR)
        young = await finish(backend)
        clock.advance(DAY - HOUR)
        assert await backend.prune(older_than=DAY, limit=10) == 0
        clock.advance(MOMENT)
        assert await backend.prune(older_than=DAY, limit=10) == 1
        assert finished(database) == young
        assert await backend.prune(older_than=DAY, limit=10) == 0


async def test_the_history_of_every_queue_and_ending_is_pruned(
    engine: AsyncEngine, clock: ManualClock, database: Database
) -> None:
    async with opened_backend(engine, clock, history=True) as backend:
        worker = new_worker()
        for queue in ("notes", "other"):
            job = await claimed(backend, worker, queue=queue)
            await backend.settle([Succeeded(job.claim)])
        await finish(backend)
        clock.advance(HOUR)
        await backend.beat(worker, knowing([], []))
        assert await backend.prune(older_than=HOUR - MOMENT, limit=10) == 3
        assert finished(database) == []


# Ticks


async def test_ticks_that_fired_that_long_ago_are_forgotten_but_the_last_of_each_schedule(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    start = clock.now()
    for schedule, count in (("hourly", 4), ("once", 1)):
        for number in range(count):
            assert await backend.enqueue_tick(schedule, start + number * HOUR, new_job()) is not None
    clock.advance(DAY)
    assert await backend.prune(older_than=DAY, limit=10) == 0
    clock.advance(MOMENT)
    assert await backend.prune(older_than=DAY, limit=10) == 3
    assert database.query("SELECT schedule FROM queue_ticks ORDER BY schedule") == [("hourly",), ("once",)]
    assert await backend.enqueue_tick("hourly", start + 3 * HOUR, new_job()) is None
    assert await backend.enqueue_tick("once", start, new_job()) is None


async def test_the_last_tick_is_the_one_of_the_latest_time_whenever_it_fired(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    """A schedule that catches up may fire an earlier tick later."""
    start = clock.now()
    await backend.enqueue_tick("hourly", start + HOUR, new_job())
    clock.advance(HOUR)
    await backend.enqueue_tick("hourly", start, new_job())
    clock.advance(DAY + MOMENT)
    assert await backend.prune(older_than=DAY, limit=10) == 1
    assert await backend.enqueue_tick("hourly", start + HOUR, new_job()) is None
    assert database.count("queue_ticks") == 1


async def test_a_tick_that_fired_lately_stays_however_old_its_time(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    for number in range(3):
        await backend.enqueue_tick("late", clock.now() - number * 30 * DAY, new_job())
    clock.advance(HOUR)
    assert await backend.prune(older_than=DAY, limit=10) == 0
    assert database.count("queue_ticks") == 3


# Workers


async def test_workers_whose_lease_ended_that_long_ago_are_forgotten(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    await backend.register_worker(new_worker())
    clock.advance(HOUR)
    live = await backend.register_worker(new_worker())
    clock.advance(DAY + LEASE - HOUR)
    assert await backend.prune(older_than=DAY, limit=10) == 0
    clock.advance(MOMENT)
    assert await backend.prune(older_than=DAY, limit=10) == 1
    assert workers(database) == {live.id}


async def test_a_worker_that_stopped_is_forgotten_when_its_lease_and_its_end_are_that_long_ago(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    early, late = await backend.register_worker(new_worker()), await backend.register_worker(new_worker())
    await backend.forget_worker(early.id)
    clock.advance(2 * HOUR)
    await backend.forget_worker(late.id)
    clock.advance(DAY - 2 * HOUR + LEASE)
    assert await backend.prune(older_than=DAY, limit=10) == 0
    clock.advance(MOMENT)
    assert await backend.prune(older_than=DAY, limit=10) == 1
    assert workers(database) == {late.id}
    clock.advance(2 * HOUR)
    assert await backend.prune(older_than=DAY, limit=10) == 1
    assert workers(database) == set()


async def test_a_worker_that_holds_claims_is_not_forgotten(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    silent, stopped = new_worker(), new_worker()
    for worker in (silent, stopped):
        await claimed(backend, worker)
    await backend.forget_worker(stopped.id)
    clock.advance(10 * DAY)
    assert await backend.prune(older_than=DAY, limit=10) == 0
    assert len(await backend.reap(["notes"], limit=10)) == 2
    assert await backend.prune(older_than=DAY, limit=10) == 2
    assert workers(database) == set()


async def test_a_worker_that_beats_is_not_forgotten_however_long_it_lives(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    worker = await backend.register_worker(new_worker())
    for _ in range(5):
        clock.advance(DAY)
        await backend.beat(worker, knowing([], []))
        assert await backend.prune(older_than=LEASE, limit=10) == 0
    assert workers(database) == {worker.id}


# Only so many, and nothing else


async def test_a_prune_deletes_no_more_than_its_limit_in_all_and_the_next_one_the_rest(
    engine: AsyncEngine, clock: ManualClock, database: Database
) -> None:
    async with opened_backend(engine, clock, history=True) as backend:
        await finish(backend, 4)
        for number in range(5):
            await backend.enqueue_tick("hourly", clock.now() + number * HOUR, new_job())
        for _ in range(4):
            await backend.register_worker(new_worker())
        clock.advance(2 * DAY)
        assert [await backend.prune(older_than=DAY, limit=5) for _ in range(4)] == [5, 5, 2, 0]
    assert [database.count(table) for table in ("queue_history", "queue_ticks", "queue_workers")] == [0, 1, 0]


async def test_many_rows_are_pruned_in_as_many_batches_as_it_takes(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    for schedule in ("a", "b"):
        for number in range(100):
            await backend.enqueue_tick(schedule, clock.now() + number * HOUR, new_job())
    clock.advance(2 * DAY)
    batches: list[int] = []
    while batch := await backend.prune(older_than=DAY, limit=40):
        batches.append(batch)
    assert batches == [40, 40, 40, 40, 38]
    assert database.count("queue_ticks") == 2


async def test_two_prunes_at_once_count_each_row_once(
    engine: AsyncEngine, clock: ManualClock, database: Database
) -> None:
    async with (
        opened_backend(engine, clock, history=True) as backend,
        opened_backend(engine, clock, history=True) as other,
    ):
        await finish(backend, 30)
        for number in range(31):
            await backend.enqueue_tick("hourly", clock.now() + number * HOUR, new_job())
        clock.advance(2 * DAY)
        pruned = 0
        while sum(counts := await asyncio.gather(*(each.prune(older_than=DAY, limit=7) for each in (backend, other)))):
            pruned += sum(counts)
    assert pruned == 60
    assert (database.count("queue_history"), database.count("queue_ticks")) == (0, 1)


async def test_live_jobs_dead_letters_and_pauses_are_kept_however_old(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    await claimed(backend, max_attempts=1)
    clock.advance(LEASE + MOMENT)
    assert len((await backend.reap(["notes"], limit=10)).parked) == 1
    await claimed(backend)
    await enqueue(backend, new_job(), new_job(delay=HOUR))
    await backend.pause("notes")
    clock.advance(1000 * DAY)
    assert await backend.prune(older_than=DAY, limit=100) == 1  # the worker of the parked job
    assert [database.count(table) for table in ("queue_jobs", "queue_dead_jobs", "queue_pauses")] == [3, 1, 1]
