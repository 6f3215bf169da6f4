"""Job classes: an instance is the payload, class keywords are the options, `enqueue` keywords the delivery.

    class SendEmail(Job, queue="mail", max_attempts=5):
        to: str

        async def run(self, ctx: Context) -> None: ...

A subclass becomes a dataclass when it is first used and not when it is defined, because a decorator
(`@dataclass(frozen=True)`) may still follow, and making a dataclass twice loses default factories.
A class that is a pydantic model stays one.
"""

import dataclasses
import difflib
import inspect
from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Never, Self, Unpack, cast, dataclass_transform

from typing_extensions import TypeVar

from queue_core.checks import Duration
from queue_core.errors import ConfigurationError, PayloadError
from queue_core.options import JobOptions
from queue_core.payload import Codec, is_pydantic
from queue_core.retry import Backoff

if TYPE_CHECKING:
    from queue_core.context import Context
    from queue_core.delivery import Delivery, Request, Transactional
    from queue_core.model import Enqueued

R_co = TypeVar("R_co", covariant=True, default=None)

_RESERVED = frozenset({"run", "enqueue", "with_delivery"})


@dataclass_transform(field_specifiers=(dataclasses.field, dataclasses.Field))
class Job(Generic[R_co]):
    """Base class of a job. `Job[str]` says that `run` returns a str; plain `Job` returns nothing.

    Fields are annotated as in a dataclass; they are what is stored. Nothing is registered by defining
    a class: give it to `Queue.init(engine, jobs=[…])` or to `queue.register`.
    """

    __job_options__: ClassVar[JobOptions] = JobOptions(name="Job")
    __job_codec__: ClassVar[Codec[Any] | None] = None

    def __init_subclass__(
        cls,
        *,
        name: str | None = None,
        aliases: Sequence[str] = (),
        queue: str | None = None,
        max_attempts: int | None = None,
        timeout: Duration | None = None,
        priority: int | None = None,
        backoff: Backoff | None = None,
        **unknown: Never,
    ) -> None:
        if unknown:
            raise ConfigurationError(unknown_option(f"class {cls.__name__}(Job, …)", unknown, CLASS_OPTIONS))
        super().__init_subclass__()
        for base in cls.__bases__:
            # By now nothing can decorate a base any more, and a dataclass takes fields only from dataclasses.
            if issubclass(base, Job) and base is not Job:
                _make_dataclass(base)  # pyright: ignore[reportUnknownArgumentType]
        cls.__job_codec__ = None
        cls.__job_options__ = cls.__job_options__.derived(
            name=cls.__name__ if name is None else name,
            aliases=aliases,
            queue=queue,
            max_attempts=max_attempts,
            timeout=timeout,
            priority=priority,
            backoff=backoff,
        )

    def __new__(cls, *_args: object, **_fields: object) -> Self:
        if cls.__job_codec__ is None:
            prepare(cls)
        return object.__new__(cls)

    def __repr__(self) -> str:
        # The names only: what is in a payload does not belong in logs.
        fields = (
            [field.name for field in dataclasses.fields(self)]
            if dataclasses.is_dataclass(self)
            else getattr(type(self), "model_fields", {})
        )
        return f"<{type(self).__name__} job ({', '.join(fields)})>"

    if TYPE_CHECKING:

        def run(self, ctx: "Context", /) -> Awaitable[R_co] | R_co:
            """Do the work. A plain `def` runs in a thread."""
            ...

    async def enqueue(self, **delivery: "Unpack[Transactional]") -> "Enqueued":
        """Put this job on the default queue; returns once it is durable, or part of the given transaction."""
        from queue_core.queue import Queue

        return await Queue.default().enqueue(self, **delivery)

    def with_delivery(self, **delivery: "Unpack[Delivery]") -> "Request":
        """This job with a delivery of its own, for `enqueue_many`."""
        from queue_core.delivery import Request

        return Request(self, delivery)


CLASS_OPTIONS = ("name", "aliases", "queue", "max_attempts", "timeout", "priority", "backoff")

JobT = TypeVar("JobT", bound=Job[Any])


def prepare(cls: type[JobT]) -> Codec[JobT]:
    """Make a job class ready for use (once) and return its codec."""
    ready = cls.__job_codec__
    if ready is not None:
        return ready
    if cls is Job:
        raise ConfigurationError("Job is the base class of jobs: write a class of your own, class SendEmail(Job)")
    name = cls.__job_options__.name
    _make_dataclass(cls)
    try:
        codec: Codec[JobT] = Codec(cls, name)
    except PayloadError:
        raise
    except Exception as error:
        raise ConfigurationError(f"the fields of {name} can't be stored: {error}") from error
    cls.__job_codec__ = codec
    return codec


def _make_dataclass(cls: type[Job[Any]]) -> None:
    """Give a plain class its dataclass methods; one that is a dataclass or a pydantic model stays as it is."""
    taken = _RESERVED & set(inspect.get_annotations(cls))
    if taken:
        raise ConfigurationError(
            f"{cls.__name__} has a field named {', '.join(sorted(taken))}, which every job has as a method: rename it"
        )
    if "__dataclass_fields__" in cls.__dict__ or is_pydantic(cls):
        return
    # repr=False keeps ours, which shows no payload.
    dataclasses.dataclass(repr=False)(cls)


def unknown_option(where: str, given: Mapping[str, object], known: Sequence[str]) -> str:
    """The message for a misspelt keyword, with the name that was probably meant."""
    name = next(iter(given))
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known)}"
    return f"{where} got an unknown option {name!r}; {hint}"


def check_runnable(cls: type[Job[Any]]) -> None:
    """Refuse a class that a worker could not run, when it is registered and not when its first job fails."""
    run = cast("object", getattr(cls, "run", None))
    if not inspect.isfunction(run):
        raise ConfigurationError(f"{cls.__name__} has no run method: write 'async def run(self, ctx: Context)'")
    if inspect.isgeneratorfunction(run) or inspect.isasyncgenfunction(run):
        # Calling it would run nothing, and the job would count as done.
        raise ConfigurationError(f"{cls.__name__}.run has a yield, so that calling it does nothing: take it out")
    try:
        inspect.signature(run).bind(None, None)
    except TypeError as error:
        raise ConfigurationError(
            f"{cls.__name__}.run must take (self, ctx) and nothing else that has no default: {error}"
        ) from error
