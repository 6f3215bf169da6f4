"""Dead letters: what parking writes, one for each logical job, and when a success clears it."""

from collections.abc import AsyncGenerator, Sequence
from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace
from sqlalchemy.ext.asyncio import AsyncEngine

from queue_core.backend import Backend
from queue_core.errors import JobRefused
from queue_core.model import ClaimedJob, EnqueueStatus, Parked, Retried, Succeeded
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
    new_worker,
    one_of_each,
    opened_backend,
)

SECOND = timedelta(seconds=1)
OUTCOMES = one_of_each()


def letters(database: Database, columns: str = "identity") -> list[tuple[Any, ...]]:
    return database.query(f"SELECT {columns} FROM queue_dead_jobs ORDER BY id")


async def parked(backend: Backend, reason: str = "gave up", **changes: Any) -> ClaimedJob:
    """A new job that fails at once and for good."""
    job = await claimed(backend, **changes)
    assert await backend.settle([Parked(job.claim, failure(reason), reason)]) == {job.claim.job_id}
    return job


def keyed(key: str = "k", job_type: str = "Note") -> dict[str, Any]:
    """A key, as the front makes it unique among the jobs of its type."""
    return {"job_type": job_type, "key": key, "unique_key": f'["type","{job_type}","{key}"]'}


# Parking


async def test_a_parked_job_is_a_dead_letter_with_all_that_it_had(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    created_at = clock.now()
    job = await claimed(
        backend,
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
        run_at=created_at - SECOND,
    )
    clock.advance(SECOND)
    told = failure("no paper", kind="PrinterError")
    assert await backend.settle([Parked(job.claim, told, "no attempts left", "the night shift")]) == {job.claim.job_id}
    assert database.count() == 0
    (row,) = letters(
        database,
        "identity, job_id, queue, job_type, priority, max_attempts, timeout, backoff, key, tenant, context, headers,"
        " payload, reason, parked_by, failure_count, error_kind",
    )
    assert row == (
        *('["type","Report","k"]', job.claim.job_id, "slow", "Report", -7, 3, 30_000_001),
        *('{"policy":"fixed","wait":1.0}', "k", "acme", "asked for by ada", '{"trace":"1"}'),
        *('{"a":"\\u0000é😀"}', "no attempts left", "the night shift", 1, "PrinterError"),
    )
    ((error, errors),) = letters(database, "error, errors")
    assert (list(failures(error)), list(failures(errors))) == ([told], [told])
    (times,) = letters(database, "created_at, run_at, failed_at")
    assert [moment(time) for time in times] == [created_at, created_at - SECOND, created_at + SECOND]
    assert letters(database, "requeued_count, requeued_at, requeued_job_id, notes") == [(0, None, None, None)]


async def test_a_worker_is_who_parks_a_job_unless_it_says_otherwise(backend: Backend, database: Database) -> None:
    await parked(backend)
    assert letters(database, "parked_by") == [("worker",)]


async def test_what_a_job_does_not_have_its_dead_letter_has_not_either(backend: Backend, database: Database) -> None:
    await parked(backend)
    assert letters(database, "timeout, backoff, key, tenant, context, headers") == [(None,) * 6]


async def test_a_dead_letter_of_a_job_without_a_key_goes_by_its_request(backend: Backend, database: Database) -> None:
    jobs = [new_job(), new_job()]
    await enqueue(backend, *jobs)
    taken = await claim(backend, new_worker(), 2)
    await backend.settle([Parked(job.claim, failure(), "gave up") for job in taken])
    assert sorted(letters(database)) == sorted((f'["request","{job.request_id}"]',) for job in jobs)


async def test_a_dead_letter_has_the_failures_of_every_attempt(backend: Backend, database: Database) -> None:
    job = await claimed(backend)
    for number in (1, 2):
        await backend.settle([Retried(job.claim, failure(f"failure {number}"), timedelta(0))])
        job = await claim_again(backend, job.claim.job_id)
    await backend.settle([Parked(job.claim, failure("the last", kind="LastError"), "gave up")])
    ((count, kind, error, errors),) = letters(database, "failure_count, error_kind, error, errors")
    assert (count, kind) == (3, "LastError")
    assert [found.message for found in failures(error)] == ["the last"]
    assert [found.message for found in failures(errors)] == ["failure 1", "failure 2", "the last"]


async def test_a_dead_letter_keeps_at_most_ten_failures(backend: Backend, database: Database) -> None:
    job = await claimed(backend, max_attempts=100)
    for number in range(1, 12):
        await backend.settle([Retried(job.claim, failure(f"failure {number}"), timedelta(0))])
        job = await claim_again(backend, job.claim.job_id)
    await backend.settle([Parked(job.claim, failure("failure 12"), "gave up")])
    ((count, errors),) = letters(database, "failure_count, errors")
    assert count == 12
    assert [found.message for found in failures(errors)] == [f"failure {number}" for number in range(3, 13)]


async def test_a_parked_job_leaves_its_key_to_others_and_is_counted_as_dead(backend: Backend) -> None:
    await parked(backend, key="k", unique_key="k")
    counts = (await backend.counts())["notes"]
    assert (counts.pending, counts.claimed, counts.dead) == (0, 0, 1)
    (answer,) = await backend.enqueue_many([new_job(key="k", unique_key="k")])
    assert answer.status is EnqueueStatus.INSERTED


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("", ""),
        ("a\x00b", "a\\x00b"),
        ("a\ud800b", "a\\ud800b"),
        ("\u202e\u2028é😀\n'; --", "\u202e\u2028é😀\n'; --"),
    ],
    ids=["empty", "nul", "surrogate", "unicode"],
)
async def test_whatever_the_reason_and_the_kind_say_is_stored(
    backend: Backend, database: Database, said: str, kept: str
) -> None:
    job = await claimed(backend)
    told = replace(failure(said, kind=said), traceback=said, causes=[said])
    assert await backend.settle([Parked(job.claim, told, said, said)]) == {job.claim.job_id}
    assert letters(database, "reason, parked_by, error_kind") == [(kept, kept, kept)]
    ((error, errors),) = letters(database, "error, errors")
    for (found,) in (failures(error), failures(errors)):
        assert (found.kind, found.message, found.traceback, list(found.causes)) == (kept, kept, kept, [kept])


