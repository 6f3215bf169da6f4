"""Misspelt and misvalued keywords of an enqueue."""

from queue_core import Job, Queue, job


class SendEmail(Job):
    to: str


@job
async def greet(name: str) -> None: ...


def doubled(attempt: int) -> float:
    return attempt * 2


async def misspelt(queue: Queue, email: SendEmail) -> None:
    await email.enqueue(prioritty=1)  # rejected
    await queue.enqueue(email, dealy=1)  # rejected
    await queue.enqueue_many([email], tennant="acme")  # rejected
    queue.enqueue_sync(email, conection=None)  # rejected
    email.with_delivery(prioritty=1)  # rejected
    email.with_delivery(session=None)  # rejected


async def misvalued(email: SendEmail) -> None:
    await email.enqueue(priority="1")  # rejected
    await email.enqueue(delay="1")  # rejected
    await email.enqueue(run_at=5)  # rejected
    await email.enqueue(key=5)  # rejected
    await email.enqueue(key="k", key_mode="drop")  # rejected
    await email.enqueue(key="k", key_scope="world")  # rejected
    await email.enqueue(headers={"a": 1})  # rejected
    await email.enqueue(backoff=doubled)  # rejected
    await email.enqueue(session=5)  # rejected
    await email.enqueue(connection="sqlite://")  # rejected
    email.with_delivery(max_attempts=0.5)  # rejected


async def not_a_job(queue: Queue) -> None:
    await queue.enqueue("ada")  # rejected
    await queue.enqueue(SendEmail)  # rejected
    await queue.enqueue(greet)  # rejected
    await queue.enqueue_many([5])  # rejected
    await queue.enqueue_many(SendEmail("ada"))  # rejected
