"""A process that gives others something to claim: it does what it is told, a line at a time, and says `done`.

`python -m tests.support.sender '{"url": …}'`. It says `ready` once the queue is open; after `leave` it closes it and
ends, so whoever sees its end knows that it has told others all that it had to tell.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

from msgspec import Struct, json
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from queue_core.backend import Backend
from queue_core.config import QueueConfig
from queue_core.connect import connect
from queue_core.model import Claim, JobId, Outcome, Released, Retried, Snoozed, Token, WorkerId
from tests.support.children import Child, running
from tests.support.databases import Database
from tests.support.jobs import new_job
from tests.support.store import failure

_REPOSITORY = Path(__file__).parents[2]
_AT_ONCE = timedelta(0)


class Sender:
    """The process, as a test holds it. Its methods wait for the process, and not for what it tells others."""

    def __init__(self, child: Child) -> None:
        self._child = child

    async def do(self, *words: object) -> None:
        """Let it do something to its end."""
        self._child.hear(" ".join(map(str, words)))
        assert await asyncio.to_thread(self._child.says) == "done"

    async def leave(self) -> None:
        """Let it close its queue and end."""
        self._child.hear("leave")
        assert await asyncio.to_thread(self._child.says) == ""


class Sending(Struct, frozen=True, kw_only=True):
    """How one process sends."""

    url: str
    notify: bool = True
    rest: float | None = None
    """How many seconds pass between two hints for one queue, if not as many as usual."""


@contextmanager
def sending(database: Database, *, notify: bool = True, rest: float | None = None) -> Generator[Sender]:
    """A sender on a database that has our tables."""
    how = Sending(url=database.url, notify=notify, rest=rest)
    command = (sys.executable, "-m", "tests.support.sender", json.encode(how).decode())
    with running(*command, PYTHONPATH=str(_REPOSITORY)) as child:
        assert child.says() == "ready"
        yield Sender(child)


class _Actions:
    """What it can do; the words of a line are the name of a method and its arguments."""

    def __init__(self, engine: AsyncEngine, backend: Backend) -> None:
        self._backend = backend
        self._session = AsyncSession(engine)

    async def enqueue(self, queue: str, count: str = "1") -> None:
        await self._backend.enqueue_many([new_job(queue=queue) for _ in range(int(count))])

    async def join(self, queue: str) -> None:
        """Enqueue in a transaction that stays open."""
        await (await self._session.connection()).run_sync(self._backend.enqueue_on, [new_job(queue=queue)])

    async def commit(self) -> None:
        await self._session.commit()

    async def rollback(self) -> None:
        await self._session.rollback()

    async def retry(self, job_id: str, token: str) -> None:
        await self._settle(Retried(_claim(job_id, token), failure(), _AT_ONCE))

    async def snooze(self, job_id: str, token: str) -> None:
        await self._settle(Snoozed(_claim(job_id, token), _AT_ONCE))

    async def release(self, job_id: str, token: str) -> None:
        await self._settle(Released(_claim(job_id, token)))

    async def _settle(self, outcome: Outcome) -> None:
        assert await self._backend.settle([outcome]) == {outcome.claim.job_id}

    async def promote(self, queue: str) -> None:
        assert await self._backend.promote([queue], limit=10) == 1

    async def resume(self, queue: str) -> None:
        assert await self._backend.resume(queue)

    async def reap(self, queue: str) -> None:
        assert len((await self._backend.reap([queue], limit=10)).requeued) == 1

    async def sweep(self, queue: str, worker: str) -> None:
        swept = await self._backend.sweep_orphans([queue], [WorkerId(worker)], park=False, limit=10)
        assert len(swept.requeued) == 1

    async def tick(self, queue: str) -> None:
        tick_at = datetime(2026, 1, 1, tzinfo=UTC)
        assert await self._backend.enqueue_tick("hourly", tick_at, new_job(queue=queue)) is not None

    async def close(self) -> None:
        await self._backend.close()
        await self._session.close()


def _claim(job_id: str, token: str) -> Claim:
    return Claim(JobId(int(job_id)), Token(token))


async def _main(how: Sending) -> None:
    if how.rest is not None:
        telling: Any = import_module("queue_core.backends.telling")
        telling.REST = how.rest
    engine = create_async_engine(how.url)
    backend = connect(engine, QueueConfig(notify=how.notify), None)
    await backend.open(migrate=False)
    actions = _Actions(engine, backend)
    _say("ready")
    while (words := (await asyncio.to_thread(sys.stdin.readline)).split()) not in ([], ["leave"]):
        action: Callable[..., Awaitable[None]] = getattr(actions, words[0])
        await action(*words[1:])
        _say("done")
    await actions.close()
    await engine.dispose()


def _say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(_main(json.decode(sys.argv[1], type=Sending)))
