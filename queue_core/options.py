"""What a job class says about its delivery, and the defaults behind it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from queue_core.checks import Duration, check_duration, check_int, check_name, shown
from queue_core.errors import ConfigurationError
from queue_core.retry import DEFAULT_BACKOFF, Backoff, check_backoff

MAX_ATTEMPTS_LIMIT = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions:
    """The options of one job class. A subclass of a job class inherits all but the names."""

    name: str
    aliases: tuple[str, ...] = ()
    queue: str = "default"
    max_attempts: int = 5
    """Total runs, the first one included."""
    timeout: timedelta | None = None
    priority: int = 0
    backoff: Backoff = DEFAULT_BACKOFF

    def __post_init__(self) -> None:
        check_name(self.name, "name of a job")
        for alias in self.aliases:
            check_name(alias, f"an alias of {self.name}")
        if self.name in self.aliases:
            raise ConfigurationError(f"aliases of {self.name} are its older names; take {self.name!r} itself out")
        check_name(self.queue, f"queue of {self.name}")
        check_int(self.max_attempts, f"max_attempts of {self.name}", 1, MAX_ATTEMPTS_LIMIT)
        check_int(self.priority, f"priority of {self.name}", -100, 100)
        check_backoff(self.backoff, f"backoff of {self.name}")

    def derived(
        self,
        *,
        name: str,
        aliases: Sequence[str] = (),
        queue: str | None,
        max_attempts: int | None,
        timeout: Duration | None,
        priority: int | None,
        backoff: Backoff | None,
    ) -> "JobOptions":
        """These options with the given ones changed; None leaves one as it is."""
        if isinstance(aliases, str) or not isinstance(aliases, Iterable):
            raise ConfigurationError(f"aliases of {name} must be a list of names, got {shown(aliases)}")
        return replace(
            self,
            name=name,
            aliases=tuple(aliases),
            queue=self.queue if queue is None else queue,
            max_attempts=self.max_attempts if max_attempts is None else max_attempts,
            timeout=self.timeout if timeout is None else check_duration(timeout, f"timeout of {name}", zero=False),
            priority=self.priority if priority is None else priority,
            backoff=self.backoff if backoff is None else backoff,
        )
