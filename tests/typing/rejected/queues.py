"""Misspelt and misvalued settings of a queue, and what can't be registered."""

from sqlalchemy.ext.asyncio import AsyncEngine

from queue_core import Job, Queue


class SendEmail(Job):
    to: str


async def settings(engine: AsyncEngine) -> None:
    await Queue.init(engine, migrat=False)  # rejected
    await Queue.init(engine, synchronous="off")  # rejected
    await Queue.init("sqlite:///jobs.db")  # rejected
    Queue(engine, shcema="jobs")  # rejected
    Queue(engine, max_payload="5")  # rejected
    Queue(engine, key_patience="5")  # rejected


async def registering(engine: AsyncEngine, queue: Queue) -> None:
    await Queue.init(engine, jobs=[5])  # rejected
    await Queue.init(engine, jobs=SendEmail)  # rejected
    Queue.register()  # rejected
    Queue.register("SendEmail")  # rejected
    queue.register(SendEmail("ada"))  # rejected
    queue.register(int)  # rejected
    Queue.has_registered_jobs(5)  # rejected