async def test_a_dead_letter_of_megabytes_is_cut_to_size(backend: Backend, database: Database) -> None:
    job = await claimed(backend)
    long = "x" * 3_000_000
    told = replace(failure(long), traceback=long)
    assert await backend.settle([Parked(job.claim, told, long)]) == {job.claim.job_id}
    ((error,),) = letters(database, "error")
    (found,) = failures(error)
    assert (len(found.message), len(found.traceback)) == (8_192, 32_768)


# One for each logical job


async def test_a_key_that_dies_again_has_one_dead_letter_with_the_newest_of_everything(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    await parked(backend, "first", **keyed(), payload="1", priority=1, tenant="a", context="c", headers='{"h":"1"}')
    before = letters(database, "id")
    clock.advance(SECOND)
    created_at = clock.now()
    job = await claimed(
        backend, **keyed(), queue="slow", payload="2", max_attempts=9, timeout=SECOND, backoff="b", tenant="b"
    )
    await backend.settle([Retried(job.claim, failure("once more"), timedelta(0))])
    (job,) = await claim(backend, new_worker(), queue="slow")
    clock.advance(SECOND)
    await backend.settle([Parked(job.claim, failure("second", kind="NewError"), "second", "reaper")])
    assert letters(database, "id") == before
    assert letters(
        database,
        "job_id, queue, priority, max_attempts, timeout, backoff, tenant, context, headers, payload,"
        " reason, parked_by, error_kind",
    ) == [
        (
            *(job.claim.job_id, "slow", 0, 9, 1_000_000, "b", "b", None, None, "2"),
            *("second", "reaper", "NewError"),
        )
    ]
    ((count, error, errors),) = letters(database, "failure_count, error, errors")
    assert count == 3
    assert [found.message for found in failures(error)] == ["second"]
    assert [found.message for found in failures(errors)] == ["once more", "second"]
    (times,) = letters(database, "created_at, run_at, failed_at")
    assert [moment(time) for time in times] == [created_at, created_at, created_at + SECOND]


async def test_a_dead_letter_that_dies_again_keeps_its_notes_and_how_often_it_was_requeued(
    backend: Backend, database: Database
) -> None:
    await parked(backend, **keyed())
    database.query(
        "UPDATE queue_dead_jobs SET requeued_count = 2, requeued_at = failed_at, requeued_job_id = 7, notes = 'ask ada'"
    )
    (before,) = letters(database, "requeued_count, requeued_at, notes")
    await parked(backend, **keyed())
    assert letters(database, "requeued_count, requeued_at, notes, requeued_job_id") == [(*before, None)]


async def test_a_requeued_job_without_a_key_of_its_own_comes_back_to_its_dead_letter(
    backend: Backend, database: Database
) -> None:
    await parked(backend)
    ((identity,),) = letters(database)
    await parked(backend, unique_key=identity)
    assert letters(database, "identity, failure_count") == [(identity, 2)]
    job = await claimed(backend, unique_key=identity)
    await backend.settle([Succeeded(job.claim)])
    assert letters(database) == []


async def test_each_job_of_a_batch_gets_a_dead_letter_of_its_own(backend: Backend, database: Database) -> None:
    await parked(backend, **keyed("0"))
    await enqueue(backend, *(new_job(**keyed(str(number)), payload=str(number)) for number in range(30)))
    jobs = await claim(backend, new_worker(), 30)
    await backend.settle([Parked(job.claim, failure(job.payload), f"reason {job.payload}") for job in reversed(jobs)])
    rows = letters(database, "identity, payload, reason, failure_count, error")
    assert sorted((identity, payload, reason, count) for identity, payload, reason, count, _ in rows) == sorted(
        (f'["type","Note","{number}"]', f"{number}", f"reason {number}", 1 if number else 2) for number in range(30)
    )
    assert all([found.message for found in failures(row[-1])] == [row[1]] for row in rows)


# Clearing


async def settled_after_a_death(backend: Backend, outcome: str) -> None:
    """A job that once was parked, enqueued again with the same key, with that outcome."""
    await parked(backend, **keyed())
    job = await claimed(backend, **keyed())
    assert await backend.settle([OUTCOMES[outcome](job.claim)]) == {job.claim.job_id}


async def test_a_success_clears_the_dead_letter_of_its_key(backend: Backend, database: Database) -> None:
    await settled_after_a_death(backend, "succeeded")
    assert letters(database) == []


@pytest.mark.parametrize("outcome", ["retried", "snoozed", "cancelled", "released"])
async def test_anything_but_a_success_leaves_the_dead_letter_of_its_key(
    backend: Backend, database: Database, outcome: str
) -> None:
    job = await claimed(backend, **keyed())
    await backend.settle([Parked(job.claim, failure(), "gave up")])
    before = letters(database, "*")
    job = await claimed(backend, **keyed())
    assert await backend.settle([OUTCOMES[outcome](job.claim)]) == {job.claim.job_id}
    assert letters(database, "*") == before


async def test_a_success_leaves_the_same_key_of_another_type(backend: Backend, database: Database) -> None:
    await parked(backend, **keyed("k", "Note"))
    job = await claimed(backend, **keyed("k", "Other"))
    await backend.settle([Succeeded(job.claim)])
    assert letters(database, "job_type, key") == [("Note", "k")]


async def test_a_success_without_a_key_clears_nothing(backend: Backend, database: Database) -> None:
    await parked(backend)
    await parked(backend, **keyed())
    job = await claimed(backend)
    await backend.settle([Succeeded(job.claim)])
    assert len(letters(database)) == 2


async def test_one_batch_may_park_some_and_clear_others(
    engine: AsyncEngine, clock: ManualClock, database: Database
) -> None:
    spy = Spy(engine)
    async with opened_backend(engine, clock) as backend:
        for key in ("cleared", "dies again", "untouched"):
            await parked(backend, **keyed(key))
        await enqueue(backend, *(new_job(**keyed(key)) for key in ("cleared", "dies again", "new")))
        jobs = {job.key: job.claim for job in await claim(backend, new_worker(), 3)}
        spy.reset()
        await backend.settle(
            [
                Parked(jobs["dies again"], failure(), "again"),
                Succeeded(jobs["cleared"]),
                Parked(jobs["new"], failure(), "new"),
            ]
        )
        assert spy.commits == 1
    assert letters(database, "key, failure_count, reason") == [
        ("dies again", 2, "again"),
        ("untouched", 1, "gave up"),
        ("new", 1, "new"),
    ]


# In one transaction


@pytest.fixture
async def refusing_dead_13(backend: Backend, database: Database) -> AsyncGenerator[None]:
    """A rule that the application added to our table: no dead letters of tenant 13."""
    del backend  # the tables are there
    if database.kind == "sqlite":
        condition, action = "WHEN new.tenant = '13'", "BEGIN SELECT RAISE(ABORT, 'no 13 here'); END"
        refuse = f"CREATE TRIGGER no_dead_13 BEFORE INSERT ON queue_dead_jobs {condition} {action}"
        allow = "DROP TRIGGER no_dead_13"
    else:
        refuse = "ALTER TABLE queue_dead_jobs ADD CONSTRAINT no_dead_13 CHECK (tenant <> '13')"
        allow = "ALTER TABLE queue_dead_jobs DROP CONSTRAINT no_dead_13"
    database.query(refuse)
    yield
    database.query(allow)


async def batch_with_13(backend: Backend) -> Sequence[ClaimedJob]:
    """A claimed job for each outcome; the one to be parked is of the tenant that is refused."""
    tenants = ["13" if name == "parked" else "1" for name in OUTCOMES]
    await enqueue(backend, *(new_job(tenant=tenant) for tenant in tenants))
    return await claim(backend, new_worker(), len(tenants))


async def test_a_job_whose_dead_letter_is_refused_stays_claimed_as_it_was(
    backend: Backend, database: Database, refusing_dead_13: None
) -> None:
    job = await claimed(backend, tenant="13")
    before = everything(database)
    with pytest.raises(JobRefused):
        await backend.settle([Parked(job.claim, failure(), "gave up")])
    assert everything(database) == before


async def test_a_batch_with_a_dead_letter_that_is_refused_changes_nothing(
    backend: Backend, database: Database, refusing_dead_13: None
) -> None:
    jobs = await batch_with_13(backend)
    before = everything(database)
    with pytest.raises(JobRefused):
        await backend.settle([make(job.claim) for make, job in zip(OUTCOMES.values(), jobs, strict=True)])
    assert everything(database) == before


async def test_after_a_refusal_the_others_can_be_settled_without_it(
    backend: Backend, database: Database, refusing_dead_13: None
) -> None:
    jobs = await batch_with_13(backend)
    outcomes = [make(job.claim) for make, job in zip(OUTCOMES.values(), jobs, strict=True)]
    with pytest.raises(JobRefused):
        await backend.settle(outcomes)
    others = [outcome for outcome in outcomes if not isinstance(outcome, Parked)]
    assert await backend.settle(others) == {outcome.claim.job_id for outcome in others}
    assert database.query("SELECT tenant FROM queue_jobs WHERE status = 'claimed'") == [("13",)]
