"""Counts what reaches the driver, through the `connect` event of the application's engine.

That event is copied to the queue's own connections, so this sees what runs on them too.
"""

from typing import Any

from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncEngine

_WRITES = ("INSERT", "UPDATE", "DELETE", "WITH")


class Spy:
    """Every statement of every connection of an engine and of its copies."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.statements: list[str] = []
        self.commits = 0
        self.connections = 0
        event.listen(engine.sync_engine, "connect", self._on_connect)

    def reset(self) -> None:
        self.statements.clear()
        self.commits = 0

    def _on_connect(self, connection: Any, _record: object) -> None:
        self.connections += 1
        watcher = _Watcher(self)
        if hasattr(connection.driver_connection, "add_query_logger"):
            connection.driver_connection.add_query_logger(watcher.on_record)
        else:
            connection.run_async(watcher.trace)


class _Watcher:
    """One connection: whether it is in a transaction decides what a statement commits."""

    def __init__(self, spy: Spy) -> None:
        self._spy = spy
        self._in_transaction = False

    async def trace(self, driver: Any) -> None:
        await driver.set_trace_callback(self.on_statement)

    async def on_record(self, record: Any) -> None:
        self.on_statement(record.query)

    def on_statement(self, sql: str) -> None:
        if "typeinfo_tree" in sql or "'jit'" in sql:
            return  # asyncpg learns the types of a new connection
        self._spy.statements.append(sql)
        word = sql.split(None, 1)[0].rstrip(";").upper() if sql.strip() else ""
        if word == "BEGIN":
            self._in_transaction = True
        elif word in ("COMMIT", "ROLLBACK"):
            self._spy.commits += word == "COMMIT"
            self._in_transaction = False
        elif word in _WRITES and not self._in_transaction:
            self._spy.commits += 1
