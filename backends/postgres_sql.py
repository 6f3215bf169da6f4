"""What the statements of Postgres have in common: the tables' names, and the clock.

Durations travel as whole microseconds and not as intervals, for which an application may have set a
codec of its own. `:now` is bound only when the backend was opened with a clock; otherwise it is the
database's, read once in a statement so that its times agree.
"""

from datetime import datetime
from typing import Any

from sqlalchemy.dialects.postgresql.asyncpg import dialect as asyncpg_dialect

from queue_core.clock import Clock
from queue_core.config import History

from .statement import Statement
from .tables import Tables


class PostgresSql:
    """The base of the classes that hold the statements of one part of the seam."""

    def __init__(self, tables: Tables, clock: Clock | None, history: History = False) -> None:
        self._dialect = asyncpg_dialect()
        name = self._dialect.identifier_preparer.format_table
        self._names: dict[str, Any] = {
            "jobs": name(tables.jobs),
            "dead_jobs": name(tables.dead_jobs),
            "workers": name(tables.workers),
            "pauses": name(tables.pauses),
            "ticks": name(tables.ticks),
            "history": name(tables.history),
        }
        self._clock = clock
        self._keeps_history = bool(history)
        self._kept: dict[str, Any] = {
            "keeps_all": history is True,
            "kept": [] if isinstance(history, bool) else list(history),
        }

    def _statement(self, sql: str) -> Statement:
        return Statement(sql.format(**self._names), self._dialect)

    def _now(self) -> datetime | None:
        return None if self._clock is None else self._clock.now()


def same_instant(value: datetime) -> datetime:
    """The driver hands instants over as they are."""
    return value
