"""Concurrent enqueues share commits, and nobody pays for a neighbour's trouble."""

import asyncio
from datetime import timedelta

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from queue_core import BackendError, BackendUnavailable, JobRefused, NotInitialized, Queue
from queue_core.intake import Intake
from queue_core.model import Enqueued, EnqueueStatus
from tests.support.databases import Database
from tests.support.faulty import FaultyProducer, HoldingProducer
from tests.support.jobs import Note, new_job
from tests.support.spy import Spy


async def test_five_thousand_concurrent_enqueues_are_a_few_commits(engine: AsyncEngine, database: Database) -> None:
    spy = Spy(engine)
    async with Queue(engine, jobs=[Note], notify=False) as queue:
        spy.reset()
        answers = await asyncio.gather(
            *(queue.enqueue(Note(), key=f"k{number}" if number % 2 else None) for number in range(5_000))
        )
        assert 1 <= spy.commits <= 24
    assert {answer.status for answer in answers} == {EnqueueStatus.INSERTED}
    assert len({answer.job_id for answer in answers}) == 5_000
    assert database.count() == 5_000


async def test_a_lone_enqueue_is_one_commit_and_waits_for_no_company(engine: AsyncEngine) -> None:
    spy = Spy(engine)
    async with Queue(engine, jobs=[Note], notify=False) as queue:
        await queue.enqueue(Note())
        spy.reset()
        await queue.enqueue(Note())
        assert (spy.commits, len(spy.statements)) == (1, 1)


async def test_two_replaces_of_one_key_at_once_both_get_an_answer(queue: Queue, database: Database) -> None:
    answers = await asyncio.gather(
        *(queue.enqueue(Note(text=str(number)), key="k", key_mode="replace") for number in range(2))
    )
    assert [answer.status for answer in answers] == [EnqueueStatus.INSERTED, EnqueueStatus.REPLACED]
    assert database.jobs("payload") == [('{"text":"1"}',)]


async def test_a_refused_job_fails_alone(queue: Queue, database: Database, refusing_13: None) -> None:
    answers = await asyncio.gather(
        *(queue.enqueue(Note(), tenant=str(number)) for number in range(40)), return_exceptions=True
    )
    failed = [(number, answer) for number, answer in enumerate(answers) if isinstance(answer, BaseException)]
    assert [number for number, _ in failed] == [13]
    assert isinstance(failed[0][1], JobRefused)
    assert "13" in str(failed[0][1])
    assert database.count() == 39


async def test_a_cancelled_waiter_harms_nobody(queue: Queue, database: Database) -> None:
    tasks = [asyncio.create_task(queue.enqueue(Note(text=str(number)))) for number in range(20)]
    await asyncio.sleep(0)  # every one of them is in the lane now, and none on its way
    for task in tasks[::2]:
        task.cancel()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(answer, asyncio.CancelledError) for answer in answers[::2])
    assert all(isinstance(answer, Enqueued) for answer in answers[1::2])
    assert database.count() == 10


async def test_closing_writes_what_is_on_its_way(engine: AsyncEngine, database: Database) -> None:
    queue = await Queue(engine, jobs=[Note]).open()
    tasks = [asyncio.create_task(queue.enqueue(Note())) for _ in range(30)]
    await asyncio.sleep(0)
    await queue.close()
    assert len(await asyncio.gather(*tasks)) == 30
    assert database.count() == 30
    with pytest.raises(NotInitialized, match="not open"):
        await queue.enqueue(Note())


