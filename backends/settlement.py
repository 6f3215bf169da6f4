"""The steps of a settle, apart from the statements: the outcomes sorted into the three things that can happen.

A job ends (and is gone, or in the history), goes again, or is parked. Each is one group of statements
for all jobs of a batch, and the whole batch is one transaction.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Final, NamedTuple, Protocol, assert_never

from queue_core.failures import RecordedFailure, record, storable
from queue_core.model import (
    Cancelled,
    Claim,
    JobId,
    Outcome,
    Parked,
    QueueName,
    Released,
    Retried,
    Snoozed,
    Succeeded,
)

from .steps import Steps

_LONGEST: Final = timedelta(days=36_500)


class Ended(NamedTuple):
    """A job that is over."""

    claim: Claim
    succeeded: bool
    result: str | None
    reason: str | None


class Again(NamedTuple):
    """A job that goes back into the queue: after so long, or (None) where it stood."""

    claim: Claim
    wait: timedelta | None
    given_back: int
    crashed: int
    error: str | None


class DeadLetter(NamedTuple):
    """A job that becomes a dead letter."""

    claim: Claim
    reason: str
    parked_by: str
    error: RecordedFailure


class SettleSql(Protocol):
    """A dialect's statements; each answers with the jobs that still held their claim."""

    one_statement: bool
    """Whether each of the three is a single statement, and so a transaction by itself."""

    def end(self, jobs: Sequence[Ended]) -> Steps[Sequence[JobId]]: ...

    def go_again(self, jobs: Sequence[Again]) -> Steps[Sequence[tuple[JobId, QueueName | None]]]:
        """With the queue of those that are pending already."""
        ...

    def park(self, jobs: Sequence[DeadLetter]) -> Steps[Sequence[JobId]]: ...


class Settled(NamedTuple):
    """Which jobs still held their claim, and which queues have something to claim again."""

    jobs: frozenset[JobId]
    woken: frozenset[QueueName]


class Settlement:
    """One batch of outcomes. `crashed` says that nobody reported them: their workers fell silent."""

    def __init__(self, outcomes: Sequence[Outcome], *, crashed: bool = False) -> None:
        self._ended: list[Ended] = []
        self._again: list[Again] = []
        self._parked: list[DeadLetter] = []
        # By claim: of two outcomes for one, the first counts.
        for outcome in {outcome.claim: outcome for outcome in reversed(outcomes)}.values():
            self._sort(outcome, int(crashed))
        self.is_one_group = sum(map(bool, (self._ended, self._again, self._parked))) <= 1

    def _sort(self, outcome: Outcome, crashed: int) -> None:
        match outcome:
            case Succeeded(claim, result):
                self._ended.append(Ended(claim, True, None if result is None else storable(result, None), None))
            case Cancelled(claim, reason):
                self._ended.append(Ended(claim, False, None, storable(reason)))
            case Retried(claim, failure, retry_after):
                self._again.append(Again(claim, _bounded(retry_after), 0, crashed, record(failure).line))
            case Snoozed(claim, snooze_for):
                self._again.append(Again(claim, _bounded(snooze_for), 1, 0, None))
            case Released(claim):
                self._again.append(Again(claim, None, 1, 0, None))
            case Parked(claim, failure, reason, parked_by):
                self._parked.append(DeadLetter(claim, storable(reason), storable(parked_by), record(failure)))
            case _:
                assert_never(outcome)

    def steps(self, sql: SettleSql) -> Steps[Settled]:
        """The calls to make."""
        held: list[JobId] = []
        woken: set[QueueName] = set()
        if self._ended:
            held += yield from sql.end(self._ended)
        if self._again:
            for job_id, queue in (yield from sql.go_again(self._again)):
                held.append(job_id)
                if queue is not None:
                    woken.add(queue)
        if self._parked:
            held += yield from sql.park(self._parked)
        return Settled(frozenset(held), frozenset(woken))


def _bounded(wait: timedelta) -> timedelta:
    """A wait that gives a time which both databases and Python can hold: a settle can't fail on content."""
    return min(max(wait, timedelta(0)), _LONGEST)
