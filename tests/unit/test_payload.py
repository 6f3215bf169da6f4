"""Payloads: what comes back exactly as it was, and what is refused before anything is written."""

import dataclasses
import enum
import math
import threading
import types
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any, TypeAlias
from uuid import UUID

import msgspec
import pydantic
import pytest

from queue_core import Job, PayloadError
from queue_core.job import prepare
from queue_core.payload import Codec

TOO_DEEP = "refers to itself or is nested deeper than 64 levels: flatten it"
SURROGATE = (
    "has a lone surrogate, which is not text:"
    " decode the bytes it came from with errors='replace', or send them as bytes"
)
INSTEAD = "use str, numbers, bool, None, lists, dicts, dates, UUIDs, enums, dataclasses or pydantic models"


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


@dataclasses.dataclass
class Point:
    x: int
    y: float = 0.5
    seen: date | None = None


class Box(msgspec.Struct):
    corner: Point
    label: str = ""


class Size(pydantic.BaseModel):
    width: float
    made: date = date(2030, 1, 1)
    note: Any = None


class StrictDay(pydantic.BaseModel, strict=True):
    day: date


class Free(Job):
    """A job whose field takes anything."""

    value: Any


class Text(Job):
    text: str


class Sized(Job):
    size: Size


class Model(pydantic.BaseModel, Job):
    number: float = 0.0
    value: Any = None


class Aliased(pydantic.BaseModel, Job):
    number: int = pydantic.Field(alias="n")


def in_a_model(value: object) -> Model:
    return Model(value=value)


def in_a_field(value: object) -> Sized:
    return Sized(Size(width=1, note=value))


Holder: TypeAlias = Callable[[Any], Job[Any]]
HOLDERS: list[Any] = [
    pytest.param(Free, id="class"),
    pytest.param(in_a_model, id="pydantic job"),
    pytest.param(in_a_field, id="pydantic field"),
]


def encode(job: Job[Any]) -> str:
    return prepare(type(job)).encode(job)


def refusal(job: Job[Any]) -> str:
    with pytest.raises(PayloadError) as refused:
        encode(job)
    return str(refused.value)


def decode_refusal(cls: type[Job[Any]], payload: str) -> str:
    with pytest.raises(PayloadError) as refused:
        prepare(cls).decode(payload)
    return str(refused.value)


def come_back(annotation: Any, value: object) -> object:
    """What a worker would get for a value in a field of this type."""
    cls: Any = types.new_class("C", (Job,), {}, lambda body: body.update(__annotations__={"value": annotation}))
    codec: Codec[Any] = prepare(cls)
    return codec.decode(codec.encode(cls(value))).value


def nested(levels: int, innermost: object) -> object:
    value = innermost
    for _ in range(levels):
        value = [value]
    return value


def cycle() -> list[object]:
    value: list[object] = []
    value.append(value)
    return value


# Numbers that JSON does not have


PLACES: list[tuple[Callable[[float], object], str]] = [
    (lambda number: number, "value"),
    (lambda number: [1, None, number], "value[2]"),
    (lambda number: {"a": [1, {"b": number}]}, "value.a[1].b"),
    (lambda number: (0, number), "value[1]"),
    (lambda number: Point(1, number), "value.y"),
    (lambda number: Size(width=number), "value.width"),
    (lambda number: Size(width=1, note=[number]), "value.note[0]"),
]


