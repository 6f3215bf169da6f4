"""Tells other processes of queues that have something new: at once, but each queue not more often than so.

The first hint for a queue goes out immediately. What follows within the rest is gathered and goes out
together at its end, so the last one is never missing. It happens beside the enqueue and after its commit: in
the transaction itself, NOTIFY makes all commits of the database wait for one another.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection
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
        self._closing = asyncio.Event()

    def announce(self, queues: Collection[QueueName]) -> None:
        """Tell others soon. Only for the event loop's own thread."""
        self._waiting.update(queues)
        if self._task is None and not self._closing.is_set():
            self._task = asyncio.create_task(self._run(), name="queue-core tell")
            self._task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._task = None

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        while self._waiting:
            now = clock()
            self._rested_at = {queue: at for queue, at in self._rested_at.items() if at > now}
            ready = self._waiting - self._rested_at.keys()
            if ready or self._closing.is_set():
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
        try:
            async with asyncio.timeout(seconds):
                await self._closing.wait()
        except TimeoutError:
            pass

    async def close(self) -> None:
        """Say what is left to say: whoever enqueues and ends has to be heard too."""
        self._closing.set()
        if self._task is not None:
            await asyncio.wait([self._task])
