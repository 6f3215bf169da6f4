"""Job classes and builders that many tests use."""

from typing import Any

from queue_core import Context, Job
from queue_core.ids import new_request_id
from queue_core.model import NewJob


class Note(Job, queue="notes"):
    """A small job with nothing special about it."""

    text: str = "hello"

    async def run(self, ctx: Context) -> None: ...


class Other(Job):
    """A job of another type, on the default queue."""

    number: int = 0

    async def run(self, ctx: Context) -> None: ...


def new_job(**changes: Any) -> NewJob:
    """A job at the seam, with what a test changes about it."""
    values: dict[str, Any] = {
        "request_id": new_request_id(),
        "job_type": "Note",
        "queue": "notes",
        "payload": "{}",
        "priority": 0,
        "max_attempts": 5,
    }
    return NewJob(**{**values, **changes})
