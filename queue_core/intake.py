"""Concurrent enqueues share commits.

An enqueue joins the lane for its kind and waits. A lane is a task that takes all that is waiting (up to
BATCH), writes it in one call, answers, and looks again; it ends when nothing is left. Nobody waits for
company: the first enqueue goes out alone, and whatever arrives while it is under way goes together.

There are three lanes, because of what each can wait for:

plain    no key; waits for nobody
keyed    may meet a key that somebody's open transaction holds. The whole batch waits for it for a short while,
         then everyone is written alone, with hardly any patience, and whoever is still stuck moves on to
held     keys known to be held. They take turns with a short wait each, until their time is up. A new enqueue of
         a key that is in here comes straight here, so that the keyed lane never waits for it again

A failure reaches exactly those it concerns: a batch that the database refuses is halved until the
refused job is alone. A caller that is cancelled leaves the lane, or, if its job is already on the way,
just does not hear the answer; the others notice nothing.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta

from queue_core.backend import Producer
from queue_core.errors import BackendUnavailable, KeyLocked, NotInitialized, QueueError
from queue_core.model import Enqueued, NewJob

BATCH = 1_000
_ALONE = timedelta(milliseconds=10)
_TURN = timedelta(milliseconds=100)


class _Waiter:
    """One enqueue that has not been answered."""

    __slots__ = ("answer", "give_up_at", "job")

    def __init__(self, job: NewJob, answer: asyncio.Future[Enqueued], give_up_at: float) -> None:
        self.job = job
        self.answer = answer
        self.give_up_at = give_up_at

    def resolve(self, enqueued: Enqueued) -> None:
        if not self.answer.done():
            self.answer.set_result(enqueued)

    def fail(self, error: BaseException) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class Intake:
    """Takes single jobs and hands them to the backend in batches."""

    def __init__(self, producer: Producer, *, key_patience: timedelta, give_up_after: timedelta) -> None:
        self._producer = producer
        self._key_patience = key_patience
        self._give_up_after = give_up_after.total_seconds()
        self._plain: deque[_Waiter] = deque()
        self._keyed: deque[_Waiter] = deque()
        self._held: deque[_Waiter] = deque()
        self._held_keys: set[str] = set()
        self._lanes: dict[str, asyncio.Task[None]] = {}
        self._closed = False

    async def submit(self, job: NewJob) -> Enqueued:
        """Wait until the job is durable."""
        if self._closed:
            raise NotInitialized("the queue is closed: enqueue before close(), or open it again")
        answer: asyncio.Future[Enqueued] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(job, answer, time.monotonic() + self._give_up_after)
        if job.unique_key is None:
            self._plain.append(waiter)
            self._start("plain")
        elif job.unique_key in self._held_keys:
            self._held.append(waiter)
            self._start("held")
        else:
            self._keyed.append(waiter)
            self._start("keyed")
        return await answer

    async def close(self) -> None:
        """Write what is waiting, then take nothing more."""
        self._closed = True
        while self._lanes:
            await asyncio.wait(list(self._lanes.values()))

    def _start(self, lane: str) -> None:
        if lane not in self._lanes:
            run = {"plain": self._run_plain, "keyed": self._run_keyed, "held": self._run_held}[lane]
            task = asyncio.create_task(run(), name=f"queue-core intake ({lane})")
            self._lanes[lane] = task
            task.add_done_callback(lambda _: self._ended(lane))

    def _ended(self, lane: str) -> None:
        del self._lanes[lane]
        # Something may have come in between the lane's last look and its end.
        if {"plain": self._plain, "keyed": self._keyed, "held": self._held}[lane]:
            self._start(lane)

    async def _run_plain(self) -> None:
        while batch := _take(self._plain):
            await self._write(batch, None)

    async def _run_keyed(self) -> None:
        while batch := _take(self._keyed):
            try:
                await self._write(batch, self._key_patience)
            except KeyLocked:
                for waiter in batch:
                    await self._write_alone(waiter)

    async def _write_alone(self, waiter: _Waiter) -> None:
        try:
            await self._write([waiter], _ALONE)
        except KeyLocked:
            self._held_keys.add(str(waiter.job.unique_key))
            self._held.append(waiter)
            self._start("held")

    async def _run_held(self) -> None:
        while self._held:
            waiter = self._held.popleft()
            if waiter.answer.done():
                self._release_key(waiter)
                continue
            try:
                await self._write([waiter], _TURN)
            except KeyLocked as error:
                if time.monotonic() < waiter.give_up_at:
                    self._held.append(waiter)
                    continue
                waiter.fail(error)
            self._release_key(waiter)

    def _release_key(self, waiter: _Waiter) -> None:
        key = waiter.job.unique_key
        if key is not None and all(other.job.unique_key != key for other in self._held):
            self._held_keys.discard(key)

    async def _write(self, batch: Sequence[_Waiter], patience: timedelta | None) -> None:
        """Write a batch and answer; a `KeyLocked` is the only error that comes out, with nobody answered."""
        try:
            answers = await self._producer.enqueue_many([waiter.job for waiter in batch], patience=patience)
        except KeyLocked:
            raise
        except asyncio.CancelledError:
            # Only the end of the event loop cancels a lane.
            for waiter in batch:
                waiter.answer.cancel()
            raise
        except BackendUnavailable as error:
            # The same for everyone: smaller batches would fail as well.
            for waiter in batch:
                waiter.fail(error)
        except QueueError as error:
            await self._divide(batch, patience, error)
        except Exception as error:  # noqa: BLE001 a bug in a backend, too, belongs to whoever waits
            for waiter in batch:
                waiter.fail(error)
        else:
            for waiter, answer in zip(batch, answers, strict=True):
                waiter.resolve(answer)

    async def _divide(self, batch: Sequence[_Waiter], patience: timedelta | None, error: QueueError) -> None:
        if len(batch) == 1:
            batch[0].fail(error)
            return
        middle = len(batch) // 2
        for half in (batch[:middle], batch[middle:]):
            try:
                await self._write(half, patience)
            except KeyLocked:
                for waiter in half:
                    await self._write_alone(waiter)


def _take(lane: deque[_Waiter]) -> Sequence[_Waiter]:
    """The next batch, without those whose caller has gone."""
    batch: list[_Waiter] = []
    while lane and len(batch) < BATCH:
        waiter = lane.popleft()
        if not waiter.answer.done():
            batch.append(waiter)
    return batch
