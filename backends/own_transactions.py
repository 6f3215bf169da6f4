"""Notices that a task has written in a transaction of its own on the application's engine.

On SQLite an open write transaction keeps every other writer out. A task that enqueues on our connection
meanwhile would wait for itself until the busy timeout, so it is told at once. Other tasks just wait: the
transaction may well end before their time is up.
"""

import asyncio
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

from sqlalchemy import Connection, Engine, event


class OwnTransactions:
    """Which transactions each task has begun on one engine, and how many changes were made before."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._begun: WeakKeyDictionary[asyncio.Task[Any], list[tuple[ReferenceType[Connection], int]]] = (
            WeakKeyDictionary()
        )
        event.listen(engine, "begin", self._on_begin)

    def close(self) -> None:
        event.remove(self._engine, "begin", self._on_begin)

    def _on_begin(self, connection: Connection) -> None:
        try:
            task = asyncio.current_task()
        except RuntimeError:
            return
        if task is not None:
            still_open = [begun for begun in self._begun.get(task, ()) if _is_open(begun[0]())]
            self._begun[task] = [*still_open, (ref(connection), _changes(connection))]

    def has_written(self) -> bool:
        """Whether the current task has an open transaction with changes in it."""
        task = asyncio.current_task()
        begun = self._begun.get(task, ()) if task is not None else ()
        return any(
            connection is not None and _is_open(connection) and _changes(connection) != before
            for connection, before in ((reference(), before) for reference, before in begun)
        )


def _is_open(connection: Connection | None) -> bool:
    return (
        connection is not None and not connection.closed and not connection.invalidated and connection.in_transaction()
    )


def _changes(connection: Connection) -> int:
    driver: Any = connection.connection.driver_connection
    return int(driver.total_changes)
