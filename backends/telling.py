"""Tells other processes of queues that have something new: at once, but each queue not more often than so.

The first hint for a queue goes out immediately. What follows within the rest is gathered and goes out
together at its end, so the last one is never missing. It happens beside the enqueue and after its commit: in
the transaction itself, NOTIFY makes all commits of the database wait for one another.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from typing import Final

from queue_core.errors import BackendError
from queue_core.model import QueueName

from .faults import is_drivers

REST: Final = 0.075


class Telling:
    """Gathers hints, and sends them in a task that ends when there is nothing left to say."""

    def __init__(self, tell: Callable[[frozenset[QueueName]], Awaitable[None]]) -> None:
        self._tell = tell
        self._waiting: set[QueueName] = set()
        self._rested_at: dict[QueueName, float] = {}
        self._task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._closing = False

    def announce(self, queues: Collection[QueueName]) -> None:
        """Tell others soon. Only for the event loop's own thread."""
        if self._closing:
            return
        self._waiting.update(queues)
        self._news.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="queue-core tell")

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        while self._waiting:
            now = clock()
            self._rested_at = {queue: at for queue, at in self._rested_at.items() if at > now}
            ready = self._waiting - self._rested_at.keys()
            if ready or self._closing:
                ready = ready or set(self._waiting)
                self._waiting -= ready
                self._rested_at.update(dict.fromkeys(ready, now + REST))
                try:
                    await self._tell(frozenset(ready))
                except Exception as error:
                    # A hint, and no more: the workers poll.
                    if not isinstance(error, BackendError) and not is_drivers(error):
                        raise
            else:
                await self._sleep(min(self._rested_at[queue] for queue in self._waiting) - now)

    async def _sleep(self, seconds: float) -> None:
        """Until then, or until there is something to say that need not wait."""
        self._news.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()

    async def close(self) -> None:
        """Say what is left to say: whoever enqueues and ends has to be heard too."""
        self._closing = True
        self._news.set()
        if self._task is not None:
            await asyncio.wait([self._task])
