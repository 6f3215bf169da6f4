"""Deliveries: how the keywords of an enqueue and a job become a row, and which values are refused."""

import json
import math
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any, Literal, TypeAlias

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from queue_core import ConfigurationError, Context, Fixed, Job, PayloadError
from queue_core.delivery import Delivery, Request, new_job
from queue_core.model import NewJob, RequestId
from tests.support.jobs import Note, Other

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
BACKOFFS = "FullJitter(), PowersOfTwo(), Fixed()"


class Urgent(Job, queue="fast", priority=50, max_attempts=2, timeout=30, backoff=Fixed(9)):
    async def run(self, ctx: Context) -> None: ...


def build(job: Job[Any] | None = None, **delivery: Any) -> NewJob:
    """What would be written, of keywords that no type checker would let through."""
    keywords: Any = delivery
    return new_job(job or Note(), keywords, max_payload=1_000)


def refusal(**delivery: Any) -> str:
    with pytest.raises(ConfigurationError) as refused:
        build(**delivery)
    return str(refused.value)


def anonymous(new: NewJob) -> NewJob:
    """The same, without the id that is new each time."""
    return msgspec.structs.replace(new, request_id=RequestId(""))


# What is taken


def test_without_keywords_the_class_decides() -> None:
    new = build(Urgent())
    assert (new.job_type, new.queue, new.priority, new.max_attempts) == ("Urgent", "fast", 50, 2)
    assert (new.timeout, new.backoff) == (timedelta(seconds=30), None)
    assert (new.key, new.unique_key, new.tenant, new.context, new.headers) == (None, None, None, None, None)
    assert (new.delay, new.run_at, new.expires_after, new.expires_at) == (timedelta(0), None, None, None)


def test_the_keywords_win_over_the_class() -> None:
    new = build(Urgent(), queue="q", priority=-100, max_attempts=1, timeout=0.5, backoff=Fixed(3))
    assert (new.queue, new.priority, new.max_attempts) == ("q", -100, 1)
    assert (new.timeout, new.backoff) == (timedelta(seconds=0.5), '{"policy":"fixed","wait":3.0}')


def test_every_keyword_is_carried_over() -> None:
    new = build(
        Note("hi"), tenant="acme", context="asked for\nby ada", headers={"trace": "1"}, run_at=NOON, expires_at=NOON
    )
    assert (new.payload, new.tenant, new.context) == ('{"text":"hi"}', "acme", "asked for\nby ada")
    assert (new.headers, new.run_at, new.expires_at) == ('{"trace":"1"}', NOON, NOON)


@pytest.mark.parametrize("span", [90, 90.0, timedelta(seconds=90)])
def test_a_duration_is_seconds_or_a_timedelta(span: float | timedelta) -> None:
    new = build(delay=span, timeout=span, expires_in=span)
    assert new.delay == new.timeout == new.expires_after == timedelta(seconds=90)


def test_an_instant_of_any_time_zone_becomes_utc() -> None:
    moment = datetime(2030, 1, 1, 17, 45, tzinfo=timezone(timedelta(hours=5, minutes=45)))
    new = build(run_at=moment)
    assert new.run_at == NOON
    assert new.run_at is not None
    assert new.run_at.tzinfo is UTC


def test_none_is_the_same_as_left_out() -> None:
    assert anonymous(build(**dict.fromkeys(Delivery.__annotations__))) == anonymous(build())


def test_empty_headers_are_the_same_as_left_out() -> None:
    assert build(headers={}).headers is None


def test_a_header_comes_back_as_it_was() -> None:
    headers = {"a": "\x00\n", "é": '"'}
    assert json.loads(build(headers=headers).headers or "") == headers


def test_each_request_has_an_id_of_its_own() -> None:
    assert build().request_id != build().request_id


