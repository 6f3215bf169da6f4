"""The keywords of `enqueue`, and how they and a job become a `NewJob`."""

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypedDict, cast

import msgspec

from queue_core.checks import (
    Duration,
    check_duration,
    check_instant,
    check_int,
    check_name,
    check_text,
    shown,
)
from queue_core.errors import ConfigurationError
from queue_core.ids import new_request_id
from queue_core.job import Job, prepare, unknown_option
from queue_core.model import KeyMode, KeyScope, NewJob
from queue_core.options import MAX_ATTEMPTS_LIMIT
from queue_core.retry import StoredBackoff, encode_backoff

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
    from sqlalchemy.orm import Session

KEY_BYTES: Final = 512
TENANT_BYTES: Final = 256
CONTEXT_BYTES: Final = 8 * 1024
HEADERS_BYTES: Final = 8 * 1024


class Delivery(TypedDict, total=False):
    """How one job is delivered. What is left out, or None, comes from the job class, or is nothing."""

    queue: str | None
    key: str | None
    """No second job with this key while one is waiting or running; see `key_mode` and `key_scope`."""
    key_mode: KeyMode | None
    """What happens when a job with this key is waiting: `keep` it, `replace` its payload, time and options and
    let it start again with no attempts used, or replace all but its time (`preserve_run_at`)."""
    key_scope: KeyScope | None
    """Among which jobs the key is unique: of the same `type`, of the type and `tenant`, of the type and `queue`."""
    delay: Duration | None
    run_at: datetime | None
    priority: int | None
    """-100 … 100, larger first."""
    max_attempts: int | None
    timeout: Duration | None
    backoff: StoredBackoff | None
    tenant: str | None
    context: str | None
    """Why this was enqueued, for whoever looks at it later."""
    headers: Mapping[str, str] | None
    expires_at: datetime | None
    """A job that has not started by then is never run."""
    expires_in: Duration | None


class Transactional(Delivery, total=False):
    """A delivery that may join the caller's own transaction."""

    session: "AsyncSession | Session | None"
    connection: "AsyncConnection | Connection | None"


class Request(NamedTuple):
    """A job with a delivery of its own; made by `job.with_delivery(…)`."""

    job: Job[Any]
    delivery: Delivery


_KEYWORDS: Final = tuple(Delivery.__annotations__)
_KNOWN: Final = frozenset(_KEYWORDS)
_MODES: Final = ("keep", "replace", "preserve_run_at")
_SCOPES: Final = ("type", "tenant", "queue")
_HASH: Final = "use a hash of it instead"
_encode = msgspec.json.Encoder().encode


def new_job(job: Job[Any], delivery: Delivery, *, max_payload: int) -> NewJob:
    """Check everything and put it together; after this nothing in it can make a write fail."""
    options = job.__job_options__
    payload = prepare(type(job)).encode(job, limit=max_payload)
    if not delivery:
        return NewJob(
            request_id=new_request_id(),
            job_type=options.name,
            queue=options.queue,
            payload=payload,
            priority=options.priority,
            max_attempts=options.max_attempts,
            timeout=options.timeout,
        )
    if not delivery.keys() <= _KNOWN:
        unknown = {name: value for name, value in delivery.items() if name not in _KNOWN}
        if unknown.keys() & {"session", "connection"}:
            raise ConfigurationError(
                "session and connection hold for all jobs of a call: give them to enqueue_many, not to with_delivery"
            )
        raise ConfigurationError(unknown_option("enqueue()", unknown, (*_KEYWORDS, "session", "connection")))
    # None means left out, so that callers can pass an optional value on.
    given: dict[str, Any] = {name: value for name, value in delivery.items() if value is not None}
    queue = check_name(given["queue"], "queue") if "queue" in given else options.queue
    tenant = check_text(given["tenant"], "tenant", limit=TENANT_BYTES, hint=_HASH) if "tenant" in given else None
    key = check_text(given["key"], "key", limit=KEY_BYTES, hint=_HASH) if "key" in given else None
    _check_pairs(given)
    return NewJob(
        request_id=new_request_id(),
        job_type=options.name,
        queue=queue,
        payload=payload,
        priority=check_int(given["priority"], "priority", -100, 100) if "priority" in given else options.priority,
        max_attempts=check_int(given["max_attempts"], "max_attempts", 1, MAX_ATTEMPTS_LIMIT)
        if "max_attempts" in given
        else options.max_attempts,
        timeout=check_duration(given["timeout"], "timeout", zero=False) if "timeout" in given else options.timeout,
        backoff=encode_backoff(given["backoff"], "backoff") if "backoff" in given else None,
        key=key,
        unique_key=None if key is None else _unique_key(given, options.name, queue, tenant, key),
        key_mode=_one_of(given.get("key_mode", "keep"), "key_mode", _MODES),
        tenant=tenant,
        context=check_text(given["context"], "context", limit=CONTEXT_BYTES, one_line=False)
        if "context" in given
        else None,
        headers=_headers(given["headers"]) if "headers" in given else None,
        delay=check_duration(given.get("delay", 0), "delay"),
        run_at=check_instant(given["run_at"], "run_at") if "run_at" in given else None,
        expires_after=check_duration(given["expires_in"], "expires_in", zero=False) if "expires_in" in given else None,
        expires_at=check_instant(given["expires_at"], "expires_at") if "expires_at" in given else None,
    )


def _check_pairs(given: Mapping[str, object]) -> None:
    for one, other in (("delay", "run_at"), ("expires_in", "expires_at")):
        if one in given and other in given:
            raise ConfigurationError(f"give {one} or {other}, not both")
    for name in ("key_mode", "key_scope"):
        if name in given and "key" not in given:
            raise ConfigurationError(f"{name} says what a key does: give key= as well, or leave {name} out")


def _one_of(value: object, field: str, allowed: tuple[str, ...]) -> Any:
    if value in allowed:
        return value
    raise ConfigurationError(f"{field} must be one of {', '.join(allowed)}, got {shown(value)}")


def _unique_key(given: Mapping[str, object], job_type: str, queue: str, tenant: str | None, key: str) -> str:
    """Scope, type and key in one text. A JSON array, because no choice of values can make two of them alike,
    and no part is NULL, which a unique index would let in twice."""
    scope = _one_of(given.get("key_scope", "type"), "key_scope", _SCOPES)
    among = {"type": (), "tenant": (tenant,), "queue": (queue,)}[scope]
    return _encode((scope, job_type, *among, key)).decode()


def _headers(value: object) -> str | None:
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"headers must be a dict of str to str, got {shown(value)}")
    headers = cast("Mapping[object, object]", value)
    for name, text in headers.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise ConfigurationError(f"headers must be a dict of str to str, got {shown(name)}: {shown(text)}")
        check_text(name, "a header's name", limit=HEADERS_BYTES)
    try:
        encoded = _encode(headers)
    except UnicodeEncodeError as error:
        raise ConfigurationError("headers have a lone surrogate, which is not text; remove it") from error
    if len(encoded) > HEADERS_BYTES:
        raise ConfigurationError(f"headers must be at most {HEADERS_BYTES} bytes as JSON, got {len(encoded)}")
    return encoded.decode() if headers else None
