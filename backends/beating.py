"""What a beat finds: the rows that the database has for a worker, against the claims that the worker knows."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from queue_core.model import Beat, Claim, QueueName


class Beaten(NamedTuple):
    """A beat's answer, and the queues that have something to claim again."""

    beat: Beat
    woken: frozenset[QueueName]


def read_beat(held: Collection[Claim], mine: Mapping[Claim, bool], released: Mapping[Claim, QueueName]) -> Beaten:
    """From the worker's rows (and whether each is to be cancelled) and those that were released."""
    known = set(held)
    beat = Beat(
        lost=[claim for claim in held if claim not in mine],
        to_cancel=[claim for claim, to_cancel in mine.items() if to_cancel and claim in known],
        unknown=list(released),
    )
    return Beaten(beat, frozenset(released.values()))
