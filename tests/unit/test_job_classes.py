"""Job classes: fields, options, inheritance, and what a class may not be."""

import dataclasses
import math
import types
from datetime import timedelta
from typing import Any, ClassVar, Generic, TypeVar

import pydantic
import pytest

from queue_core import ConfigurationError, Context, Fixed, FullJitter, Job, JobId, JobOptions, Queue
from queue_core.job import prepare

NAME = "must be 1 to 128 characters of A-Z a-z 0-9 _ . : -, got"


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"queue": ""}, f"queue of C {NAME} ''"),
    ({"queue": "a b"}, f"queue of C {NAME} 'a b'"),
    ({"queue": "'; drop"}, f'queue of C {NAME} "\'; drop"'),
    ({"queue": "q" * 129}, f"queue of C {NAME} '{'q' * 59}… (131 characters)"),
    ({"queue": 5}, f"queue of C {NAME} 5"),
    ({"max_attempts": 0}, "max_attempts of C must be a whole number from 1 to 10000, got 0"),
    ({"max_attempts": True}, "max_attempts of C must be a whole number from 1 to 10000, got True"),
    ({"max_attempts": 2.0}, "max_attempts of C must be a whole number from 1 to 10000, got 2.0"),
    ({"max_attempts": 10_001}, "max_attempts of C must be a whole number from 1 to 10000, got 10001"),
    ({"priority": 1000}, "priority of C must be a whole number from -100 to 100, got 1000"),
    ({"priority": -101}, "priority of C must be a whole number from -100 to 100, got -101"),
    ({"timeout": 0}, "timeout of C must be more than 0 s, got 0"),
    ({"timeout": -1}, "timeout of C must be more than 0 s, got -1"),
    ({"timeout": math.nan}, "timeout of C must be seconds or a timedelta, got nan"),
    ({"timeout": "5"}, "timeout of C must be seconds or a timedelta, got '5'"),
    ({"timeout": 1e12}, "timeout of C must be at most 100 years, got 1000000000000.0"),
    ({"aliases": "Old"}, "aliases of C must be a list of names, got 'Old'"),
    ({"aliases": 5}, "aliases of C must be a list of names, got 5"),
    ({"aliases": ["a b"]}, f"an alias of C {NAME} 'a b'"),
    ({"aliases": ["C"]}, "aliases of C are its older names; take 'C' itself out"),
    ({"name": "send email"}, f"name of a job {NAME} 'send email'"),
    ({"name": ""}, f"name of a job {NAME} ''"),
    (
        {"backoff": 5},
        "backoff of C must be FullJitter(), PowersOfTwo(), Fixed(), Linear() or a function of the attempt, got 5",
    ),
    ({"quue": "mail"}, "class C(Job, …) got an unknown option 'quue'; did you mean 'queue'?"),
    (
        {"colour": "red"},
        (
            "class C(Job, …) got an unknown option 'colour';"
            " it takes name, aliases, queue, max_attempts, timeout, priority, backoff"
        ),
    ),
]


class Mail(Job, queue="mail", max_attempts=3, timeout=30, priority=7, backoff=Fixed(2), name="mail", aliases=["Email"]):
    to: str
    subject: str = "hello"
    tags: list[str] = dataclasses.field(default_factory=list[str])

    async def run(self, ctx: Context) -> None: ...


class Report(pydantic.BaseModel, Job[int], queue="z"):
    year: int
    title: str = "sales"

    async def run(self, ctx: Context) -> int:
        return self.year


def define(fields: dict[str, Any] | None = None, **options: Any) -> type[Job[Any]]:
    """A job class named C, with options and fields that no type checker would let through."""
    return types.new_class("C", (Job,), options, lambda body: body.update(__annotations__=fields or {}))


def options_of(cls: type[Job[Any]]) -> JobOptions:
    return cls.__job_options__


# Fields


def test_fields_are_those_of_a_dataclass() -> None:
    mail = Mail("ada", subject="hi")
    assert (mail.to, mail.subject, mail.tags) == ("ada", "hi", [])
    assert mail == Mail(to="ada", subject="hi")
    assert mail != Mail(to="bob", subject="hi")


def test_a_default_factory_gives_each_job_its_own() -> None:
    assert Mail("ada").tags is not Mail("ada").tags


def test_a_missing_or_misspelt_field_is_refused_as_by_any_class() -> None:
    make: Any = Mail
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'to'"):
        make()
    with pytest.raises(TypeError, match="unexpected keyword argument 'too'"):
        make("ada", too="bob")


