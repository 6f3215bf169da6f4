"""Checks of what callers hand in. Each error names the field, the value and what would be right."""

import math
import re
from datetime import UTC, datetime, timedelta
from typing import Final, TypeAlias

from queue_core.errors import ConfigurationError

Duration: TypeAlias = float | timedelta
"""Seconds, or a `timedelta`."""

_NAME: Final = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_IDENTIFIER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
_LONGEST: Final = timedelta(days=36_500)
_EARLIEST: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LATEST: Final = datetime(9000, 1, 1, tzinfo=UTC)
_SHOWN: Final = 60


def shown(value: object) -> str:
    """A value as an error message may show it: short, and harmless in a terminal."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 a repr of the caller's own, or an integer too long for one
        text = f"a {type(value).__name__} that can't be shown"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text)} characters)"


def check_name(value: object, field: str) -> str:
    """A queue's or a job type's name."""
    if isinstance(value, str) and _NAME.fullmatch(value):
        return value
    raise ConfigurationError(f"{field} must be 1 to 128 characters of A-Z a-z 0-9 _ . : -, got {shown(value)}")


def check_identifier(value: object, field: str) -> str:
    """A database schema's name."""
    if isinstance(value, str) and _IDENTIFIER.fullmatch(value):
        return value
    raise ConfigurationError(
        f"{field} must be a plain identifier (a letter or _, then letters, digits or _, at most 63 in all),"
        f" got {shown(value)}"
    )


def check_text(value: object, field: str, *, limit: int, one_line: bool = True, hint: str = "shorten it") -> str:
    """A text that both databases store as it is; `limit` counts bytes of UTF-8."""
    if not isinstance(value, str):
        raise ConfigurationError(f"{field} must be a str, got {shown(value)}")
    if not value:
        raise ConfigurationError(f"{field} must not be empty; leave it out instead")
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise ConfigurationError(
            f"{field} has a lone surrogate at position {error.start}, which is not text; remove it"
        ) from error
    if size > limit:
        raise ConfigurationError(f"{field} must be at most {limit} bytes, got {size}; {hint}")
    if "\x00" in value or (one_line and _CONTROL.search(value)):
        raise ConfigurationError(f"{field} must not have control characters, got {shown(value)}")
    return value


def check_int(value: object, field: str, low: int, high: int) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
        return value
    raise ConfigurationError(f"{field} must be a whole number from {low} to {high}, got {shown(value)}")


def check_duration(value: object, field: str, *, zero: bool = True) -> timedelta:
    """Seconds or a `timedelta`; not negative, and above zero unless `zero`."""
    if isinstance(value, timedelta):
        span = value
    elif isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf:
        # Compared before it is converted: timedelta(seconds=1e300) and float(10**400) raise errors of their own.
        span = timedelta(seconds=value) if abs(value) <= _LONGEST.total_seconds() else _LONGEST * 2
    else:
        raise ConfigurationError(f"{field} must be seconds or a timedelta, got {shown(value)}")
    if span < timedelta(0) or (not zero and not span):
        least = "0 s or more" if zero else "more than 0 s"
        raise ConfigurationError(f"{field} must be {least}, got {shown(value)}")
    if span > _LONGEST:
        raise ConfigurationError(f"{field} must be at most 100 years, got {shown(value)}")
    return span


def check_instant(value: object, field: str) -> datetime:
    """An aware datetime, as UTC."""
    if not isinstance(value, datetime):
        raise ConfigurationError(f"{field} must be a datetime with a time zone, got {shown(value)}")
    if value.utcoffset() is None:
        raise ConfigurationError(
            f"{field} must have a time zone, got the naive {value.isoformat()};"
            " write datetime.now(UTC), or add tzinfo=UTC"
        )
    try:
        moment = value.astimezone(UTC)
    except OverflowError:
        moment = _LATEST
    if not _EARLIEST <= moment < _LATEST:
        raise ConfigurationError(f"{field} must be between the years 1970 and 9000, got {value.isoformat()}")
    return moment
