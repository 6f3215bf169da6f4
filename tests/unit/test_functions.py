"""Functions as jobs: parameters are the fields, the context is found by its annotation."""

import dataclasses
import functools
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from typing import Any

import pytest

from queue_core import ConfigurationError, Context, FunctionJob, Job, JobId, Queue, job
from queue_core.job import prepare

CONTEXT = Context(job_id=JobId(7), attempt=2, max_attempts=5, queue="default")


@job
async def greet(ctx: Context, name: str, times: int = 2) -> str:
    """Say hello."""
    return f"{name} {times} {ctx.attempt}"


@job(queue="slow", name="sum_up", aliases=["add_up"], max_attempts=2, timeout=60, priority=3)
def add(left: int, right: int = 1, *, carry: int = 0) -> int:
    return left + right + carry


def stored(made: Job[Any]) -> str:
    return prepare(type(made)).encode(made)


# Calling


def test_calling_a_job_function_makes_a_job_and_runs_nothing() -> None:
    made = greet("ada")
    assert isinstance(made, Job)
    assert stored(made) == '{"name":"ada","times":2}'
    assert made == greet(name="ada", times=2)


def test_keyword_only_parameters_stay_so() -> None:
    assert stored(add(1, carry=5)) == '{"left":1,"right":1,"carry":5}'
    call: Any = add
    with pytest.raises(TypeError, match="positional arguments"):
        call(1, 2, 3)


def test_a_missing_or_misspelt_argument_is_refused_at_the_call() -> None:
    call: Any = greet
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'name'"):
        call()
    with pytest.raises(TypeError, match="unexpected keyword argument 'nmae'"):
        call(nmae="ada")


def test_the_function_itself_can_still_be_called() -> None:
    assert add.function(2, 3) == 5


def test_the_repr_shows_no_arguments() -> None:
    assert repr(greet) == "<job function greet>"
    assert repr(greet("secret")) == "<greet job (name, times)>"


# Running


async def test_run_calls_the_function_with_the_fields_and_the_context() -> None:
    run: Any = greet("ada", times=3).run(CONTEXT)
    assert await run == "ada 3 2"


def test_run_of_a_plain_function_is_a_plain_call() -> None:
    assert add(2, 3, carry=4).run(CONTEXT) == 9


async def test_the_context_may_stand_anywhere_under_any_name() -> None:
    @job
    async def last(number: int, here: Context) -> tuple[int, int]:
        return number, here.attempt

    @job
    async def keyword(number: int, *, here: Context) -> tuple[int, int]:
        return number, here.attempt

    for function in (last, keyword):
        made: Any = function.job_type(number=5)
        assert stored(made) == '{"number":5}'
        assert await made.run(CONTEXT) == (5, 2)


async def test_a_context_in_quotes_is_found_too() -> None:
    @job
    async def quoted(ctx: "Context", number: "int") -> int:
        return number * ctx.attempt

    made: Any = quoted(number=3)
    assert await made.run(CONTEXT) == 6


async def test_an_optional_context_is_given() -> None:
    @job
    async def optional(number: int = 1, ctx: Context | None = None) -> bool:
        return ctx is CONTEXT

    made: Any = optional.job_type()
    assert stored(made) == '{"number":1}'
    assert await made.run(CONTEXT) is True


async def test_a_function_may_ask_for_the_context_twice() -> None:
    @job
    async def twice(ctx: Context, again: Context) -> bool:
        return ctx is again

    made: Any = twice.job_type()
    assert await made.run(CONTEXT) is True


def test_a_function_may_have_no_parameters() -> None:
    @job()
    def sweep() -> str:
        return "swept"

    assert stored(sweep()) == "{}"
    assert sweep().run(CONTEXT) == "swept"


def test_parameters_may_have_the_names_of_options_and_of_delivery_keywords() -> None:
    @job(queue="mail")
    def odd(queue: str, key: str = "k", priority: int = 1, self: int = 2) -> str:
        return f"{queue} {key} {priority} {self}"

    assert odd.job_type.__job_options__.queue == "mail"
    assert odd("mine").run(CONTEXT) == "mine k 1 2"


# Defaults


def test_a_mutable_default_is_not_shared_between_jobs() -> None:
    @job()
    def collect(number: int, into: list[int] = [], seen: dict[str, int] = {}) -> list[int]:  # noqa: B006
        into.append(number)
        seen["n"] = number
        return into

    assert collect(1).run(CONTEXT) == [1]
    assert collect(2).run(CONTEXT) == [2]
    assert stored(collect(3)) == '{"number":3,"into":[],"seen":{}}'


