"""A job's fields as JSON text and back, with every way that this can go wrong told apart.

JSON text rather than jsonb: jsonb rejects NUL and changes numbers. msgspec checks the types while it
decodes, so that the check at enqueue is the very decoding that a worker will do.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any, Final, Generic, TypeVar, cast

import msgspec

from queue_core.errors import PayloadError

MAX_DEPTH: Final = 64
MAX_PAYLOAD: Final = 256 * 1024

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
        self._load(data, "does not fit its class")
        return data.decode()

    def decode(self, payload: str) -> T:
        """The job of a stored payload; a `PayloadError` when the class has changed and it fits no longer."""
        return self._load(payload, "no longer fits its class")

    def _dump(self, job: T) -> bytes:
        try:
            if self._model is not None:
                return bytes(self._model.model_dump_json(job).encode())
            return self._encoder.encode(job)
        except PayloadError:
            raise
        except RecursionError as error:
            raise PayloadError(
                f"the payload of {self._name} refers to itself or is nested deeper than {MAX_DEPTH} levels: flatten it"
            ) from error
        except UnicodeEncodeError as error:
            raise self._surrogate() from error
        except Exception as error:
            if "surrogates not allowed" in str(error):  # pydantic's wrapping of the same thing
                raise self._surrogate() from error
            raise PayloadError(
                f"the payload of {self._name} can't be written as JSON ({error}): use str, numbers, bool, None,"
                " lists, dicts, dates, UUIDs, enums, dataclasses or pydantic models"
            ) from error

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
            reason = str(error).removesuffix(" - at `$`")
            raise PayloadError(f"the payload of {self._name} {trouble}: {reason}") from error

    def _look_closely(self, job: T) -> None:
        plain = (
            self._model.model_dump(job)
            if self._model is not None
            else msgspec.to_builtins(job, enc_hook=_encode_foreign)
        )
        # Level by level instead of recursively: the depth is what is being checked.
        level: list[tuple[str, object]] = [("", plain)]
        for depth in range(MAX_DEPTH + 2):
            if depth > MAX_DEPTH:
                raise PayloadError(
                    f"the payload of {self._name} refers to itself or is nested deeper than {MAX_DEPTH} levels:"
                    " flatten it"
                )
            for path, value in level:
                if isinstance(value, float) and not math.isfinite(value):
                    raise PayloadError(
                        f"the payload of {self._name} has {value} at {path.lstrip('.')}, and JSON has no such number:"
                        " use None or a string"
                    )
            level = [item for path, value in level for item in _children(path, value)]
            if not level:
                return


def _children(path: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for name, item in cast("dict[object, object]", value).items():
            yield f"{path}.{name}", item
    elif isinstance(value, list | tuple | set | frozenset):
        for position, item in enumerate(cast("Iterable[object]", value)):
            yield f"{path}[{position}]", item


def _encode_foreign(value: Any) -> Any:
    """What msgspec hands over because it does not know the type."""
    kind: type[Any] = value.__class__
    if is_pydantic(kind):
        return value.model_dump(mode="json")
    raise PayloadError(
        f"{kind.__module__}.{kind.__qualname__} can't be written as JSON: use str, numbers, bool, None,"
        " lists, dicts, dates, UUIDs, enums, dataclasses or pydantic models"
    )


def _decode_foreign(wanted: type[Any], value: Any) -> Any:
    if is_pydantic(wanted):
        # As JSON, because a strict model takes a date from JSON text but not from a Python str.
        return wanted.model_validate_json(msgspec.json.encode(value))
    raise TypeError(f"fields of type {wanted.__qualname__} can't be read from JSON")