def test_the_largest_payload_is_the_queues_to_say() -> None:
    assert build(Note("x" * 989)).payload == f'{{"text":"{"x" * 989}"}}'
    with pytest.raises(PayloadError, match=r"^the payload of Note is 1,001 bytes and at most 1,000 are allowed: "):
        build(Note("x" * 990))


def test_with_delivery_keeps_the_job_and_its_keywords_together() -> None:
    job = Note()
    assert job.with_delivery(priority=5) == Request(job, {"priority": 5})


# Keys


@pytest.mark.parametrize(
    ("keywords", "unique_key"),
    [
        ({}, '["type","Note","k"]'),
        ({"key_scope": "type", "tenant": "t", "queue": "q"}, '["type","Note","k"]'),
        ({"key_scope": "tenant", "tenant": "t"}, '["tenant","Note","t","k"]'),
        ({"key_scope": "tenant"}, '["tenant","Note",null,"k"]'),
        ({"key_scope": "queue"}, '["queue","Note","notes","k"]'),
        ({"key_scope": "queue", "queue": "q"}, '["queue","Note","q","k"]'),
    ],
)
def test_a_key_is_unique_within_its_scope(keywords: dict[str, Any], unique_key: str) -> None:
    new = build(key="k", **keywords)
    assert (new.key, new.unique_key) == ("k", unique_key)


def test_without_a_key_nothing_is_unique() -> None:
    assert build(tenant="t", queue="q").unique_key is None


def test_a_key_of_no_tenant_is_not_the_one_of_a_tenant_called_null() -> None:
    nobody, somebody = (build(key="k", key_scope="tenant", tenant=tenant).unique_key for tenant in (None, "null"))
    assert nobody != somebody


@pytest.mark.parametrize("mode", ["keep", "replace", "preserve_run_at"])
def test_the_key_mode_is_carried_over(mode: str) -> None:
    assert build(key="k", key_mode=mode).key_mode == mode


Scope: TypeAlias = Literal["type", "tenant", "queue"]
Key: TypeAlias = tuple[Scope, str, str | None, str, str]
"""Scope, job type, tenant, queue and key."""

# Few and awkward characters, so that a separator of one part in another would be found.
_texts = st.text('a"\\,[]: \u00e9', min_size=1, max_size=4)
_scopes: st.SearchStrategy[Scope] = st.sampled_from(["type", "tenant", "queue"])
_names = st.sampled_from(["Note", "Other"])
_keys: st.SearchStrategy[Key] = st.tuples(_scopes, _names, st.none() | _texts, st.text("a:.-", min_size=1), _texts)


@given(_keys, _keys)
@example(("tenant", "Note", "a", "q", 'b","c'), ("tenant", "Note", 'a","b', "q", "c"))
@example(("tenant", "Note", None, "q", "k"), ("type", "Note", None, "q", 'null,"k'))
def test_two_keys_are_alike_only_if_all_that_their_scope_counts_is(one: Key, other: Key) -> None:
    def unique(key: Key) -> str | None:
        scope, kind, tenant, queue, text = key
        job = Note() if kind == "Note" else Other()
        return build(job, key=text, key_scope=scope, tenant=tenant, queue=queue).unique_key

    def counted(key: Key) -> tuple[object, ...]:
        scope, kind, tenant, queue, text = key
        return scope, kind, text, {"type": None, "tenant": (tenant,), "queue": queue}[scope]

    assert (unique(one) == unique(other)) == (counted(one) == counted(other))


# What is refused

NAME = "must be 1 to 128 characters of A-Z a-z 0-9 _ . : -, got"
KEYWORDS = ", ".join([*Delivery.__annotations__, "session", "connection"])


def doubled(attempt: int) -> float:
    return attempt * 2


