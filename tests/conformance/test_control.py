"""What an operator may do: pause a queue and resume it, call a job off."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from queue_core.backend import Backend
from queue_core.model import (
    Cancelled,
    CancelStatus,
    EnqueueStatus,
    JobId,
    JobStatus,
    Released,
    Retried,
    Succeeded,
    Wakeup,
)
from tests.support.clock import ManualClock
from tests.support.databases import Database
from tests.support.jobs import new_job
from tests.support.store import (
    claim,
    claimed,
    enqueue,
    failure,
    knowing,
    listening,
    moment,
    new_token,
    new_worker,
    opened_backend,
    stored,
)

HOUR = timedelta(hours=1)


# Pausing


async def test_nobody_claims_from_a_paused_queue(backend: Backend, engine: AsyncEngine, clock: ManualClock) -> None:
    (job_id,) = await enqueue(backend, new_job())
    assert await backend.pause("notes")
    async with opened_backend(engine, clock) as another_process:
        for each in (backend, another_process):
            assert await claim(each, new_worker()) == []
    job = await stored(backend, job_id)
    assert (job.status, job.attempt) == (JobStatus.PENDING, 0)


async def test_a_pause_holds_for_its_own_queue_alone(backend: Backend) -> None:
    await enqueue(backend, new_job(), new_job(queue="other"))
    await backend.pause("notes")
    answer = await backend.claim(new_worker(), new_token(), {"notes": 5, "other": 5}, ["Note"])
    assert [job.queue for job in answer.jobs] == ["other"]


async def test_a_resumed_queue_is_claimed_from_again(backend: Backend) -> None:
    (job_id,) = await enqueue(backend, new_job())
    await backend.pause("notes")
    assert await claim(backend, new_worker()) == []
    assert await backend.resume("notes")
    assert [job.claim.job_id for job in await claim(backend, new_worker())] == [job_id]


async def test_a_paused_queue_takes_new_jobs_and_lets_running_ones_end(backend: Backend, database: Database) -> None:
    running = await claimed(backend)
    await backend.pause("notes")
    (answer,) = await backend.enqueue_many([new_job()])
    assert answer.status is EnqueueStatus.INSERTED
    assert await backend.settle([Succeeded(running.claim)]) == {running.claim.job_id}
    assert database.jobs() == [(answer.job_id,)]


async def test_a_second_pause_says_so_and_its_reason_is_the_new_one(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    paused_at = clock.now()
    assert await backend.pause("notes", reason="the mail server is down")
    clock.advance(HOUR)
    assert not await backend.pause("notes", reason="and the printer too")
    ((queue, reason, at),) = database.query("SELECT queue, reason, paused_at FROM queue_pauses")
    assert (queue, reason, moment(at)) == ("notes", "and the printer too", paused_at)
    assert not await backend.pause("notes")
    assert database.query("SELECT reason FROM queue_pauses") == [(None,)]


async def test_a_queue_that_was_not_paused_is_not_resumed(backend: Backend) -> None:
    assert not await backend.resume("notes")
    await backend.pause("notes")
    assert await backend.resume("notes")
    assert not await backend.resume("notes")


async def test_of_two_that_pause_or_resume_at_once_one_did_it(
    backend: Backend, engine: AsyncEngine, clock: ManualClock
) -> None:
    async with opened_backend(engine, clock) as other:
        for _ in range(10):
            assert sorted(await asyncio.gather(*(each.pause("notes") for each in (backend, other)))) == [False, True]
            assert sorted(await asyncio.gather(*(each.resume("notes") for each in (backend, other)))) == [False, True]


async def test_a_resume_wakes_whoever_waits_for_the_queue(engine: AsyncEngine, clock: ManualClock) -> None:
    async with opened_backend(engine, clock, notify=False) as backend:
        await enqueue(backend, new_job())
        await backend.pause("notes")
        async with listening(backend) as woken:
            await backend.resume("notes")
            assert await asyncio.wait_for(woken, 10) == Wakeup("notes")


# Calling off what waits


@pytest.mark.parametrize("delay", [timedelta(0), HOUR], ids=["pending", "scheduled"])
async def test_a_job_that_waits_is_gone_when_it_is_called_off(
    backend: Backend, database: Database, delay: timedelta
) -> None:
    job_id, kept = await enqueue(backend, new_job(delay=delay), new_job(delay=delay))
    assert await backend.cancel(job_id) is CancelStatus.CANCELLED
    assert database.jobs() == [(kept,)]
    assert (database.count("queue_dead_jobs"), database.count("queue_history")) == (0, 0)
    assert await backend.cancel(job_id) is None


async def test_a_job_that_is_not_there_can_not_be_called_off(backend: Backend) -> None:
    done = await claimed(backend)
    await backend.settle([Succeeded(done.claim)])
    for job_id in (done.claim.job_id, JobId(4711), JobId(-1), JobId(2**62)):
        assert await backend.cancel(job_id) is None


async def test_a_job_that_was_called_off_is_in_the_history_where_that_is_kept(
    engine: AsyncEngine, clock: ManualClock, database: Database
) -> None:
    async with opened_backend(engine, clock, history=True) as backend:
        (job_id,) = await enqueue(backend, new_job(payload='"kept"', tenant="acme", delay=HOUR))
        clock.advance(timedelta(minutes=1))
        await backend.cancel(job_id)
    ((found, status, payload, tenant, attempt, finished_at),) = database.query(
        "SELECT job_id, status, payload, tenant, attempt, finished_at FROM queue_history"
    )
    assert (found, status, payload, tenant, attempt) == (job_id, "cancelled", '"kept"', "acme", 0)
    assert moment(finished_at) == clock.now()


async def test_only_the_queues_whose_history_is_kept_have_one(
    engine: AsyncEngine, clock: ManualClock, database: Database
) -> None:
    async with opened_backend(engine, clock, history=["notes"]) as backend:
        for job_id in (jobs := await enqueue(backend, new_job(), new_job(queue="other"))):
            await backend.cancel(job_id)
    assert database.query("SELECT job_id FROM queue_history") == [(jobs[0],)]


async def test_a_job_that_was_called_off_gives_its_key_free(backend: Backend) -> None:
    (job_id,) = await enqueue(backend, new_job(key="k", unique_key="k"))
    await backend.cancel(job_id)
    (answer,) = await backend.enqueue_many([new_job(key="k", unique_key="k")])
    assert answer.status is EnqueueStatus.INSERTED


# Calling off what runs


async def test_the_worker_of_a_job_that_runs_is_asked_to_stop_it(backend: Backend, clock: ManualClock) -> None:
    worker = new_worker()
    job = await claimed(backend, worker)
    for _ in range(2):
        assert await backend.cancel(job.claim.job_id) is CancelStatus.REQUESTED
        clock.advance(timedelta(seconds=1))
    assert (await stored(backend, job.claim.job_id)).status is JobStatus.CLAIMED
    assert list((await backend.beat(worker, knowing([job.claim], []))).to_cancel) == [job.claim]


async def test_the_first_request_to_stop_is_the_one_that_is_kept(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    job = await claimed(backend)
    asked_at = clock.now()
    for _ in range(2):
        await backend.cancel(job.claim.job_id)
        clock.advance(timedelta(seconds=1))
    assert [moment(at) for (at,) in database.jobs("cancel_requested_at")] == [asked_at]


async def test_a_job_that_ends_well_before_it_could_be_stopped_has_ended_well(
    engine: AsyncEngine, clock: ManualClock, database: Database
) -> None:
    async with opened_backend(engine, clock, history=True) as backend:
        job = await claimed(backend)
        await backend.cancel(job.claim.job_id)
        assert await backend.settle([Succeeded(job.claim)]) == {job.claim.job_id}
    assert database.query("SELECT status FROM queue_history") == [("succeeded",)]


async def test_a_worker_that_stopped_a_job_says_so_and_it_leaves_no_dead_letter(
    engine: AsyncEngine, clock: ManualClock, database: Database
) -> None:
    async with opened_backend(engine, clock, history=True) as backend:
        job = await claimed(backend)
        await backend.cancel(job.claim.job_id)
        assert await backend.settle([Cancelled(job.claim, "called off")]) == {job.claim.job_id}
    assert database.query("SELECT status, reason FROM queue_history") == [("cancelled", "called off")]
    assert (database.count(), database.count("queue_dead_jobs")) == (0, 0)


async def test_a_job_that_was_called_off_while_it_ran_does_not_run_again(
    engine: AsyncEngine, clock: ManualClock, database: Database
) -> None:
    async with opened_backend(engine, clock, history=True) as backend:
        job = await claimed(backend)
        await backend.cancel(job.claim.job_id)
        await backend.settle([Retried(job.claim, failure(), HOUR)])
        answer = await backend.claim(new_worker(), new_token(), {"notes": 1}, ["Note"])
        assert (list(answer.jobs), answer.ended) == ([], 1)
    assert database.query("SELECT job_id, status FROM queue_history") == [(job.claim.job_id, "cancelled")]


async def test_a_job_that_was_called_off_and_waits_again_is_gone_when_it_is_called_off_again(
    backend: Backend, database: Database
) -> None:
    job = await claimed(backend)
    await backend.cancel(job.claim.job_id)
    await backend.settle([Retried(job.claim, failure(), HOUR)])
    assert await backend.cancel(job.claim.job_id) is CancelStatus.CANCELLED
    assert database.count() == 0


async def test_a_claim_and_a_cancel_at_once_agree(backend: Backend, engine: AsyncEngine, clock: ManualClock) -> None:
    """Either the job is gone and nobody has it, or its worker has it and is told."""
    async with opened_backend(engine, clock) as operator:
        for _ in range(30):
            worker = new_worker()
            (job_id,) = await enqueue(backend, new_job())
            jobs, status = await asyncio.gather(claim(backend, worker), operator.cancel(job_id))
            held = [job.claim for job in jobs]
            assert status is (CancelStatus.REQUESTED if held else CancelStatus.CANCELLED)
            assert list((await backend.beat(worker, knowing(held, []))).to_cancel) == held
            await backend.settle([Cancelled(claim, "called off") for claim in held])
            assert await backend.get(job_id) is None


@pytest.mark.parametrize("mode", ["replace", "preserve_run_at"])
async def test_a_job_that_replaces_one_that_was_called_off_is_run(backend: Backend, mode: Any) -> None:
    await backend.enqueue_many([new_job(key="k", unique_key="k")])
    (job,) = await claim(backend, new_worker())
    await backend.cancel(job.claim.job_id)
    await backend.settle([Released(job.claim)])
    (answer,) = await backend.enqueue_many([new_job(key="k", unique_key="k", key_mode=mode, payload='"new"')])
    assert answer.status is EnqueueStatus.REPLACED
    (again,) = await claim(backend, new_worker())
    assert again.payload == '"new"'


@pytest.mark.parametrize("reason", ["a\x00b", "a\ud800b"])
async def test_whatever_the_reason_says_the_queue_is_paused(backend: Backend, reason: str) -> None:
    assert await backend.pause("notes", reason=reason)
