"""Taking back the claims of workers that are silent or dead.

First the workers' rows are locked, then their jobs: with the jobs alone a beat that committed in between
was robbed of them. What becomes of each job is decided here, once, for every way in which a run can end
without a report; it is then settled like any other outcome, under the claim that is being taken away.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from queue_core.failures import crash
from queue_core.model import Claim, JobId, Outcome, Parked, QueueName, Reaped, Retried, StoredJob

from .settlement import Settlement, SettleSql
from .steps import Steps

OVERDUE: Final = timedelta(seconds=30)
"""How far past its own time limit a job is taken from a worker that lives: that should have stopped it long ago."""

MISSING: Final = timedelta(minutes=5)
"""How long ago a job was claimed by a worker that has no row: a live one has written its row again by then."""

_KINDS: Final = {
    "silent": ("LeaseExpired", "visibility timeout exceeded"),
    "stopped": ("WorkerStopped", "its worker stopped"),
    "overdue": ("DeadlineExceeded", "time limit exceeded"),
    "missing": ("WorkerMissing", "its worker is not known"),
    "dead": ("WorkerDied", "its worker's process ended"),
}


class Abandoned(NamedTuple):
    """A claimed job whose worker is not there for it any more, and why (one of the causes above)."""

    job: StoredJob
    claim: Claim
    cause: str
    called_off: bool
    seen_at: datetime


class TakenBack(NamedTuple):
    """What was done, and which queues have something to claim again."""

    reaped: Reaped
    woken: frozenset[QueueName]


def take_back(abandoned: Sequence[Abandoned], sql: SettleSql, *, taken_by: str, park: bool = False) -> Steps[TakenBack]:
    """Requeue or park jobs whose rows are locked."""
    outcomes = [_outcome(each, taken_by, park=park) for each in abandoned]
    settled = yield from Settlement(outcomes, crashed=True).steps(sql)
    parked: list[StoredJob] = []
    requeued: list[JobId] = []
    for each, outcome in zip(abandoned, outcomes, strict=True):
        if isinstance(outcome, Parked):
            parked.append(each.job)
        else:
            requeued.append(each.job.id)
    return TakenBack(Reaped(requeued, parked), settled.woken)


def _outcome(each: Abandoned, taken_by: str, *, park: bool) -> Outcome:
    kind, message = _KINDS[each.cause]
    failure = crash(each.job, kind, message, each.seen_at)
    # One that was called off goes back into the queue instead, where the next claim ends it.
    if not each.called_off and (park or each.job.attempt >= each.job.max_attempts):
        return Parked(each.claim, failure, message, taken_by)
    return Retried(each.claim, failure, timedelta(0))
