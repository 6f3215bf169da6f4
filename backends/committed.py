"""Call back when a transaction that belongs to somebody else has been committed.

SQLAlchemy says `commit` on a connection just *before* the driver commits, and a session's `after_commit`
also when only a savepoint was released. So the connection's event is taken (it is silent for savepoints),
and the transaction is then watched until it is no longer active, which is when the commit has returned.
"""

import asyncio
from collections.abc import Callable
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import Connection, event
from sqlalchemy.engine import RootTransaction

from queue_core.model import QueueName

_FIRST_LOOK = 0.0005
_SLOWEST_LOOK = 0.05
_LAST_WAIT = 1.0


class CommitWatch:
    """Remembers what each open transaction has enqueued, and tells it after the commit."""

    def __init__(self, announce: Callable[[frozenset[QueueName]], None]) -> None:
        self._announce = announce
        self._loop = asyncio.get_running_loop()
        self._pending: WeakKeyDictionary[RootTransaction, frozenset[QueueName]] = WeakKeyDictionary()
        self._listening: WeakSet[Connection] = WeakSet()
        self._watchers: set[asyncio.Task[None]] = set()
        self._closed = False

    def expect(self, connection: Connection, queues: frozenset[QueueName]) -> None:
        """Announce these queues once the connection's transaction is committed. Any thread."""
        transaction = connection.get_transaction()
        if not queues or not isinstance(transaction, RootTransaction):
            return
        self._pending[transaction] = self._pending.get(transaction, frozenset()) | queues
        if connection not in self._listening:
            self._listening.add(connection)
            event.listen(connection, "commit", self._on_commit)
            event.listen(connection, "commit_twophase", self._on_commit)

    def _on_commit(self, connection: Connection, *_: object) -> None:
        transaction = connection.get_transaction()
        if self._closed or not isinstance(transaction, RootTransaction):
            return
        queues = self._pending.pop(transaction, None)
        if queues is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._watch, transaction, queues)

    def _watch(self, transaction: RootTransaction, queues: frozenset[QueueName]) -> None:
        task = asyncio.create_task(self._tell_when_done(transaction, queues), name="queue-core commit watch")
        self._watchers.add(task)
        task.add_done_callback(self._watchers.discard)

    async def _tell_when_done(self, transaction: RootTransaction, queues: frozenset[QueueName]) -> None:
        wait = _FIRST_LOOK
        while transaction.is_active:
            await asyncio.sleep(wait)
            wait = min(wait * 2, _SLOWEST_LOOK)
        self._announce(queues)

    async def close(self) -> None:
        """Tell of commits that are just returning; what is still open then is not waited for."""
        await asyncio.sleep(0)  # a commit on this very thread has only just asked for its watcher
        self._closed = True
        if self._watchers:
            await asyncio.wait(self._watchers, timeout=_LAST_WAIT)
        for task in self._watchers:
            task.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
