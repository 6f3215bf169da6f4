"""Concurrent enqueues share commits.

An enqueue joins the lane for its kind and waits. A lane is a task that takes all that is waiting (up to
a limit), writes it in one call, answers, and looks again; it ends when nothing is left. Nobody waits for
company: the first enqueue goes out alone, and whatever arrives while it is under way goes together.

There are three lanes, because of what each can wait for:

plain    no key; waits for nobody
keyed    may meet a key that somebody's open transaction holds. The batch waits for it for a short while, is then
         halved, with hardly any patience, until the key is alone, and that moves on to
held     keys known to be held, each with all that wait for it. They take turns with a short wait each, until the
         time of those who wait is up. The keyed lane passes on whoever comes for a key that is in here, behind the
         earlier ones: it never waits for that key again, and the order is kept

A failure reaches exactly those it concerns: a batch in which the database refuses a job is halved until
that job is alone. A caller that is cancelled leaves the lane, or, if its job is already on the way, just
does not hear the answer; the others notice nothing.
"""

import asyncio
import copy
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from datetime import timedelta
from itertools import chain
from typing import Any

from queue_core.backend import Producer
from queue_core.errors import JobRefused, KeyLocked, NotInitialized
from queue_core.model import Enqueued, NewJob

BATCH = 1_000
BATCH_BYTES = 4_000_000
_TURN = timedelta(milliseconds=100)
_SHORTEST = timedelta(milliseconds=1)


class _Waiter:
    """One enqueue that has not been answered."""

    __slots__ = ("answer", "give_up_at", "job")

    def __init__(self, job: NewJob, give_up_at: float) -> None:
        self.job = job
        self.answer: asyncio.Future[Enqueued] = asyncio.get_running_loop().create_future()
        self.give_up_at = give_up_at

    def resolve(self, enqueued: Enqueued) -> None:
        if not self.answer.done():
            self.answer.set_result(enqueued)

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            # One for each: a shared one would show every caller the traceback of the last that raised it.
            own = copy.copy(error)
            own.__cause__ = error.__cause__
            self.answer.set_exception(own)


