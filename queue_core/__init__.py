"""Durable background jobs for asyncio applications, in the database they already have."""

from typing import TYPE_CHECKING

from queue_core.context import Context
from queue_core.delivery import Delivery, Request, Transactional
from queue_core.errors import (
    AlreadyInitialized,
    BackendError,
    BackendUnavailable,
    ConfigurationError,
    JobRefused,
    KeyLocked,
    NotInitialized,
    PayloadError,
    QueueError,
    SchemaError,
    TransactionOpen,
    UnknownJobType,
    UnsupportedDatabase,
    WrongDatabase,
    WrongThread,
)
from queue_core.function import FunctionJob, job
from queue_core.job import Job
from queue_core.model import Enqueued, EnqueueStatus, JobId, JobStatus, QueueCounts, StoredJob
from queue_core.options import JobOptions
from queue_core.retry import Fixed, FullJitter, Linear, PowersOfTwo

if TYPE_CHECKING:
    from queue_core.queue import Queue

__all__ = [
    "AlreadyInitialized",
    "BackendError",
    "BackendUnavailable",
    "ConfigurationError",
    "Context",
    "Delivery",
    "EnqueueStatus",
    "Enqueued",
    "Fixed",
    "FullJitter",
    "FunctionJob",
    "Job",
    "JobId",
    "JobOptions",
    "JobRefused",
    "JobStatus",
    "KeyLocked",
    "Linear",
    "NotInitialized",
    "PayloadError",
    "PowersOfTwo",
    "Queue",
    "QueueCounts",
    "QueueError",
    "Request",
    "SchemaError",
    "StoredJob",
    "TransactionOpen",
    "Transactional",
    "UnknownJobType",
    "UnsupportedDatabase",
    "WrongDatabase",
    "WrongThread",
    "job",
]


def __getattr__(name: str) -> object:
    # SQLAlchemy takes most of the time of an import, and `queue-core --help` does not need it.
    if name == "Queue":
        from queue_core.queue import Queue

        return Queue
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