def test_what_is_inside_a_mutable_default_is_not_shared_either() -> None:
    @job()
    def collect(number: int, into: list[list[int]] = [[]]) -> list[list[int]]:  # noqa: B006
        into[0].append(number)
        return into

    assert collect(1).run(CONTEXT) == [[1]]
    assert collect(2).run(CONTEXT) == [[2]]


def test_a_dataclass_can_be_a_default() -> None:
    @dataclasses.dataclass
    class Size:
        width: int = 1

    @job()
    def draw(size: Size = Size()) -> int:  # noqa: B008
        return size.width

    assert stored(draw()) == '{"size":{"width":1}}'


# Names and options


def test_the_name_is_the_functions_own() -> None:
    options = greet.job_type.__job_options__
    assert (options.name, options.aliases, options.queue, options.max_attempts) == ("greet", (), "default", 5)
    assert (greet.__name__, greet.__doc__, greet.__module__) == ("greet", "Say hello.", __name__)
    assert (greet.job_type.__name__, greet.job_type.__module__) == ("greet", __name__)


def test_options_are_those_of_a_class() -> None:
    options = add.job_type.__job_options__
    assert (options.name, options.aliases, options.queue) == ("sum_up", ("add_up",), "slow")
    assert (options.max_attempts, options.timeout, options.priority) == (2, timedelta(seconds=60), 3)


def test_a_decorator_without_options_may_be_called() -> None:
    @job()
    async def plain(number: int) -> None: ...

    assert plain.job_type.__job_options__.name == "plain"


def test_decorating_a_function_registers_nothing() -> None:
    assert isinstance(greet, FunctionJob)
    assert "greet" not in Queue.application_registry().names()


def test_a_misspelt_option_is_refused() -> None:
    decorate: Any = job
    with pytest.raises(ConfigurationError) as refused:
        decorate(quue="mail")(lambda: None)
    assert str(refused.value) == "@job(…) got an unknown option 'quue'; did you mean 'queue'?"


def test_a_function_without_a_usable_name_is_refused() -> None:
    decorate: Any = job
    with pytest.raises(ConfigurationError) as refused:
        decorate(lambda: None)
    assert str(refused.value) == ("name of a job must be 1 to 128 characters of A-Z a-z 0-9 _ . : -, got '<lambda>'")


# What can't be a job


async def variadic(*numbers: int) -> None: ...


async def keywords(**numbers: int) -> None: ...


async def positional(number: int, /) -> None: ...


async def positional_context(ctx: Context, /, number: int) -> None: ...


async def hiding(run: int) -> None: ...


async def unresolved(number: "Nowhere") -> None: ...  # type: ignore[name-defined]  # noqa: F821  # pyright: ignore[reportUndefinedVariable, reportUnknownParameterType]


def generates() -> Iterator[int]:
    yield 1


async def generates_async() -> AsyncIterator[int]:
    yield 1


NOT_JOBS: list[tuple[Any, str]] = [
    (variadic, "variadic has the parameter *numbers: int, which can't be stored by name: give each value a name"),
    (keywords, "keywords has the parameter **numbers: int, which can't be stored by name: give each value a name"),
    (positional, "positional has the parameter number: int, which can't be stored by name: give each value a name"),
    (
        positional_context,
        (
            "positional_context has the parameter ctx: queue_core.context.Context, which can't be stored by name:"
            " give each value a name"
        ),
    ),
    (unresolved, "the annotations of unresolved can't be resolved: name 'Nowhere' is not defined"),
    (generates, "generates has a yield, so that calling it does nothing: take it out"),
    (generates_async, "generates_async has a yield, so that calling it does nothing: take it out"),
]


@pytest.mark.parametrize(("function", "message"), NOT_JOBS, ids=[function.__name__ for function, _ in NOT_JOBS])
def test_a_function_whose_call_could_not_be_stored_is_refused(function: Any, message: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        job(function)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    "thing", ["mail", 5, functools.partial(variadic, 1), greet], ids=["text", "number", "partial", "decorated twice"]
)
def test_what_is_not_a_function_is_refused(thing: Any) -> None:
    decorate: Any = job
    with pytest.raises(ConfigurationError, match=r"^@job makes a job of a function, got .*: write @job\(queue=…\)"):
        decorate(thing)


def test_a_parameter_may_not_hide_a_method() -> None:
    with pytest.raises(ConfigurationError) as refused:
        job(hiding)(run=1)
    assert str(refused.value) == "hiding has a field named run, which every job has as a method: rename it"
