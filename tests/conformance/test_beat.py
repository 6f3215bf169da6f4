"""A beat keeps a worker's claims, and brings back what the worker has to stop or did not know of."""

import asyncio
from datetime import timedelta

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from queue_core.backend import Backend
from queue_core.model import Beat, CancelStatus, Claim, JobId, JobStatus, Known, Reaped, Succeeded
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
    new_token,
    new_worker,
    opened_backend,
    stored,
)

MOMENT = timedelta(microseconds=1)


def found(beat: Beat) -> tuple[list[Claim], list[Claim], list[Claim]]:
    """Lost, to cancel, unknown."""
    return list(beat.lost), list(beat.to_cancel), list(beat.unknown)


NOTHING: tuple[list[Claim], list[Claim], list[Claim]] = ([], [], [])


# The lease


async def test_a_beat_renews_the_lease(backend: Backend, clock: ManualClock) -> None:
    worker = new_worker()
    job = await claimed(backend, worker)
    clock.advance(LEASE)
    assert found(await backend.beat(worker, knowing([job.claim], []))) == NOTHING
    assert (await holder_of(backend, worker)).lease_until == clock.now() + LEASE


async def test_a_job_longer_than_the_lease_runs_once_while_its_worker_beats(
    backend: Backend, clock: ManualClock
) -> None:
    worker = new_worker()
    job = await claimed(backend, worker)
    for _ in range(40):
        clock.advance(LEASE / 4)
        assert len(await backend.reap(["notes"], limit=10)) == 0
        assert found(await backend.beat(worker, knowing([job.claim], []))) == NOTHING
    kept = await stored(backend, job.claim.job_id)
    assert (kept.status, kept.attempt, kept.crashes) == (JobStatus.CLAIMED, 1, 0)
    assert await backend.settle([Succeeded(job.claim)]) == {job.claim.job_id}


async def test_the_lease_of_a_worker_is_as_long_as_it_says(backend: Backend, clock: ManualClock) -> None:
    quick, slow = new_worker(lease=timedelta(seconds=4)), new_worker(lease=timedelta(hours=4))
    for worker in (quick, slow):
        job = await claimed(backend, worker)
        await backend.beat(worker, knowing([job.claim], []))
        assert (await holder_of(backend, worker)).lease_until == clock.now() + worker.lease


