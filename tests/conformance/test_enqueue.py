"""Enqueueing at the seam."""

from datetime import timedelta

from queue_core.backend import Backend
from queue_core.model import EnqueueStatus
from tests.support.databases import Database
from tests.support.jobs import new_job


async def test_jobs_get_ids_in_their_order(backend: Backend, database: Database) -> None:
    answers = await backend.enqueue_many([new_job(payload=f'"{number}"') for number in range(5)])
    assert [answer.status for answer in answers] == [EnqueueStatus.INSERTED] * 5
    assert database.jobs("id, payload") == [(answer.job_id, f'"{number}"') for number, answer in enumerate(answers)]


async def test_a_delayed_job_is_scheduled_and_one_that_is_due_is_pending(backend: Backend, database: Database) -> None:
    await backend.enqueue_many([new_job(), new_job(delay=timedelta(seconds=1))])
    assert database.jobs("status") == [("pending",), ("scheduled",)]
