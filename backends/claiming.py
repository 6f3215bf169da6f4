"""What a dialect's claim gives."""

from collections.abc import Sequence
from typing import NamedTuple

from queue_core.model import ClaimedJob


class Taken(NamedTuple):
    """The jobs of one claim statement, in no order.

    `ended` is how many were ended instead. `is_short` says that rows which others hold were in the way: there may be
    more to take, of other types.
    """

    jobs: Sequence[ClaimedJob]
    ended: int = 0
    is_short: bool = False
