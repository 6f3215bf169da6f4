"""How a failure is written down: cleaned, cut to size, one line of JSON, so that recording it can't fail.

Both databases refuse lone surrogates, Postgres refuses NUL, and a job whose failure can't be recorded
would be run again for ever.
"""

import re
from datetime import datetime
from typing import Final

import msgspec
from msgspec import Struct

from queue_core.model import Failure, StoredJob

_MESSAGE: Final = 8_192
_TRACEBACK: Final = 32_768
_KIND: Final = 256
_CAUSES: Final = 10
_CAUSE: Final = 1_024
_FRAME: Final = re.compile(r' *File "([^"]+)", line \d+, in (.+)')


class RecordedFailure(Struct, frozen=True):
    """A failure as both databases store it."""

    line: str
    kind: str
    fingerprint: str


def storable(text: str, limit: int | None = _MESSAGE, *, keep_end: bool = False) -> str:
    """A text that both databases take, cut to so many characters."""
    if limit is not None and len(text) > limit:
        text = text[-limit:] if keep_end else text[:limit]
    return text.encode("utf-8", "backslashreplace").decode().replace("\x00", "\\x00")


def record(failure: Failure) -> RecordedFailure:
    """What is stored of a failure: JSON has no line breaks in it, so a line is one."""
    kind, trace = storable(failure.kind, _KIND), storable(failure.traceback, _TRACEBACK, keep_end=True)
    cleaned = Failure(
        attempt=failure.attempt,
        kind=kind,
        message=storable(failure.message),
        traceback=trace,
        causes=[storable(cause, _CAUSE) for cause in failure.causes[:_CAUSES]],
        failed_at=failure.failed_at,
    )
    return RecordedFailure(msgspec.json.encode(cleaned).decode(), kind, _fingerprint(kind, trace))


def _fingerprint(kind: str, trace: str) -> str:
    """What failures of one cause have in common: the error's kind and where it was raised, without line numbers."""
    for line in reversed(trace.splitlines()):
        if frame := _FRAME.fullmatch(line[:_KIND]):
            file = frame[1].replace("\\", "/").rpartition("/")[2]
            return f"{kind} in {frame[2]} ({file})"
    return kind


def recorded(errors: str | None) -> list[Failure]:
    """The failures of a job's earlier attempts, the newest last."""
    return [] if errors is None else [msgspec.json.decode(line, type=Failure) for line in errors.split("\n")]


def crash(job: StoredJob, kind: str, message: str, failed_at: datetime) -> Failure:
    """The failure of an attempt that nobody was left to report."""
    return Failure(attempt=job.attempt, kind=kind, message=message, traceback="", causes=(), failed_at=failed_at)
