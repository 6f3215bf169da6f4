"""Folding a batch gives what its requests would come to one after the other, whatever they are."""

from datetime import timedelta
from importlib import import_module
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from queue_core.model import Enqueued, EnqueueStatus, JobId, NewJob
from tests.support.jobs import new_job

folding: Any = import_module("queue_core.backends.folding")

INSERTED, DUPLICATE, REPLACED, RUNNING = EnqueueStatus
HOLDER = JobId(7)

modes = st.sampled_from(["keep", "replace", "preserve_run_at"])
requests = st.lists(st.tuples(st.sampled_from([None, "a", "b", "c"]), modes), max_size=12)
existing = st.dictionaries(st.sampled_from(["a", "b", "c"]), st.booleans())


class Table:
    """The jobs table as a dict: what the database would do with one row at a time."""

    def __init__(self, existing: dict[str, bool]) -> None:
        self.running = {key for key, running in existing.items() if running}
        self.rows: dict[str, tuple[str, timedelta]] = {key: ("old", timedelta(99)) for key in existing}

    def write(self, job: NewJob) -> EnqueueStatus:
        key = job.unique_key
        if key is None or key not in self.rows:
            self.rows[key or job.request_id] = (job.payload, job.delay)
            return INSERTED
        if job.key_mode == "keep":
            return DUPLICATE
        if key in self.running:
            return RUNNING
        time = job.delay if job.key_mode == "replace" else self.rows[key][1]
        self.rows[key] = (job.payload, time)
        return REPLACED


@given(requests, existing)
def test_a_folded_batch_is_the_same_as_one_request_after_the_other(
    requests: list[tuple[str | None, str]], existing: dict[str, bool]
) -> None:
    jobs = [
        new_job(unique_key=key, key=key, key_mode=mode if key else "keep", payload=str(n), delay=timedelta(hours=n))
        for n, (key, mode) in enumerate(requests)
    ]
    one_by_one, at_once = Table(existing), Table(existing)
    expected = [one_by_one.write(job) for job in jobs]
    answers: dict[int, Enqueued] = {}
    for _, rows in folding.batches(folding.fold(jobs)):
        for row in rows:
            answers.update(row.answers(HOLDER, at_once.write(row.job)))
    assert [answers[position].status for position in range(len(jobs))] == expected
    assert at_once.rows == one_by_one.rows


@given(requests)
def test_no_key_is_written_twice_and_keys_are_in_order(requests: list[tuple[str | None, str]]) -> None:
    jobs = [new_job(unique_key=key, key=key, key_mode=mode if key else "keep") for key, mode in requests]
    rows = [row for _, piece in folding.batches(folding.fold(jobs)) for row in piece]
    keys = [row.job.unique_key for row in rows if row.job.unique_key is not None]
    assert keys == sorted(set(keys))


def test_a_batch_ends_before_it_is_too_large_for_a_statement() -> None:
    jobs = [new_job(payload="x" * 1_000_000) for _ in range(20)] + [new_job() for _ in range(4_500)]
    sizes = [len(rows) for _, rows in folding.batches(folding.fold(jobs))]
    assert sizes == [8, 8, 2_000, 2_000, 504]
