"""Claiming: which jobs, in which order, how many; what a claim says of a job, and of the worker that holds it."""

import asyncio
import random
from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import Any

import anyio
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from queue_core.backend import Backend
from queue_core.model import (
    Claim,
    Claimed,
    ClaimedJob,
    EnqueueStatus,
    JobId,
    JobStatus,
    Released,
    Retried,
    Worker,
)
from tests.support.clock import ManualClock
from tests.support.databases import Database
from tests.support.jobs import new_job
from tests.support.spy import Spy
from tests.support.store import (
    LEASE,
    claim,
    claimed,
    enqueue,
    failure,
    moment,
    new_token,
    new_worker,
    opened_backend,
    stored,
)

SECOND = timedelta(seconds=1)


def ids(jobs: Collection[ClaimedJob]) -> list[JobId]:
    return [job.claim.job_id for job in jobs]


def told(answer: Claimed) -> tuple[list[JobId], int]:
    """The jobs to run, and how many were ended instead."""
    return ids(answer.jobs), answer.ended


# Order


async def test_jobs_are_claimed_by_priority_then_time_then_id(backend: Backend, clock: ManualClock) -> None:
    now, earlier = clock.now(), clock.now() - SECOND
    low, high, older, high_and_older, last, lowest = await enqueue(
        backend,
        new_job(run_at=now),
        new_job(run_at=now, priority=5),
        new_job(run_at=earlier),
        new_job(run_at=earlier, priority=5),
        new_job(run_at=now),
        new_job(run_at=earlier - SECOND, priority=-3),
    )
    worker = new_worker()
    assert ids(await claim(backend, worker, 4)) == [high_and_older, high, older, low]
    assert ids(await claim(backend, worker, 4)) == [last, lowest]


async def test_several_types_are_claimed_in_one_order(backend: Backend, clock: ManualClock) -> None:
    note, other, third, late_note, urgent = await enqueue(
        backend,
        new_job(job_type="Note", run_at=clock.now() - 4 * SECOND),
        new_job(job_type="Other", run_at=clock.now() - 3 * SECOND),
        new_job(job_type="Third", run_at=clock.now() - 2 * SECOND),
        new_job(job_type="Note", run_at=clock.now() - SECOND),
        new_job(job_type="Other", priority=1),
    )
    worker, types = new_worker(), ("Third", "Other", "Note")
    assert ids(await claim(backend, worker, 3, job_types=types)) == [urgent, note, other]
    assert ids(await claim(backend, worker, 3, job_types=types)) == [third, late_note]


async def test_any_mixture_is_claimed_in_the_order_of_the_whole(backend: Backend, clock: ManualClock) -> None:
    generator = random.Random(20261118)
    jobs = [
        new_job(
            job_type=generator.choice(["Note", "Other", "Third"]),
            priority=generator.choice([-1, 0, 7]),
            run_at=clock.now() - generator.randrange(4) * SECOND,
        )
        for _ in range(120)
    ]
    places = [
        (-job.priority, job.run_at, job_id) for job_id, job in zip(await enqueue(backend, *jobs), jobs, strict=True)
    ]
    order = [job_id for *_, job_id in sorted(places)]
    worker = new_worker()
    taken: list[JobId] = []
    while found := await claim(backend, worker, generator.randrange(1, 20), job_types=["Note", "Other", "Third"]):
        taken += ids(found)
    assert taken == order


async def test_a_type_that_is_named_twice_gives_each_job_once(backend: Backend) -> None:
    expected = await enqueue(backend, new_job(), new_job())
    assert ids(await claim(backend, new_worker(), 5, job_types=["Note", "Note"])) == expected


# How many, and of which queues


async def test_each_queue_gives_at_most_what_is_wanted_of_it(backend: Backend, database: Database) -> None:
    for name in ("a", "b", "c", "d"):
        await enqueue(backend, *(new_job(queue=name) for _ in range(3)))
    taken = await backend.claim(new_worker(), new_token(), {"a": 2, "b": 1, "c": 0, "nothing there": 5}, ["Note"])
    assert sorted(job.queue for job in taken.jobs) == ["a", "a", "b"]
    assert database.query(
        "SELECT queue, count(*) FROM queue_jobs WHERE status = 'pending' GROUP BY queue ORDER BY queue"
    ) == [("a", 1), ("b", 2), ("c", 3), ("d", 3)]