class Intake:
    """Takes single jobs and hands them to the backend in batches."""

    def __init__(self, producer: Producer, *, key_patience: timedelta, give_up_after: timedelta) -> None:
        self._producer = producer
        # Half for the first try, the rest for halving: ten times is enough for a batch.
        self._together = key_patience / 2
        self._apart = max(key_patience / 20, _SHORTEST)
        self._give_up_after = give_up_after.total_seconds()
        self._plain: deque[_Waiter] = deque()
        self._keyed: deque[_Waiter] = deque()
        self._held: dict[str, list[_Waiter]] = {}
        self._lanes: dict[str, asyncio.Task[None]] = {}
        self._closed = False

    async def submit(self, job: NewJob) -> Enqueued:
        """Wait until the job is durable."""
        if self._closed:
            raise NotInitialized("the queue is closed: enqueue before close(), or open it again")
        waiter = _Waiter(job, time.monotonic() + self._give_up_after)
        if job.unique_key is None:
            self._plain.append(waiter)
            self._start("plain", self._run_plain)
        else:
            self._keyed.append(waiter)
            self._start("keyed", self._run_keyed)
        return await waiter.answer

    async def close(self) -> None:
        """Write what is waiting, then take nothing more."""
        self._closed = True
        while self._lanes:
            await asyncio.wait(list(self._lanes.values()))

    def _start(self, lane: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if lane in self._lanes:
            return

        def ended(_: "asyncio.Task[None]") -> None:
            del self._lanes[lane]
            # Something may have come in between the lane's last look and its end.
            if {"plain": self._plain, "keyed": self._keyed, "held": self._held}[lane]:
                self._start(lane, run)

        self._lanes[lane] = asyncio.create_task(run(), name=f"queue-core intake ({lane})")
        self._lanes[lane].add_done_callback(ended)

    async def _run_plain(self) -> None:
        while batch := _take(self._plain):
            await self._write(batch, None)

    async def _run_keyed(self) -> None:
        while batch := _take(self._keyed):
            await self._write(batch, self._together)

    async def _run_held(self) -> None:
        while self._held:
            # Shorter turns for many keys, so that each comes round before its time is up.
            turn = max(_TURN / len(self._held), _SHORTEST)
            for key in list(self._held):
                waiters = [waiter for waiter in self._held[key] if not waiter.answer.done()]
                if waiters:
                    await self._write(waiters, turn, held=True)
                left = [waiter for waiter in self._held[key] if not waiter.answer.done()]
                if left:
                    self._held[key] = left
                else:
                    del self._held[key]

    async def _write(self, batch: Sequence[_Waiter], patience: timedelta | None, *, held: bool = False) -> None:
        """Write a batch. Everyone in it gets an answer, or goes to the held ones, or stays there."""
        if self._held and not held:
            # A key may have moved on since they came: behind those who wait for it already, or the order is lost.
            batch = [waiter for waiter in batch if not self._joins_held(waiter)]
            if not batch:
                return
        try:
            answers = await self._producer.enqueue_many([waiter.job for waiter in batch], patience=patience)
        except asyncio.CancelledError:
            # Only the end of the event loop cancels a lane.
            for waiter in batch:
                waiter.answer.cancel()
            raise
        except KeyLocked as error:
            if held:
                _fail_late(batch, error)
            elif len({waiter.job.unique_key for waiter in batch}) == 1 and batch[0].job.unique_key is not None:
                self._held[batch[0].job.unique_key] = list(batch)
                self._start("held", self._run_held)
            else:
                await self._write_halves(batch, self._apart, error, held=held)
        except JobRefused as error:
            await self._write_halves(batch, patience, error, held=held)
        except Exception as error:  # noqa: BLE001 the same for everyone, and a bug in a backend, too, has to be heard
            for waiter in batch:
                waiter.fail(error)
        else:
            for waiter, answer in zip(batch, answers, strict=True):
                waiter.resolve(answer)

    def _joins_held(self, waiter: _Waiter) -> bool:
        waiting = self._held.get(waiter.job.unique_key or "")
        if waiting is not None:
            waiting.append(waiter)
        return waiting is not None

    async def _write_halves(
        self, batch: Sequence[_Waiter], patience: timedelta | None, error: Exception, *, held: bool
    ) -> None:
        if len(batch) == 1:
            batch[0].fail(error)
            return
        try:
            for half in _halves(batch):
                await self._write(half, patience, held=held)
        except asyncio.CancelledError:
            for waiter in batch:
                waiter.answer.cancel()
            raise


def _fail_late(batch: Sequence[_Waiter], error: Exception) -> None:
    """Answer those whose time is up; the others go on waiting."""
    now = time.monotonic()
    for waiter in batch:
        if now >= waiter.give_up_at:
            waiter.fail(error)


def _take(lane: deque[_Waiter]) -> Sequence[_Waiter]:
    """The next batch, without those whose caller has gone."""
    batch: list[_Waiter] = []
    size = 0
    while lane and len(batch) < BATCH and size < BATCH_BYTES:
        waiter = lane.popleft()
        if not waiter.answer.done():
            batch.append(waiter)
            size += len(waiter.job.payload)
    return batch


def _halves(batch: Sequence[_Waiter]) -> tuple[Sequence[_Waiter], Sequence[_Waiter]]:
    """Two parts, with the requests for one key together as long as there are several keys."""
    groups: dict[object, list[_Waiter]] = {}
    for waiter in batch:
        groups.setdefault(waiter.job.unique_key or id(waiter), []).append(waiter)
    parts = list(groups.values()) if len(groups) > 1 else [[waiter] for waiter in batch]
    middle = len(parts) // 2
    return list(chain(*parts[:middle])), list(chain(*parts[middle:]))
