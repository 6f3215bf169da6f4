"""Jobs with the same unique key in one batch become one row to write.

Two rows of one key in one statement fail it whole, and opposite key orders in two transactions
deadlock. So equal keys are folded into what they would come to one after the other, and keyed rows are
written in the order of their keys.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

from msgspec.structs import replace

from queue_core.model import Enqueued, EnqueueStatus, JobId, KeyMode, NewJob

CHUNK = 2_000
CHUNK_BYTES = 8_000_000


class Folded:
    """One row to write, and the requests (by position and mode) that it answers."""

    __slots__ = ("job", "members")

    def __init__(self, job: NewJob, position: int) -> None:
        self.job = job
        self.members: list[tuple[int, KeyMode]] = [(position, job.key_mode)]

    def add(self, later: NewJob, position: int) -> None:
        """Take in another request for the same key that came later."""
        self.members.append((position, later.key_mode))
        if later.key_mode == "keep":
            return
        first = self.job
        replaces = "replace" in (first.key_mode, later.key_mode)
        # The row keeps the first one's request id: that is the one whose insert a repetition looks for.
        self.job = replace(later, request_id=first.request_id, key_mode="replace" if replaces else "preserve_run_at")
        if later.key_mode == "preserve_run_at":
            self.job = replace(self.job, delay=first.delay, run_at=first.run_at)

    def answers(self, job_id: JobId, status: EnqueueStatus) -> Iterator[tuple[int, Enqueued]]:
        """What each member is told, given what became of the row."""
        for number, (position, mode) in enumerate(self.members):
            told = status
            if status is EnqueueStatus.INSERTED and number > 0:
                told = EnqueueStatus.DUPLICATE if mode == "keep" else EnqueueStatus.REPLACED
            elif status in (EnqueueStatus.REPLACED, EnqueueStatus.RUNNING) and mode == "keep":
                told = EnqueueStatus.DUPLICATE
            yield position, Enqueued(job_id, told)


def fold(jobs: Sequence[NewJob]) -> Sequence[Folded]:
    """The rows to write: those without a key in their order, then those with one in the order of the keys."""
    plain: list[Folded] = []
    keyed: dict[str, Folded] = {}
    for position, job in enumerate(jobs):
        if job.unique_key is None:
            plain.append(Folded(job, position))
        elif (earlier := keyed.get(job.unique_key)) is not None:
            earlier.add(job, position)
        else:
            keyed[job.unique_key] = Folded(job, position)
    return plain + [keyed[key] for key in sorted(keyed)]


def batches(rows: Sequence[Folded]) -> Iterator[tuple[KeyMode, Sequence[Folded]]]:
    """The rows in their order, in runs of one mode that are small enough for one statement.

    Their order, and not one mode after the other: two transactions would take the same keys in opposite orders.
    """
    for mode, run in groupby(rows, key=_mode):
        piece: list[Folded] = []
        size = 0
        for row in run:
            piece.append(row)
            size += len(row.job.payload)
            if len(piece) == CHUNK or size >= CHUNK_BYTES:
                yield mode, piece
                piece, size = [], 0
        if piece:
            yield mode, piece


def _mode(row: Folded) -> KeyMode:
    return row.job.key_mode