async def test_several_queues_are_each_claimed_in_their_own_order(backend: Backend) -> None:
    a_last, b_last, a_first, b_first = await enqueue(
        backend,
        new_job(queue="a"),
        new_job(queue="b", job_type="Other"),
        new_job(queue="a", job_type="Other", priority=1),
        new_job(queue="b", priority=1),
    )
    taken = (await backend.claim(new_worker(), new_token(), {"b": 9, "a": 9}, ["Note", "Other"])).jobs
    assert ids([job for job in taken if job.queue == "a"]) == [a_first, a_last]
    assert ids([job for job in taken if job.queue == "b"]) == [b_first, b_last]


async def test_a_claim_takes_what_there_is_when_it_has_room_for_more(backend: Backend) -> None:
    expected = await enqueue(backend, *(new_job() for _ in range(250)))
    assert ids(await claim(backend, new_worker(), 100_000)) == expected
    assert ids(await claim(backend, new_worker(), 100_000)) == []


async def test_a_queue_that_is_not_asked_for_is_left_as_it_is(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    await enqueue(
        backend, new_job(queue="theirs", priority=9), new_job(queue="theirs", expires_after=SECOND), new_job()
    )
    clock.advance(2 * SECOND)
    theirs = "SELECT * FROM queue_jobs WHERE queue = 'theirs' ORDER BY id"
    before = database.query(theirs)
    taken = await backend.claim(new_worker(), new_token(), {"notes": 10}, ["Note"])
    assert (len(taken.jobs), taken.ended) == (1, 0)
    assert database.query(theirs) == before


async def test_jobs_of_unknown_types_are_left_and_are_in_nobodys_way(backend: Backend, database: Database) -> None:
    await enqueue(backend, *(new_job(job_type="Newer", priority=9) for _ in range(40)))
    (known,) = await enqueue(backend, new_job())
    newer = "SELECT * FROM queue_jobs WHERE job_type = 'Newer' ORDER BY id"
    before = database.query(newer)
    assert ids(await claim(backend, new_worker(), 1)) == [known]
    assert ids(await claim(backend, new_worker(), 1)) == []
    assert database.query(newer) == before


@pytest.mark.parametrize(
    ("wanted", "types"),
    [({}, ["Note"]), ({"notes": 0}, ["Note"]), ({"notes": -1}, ["Note"]), ({"notes": 1}, [])],
    ids=["no queue", "no room", "less than no room", "no type"],
)
async def test_a_claim_of_nothing_sends_nothing(
    engine: AsyncEngine, clock: ManualClock, wanted: Mapping[str, int], types: list[str]
) -> None:
    spy = Spy(engine)
    async with opened_backend(engine, clock) as backend:
        await enqueue(backend, new_job())
        spy.reset()
        assert told(await backend.claim(new_worker(), new_token(), wanted, types)) == ([], 0)
        assert spy.statements == []


async def test_a_queue_with_nothing_in_it_gives_nothing(backend: Backend) -> None:
    assert told(await backend.claim(new_worker(), new_token(), {"notes": 5}, ["Note"])) == ([], 0)


async def test_a_worker_may_have_many_queues_and_many_types(backend: Backend) -> None:
    queues, types = [f"queue {number}" for number in range(40)], [f"Type{number}" for number in range(40)]
    expected = await enqueue(
        backend, *(new_job(queue=queue, job_type=job_type) for queue, job_type in zip(queues, types, strict=True))
    )
    taken = await backend.claim(new_worker(), new_token(), dict.fromkeys(queues, 2), types)
    assert sorted(ids(taken.jobs)) == expected


@pytest.mark.parametrize("name", ["it's", 'a"b', "{a,b}", "a\\b", "%s ? :name $1", "É😀", "NULL", ""])
async def test_names_are_taken_to_the_letter(backend: Backend, name: str) -> None:
    (expected, _) = await enqueue(backend, new_job(queue=name, job_type=name), new_job(queue=name, job_type="Other"))
    taken = await backend.claim(new_worker(), new_token(), {name: 5, "other": 5}, [name, "Third"])
    assert ids(taken.jobs) == [expected]


# What is not claimed


async def test_a_paused_queue_gives_nothing_until_it_is_resumed(backend: Backend, database: Database) -> None:
    (held, free) = await enqueue(backend, new_job(), new_job(queue="free"))
    await backend.pause("notes", reason="the printer burns")
    before = database.query("SELECT * FROM queue_jobs WHERE queue = 'notes'")
    taken = await backend.claim(new_worker(), new_token(), {"notes": 5, "free": 5}, ["Note"])
    assert ids(taken.jobs) == [free]
    assert database.query("SELECT * FROM queue_jobs WHERE queue = 'notes'") == before
    await backend.resume("notes")
    assert ids(await claim(backend, new_worker())) == [held]


async def test_a_pause_leaves_what_is_claimed_to_its_worker(backend: Backend) -> None:
    job = await claimed(backend)
    await backend.pause("notes")
    assert await backend.settle([Released(job.claim)]) == {job.claim.job_id}
    assert ids(await claim(backend, new_worker())) == []


async def test_a_scheduled_job_is_not_claimed_before_it_is_promoted(backend: Backend, clock: ManualClock) -> None:
    (scheduled,) = await enqueue(backend, new_job(delay=SECOND))
    assert ids(await claim(backend, new_worker())) == []
    clock.advance(2 * SECOND)
    assert ids(await claim(backend, new_worker())) == []
    assert await backend.promote(["notes"], limit=10) == 1
    assert ids(await claim(backend, new_worker())) == [scheduled]


async def test_a_claimed_job_is_not_claimed_again(backend: Backend, database: Database) -> None:
    await claimed(backend)
    before = database.jobs("*")
    assert ids(await claim(backend, new_worker(), 5)) == []
    assert database.jobs("*") == before


async def test_claims_at_the_same_time_never_get_the_same_job(database: Database, clock: ManualClock) -> None:
    engines = [create_async_engine(database.url) for _ in range(3)]
    taken: list[Claim] = []
    async with (
        opened_backend(engines[0], clock) as first,
        opened_backend(engines[1], clock) as second,
        opened_backend(engines[2], clock) as third,
    ):
        expected = await enqueue(first, *(new_job() for _ in range(300)))

        async def work(backend: Backend, room: int) -> None:
            worker = new_worker()
            while jobs := await claim(backend, worker, room):
                taken.extend(job.claim for job in jobs)

        await asyncio.gather(*(work(backend, room) for backend in (first, second, third) for room in (3, 7, 11)))
    for engine in engines:
        await engine.dispose()
    assert sorted(claim.job_id for claim in taken) == expected
    assert {(job_id, str(token)) for job_id, token in database.jobs("id, claim_token")} == {
        (claim.job_id, claim.token) for claim in taken
    }
    assert database.query("SELECT count(*) FROM queue_jobs WHERE attempt <> 1 OR status <> 'claimed'") == [(0,)]


@pytest.mark.postgres_only("row locks")
async def test_a_job_whose_row_somebody_has_locked_is_passed_over(backend: Backend, database: Database) -> None:
    locked, free = await enqueue(backend, new_job(priority=1), new_job())
    holder = database.connect()
    try:
        holder.execute("SELECT id FROM queue_jobs WHERE id = %s FOR UPDATE", (locked,))
        assert ids(await claim(backend, new_worker(), 5)) == [free]
        holder.rollback()
        assert ids(await claim(backend, new_worker(), 5)) == [locked]
    finally:
        holder.close()


@pytest.mark.postgres_only("row locks")
async def test_a_job_whose_row_somebody_has_locked_is_in_the_way_of_no_other_type(
    backend: Backend, database: Database
) -> None:
    locked, free = await enqueue(backend, new_job(priority=1), new_job(job_type="Other"))
    holder = database.connect()
    try:
        holder.execute("SELECT id FROM queue_jobs WHERE id = %s FOR UPDATE", (locked,))
        assert ids(await claim(backend, new_worker(), 1, job_types=["Note", "Other"])) == [free]
    finally:
        holder.close()


# Jobs that are ended instead


async def test_a_job_that_has_expired_is_ended_and_not_claimed(backend: Backend, clock: ManualClock) -> None:
    now, later = await enqueue(
        backend, new_job(expires_after=SECOND), new_job(expires_after=SECOND + timedelta(microseconds=1))
    )
    clock.advance(SECOND)
    taken = await backend.claim(new_worker(), new_token(), {"notes": 5}, ["Note"])
    assert told(taken) == ([later], 1)
    assert await backend.get(now) is None


async def test_jobs_that_are_ended_use_up_no_room(backend: Backend, clock: ManualClock) -> None:
    await enqueue(backend, *(new_job(expires_after=SECOND, priority=9) for _ in range(30)))
    first, second, third = await enqueue(backend, new_job(), new_job(), new_job())
    clock.advance(SECOND)
    worker = new_worker()
    taken = await backend.claim(worker, new_token(), {"notes": 2}, ["Note"])
    assert told(taken) == ([first, second], 30)
    taken = await backend.claim(worker, new_token(), {"notes": 2}, ["Note"])
    assert told(taken) == ([third], 0)


async def test_a_job_that_was_started_before_does_not_expire(backend: Backend, clock: ManualClock) -> None:
    job = await claimed(backend, expires_after=SECOND)
    await backend.settle([Retried(job.claim, failure(), timedelta(0))])
    clock.advance(2 * SECOND)
    taken = await backend.claim(new_worker(), new_token(), {"notes": 5}, ["Note"])
    assert told(taken) == ([job.claim.job_id], 0)


async def test_a_job_whose_only_start_was_given_back_expires(backend: Backend, clock: ManualClock) -> None:
    job = await claimed(backend, expires_after=SECOND)
    await backend.settle([Released(job.claim)])
    clock.advance(2 * SECOND)
    assert told(await backend.claim(new_worker(), new_token(), {"notes": 5}, ["Note"])) == ([], 1)


async def test_an_expired_job_leaves_its_key_to_others_and_no_dead_letter(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    await enqueue(backend, new_job(key="k", unique_key="k", expires_after=SECOND))
    clock.advance(SECOND)
    await claim(backend, new_worker())
    (answer,) = await backend.enqueue_many([new_job(key="k", unique_key="k")])
    assert answer.status is EnqueueStatus.INSERTED
    assert database.count("queue_dead_jobs") == 0


async def test_a_job_that_was_called_off_is_ended_and_not_claimed(backend: Backend, database: Database) -> None:
    job = await claimed(backend)
    await backend.cancel(job.claim.job_id)
    await backend.settle([Released(job.claim)])
    (other,) = await enqueue(backend, new_job())
    taken = await backend.claim(new_worker(), new_token(), {"notes": 1}, ["Note"])
    assert told(taken) == ([other], 1)
    assert database.jobs("id") == [(other,)]


async def test_jobs_that_are_ended_are_kept_where_a_history_is(
    engine: AsyncEngine, clock: ManualClock, database: Database
) -> None:
    async with opened_backend(engine, clock, history=True) as backend:
        called_off = (await claimed(backend, payload="1")).claim
        await backend.cancel(called_off.job_id)
        await backend.settle([Released(called_off)])
        (expired,) = await enqueue(backend, new_job(payload="2", expires_after=SECOND))
        clock.advance(SECOND)
        assert told(await backend.claim(new_worker(), new_token(), {"notes": 1}, ["Note"])) == ([], 2)
    found = database.query("SELECT job_id, status, payload, finished_at FROM queue_history ORDER BY job_id")
    assert [(job_id, status, payload) for job_id, status, payload, _ in found] == [
        (called_off.job_id, "cancelled", "1"),
        (expired, "expired", "2"),
    ]
    assert {moment(row[-1]) for row in found} == {clock.now()}


# What a claim says of a job


async def test_a_claimed_job_has_all_that_was_enqueued(backend: Backend, clock: ManualClock) -> None:
    enqueued_at = clock.now()
    (job_id,) = await enqueue(
        backend,
        new_job(
            job_type="Report",
            queue="slow",
            payload='{"a":"\\u0000é😀"}',
            priority=-7,
            max_attempts=3,
            timeout=timedelta(seconds=30, microseconds=1),
            backoff='{"policy":"fixed","wait":1.0}',
            key="k",
            unique_key='["type","Report","k"]',
            tenant="acme",
            context="asked for by ada",
            headers='{"trace":"1"}',
            run_at=enqueued_at - timedelta(microseconds=123_457),
            expires_after=timedelta(hours=1),
        ),
    )
    clock.advance(SECOND)
    token = new_token()
    taken = await backend.claim(new_worker(), token, {"slow": 1}, ["Report"])
    assert list(taken.jobs) == [
        ClaimedJob(
            claim=Claim(job_id, token),
            job_type="Report",
            queue="slow",
            payload='{"a":"\\u0000é😀"}',
            attempt=1,
            max_attempts=3,
            crashes=0,
            priority=-7,
            timeout=timedelta(seconds=30, microseconds=1),
            backoff='{"policy":"fixed","wait":1.0}',
            key="k",
            tenant="acme",
            context="asked for by ada",
            headers='{"trace":"1"}',
            created_at=enqueued_at,
            available_at=enqueued_at - timedelta(microseconds=123_457),
            deadline_at=clock.now() + timedelta(seconds=30, microseconds=1),
            runs_alone=False,
        )
    ]


async def test_what_a_job_does_not_have_is_none(backend: Backend) -> None:
    job = await claimed(backend)
    assert (job.timeout, job.deadline_at, job.backoff) == (None, None, None)
    assert (job.key, job.tenant, job.context, job.headers) == (None, None, None, None)


async def test_a_claim_is_written_to_the_job(backend: Backend, clock: ManualClock, database: Database) -> None:
    worker, token = new_worker(), new_token()
    with_limit, without = await enqueue(backend, new_job(timeout=30 * SECOND), new_job())
    clock.advance(SECOND)
    await backend.claim(worker, token, {"notes": 2}, ["Note"])
    for job_id, deadline_at in ((with_limit, clock.now() + 30 * SECOND), (without, None)):
        job = await stored(backend, job_id)
        assert (job.status, job.worker_id, job.attempt) == (JobStatus.CLAIMED, worker.id, 1)
        assert (job.claimed_at, job.deadline_at) == (clock.now(), deadline_at)
        assert job.available_at == clock.now() - SECOND
    assert [str(found) for (found,) in database.jobs("claim_token")] == [token, token]


async def test_every_claim_counts_an_attempt(backend: Backend) -> None:
    job = await claimed(backend, max_attempts=3)
    for attempt in (2, 3):
        await backend.settle([Retried(job.claim, failure(), timedelta(0))])
        (job,) = await claim(backend, new_worker())
        assert job.attempt == attempt


@pytest.mark.parametrize(
    ("crashes", "attempts", "max_attempts", "alone"),
    [
        (0, 0, 5, False),
        (0, 0, 1, False),
        (0, 4, 5, False),
        (1, 1, 5, False),
        (1, 3, 5, False),
        (1, 4, 5, True),
        (1, 1, 2, True),
        (1, 7, 5, True),
        (2, 2, 5, True),
        (2, 0, 5, True),
        (9, 9, 100, True),
    ],
)
async def test_a_job_runs_alone_after_two_crashes_or_after_one_on_its_last_attempt(
    backend: Backend, database: Database, crashes: int, attempts: int, max_attempts: int, alone: bool
) -> None:
    await enqueue(backend, new_job(max_attempts=max_attempts))
    database.query("UPDATE queue_jobs SET crashes = ?, attempt = ?", crashes, attempts)
    (job,) = await claim(backend, new_worker())
    assert (job.crashes, job.attempt, job.runs_alone) == (crashes, attempts + 1, alone)


async def test_a_job_whose_worker_fell_silent_is_claimed_by_another(backend: Backend, clock: ManualClock) -> None:
    job = await claimed(backend)
    clock.advance(LEASE + SECOND)
    await backend.reap(["notes"], limit=10)
    (again,) = await claim(backend, new_worker())
    assert (again.claim.job_id, again.attempt, again.crashes) == (job.claim.job_id, 2, 1)
    assert again.claim.token != job.claim.token


# The worker's row


def row_of(database: Database, worker: Worker, columns: str = "*") -> Any:
    (row,) = database.query(f"SELECT {columns} FROM queue_workers WHERE id = ?", worker.id)
    return row


async def test_the_first_claim_writes_the_workers_row(backend: Backend, clock: ManualClock, database: Database) -> None:
    worker = new_worker(host="h", boot_id="b", pid_namespace="n", pid=77, process_started="s", version="v")
    await claimed(backend, worker)
    assert row_of(database, worker, "host, boot_id, pid_namespace, pid, process_started, version") == (
        ("h", "b", "n", 77, "s", "v")
    )
    started_at, lease_until, stopped_at = row_of(database, worker, "started_at, lease_until, stopped_at")
    assert (moment(started_at), moment(lease_until), stopped_at) == (clock.now(), clock.now() + LEASE, None)


async def test_a_claim_leaves_a_lease_that_is_fresh_enough_as_it_is(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    worker = new_worker()
    await claimed(backend, worker)
    before = row_of(database, worker)
    clock.advance(LEASE / 2 - SECOND)
    await claimed(backend, worker)
    assert row_of(database, worker) == before


@pytest.mark.parametrize("idle", [LEASE / 2 + SECOND, LEASE, timedelta(days=3)], ids=["half", "whole", "long"])
async def test_a_claim_renews_a_lease_that_is_half_used_up(
    backend: Backend, clock: ManualClock, database: Database, idle: timedelta
) -> None:
    worker = new_worker()
    await claimed(backend, worker)
    first_start = row_of(database, worker, "started_at")
    clock.advance(idle)
    await enqueue(backend, new_job())
    await claim(backend, worker)
    assert moment(row_of(database, worker, "lease_until")[0]) == clock.now() + LEASE
    assert row_of(database, worker, "started_at") == first_start


async def test_the_lease_is_as_long_as_the_worker_says(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    worker = new_worker(lease=timedelta(minutes=10))
    await claimed(backend, worker)
    assert moment(row_of(database, worker, "lease_until")[0]) == clock.now() + timedelta(minutes=10)


async def test_a_claim_brings_back_a_worker_that_was_taken_for_stopped(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    worker = new_worker()
    await claimed(backend, worker)
    await backend.forget_worker(worker.id)
    await claimed(backend, worker)
    lease_until, stopped_at = row_of(database, worker, "lease_until, stopped_at")
    assert (moment(lease_until), stopped_at) == (clock.now() + LEASE, None)


async def test_a_claim_leaves_other_workers_rows_alone(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    alice = new_worker()
    await claimed(backend, alice)
    before = row_of(database, alice)
    clock.advance(LEASE)
    await claimed(backend, new_worker())
    assert row_of(database, alice) == before


async def test_a_job_claimed_after_a_long_idle_time_is_not_taken_back(backend: Backend, clock: ManualClock) -> None:
    worker = new_worker()
    await backend.settle([Released((await claimed(backend, worker)).claim)])
    clock.advance(timedelta(hours=5))
    (job,) = await claim(backend, worker)
    assert len(await backend.reap(["notes"], limit=10)) == 0
    assert (await stored(backend, job.claim.job_id)).worker_id == worker.id


async def test_a_claim_is_one_commit_with_and_without_a_lease_to_renew(
    engine: AsyncEngine, clock: ManualClock, database: Database
) -> None:
    spy = Spy(engine)
    async with opened_backend(engine, clock) as backend:
        worker = new_worker()
        for idle in (timedelta(0), SECOND, timedelta(hours=5)):
            clock.advance(idle)
            await enqueue(backend, *(new_job(queue=queue) for queue in ("a", "b") for _ in range(50)))
            spy.reset()
            taken = await backend.claim(worker, new_token(), {"a": 50, "b": 50}, ["Note", "Other"])
            assert (len(taken.jobs), spy.commits) == (100, 1)
        assert moment(row_of(database, worker, "lease_until")[0]) == clock.now() + LEASE


async def test_ended_jobs_and_claimed_ones_are_one_commit_and_a_second_only_fills_the_rooms(
    engine: AsyncEngine, clock: ManualClock
) -> None:
    spy = Spy(engine)
    async with opened_backend(engine, clock, history=True) as backend:
        await enqueue(backend, *(new_job(expires_after=SECOND, priority=1) for _ in range(3)), new_job(), new_job())
        clock.advance(SECOND)
        spy.reset()
        taken = await backend.claim(new_worker(), new_token(), {"notes": 4}, ["Note"])
        assert (len(taken.jobs), taken.ended, spy.commits) == (2, 3, 2)


# A caller that goes away


@pytest.mark.parametrize("way", ["native", "anyio"])
async def test_a_claim_whose_caller_is_cancelled_gives_back_what_it_took(
    backend: Backend, database: Database, way: str
) -> None:
    generator = random.Random(20261118)
    await enqueue(backend, *(new_job() for _ in range(5)))
    worker, went_away = new_worker(), 0
    for _ in range(80):
        jobs = None
        pause = generator.random() * 0.004
        if way == "native":
            try:
                async with asyncio.timeout(pause):
                    jobs = await claim(backend, worker, 5)
            except TimeoutError:
                pass
        else:
            with anyio.move_on_after(pause):
                jobs = await claim(backend, worker, 5)
        if jobs is None:
            went_away += 1
        else:
            await backend.settle([Released(job.claim) for job in jobs])
        assert database.jobs("status, attempt, claim_token") == [("pending", 0, None)] * 5
    # A scope that is cancelled waits behind the shield, and the caller still gets what it claimed.
    assert went_away or way == "anyio"


# The next job that is due


async def test_the_next_due_job_is_the_first_scheduled_one_of_these_queues(
    backend: Backend, clock: ManualClock
) -> None:
    await enqueue(
        backend,
        new_job(queue="a", delay=timedelta(minutes=5, microseconds=7)),
        new_job(queue="b", delay=timedelta(minutes=3)),
        new_job(queue="b", delay=timedelta(minutes=4), priority=9),
        new_job(queue="theirs", delay=SECOND),
    )
    assert await backend.next_due(["a", "b", "empty"]) == timedelta(minutes=3)
    assert await backend.next_due(["a"]) == timedelta(minutes=5, microseconds=7)
    clock.advance(timedelta(minutes=2))
    assert await backend.next_due(["a", "b"]) == timedelta(minutes=1)


async def test_a_scheduled_job_whose_time_has_come_is_due_in_no_time(backend: Backend, clock: ManualClock) -> None:
    await enqueue(backend, new_job(delay=SECOND))
    for _ in range(2):
        clock.advance(SECOND)
        assert await backend.next_due(["notes"]) == timedelta(0)
    await backend.promote(["notes"], limit=10)
    assert await backend.next_due(["notes"]) is None


async def test_pending_and_claimed_jobs_are_not_due_once_more(backend: Backend) -> None:
    assert await backend.next_due(["notes"]) is None
    await claimed(backend)
    await enqueue(backend, new_job())
    assert await backend.next_due(["notes"]) is None
    assert await backend.next_due([]) is None


async def test_a_retry_is_due_when_its_wait_is_over(backend: Backend, clock: ManualClock) -> None:
    job = await claimed(backend)
    clock.advance(SECOND)
    await backend.settle([Retried(job.claim, failure(), timedelta(seconds=30))])
    assert await backend.next_due(["notes"]) == timedelta(seconds=30)


async def test_a_type_that_is_named_twice_counts_once(backend: Backend) -> None:
    await backend.enqueue_many([new_job() for _ in range(3)])
    assert len(await claim(backend, new_worker(), 2, job_types=["Note", "Note"])) == 2
