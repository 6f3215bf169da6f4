"""Settling: what becomes of a job, of its errors and of its place in line; and a running job's time limit."""

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import timedelta
from itertools import permutations
from typing import Any

import pytest
from msgspec.structs import replace
from sqlalchemy.ext.asyncio import AsyncEngine

from queue_core.backend import Backend
from queue_core.model import (
    Cancelled,
    Claim,
    ClaimedJob,
    EnqueueStatus,
    Failure,
    JobId,
    JobStatus,
    Outcome,
    Parked,
    Released,
    Retried,
    Snoozed,
    Succeeded,
    Wakeup,
)
from tests.support.clock import ManualClock
from tests.support.databases import Database
from tests.support.jobs import new_job
from tests.support.spy import Spy
from tests.support.store import (
    claim,
    claim_again,
    claimed,
    enqueue,
    everything,
    failure,
    failures,
    moment,
    new_token,
    new_worker,
    one_of_each,
    opened_backend,
    stored,
)

SECOND = timedelta(seconds=1)
AT_ONCE = one_of_each()
LATER = one_of_each(now=False)
GOES_AGAIN = ("retried", "snoozed", "released")


def errors_of(database: Database, job_id: JobId) -> list[Failure]:
    ((errors,),) = database.query("SELECT errors FROM queue_jobs WHERE id = ?", job_id)
    return list(failures(errors))


# Each outcome


@pytest.mark.parametrize("outcome", ["succeeded", "cancelled"])
async def test_a_job_that_ended_is_gone_and_leaves_nothing(backend: Backend, database: Database, outcome: str) -> None:
    job = await claimed(backend)
    assert await backend.settle([AT_ONCE[outcome](job.claim)]) == {job.claim.job_id}
    assert {table: len(rows) for table, rows in everything(database).items()} == {
        "queue_jobs": 0,
        "queue_dead_jobs": 0,
        "queue_history": 0,
    }


