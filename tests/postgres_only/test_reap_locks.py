"""A beat and a reap of the same worker: the row of the worker is the lock between them."""

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

import psycopg
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from queue_core.backend import Backend
from queue_core.model import Beat, ClaimedJob, JobStatus, Reaped, Succeeded, Worker
from tests.support.clock import ManualClock
from tests.support.databases import PostgresDatabase
from tests.support.store import LEASE, claim_again, claimed, knowing, new_worker, opened_backend, stored

pytestmark = pytest.mark.postgres_only("row locks: SQLite has one lock for all writers")

MOMENT = timedelta(microseconds=1)


@pytest.fixture
def worker() -> Worker:
    return new_worker()


@pytest.fixture
async def job(backend: Backend, clock: ManualClock, worker: Worker) -> ClaimedJob:
    """A job whose worker's lease ran out a moment ago."""
    job = await claimed(backend, worker)
    clock.advance(LEASE + MOMENT)
    return job


@pytest.fixture
async def reaper(engine: AsyncEngine, clock: ManualClock) -> AsyncGenerator[Backend]:
    """Another process, with connections of its own."""
    async with opened_backend(engine, clock, notify=False) as reaper:
        yield reaper


@contextmanager
def transaction(database: PostgresDatabase) -> Generator[Any]:
    """Somebody's transaction, which holds its locks until it is committed. It never waits for one itself."""
    connection = database.connect()
    try:
        connection.execute("SET LOCAL lock_timeout = '5s'")
        yield connection
    finally:
        connection.rollback()  # a connection that is only closed keeps its locks until the server has noticed
        connection.close()


def renew(connection: Any, worker: Worker, now: datetime) -> None:
    """The write of a beat, before its commit."""
    done = connection.execute("UPDATE queue_workers SET lease_until = %s WHERE id = %s", [now + LEASE, worker.id])
    assert done.rowcount == 1


async def come_to_wait(database: PostgresDatabase, count: int = 1) -> None:
    """Until that many of the queue's statements wait for a lock."""
    for _ in range(5_000):
        await asyncio.sleep(0.001)
        waiting = database.query(
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        )
        if waiting == [(count,)]:
            return
    raise AssertionError("it never came to wait")


async def test_a_beat_that_has_not_committed_yet_keeps_its_jobs(
    reaper: Backend, clock: ManualClock, database: PostgresDatabase, worker: Worker, job: ClaimedJob
) -> None:
    with transaction(database) as beat:
        renew(beat, worker, clock.now())
        assert len(await asyncio.wait_for(reaper.reap(["notes"], limit=10), 8)) == 0
        beat.commit()
    assert len(await reaper.reap(["notes"], limit=10)) == 0
    kept = await stored(reaper, job.claim.job_id)
    assert (kept.status, kept.worker_id, kept.crashes) == (JobStatus.CLAIMED, worker.id, 0)


async def test_a_beat_that_was_rolled_back_has_kept_nothing(
    reaper: Backend, clock: ManualClock, database: PostgresDatabase, worker: Worker, job: ClaimedJob
) -> None:
    with transaction(database) as beat:
        renew(beat, worker, clock.now())
        beat.rollback()
    assert list((await reaper.reap(["notes"], limit=10)).requeued) == [job.claim.job_id]


async def test_a_beat_under_way_does_not_keep_the_jobs_of_others(
    backend: Backend,
    reaper: Backend,
    clock: ManualClock,
    database: PostgresDatabase,
    worker: Worker,
    job: ClaimedJob,
) -> None:
    other = await claimed(backend)
    clock.advance(LEASE + MOMENT)
    with transaction(database) as beat:
        renew(beat, worker, clock.now())
        assert list((await reaper.reap(["notes"], limit=10)).requeued) == [other.claim.job_id]
        beat.commit()
    assert (await stored(reaper, job.claim.job_id)).status is JobStatus.CLAIMED


async def test_a_beat_that_commits_after_the_reaper_looked_keeps_its_jobs(
    reaper: Backend, clock: ManualClock, database: PostgresDatabase, worker: Worker, job: ClaimedJob
) -> None:
    """The first look takes no lock, and sees a lease that ran out. The lock has to look again."""
    with transaction(database) as beat:
        beat.execute("LOCK TABLE queue_workers IN EXCLUSIVE MODE")  # stops who locks a row, and nobody who reads
        reaping = asyncio.create_task(reaper.reap(["notes"], limit=10))
        await come_to_wait(database)
        renew(beat, worker, clock.now())
        beat.commit()
        assert len(await reaping) == 0
    assert (await stored(reaper, job.claim.job_id)).worker_id == worker.id