async def test_a_beat_writes_the_row_of_a_worker_that_has_none(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    worker = new_worker()
    job = await claimed(backend, worker)
    database.query("DELETE FROM queue_workers")
    clock.advance(timedelta(hours=1))
    assert found(await backend.beat(worker, knowing([job.claim], []))) == NOTHING
    holder = await holder_of(backend, worker)
    assert (holder.worker, holder.lease_until) == (worker, clock.now() + LEASE)
    assert len(await backend.reap(["notes"], limit=10)) == 0


async def test_a_beat_that_comes_late_is_in_time_when_nobody_has_reaped(backend: Backend, clock: ManualClock) -> None:
    worker = new_worker()
    job = await claimed(backend, worker)
    clock.advance(10 * LEASE)
    assert found(await backend.beat(worker, knowing([job.claim], []))) == NOTHING
    assert len(await backend.reap(["notes"], limit=10)) == 0


async def test_a_beat_is_one_commit_whatever_it_finds(engine: AsyncEngine, clock: ManualClock) -> None:
    spy = Spy(engine)
    async with opened_backend(engine, clock, notify=False) as backend:
        worker = new_worker()
        await backend.beat(worker, knowing([], []))  # the driver asks for the types of a statement once
        await enqueue(backend, *(new_job() for _ in range(50)))
        known = await claim(backend, worker, 25)
        await claim(backend, worker, 25)
        await backend.cancel(known[0].claim.job_id)
        spy.reset()
        beat = await backend.beat(worker, knowing([job.claim for job in known], []))
        assert (len(beat.to_cancel), len(beat.unknown), spy.commits) == (1, 25, 1)
        spy.reset()
        await backend.beat(worker, knowing([], []))
        assert spy.commits == 1


async def test_a_worker_may_hold_thousands_of_claims(backend: Backend) -> None:
    worker = new_worker()
    await enqueue(backend, *(new_job() for _ in range(3_000)))
    held = [job.claim for job in await claim(backend, worker, 3_000)]
    gone = Claim(JobId(4711_000), new_token())
    assert found(await backend.beat(worker, knowing([*held, gone], []))) == ([gone], [], [])


# Lost claims


async def test_a_beat_after_a_reap_reports_the_claim_as_lost(backend: Backend, clock: ManualClock) -> None:
    worker = new_worker()
    job = await claimed(backend, worker)
    clock.advance(LEASE + MOMENT)
    assert list((await backend.reap(["notes"], limit=10)).requeued) == [job.claim.job_id]
    assert found(await backend.beat(worker, knowing([job.claim], []))) == ([job.claim], [], [])
    assert (await stored(backend, job.claim.job_id)).status is JobStatus.PENDING


async def test_a_claim_that_another_worker_has_now_is_lost(backend: Backend, clock: ManualClock) -> None:
    worker, other = new_worker(), new_worker()
    job = await claimed(backend, worker)
    clock.advance(LEASE + MOMENT)
    await backend.reap(["notes"], limit=10)
    (again,) = await claim(backend, other)
    assert found(await backend.beat(worker, knowing([job.claim], []))) == ([job.claim], [], [])
    assert found(await backend.beat(other, knowing([again.claim], []))) == NOTHING


async def test_a_claim_that_the_same_worker_has_anew_is_lost_under_its_old_token(
    backend: Backend, clock: ManualClock
) -> None:
    worker = new_worker()
    old = await claimed(backend, worker)
    clock.advance(LEASE + MOMENT)
    await backend.reap(["notes"], limit=10)
    (new,) = await claim(backend, worker)
    assert new.claim.job_id == old.claim.job_id
    assert found(await backend.beat(worker, knowing([old.claim, new.claim], []))) == ([old.claim], [], [])


async def test_a_claim_whose_job_is_gone_is_lost(backend: Backend, clock: ManualClock) -> None:
    worker = new_worker()
    finished = await claimed(backend, worker)
    await backend.settle([Succeeded(finished.claim)])
    parked = await claimed(backend, worker, max_attempts=1)
    clock.advance(LEASE + MOMENT)
    await backend.reap(["notes"], limit=10)
    held = [finished.claim, parked.claim]
    assert found(await backend.beat(worker, knowing(held, []))) == (held, [], [])


async def test_one_lost_claim_takes_no_other_with_it(backend: Backend, clock: ManualClock) -> None:
    worker = new_worker()
    kept = await claimed(backend, worker)
    lost = await claimed(backend, worker, timeout=timedelta(seconds=1))
    for _ in range(4):
        clock.advance(LEASE / 4)
        await backend.beat(worker, knowing([kept.claim, lost.claim], []))
    assert list((await backend.reap(["notes"], limit=10)).requeued) == [lost.claim.job_id]
    assert found(await backend.beat(worker, knowing([kept.claim, lost.claim], []))) == ([lost.claim], [], [])
    assert await backend.settle([Succeeded(kept.claim)]) == {kept.claim.job_id}


async def test_a_beat_and_a_reap_at_once_agree_on_who_has_the_job(
    backend: Backend, engine: AsyncEngine, clock: ManualClock
) -> None:
    async with opened_backend(engine, clock) as reaper:
        for _ in range(20):
            worker = new_worker()
            job = await claimed(backend, worker)
            clock.advance(LEASE + MOMENT)
            reaping: asyncio.Task[Reaped] = asyncio.create_task(reaper.reap(["notes"], limit=10))
            first = await backend.beat(worker, knowing([job.claim], []))
            taken = list((await reaping).requeued) == [job.claim.job_id]
            second = await backend.beat(worker, knowing([job.claim], []))
            # The first may have looked before the reap; it must not say lost of what nobody took.
            assert taken or not first.lost
            assert list(second.lost) == ([job.claim] if taken else [])
            assert await backend.settle([Succeeded(job.claim)]) == (set() if taken else {job.claim.job_id})
            if taken:
                again = await claim_again(backend, job.claim.job_id)
                await backend.settle([Succeeded(again.claim)])


# What an operator called off


async def test_a_beat_brings_back_what_an_operator_called_off(backend: Backend) -> None:
    worker = new_worker()
    await enqueue(backend, new_job(), new_job())
    stopped, kept = await claim(backend, worker, 2)
    assert await backend.cancel(stopped.claim.job_id) is CancelStatus.REQUESTED
    held = [stopped.claim, kept.claim]
    assert found(await backend.beat(worker, knowing(held, []))) == ([], [stopped.claim], [])


async def test_a_job_that_was_called_off_is_named_at_every_beat_until_it_ends(backend: Backend) -> None:
    worker = new_worker()
    job = await claimed(backend, worker)
    await backend.cancel(job.claim.job_id)
    for _ in range(3):
        assert found(await backend.beat(worker, knowing([job.claim], []))) == ([], [job.claim], [])
    await backend.settle([Succeeded(job.claim)])
    assert found(await backend.beat(worker, knowing([], []))) == NOTHING


async def test_a_worker_is_not_told_to_stop_what_another_runs(backend: Backend) -> None:
    worker, other = new_worker(), new_worker()
    mine = await claimed(backend, worker)
    theirs = await claimed(backend, other)
    await backend.cancel(theirs.claim.job_id)
    assert found(await backend.beat(worker, knowing([mine.claim], []))) == NOTHING


# Rows that the worker does not know of


async def test_a_claimed_job_that_its_worker_does_not_know_of_is_released(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    worker = new_worker()
    (job_id,) = await enqueue(backend, new_job(timeout=timedelta(seconds=5)))
    waits_since = clock.now()
    clock.advance(timedelta(seconds=3))
    (job,) = await claim(backend, worker)
    clock.advance(timedelta(seconds=3))
    assert found(await backend.beat(worker, knowing([], []))) == ([], [], [job.claim])
    released = await stored(backend, job_id)
    assert (released.status, released.attempt, released.crashes) == (JobStatus.PENDING, 0, 0)
    assert released.available_at == waits_since
    assert (released.worker_id, released.claimed_at, released.deadline_at) == (None, None, None)
    assert errors_of(database, job_id) == []
    assert found(await backend.beat(worker, knowing([], []))) == NOTHING


async def test_a_released_job_starts_where_it_was(backend: Backend, clock: ManualClock) -> None:
    worker = new_worker()
    crashed = await claimed(backend, worker)
    clock.advance(LEASE + MOMENT)
    await backend.reap(["notes"], limit=10)
    (second,) = await claim(backend, worker)
    assert (second.attempt, second.crashes) == (2, 1)
    await backend.beat(worker, knowing([], []))
    again = await claim_again(backend, crashed.claim.job_id)
    assert (again.attempt, again.crashes) == (2, 1)


async def test_a_released_job_keeps_its_place_in_the_line(backend: Backend, clock: ManualClock) -> None:
    worker = new_worker()
    unknown = await claimed(backend, worker)
    clock.advance(timedelta(seconds=1))
    (younger,) = await enqueue(backend, new_job())
    await backend.beat(worker, knowing([], []))
    assert [job.claim.job_id for job in await claim(backend, worker, 2)] == [unknown.claim.job_id, younger]


async def test_a_late_write_about_a_released_job_changes_nothing(backend: Backend) -> None:
    worker = new_worker()
    job = await claimed(backend, worker)
    await backend.beat(worker, knowing([], []))
    assert await backend.settle([Succeeded(job.claim)]) == frozenset()
    assert (await stored(backend, job.claim.job_id)).status is JobStatus.PENDING


async def test_a_released_job_that_was_called_off_is_ended_by_the_next_claim(
    backend: Backend, database: Database
) -> None:
    worker = new_worker()
    job = await claimed(backend, worker)
    await backend.cancel(job.claim.job_id)
    assert found(await backend.beat(worker, knowing([], []))) == ([], [], [job.claim])
    answer = await backend.claim(worker, new_token(), {"notes": 1}, ["Note"])
    assert (list(answer.jobs), answer.ended) == ([], 1)
    assert (database.count(), database.count("queue_dead_jobs")) == (0, 0)


async def test_the_rows_of_another_worker_are_never_released(backend: Backend, clock: ManualClock) -> None:
    worker, other = new_worker(), new_worker()
    theirs = await claimed(backend, other)
    clock.advance(10 * LEASE)
    assert found(await backend.beat(worker, knowing([], []))) == NOTHING
    assert (await stored(backend, theirs.claim.job_id)).worker_id == other.id


async def test_unknown_rows_are_released_from_every_queue(backend: Backend) -> None:
    worker = new_worker(queues=["notes", "other"])
    one = await claimed(backend, worker)
    two = await claimed(backend, worker, queue="other")
    beat = await backend.beat(worker, knowing([], []))
    assert set(beat.unknown) == {one.claim, two.claim}


async def test_a_claim_whose_answer_is_still_in_flight_is_left_alone(backend: Backend) -> None:
    """The token is registered before the claim is sent; when the beat looks, only the database knows the rows."""
    worker, token = new_worker(), new_token()
    await enqueue(backend, new_job(), new_job())
    answer = await backend.claim(worker, token, {"notes": 2}, ["Note"])
    assert found(await backend.beat(worker, knowing([], [token]))) == NOTHING
    held = [job.claim for job in answer.jobs]
    assert found(await backend.beat(worker, knowing(held, []))) == NOTHING
    assert await backend.settle([Succeeded(claim) for claim in held]) == {claim.job_id for claim in held}


async def test_a_claim_whose_answer_never_came_is_released_when_its_token_is_given_up(backend: Backend) -> None:
    worker, token = new_worker(), new_token()
    (job_id,) = await enqueue(backend, new_job())
    await backend.claim(worker, token, {"notes": 1}, ["Note"])
    assert found(await backend.beat(worker, knowing([], [token]))) == NOTHING
    assert found(await backend.beat(worker, knowing([], []))) == ([], [], [Claim(job_id, token)])
    assert (await stored(backend, job_id)).status is JobStatus.PENDING


async def test_a_token_in_flight_protects_its_own_rows_only(backend: Backend) -> None:
    worker, token = new_worker(), new_token()
    held, forgotten = await claimed(backend, worker), await claimed(backend, worker)
    (job_id,) = await enqueue(backend, new_job())
    await backend.claim(worker, token, {"notes": 1}, ["Note"])
    assert found(await backend.beat(worker, knowing([held.claim], [token, new_token()]))) == ([], [], [forgotten.claim])
    assert (await stored(backend, job_id)).status is JobStatus.CLAIMED


async def test_a_token_in_flight_that_took_nothing_is_nothing_to_a_beat(backend: Backend) -> None:
    assert found(await backend.beat(new_worker(), knowing([], [new_token()]))) == NOTHING


@pytest.mark.parametrize("jobs", [1, 7])
async def test_a_claim_and_a_beat_at_once_leave_every_job_with_its_worker(backend: Backend, jobs: int) -> None:
    """Whichever comes first in the database: the token is out, so nothing is released."""
    worker = new_worker()
    for _ in range(20):
        await enqueue(backend, *(new_job() for _ in range(jobs)))
        token = new_token()
        answer, beat = await asyncio.gather(
            backend.claim(worker, token, {"notes": jobs}, ["Note"]), backend.beat(worker, knowing([], [token]))
        )
        assert found(beat) == NOTHING
        held = [job.claim for job in answer.jobs]
        assert len(held) == jobs
        assert await backend.settle([Succeeded(claim) for claim in held]) == {claim.job_id for claim in held}


async def test_a_claim_that_is_made_while_the_beat_looks_is_neither_released_nor_lost(
    backend: Backend, database: Database
) -> None:
    """The worker goes on claiming and settling on its own thread: what it knows changes in the middle of a beat."""
    worker = new_worker()
    await backend.enqueue_many([new_job(), new_job()])
    settled, new = await claim(backend, worker, 2)
    await backend.settle([Succeeded(settled.claim)])
    answers = iter([Known([settled.claim]), Known([new.claim])])
    beat = await backend.beat(worker, lambda: next(answers))
    assert (list(beat.lost), list(beat.unknown)) == ([], [])
    assert database.jobs("status") == [("claimed",)]


async def test_a_claim_that_is_known_only_after_the_look_is_not_lost(backend: Backend) -> None:
    worker = new_worker()
    later = Claim(JobId(77), new_token())
    answers = iter([Known(), Known([later])])
    assert list((await backend.beat(worker, lambda: next(answers))).lost) == []
