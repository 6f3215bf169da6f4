"""How long to wait before the next attempt.

A policy answers for the attempt that just failed (1 is the first run). The named ones are plain data,
so that one can be stored with a single job; a function of one's own belongs to a job class, whose code
every worker has.
"""

import random
from collections.abc import Callable
from datetime import timedelta
from typing import Final, TypeAlias

import msgspec

from queue_core.checks import Duration, check_duration, shown
from queue_core.errors import ConfigurationError


def _seconds(value: Duration) -> float:
    return value.total_seconds() if isinstance(value, timedelta) else value


class _Policy(msgspec.Struct, frozen=True, tag_field="policy"):
    """What the named policies share: their fields are durations, checked when one is made and kept as seconds."""

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            span = check_duration(getattr(self, field), f"{type(self).__name__}.{field}", zero=False)
            msgspec.structs.force_setattr(self, field, span.total_seconds())


class FullJitter(_Policy, frozen=True, tag="full_jitter"):
    """A random wait between 0 and a bound that doubles with each attempt: retries spread out by themselves."""

    base: Duration = 5.0
    cap: Duration = 900.0

    def delay(self, attempt: int) -> float:
        return random.uniform(0, min(_seconds(self.cap), _seconds(self.base) * 2 ** min(attempt - 1, 64)))  # noqa: S311 not a secret


class PowersOfTwo(_Policy, frozen=True, tag="powers_of_two"):
    """2^(attempt + 1) seconds: 4, 8, 16 … up to the cap."""

    cap: Duration = 86_400.0

    def delay(self, attempt: int) -> float:
        return min(_seconds(self.cap), 2.0 ** min(attempt + 1, 64))


class Fixed(_Policy, frozen=True, tag="fixed"):
    """The same wait each time."""

    wait: Duration

    def delay(self, attempt: int) -> float:
        return _seconds(self.wait)


class Linear(_Policy, frozen=True, tag="linear"):
    """One step more with each attempt, up to the cap."""

    step: Duration
    cap: Duration = 86_400.0

    def delay(self, attempt: int) -> float:
        return min(_seconds(self.cap), _seconds(self.step) * attempt)


StoredBackoff: TypeAlias = FullJitter | PowersOfTwo | Fixed | Linear
BackoffFunction: TypeAlias = Callable[[int], Duration]
Backoff: TypeAlias = StoredBackoff | BackoffFunction

DEFAULT_BACKOFF: Final = FullJitter()
_DECODER: Final = msgspec.json.Decoder(FullJitter | PowersOfTwo | Fixed | Linear)


def check_backoff(value: object, field: str) -> Backoff:
    """A policy, or a function of the attempt."""
    if isinstance(value, _Policy) or (callable(value) and not isinstance(value, type)):
        return value  # type: ignore[return-value]  # a callable's signature shows only when it is called
    raise ConfigurationError(
        f"{field} must be FullJitter(), PowersOfTwo(), Fixed(), Linear() or a function of the attempt,"
        f" got {shown(value)}"
    )


def encode_backoff(value: object, field: str) -> str:
    """The text that is stored with one job."""
    if isinstance(value, _Policy):
        return msgspec.json.encode(value).decode()
    if callable(value):
        raise ConfigurationError(
            f"{field} can't be a function here, because it is stored with the job: use FullJitter(), PowersOfTwo(),"
            " Fixed() or Linear(), or give the function to the job class as backoff="
        )
    check_backoff(value, field)
    raise AssertionError("unreachable: check_backoff refuses what is neither")


def decode_backoff(stored: str) -> StoredBackoff:
    """The policy of a stored text."""
    policy: StoredBackoff = _DECODER.decode(stored)
    return policy


def delay_after(policy: Backoff, attempt: int) -> timedelta:
    """The wait after this attempt failed; what a user's function gives is checked."""
    if isinstance(policy, FullJitter | PowersOfTwo | Fixed | Linear):
        return timedelta(seconds=policy.delay(attempt))
    return check_duration(policy(attempt), "what backoff returned")
