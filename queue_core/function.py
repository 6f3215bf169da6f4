"""Functions as jobs: `@job` makes a job class of a function's parameters.

    @job(queue="mail")
    async def send_email(ctx: Context, to: str) -> None: ...

    await send_email(to="ada@example.com").enqueue(delay=60)

Calling it makes the job, as with a class; the function itself is `send_email.function`. The context is
found by its annotation, wherever it stands; type checkers can take it out of the call only when it is first.
"""

import copy
import dataclasses
import inspect
import types
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, get_type_hints, overload

from queue_core.checks import Duration, shown
from queue_core.context import Context
from queue_core.errors import ConfigurationError
from queue_core.job import CLASS_OPTIONS, Job, unknown_option
from queue_core.retry import Backoff

P = ParamSpec("P")
R = TypeVar("R")


class FunctionJob(Generic[P, R]):
    """A function that can be enqueued."""

    def __init__(self, function: Callable[..., Awaitable[R] | R], job_type: type[Job[R]]) -> None:
        # Any, so that a test can await the call of an async one.
        self.function: Callable[..., Any] = function
        self.job_type = job_type
        self.__doc__ = function.__doc__
        self.__name__ = function.__name__
        self.__module__ = function.__module__
        self.__wrapped__ = function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        return self.job_type(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<job function {self.__name__}>"


class _Decorator:
    """What `@job(…)` returns: knows the options, waits for the function."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options

    @overload
    def __call__(self, function: Callable[Concatenate[Context, P], Awaitable[R]], /) -> FunctionJob[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, Awaitable[R]], /) -> FunctionJob[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[Context, P], R], /) -> FunctionJob[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> FunctionJob[P, R]: ...

    def __call__(self, function: Callable[..., Any], /) -> FunctionJob[..., Any]:
        return FunctionJob(function, _job_class(function, self._options))


@overload
def job(function: Callable[Concatenate[Context, P], Awaitable[R]], /) -> FunctionJob[P, R]: ...
@overload
def job(function: Callable[P, Awaitable[R]], /) -> FunctionJob[P, R]: ...
@overload
def job(function: Callable[Concatenate[Context, P], R], /) -> FunctionJob[P, R]: ...
@overload
def job(function: Callable[P, R], /) -> FunctionJob[P, R]: ...
@overload
def job(
    *,
    name: str | None = None,
    aliases: Sequence[str] = (),
    queue: str | None = None,
    max_attempts: int | None = None,
    timeout: Duration | None = None,
    priority: int | None = None,
    backoff: Backoff | None = None,
) -> _Decorator: ...
def job(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Make a job of a function, with or without options: `@job`, `@job(queue="mail")`."""
    decorator = _Decorator(options)
    return decorator if function is None else decorator(function)


def _job_class(function: Callable[..., Any], options: dict[str, Any]) -> type[Job[Any]]:
    if not inspect.isfunction(function):
        raise ConfigurationError(
            f"@job makes a job of a function, got {shown(function)}: write @job(queue=…) to give it options"
        )
    if unknown := {option: value for option, value in options.items() if option not in CLASS_OPTIONS}:
        raise ConfigurationError(unknown_option("@job(…)", unknown, CLASS_OPTIONS))
    name = function.__name__
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        # Calling it would run nothing, and the job would count as done.
        raise ConfigurationError(f"{name} has a yield, so that calling it does nothing: take it out")
    try:
        hints = get_type_hints(function)
    except Exception as error:
        raise ConfigurationError(f"the annotations of {name} can't be resolved: {error}") from error
    fields: list[Any] = []
    contexts: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ConfigurationError(
                f"{name} has the parameter {parameter}, which can't be stored by name: give each value a name"
            )
        if hints.get(parameter.name) in (Context, Context | None):
            contexts.append(parameter.name)
            continue
        default = dataclasses.MISSING if parameter.default is parameter.empty else parameter.default
        fields.append(
            (
                parameter.name,
                hints.get(parameter.name, Any),
                dataclasses.field(
                    **({} if default is dataclasses.MISSING else _default(default)),
                    kw_only=parameter.kind is parameter.KEYWORD_ONLY,
                ),
            )
        )
    names = [field[0] for field in fields]

    def arguments(self: Job[Any], ctx: Context) -> dict[str, Any]:
        return {field: getattr(self, field) for field in names} | dict.fromkeys(contexts, ctx)

    async def run_async(self: Job[Any], ctx: Context) -> Any:
        return await function(**arguments(self, ctx))

    def run_sync(self: Job[Any], ctx: Context) -> Any:
        return function(**arguments(self, ctx))

    namespace: dict[str, Any] = {
        "run": run_async if inspect.iscoroutinefunction(function) else run_sync,
        "__doc__": function.__doc__,
        "__module__": function.__module__,
        "__annotations__": {field: hint for field, hint, _ in fields},
        **{field: default for field, _, default in fields},
    }
    return types.new_class(name, (Job,), options, lambda body: body.update(namespace))


def _default(value: Any) -> dict[str, Any]:
    # A function may have a list as its default; a dataclass wants a factory for it.
    if type(value).__hash__ is None:
        return {"default_factory": lambda: copy.deepcopy(value)}
    return {"default": value}
