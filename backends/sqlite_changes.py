"""Notices that some other connection has committed something to the SQLite file.

`PRAGMA data_version` changes then. It costs 20 µs on a plain connection, and needs no lock; through
aiosqlite's thread it would cost twenty times that. So it is asked here, on the event loop's own thread.
"""

import asyncio
import sqlite3
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

_EVERY: Final = 0.05


class Changes:
    """Asks for as long as somebody wants to know."""

    def __init__(self, path: Callable[[], Path], on_change: Callable[[], None]) -> None:
        self._path = path
        self._on_change = on_change
        self._users = 0
        self._task: asyncio.Task[None] | None = None
        self._connection: sqlite3.Connection | None = None

    @asynccontextmanager
    async def watched(self) -> AsyncGenerator[None]:
        """Watch as long as one of these is open; what was committed before is not seen as a change."""
        if self._task is None:
            self._connection = sqlite3.connect(self._path(), timeout=0, isolation_level=None)
            watching = self._run(self._connection, _version(self._connection))
            self._task = asyncio.create_task(watching, name="queue-core watch")
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                await self.close()

    async def close(self) -> None:
        task, self._task = self._task, None
        connection, self._connection = self._connection, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        if connection is not None:
            # Here and not in the task, which may have been cancelled before it began.
            connection.close()

    async def _run(self, connection: sqlite3.Connection, seen: int | None) -> None:
        while True:
            await asyncio.sleep(_EVERY)
            version = _version(connection)
            if version is not None and version != seen:
                seen = version
                self._on_change()


def _version(connection: sqlite3.Connection) -> int | None:
    try:
        return int(connection.execute("PRAGMA data_version").fetchone()[0])
    except sqlite3.Error:
        return None  # locked for a moment by a recovery, or a disk that fails; it is asked again soon
