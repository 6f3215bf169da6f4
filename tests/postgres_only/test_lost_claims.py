"""The answer to a worker's call is lost: the call was carried out, and has to find that out by itself."""

import asyncio
import itertools
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, TypeAlias

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from queue_core import BackendUnavailable
from queue_core.backend import Backend
from queue_core.model import Claim, ClaimedJob, JobId, Token, Worker
from tests.conformance.test_cancellation import Call
from tests.postgres_only.test_lost_answers import proxied, through
from tests.support.clock import ManualClock
from tests.support.databases import PostgresDatabase
from tests.support.jobs import new_job
from tests.support.store import (
    LEASE,
    claim,
    enqueue,
    errors_of,
    holder_of,
    knowing,
    new_token,
    new_worker,
    one_of_each,
    opened_backend,
    stored,
)

pytestmark = pytest.mark.postgres_only("a network between the caller and the commit; SQLite has none")

Policy: TypeAlias = Callable[[str], bool]
"""Whether the answer to a commit is lost, by its SQL ('COMMIT', or what was committed without one)."""


def is_claim(sql: str) -> bool:
    return "SET status = 'claimed'" in sql


def is_look(sql: str) -> bool:
    """The look for what an earlier try has claimed."""
    return sql.lstrip().startswith("SELECT") and "claim_token = " in sql


def is_about_a_claim(sql: str) -> bool:
    """Any call's own commit, and none of what goes on around it."""
    return sql == "COMMIT" or "claim_token" in sql


def first(policy: Policy) -> Policy:
    """Only the first that the policy would lose."""
    lost: list[str] = []

    def is_lost(sql: str) -> bool:
        if lost or not policy(sql):
            return False
        lost.append(sql)
        return True

    return is_lost


class BadLine:
    """A backend that is reached through a line which loses what its policy says: at first nothing."""

    backend: Backend
    cuts: Sequence[str]

    def __init__(self) -> None:
        self.loses: Policy = self.nothing

    @staticmethod
    def nothing(_sql: str) -> bool:
        return False


@asynccontextmanager
async def bad_line(database: PostgresDatabase, clock: ManualClock, **settings: Any) -> AsyncGenerator[BadLine]:
    line = BadLine()
    async with proxied(database, lambda sql: line.loses(sql)) as proxy:
        engine = create_async_engine(through(proxy, database))
        async with opened_backend(engine, clock, **settings) as backend:
            line.backend, line.cuts = backend, proxy.cuts
            yield line
        await engine.dispose()


def states(database: PostgresDatabase) -> Sequence[tuple[Any, ...]]:
    """Of each job: id, status, attempt, crashes."""
    return database.jobs("id, status, attempt, crashes")


def claims(database: PostgresDatabase) -> Sequence[Claim]:
    """All that the database knows of."""
    found = database.query(
        "SELECT id, CAST(claim_token AS text) FROM queue_jobs WHERE status = 'claimed' ORDER BY claim_token, id"
    )
    return [Claim(JobId(job_id), Token(token)) for job_id, token in found]


def in_order(jobs: Sequence[ClaimedJob]) -> Sequence[Claim]:
    return sorted((job.claim for job in jobs), key=lambda claim: (claim.token, claim.job_id))


# Claims


async def test_a_worker_knows_of_every_claim_that_it_made_through_a_bad_line(
    database: PostgresDatabase, clock: ManualClock
) -> None:
    dice = random.Random(20261118)
    worker = new_worker()
    got: list[ClaimedJob] = []
    async with bad_line(database, clock) as line:
        await enqueue(line.backend, *(new_job() for _ in range(1_500)))
        line.loses = lambda sql: dice.random() < (0.5 if is_claim(sql) else 0.1 if is_look(sql) else 0)
        for _ in range(500):
            token, room = new_token(), dice.randint(1, 3)
            jobs = (await line.backend.claim(worker, token, {"notes": room}, ["Note"])).jobs
            assert [job.claim.token for job in jobs] == [token] * room
            got += jobs
        assert len(line.cuts) > 200
    assert in_order(got) == claims(database)
    assert {job.attempt for job in got} == {1}
    assert set(database.jobs("status, attempt")) == {("claimed", 1), ("pending", 0)}