def test_what_is_annotated_as_a_class_variable_is_not_stored() -> None:
    class Counted(Job):
        limit: ClassVar[int] = 5
        number: int = 1

    assert prepare(Counted).encode(Counted()) == '{"number":1}'


def test_a_class_may_have_no_fields() -> None:
    class Sweep(Job): ...

    assert prepare(Sweep).encode(Sweep()) == "{}"


async def test_a_job_may_say_what_its_run_returns() -> None:
    class Shout(Job[str]):
        text: str

        async def run(self, ctx: Context) -> str:
            return self.text.upper()

    context = Context(job_id=JobId(1), attempt=1, max_attempts=5, queue="default")
    assert await Shout("hey").run(context) == "HEY"
    assert options_of(Shout).name == "Shout"


def test_fields_may_have_the_names_of_options_and_of_delivery_keywords() -> None:
    class Odd(Job, queue="mail", priority=2):
        queue: str
        key: str
        priority: int
        name: str = "n"

    job = Odd(queue="a", key="b", priority=9)
    assert prepare(Odd).encode(job) == '{"queue":"a","key":"b","priority":9,"name":"n"}'
    assert (options_of(Odd).queue, options_of(Odd).priority, options_of(Odd).name) == ("mail", 2, "Odd")


@pytest.mark.parametrize("name", ["run", "enqueue", "with_delivery"])
def test_a_field_may_not_hide_a_method(name: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        define({name: int})(1)
    assert str(refused.value) == f"C has a field named {name}, which every job has as a method: rename it"


def test_a_pydantic_field_may_not_hide_a_method_either() -> None:
    cls = types.new_class("C", (pydantic.BaseModel, Job), {}, lambda body: body.update(__annotations__={"run": int}))
    with pytest.raises(ConfigurationError, match=r"^C has a field named run, which every job has as a method"):
        cls(run=1)


def test_fields_that_can_not_be_resolved_are_named_at_first_use() -> None:
    with pytest.raises(ConfigurationError) as refused:
        define({"x": "Nowhere"})(1)
    assert str(refused.value) == "the fields of C can't be stored: name 'Nowhere' is not defined"


def test_fields_that_json_could_not_tell_apart_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"^the fields of C can't be stored: Type unions may not contain more"):
        define({"x": list[int] | set[int]})([1])


def test_the_base_class_itself_is_not_a_job() -> None:
    with pytest.raises(ConfigurationError) as refused:
        Job()
    assert str(refused.value) == "Job is the base class of jobs: write a class of your own, class SendEmail(Job)"


# Representation


def test_the_repr_names_the_fields_and_shows_no_values() -> None:
    assert repr(Mail("ada@example.com", subject="secret")) == "<Mail job (to, subject, tags)>"


def test_the_repr_leaves_class_variables_out() -> None:
    class Counted(Job):
        limit: ClassVar[int] = 5
        number: int = 1

    assert repr(Counted()) == "<Counted job (number)>"


# Options


def test_options_are_class_keywords() -> None:
    assert options_of(Mail) == JobOptions(
        name="mail",
        aliases=("Email",),
        queue="mail",
        max_attempts=3,
        timeout=timedelta(seconds=30),
        priority=7,
        backoff=Fixed(2),
    )


def test_a_class_without_options_has_the_defaults_and_its_own_name() -> None:
    options = options_of(define())
    assert (options.name, options.aliases, options.queue, options.priority) == ("C", (), "default", 0)
    assert (options.max_attempts, options.timeout, options.backoff) == (5, None, FullJitter(base=5, cap=900))


def test_a_class_may_bring_its_own_backoff_function() -> None:
    def slower(attempt: int) -> float:
        return attempt * 60

    assert options_of(define(backoff=slower)).backoff is slower


