"""Wake-ups inside one process: whoever waits for a queue is told when something was committed to it."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Self

from queue_core.model import QueueName, Wakeup


class _Subscriber:
    """The hints that one waiter has not taken yet; equal ones are one.

    No generator: one that is cancelled while it waits has ended, and a worker waits with a time limit.
    """

    def __init__(self, queues: Collection[QueueName]) -> None:
        self._queues = frozenset(queues)
        self._waiting: set[QueueName] = set()
        self._news = asyncio.Event()

    def tell(self, queues: Collection[QueueName] | None) -> None:
        if relevant := self._queues if queues is None else self._queues.intersection(queues):
            self._waiting |= relevant
            self._news.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Wakeup:
        await self._news.wait()
        queue = self._waiting.pop()
        if not self._waiting:
            self._news.clear()
        return Wakeup(queue)


class Hub:
    """Passes hints on to the subscribers of this process. Only for the event loop's own thread."""

    def __init__(self) -> None:
        self._subscribers: set[_Subscriber] = set()

    def announce(self, queues: Collection[QueueName]) -> None:
        """Say that these queues have something new, now that it is committed."""
        for subscriber in self._subscribers:
            subscriber.tell(queues)

    def announce_all(self) -> None:
        """Say that something may be new anywhere: hints may have been missed."""
        for subscriber in self._subscribers:
            subscriber.tell(None)

    @asynccontextmanager
    async def wakeups(self, queues: Collection[QueueName]) -> AsyncGenerator[AsyncIterator[Wakeup]]:
        subscriber = _Subscriber(queues)
        self._subscribers.add(subscriber)
        try:
            yield subscriber
        finally:
            self._subscribers.discard(subscriber)
