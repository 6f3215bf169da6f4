"""The steps of a beat: the rows that the database has for a worker, against the claims that the worker knows.

The worker claims and settles meanwhile, so what it knows is asked twice. A claim is lost when it was known before
its row was looked for, was not found, and is known still (a settle may have removed both). A row is unknown
when the worker does not know it after it was found: whatever is found was registered before.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from queue_core.model import Beat, Claim, JobId, Known, QueueName, Token, Worker, WorkerId

from .statement import Call
from .steps import Steps


class BeatSql(Protocol):
    """A dialect's statements."""

    def renew_lease(self, worker: Worker) -> Call: ...

    def find_mine(self, worker: WorkerId) -> Call:
        """Gives id, token and whether it is called off, of each job that the worker holds."""
        ...

    def release(self, claims: Sequence[Claim]) -> Call:
        """Gives id and queue of each."""
        ...


class Beaten(NamedTuple):
    """A beat's answer, and the queues that have something to claim again."""

    beat: Beat
    woken: frozenset[QueueName]


def beat(sql: BeatSql, worker: Worker, known: Callable[[], Known]) -> Steps[Beaten]:
    """The calls to make, in one transaction."""
    before = known()
    # By itself and first: it may wait for a reaper, and what that took has to be seen.
    yield sql.renew_lease(worker)
    rows = yield sql.find_mine(worker.id)
    mine = {Claim(JobId(job_id), Token(token)): bool(called_off) for job_id, token, called_off in rows}
    after = known()
    held, pending = set(after.held), set(after.pending)
    unknown = {claim.job_id: claim for claim in mine if claim not in held and claim.token not in pending}
    released = (yield sql.release(list(unknown.values()))) if unknown else ()
    return Beaten(
        Beat(
            lost=[claim for claim in before.held if claim not in mine and claim in held],
            to_cancel=[claim for claim, called_off in mine.items() if called_off and claim in held],
            unknown=[unknown[job_id] for job_id, _ in released],
        ),
        frozenset(queue for _, queue in released),
    )