async def test_when_the_database_is_away_everyone_in_the_batch_is_told() -> None:
    producer = FaultyProducer(fail=[BackendUnavailable("away"), None])
    intake = Intake(producer, key_patience=producer.patience, give_up_after=producer.patience)
    answers = await asyncio.gather(*(intake.submit(new_job()) for _ in range(3)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [BackendUnavailable] * 3
    assert (await intake.submit(new_job())).status is EnqueueStatus.INSERTED
    await intake.close()


async def test_a_bug_in_a_backend_reaches_the_callers_and_the_lane_goes_on() -> None:
    producer = FaultyProducer(fail=[ZeroDivisionError("a bug"), None])
    intake = Intake(producer, key_patience=producer.patience, give_up_after=producer.patience)
    with pytest.raises(ZeroDivisionError):
        await intake.submit(new_job())
    assert (await intake.submit(new_job())).status is EnqueueStatus.INSERTED
    await intake.close()


async def test_once_a_key_is_known_to_be_held_the_shared_batch_waits_for_it_no_more() -> None:
    producer = HoldingProducer(held={"held"})
    intake = Intake(producer, key_patience=timedelta(seconds=7), give_up_after=timedelta(seconds=60))

    def enqueue(key: str) -> "asyncio.Task[Enqueued]":
        return asyncio.create_task(intake.submit(new_job(key=key, unique_key=key)))

    stuck = enqueue("held")
    await enqueue("a")
    stuck_too = enqueue("held")
    await enqueue("b")
    await enqueue("c")
    shared = [keys for keys, patience in producer.calls if patience == timedelta(seconds=3.5)]
    assert shared[0] == {"held", "a"}
    assert all("held" not in keys for keys in shared[1:])
    assert len(shared) > 1
    producer.held.clear()
    assert {answer.status for answer in await asyncio.gather(stuck, stuck_too)} == {EnqueueStatus.INSERTED}
    await intake.close()


async def test_requests_for_a_held_key_are_written_in_their_order() -> None:
    producer = HoldingProducer(held={"held"})
    intake = Intake(producer, key_patience=timedelta(seconds=7), give_up_after=timedelta(seconds=60))
    sent = [new_job(key="held", unique_key="held", payload=str(number)) for number in range(4)]
    waiting = [asyncio.create_task(intake.submit(job)) for job in sent[:2]]
    await asyncio.create_task(intake.submit(new_job(key="a", unique_key="a")))
    waiting += [asyncio.create_task(intake.submit(job)) for job in sent[2:]]
    await asyncio.create_task(intake.submit(new_job(key="b", unique_key="b")))
    producer.held.clear()
    await asyncio.gather(*waiting)
    assert [job.payload for job in producer.written if job.key == "held"] == ["0", "1", "2", "3"]
    await intake.close()


@pytest.mark.parametrize("released", [True, False], ids=["the holder ends then", "the holder goes on"])
async def test_a_request_that_comes_while_its_key_moves_to_the_held_ones_goes_behind_them(released: bool) -> None:
    producer = HoldingProducer(held={"held"})
    intake = Intake(producer, key_patience=timedelta(seconds=7), give_up_after=timedelta(seconds=60))
    waiting: list[asyncio.Task[Enqueued]] = []
    in_the_middle = asyncio.Event()

    def enqueue(key: str, payload: str) -> None:
        waiting.append(asyncio.create_task(intake.submit(new_job(key=key, unique_key=key, payload=payload))))

    def come_in_the_middle(keys: set[str | None]) -> None:
        if keys == {"held"} and len(waiting) == 2:
            enqueue("held", "new")
            enqueue("another", "")
            in_the_middle.set()
            if released:
                # The first one has been found locked by then, and the next try meets no holder.
                asyncio.get_running_loop().call_later(0, producer.held.clear)

    producer.on_call = come_in_the_middle
    enqueue("held", "old")
    enqueue("neighbour", "")
    await asyncio.gather(*waiting[1:])
    await in_the_middle.wait()
    await waiting[3]
    producer.held.clear()
    await asyncio.wait_for(asyncio.gather(*waiting), 30)
    assert [job.payload for job in producer.written if job.key == "held"] == ["old", "new"]
    await intake.close()


async def test_a_thousand_neighbours_of_a_held_key_are_not_written_one_by_one() -> None:
    producer = HoldingProducer(held={"held"})
    intake = Intake(producer, key_patience=timedelta(seconds=7), give_up_after=timedelta(seconds=60))
    keys = [f"k{number}" for number in range(999)]
    stuck = asyncio.create_task(intake.submit(new_job(key="held", unique_key="held")))
    await asyncio.gather(*(intake.submit(new_job(key=key, unique_key=key)) for key in keys))
    assert len([1 for keys_of, _ in producer.calls if keys_of != {"held"}]) < 25
    producer.held.clear()
    await stuck
    await intake.close()


async def test_each_caller_gets_an_error_of_its_own() -> None:
    producer = FaultyProducer(fail=[BackendUnavailable("away")])
    intake = Intake(producer, key_patience=producer.patience, give_up_after=producer.patience)
    errors = await asyncio.gather(*(intake.submit(new_job()) for _ in range(3)), return_exceptions=True)
    assert len({id(error) for error in errors}) == 3
    assert {str(error) for error in errors} == {"away"}
    await intake.close()


async def test_an_error_that_is_about_everyone_is_not_looked_for_job_by_job() -> None:
    producer = FaultyProducer(fail=[BackendError("no such table")])
    intake = Intake(producer, key_patience=producer.patience, give_up_after=producer.patience)
    errors = await asyncio.gather(*(intake.submit(new_job()) for _ in range(50)), return_exceptions=True)
    assert [str(error) for error in errors] == ["no such table"] * 50
    await intake.close()