@pytest.mark.parametrize(("given", "message"), BAD_OPTIONS, ids=[str(given) for given, _ in BAD_OPTIONS])
def test_an_option_that_can_not_work_is_refused_when_the_class_is_defined(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        define(**given)
    assert str(refused.value) == message


def test_a_backoff_policy_that_was_not_called_is_refused() -> None:
    with pytest.raises(ConfigurationError) as refused:
        define(backoff=FullJitter)
    assert str(refused.value) == (
        "backoff of C must be FullJitter(), PowersOfTwo(), Fixed(), Linear() or a function of the attempt,"
        " got <class 'queue_core.retry.FullJitter'>"
    )


# Inheritance


def test_options_are_inherited_and_names_are_not() -> None:
    class Newsletter(Mail, priority=-5): ...

    options = options_of(Newsletter)
    assert (options.name, options.aliases) == ("Newsletter", ())
    assert (options.queue, options.max_attempts, options.backoff) == ("mail", 3, Fixed(2))
    assert (options.timeout, options.priority) == (timedelta(seconds=30), -5)


def test_fields_are_inherited_from_a_class_that_was_never_used() -> None:
    class Base(Job):
        to: str
        tags: list[str] = dataclasses.field(default_factory=list[str])

    class Sub(Base):
        body: str = ""

    assert prepare(Sub).encode(Sub("ada", body="hi")) == '{"to":"ada","tags":[],"body":"hi"}'
    assert Sub("ada").tags is not Sub("ada").tags


def test_a_base_class_stays_usable_beside_its_subclass() -> None:
    class Base(Job):
        number: int

    class Sub(Base):
        text: str

    assert prepare(Sub).encode(Sub(1, "a")) == '{"number":1,"text":"a"}'
    assert prepare(Base).encode(Base(1)) == '{"number":1}'


def test_fields_of_a_dataclass_mixin_are_stored() -> None:
    @dataclasses.dataclass
    class Traced:
        trace: str

    class Sub(Traced, Job):
        number: int

    assert prepare(Sub).encode(Sub("t", 1)) == '{"trace":"t","number":1}'


def test_a_generic_job_is_stored_as_its_subclass_says() -> None:
    item = TypeVar("item")

    class Batch(Job, Generic[item]):
        items: list[item]

    class Numbers(Batch[int]): ...

    assert prepare(Numbers).decode('{"items":[1,2]}') == Numbers([1, 2])


# Decorated classes and pydantic models


def test_a_dataclass_decorator_on_top_keeps_default_factories() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Frozen(Job):
        to: str
        tags: list[str] = dataclasses.field(default_factory=list[str])

    first, second = Frozen(to="ada"), Frozen(to="ada")
    assert first == second
    assert first.tags is not second.tags
    assert prepare(Frozen).encode(first) == '{"to":"ada","tags":[]}'
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.to = "bob"  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]


def test_a_dataclass_with_slots_keeps_its_options() -> None:
    @dataclasses.dataclass(slots=True)
    class Slotted(Job, queue="mail"):
        number: int = 1

    assert prepare(Slotted).encode(Slotted()) == '{"number":1}'
    assert options_of(Slotted).queue == "mail"


def test_a_pydantic_model_can_be_a_job() -> None:
    assert options_of(Report).queue == "z"
    assert options_of(Report).name == "Report"
    codec = prepare(Report)
    assert codec.encode(Report(year=2030)) == '{"year":2030,"title":"sales"}'
    assert codec.decode('{"year":2030}') == Report(year=2030)


def test_a_pydantic_model_validates_as_pydantic_does() -> None:
    make: Any = Report
    assert make(year="2030").year == 2030
    with pytest.raises(pydantic.ValidationError):
        make(year="soon")


def test_a_pydantic_job_passes_its_options_and_fields_on() -> None:
    class Monthly(Report, max_attempts=2):
        month: int = 1

    options = options_of(Monthly)
    assert (options.name, options.queue, options.max_attempts) == ("Monthly", "z", 2)
    assert prepare(Monthly).encode(Monthly(year=1)) == '{"year":1,"title":"sales","month":1}'


def test_a_pydantic_job_takes_settings_of_pydantic_as_class_keywords_too() -> None:
    class Frozen(pydantic.BaseModel, Job, queue="mail", frozen=True):
        number: int = 1

    assert options_of(Frozen).queue == "mail"
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        Frozen().number = 2  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]


def test_an_unknown_option_of_a_pydantic_job_is_refused_too() -> None:
    with pytest.raises(ConfigurationError) as refused:
        types.new_class("C", (pydantic.BaseModel, Job), {"quue": "mail"})
    assert str(refused.value) == "class C(Job, …) got an unknown option 'quue'; did you mean 'queue'?"


# Registering


def test_defining_a_class_registers_nothing() -> None:
    class Unseen(Job):
        async def run(self, ctx: Context) -> None: ...

    Unseen()
    assert "Unseen" not in Queue.application_registry().names()
