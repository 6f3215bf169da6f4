"""Stale claims: whoever lost a job changes nothing about it, whatever it says and in whatever company."""

from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from queue_core.backend import Backend
from queue_core.model import Claim, JobId, JobStatus, Parked, Released, Retried, Succeeded
from tests.support.clock import ManualClock
from tests.support.databases import Database
from tests.support.jobs import new_job
from tests.support.store import (
    LEASE,
    claim,
    claim_again,
    claimed,
    enqueue,
    everything,
    failure,
    knowing,
    new_token,
    new_worker,
    one_of_each,
    opened_backend,
    stored,
)

HOUR = timedelta(hours=1)
Write: TypeAlias = Callable[[Backend, Sequence[Claim]], Awaitable[frozenset[JobId]]]


def settling(name: str) -> Write:
    async def write(backend: Backend, claims: Sequence[Claim]) -> frozenset[JobId]:
        return await backend.settle([OUTCOMES[name](claim) for claim in claims])

    return write


async def extending(backend: Backend, claims: Sequence[Claim]) -> frozenset[JobId]:
    return await backend.extend(claims, HOUR)


OUTCOMES = one_of_each(now=False)
WRITES: dict[str, Write] = {**{name: settling(name) for name in OUTCOMES}, "extended": extending}
KEY = '["type","Note","k"]'


async def a_job_with_a_past(backend: Backend) -> Claim:
    """A claim to a job whose key has a dead letter: a stale success must not clear it, nor a stale death add to it."""
    dead = await claimed(backend, key="k", unique_key=KEY)
    await backend.settle([Parked(dead.claim, failure("long ago"), "gave up")])
    return (await claimed(backend, key="k", unique_key=KEY, timeout=HOUR)).claim


async def taken_back(backend: Backend, clock: ManualClock) -> None:
    """Every worker so far falls silent, and its claims are taken back."""
    clock.advance(LEASE + timedelta(seconds=1))
    assert len(await backend.reap(["notes"], limit=100)) > 0


# How a claim becomes stale


async def reaped(backend: Backend, clock: ManualClock) -> Claim:
    stale = await a_job_with_a_past(backend)
    await taken_back(backend, clock)
    assert (await stored(backend, stale.job_id)).status is not JobStatus.CLAIMED
    return stale


async def reaped_and_claimed_by_another(backend: Backend, clock: ManualClock) -> Claim:
    stale = await reaped(backend, clock)
    await claim_again(backend, stale.job_id)
    return stale


async def reaped_and_claimed_by_the_same(backend: Backend, clock: ManualClock) -> Claim:
    worker = new_worker()
    (job_id,) = await enqueue(backend, new_job())
    (first,) = await claim(backend, worker)
    await taken_back(backend, clock)
    (second,) = await claim(backend, worker)
    assert (second.claim.job_id, second.claim.token != first.claim.token) == (job_id, True)
    return first.claim


async def retried(backend: Backend, clock: ManualClock) -> Claim:
    stale = await a_job_with_a_past(backend)
    await backend.settle([Retried(stale, failure(), HOUR)])
    return stale


async def released(backend: Backend, clock: ManualClock) -> Claim:
    stale = await a_job_with_a_past(backend)
    await backend.settle([Released(stale)])
    return stale


async def succeeded(backend: Backend, clock: ManualClock) -> Claim:
    stale = await a_job_with_a_past(backend)
    await backend.settle([Succeeded(stale)])
    return stale


async def parked(backend: Backend, clock: ManualClock) -> Claim:
    stale = await a_job_with_a_past(backend)
    await backend.settle([Parked(stale, failure("the last"), "gave up")])
    return stale


async def wrong_token(backend: Backend, clock: ManualClock) -> Claim:
    return Claim((await a_job_with_a_past(backend)).job_id, new_token())


async def wrong_job(backend: Backend, clock: ManualClock) -> Claim:
    held = await a_job_with_a_past(backend)
    return Claim(JobId(held.job_id + 1_000), held.token)


async def never_claimed(backend: Backend, clock: ManualClock) -> Claim:
    (job_id,) = await enqueue(backend, new_job())
    return Claim(job_id, new_token())


