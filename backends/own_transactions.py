"""Notices that a task is inside a transaction of its own on the application's engine.

On SQLite an open write transaction keeps every other writer out. A task that enqueues on our connection
while its own transaction is open would wait for itself until the busy timeout. A context variable rather
than the task: child tasks inherit it, and they would wait for their parent all the same.
"""

from contextvars import ContextVar
from typing import Any
from weakref import ReferenceType, ref

from sqlalchemy import Connection, Engine, event


class OwnTransactions:
    """Which connections of one engine the current context has begun a transaction on."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._begun: ContextVar[tuple[ReferenceType[Connection], ...]] = ContextVar("begun", default=())
        event.listen(engine, "begin", self._on_begin)

    def close(self) -> None:
        event.remove(self._engine, "begin", self._on_begin)

    def _on_begin(self, connection: Connection) -> None:
        open_ones = tuple(one for one in self._begun.get() if _is_open(one()))
        self._begun.set((*open_ones, ref(connection)))

    def any_open(self) -> bool:
        """Whether the current context is inside a transaction that the driver has really begun."""
        return any(_is_open(one()) and _has_begun(one()) for one in self._begun.get())


def _is_open(connection: Connection | None) -> bool:
    return connection is not None and not connection.closed and connection.in_transaction()


def _has_begun(connection: Connection | None) -> bool:
    if connection is None:
        return False
    driver: Any = connection.connection.driver_connection
    # By default BEGIN is sent before the first write only: before that nothing is locked.
    return bool(driver.in_transaction)
