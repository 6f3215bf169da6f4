"""A job's fields as JSON text and back, with every way that this can go wrong told apart.

JSON text rather than jsonb: jsonb rejects NUL and changes numbers. msgspec checks the types while it
decodes, so that the check at enqueue is the very decoding that a worker will do.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Final, Generic, TypeVar, cast
from uuid import UUID

import msgspec

from queue_core.errors import PayloadError

MAX_DEPTH: Final = 64
MAX_PAYLOAD: Final = 256 * 1024

_NOT_TEXT: Final = (bytes, bytearray, datetime, date, time, timedelta, UUID, Decimal)

T = TypeVar("T")


def is_pydantic(cls: type[object]) -> bool:
    """Whether this is a pydantic model; asked without importing pydantic, which is optional."""
    return hasattr(cls, "__pydantic_validator__") and hasattr(cls, "model_validate_json")


class Codec(Generic[T]):
    """Encodes and decodes the fields of one job class."""

    def __init__(self, cls: type[T], name: str) -> None:
        self._name = name
        self._model: Any = cls if is_pydantic(cls) else None  # pydantic's own API, known only when it is there
        self._encoder = msgspec.json.Encoder(enc_hook=_encode_foreign)
        self._decoder = msgspec.json.Decoder(cls, dec_hook=_decode_foreign) if self._model is None else None

    def encode(self, job: T, *, limit: int = MAX_PAYLOAD) -> str:
        """The JSON text of a job that fits its class and can be read back as it is; else a `PayloadError`."""
        data = self._dump(job)
        if len(data) > limit:
            raise PayloadError(
                f"the payload of {self._name} is {len(data):,} bytes and at most {limit:,} are allowed:"
                " store the data elsewhere and enqueue a reference to it, or raise max_payload"
            )
        # msgspec and pydantic write NaN and the infinities as null without a word, and null is in the
        # text only if there was one of them or a None: the slow look is taken only then.
        # No more opening brackets than MAX_DEPTH: then it can't be nested deeper either.
        if b"null" in data or data.count(b"[") + data.count(b"{") > MAX_DEPTH:
            self._look_closely(job)
        loaded = self._load(data, "does not fit its class")
        if loaded != job:
            self._compare(job, data)
        return data.decode()

    def decode(self, payload: str) -> T:
        """The job of a stored payload; a `PayloadError` when the class has changed and it fits no longer."""
        return self._load(payload, "no longer fits its class")

    def _dump(self, job: T) -> bytes:
        try:
            if self._model is not None:
                # By alias, because that is how it is read.
                return bytes(self._model.model_dump_json(job, by_alias=True, round_trip=True, warnings=False).encode())
            return self._encoder.encode(job)
        except RecursionError as error:
            raise self._too_deep() from error
        except UnicodeEncodeError as error:
            raise self._surrogate() from error
        except Exception as error:
            reason = str(error).removeprefix("Error serializing to JSON: ").removeprefix("ValueError: ")
            # pydantic's wrappings of the same things
            if "surrogates not allowed" in reason:
                raise self._surrogate() from error
            if reason.startswith(("Circular reference", "Maximum serialization depth")):
                raise self._too_deep() from error
            raise PayloadError(
                f"the payload of {self._name} can't be written as JSON ({reason}): use str, numbers, bool, None,"
                " lists, dicts, dates, UUIDs, enums, dataclasses or pydantic models"
            ) from error

    def _too_deep(self) -> PayloadError:
        return PayloadError(
            f"the payload of {self._name} refers to itself or is nested deeper than {MAX_DEPTH} levels: flatten it"
        )

    def _surrogate(self) -> PayloadError:
        return PayloadError(
            f"the payload of {self._name} has a lone surrogate, which is not text:"
            " decode the bytes it came from with errors='replace', or send them as bytes"
        )

    def _load(self, data: bytes | str, trouble: str) -> T:
        try:
            if self._decoder is not None:
                return self._decoder.decode(data)
            loaded: T = self._model.model_validate_json(data)
            return loaded
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
            raise PayloadError(f"the payload of {self._name} {trouble}: {_reason(error)}") from error

    def _compare(self, job: T, data: bytes) -> None:
        """What comes back is not equal: refuse what was lost on the way, let pass what only JSON makes of it."""
        if b'"**********"' in data:
            raise PayloadError(
                f"the payload of {self._name} has a pydantic secret, which is written as asterisks and would be lost:"
                " keep the secret where it is, and enqueue a reference to it"
            )
        if self._model is not None:
            return
        # A str field takes bytes, dates and number keys, because JSON writes them as text.
        plain = msgspec.to_builtins(job, builtin_types=_NOT_TEXT, enc_hook=_encode_foreign)
        try:
            msgspec.convert(plain, type(job), builtin_types=_NOT_TEXT, dec_hook=_decode_foreign)
        except msgspec.ValidationError as error:
            raise PayloadError(f"the payload of {self._name} does not fit its class: {_reason(error)}") from error

    def _look_closely(self, job: T) -> None:
        # Level by level instead of recursively: the depth is what is being checked.
        level: list[tuple[str, object]] = [("", job)]
        for depth in itertools.count():
            deeper: list[tuple[str, object]] = []
            for path, value in level:
                if isinstance(value, float) and not math.isfinite(value):
                    raise PayloadError(
                        f"the payload of {self._name} has {value} at {path.lstrip('.')}, and JSON has no such number:"
                        " use None or a string"
                    )
                parts = _parts(value)
                if parts is not None and depth == MAX_DEPTH:
                    raise self._too_deep()
                deeper += [(_below(path, value, name), item) for name, item in parts or ()]
            if not deeper:
                return
            level = deeper


def _parts(value: object) -> Sequence[tuple[object, object]] | None:
    """What an object or an array of JSON is made of; None of anything else."""
    if isinstance(value, Mapping):
        return list(cast("Mapping[object, object]", value).items())
    if isinstance(value, list | tuple | set | frozenset):
        return list(enumerate(cast("Iterable[object]", value)))
    if is_pydantic(type(value)):
        # As Python objects: as JSON, pydantic has made null of NaN already.
        return list(cast("Any", value).model_dump(warnings=False).items())
    if dataclasses.is_dataclass(value):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, msgspec.Struct):
        return [(name, getattr(value, name)) for name in value.__struct_fields__]
    if hasattr(type(value), "__attrs_attrs__"):
        return [(field.name, getattr(value, field.name)) for field in cast("Any", value).__attrs_attrs__]
    return None


def _below(path: str, value: object, name: object) -> str:
    return f"{path}[{name}]" if isinstance(value, list | tuple | set | frozenset) else f"{path}.{name}"


def _reason(error: Exception) -> str:
    """What a decoder complains about. Not pydantic's own text, which has several lines and the values."""
    if not hasattr(error, "errors"):
        return str(error).removesuffix(" - at `$`")
    problems = cast("Any", error).errors(include_url=False, include_input=False, include_context=False)
    return "; ".join(": ".join(filter(None, (".".join(map(str, each["loc"])), each["msg"]))) for each in problems)


def _encode_foreign(value: Any) -> Any:
    """What msgspec hands over because it does not know the type."""
    kind: type[Any] = value.__class__
    if is_pydantic(kind):
        return value.model_dump(mode="json", by_alias=True, round_trip=True, warnings=False)
    raise TypeError(f"it has a {kind.__module__}.{kind.__qualname__}")


def _decode_foreign(wanted: type[Any], value: Any) -> Any:
    if is_pydantic(wanted):
        # As JSON, because a strict model takes a date from JSON text but not from a Python str.
        try:
            return wanted.model_validate_json(msgspec.json.encode(value))
        except ValueError as error:
            raise ValueError(_reason(error)) from error
    raise TypeError(f"fields of type {wanted.__qualname__} can't be read from JSON")