SITUATIONS: dict[str, Callable[[Backend, ManualClock], Awaitable[Claim]]] = {
    "reaped": reaped,
    "reaped and claimed by another": reaped_and_claimed_by_another,
    "reaped and claimed by the same": reaped_and_claimed_by_the_same,
    "retried": retried,
    "released": released,
    "succeeded": succeeded,
    "parked": parked,
    "wrong token": wrong_token,
    "wrong job": wrong_job,
    "never claimed": never_claimed,
}


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("write", WRITES)
async def test_a_stale_claim_changes_nothing(
    engine: AsyncEngine, clock: ManualClock, database: Database, situation: str, write: str
) -> None:
    async with opened_backend(engine, clock, history=True) as backend:
        stale = await SITUATIONS[situation](backend, clock)
        before = everything(database)
        assert await WRITES[write](backend, [stale]) == frozenset()
        assert everything(database) == before


@pytest.mark.parametrize("write", WRITES)
async def test_the_holder_of_a_job_settles_it_whatever_stale_claims_said_before(
    backend: Backend, clock: ManualClock, write: str
) -> None:
    stale = await reaped(backend, clock)
    holder = await claim_again(backend, stale.job_id)
    for other in WRITES.values():
        assert await other(backend, [stale]) == frozenset()
    assert await WRITES[write](backend, [holder.claim]) == {stale.job_id}


# In the company of others


class Crossed(NamedTuple):
    """J was lost, and claimed again together with K: it has the token of K now."""

    stale: Claim
    now: Claim
    neighbour: Claim


async def crossed(backend: Backend, clock: ManualClock) -> Crossed:
    stale = await a_job_with_a_past(backend)
    await taken_back(backend, clock)
    (other,) = await enqueue(backend, new_job(priority=-1))
    first, second = await claim(backend, new_worker(), 2)
    assert (first.claim.job_id, second.claim.job_id) == (stale.job_id, other)
    assert first.claim.token == second.claim.token
    return Crossed(stale, first.claim, second.claim)


def row_of(database: Database, claim: Claim) -> list[tuple[Any, ...]]:
    return database.query("SELECT * FROM queue_jobs WHERE id = ?", claim.job_id)


@pytest.mark.parametrize("backwards", [False, True], ids=["stale first", "stale last"])
@pytest.mark.parametrize("write", WRITES)
async def test_the_token_of_another_job_in_the_same_batch_does_not_help_a_stale_claim(
    backend: Backend, clock: ManualClock, database: Database, write: str, backwards: bool
) -> None:
    jobs = await crossed(backend, clock)
    before, letter = row_of(database, jobs.stale), everything(database)["queue_dead_jobs"]
    batch = [jobs.stale, jobs.neighbour]
    assert await WRITES[write](backend, batch[::-1] if backwards else batch) == {jobs.neighbour.job_id}
    assert row_of(database, jobs.stale) == before
    assert [row for row in everything(database)["queue_dead_jobs"] if row[1] == KEY] == letter


@pytest.mark.parametrize("write", WRITES)
async def test_two_jobs_with_each_others_tokens_change_nothing(
    backend: Backend, database: Database, write: str
) -> None:
    one, two = (await claimed(backend)).claim, (await claimed(backend)).claim
    before = everything(database)
    swapped = [Claim(one.job_id, two.token), Claim(two.job_id, one.token)]
    assert await WRITES[write](backend, swapped) == frozenset()
    assert everything(database) == before


@pytest.mark.parametrize("stale_write", OUTCOMES)
async def test_a_stale_claim_keeps_nobody_else_in_its_batch_from_being_settled(
    backend: Backend, clock: ManualClock, database: Database, stale_write: str
) -> None:
    stale = await reaped_and_claimed_by_another(backend, clock)
    before = row_of(database, stale)
    await enqueue(backend, *(new_job() for _ in OUTCOMES))
    jobs = await claim(backend, new_worker(), len(OUTCOMES))
    settled = await backend.settle(
        [OUTCOMES[stale_write](stale), *(make(job.claim) for make, job in zip(OUTCOMES.values(), jobs, strict=True))]
    )
    assert settled == {job.claim.job_id for job in jobs}
    assert row_of(database, stale) == before


@pytest.mark.parametrize("write", WRITES)
async def test_a_stale_and_a_valid_claim_to_one_job_in_one_batch_count_as_the_valid_one(
    backend: Backend, clock: ManualClock, database: Database, write: str
) -> None:
    found: list[Any] = []
    for with_the_stale_one in (False, True):
        await enqueue(backend, new_job())
        (lost,) = await claim(backend, new_worker())
        await taken_back(backend, clock)
        (held,) = await claim(backend, new_worker())
        batch = [lost.claim, held.claim] if with_the_stale_one else [held.claim]
        assert await WRITES[write](backend, batch) == {held.claim.job_id}
        jobs = database.jobs("status, attempt, crashes, deadline_at IS NULL")
        found.append((jobs, database.query("SELECT failure_count FROM queue_dead_jobs")))
        database.query("DELETE FROM queue_jobs")
        database.query("DELETE FROM queue_dead_jobs")
    assert found[0] == found[1]


