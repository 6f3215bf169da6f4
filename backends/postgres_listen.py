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
        self._tried.set()
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _run(self) -> None:
        wait, missed, complained = _FIRST_WAIT, False, False
        while True:
            try:
                driver = await self._connect()
                try:
                    await self._listen_on(driver, missed=missed, complained=complained)
                    wait, complained = _FIRST_WAIT, False
                finally:
                    # At once: a connection that does not answer would keep a polite goodbye waiting.
                    driver.terminate()
            except Exception as error:  # noqa: BLE001 whatever it is, and if it is an event of the application's
                reason = f"{type(error).__name__}: {error}"
            else:
                reason = "the connection ended"
            if not complained:
                _log.warning("can't listen for new jobs (%s): polling until it works again", reason)
            missed = complained = True
            self._tried.set()
            await asyncio.sleep(wait * random.uniform(0.5, 1.0))  # noqa: S311 spreads listeners out
            wait = min(wait * 2, _LONGEST_WAIT)

    async def _listen_on(self, driver: Any, *, missed: bool, complained: bool) -> None:
        ended = asyncio.Event()

        def on_end(_connection: object) -> None:
            ended.set()

        def on_hint(_connection: object, _pid: int, _channel: str, payload: str) -> None:
            self._on_hint(payload)

        driver.add_termination_listener(on_end)
        async with asyncio.timeout(_ANSWER_WITHIN):
            await driver.add_listener(CHANNEL, on_hint)
        if complained:
            _log.info("listening for new jobs again")
        if missed:
            self._on_gap()
        self._tried.set()
        while not ended.is_set():
            try:
                async with asyncio.timeout(_PROBE_EVERY):
                    await ended.wait()
            except TimeoutError:
                # A line that went dead silently is only found out by asking.
                await driver.fetchval("SELECT 1", timeout=_ANSWER_WITHIN)
