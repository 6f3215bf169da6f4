"""Who holds claims, and taking them back from workers that are proved dead: those, and nobody else."""

import asyncio
from datetime import timedelta

from sqlalchemy.ext.asyncio import AsyncEngine

from queue_core.backend import Backend
from queue_core.ids import time_ordered_uuid
from queue_core.model import JobId, JobStatus, Succeeded, Wakeup, WorkerId
from tests.support.clock import ManualClock
from tests.support.databases import Database
from tests.support.jobs import new_job
from tests.support.spy import Spy
from tests.support.store import (
    LEASE,
    claim,
    claim_again,
    claimed,
    enqueue,
    errors_of,
    holder_of,
    knowing,
    listening,
    moment,
    new_token,
    new_worker,
    opened_backend,
    stored,
)

MOMENT = timedelta(microseconds=1)


async def sweep(backend: Backend, *dead: WorkerId, limit: int = 100) -> list[JobId]:
    """Take back the claims of these workers, where nothing may be parked."""
    swept = await backend.sweep_orphans(["notes"], dead, park=False, limit=limit)
    assert list(swept.parked) == []
    return list(swept.requeued)


# Orphans


async def test_the_jobs_of_a_dead_worker_are_pending_again_whatever_its_lease_says(
    backend: Backend, clock: ManualClock
) -> None:
    worker = new_worker()
    job = await claimed(backend, worker, timeout=timedelta(seconds=90))
    clock.advance(timedelta(seconds=1))
    assert await sweep(backend, worker.id) == [job.claim.job_id]
    again = await stored(backend, job.claim.job_id)
    assert (again.status, again.attempt, again.crashes) == (JobStatus.PENDING, 1, 1)
    assert again.available_at == clock.now()
    assert (again.worker_id, again.claimed_at, again.deadline_at) == (None, None, None)