async def test_a_stale_claim_is_no_failure_of_the_job(backend: Backend, clock: ManualClock, database: Database) -> None:
    """A stale retry between two real ones leaves no trace in the errors."""
    stale = await reaped(backend, clock)
    holder = await claim_again(backend, stale.job_id)
    await backend.settle([Retried(stale, failure("of the lost one"), timedelta(0))])
    await backend.settle([Retried(holder.claim, failure("of the holder"), timedelta(0))])
    ((errors,),) = database.query("SELECT errors FROM queue_jobs WHERE id = ?", stale.job_id)
    assert "of the lost one" not in errors
    assert "of the holder" in errors


# Beats


async def test_a_beat_with_a_lost_claim_is_told_so_and_leaves_the_job_to_its_holder(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    alice = new_worker()
    await enqueue(backend, new_job())
    (job,) = await claim(backend, alice)
    await taken_back(backend, clock)
    await claim_again(backend, job.claim.job_id)
    before = everything(database)
    beat = await backend.beat(alice, knowing([job.claim], []))
    assert (list(beat.lost), list(beat.to_cancel), list(beat.unknown)) == ([job.claim], [], [])
    assert everything(database) == before


@pytest.mark.parametrize("situation", ["reaped", "retried", "released", "succeeded", "parked", "never claimed"])
async def test_a_beat_with_a_claim_that_nobody_holds_is_told_so_and_changes_nothing(
    engine: AsyncEngine, clock: ManualClock, database: Database, situation: str
) -> None:
    async with opened_backend(engine, clock, history=True) as backend:
        stale = await SITUATIONS[situation](backend, clock)
        before = everything(database)
        beat = await backend.beat(new_worker(), knowing([stale], []))
        assert (list(beat.lost), list(beat.to_cancel), list(beat.unknown)) == ([stale], [], [])
        assert everything(database) == before


async def test_a_beat_tells_a_stale_claim_from_a_valid_one_to_the_same_job(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    alice = new_worker()
    await enqueue(backend, new_job())
    (job,) = await claim(backend, alice)
    await taken_back(backend, clock)
    (again,) = await claim(backend, alice)
    before = everything(database)
    beat = await backend.beat(alice, knowing([job.claim, again.claim], []))
    assert (list(beat.lost), list(beat.unknown)) == ([job.claim], [])
    assert everything(database) == before


async def test_a_beat_is_not_misled_by_the_token_of_another_job_in_the_same_batch(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    jobs = await crossed(backend, clock)
    holder = new_worker(id=(await stored(backend, jobs.now.job_id)).worker_id)
    before = everything(database)
    beat = await backend.beat(holder, knowing([jobs.stale, jobs.neighbour, jobs.now], []))
    assert (list(beat.lost), list(beat.unknown)) == ([jobs.stale], [])
    assert everything(database) == before


async def test_a_beat_gives_back_a_job_that_is_held_by_its_token_only(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    """What the worker knows of is a stale claim and a neighbour; nobody would ever settle the job itself."""
    jobs = await crossed(backend, clock)
    holder = new_worker(id=(await stored(backend, jobs.now.job_id)).worker_id)
    before = row_of(database, jobs.neighbour)
    beat = await backend.beat(holder, knowing([jobs.stale, jobs.neighbour], []))
    assert (list(beat.lost), list(beat.unknown)) == ([jobs.stale], [jobs.now])
    assert (await stored(backend, jobs.now.job_id)).status is JobStatus.PENDING
    assert row_of(database, jobs.neighbour) == before


async def test_a_request_to_stop_reaches_the_holder_and_not_who_lost_the_job(
    backend: Backend, clock: ManualClock
) -> None:
    alice, bob = new_worker(), new_worker()
    await enqueue(backend, new_job())
    (job,) = await claim(backend, alice)
    await taken_back(backend, clock)
    (again,) = await claim(backend, bob)
    await backend.cancel(job.claim.job_id)
    beat = await backend.beat(alice, knowing([job.claim], []))
    assert (list(beat.lost), list(beat.to_cancel)) == ([job.claim], [])
    assert list((await backend.beat(bob, knowing([again.claim], []))).to_cancel) == [again.claim]
