"""Misused job functions."""

from queue_core import Context, Job, job


@job
async def greet(ctx: Context, name: str, times: int = 1) -> str:
    return name * times


@job(queue="mail")
async def remind(to: str) -> None: ...


async def plain(name: str) -> None: ...


greet()  # rejected
greet(nmae="ada")  # rejected
greet(name=5)  # rejected
greet("ada", "twice")  # rejected
remind()  # rejected
remind(to=5)  # rejected
wrong: Job[int] = greet("ada")  # rejected
job(quue="mail")(plain)  # rejected
job(max_attempts="3")(plain)  # rejected
job("mail")  # rejected


async def enqueue() -> None:
    await greet("ada").enqueue(prioritty=1)  # rejected
    await greet.enqueue()  # rejected
