"""The reaper takes back the claims that nobody vouches for: once each, counted, and nobody else's."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import TypeAlias

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from queue_core.backend import Backend
from queue_core.model import (
    ClaimedJob,
    EnqueueStatus,
    JobId,
    JobStatus,
    Parked,
    Released,
    Retried,
    Succeeded,
    Wakeup,
    Worker,
)
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
    failure,
    failures,
    holder_of,
    knowing,
    listening,
    moment,
    new_token,
    new_worker,
    opened_backend,
    stored,
    writes,
)

MOMENT = timedelta(microseconds=1)
HOUR = timedelta(hours=1)


async def reap(backend: Backend, *queues: str, limit: int = 100) -> list[JobId]:
    """Take back what can be taken of these queues, where nothing may be parked."""
    reaped = await backend.reap(queues or ("notes",), limit=limit)
    assert list(reaped.parked) == []
    return list(reaped.requeued)


# What becomes of a job


async def test_a_job_whose_worker_fell_silent_is_pending_again(backend: Backend, clock: ManualClock) -> None:
    job = await claimed(backend, timeout=timedelta(seconds=90))
    clock.advance(LEASE + MOMENT)
    assert await reap(backend) == [job.claim.job_id]
    again = await stored(backend, job.claim.job_id)
    assert (again.status, again.attempt, again.crashes) == (JobStatus.PENDING, 1, 1)
    assert again.available_at == clock.now()
    assert (again.worker_id, again.claimed_at, again.deadline_at) == (None, None, None)


async def test_a_job_whose_worker_fell_silent_is_claimed_by_another(backend: Backend, clock: ManualClock) -> None:
    first = await claimed(backend)
    clock.advance(LEASE + MOMENT)
    await backend.reap(["notes"], limit=10)
    second = await claim_again(backend, first.claim.job_id)
    assert (second.attempt, second.crashes) == (2, 1)
    assert await backend.settle([Succeeded(first.claim)]) == frozenset()
    assert await backend.settle([Succeeded(second.claim)]) == {second.claim.job_id}


async def test_a_lease_that_ran_out_is_recorded_as_the_failure_of_its_attempt(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    job = await claimed(backend)
    await backend.settle([Retried(job.claim, failure("the first"), timedelta(0))])
    await claim_again(backend, job.claim.job_id)
    clock.advance(LEASE + MOMENT)
    await backend.reap(["notes"], limit=10)
    first, second = errors_of(database, job.claim.job_id)
    assert (first.attempt, first.kind, first.message) == (1, "ValueError", "the first")
    assert (second.attempt, second.kind, second.message) == (2, "LeaseExpired", "visibility timeout exceeded")
    assert second.failed_at == clock.now()


async def test_of_many_failures_the_newest_are_kept(backend: Backend, clock: ManualClock, database: Database) -> None:
    (job_id,) = await enqueue(backend, new_job(max_attempts=20))
    for _ in range(12):
        await claim_again(backend, job_id)
        clock.advance(LEASE + MOMENT)
        assert await reap(backend) == [job_id]
    assert [error.attempt for error in errors_of(database, job_id)] == list(range(3, 13))
    assert (await stored(backend, job_id)).crashes == 12


async def test_a_job_without_attempts_left_is_parked(backend: Backend, clock: ManualClock, database: Database) -> None:
    job = await claimed(backend, max_attempts=1, payload='{"text":"kept"}', tenant="acme", priority=3)
    while_claimed = await stored(backend, job.claim.job_id)
    clock.advance(LEASE + MOMENT)
    reaped = await backend.reap(["notes"], limit=10)
    assert (list(reaped.requeued), list(reaped.parked)) == ([], [while_claimed])
    assert await backend.get(job.claim.job_id) is None
    (letter,) = database.query(
        "SELECT job_id, queue, job_type, payload, tenant, priority, reason, parked_by, failure_count, error_kind"
        " FROM queue_dead_jobs"
    )
    assert letter == (
        *(job.claim.job_id, "notes", "Note", '{"text":"kept"}', "acme", 3),
        *("visibility timeout exceeded", "reaper", 1, "LeaseExpired"),
    )


async def test_a_parked_job_says_when_and_why_its_last_attempt_ended(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    job = await claimed(backend, max_attempts=2)
    await backend.settle([Retried(job.claim, failure("the first"), timedelta(0))])
    await claim_again(backend, job.claim.job_id)
    clock.advance(LEASE + MOMENT)
    await backend.reap(["notes"], limit=10)
    ((failed_at, count, error, errors),) = database.query(
        "SELECT failed_at, failure_count, error, errors FROM queue_dead_jobs"
    )
    assert (moment(failed_at), count) == (clock.now(), 2)
    (last,) = failures(error)
    assert (last.kind, last.message, last.failed_at) == ("LeaseExpired", "visibility timeout exceeded", clock.now())
    assert failures(errors)[0].message == "the first"


async def test_a_parked_job_gives_its_key_free_and_parks_into_one_entry(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    for payload in ("1", "2"):
        await claimed(backend, max_attempts=1, payload=payload, key="k", unique_key='["type","Note","k"]')
        clock.advance(LEASE + MOMENT)
        assert len((await backend.reap(["notes"], limit=10)).parked) == 1
    ((payload, failed_at, count),) = database.query("SELECT payload, failed_at, failure_count FROM queue_dead_jobs")
    assert (payload, moment(failed_at), count) == ("2", clock.now(), 2)


async def test_a_reaped_job_keeps_its_key(backend: Backend, clock: ManualClock) -> None:
    job = await claimed(backend, key="k", unique_key="k")
    clock.advance(LEASE + MOMENT)
    await reap(backend)
    (answer,) = await backend.enqueue_many([new_job(key="k", unique_key="k")])
    assert (answer.job_id, answer.status) == (job.claim.job_id, EnqueueStatus.DUPLICATE)


async def test_a_reaped_job_that_was_called_off_is_ended_by_the_next_claim(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    job = await claimed(backend)
    await backend.cancel(job.claim.job_id)
    clock.advance(LEASE + MOMENT)
    assert await reap(backend) == [job.claim.job_id]
    assert (await stored(backend, job.claim.job_id)).status is JobStatus.PENDING
    answer = await backend.claim(new_worker(), new_token(), {"notes": 1}, ["Note"])
    assert (list(answer.jobs), answer.ended) == ([], 1)
    assert (database.count(), database.count("queue_dead_jobs")) == (0, 0)


async def test_a_reaped_job_wakes_whoever_waits_for_its_queue(engine: AsyncEngine, clock: ManualClock) -> None:
    async with opened_backend(engine, clock, notify=False) as backend:
        await claimed(backend)
        clock.advance(LEASE + MOMENT)
        async with listening(backend) as woken:
            assert len(await reap(backend)) == 1
            assert await asyncio.wait_for(woken, 10) == Wakeup("notes")


# How many runs a job has, and which of them it has alone

End: TypeAlias = Callable[[Backend, ManualClock, Worker, ClaimedJob], Awaitable[object]]


async def by_error(backend: Backend, _clock: ManualClock, _worker: Worker, job: ClaimedJob) -> None:
    error = failure(attempt=job.attempt)
    last = job.attempt >= job.max_attempts
    await backend.settle([Parked(job.claim, error, "it broke") if last else Retried(job.claim, error, timedelta(0))])


async def by_silence(backend: Backend, clock: ManualClock, _worker: Worker, _job: ClaimedJob) -> None:
    clock.advance(LEASE + MOMENT)
    assert len(await backend.reap(["notes"], limit=10)) == 1


async def by_stopping(backend: Backend, _clock: ManualClock, worker: Worker, _job: ClaimedJob) -> None:
    await backend.forget_worker(worker.id)
    assert len(await backend.reap(["notes"], limit=10)) == 1


async def by_death(backend: Backend, _clock: ManualClock, worker: Worker, _job: ClaimedJob) -> None:
    assert len(await backend.sweep_orphans(["notes"], [worker.id], park=False, limit=10)) == 1


async def by_time_limit(backend: Backend, clock: ManualClock, worker: Worker, job: ClaimedJob) -> None:
    clock.advance(timedelta(seconds=10 + 30) + MOMENT)
    await backend.beat(worker, knowing([job.claim], []))
    assert len(await backend.reap(["notes"], limit=10)) == 1


ENDS: dict[str, list[End]] = {
    "error": [by_error],
    "silence": [by_silence],
    "stopping": [by_stopping],
    "death": [by_death],
    "time limit": [by_time_limit],
    "each in turn": [by_error, by_silence, by_stopping, by_death, by_time_limit],
}


@pytest.mark.parametrize("max_attempts", [1, 2, 7])
@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
async def test_a_job_has_as_many_runs_whatever_ends_them(
    backend: Backend, clock: ManualClock, database: Database, ends: list[End], max_attempts: int
) -> None:
    await enqueue(backend, new_job(max_attempts=max_attempts, timeout=timedelta(seconds=10)))
    runs = 0
    while jobs := await claim(backend, worker := new_worker()):
        runs += 1
        assert (jobs[0].attempt, len(jobs)) == (runs, 1)
        await ends[runs % len(ends)](backend, clock, worker, jobs[0])
    assert runs == max_attempts
    assert database.query("SELECT failure_count FROM queue_dead_jobs") == [(max_attempts,)]
    assert database.count() == 0


async def test_a_run_that_was_given_back_does_not_count_among_those_that_crashed(
    backend: Backend, clock: ManualClock
) -> None:
    (job_id,) = await enqueue(backend, new_job(max_attempts=2))
    for attempt in (1, 2):
        job = await claim_again(backend, job_id)
        await backend.settle([Released(job.claim)])
        assert (await claim_again(backend, job_id)).attempt == attempt
        clock.advance(LEASE + MOMENT)
        await backend.reap(["notes"], limit=10)
    assert await backend.get(job_id) is None


async def test_a_job_that_crashed_twice_runs_alone(backend: Backend, clock: ManualClock) -> None:
    (job_id,) = await enqueue(backend, new_job(max_attempts=5))
    alone: list[bool] = []
    for _ in range(4):
        alone.append((await claim_again(backend, job_id)).runs_alone)
        clock.advance(LEASE + MOMENT)
        await reap(backend)
    assert alone == [False, False, True, True]


async def test_a_job_that_crashed_once_has_its_last_run_alone(backend: Backend, clock: ManualClock) -> None:
    job = await claimed(backend, max_attempts=3)
    clock.advance(LEASE + MOMENT)
    await reap(backend)
    second = await claim_again(backend, job.claim.job_id)
    assert not second.runs_alone
    await backend.settle([Retried(second.claim, failure(), timedelta(0))])
    assert (await claim_again(backend, job.claim.job_id)).runs_alone


async def test_a_job_that_fails_without_a_crash_never_runs_alone(backend: Backend) -> None:
    (job_id,) = await enqueue(backend, new_job(max_attempts=4))
    for _ in range(4):
        job = await claim_again(backend, job_id)
        assert (job.runs_alone, job.crashes) == (False, 0)
        await backend.settle([Retried(job.claim, failure(), timedelta(0))])


# Whose claims are taken, and when


async def test_a_lease_is_over_only_after_its_last_moment(backend: Backend, clock: ManualClock) -> None:
    job = await claimed(backend)
    clock.advance(LEASE)
    assert await reap(backend) == []
    clock.advance(MOMENT)
    assert await reap(backend) == [job.claim.job_id]


async def test_a_reap_takes_nothing_twice(backend: Backend, clock: ManualClock) -> None:
    job = await claimed(backend)
    clock.advance(LEASE + MOMENT)
    assert await reap(backend) == [job.claim.job_id]
    assert await reap(backend) == []
    assert (await stored(backend, job.claim.job_id)).crashes == 1


async def test_a_live_worker_keeps_its_jobs_beside_a_silent_one(backend: Backend, clock: ManualClock) -> None:
    silent, live = new_worker(), new_worker()
    lost = await claimed(backend, silent)
    kept = await claimed(backend, live)
    clock.advance(LEASE / 2)
    await backend.beat(live, knowing([kept.claim], []))
    clock.advance(LEASE / 2 + MOMENT)
    assert await reap(backend) == [lost.claim.job_id]
    assert (await stored(backend, kept.claim.job_id)).worker_id == live.id


async def test_each_worker_has_a_lease_of_its_own_length(backend: Backend, clock: ManualClock) -> None:
    short = await claimed(backend, new_worker(lease=timedelta(seconds=5)))
    long = await claimed(backend, new_worker(lease=HOUR))
    clock.advance(timedelta(minutes=10))
    assert await reap(backend) == [short.claim.job_id]
    clock.advance(HOUR)
    # The short one is pending again, and nobody has claimed it.
    assert await reap(backend) == [long.claim.job_id]


async def test_a_first_claim_after_an_hour_of_idling_can_not_be_reaped(backend: Backend, clock: ManualClock) -> None:
    worker = await backend.register_worker(new_worker())
    clock.advance(HOUR)
    job = await claimed(backend, worker)
    assert await reap(backend) == []
    assert (await holder_of(backend, worker)).lease_until == clock.now() + LEASE
    clock.advance(LEASE)
    assert await reap(backend) == []
    assert (await stored(backend, job.claim.job_id)).status is JobStatus.CLAIMED


async def test_after_a_claim_a_worker_has_at_least_half_of_its_lease(backend: Backend, clock: ManualClock) -> None:
    worker = new_worker()
    for _ in range(24):
        await claimed(backend, worker)
        assert (await holder_of(backend, worker)).lease_until >= clock.now() + LEASE / 2
        clock.advance(LEASE / 7)
    assert await reap(backend) == []


async def test_what_was_settled_is_not_taken_back(backend: Backend, clock: ManualClock, database: Database) -> None:
    worker = new_worker()
    done, failed, held = [await claimed(backend, worker, queue=queue) for queue in ("a", "b", "c")]
    await backend.settle([Succeeded(done.claim), Retried(failed.claim, failure(), timedelta(0))])
    clock.advance(LEASE + MOMENT)
    assert await reap(backend, "a", "b", "c") == [held.claim.job_id]
    assert (await stored(backend, failed.claim.job_id)).crashes == 0
    assert database.count() == 2


async def test_the_claims_of_a_worker_that_stopped_are_taken_at_once(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    stopped, live = new_worker(), new_worker()
    left = await claimed(backend, stopped)
    await claimed(backend, live)
    assert await reap(backend) == []
    await backend.forget_worker(stopped.id)
    assert await reap(backend) == [left.claim.job_id]
    (error,) = errors_of(database, left.claim.job_id)
    assert (error.kind, error.message, error.failed_at) == ("WorkerStopped", "its worker stopped", clock.now())
    assert (await stored(backend, left.claim.job_id)).crashes == 1


async def test_a_job_well_past_its_time_limit_is_taken_from_a_worker_that_lives(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    worker = new_worker(lease=HOUR)
    unlimited = await claimed(backend, worker)
    late = await claimed(backend, worker, timeout=timedelta(seconds=10))
    clock.advance(timedelta(seconds=10 + 30))
    assert await reap(backend) == []
    clock.advance(MOMENT)
    assert await reap(backend) == [late.claim.job_id]
    (error,) = errors_of(database, late.claim.job_id)
    assert (error.kind, error.message) == ("DeadlineExceeded", "time limit exceeded")
    assert (await stored(backend, unlimited.claim.job_id)).status is JobStatus.CLAIMED
    assert list((await backend.beat(worker, knowing([unlimited.claim, late.claim], []))).lost) == [late.claim]


async def test_a_last_attempt_well_past_its_time_limit_is_parked(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    await claimed(backend, new_worker(lease=HOUR), max_attempts=1, timeout=timedelta(seconds=10))
    clock.advance(timedelta(minutes=1))
    assert len((await backend.reap(["notes"], limit=10)).parked) == 1
    assert database.query("SELECT reason, parked_by, error_kind FROM queue_dead_jobs") == [
        ("time limit exceeded", "reaper", "DeadlineExceeded")
    ]


async def test_a_job_that_got_more_time_is_not_past_its_limit(backend: Backend, clock: ManualClock) -> None:
    worker = new_worker(lease=HOUR)
    job = await claimed(backend, worker, timeout=timedelta(seconds=10))
    clock.advance(timedelta(seconds=9))
    assert await backend.extend([job.claim], timedelta(minutes=5)) == {job.claim.job_id}
    clock.advance(timedelta(minutes=5))
    assert await reap(backend) == []
    clock.advance(timedelta(seconds=30) + MOMENT)
    assert await reap(backend) == [job.claim.job_id]


async def test_a_claim_whose_worker_has_no_row_is_taken_after_five_minutes(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    job = await claimed(backend)
    database.query("DELETE FROM queue_workers")
    clock.advance(timedelta(minutes=5))
    assert await reap(backend) == []
    clock.advance(MOMENT)
    assert await reap(backend) == [job.claim.job_id]
    assert [error.kind for error in errors_of(database, job.claim.job_id)] == ["WorkerMissing"]


# Only these queues, and only so many


async def test_only_the_named_queues_are_reaped(backend: Backend, clock: ManualClock) -> None:
    worker = new_worker()
    here = await claimed(backend, worker)
    there = await claimed(backend, worker, queue="other")
    clock.advance(LEASE + MOMENT)
    assert await reap(backend, "notes", "unheard of") == [here.claim.job_id]
    assert (await stored(backend, there.claim.job_id)).worker_id == worker.id
    assert await reap(backend, "other") == [there.claim.job_id]


async def test_all_causes_are_only_for_the_named_queues(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    stopped, live, missing = new_worker(), new_worker(lease=HOUR), new_worker()
    await claimed(backend, stopped, queue="other")
    await claimed(backend, live, queue="other", timeout=timedelta(seconds=1))
    await claimed(backend, missing, queue="other")
    await backend.forget_worker(stopped.id)
    database.query("DELETE FROM queue_workers WHERE id = ?", missing.id)
    clock.advance(timedelta(minutes=10))
    assert await reap(backend, "notes") == []
    assert len(await reap(backend, "other")) == 3


async def test_without_queues_nothing_is_reaped(engine: AsyncEngine, clock: ManualClock) -> None:
    spy = Spy(engine)
    async with opened_backend(engine, clock, notify=False) as backend:
        await claimed(backend)
        clock.advance(LEASE + MOMENT)
        spy.reset()
        assert len(await backend.reap([], limit=10)) == 0
        assert spy.statements == []


async def test_a_reap_takes_no_more_than_its_limit_and_the_next_one_the_rest(
    backend: Backend, clock: ManualClock
) -> None:
    jobs = [new_job(max_attempts=1 if number % 3 == 0 else 5) for number in range(12)]
    await enqueue(backend, *jobs)
    for _ in range(3):
        assert len(await claim(backend, new_worker(), 4)) == 4
    clock.advance(LEASE + MOMENT)
    reaped = [await backend.reap(["notes"], limit=5) for _ in range(4)]
    assert [len(each) for each in reaped] == [5, 5, 2, 0]
    assert sum(len(each.parked) for each in reaped) == 4


async def test_the_limit_holds_for_all_causes_together(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    silent, stopped, live, missing = new_worker(), new_worker(), new_worker(lease=HOUR), new_worker()
    for worker in (silent, stopped, live, missing):
        await enqueue(backend, *(new_job(timeout=timedelta(seconds=1)) for _ in range(2)))
        assert len(await claim(backend, worker, 2)) == 2
    await backend.forget_worker(stopped.id)
    database.query("DELETE FROM queue_workers WHERE id = ?", missing.id)
    clock.advance(timedelta(minutes=10))
    assert [len(await reap(backend, limit=3)) for _ in range(4)] == [3, 3, 2, 0]
    assert database.query("SELECT DISTINCT crashes FROM queue_jobs") == [(1,)]


async def test_two_reapers_at_once_take_each_job_once(
    backend: Backend, engine: AsyncEngine, clock: ManualClock, database: Database
) -> None:
    for _ in range(10):
        await enqueue(backend, *(new_job(max_attempts=100) for _ in range(6)))
        assert len(await claim(backend, new_worker(), 6)) == 6
    clock.advance(LEASE + MOMENT)
    taken: list[JobId] = []
    async with opened_backend(engine, clock) as other:
        while together := await asyncio.gather(reap(backend, limit=7), reap(other, limit=7)):
            taken += [job_id for each in together for job_id in each]
            if not any(together):
                break
    assert sorted(taken) == [row[0] for row in database.jobs()]
    assert database.query("SELECT DISTINCT crashes, status FROM queue_jobs") == [(1, "pending")]


# What a reap with nothing to take costs


async def test_a_reap_with_nothing_to_take_writes_nothing(engine: AsyncEngine, clock: ManualClock) -> None:
    spy = Spy(engine)
    async with opened_backend(engine, clock, notify=False) as backend:
        await claimed(backend, timeout=timedelta(seconds=90))
        await claimed(backend, queue="other", max_attempts=1)
        await enqueue(backend, new_job(), new_job(delay=HOUR))
        clock.advance(LEASE)
        spy.reset()
        assert len(await backend.reap(["notes", "other"], limit=10)) == 0
        assert spy.statements
        assert writes(spy) == []
        assert not any(statement.upper().startswith("COMMIT") for statement in spy.statements)
        # And what is due is one transaction.
        clock.advance(MOMENT)
        spy.reset()
        assert len(await backend.reap(["notes", "other"], limit=10)) == 2
        assert len([statement for statement in spy.statements if statement.upper().startswith("COMMIT")]) == 1


async def test_a_reap_with_nothing_to_take_waits_for_no_writer(backend: Backend, database: Database) -> None:
    await claimed(backend)
    writer = database.connect()
    writer.execute("UPDATE queue_jobs SET priority = 1")
    assert await asyncio.wait_for(reap(backend), 4) == []
    writer.rollback()
    writer.close()


# Clocks that jump


async def test_a_clock_that_jumps_forward_past_the_lease_lets_a_reap_take_the_job(
    backend: Backend, clock: ManualClock
) -> None:
    """The database can't tell a jump from silence. A worker waits after one before it reaps."""
    worker = new_worker()
    job = await claimed(backend, worker)
    await backend.beat(worker, knowing([job.claim], []))
    clock.advance(HOUR)
    assert await reap(backend) == [job.claim.job_id]
    assert list((await backend.beat(worker, knowing([job.claim], []))).lost) == [job.claim]


