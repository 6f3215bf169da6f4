"""The settings of a queue, with their defaults, in one place."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeAlias, TypedDict, cast

from queue_core.checks import Duration, check_duration, check_identifier, check_int, check_name, shown
from queue_core.errors import ConfigurationError
from queue_core.job import unknown_option
from queue_core.payload import MAX_PAYLOAD

History: TypeAlias = bool | Collection[str]
"""Whose finished jobs are kept: nobody's, everybody's, or those of the named queues."""


class QueueSettings(TypedDict, total=False):
    """The keywords of `Queue` and `Queue.init`; what they mean and their defaults are in `QueueConfig`."""

    schema: str | None
    migrate: bool
    max_payload: int
    synchronous: Literal["full", "normal"]
    give_up_after: Duration
    key_patience: Duration
    history: History
    notify: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueConfig:
    """How one queue uses its database."""

    schema: str | None = None
    """The Postgres schema of the tables; it is created when it is missing."""
    migrate: bool = True
    """False only checks the tables, for deployments that run `queue-core migrate` themselves."""
    max_payload: int = MAX_PAYLOAD
    """The largest payload in bytes."""
    synchronous: Literal["full", "normal"] = "full"
    """SQLite only. `normal` is faster, and a power failure may take the last commits with it."""
    give_up_after: timedelta = timedelta(seconds=10)
    """How long a call goes on trying, while the database is away or locked or a key is held by somebody's open
    transaction, before it raises `BackendUnavailable`."""
    key_patience: timedelta = timedelta(milliseconds=200)
    """How long enqueues with a key share a wait for a key that an open transaction holds, before each is on its own."""
    history: History = False
    """Whether finished jobs are kept in the history: of no queue, of all (True), or of the named ones."""
    notify: bool = True
    """Whether other processes are told of new jobs at once. Without, their workers find them at the next poll."""

    @classmethod
    def of(cls, settings: QueueSettings) -> "QueueConfig":
        """The checked configuration of what a caller gave."""
        known = tuple(QueueSettings.__annotations__)
        unknown = {name: value for name, value in settings.items() if name not in known}
        if unknown:
            raise ConfigurationError(unknown_option("Queue", unknown, ("jobs", *known)))
        return cls(**cast("dict[str, Any]", settings))

    def __post_init__(self) -> None:
        if self.schema is not None:
            check_identifier(self.schema, "schema")
        check_int(self.max_payload, "max_payload", 1, 256 * 1024 * 1024)
        # Seconds are taken too; inside they are always a timedelta.
        for field in ("give_up_after", "key_patience"):
            object.__setattr__(self, field, check_duration(getattr(self, field), field, zero=False))
        if not isinstance(self.history, bool):
            if isinstance(self.history, str) or not isinstance(self.history, Collection):
                raise ConfigurationError(
                    f"history must be True, False or a collection of queue names, got {shown(self.history)}"
                )
            names = frozenset(check_name(name, "history") for name in self.history)
            object.__setattr__(self, "history", names)
        if not isinstance(self.notify, bool):
            raise ConfigurationError(f"notify must be True or False, got {shown(self.notify)}")
        if self.synchronous not in ("full", "normal"):
            raise ConfigurationError(f"synchronous must be 'full' or 'normal', got {shown(self.synchronous)}")