@pytest.mark.parametrize(("number", "name"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
@pytest.mark.parametrize(("place", "path"), PLACES, ids=[path for _, path in PLACES])
@pytest.mark.parametrize("cls", [Free, Model])
def test_a_number_that_json_does_not_have_is_refused_with_its_place(
    cls: Any, place: Callable[[float], object], path: str, number: float, name: str
) -> None:
    assert refusal(cls(value=place(number))) == (
        f"the payload of {cls.__name__} has {name} at {path}, and JSON has no such number: use None or a string"
    )


def test_a_typed_field_refuses_nan_too() -> None:
    problem = "and JSON has no such number: use None or a string"
    assert refusal(Model(number=math.nan)) == f"the payload of Model has nan at number, {problem}"
    assert refusal(Sized(Size(width=math.nan))) == f"the payload of Sized has nan at size.width, {problem}"
    with pytest.raises(PayloadError, match=r"^the payload of C has nan at value\.corner\.y, "):
        come_back(Box, Box(Point(1, math.nan)))


def test_none_and_texts_with_null_in_them_are_fine() -> None:
    assert encode(Free(None)) == '{"value":null}'
    assert encode(Text("null")) == '{"text":"null"}'
    assert encode(Free([None, "not null", {"null": None}])) == '{"value":[null,"not null",{"null":null}]}'
    assert encode(Model(value="null")) == '{"number":0.0,"value":"null"}'


# Text that is none


@pytest.mark.parametrize(
    "job",
    [
        Text("a\ud800b"),
        Free({"\udfff": 1}),
        Free(["\ud800"]),
        Model(value="\ud800"),
        Sized(Size(width=1, note="\ud800")),
    ],
    ids=["field", "key", "list", "pydantic job", "pydantic field"],
)
def test_a_lone_surrogate_is_refused(job: Job[Any]) -> None:
    assert refusal(job) == f"the payload of {type(job).__name__} {SURROGATE}"


# Depth and size


@pytest.mark.parametrize("job", HOLDERS)
def test_a_payload_that_refers_to_itself_is_refused(job: Holder) -> None:
    made = job(cycle())
    assert refusal(made) == f"the payload of {type(made).__name__} {TOO_DEEP}"


@pytest.mark.parametrize("innermost", [1, []], ids=["a number inside", "nothing inside"])
@pytest.mark.parametrize("job", HOLDERS[:2])
def test_a_payload_may_be_nested_64_levels_deep_and_no_deeper(job: Holder, innermost: object) -> None:
    lists = 63 - isinstance(innermost, list)  # the job itself is the first level, an empty list the last
    assert encode(job(nested(lists, innermost))).count("[") == 63
    made = job(nested(lists + 1, innermost))
    assert refusal(made) == f"the payload of {type(made).__name__} {TOO_DEEP}"


@pytest.mark.parametrize("levels", [65, 300, 5_000, 100_000])
@pytest.mark.parametrize("job", HOLDERS)
def test_a_payload_that_is_nested_too_deep_is_refused(job: Holder, levels: int) -> None:
    made = job(nested(levels, 1))
    assert refusal(made) == f"the payload of {type(made).__name__} {TOO_DEEP}"


def test_a_payload_with_many_brackets_on_few_levels_is_fine() -> None:
    assert come_back(list[list[int]], [[0]] * 1_000) == [[0]] * 1_000
    assert come_back(str, "[{" * 1_000) == "[{" * 1_000


@pytest.mark.parametrize("job", HOLDERS)
def test_a_payload_of_ten_megabytes_is_refused(job: Holder) -> None:
    size = len(encode(job(""))) + 10_000_000
    made = job("x" * 10_000_000)
    assert refusal(made) == (
        f"the payload of {type(made).__name__} is {size:,} bytes and at most 262,144 are allowed:"
        " store the data elsewhere and enqueue a reference to it, or raise max_payload"
    )


def test_the_limit_counts_bytes_and_can_be_set() -> None:
    codec = prepare(Text)
    assert codec.encode(Text("é"), limit=13) == '{"text":"é"}'
    with pytest.raises(PayloadError, match=r"^the payload of Text is 13 bytes and at most 12 are allowed: "):
        codec.encode(Text("é"), limit=12)


# Types


@pytest.mark.parametrize(
    ("annotation", "value", "problem"),
    [
        (str, 5, "Expected `str`, got `int`"),
        (int, "5", "Expected `int`, got `str`"),
        (int, 1.5, "Expected `int`, got `float`"),
        (int, True, "Expected `int`, got `bool`"),
        (bool, 1, "Expected `bool`, got `int`"),
        (str, None, "Expected `str`, got `null`"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_its_place(annotation: Any, value: object, problem: str) -> None:
    with pytest.raises(PayloadError) as refused:
        come_back(annotation, value)
    assert str(refused.value) == f"the payload of C does not fit its class: {problem} - at `$.value`"


def test_a_wrong_type_deep_inside_is_named_by_its_path() -> None:
    with pytest.raises(PayloadError) as refused:
        come_back(dict[str, list[Point]], {"a": [Point(1), Point("2")]})  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert str(refused.value) == (
        "the payload of C does not fit its class: Expected `int`, got `str` - at `$.value[...][1].x`"
    )


def test_a_wrong_value_in_a_pydantic_job_is_named_in_one_line_without_the_value() -> None:
    assert refusal(Model.model_construct(number="secret")) == (
        "the payload of Model does not fit its class:"
        " number: Input should be a valid number, unable to parse string as a number"
    )


def test_a_wrong_value_in_a_pydantic_field_is_named_in_one_line_without_the_value() -> None:
    assert refusal(Sized(Size.model_construct(width="secret"))) == (
        "the payload of Sized does not fit its class:"
        " width: Input should be a valid number, unable to parse string as a number - at `$.size`"
    )


@pytest.mark.parametrize(
    ("value", "kind"),
    [(object(), "builtins.object"), ([threading.Lock()], "_thread.lock"), ({"a": 1j}, "builtins.complex")],
)
def test_an_object_that_is_not_data_is_refused(value: object, kind: str) -> None:
    assert refusal(Free(value)) == f"the payload of Free can't be written as JSON (it has a {kind}): {INSTEAD}"


@pytest.mark.parametrize("job", HOLDERS[1:])
def test_an_object_that_is_not_data_is_refused_by_pydantic_too(job: Holder) -> None:
    made = job(object())
    assert refusal(made) == (
        f"the payload of {type(made).__name__} can't be written as JSON"
        f" (Unable to serialize unknown type: <class 'object'>): {INSTEAD}"
    )


@pytest.mark.parametrize(
    ("annotation", "value", "problem"),
    [
        (str, b"abc", "Expected `str`, got `bytes` - at `$.value`"),
        (str, UUID(int=1), "Expected `str`, got `uuid` - at `$.value`"),
        (list[str], [date(2030, 1, 1)], "Expected `str`, got `date` - at `$.value[0]`"),
        (dict[str, int], {1: 1}, "Expected `str`, got `int` - at `key` in `$.value`"),
    ],
    ids=["bytes", "uuid", "date", "key"],
)
def test_what_json_writes_as_text_is_refused_where_a_text_is_wanted(
    annotation: Any, value: object, problem: str
) -> None:
    with pytest.raises(PayloadError) as refused:
        come_back(annotation, value)
    assert str(refused.value) == f"the payload of C does not fit its class: {problem}"


# What comes back exactly


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (set[str], {"a", "b"}),
        (frozenset[int], frozenset({1, 2})),
        (tuple[int, str], (1, "a")),
        (tuple[int, ...], (1, 2, 3)),
        (datetime, datetime(2030, 1, 2, 3, 4, 5, 678_901, tzinfo=UTC)),
        (datetime, datetime(2030, 1, 2, tzinfo=timezone(timedelta(hours=5, minutes=45)))),
        (datetime, datetime(2030, 1, 2)),  # noqa: DTZ001 the naive one
        (date, date(2030, 1, 2)),
        (time, time(1, 2, 3)),
        (timedelta, timedelta(days=-1, microseconds=3)),
        (UUID, UUID(int=2**127)),
        (Decimal, Decimal("1.10")),
        (Colour, Colour.RED),
        (Level, Level.HIGH),
        (bytes, b"\x00\xff"),
        (dict[int, str], {1: "a", -2: "b"}),
        (dict[UUID, list[Colour]], {UUID(int=1): [Colour.RED]}),
        (list[int | None], [1, None]),
        (Point, Point(1, 2.5, date(2030, 1, 1))),
        (Box, Box(Point(1), "a")),
        (Size, Size(width=1.5, note={"a": [1]})),
        (list[Size], [Size(width=1), Size(width=2)]),
        (Size | None, None),
        (StrictDay, StrictDay(day=date(2030, 1, 1))),
        (Any, {"a": [1, "b", None, True, 1.5, {"c": 0}]}),
    ],
    ids=str,
)
def test_a_value_comes_back_with_its_type(annotation: Any, value: object) -> None:
    loaded = come_back(annotation, value)
    assert loaded == value
    assert type(loaded) is type(value)


@pytest.mark.parametrize(
    "text", ["", "\x00", "a\x00b", "\x1f\x7f\x85\u2028", "\ufeff", "😀", "\\u0000", '"', "é" * 1_000]
)
@pytest.mark.parametrize("cls", [Free, Model])
def test_a_text_comes_back_as_it_was(cls: Any, text: str) -> None:
    assert prepare(cls).decode(encode(cls(value=text))).value == text


@pytest.mark.parametrize("number", [2**53 + 1, -(2**53) - 1, 2**63, 2**64, 2**70, -(2**70), 10**300])
@pytest.mark.parametrize("cls", [Free, Model])
def test_an_integer_of_any_size_comes_back_exactly(cls: Any, number: int) -> None:
    loaded = prepare(cls).decode(encode(cls(value=number))).value
    assert (loaded, type(loaded)) == (number, int)


def test_an_integer_too_long_for_python_to_print_is_refused() -> None:
    assert refusal(Free(10**5_000)).startswith("the payload of Free can't be written as JSON (Exceeds the limit")


@pytest.mark.parametrize("number", [-0.0, 1e22, 1e-7, 0.1, 5e-324, 1.7976931348623157e308, 1.0])
@pytest.mark.parametrize("cls", [Free, Model])
def test_a_float_comes_back_to_the_last_bit(cls: Any, number: float) -> None:
    loaded = prepare(cls).decode(encode(cls(value=number))).value
    assert (loaded.hex(), type(loaded)) == (number.hex(), float)


def test_a_whole_number_in_a_float_field_comes_back_as_a_float() -> None:
    assert isinstance(come_back(float, 3), float)


def test_a_tuple_may_stand_for_a_sequence_and_comes_back_as_a_list() -> None:
    assert come_back(Sequence[int], (1, 2)) == [1, 2]


def test_what_an_untyped_field_holds_comes_back_as_json_has_it() -> None:
    assert come_back(Any, (1, {2: "a"}, date(2030, 1, 1))) == [1, {"2": "a"}, "2030-01-01"]


def test_a_class_that_can_not_be_compared_comes_back_too() -> None:
    @dataclasses.dataclass(eq=False)
    class Opaque:
        number: int
        when: date
        by_id: dict[UUID, bytes]
        colours: set[Colour]

    loaded: Any = come_back(Opaque, Opaque(1, date(2030, 1, 1), {UUID(int=1): b"a"}, {Colour.RED}))
    assert (loaded.number, loaded.when, loaded.by_id) == (1, date(2030, 1, 1), {UUID(int=1): b"a"})
    assert loaded.colours == {Colour.RED}


def test_a_pydantic_job_is_stored_by_its_aliases() -> None:
    job = Aliased.model_validate({"n": 5})
    assert encode(job) == '{"n":5}'
    assert prepare(Aliased).decode('{"n":5}') == job


# Stored payloads that meet a changed class


@pytest.mark.parametrize(
    ("cls", "payload", "problem"),
    [
        (Text, "{}", "Object missing required field `text`"),
        (Text, '{"text":5}', "Expected `str`, got `int` - at `$.text`"),
        (Text, "[]", "Expected `object`, got `array`"),
        (Text, "?", "JSON is malformed: invalid character (byte 0)"),
        (Text, "", "Input data was truncated"),
        (Text, '{"text":"a"', "Input data was truncated"),
        (Sized, '{"size":{}}', "width: Field required - at `$.size`"),
        (Model, '{"number":"x"}', "number: Input should be a valid number, unable to parse string as a number"),
        (Model, "[]", "Input should be an object"),
        (Model, "?", "Invalid JSON: expected value at line 1 column 1"),
    ],
)
def test_a_payload_that_fits_no_longer_is_refused_with_the_reason(
    cls: type[Job[Any]], payload: str, problem: str
) -> None:
    assert decode_refusal(cls, payload) == f"the payload of {cls.__name__} no longer fits its class: {problem}"


@pytest.mark.parametrize("cls", [Free, Model])
def test_a_stored_payload_that_is_nested_too_deep_for_the_parser_is_refused(cls: type[Job[Any]]) -> None:
    payload = f'{{"value":{"[" * 100_000}{"]" * 100_000}}}'
    assert "no longer fits its class: " in decode_refusal(cls, payload)


def test_fields_that_the_class_no_longer_has_are_ignored() -> None:
    assert prepare(Text).decode('{"text":"a","colour":"red"}') == Text("a")
    assert prepare(Model).decode('{"number":1,"colour":"red"}') == Model(number=1)


def test_a_field_that_was_added_takes_its_default() -> None:
    class Later(Job):
        text: str
        colour: str = "red"
        tags: list[str] = dataclasses.field(default_factory=list[str])

    assert prepare(Later).decode('{"text":"a"}') == Later("a", "red", [])


class Login(pydantic.BaseModel, Job):
    password: pydantic.SecretStr


class Guarded(Job):
    password: pydantic.SecretStr | None = None
    login: Login | None = None
    text: str = ""


@pytest.mark.parametrize(
    "job",
    [Login(password=pydantic.SecretStr("x")), Guarded(login=Login(password=pydantic.SecretStr("x")))],
    ids=["the job itself", "a field"],
)
def test_a_secret_that_would_be_stored_as_asterisks_is_refused(job: Job) -> None:
    with pytest.raises(PayloadError) as refused:
        prepare(type(job)).encode(job)
    assert str(refused.value) == (
        f"the payload of {type(job).__name__} has a pydantic secret, which is written as asterisks and would be lost:"
        " keep the secret where it is, and enqueue a reference to it"
    )


def test_a_text_of_asterisks_is_no_secret() -> None:
    job = Guarded(text="**********")
    assert prepare(Guarded).decode(prepare(Guarded).encode(job)) == job
