"""The registry: names and aliases, and what may not be registered."""

from typing import Any

import pytest

from queue_core import ConfigurationError, Context, Job, PayloadError, UnknownJobType, job
from queue_core.registry import Registry


class Mail(Job, aliases=["Email", "Letter"]):
    to: str = "ada"

    async def run(self, ctx: Context) -> None: ...


@job(name="sum")
async def add(left: int, right: int) -> int:
    return left + right


def another(name: str, *aliases: str) -> type[Job]:
    """A job class of some other module that wants this name."""

    class Another(Job, name=name, aliases=aliases):
        async def run(self, ctx: Context) -> None: ...

    return Another


def refusal(thing: Any, registry: Registry | None = None) -> str:
    with pytest.raises(ConfigurationError) as refused:
        (registry or Registry()).register(thing)
    return str(refused.value)


# Looking up


def test_a_job_is_found_by_its_name_and_by_its_aliases() -> None:
    registry = Registry([Mail])
    assert registry.get("Mail") is registry.get("Email") is registry.get("Letter") is Mail


def test_a_function_is_found_by_its_name() -> None:
    assert Registry([add]).get("sum") is add.job_type


def test_names_are_all_that_a_worker_can_run() -> None:
    registry = Registry([Mail, add])
    assert registry.names() == ["Email", "Letter", "Mail", "sum"]
    assert list(registry) == [Mail, add.job_type]
    assert len(registry) == 2


def test_an_unknown_name_says_how_to_make_it_known() -> None:
    with pytest.raises(UnknownJobType) as refused:
        Registry([Mail]).get("Fax")
    assert str(refused.value) == (
        "no job type named 'Fax' is registered: add its class to Queue.init(engine, jobs=[…])"
    )
    assert isinstance(refused.value, LookupError)


def test_a_registry_may_be_empty() -> None:
    assert not Registry().has_jobs()
    assert Registry([Mail]).has_jobs()


def test_a_stored_payload_is_decoded_by_the_name_it_was_stored_under() -> None:
    registry = Registry([Mail])
    assert registry.decode("Email", '{"to":"bob"}') == Mail("bob")
    with pytest.raises(PayloadError, match="no longer fits its class"):
        registry.decode("Email", '{"to":5}')


def test_a_class_that_moved_to_another_module_keeps_its_jobs() -> None:
    moved = another("Mail", "Email")
    assert Registry([moved]).decode("Mail", "{}") == moved()


# Names that are taken


def test_registering_again_is_fine() -> None:
    registry = Registry([Mail, add, Mail])
    registry.register(add)
    assert len(registry) == 2


@pytest.mark.parametrize("name", ["Mail", "Email"])
def test_a_name_that_is_taken_is_refused_with_both_classes(name: str) -> None:
    other = another(name)
    assert refusal(other, Registry([Mail])) == (
        f"the job name {name!r} is taken by {__name__}.Mail:"
        f" give {__name__}.another.<locals>.Another another one with name="
    )


def test_an_alias_that_is_taken_is_refused_too() -> None:
    registry = Registry([Mail])
    assert refusal(another("Fax", "Letter"), registry).startswith("the job name 'Letter' is taken by ")
    assert registry.names() == ["Email", "Letter", "Mail"]


def test_a_registry_knows_its_own_classes_only() -> None:
    registry = Registry([Mail])
    assert registry.knows(Mail)
    assert not registry.knows(another("Fax"))


def test_a_class_whose_name_means_another_one_is_not_mistaken_for_it() -> None:
    with pytest.raises(ConfigurationError) as refused:
        Registry([Mail]).knows(another("Mail"))
    assert str(refused.value) == (
        f"the job name 'Mail' means {__name__}.Mail on this queue, not {__name__}.another.<locals>.Another:"
        " enqueue the registered class, or give one of them name="
    )


# What can't be registered


async def plain() -> None: ...


@pytest.mark.parametrize(
    "thing", [Job, int, 5, "Mail", Mail("bob"), plain, add.function], ids=lambda thing: str(thing)[:20]
)
def test_only_jobs_can_be_registered(thing: Any) -> None:
    problem = "only job classes and functions decorated with @job can be registered, got "
    assert refusal(thing).startswith(problem)
    assert "bob" not in refusal(thing)


SIGNATURE = ".run must take (self, ctx) and nothing else that has no default:"


class Runless(Job): ...


class Attribute(Job):
    run = 5  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]


class Bare(Job):
    async def run(self) -> None: ...  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]


class Greedy(Job):
    async def run(self, ctx: Context, more: int) -> None: ...  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]


class Yielding(Job):
    async def run(self, ctx: Context) -> Any:
        yield 1


class YieldingSync(Job):
    def run(self, ctx: Context) -> Any:
        yield 1


@pytest.mark.parametrize(
    ("cls", "problem"),
    [
        (Runless, " has no run method: write 'async def run(self, ctx: Context)'"),
        (Attribute, " has no run method: write 'async def run(self, ctx: Context)'"),
        (Bare, f"{SIGNATURE} too many positional arguments"),
        (Greedy, f"{SIGNATURE} missing a required argument: 'more'"),
        (Yielding, ".run has a yield, so that calling it does nothing: take it out"),
        (YieldingSync, ".run has a yield, so that calling it does nothing: take it out"),
    ],
)
def test_a_class_that_no_worker_could_run_is_refused(cls: type[Job[Any]], problem: str) -> None:
    registry = Registry()
    assert refusal(cls, registry) == f"{cls.__name__}{problem}"
    assert registry.names() == []


def test_a_class_whose_fields_can_not_be_stored_is_refused_when_it_is_registered() -> None:
    class Threaded(Job):
        value: list[int] | set[int]

        async def run(self, ctx: Context) -> None: ...

    assert refusal(Threaded).startswith("the fields of Threaded can't be stored: ")


def test_run_may_have_more_parameters_if_they_have_defaults() -> None:
    class Roomy(Job):
        def run(self, ctx: Context, more: int = 0, *rest: int, **named: int) -> None: ...

    assert Registry([Roomy]).names() == ["Roomy"]
