"""The steps of an enqueue, apart from the statements.

Insert; for what gave no row, find the job that is in the way; if that has just finished, insert again.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

from queue_core.errors import BackendUnavailable
from queue_core.model import Enqueued, EnqueueStatus, JobId, JobStatus, KeyMode, NewJob

from .folding import Folded, batches, fold
from .statement import Call
from .steps import Steps

ROUNDS = 5


class EnqueueSql(Protocol):
    """A dialect's two statements."""

    def insert_jobs(self, mode: KeyMode, jobs: Sequence[NewJob], patience: timedelta | None) -> Call:
        """Gives (id, request_id, unique_key) of each row that was inserted or replaced."""
        ...

    def find_jobs(self, request_ids: Sequence[str], unique_keys: Sequence[str]) -> Call:
        """Gives (id, request_id, unique_key, status) of each job with one of these."""
        ...


class Insertion:
    """One batch on its way in."""

    def __init__(self, jobs: Sequence[NewJob]) -> None:
        self._jobs = jobs
        self._rows = fold(jobs)
        self.has_keys = self._rows[-1].job.unique_key is not None
        self.is_one_statement = sum(1 for _ in batches(self._rows)) == 1
        self._answers: list[Enqueued | None] = [None] * len(jobs)

    def steps(self, sql: EnqueueSql, patience: timedelta | None) -> Steps[Sequence[Enqueued]]:
        """The calls to make. `patience` is None in a transaction whose lock timeout is not ours to set."""
        waiting = {str(row.job.request_id): row for row in self._rows}
        by_key = {row.job.unique_key: row for row in self._rows if row.job.unique_key is not None}
        for _ in range(ROUNDS):
            for mode, piece in batches(list(waiting.values())):
                jobs = [row.job for row in piece]
                for job_id, request_id, unique_key in (yield sql.insert_jobs(mode, jobs, patience)):
                    inserted = request_id in waiting
                    row = waiting[request_id] if inserted else by_key[unique_key]
                    self._answer(row, job_id, EnqueueStatus.INSERTED if inserted else EnqueueStatus.REPLACED)
                    del waiting[row.job.request_id]
            if not waiting:
                return self._complete()
            keys = [row.job.unique_key for row in waiting.values() if row.job.unique_key is not None]
            for job_id, request_id, unique_key, status in (yield sql.find_jobs(list(waiting), keys)):
                ours = request_id in waiting
                row = waiting[request_id] if ours else by_key[unique_key]
                if row.job.request_id not in waiting:
                    continue
                if ours:
                    # An earlier try of this very enqueue, whose answer was lost.
                    self._answer(row, job_id, EnqueueStatus.INSERTED)
                elif row.job.key_mode == "keep":
                    self._answer(row, job_id, EnqueueStatus.DUPLICATE)
                elif status == JobStatus.CLAIMED:
                    self._answer(row, job_id, EnqueueStatus.RUNNING)
                else:
                    continue  # it ran when we came and waits again now: replace it in the next round
                del waiting[row.job.request_id]
            if not waiting:
                return self._complete()
        raise BackendUnavailable(
            f"{len(waiting)} jobs could not be enqueued in {ROUNDS} rounds, because the jobs that hold their keys come"
            " and go too fast, or can't be seen from this transaction's snapshot: try again, in READ COMMITTED"
        )

    def _answer(self, row: Folded, job_id: JobId, status: EnqueueStatus) -> None:
        for position, answer in row.answers(job_id, status):
            self._answers[position] = answer

    def _complete(self) -> Sequence[Enqueued]:
        return [answer for answer in self._answers if answer is not None]

    def woken_queues(self, answers: Sequence[Enqueued]) -> frozenset[str]:
        """The queues that have something new."""
        news = (EnqueueStatus.INSERTED, EnqueueStatus.REPLACED)
        return frozenset(job.queue for job, answer in zip(self._jobs, answers, strict=True) if answer.status in news)