async def test_a_clock_that_jumps_back_takes_nothing_from_anybody(backend: Backend, clock: ManualClock) -> None:
    worker = new_worker()
    job = await claimed(backend, worker, timeout=timedelta(seconds=10))
    clock.advance(-HOUR)
    assert await reap(backend) == []
    beat = await backend.beat(worker, knowing([job.claim], []))
    assert (list(beat.lost), list(beat.unknown)) == ([], [])
    clock.advance(LEASE / 4)
    assert await reap(backend) == []
    assert await backend.settle([Succeeded(job.claim)]) == {job.claim.job_id}


@pytest.mark.parametrize("way", ["reap", "sweep"])
async def test_a_job_called_off_in_its_last_attempt_is_no_dead_letter(
    backend: Backend, clock: ManualClock, database: Database, way: str
) -> None:
    worker = new_worker()
    await backend.enqueue_many([new_job(max_attempts=1)])
    (job,) = await claim(backend, worker)
    await backend.cancel(job.claim.job_id)
    if way == "reap":
        clock.advance(LEASE + timedelta(seconds=1))
        await backend.reap(["notes"], limit=10)
    else:
        await backend.sweep_orphans(["notes"], [worker.id], park=True, limit=10)
    taken = await backend.claim(new_worker(), new_token(), {"notes": 1}, ["Note"])
    assert (taken.jobs, taken.ended) == ([], 1)
    assert (database.count(), database.count("queue_dead_jobs")) == (0, 0)
