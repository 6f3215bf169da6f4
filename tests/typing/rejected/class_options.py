"""Misspelt and misvalued options of a job class."""

from queue_core import FullJitter, Job


class Misspelt(Job, quue="mail"): ...  # rejected


class Queue(Job, queue=5): ...  # rejected


class Attempts(Job, max_attempts="3"): ...  # rejected


class Aliases(Job, aliases=5): ...  # rejected


class Timeout(Job, timeout="5"): ...  # rejected


class Priority(Job, priority=0.5): ...  # rejected


class Backoff(Job, backoff=5): ...  # rejected


class NotCalled(Job, backoff=FullJitter): ...  # rejected


def to_text(attempt: int) -> str:
    return str(attempt)


class OtherFunction(Job, backoff=to_text): ...  # rejected