BAD: list[tuple[dict[str, Any], str]] = [
    # Times
    (
        {"run_at": datetime(2030, 1, 1)},  # noqa: DTZ001 the point of it
        ("run_at must have a time zone, got the naive 2030-01-01T00:00:00; write datetime.now(UTC), or add tzinfo=UTC"),
    ),
    (
        {"expires_at": datetime(2030, 1, 1)},  # noqa: DTZ001 the point of it
        (
            "expires_at must have a time zone, got the naive 2030-01-01T00:00:00;"
            " write datetime.now(UTC), or add tzinfo=UTC"
        ),
    ),
    (
        {"run_at": datetime(9999, 12, 31, tzinfo=UTC)},
        "run_at must be between the years 1970 and 9000, got 9999-12-31T00:00:00+00:00",
    ),
    (
        {"run_at": datetime(9999, 12, 31, 23, tzinfo=timezone(-timedelta(hours=5)))},
        "run_at must be between the years 1970 and 9000, got 9999-12-31T23:00:00-05:00",
    ),
    (
        {"run_at": datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=5)))},
        "run_at must be between the years 1970 and 9000, got 0001-01-01T00:00:00+05:00",
    ),
    ({"run_at": "tomorrow"}, "run_at must be a datetime with a time zone, got 'tomorrow'"),
    ({"run_at": date(2030, 1, 1)}, "run_at must be a datetime with a time zone, got datetime.date(2030, 1, 1)"),
    ({"run_at": 1.5}, "run_at must be a datetime with a time zone, got 1.5"),
    ({"delay": 5, "run_at": NOON}, "give delay or run_at, not both"),
    ({"expires_in": 5, "expires_at": NOON}, "give expires_in or expires_at, not both"),
    ({"delay": -1}, "delay must be 0 s or more, got -1"),
    ({"delay": timedelta(-1)}, "delay must be 0 s or more, got datetime.timedelta(days=-1)"),
    ({"delay": math.nan}, "delay must be seconds or a timedelta, got nan"),
    ({"delay": math.inf}, "delay must be seconds or a timedelta, got inf"),
    ({"delay": 1e300}, "delay must be at most 100 years, got 1e+300"),
    (
        {"delay": timedelta.max},
        (
            "delay must be at most 100 years, got"
            " datetime.timedelta(days=999999999, seconds=86399, microsecon… (70 characters)"
        ),
    ),
    ({"delay": True}, "delay must be seconds or a timedelta, got True"),
    ({"delay": "5"}, "delay must be seconds or a timedelta, got '5'"),
    ({"timeout": 0}, "timeout must be more than 0 s, got 0"),
    ({"timeout": math.nan}, "timeout must be seconds or a timedelta, got nan"),
    ({"expires_in": 0}, "expires_in must be more than 0 s, got 0"),
    ({"expires_in": -5}, "expires_in must be more than 0 s, got -5"),
    # Numbers
    ({"priority": 1000}, "priority must be a whole number from -100 to 100, got 1000"),
    ({"priority": True}, "priority must be a whole number from -100 to 100, got True"),
    ({"priority": 1.0}, "priority must be a whole number from -100 to 100, got 1.0"),
    ({"max_attempts": 0}, "max_attempts must be a whole number from 1 to 10000, got 0"),
    ({"max_attempts": True}, "max_attempts must be a whole number from 1 to 10000, got True"),
    # Names and texts
    ({"queue": ""}, f"queue {NAME} ''"),
    ({"queue": "a b"}, f"queue {NAME} 'a b'"),
    ({"queue": "mail\n"}, f"queue {NAME} 'mail\\n'"),
    ({"queue": b"mail"}, f"queue {NAME} b'mail'"),
    ({"key": ""}, "key must not be empty; leave it out instead"),
    ({"key": 5}, "key must be a str, got 5"),
    ({"key": "k" * 10_240}, "key must be at most 512 bytes, got 10240; use a hash of it instead"),
    ({"key": "é" * 257}, "key must be at most 512 bytes, got 514; use a hash of it instead"),
    ({"key": "a\nb"}, "key must not have control characters, got 'a\\nb'"),
    ({"key": "a\x00"}, "key must not have control characters, got 'a\\x00'"),
    ({"key": "a\ud800"}, "key has a lone surrogate at position 1, which is not text; remove it"),
    ({"tenant": ""}, "tenant must not be empty; leave it out instead"),
    ({"tenant": "t" * 257}, "tenant must be at most 256 bytes, got 257; use a hash of it instead"),
    ({"context": "c" * 8_193}, "context must be at most 8192 bytes, got 8193; shorten it"),
    ({"context": "a\x00b"}, "context must not have control characters, got 'a\\x00b'"),
    # Headers
    ({"headers": {"a": 1}}, "headers must be a dict of str to str, got 'a': 1"),
    ({"headers": {1: "a"}}, "headers must be a dict of str to str, got 1: 'a'"),
    ({"headers": [("a", "b")]}, "headers must be a dict of str to str, got [('a', 'b')]"),
    ({"headers": ""}, "headers must be a dict of str to str, got ''"),
    ({"headers": {"": "a"}}, "a header's name must not be empty; leave it out instead"),
    ({"headers": {"a\nb": "a"}}, "a header's name must not have control characters, got 'a\\nb'"),
    ({"headers": {"a": "\ud800"}}, "headers have a lone surrogate, which is not text; remove it"),
    ({"headers": {"a": "x" * 8_185}}, "headers must be at most 8192 bytes as JSON, got 8193"),
    # Keys
    ({"key_mode": "keep"}, "key_mode says what a key does: give key= as well, or leave key_mode out"),
    ({"key_scope": "type"}, "key_scope says what a key does: give key= as well, or leave key_scope out"),
    ({"key": "k", "key_mode": "drop"}, "key_mode must be one of keep, replace, preserve_run_at, got 'drop'"),
    ({"key": "k", "key_scope": "world"}, "key_scope must be one of type, tenant, queue, got 'world'"),
    ({"key": "k", "key_scope": []}, "key_scope must be one of type, tenant, queue, got []"),
    # Retries
    (
        {"backoff": doubled},
        (
            f"backoff can't be a function here, because it is stored with the job: use {BACKOFFS} or Linear(), or give"
            " the function to the job class as backoff="
        ),
    ),
    ({"backoff": 5}, f"backoff must be {BACKOFFS}, Linear() or a function of the attempt, got 5"),
    # Keywords
    ({"prioritty": 1}, "enqueue() got an unknown option 'prioritty'; did you mean 'priority'?"),
    ({"conection": 1}, "enqueue() got an unknown option 'conection'; did you mean 'connection'?"),
    ({"colour": None}, f"enqueue() got an unknown option 'colour'; it takes {KEYWORDS}"),
]