@contextmanager
def stopped_in_the_middle(database: PostgresDatabase) -> Generator[Any]:
    """Lets a reap look and lock the rows of workers, and stops it before it locks a job."""
    with transaction(database) as stopper:
        stopper.execute("LOCK TABLE queue_jobs IN EXCLUSIVE MODE")
        yield stopper


def lock_now(database: PostgresDatabase, worker: Worker) -> None:
    """Take the lock of the worker's row, or fail at once."""
    with transaction(database) as connection:
        found = connection.execute("SELECT FROM queue_workers WHERE id = %s FOR UPDATE NOWAIT", [worker.id])
        assert found.rowcount == 1


async def test_a_reap_in_its_middle_holds_the_row_of_the_worker(
    backend: Backend, reaper: Backend, database: PostgresDatabase, worker: Worker, job: ClaimedJob
) -> None:
    """Without the lock a beat would commit here, renew the lease, report nothing lost, and be robbed all the same."""
    lock_now(database, worker)
    with stopped_in_the_middle(database) as stopper:
        reaping: asyncio.Task[Reaped] = asyncio.create_task(reaper.reap(["notes"], limit=10))
        await come_to_wait(database)
        with pytest.raises(psycopg.errors.LockNotAvailable):
            lock_now(database, worker)
        assert not reaping.done()
        stopper.rollback()
        assert list((await reaping).requeued) == [job.claim.job_id]
    lock_now(database, worker)
    assert list((await backend.beat(worker, knowing([job.claim], []))).lost) == [job.claim]
    again = await claim_again(backend, job.claim.job_id)
    assert (again.attempt, again.crashes) == (2, 1)
    assert await backend.settle([Succeeded(job.claim)]) == frozenset()


async def test_a_beat_in_the_middle_of_a_reap_waits_for_its_end_and_hears_what_was_taken(
    backend: Backend, reaper: Backend, clock: ManualClock, database: PostgresDatabase, worker: Worker
) -> None:
    last = await claimed(backend, worker, max_attempts=1)
    clock.advance(LEASE + MOMENT)
    with transaction(database) as stopper:
        # Nothing that a beat asks for: only the row of the worker, which the reap has locked, is in its way.
        stopper.execute("LOCK TABLE queue_dead_jobs IN ACCESS EXCLUSIVE MODE")
        reaping: asyncio.Task[Reaped] = asyncio.create_task(reaper.reap(["notes"], limit=10))
        await come_to_wait(database)
        beating: asyncio.Task[Beat] = asyncio.create_task(backend.beat(worker, knowing([last.claim], [])))
        await come_to_wait(database, 2)
        stopper.rollback()
        reaped, beat = await asyncio.gather(reaping, beating)
    assert [parked.id for parked in reaped.parked] == [last.claim.job_id]
    assert list(beat.lost) == [last.claim]


async def test_a_sweep_in_its_middle_holds_the_row_of_the_worker(
    backend: Backend, reaper: Backend, database: PostgresDatabase, worker: Worker, job: ClaimedJob
) -> None:
    with stopped_in_the_middle(database) as stopper:
        sweeping = asyncio.create_task(reaper.sweep_orphans(["notes"], [worker.id], park=False, limit=10))
        await come_to_wait(database)
        with pytest.raises(psycopg.errors.LockNotAvailable):
            lock_now(database, worker)
        stopper.rollback()
        assert list((await sweeping).requeued) == [job.claim.job_id]
    assert list((await backend.beat(worker, knowing([job.claim], []))).lost) == [job.claim]


async def test_a_worker_whose_row_is_locked_is_left_for_the_next_reap(
    reaper: Backend, database: PostgresDatabase, worker: Worker, job: ClaimedJob
) -> None:
    """Two reapers do not wait for one another."""
    with transaction(database) as other:
        other.execute("SELECT FROM queue_workers WHERE id = %s FOR UPDATE", [worker.id])
        assert len(await asyncio.wait_for(reaper.reap(["notes"], limit=10), 8)) == 0
    assert list((await reaper.reap(["notes"], limit=10)).requeued) == [job.claim.job_id]


async def test_a_job_that_is_just_being_settled_is_left_alone(
    reaper: Backend, database: PostgresDatabase, job: ClaimedJob
) -> None:
    with transaction(database) as settle:
        settle.execute("DELETE FROM queue_jobs WHERE id = %s", [job.claim.job_id])
        assert len(await asyncio.wait_for(reaper.reap(["notes"], limit=10), 8)) == 0
        settle.commit()
    assert len(await reaper.reap(["notes"], limit=10)) == 0
    assert (database.count(), database.count("queue_dead_jobs")) == (0, 0)