async def test_a_retried_job_is_scheduled_with_its_attempt_and_its_failure(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    (job_id,) = await enqueue(backend, new_job(timeout=SECOND, key="k", unique_key="k", tenant="t", priority=3))
    before = await stored(backend, job_id)
    (job,) = await claim(backend, new_worker())
    clock.advance(SECOND)
    wait = timedelta(seconds=30, microseconds=7)
    assert await backend.settle([Retried(job.claim, failure("no paper"), wait)]) == {job_id}
    assert await stored(backend, job_id) == replace(
        before, status=JobStatus.SCHEDULED, attempt=1, available_at=clock.now() + wait
    )
    assert errors_of(database, job_id) == [failure("no paper")]


async def test_a_snoozed_job_is_scheduled_and_gets_its_attempt_back(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    (job_id,) = await enqueue(backend, new_job(timeout=SECOND))
    before = await stored(backend, job_id)
    (job,) = await claim(backend, new_worker())
    clock.advance(SECOND)
    assert await backend.settle([Snoozed(job.claim, timedelta(minutes=5))]) == {job_id}
    assert await stored(backend, job_id) == replace(
        before, status=JobStatus.SCHEDULED, available_at=clock.now() + timedelta(minutes=5)
    )
    assert errors_of(database, job_id) == []


async def test_a_released_job_is_as_it_was_before_its_claim(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    (job_id,) = await enqueue(backend, new_job(timeout=SECOND))
    before = database.jobs("*")
    (job,) = await claim(backend, new_worker())
    clock.advance(SECOND)
    assert await backend.settle([Released(job.claim)]) == {job_id}
    assert database.jobs("*") == before


async def test_a_released_job_keeps_its_place_in_line(backend: Backend, clock: ManualClock) -> None:
    first, second = await enqueue(backend, new_job(), new_job())
    (job,) = await claim(backend, new_worker())
    clock.advance(SECOND)
    await backend.settle([Released(job.claim)])
    assert [job.claim.job_id for job in await claim(backend, new_worker(), 2)] == [first, second]


@pytest.mark.parametrize("outcome", ["retried", "snoozed"])
async def test_a_job_that_goes_again_at_once_is_pending_at_the_end_of_the_line(
    backend: Backend, clock: ManualClock, outcome: str
) -> None:
    first, second = await enqueue(backend, new_job(), new_job())
    (job,) = await claim(backend, new_worker())
    clock.advance(SECOND)
    await backend.settle([AT_ONCE[outcome](job.claim)])
    again = await stored(backend, first)
    assert (again.status, again.available_at) == (JobStatus.PENDING, clock.now())
    assert [job.claim.job_id for job in await claim(backend, new_worker(), 2)] == [second, first]


@pytest.mark.parametrize("outcome", GOES_AGAIN)
async def test_a_job_that_goes_again_belongs_to_nobody(backend: Backend, database: Database, outcome: str) -> None:
    job = await claimed(backend, timeout=SECOND)
    await backend.settle([LATER[outcome](job.claim)])
    assert database.jobs("worker_id, claim_token, claimed_at, deadline_at") == [(None, None, None, None)]


@pytest.mark.parametrize(("outcome", "attempt"), [("retried", 3), ("snoozed", 2), ("released", 2)])
async def test_crashes_and_earlier_failures_stay_with_a_job_that_goes_again(
    backend: Backend, database: Database, outcome: str, attempt: int
) -> None:
    job = await claimed(backend)
    await backend.settle([Retried(job.claim, failure("the first"), timedelta(0))])
    database.query("UPDATE queue_jobs SET crashes = 1, attempt = 2")
    job = await claim_again(backend, job.claim.job_id)
    await backend.settle([LATER[outcome](job.claim)])
    again = await stored(backend, job.claim.job_id)
    assert (again.attempt, again.crashes) == (attempt, 1)
    assert errors_of(database, again.id)[0] == failure("the first")


async def test_no_number_of_snoozes_uses_up_an_attempt(backend: Backend) -> None:
    job = await claimed(backend, max_attempts=1)
    for _ in range(5):
        await backend.settle([Snoozed(job.claim, timedelta(0))])
        job = await claim_again(backend, job.claim.job_id)
        assert job.attempt == 1


@pytest.mark.parametrize("outcome", AT_ONCE)
async def test_a_key_is_free_when_its_job_has_ended_and_held_while_it_goes_again(
    backend: Backend, outcome: str
) -> None:
    job = await claimed(backend, key="k", unique_key="k")
    await backend.settle([LATER[outcome](job.claim)])
    (answer,) = await backend.enqueue_many([new_job(key="k", unique_key="k")])
    assert answer.status is (EnqueueStatus.DUPLICATE if outcome in GOES_AGAIN else EnqueueStatus.INSERTED)


# Called off meanwhile


@pytest.mark.parametrize("outcome", GOES_AGAIN)
async def test_a_job_that_was_called_off_meanwhile_is_pending_at_once_for_a_claim_to_end_it(
    backend: Backend, clock: ManualClock, outcome: str
) -> None:
    job = await claimed(backend)
    await backend.cancel(job.claim.job_id)
    assert await backend.settle([LATER[outcome](job.claim)]) == {job.claim.job_id}
    again = await stored(backend, job.claim.job_id)
    assert again.status is JobStatus.PENDING
    assert again.available_at <= clock.now()
    answer = await backend.claim(new_worker(), new_token(), {"notes": 1}, ["Note"])
    assert (len(answer.jobs), answer.ended) == (0, 1)
    assert await backend.get(job.claim.job_id) is None


@pytest.mark.parametrize(("outcome", "dead"), [("succeeded", 0), ("cancelled", 0), ("parked", 1)])
async def test_a_job_that_ended_before_it_could_be_stopped_has_ended_as_it_says(
    backend: Backend, database: Database, outcome: str, dead: int
) -> None:
    job = await claimed(backend)
    await backend.cancel(job.claim.job_id)
    assert await backend.settle([AT_ONCE[outcome](job.claim)]) == {job.claim.job_id}
    assert (database.count(), database.count("queue_dead_jobs")) == (0, dead)


# Batches


async def claimed_for(backend: Backend, outcomes: Any) -> dict[str, ClaimedJob]:
    """A claimed job for each of the names, all under one token."""
    await enqueue(backend, *(new_job() for _ in outcomes))
    jobs = await claim(backend, new_worker(), len(outcomes))
    return dict(zip(outcomes, jobs, strict=True))


async def test_a_mixed_batch_is_one_commit(engine: AsyncEngine, clock: ManualClock, database: Database) -> None:
    spy = Spy(engine)
    async with opened_backend(engine, clock) as backend:
        jobs = await claimed_for(backend, LATER)
        spy.reset()
        settled = await backend.settle([LATER[name](job.claim) for name, job in jobs.items()])
        assert spy.commits == 1
    assert settled == {job.claim.job_id for job in jobs.values()}
    left = {name: jobs[name].claim.job_id for name in GOES_AGAIN}
    assert database.jobs("id, status, attempt") == [
        (left["retried"], "scheduled", 1),
        (left["snoozed"], "scheduled", 0),
        (left["released"], "pending", 0),
    ]
    assert database.query("SELECT job_id FROM queue_dead_jobs") == [(jobs["parked"].claim.job_id,)]


@pytest.mark.parametrize("outcome", AT_ONCE)
async def test_a_batch_of_one_is_one_commit(engine: AsyncEngine, clock: ManualClock, outcome: str) -> None:
    spy = Spy(engine)
    async with opened_backend(engine, clock, history=True) as backend:
        job = await claimed(backend, key="k", unique_key="k")
        spy.reset()
        assert await backend.settle([LATER[outcome](job.claim)]) == {job.claim.job_id}
        assert spy.commits == 1


async def test_a_large_mixed_batch_is_settled_as_a_whole(
    engine: AsyncEngine, clock: ManualClock, database: Database
) -> None:
    spy = Spy(engine)
    names = [*LATER] * 200
    async with opened_backend(engine, clock) as backend:
        await enqueue(backend, *(new_job(queue=f"q{place % 3}") for place in range(len(names))))
        wanted = {f"q{place}": len(names) for place in range(3)}
        jobs = (await backend.claim(new_worker(), new_token(), wanted, ["Note"])).jobs
        spy.reset()
        settled = await backend.settle([LATER[name](job.claim) for name, job in zip(names, jobs, strict=True)])
        assert spy.commits == 1
    assert settled == {job.claim.job_id for job in jobs}
    assert database.query("SELECT status, count(*) FROM queue_jobs GROUP BY status ORDER BY status") == [
        ("pending", 200),
        ("scheduled", 400),
    ]
    assert database.count("queue_dead_jobs") == 200


async def test_each_job_of_a_batch_gets_its_own_time_and_failure(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    jobs = await claimed_for(backend, [str(number) for number in range(20)])
    generator = random.Random(20261118)
    order = generator.sample(sorted(jobs), len(jobs))
    await backend.settle(
        [Retried(jobs[name].claim, failure(name, attempt=int(name)), int(name) * SECOND) for name in order]
    )
    for name, job in jobs.items():
        again = await stored(backend, job.claim.job_id)
        assert again.available_at == clock.now() + int(name) * SECOND
        assert errors_of(database, again.id) == [failure(name, attempt=int(name))]


async def test_a_batch_of_nothing_sends_nothing(engine: AsyncEngine, clock: ManualClock) -> None:
    spy = Spy(engine)
    async with opened_backend(engine, clock) as backend:
        await claimed(backend)
        spy.reset()
        assert await backend.settle([]) == frozenset()
        assert await backend.extend([], SECOND) == frozenset()
        assert spy.statements == []


@pytest.mark.parametrize("outcome", AT_ONCE)
async def test_an_outcome_that_comes_twice_in_a_batch_counts_once(
    engine: AsyncEngine, clock: ManualClock, database: Database, outcome: str
) -> None:
    async with opened_backend(engine, clock, history=True) as backend:
        jobs = await claimed_for(backend, ["once", "twice"])
        once, twice = (LATER[outcome](job.claim) for job in jobs.values())
        assert await backend.settle([once]) == {jobs["once"].claim.job_id}
        assert await backend.settle([twice, twice]) == {jobs["twice"].claim.job_id}
    for table, columns in (
        ("queue_jobs", "status, attempt, errors"),
        ("queue_dead_jobs", "failure_count, errors"),
        ("queue_history", "status, result, reason"),
    ):
        rows = database.query(f"SELECT {columns} FROM {table} ORDER BY id")
        assert rows[1:] == rows[:1], table


async def test_of_two_outcomes_for_one_claim_the_first_counts(
    engine: AsyncEngine, clock: ManualClock, database: Database
) -> None:
    async with opened_backend(engine, clock, history=True) as backend:

        async def settled(*names: str) -> list[list[tuple[Any, ...]]]:
            """What there is of a new job in each table, after these outcomes in one batch."""
            job = await claimed(backend, queue=" ".join(names))
            job_id = job.claim.job_id
            assert await backend.settle([LATER[name](job.claim) for name in names]) == {job_id}
            return [
                database.query("SELECT status, attempt, errors FROM queue_jobs WHERE id = ?", job_id),
                database.query("SELECT failure_count, errors FROM queue_dead_jobs WHERE job_id = ?", job_id),
                database.query("SELECT status, result, reason FROM queue_history WHERE job_id = ?", job_id),
            ]

        alone = {name: await settled(name) for name in LATER}
        for first, second in permutations(LATER, 2):
            assert await settled(first, second) == alone[first], f"{first}, then {second}"


# Failures


async def test_failures_are_kept_in_their_order_and_at_most_ten(backend: Backend, database: Database) -> None:
    job = await claimed(backend, max_attempts=100)
    for number in range(1, 13):
        await backend.settle([Retried(job.claim, failure(f"failure {number}", attempt=number), timedelta(0))])
        messages = [found.message for found in errors_of(database, job.claim.job_id)]
        assert messages == [f"failure {kept}" for kept in range(max(1, number - 9), number + 1)]
        job = await claim_again(backend, job.claim.job_id)


async def test_a_failure_is_kept_with_all_it_says(backend: Backend, clock: ManualClock, database: Database) -> None:
    full = Failure(
        attempt=7,
        kind="orders.PaymentError",
        message="no money\nnot a cent",
        traceback="Traceback (most recent call last):\n  …",
        causes=("KeyError: 'a'", "OSError: away"),
        failed_at=clock.now() + timedelta(microseconds=7),
    )
    job = await claimed(backend)
    await backend.settle([Retried(job.claim, full, SECOND)])
    assert errors_of(database, job.claim.job_id) == [full]


TEXTS = {
    "empty": ("", ""),
    "lines": ("a\nb\r\nc\u2028d\u2029e\x85f", "a\nb\r\nc\u2028d\u2029e\x85f"),
    "unicode": ("\u202eé😀", "\u202eé😀"),
    "control": ("\x01\x1b[31m\x7f", "\x01\x1b[31m\x7f"),
    "json": ('"}\n{"attempt":', '"}\n{"attempt":'),
    "placeholders": ("%s ? :name $1 '; DROP TABLE queue_jobs; --", "%s ? :name $1 '; DROP TABLE queue_jobs; --"),
    "backslashes": ("\\u0000 \\x00 \\", "\\u0000 \\x00 \\"),
    "nul": ("a\x00b", "a\\x00b"),
    "surrogate": ("a\ud800b\udfff", "a\\ud800b\\udfff"),
}


@pytest.mark.parametrize("text", TEXTS)
async def test_whatever_a_failure_says_is_stored(backend: Backend, database: Database, text: str) -> None:
    said, kept = TEXTS[text]
    told = replace(failure(said, kind=said), traceback=said, causes=(said, said))
    job = await claimed(backend)
    assert await backend.settle([Retried(job.claim, told, timedelta(0))]) == {job.claim.job_id}
    job = await claim_again(backend, job.claim.job_id)
    assert await backend.settle([Retried(job.claim, told, timedelta(0))]) == {job.claim.job_id}
    for found in errors_of(database, job.claim.job_id):
        assert (found.message, found.traceback, list(found.causes), found.kind) == (kept, kept, [kept, kept], kept)


async def test_a_failure_of_megabytes_is_cut_to_size_and_keeps_its_last_lines(
    backend: Backend, database: Database
) -> None:
    told = replace(failure("m" * 3_000_000), traceback="t" * 3_000_000 + "\nValueError: the end")
    job = await claimed(backend)
    assert await backend.settle([Retried(job.claim, told, SECOND)]) == {job.claim.job_id}
    (found,) = errors_of(database, job.claim.job_id)
    assert (len(found.message), len(found.traceback)) == (8_192, 32_768)
    assert found.traceback.endswith("ttt\nValueError: the end")


@pytest.mark.parametrize("character", ["\x00", "\ud800", "😀", "\\", "\n"])
async def test_a_failure_is_cut_to_size_whatever_it_takes_to_spell_it(
    backend: Backend, database: Database, character: str
) -> None:
    text, longest_escape = character * 100_000, len("\\ud800")
    told = replace(failure(text, kind=text), traceback=text, causes=[text] * 100)
    job = await claimed(backend)
    assert await backend.settle([Retried(job.claim, told, SECOND)]) == {job.claim.job_id}
    (found,) = errors_of(database, job.claim.job_id)
    assert 8_192 <= len(found.message) <= 8_192 * longest_escape
    assert 32_768 <= len(found.traceback) <= 32_768 * longest_escape


async def test_any_text_at_all_can_be_settled(engine: AsyncEngine, clock: ManualClock, database: Database) -> None:
    generator = random.Random(20261118)
    alphabet = ["\x00", "\ud800", "\udc00", "\uffff", "\U0010ffff", "\\", '"', "'", "\n", "\r", "\u2028", "a", "%", "$"]

    def text() -> str:
        return "".join(generator.choices(alphabet, k=generator.randrange(12)))

    async with opened_backend(engine, clock, history=True) as backend:
        jobs = await claimed_for(backend, [str(number) for number in range(150)])
        outcomes: list[Any] = []
        for number, job in enumerate(jobs.values()):
            told = Failure(
                attempt=1,
                kind=text(),
                message=text(),
                traceback=text(),
                causes=[text(), text()],
                failed_at=clock.now(),
            )
            outcomes.append(
                [
                    Retried(job.claim, told, timedelta(0)),
                    Parked(job.claim, told, text(), text()),
                    Cancelled(job.claim, text()),
                ][number % 3]
            )
        assert await backend.settle(outcomes) == {job.claim.job_id for job in jobs.values()}
    assert [database.count(table) for table in ("queue_jobs", "queue_dead_jobs", "queue_history")] == [50, 50, 50]
    assert all(len(failures(errors)) == 1 for (errors,) in database.jobs("errors"))


@pytest.mark.parametrize("result", ["", "not JSON", "é😀\u2028", "a\x00b", "a\ud800b", "x" * 3_000_000])
@pytest.mark.parametrize("history", [False, True], ids=["forgotten", "kept"])
async def test_whatever_a_result_says_the_success_is_settled(
    engine: AsyncEngine, clock: ManualClock, database: Database, result: str, history: bool
) -> None:
    async with opened_backend(engine, clock, history=history) as backend:
        jobs = await claimed_for(backend, ["this one", "its neighbour"])
        settled = await backend.settle([Succeeded(job.claim, result) for job in jobs.values()])
        assert settled == {job.claim.job_id for job in jobs.values()}
    assert (database.count(), database.count("queue_history")) == (0, 2 if history else 0)


# History


async def test_without_a_history_nothing_is_kept(backend: Backend, database: Database) -> None:
    jobs = await claimed_for(backend, LATER)
    await backend.settle([LATER[name](job.claim) for name, job in jobs.items()])
    assert database.count("queue_history") == 0


async def test_a_history_keeps_what_has_ended_and_how(
    engine: AsyncEngine, clock: ManualClock, database: Database
) -> None:
    async with opened_backend(engine, clock, history=True) as backend:
        jobs = await claimed_for(backend, LATER)
        await backend.settle([LATER[name](job.claim) for name, job in jobs.items()])
    assert database.query("SELECT job_id, status, result, reason FROM queue_history ORDER BY job_id") == [
        (jobs["succeeded"].claim.job_id, "succeeded", '"done"', None),
        (jobs["cancelled"].claim.job_id, "cancelled", None, "called off"),
    ]


async def test_a_history_keeps_all_of_a_job(engine: AsyncEngine, clock: ManualClock, database: Database) -> None:
    created_at, worker = clock.now(), new_worker()
    async with opened_backend(engine, clock, history=True) as backend:
        job = await claimed(
            backend,
            worker,
            queue="slow",
            job_type="Report",
            payload="[1]",
            priority=-7,
            max_attempts=3,
            key="k",
            unique_key="the key of all",
            tenant="acme",
            context="asked for by ada",
            headers='{"trace":"1"}',
        )
        clock.advance(SECOND)
        await backend.settle([Retried(job.claim, failure("once"), timedelta(0))])
        (job,) = await claim(backend, worker, queue="slow", job_types=["Report"])
        clock.advance(SECOND)
        await backend.settle([Succeeded(job.claim)])
    ((*copied, errors, worker_id),) = database.query(
        "SELECT job_id, status, queue, job_type, priority, attempt, max_attempts, key, tenant, context, headers,"
        " payload, result, reason, errors, worker_id FROM queue_history"
    )
    assert copied == [
        *(job.claim.job_id, "succeeded", "slow", "Report", -7, 2, 3, "k", "acme"),
        *("asked for by ada", '{"trace":"1"}', "[1]", None, None),
    ]
    assert [found.message for found in failures(errors)] == ["once"]
    assert str(worker_id) == worker.id
    (times,) = database.query("SELECT created_at, available_at, claimed_at, finished_at FROM queue_history")
    assert [moment(time) for time in times] == [
        *(created_at, created_at + SECOND, created_at + SECOND, created_at + 2 * SECOND)
    ]


async def test_a_history_of_some_queues_keeps_only_theirs(
    engine: AsyncEngine, clock: ManualClock, database: Database
) -> None:
    async with opened_backend(engine, clock, history=["kept", "kept-too"]) as backend:
        jobs = [await claimed(backend, queue=queue) for queue in ("kept", "forgotten", "kept-too")]
        assert len(await backend.settle([Succeeded(job.claim) for job in jobs])) == 3
    assert database.query("SELECT queue FROM queue_history ORDER BY queue") == [("kept",), ("kept-too",)]


# Wake-ups


@pytest.fixture
async def quiet_backend(engine: AsyncEngine, clock: ManualClock) -> AsyncGenerator[Backend]:
    """One that does not listen to other processes: its hints are of its own doing."""
    async with opened_backend(engine, clock) as backend:
        yield backend


@asynccontextmanager
async def listening(backend: Backend) -> AsyncGenerator["asyncio.Task[Wakeup]"]:
    """A task that ends with the first wake-up of the queue "notes"."""
    async with backend.wakeups(["notes"]) as hints:

        async def first() -> Wakeup:
            return await anext(hints)

        task = asyncio.create_task(first())
        await asyncio.sleep(0)
        yield task
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("outcome", GOES_AGAIN)
async def test_a_job_that_goes_again_at_once_wakes_whoever_waits_for_its_queue(
    quiet_backend: Backend, outcome: str
) -> None:
    backend = quiet_backend
    mine, theirs = await claimed(backend), await claimed(backend, queue="other")
    async with listening(backend) as woken:
        await backend.settle([AT_ONCE[outcome](theirs.claim)])
        await asyncio.sleep(0)
        assert not woken.done()
        await backend.settle([AT_ONCE[outcome](mine.claim)])
        assert await asyncio.wait_for(woken, 10) == Wakeup("notes")


@pytest.mark.parametrize("outcome", ["retried", "snoozed"])
async def test_a_job_that_was_called_off_meanwhile_wakes_whoever_is_to_end_it(
    quiet_backend: Backend, outcome: str
) -> None:
    backend = quiet_backend
    job = await claimed(backend)
    await backend.cancel(job.claim.job_id)
    async with listening(backend) as woken:
        await backend.settle([LATER[outcome](job.claim)])
        assert await asyncio.wait_for(woken, 10) == Wakeup("notes")


@pytest.mark.parametrize("outcome", ["succeeded", "cancelled", "parked"])
async def test_a_job_that_ended_wakes_nobody(quiet_backend: Backend, outcome: str) -> None:
    backend = quiet_backend
    job = await claimed(backend)
    async with listening(backend) as woken:
        await backend.settle([AT_ONCE[outcome](job.claim)])
        await asyncio.sleep(0)
        assert not woken.done()


# The time limit


async def test_an_extended_job_ends_that_long_from_now(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    await enqueue(backend, new_job(timeout=30 * SECOND), new_job(), new_job(timeout=30 * SECOND))
    limited, unlimited, left = await claim(backend, new_worker(), 3)
    before = [await stored(backend, job.claim.job_id) for job in (limited, unlimited, left)]
    errors = database.jobs("claim_token, errors")
    clock.advance(20 * SECOND)
    more = timedelta(seconds=45, microseconds=7)
    assert await backend.extend([limited.claim, unlimited.claim], more) == {
        limited.claim.job_id,
        unlimited.claim.job_id,
    }
    until = clock.now() + more
    assert [await stored(backend, job.id) for job in before] == [
        replace(before[0], deadline_at=until),
        replace(before[1], deadline_at=until),
        before[2],
    ]
    assert database.jobs("claim_token, errors") == errors


async def test_a_time_limit_can_be_brought_nearer(backend: Backend, clock: ManualClock) -> None:
    job = await claimed(backend, timeout=timedelta(hours=1))
    await backend.extend([job.claim, job.claim], SECOND)
    assert (await stored(backend, job.claim.job_id)).deadline_at == clock.now() + SECOND


async def test_the_next_attempt_has_the_jobs_own_time_limit_again(backend: Backend, clock: ManualClock) -> None:
    job = await claimed(backend, timeout=30 * SECOND)
    await backend.extend([job.claim], timedelta(hours=1))
    await backend.settle([Released(job.claim)])
    again = await claim_again(backend, job.claim.job_id)
    assert (again.timeout, again.deadline_at) == (30 * SECOND, clock.now() + 30 * SECOND)


async def test_a_job_that_is_not_there_is_not_in_the_answer(backend: Backend) -> None:
    nowhere = Claim(JobId(4711), new_token())
    assert await backend.settle([make(nowhere) for make in AT_ONCE.values()]) == frozenset()
    assert await backend.extend([nowhere], SECOND) == frozenset()


@pytest.mark.parametrize("name", ["retried", "snoozed"])
async def test_a_wait_without_end_is_one_of_a_hundred_years(backend: Backend, clock: ManualClock, name: str) -> None:
    job = await claimed(backend)
    endless = timedelta.max
    outcome = Retried(job.claim, failure(), endless) if name == "retried" else Snoozed(job.claim, endless)
    assert await backend.settle([outcome]) == {job.claim.job_id}
    stored = await backend.get(job.claim.job_id)
    assert stored is not None
    assert stored.available_at == clock.now() + timedelta(days=36_500)


async def test_whoever_repeats_a_settle_is_told_that_it_was_done(backend: Backend) -> None:
    await backend.enqueue_many([new_job(), new_job()])
    done, again = await claim(backend, new_worker(), 2)
    outcomes: list[Outcome] = [Succeeded(done.claim), Released(again.claim)]
    ids = {done.claim.job_id, again.claim.job_id}
    assert await backend.settle(outcomes) == ids
    assert await backend.settle(outcomes) == frozenset()
    assert await backend.settle(outcomes, repeated=True) == ids


async def test_a_repeated_settle_of_a_job_that_is_plainly_still_there_is_not_done(backend: Backend) -> None:
    await backend.enqueue_many([new_job()])
    (first,) = await claim(backend, new_worker())
    await backend.settle([Released(first.claim)])
    await claim(backend, new_worker())
    assert await backend.settle([Succeeded(first.claim)], repeated=True) == frozenset()