@pytest.mark.parametrize(("keywords", "message"), BAD, ids=[ascii(keywords)[:60] for keywords, _ in BAD])
def test_a_value_that_can_not_work_is_refused(keywords: dict[str, Any], message: str) -> None:
    assert refusal(**keywords) == message


def test_a_number_too_large_for_a_float_is_refused_like_any_other() -> None:
    assert refusal(delay=10**400).startswith("delay must be at most 100 years, got 1000000")
    assert refusal(priority=10**5_000).startswith("priority must be a whole number from -100 to 100, got ")


def test_a_value_whose_repr_fails_is_refused_all_the_same() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    assert refusal(key=Broken()) == "key must be a str, got a Broken that can't be shown"


@pytest.mark.parametrize("keyword", ["session", "connection"])
def test_one_job_of_a_bulk_can_not_have_a_transaction_of_its_own(keyword: str) -> None:
    assert refusal(**{keyword: object()}) == (
        "session and connection hold for all jobs of a call: give them to enqueue_many, not to with_delivery"
    )


def test_the_bounds_themselves_are_allowed() -> None:
    assert (build(priority=100).priority, build(priority=-100).priority) == (100, -100)
    assert build(max_attempts=10_000).max_attempts == 10_000
    assert build(key="k" * 512).key == "k" * 512
    assert build(headers={"a": "x" * 8_184}).headers is not None