async def test_the_death_of_its_worker_is_recorded_as_the_failure_of_the_attempt(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    worker = new_worker()
    job = await claimed(backend, worker)
    await sweep(backend, worker.id)
    (error,) = errors_of(database, job.claim.job_id)
    assert (error.attempt, error.kind, error.message) == (1, "WorkerDied", "its worker's process ended")
    assert error.failed_at == clock.now()


async def test_an_orphan_in_its_last_attempt_is_parked(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    worker = new_worker()
    job = await claimed(backend, worker, max_attempts=1, payload='"kept"')
    while_claimed = await stored(backend, job.claim.job_id)
    swept = await backend.sweep_orphans(["notes"], [worker.id], park=False, limit=10)
    assert (list(swept.requeued), list(swept.parked)) == ([], [while_claimed])
    assert await backend.get(job.claim.job_id) is None
    (letter,) = database.query(
        "SELECT payload, reason, parked_by, failure_count, error_kind, failed_at FROM queue_dead_jobs"
    )
    assert letter[:-1] == ('"kept"', "its worker's process ended", "orphan sweep", 1, "WorkerDied")
    assert moment(letter[-1]) == clock.now()


async def test_orphans_are_parked_where_that_is_asked_for(backend: Backend, database: Database) -> None:
    worker = new_worker()
    await enqueue(backend, new_job(max_attempts=1), new_job(max_attempts=9))
    await claim(backend, worker, 2)
    swept = await backend.sweep_orphans(["notes"], [worker.id], park=True, limit=10)
    assert (len(swept.requeued), len(swept.parked)) == (0, 2)
    assert database.count() == 0
    assert database.query("SELECT parked_by, failure_count FROM queue_dead_jobs") == [("orphan sweep", 1)] * 2


async def test_a_swept_job_is_claimed_again_and_its_old_claim_writes_nothing(backend: Backend) -> None:
    worker = new_worker()
    old = await claimed(backend, worker)
    await sweep(backend, worker.id)
    new = await claim_again(backend, old.claim.job_id)
    assert (new.attempt, new.crashes) == (2, 1)
    assert await backend.settle([Succeeded(old.claim)]) == frozenset()
    assert await backend.settle([Succeeded(new.claim)]) == {new.claim.job_id}


async def test_a_swept_job_that_was_called_off_is_ended_by_the_next_claim(backend: Backend, database: Database) -> None:
    worker = new_worker()
    job = await claimed(backend, worker)
    await backend.cancel(job.claim.job_id)
    assert await sweep(backend, worker.id) == [job.claim.job_id]
    answer = await backend.claim(new_worker(), new_token(), {"notes": 1}, ["Note"])
    assert (list(answer.jobs), answer.ended) == ([], 1)
    assert (database.count(), database.count("queue_dead_jobs")) == (0, 0)


async def test_a_sweep_wakes_whoever_waits_for_the_queue(engine: AsyncEngine, clock: ManualClock) -> None:
    async with opened_backend(engine, clock, notify=False) as backend:
        worker = new_worker()
        await claimed(backend, worker)
        async with listening(backend) as woken:
            await sweep(backend, worker.id)
            assert await asyncio.wait_for(woken, 10) == Wakeup("notes")


async def test_a_dead_worker_is_marked_as_stopped(backend: Backend, clock: ManualClock, database: Database) -> None:
    dead, live = new_worker(), new_worker()
    await claimed(backend, dead)
    await claimed(backend, live)
    await sweep(backend, dead.id)
    stopped = {str(worker): moment(at) for worker, at in database.query("SELECT id, stopped_at FROM queue_workers")}
    assert stopped == {dead.id: clock.now(), live.id: None}


async def test_what_a_sweep_leaves_of_a_dead_worker_is_reaped_at_once(backend: Backend) -> None:
    """The queues that a worker handles are swept; the dead one may have had others as well."""
    worker = new_worker()
    await claimed(backend, worker)
    elsewhere = await claimed(backend, worker, queue="other")
    await sweep(backend, worker.id)
    assert (await holder_of(backend, worker, "other")).stopped
    assert list((await backend.reap(["other"], limit=10)).requeued) == [elsewhere.claim.job_id]


async def test_only_the_claims_of_the_dead_are_swept_whatever_the_lease_of_others(
    backend: Backend, clock: ManualClock
) -> None:
    dead, silent, stopped, late = new_worker(), new_worker(), new_worker(), new_worker()
    orphan = await claimed(backend, dead)
    others = [await claimed(backend, worker, timeout=MOMENT) for worker in (silent, stopped, late)]
    clock.advance(10 * LEASE)
    await backend.forget_worker(stopped.id)
    await backend.beat(late, knowing([others[-1].claim], []))
    assert await sweep(backend, dead.id) == [orphan.claim.job_id]
    for job in others:
        assert (await stored(backend, job.claim.job_id)).status is JobStatus.CLAIMED


async def test_only_the_named_queues_are_swept(backend: Backend) -> None:
    worker = new_worker()
    here = await claimed(backend, worker)
    there = await claimed(backend, worker, queue="other")
    assert await sweep(backend, worker.id) == [here.claim.job_id]
    assert (await stored(backend, there.claim.job_id)).status is JobStatus.CLAIMED


async def test_without_queues_nothing_is_swept(backend: Backend) -> None:
    worker = new_worker()
    job = await claimed(backend, worker)
    assert len(await backend.sweep_orphans([], [worker.id], park=True, limit=10)) == 0
    assert (await stored(backend, job.claim.job_id)).status is JobStatus.CLAIMED


async def test_a_worker_that_starts_takes_nothing_from_one_that_lives(engine: AsyncEngine, clock: ManualClock) -> None:
    """It looks who holds claims, can prove nobody's death, and so names nobody."""
    spy = Spy(engine)
    async with opened_backend(engine, clock, notify=False) as backend:
        live = await backend.register_worker(new_worker())
        job = await claimed(backend, live)
        await backend.register_worker(new_worker())
        (holder,) = await backend.holders(["notes"])
        assert (holder.worker, holder.stopped, holder.let_go) == (live, False, False)
        spy.reset()
        assert len(await backend.sweep_orphans(["notes"], [], park=True, limit=10)) == 0
        assert spy.statements == []
        assert await backend.settle([Succeeded(job.claim)]) == {job.claim.job_id}


async def test_a_worker_that_nobody_knows_leaves_no_orphans(backend: Backend) -> None:
    job = await claimed(backend)
    assert await sweep(backend, WorkerId(time_ordered_uuid())) == []
    assert (await stored(backend, job.claim.job_id)).status is JobStatus.CLAIMED


async def test_a_sweep_takes_no_more_than_its_limit_and_the_next_one_the_rest(backend: Backend) -> None:
    workers = [new_worker() for _ in range(3)]
    await enqueue(backend, *(new_job() for _ in range(12)))
    for worker in workers:
        assert len(await claim(backend, worker, 4)) == 4
    dead = [worker.id for worker in workers]
    assert [len(await sweep(backend, *dead, limit=5)) for _ in range(4)] == [5, 5, 2, 0]


async def test_two_that_start_at_once_sweep_each_orphan_once(
    backend: Backend, engine: AsyncEngine, clock: ManualClock, database: Database
) -> None:
    worker = new_worker()
    await enqueue(backend, *(new_job() for _ in range(40)))
    assert len(await claim(backend, worker, 40)) == 40
    async with opened_backend(engine, clock) as other:
        one, two = await asyncio.gather(sweep(backend, worker.id), sweep(other, worker.id))
    assert sorted([*one, *two]) == [row[0] for row in database.jobs()]
    assert database.query("SELECT DISTINCT crashes, status FROM queue_jobs") == [(1, "pending")]


# Holders


async def test_a_holder_is_told_as_it_registered_and_how_long_its_lease_is(
    backend: Backend, clock: ManualClock
) -> None:
    worker = await backend.register_worker(
        new_worker(
            host="web-1 “ü”",
            boot_id="b",
            pid_namespace="pid:[4026531836]",
            pid=4711,
            process_started="12345",
            version="1.2.3",
            queues=["notes", "größer, 'kleiner' \"gleich\""],
            job_types=[],
            lease=timedelta(seconds=7, microseconds=123_457),
        )
    )
    await claimed(backend, worker)
    (holder,) = await backend.holders(["notes"])
    assert holder.worker == worker
    assert holder.lease_until == clock.now() + worker.lease
    assert (holder.stopped, holder.let_go) == (False, False)


async def test_a_worker_that_holds_many_jobs_is_one_holder(backend: Backend) -> None:
    one, two = new_worker(), new_worker()
    await enqueue(backend, *(new_job() for _ in range(6)))
    await claim(backend, one, 4)
    await claim(backend, two, 2)
    holders = await backend.holders(["notes", "other"])
    assert sorted(holder.worker.id for holder in holders) == sorted([one.id, two.id])


async def test_who_holds_nothing_of_these_queues_is_no_holder(backend: Backend) -> None:
    idle, elsewhere, done = new_worker(), new_worker(), new_worker()
    await backend.register_worker(idle)
    job = await claimed(backend, done)
    await backend.settle([Succeeded(job.claim)])
    await claimed(backend, elsewhere, queue="other")
    assert list(await backend.holders(["notes"])) == []
    assert [holder.worker.id for holder in await backend.holders(["other"])] == [elsewhere.id]
    assert list(await backend.holders([])) == []


async def test_a_holder_that_stopped_is_told_so(backend: Backend) -> None:
    worker = await backend.register_worker(new_worker())
    await claimed(backend, worker)
    assert not (await holder_of(backend, worker)).stopped
    await backend.forget_worker(worker.id)
    assert (await holder_of(backend, worker)).stopped


async def test_a_holder_whose_lease_ran_out_is_still_told(backend: Backend, clock: ManualClock) -> None:
    worker = new_worker()
    await claimed(backend, worker)
    until = clock.now() + LEASE
    clock.advance(10 * LEASE)
    assert (await holder_of(backend, worker)).lease_until == until


async def test_a_claim_whose_worker_has_no_row_has_no_holder(backend: Backend, database: Database) -> None:
    await claimed(backend)
    database.query("DELETE FROM queue_workers")
    assert list(await backend.holders(["notes"])) == []
