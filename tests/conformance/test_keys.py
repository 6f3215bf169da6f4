"""Unique keys: one live job for each, whoever comes first and however many come at once."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from queue_core import Queue
from queue_core.backend import Backend
from queue_core.model import Enqueued, EnqueueStatus, NewJob
from tests.support.clock import ManualClock
from tests.support.databases import Database
from tests.support.jobs import Note, Other, new_job
from tests.support.spy import Spy

INSERTED, DUPLICATE, REPLACED, RUNNING = EnqueueStatus


def keyed(key: str = "k", **changes: Any) -> NewJob:
    return new_job(key=key, unique_key=key, **changes)


def statuses(answers: "list[Enqueued] | tuple[Enqueued, ...] | Any") -> list[EnqueueStatus]:
    return [answer.status for answer in answers]


SCOPES: dict[str, dict[str, Any]] = {
    "type": {"key_scope": "type"},
    "tenant": {"key_scope": "tenant", "tenant": "acme"},
    "no tenant": {"key_scope": "tenant"},
    "queue": {"key_scope": "queue"},
}


@pytest.mark.parametrize("scope", SCOPES)
async def test_fifty_concurrent_enqueues_of_one_key_are_one_job(queue: Queue, database: Database, scope: str) -> None:
    answers = await asyncio.gather(*(queue.enqueue(Note(), key="k", **SCOPES[scope]) for _ in range(50)))
    assert statuses(answers).count(INSERTED) == 1
    assert statuses(answers).count(DUPLICATE) == 49
    assert database.jobs("id") == [(answers[0].job_id,)]
    assert {answer.job_id for answer in answers} == {answers[0].job_id}


@pytest.mark.parametrize("scope", SCOPES)
async def test_fifty_connections_enqueueing_one_key_at_once_make_one_job(database: Database, scope: str) -> None:
    """The same without a shared intake: ten queues with connections of their own, so that the index decides."""
    engines = [create_async_engine(database.url) for _ in range(10)]
    queues = [await Queue(engine, jobs=[Note]).open() for engine in engines]
    answers = await asyncio.gather(
        *(queue.enqueue_many([Note().with_delivery(key="k", **SCOPES[scope])]) for queue in queues for _ in range(5))
    )
    for queue, engine in zip(queues, engines, strict=True):
        await queue.close()
        await engine.dispose()
    assert [answer.status for (answer,) in answers].count(INSERTED) == 1
    assert [answer.status for (answer,) in answers].count(DUPLICATE) == 49
    assert len({answer.job_id for (answer,) in answers}) == 1
    assert database.count() == 1


async def test_a_scope_keeps_the_same_key_apart(queue: Queue, database: Database) -> None:
    async def enqueue(job: Note | Other, **delivery: Any) -> EnqueueStatus:
        return (await queue.enqueue(job, key="k", **delivery)).status

    assert await enqueue(Note()) is INSERTED
    assert await enqueue(Other()) is INSERTED
    assert await enqueue(Note(), key_scope="tenant") is INSERTED
    assert await enqueue(Note(), key_scope="tenant", tenant="a") is INSERTED
    assert await enqueue(Note(), key_scope="tenant", tenant="b") is INSERTED
    assert await enqueue(Note(), key_scope="queue") is INSERTED
    assert await enqueue(Note(), key_scope="queue", queue="other") is INSERTED
    assert database.count() == 7
    assert await enqueue(Note(), tenant="a", queue="other") is DUPLICATE
    assert await enqueue(Note(), key_scope="tenant", tenant="a", queue="other") is DUPLICATE
    assert await enqueue(Note(), key_scope="queue", tenant="a") is DUPLICATE
    assert database.count() == 7


async def test_without_a_key_every_enqueue_inserts(queue: Queue, database: Database) -> None:
    answers = await asyncio.gather(*(queue.enqueue(Note()) for _ in range(50)))
    assert statuses(answers) == [INSERTED] * 50
    assert database.count() == 50


async def test_a_running_job_still_holds_its_key(backend: Backend, database: Database) -> None:
    (first,) = await backend.enqueue_many([keyed()])
    database.query("UPDATE queue_jobs SET status = 'claimed'")
    (second,) = await backend.enqueue_many([keyed()])
    assert second == Enqueued(first.job_id, DUPLICATE)


async def test_a_finished_or_dead_job_does_not_hold_its_key(backend: Backend, database: Database) -> None:
    (first,) = await backend.enqueue_many([keyed()])
    database.query("DELETE FROM queue_jobs")
    (second,) = await backend.enqueue_many([keyed()])
    assert second.status is INSERTED
    assert second.job_id != first.job_id


async def test_an_id_is_not_given_out_twice(backend: Backend, database: Database) -> None:
    (first,) = await backend.enqueue_many([new_job()])
    database.query("DELETE FROM queue_jobs")
    (second,) = await backend.enqueue_many([new_job()])
    assert second.job_id > first.job_id


async def test_keep_leaves_the_waiting_job_as_it_is(backend: Backend, database: Database) -> None:
    await backend.enqueue_many([keyed(payload="1")])
    (answer,) = await backend.enqueue_many([keyed(payload="2", priority=9)])
    assert answer.status is DUPLICATE
    assert database.jobs("payload, priority") == [("1", 0)]


async def test_replace_changes_payload_time_and_options(
    backend: Backend, clock: ManualClock, database: Database
) -> None:
    (first,) = await backend.enqueue_many([keyed(payload="1", delay=timedelta(hours=1))])
    database.query("UPDATE queue_jobs SET attempt = 3, crashes = 1, errors = '[]'")
    clock.advance(timedelta(minutes=1))
    (answer,) = await backend.enqueue_many(
        [keyed(payload="2", key_mode="replace", priority=9, queue="other", max_attempts=2, context="why")]
    )
    assert answer == Enqueued(first.job_id, REPLACED)
    stored = await backend.get(first.job_id)
    assert stored is not None
    assert (stored.payload, stored.priority, stored.queue, stored.max_attempts) == ("2", 9, "other", 2)
    assert (stored.context, stored.status, stored.available_at) == ("why", "pending", clock.now())
    assert (stored.attempt, stored.crashes) == (0, 0)
    assert stored.created_at == clock.now() - timedelta(minutes=1)
    assert database.jobs("errors") == [(None,)]


async def test_preserve_run_at_changes_all_but_the_time(backend: Backend, clock: ManualClock) -> None:
    (first,) = await backend.enqueue_many([keyed(payload="1", delay=timedelta(hours=1))])
    (answer,) = await backend.enqueue_many([keyed(payload="2", key_mode="preserve_run_at", priority=9)])
    assert answer == Enqueued(first.job_id, REPLACED)
    stored = await backend.get(first.job_id)
    assert stored is not None
    assert (stored.payload, stored.priority, stored.status) == ("2", 9, "scheduled")
    assert stored.available_at == clock.now() + timedelta(hours=1)


@pytest.mark.parametrize("mode", ["replace", "preserve_run_at"])
async def test_a_running_job_is_not_replaced(backend: Backend, database: Database, mode: str) -> None:
    (first,) = await backend.enqueue_many([keyed(payload="1")])
    database.query("UPDATE queue_jobs SET status = 'claimed'")
    (answer,) = await backend.enqueue_many([keyed(payload="2", key_mode=mode)])
    assert answer == Enqueued(first.job_id, RUNNING)
    assert database.jobs("payload, status") == [("1", "claimed")]


@pytest.mark.parametrize("mode", ["replace", "preserve_run_at"])
async def test_replacing_what_is_not_there_inserts(backend: Backend, database: Database, mode: str) -> None:
    (answer,) = await backend.enqueue_many([keyed(payload="1", key_mode=mode)])
    assert answer.status is INSERTED
    assert database.jobs("payload") == [("1",)]


Enqueue = Callable[[Backend, list[NewJob]], Awaitable[list[Enqueued]]]


async def together(backend: Backend, jobs: list[NewJob]) -> list[Enqueued]:
    return list(await backend.enqueue_many(jobs))


async def one_by_one(backend: Backend, jobs: list[NewJob]) -> list[Enqueued]:
    return [(await backend.enqueue_many([job]))[0] for job in jobs]


@pytest.mark.parametrize("existing", ["none", "pending", "claimed"])
@pytest.mark.parametrize(
    "modes",
    [
        ("replace", "replace"),
        ("keep", "replace"),
        ("replace", "keep"),
        ("keep", "keep", "keep"),
        ("preserve_run_at", "replace", "preserve_run_at"),
        ("replace", "preserve_run_at", "keep"),
        ("keep", "preserve_run_at"),
        ("preserve_run_at", "keep", "replace", "keep"),
    ],
    ids=" ".join,
)
async def test_one_key_several_times_in_a_batch_is_the_same_as_one_after_the_other(
    backend: Backend, clock: ManualClock, database: Database, modes: tuple[str, ...], existing: str
) -> None:
    seen: list[Any] = []
    for number, send in enumerate([together, one_by_one]):
        key = f"k{number}"
        if existing != "none":
            await backend.enqueue_many([keyed(key, payload="old", delay=timedelta(days=9))])
        if existing == "claimed":
            database.query("UPDATE queue_jobs SET status = 'claimed'")
        answers = await send(
            backend,
            [
                keyed(key, key_mode=mode, payload=f'"{mode} {place}"', delay=timedelta(hours=place))
                for place, mode in enumerate(modes)
            ],
        )
        assert len({answer.job_id for answer in answers}) == 1
        stored = await backend.get(answers[0].job_id)
        assert stored is not None
        seen.append((statuses(answers), stored.payload, stored.available_at, stored.status))
    assert seen[0] == seen[1]


async def test_opposite_key_orders_at_once_do_not_deadlock(engine: AsyncEngine, database: Database) -> None:
    keys = [f"key {number}" for number in range(500)]
    spy = Spy(engine)
    async with Queue(engine, jobs=[Note]) as queue:
        await asyncio.gather(*(queue.counts() for _ in range(4)))  # every connection is open
        spy.reset()
        for mode in ("keep", "replace", "preserve_run_at"):
            await asyncio.gather(
                *(
                    queue.enqueue_many([Note().with_delivery(key=key, key_mode=mode) for key in order])
                    for order in (keys, keys[::-1])
                    for _ in range(5)
                )
            )
    # A deadlock would have been tried again, and seen only as an insert more.
    assert len([sql for sql in spy.statements if "INSERT INTO" in sql]) == 30
    assert database.count() == 500


async def test_mixed_modes_of_the_same_keys_at_once_do_not_deadlock(engine: AsyncEngine, database: Database) -> None:
    spy = Spy(engine)
    modes: tuple[Any, Any] = ("keep", "replace")
    async with Queue(engine, jobs=[Note]) as queue:
        await asyncio.gather(*(queue.counts() for _ in range(4)))
        spy.reset()
        for number in range(20):
            keys = [f"{number} {place}" for place in range(6)]
            await asyncio.gather(
                *(
                    queue.enqueue_many(
                        [Note().with_delivery(key=key, key_mode=modes[(n + turn) % 2]) for n, key in enumerate(keys)]
                    )
                    for turn in range(2)
                )
            )
    # Six runs of one mode in each of forty bulks; a deadlock would have been tried again.
    assert len([sql for sql in spy.statements if "INSERT INTO" in sql]) == 20 * 2 * 6
    assert database.count() == 120
