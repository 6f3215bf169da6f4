"""Listens for the hints of other processes, on a connection of its own.

States: *connecting* → *listening* → (the connection ends, or does not answer) → *waiting*, longer each time up to a
limit → *connecting*. It runs only while somebody in this process waits for hints, and whoever begins to wait
does so when it listens, or has failed to for the first time. What is said while nobody listens is lost, so
when it listens again it wakes everybody once. Nothing depends on it: a worker that hears nothing polls.
"""

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final

from .faults import is_drivers

CHANNEL: Final = "queue_core"

_PROBE_EVERY: Final = 20.0
_ANSWER_WITHIN: Final = 5.0
_FIRST_WAIT: Final = 0.1
_LONGEST_WAIT: Final = 15.0

_log = logging.getLogger(__name__)


class Listener:
    """One LISTEN connection, kept up while it is used."""

    def __init__(
        self,
        connect: Callable[[], Coroutine[Any, Any, Any]],
        on_hint: Callable[[str], None],
        on_gap: Callable[[], None],
    ) -> None:
        self._connect = connect
        self._on_hint = on_hint
        self._on_gap = on_gap
        self._users = 0
        self._task: asyncio.Task[None] | None = None
        self._tried = asyncio.Event()

    @asynccontextmanager
    async def listening(self) -> AsyncGenerator[None]:
        """Listen as long as one of these is open."""
        self._users += 1
        if self._task is None:
            self._tried.clear()
            self._task = asyncio.create_task(self._run(), name="queue-core listen")
        try:
            await self._tried.wait()
            yield
        finally:
            self._users -= 1
            if not self._users:
                await self.close()

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _run(self) -> None:
        wait, down = _FIRST_WAIT, False
        while True:
            try:
                driver = await self._connect()
                try:
                    await self._listen_on(driver, recovered=down)
                    wait, down = _FIRST_WAIT, True
                finally:
                    # At once: a connection that does not answer would keep a polite goodbye waiting.
                    driver.terminate()
            except Exception as error:
                if not is_drivers(error):
                    raise
                if not down:
                    _log.warning("can't listen for new jobs (%s): polling until the database answers", error)
                down = True
            self._tried.set()
            await asyncio.sleep(wait * random.uniform(0.5, 1.0))  # noqa: S311 spreads listeners out
            wait = min(wait * 2, _LONGEST_WAIT)

    async def _listen_on(self, driver: Any, *, recovered: bool) -> None:
        ended = asyncio.Event()

        def on_end(_connection: object) -> None:
            ended.set()

        def on_hint(_connection: object, _pid: int, _channel: str, payload: str) -> None:
            self._on_hint(payload)

        driver.add_termination_listener(on_end)
        await driver.add_listener(CHANNEL, on_hint)
        if recovered:
            _log.info("listening for new jobs again")
            self._on_gap()
        self._tried.set()
        while not ended.is_set():
            try:
                async with asyncio.timeout(_PROBE_EVERY):
                    await ended.wait()
            except TimeoutError:
                # A line that went dead silently is only found out by asking.
                await driver.fetchval("SELECT 1", timeout=_ANSWER_WITHIN)
