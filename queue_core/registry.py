"""Which job types a queue knows, and under which names they are stored."""

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from queue_core.checks import shown
from queue_core.errors import ConfigurationError, UnknownJobType
from queue_core.function import FunctionJob
from queue_core.job import Job, check_runnable, prepare

Registrable: TypeAlias = type[Job[Any]] | FunctionJob[..., Any]


class Registry:
    """Job types by their stable names and aliases. A name from the database resolves here or nowhere."""

    def __init__(self, jobs: Iterable[Registrable] = ()) -> None:
        self._types: dict[str, type[Job[Any]]] = {}
        self._aliases: dict[str, type[Job[Any]]] = {}
        for job in jobs:
            self.register(job)

    def register(self, job: Registrable) -> None:
        """Take a job class or a decorated function in. Again is fine; another one under a taken name is not."""
        cls = job.job_type if isinstance(job, FunctionJob) else job
        if not (isinstance(cls, type) and issubclass(cls, Job)) or cls is Job:
            raise ConfigurationError(
                f"only job classes and functions decorated with @job can be registered, got {shown(job)}"
            )
        options = cls.__job_options__
        for name in (options.name, *options.aliases):
            holder = self._types.get(name) or self._aliases.get(name)
            if holder is not None and holder is not cls:
                raise ConfigurationError(
                    f"the job name {name!r} is taken by {holder.__module__}.{holder.__qualname__}:"
                    f" give {cls.__module__}.{cls.__qualname__} another one with name="
                )
        check_runnable(cls)
        prepare(cls)
        self._types[options.name] = cls
        self._aliases.update(dict.fromkeys(options.aliases, cls))

    def get(self, name: str) -> type[Job[Any]]:
        """The job class of a stored name or alias."""
        cls = self._types.get(name) or self._aliases.get(name)
        if cls is None:
            raise UnknownJobType(
                f"no job type named {name!r} is registered: add its class to Queue.init(engine, jobs=[…])"
            )
        return cls

    def decode(self, name: str, payload: str) -> Job[Any]:
        """The job of a stored name and payload."""
        return prepare(self.get(name)).decode(payload)

    def knows(self, cls: type[Job[Any]]) -> bool:
        """Whether this very class is registered; refuses one whose name means another class here."""
        name = cls.__job_options__.name
        holder = self._types.get(name) or self._aliases.get(name)
        if holder is not None and holder is not cls:
            raise ConfigurationError(
                f"the job name {name!r} means {holder.__module__}.{holder.__qualname__} on this queue, not"
                f" {cls.__module__}.{cls.__qualname__}: enqueue the registered class, or give one of them name="
            )
        return holder is cls

    def has_jobs(self) -> bool:
        """Whether any job type is registered."""
        return bool(self._types)

    def names(self) -> list[str]:
        """Every name that a worker of this registry can run."""
        return sorted({*self._types, *self._aliases})

    def __iter__(self) -> Iterator[type[Job[Any]]]:
        return iter(self._types.values())

    def __len__(self) -> int:
        return len(self._types)
