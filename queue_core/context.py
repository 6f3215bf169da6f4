"""What a handler is told about the run it is in."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from queue_core.model import JobId, QueueName


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """One run of one job, as its handler sees it."""

    job_id: JobId
    attempt: int
    """1 in the first run."""
    max_attempts: int
    queue: QueueName
    tenant: str | None = None
    note: str | None = None
    """Why the job was enqueued: the `context` text of the enqueue."""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    deadline_at: datetime | None = None
