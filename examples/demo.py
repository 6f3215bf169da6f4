"""Every way to enqueue, on a SQLite file of its own, and what each of them costs.

    python examples/demo.py
    python examples/demo.py postgresql+asyncpg://user@host/database

The file is temporary; on a database that you name, the tables stay and so do the jobs.
"""

import asyncio
import logging
import sys
import tempfile
import time
from collections.abc import Awaitable, Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from queue_core import Context, Enqueued, EnqueueStatus, Job, Queue


class SendEmail(Job, queue="mail", max_attempts=5, timeout=30):
    """A job class: its fields are what is stored."""

    to: str
    subject: str = "Welcome"

    async def run(self, ctx: Context) -> None:
        print(f"attempt {ctx.attempt} of {ctx.max_attempts}: {self.subject} -> {self.to}")


class ResizeImage(Job, queue="images", priority=-10):
    path: str
    width: int

    async def run(self, ctx: Context) -> None:
        print(f"{self.path} to {self.width} pixels")


class Progress:
    """One line that moves in a terminal; in a file, a line for each step."""

    def __init__(self, title: str, total: int) -> None:
        self._title = title
        self._total = total
        self._done = 0
        self._started = time.perf_counter()

    def advance(self, count: int = 1) -> None:
        self._done += count
        if sys.stdout.isatty() and (self._done % 50 == 0 or self._done == self._total):
            filled = 24 * self._done // self._total
            print(f"\r  {self._title:<26} {'█' * filled:·<24} {self._done:>6,}", end="", flush=True)

    def finish(self, remark: str) -> None:
        seconds = time.perf_counter() - self._started
        start = "\r" if sys.stdout.isatty() else ""
        cost = seconds / self._total * 1e6
        print(f"{start}  {self._title:<26} {self._total:>7,} {seconds:>8.2f} s {cost:>8,.0f} µs each   {remark}")


@contextmanager
def measured(title: str, total: int, remark: str) -> Generator[Progress]:
    progress = Progress(title, total)
    yield progress
    progress.finish(remark)


async def one_at_a_time(count: int) -> None:
    with measured("one after the other", count, "each durable before the next") as progress:
        for number in range(count):
            await SendEmail(to=f"user{number}@example.com").enqueue()
            progress.advance()


async def all_at_once(count: int) -> None:
    with measured("all at once", count, "concurrent enqueues share commits") as progress:

        async def one(number: int) -> None:
            await SendEmail(to=f"user{number}@example.com").enqueue()
            progress.advance()

        await asyncio.gather(*(one(number) for number in range(count)))


async def in_bulk(queue: Queue, count: int) -> None:
    with measured("in bulk", count, "one transaction") as progress:
        await queue.enqueue_many(ResizeImage(path=f"{number}.png", width=640) for number in range(count))
        progress.advance(count)


async def by_key(count: int, keys: int) -> None:
    progress = Progress("by key", count)

    async def one(number: int) -> Enqueued:
        enqueued = await SendEmail(to="ada@example.com").enqueue(key=f"welcome:{number % keys}", delay=3600)
        progress.advance()
        return enqueued

    answers: Sequence[Enqueued] = await gather(one(number) for number in range(count))
    inserted = sum(answer.status is EnqueueStatus.INSERTED for answer in answers)
    progress.finish(f"{inserted} inserted, {count - inserted} were there already")


async def gather(calls: Iterable[Awaitable[Enqueued]]) -> Sequence[Enqueued]:
    return await asyncio.gather(*calls)


async def in_transactions(engine: AsyncEngine, count: int) -> None:
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE IF NOT EXISTS demo_orders (id integer, email text)"))
    with measured("in your own transaction", count, "every second one rolled back") as progress:
        for number in range(count):
            async with AsyncSession(engine) as session:
                order = {"id": number, "email": "ada@example.com"}
                await session.execute(text("INSERT INTO demo_orders VALUES (:id, :email)"), order)
                await SendEmail(to="ada@example.com", subject=f"Order {number}").enqueue(session=session)
                await (session.commit() if number % 2 else session.rollback())
            progress.advance()


async def main(url: str) -> None:
    engine = create_async_engine(url)
    queue = await Queue.init(engine, jobs=[SendEmail, ResizeImage])
    print(f"queue-core on {engine.dialect.name}, every commit durable\n")
    try:
        await one_at_a_time(1_000)
        await all_at_once(5_000)
        await in_bulk(queue, 20_000)
        await by_key(2_000, keys=200)
        await in_transactions(engine, 200)
        print(f"\n  {'queue':<26} {'pending':>7} {'scheduled':>10}")
        for name, counts in (await queue.counts()).items():
            print(f"  {name:<26} {counts.pending:>7,} {counts.scheduled:>10,}")
    finally:
        await queue.close()
        await engine.dispose()


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        given = sys.argv[1] if len(sys.argv) > 1 else f"sqlite+aiosqlite:///{Path(folder) / 'demo.db'}"
        asyncio.run(main(given))