async def test_workers_that_lose_every_first_answer_take_nothing_twice_and_leave_nothing_out(
    database: PostgresDatabase, clock: ManualClock
) -> None:
    dice = random.Random(20261118)
    got: list[ClaimedJob] = []

    async def work(backend: Backend) -> None:
        worker = new_worker()
        while jobs := await claim(backend, worker, dice.randint(1, 3)):
            got.extend(jobs)

    async with bad_line(database, clock) as line:
        ids = await enqueue(line.backend, *(new_job() for _ in range(300)))
        # Until all are claimed: the last claims find nothing, and would lose that answer for ever.
        line.loses = lambda sql: is_claim(sql) and len(got) < len(ids)
        await asyncio.gather(*(work(line.backend) for _ in range(4)))
        assert len(line.cuts) >= 100
    assert in_order(got) == claims(database)
    assert sorted(job.claim.job_id for job in got) == ids
    assert {job.attempt for job in got} == {1}


@pytest.mark.parametrize("lost", [0, 1])
async def test_a_claim_in_two_rounds_whose_answer_is_lost_gives_each_job_once(
    database: PostgresDatabase, clock: ManualClock, lost: int
) -> None:
    """A job that has expired is ended, and the claim goes on for another in its place."""
    worker, token = new_worker(), new_token()
    rounds = itertools.count()
    async with bad_line(database, clock) as line:
        ids = await enqueue(line.backend, new_job(), new_job(expires_after=LEASE), new_job())
        clock.advance(LEASE)
        line.loses = lambda sql: is_claim(sql) and next(rounds) == lost
        jobs = (await line.backend.claim(worker, token, {"notes": 2}, ["Note"])).jobs
        assert len(line.cuts) == 1
    assert in_order(jobs) == claims(database)
    assert jobs[0].claim.job_id == ids[0]
    assert ids[1] not in dict(database.jobs("id, status"))


async def test_a_claim_that_gave_up_is_released_by_the_beat_that_no_longer_waits_for_it(
    database: PostgresDatabase, clock: ManualClock
) -> None:
    worker, token = new_worker(), new_token()
    async with bad_line(database, clock, give_up_after=0.5) as line:
        ids = await enqueue(line.backend, new_job(), new_job(), new_job())
        line.loses = lambda sql: is_claim(sql) or is_look(sql)
        with pytest.raises(BackendUnavailable):
            await line.backend.claim(worker, token, {"notes": 2}, ["Note"])
        line.loses = line.nothing
        unknown = [Claim(job_id, token) for job_id in ids[:2]]
        assert claims(database) == unknown
        assert (await line.backend.beat(worker, knowing([], [token]))).unknown == []
        assert claims(database) == unknown
        beat = await line.backend.beat(worker, knowing([], [new_token()]))
        assert sorted(each.job_id for each in beat.unknown) == ids[:2]
    assert states(database) == [(job_id, "pending", 0, 0) for job_id in ids]


@pytest.mark.parametrize("losses", [1, 2, 3])
async def test_a_claim_that_is_cancelled_while_its_answer_is_lost_gives_back_what_it_took(
    database: PostgresDatabase, clock: ManualClock, losses: int
) -> None:
    """The claim's own answer, then that of the look for what it took, then that of giving it back."""
    worker = new_worker()
    async with bad_line(database, clock) as line:
        ids = await enqueue(line.backend, new_job(), new_job())
        for _ in range(10):
            call = Call("native", line.backend.claim(worker, new_token(), {"notes": 2}, ["Note"]))
            line.loses = cancelling(call, losses)
            await call.end()
            assert call.task.cancelled()
            assert states(database) == [(job_id, "pending", 0, 0) for job_id in ids]
        assert len(line.cuts) == 10 * losses


def cancelling(call: Call, losses: int) -> Policy:
    """Cancel the call as its first answer is lost; so many are."""
    lost: list[str] = []

    def is_lost(sql: str) -> bool:
        call.cancel()
        if len(lost) == losses or not is_about_a_claim(sql):
            return False
        lost.append(sql)
        return True

    return is_lost


# Settles


