"""What the statements of SQLite have in common: time, which is the process's and always bound, and JSON for lists.

Lists travel as one JSON text, so that a statement is the same, and prepared once, whatever the size of a
batch. Where a list drives a join it is a CROSS JOIN, whose order SQLite keeps, and each access to the jobs says
how: `NOT INDEXED` is by the id, `INDEXED BY` names the index. With statistics from when the table was nearly
empty, SQLite's own choice was to scan it.
"""

from typing import Any

import msgspec
from sqlalchemy.dialects.sqlite.aiosqlite import dialect as aiosqlite_dialect

from queue_core.clock import Clock, to_microseconds
from queue_core.config import History

from .statement import Statement

_encoder = msgspec.json.Encoder()


def as_json(value: object) -> str:
    """A list or mapping as the text that `json_each` takes."""
    return _encoder.encode(value).decode()


class SqliteSql:
    """The base of the classes that hold the statements of one part of the seam."""

    def __init__(self, clock: Clock, history: History = False) -> None:
        self._dialect = aiosqlite_dialect()
        self._clock = clock
        self._keeps_history = bool(history)
        self._kept: dict[str, Any] = {
            "keeps_all": history is True,
            "kept": as_json([] if isinstance(history, bool) else list(history)),
        }

    def _statement(self, sql: str) -> Statement:
        return Statement(sql, self._dialect)

    def _now(self) -> int:
        return to_microseconds(self._clock.now())
