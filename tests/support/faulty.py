"""Faults at the seam: a producer that fails when the test says so, typed by the protocol."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import timedelta

from sqlalchemy import Connection

from queue_core.errors import KeyLocked
from queue_core.model import Enqueued, EnqueueStatus, JobId, NewJob, Wakeup


class FaultyProducer:
    """Fails each call with the next of the given errors; None is a call that works."""

    patience = timedelta(milliseconds=1)

    def __init__(self, fail: Sequence[Exception | None]) -> None:
        self._fail = list(fail)

    async def enqueue_many(self, jobs: Sequence[NewJob], *, patience: timedelta | None = None) -> Sequence[Enqueued]:
        if error := self._fail.pop(0):
            raise error
        return [Enqueued(JobId(number), EnqueueStatus.INSERTED) for number, _ in enumerate(jobs, 1)]

    def enqueue_on(self, connection: Connection, jobs: Sequence[NewJob]) -> Sequence[Enqueued]:
        raise AssertionError("the intake has no transaction to join")

    def wakeups(self, queues: Collection[str]) -> AbstractAsyncContextManager[AsyncIterator[Wakeup]]:
        raise AssertionError("the intake waits for nothing")


class HoldingProducer(FaultyProducer):
    """Somebody's open transaction holds some keys; notes which keys came together, and how patient they were."""

    def __init__(self, held: set[str]) -> None:
        super().__init__([])
        self.held = held
        self.calls: list[tuple[set[str | None], timedelta | None]] = []
        self.written: list[NewJob] = []
        self.on_call: Callable[[set[str | None]], None] = lambda _: None

    async def enqueue_many(self, jobs: Sequence[NewJob], *, patience: timedelta | None = None) -> Sequence[Enqueued]:
        keys = {job.unique_key for job in jobs}
        self.calls.append((keys, patience))
        self.on_call(keys)
        await asyncio.sleep(0)
        self._fail.append(KeyLocked("held") if self.held & keys else None)
        answers = await super().enqueue_many(jobs, patience=patience)
        self.written += jobs
        return answers