async def test_a_settle_whose_answer_is_lost_happened_once_and_says_so(
    database: PostgresDatabase, clock: ManualClock
) -> None:
    dice = random.Random(20261118)
    outcomes = one_of_each(now=False)
    ended: dict[JobId, str] = {}
    async with bad_line(database, clock, history=True) as line:
        await enqueue(line.backend, *(new_job() for _ in range(120 * len(outcomes))))
        line.loses = lambda sql: is_about_a_claim(sql) and not is_claim(sql) and dice.random() < 0.5
        for number in range(120):
            jobs = await claim(line.backend, new_worker(), len(outcomes))
            # Of one kind, which is a single statement, or one of each, which is a transaction.
            names = [dice.choice([*outcomes])] * len(jobs) if number % 2 else [*outcomes]
            batch = {job.claim.job_id: name for job, name in zip(jobs, names, strict=True)}
            settled = await line.backend.settle([outcomes[batch[job.claim.job_id]](job.claim) for job in jobs])
            assert settled == batch.keys()
            ended |= batch
            # What was given back would be claimed again, and would count twice.
            database.query("UPDATE queue_jobs SET queue = 'later' WHERE status = 'pending' AND id <= ?", max(batch))
        assert len(line.cuts) > 60

    def those(*names: str) -> Sequence[JobId]:
        return sorted(job_id for job_id, name in ended.items() if name in names)

    live = database.jobs("id, status, attempt, errors IS NOT NULL")
    attempts = {
        "retried": ("scheduled", 1, True),
        "snoozed": ("scheduled", 0, False),
        "released": ("pending", 0, False),
    }
    assert live == [(job_id, *attempts[ended[job_id]]) for job_id in those(*attempts)]
    assert all(len(errors_of(database, job_id)) == 1 for job_id in those("retried")[:20])
    dead = database.query("SELECT job_id, failure_count FROM queue_dead_jobs ORDER BY job_id")
    assert dead == [(job_id, 1) for job_id in those("parked")]
    history = database.query("SELECT job_id, status FROM queue_history ORDER BY job_id")
    assert history == [(job_id, ended[job_id]) for job_id in those("succeeded", "cancelled")]


# Beats, and claims that are taken back


async def test_a_beat_whose_answer_is_lost_still_renews_and_releases(
    database: PostgresDatabase, clock: ManualClock
) -> None:
    worker = new_worker()
    async with bad_line(database, clock) as line:
        ids = await enqueue(line.backend, *(new_job() for _ in range(4)))
        held, stopping, unknown, pending = [(await claim(line.backend, worker))[0].claim for _ in ids]
        gone = Claim(JobId(ids[-1] + 1), new_token())
        await line.backend.cancel(stopping.job_id)
        clock.advance(LEASE * 0.9)
        line.loses = first(is_about_a_claim)
        beat = await line.backend.beat(worker, knowing([held, stopping, gone], [pending.token]))
        assert len(line.cuts) == 1
        assert (beat.lost, beat.to_cancel) == ([gone], [stopping])
        assert (await holder_of(line.backend, worker)).lease_until == clock.now() + LEASE
    assert claims(database) == sorted([held, stopping, pending], key=lambda claim: (claim.token, claim.job_id))
    assert [row for row in states(database) if row[1] == "pending"] == [(unknown.job_id, "pending", 0, 0)]


async def _reap(backend: Backend, worker: Worker) -> None:
    await backend.reap(["notes"], limit=10)


async def _sweep(backend: Backend, worker: Worker) -> None:
    await backend.sweep_orphans(["notes"], [worker.id], park=False, limit=10)


@pytest.mark.parametrize("take_back", [_reap, _sweep], ids=["reap", "sweep"])
async def test_claims_that_are_taken_back_by_a_call_whose_answer_is_lost_are_taken_back_once(
    database: PostgresDatabase, clock: ManualClock, take_back: Callable[[Backend, Worker], Awaitable[None]]
) -> None:
    worker = new_worker()
    async with bad_line(database, clock) as line:
        again, last = await enqueue(line.backend, new_job(), new_job(max_attempts=1))
        await claim(line.backend, worker, 2)
        clock.advance(LEASE + timedelta(seconds=1))
        line.loses = first(lambda sql: sql == "COMMIT")
        await take_back(line.backend, worker)
        assert len(line.cuts) == 1
    assert states(database) == [(again, "pending", 1, 1)]
    assert len(errors_of(database, again)) == 1
    assert database.query("SELECT job_id, failure_count FROM queue_dead_jobs") == [(last, 1)]


async def test_a_time_limit_that_is_extended_by_a_call_whose_answer_is_lost_is_extended(
    database: PostgresDatabase, clock: ManualClock
) -> None:
    async with bad_line(database, clock) as line:
        (job_id,) = await enqueue(line.backend, new_job(timeout=LEASE))
        (job,) = await claim(line.backend, new_worker())
        clock.advance(LEASE / 2)
        line.loses = first(is_about_a_claim)
        assert await line.backend.extend([job.claim], LEASE) == {job_id}
        assert len(line.cuts) == 1
        assert (await stored(line.backend, job_id)).deadline_at == clock.now() + LEASE
