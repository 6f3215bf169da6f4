"""The one place where the process's own time is read."""

from datetime import UTC, datetime, timedelta
from typing import Final, Protocol

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


class Clock(Protocol):
    """Where a backend that was opened with a clock gets its time from; a test sets it."""

    def now(self) -> datetime: ...


class SystemClock:
    """The wall clock of this process."""

    def now(self) -> datetime:
        return datetime.now(UTC)


def to_microseconds(value: datetime | timedelta) -> int:
    """An instant as microseconds since 1970, a duration as microseconds: exact, unlike a float of seconds."""
    span = value - EPOCH if isinstance(value, datetime) else value
    return span // _MICROSECOND


def instant(microseconds: int) -> datetime:
    """The instant that `to_microseconds` gave."""
    return EPOCH + timedelta(microseconds=microseconds)
