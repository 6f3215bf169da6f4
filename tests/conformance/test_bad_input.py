"""What can't work is refused before anything is written, with an error that says what to do."""

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from queue_core import ConfigurationError, PayloadError, Queue, QueueError
from tests.support.databases import Database
from tests.support.jobs import Note, Other


class Free(Note):
    """A job whose field takes anything."""

    value: Any = None


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


PAYLOADS: dict[str, tuple[Callable[[], Any], str]] = {
    "object": (object, "can't be written as JSON (it has a builtins.object): use str, numbers, bool, None"),
    "nan": (lambda: float("nan"), "has nan at value, and JSON has no such number: use None or a string"),
    "infinity": (lambda: {"a": [1.5, float("-inf")]}, "has -inf at value.a[1], and JSON has no such number"),
    "surrogate": (lambda: "a\ud800", "has a lone surrogate, which is not text: decode the bytes it came from"),
    "10 MB": (lambda: "x" * 10_000_000, "and at most 262,144 are allowed: store the data elsewhere"),
    "5,000 levels": (lambda: nested(5_000), "refers to itself or is nested deeper than 64 levels: flatten it"),
    "65 levels": (lambda: nested(65), "refers to itself or is nested deeper than 64 levels: flatten it"),
    "cycle": (endless, "refers to itself or is nested deeper than 64 levels: flatten it"),
}


@pytest.mark.parametrize("case", PAYLOADS)
async def test_a_payload_that_is_not_json_is_refused(queue: Queue, database: Database, case: str) -> None:
    make, message = PAYLOADS[case]
    for call in (queue.enqueue(Free(value=make())), queue.enqueue_many([Note(), Free(value=make())])):
        with pytest.raises(PayloadError, match=re.escape(message)):
            await call
    assert database.count() == 0


DELIVERIES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown option": ({"dealy": 5}, "enqueue() got an unknown option 'dealy'; did you mean 'delay'?"),
    "naive datetime": (
        {"run_at": datetime(2030, 1, 1)},  # noqa: DTZ001 the mistake under test
        "run_at must have a time zone, got the naive 2030-01-01T00:00:00; write datetime.now(UTC), or add tzinfo=UTC",
    ),
    "negative delay": ({"delay": -1}, "delay must be 0 s or more, got -1"),
    "priority": ({"priority": 1000}, "priority must be a whole number from -100 to 100, got 1000"),
    "empty queue": ({"queue": ""}, "queue must be 1 to 128 characters of A-Z a-z 0-9 _ . : -, got ''"),
    "hostile queue": ({"queue": "'; DROP TABLE queue_jobs; --"}, "queue must be 1 to 128 characters"),
    "10 kB key": ({"key": "k" * 10_000}, "key must be at most 512 bytes, got 10000; use a hash of it instead"),
    "key with NUL": ({"key": "a\x00b"}, "key must not have control characters, got 'a\\x00b'"),
    "surrogate key": ({"key": "\ud800"}, "key has a lone surrogate at position 0, which is not text; remove it"),
    "far future": ({"run_at": datetime(9999, 12, 31, tzinfo=UTC)}, "run_at must be between the years 1970 and 9000"),
    "two times": ({"delay": 1, "run_at": datetime(2030, 1, 1, tzinfo=UTC)}, "give delay or run_at, not both"),
    "key mode": ({"key": "k", "key_mode": "overwrite"}, "key_mode must be one of keep, replace, preserve_run_at"),
    "no attempts": ({"max_attempts": 0}, "max_attempts must be a whole number from 1 to 10000, got 0"),
    "no time": ({"timeout": 0}, "timeout must be more than 0 s, got 0"),
    "headers": ({"headers": {"a": 1}}, "headers must be a dict of str to str, got 'a': 1"),
    "session": ({"session": object()}, "session must be a SQLAlchemy AsyncSession"),
}


@pytest.mark.parametrize("case", DELIVERIES)
async def test_a_delivery_that_can_not_work_is_refused(queue: Queue, database: Database, case: str) -> None:
    delivery, message = DELIVERIES[case]
    for call in (queue.enqueue(Note(), **delivery), queue.enqueue_many([Note()], **delivery)):
        with pytest.raises(ConfigurationError, match=re.escape(message)):
            await call
    assert database.count() == 0


async def test_what_is_no_job_is_refused(queue: Queue, database: Database) -> None:
    for wrong in (Note, "Note", None, {"text": "x"}):
        unchecked: Any = wrong
        with pytest.raises(QueueError, match=r"only instances of job classes can be enqueued, got .*: write SendEmail"):
            await queue.enqueue(unchecked)
    assert database.count() == 0


async def test_a_class_whose_name_means_another_class_here_is_refused(queue: Queue, database: Database) -> None:
    class Impostor(Other, name="Note"):
        pass

    with pytest.raises(ConfigurationError, match="the job name 'Note' means"):
        await queue.enqueue(Impostor())
    assert database.count() == 0


async def test_a_class_that_is_not_registered_is_enqueued_with_one_warning(
    queue: Queue, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    await queue.enqueue(Free())
    await queue.enqueue(Free())
    assert [record.getMessage() for record in caplog.records if "not registered" in record.getMessage()] == [
        "Free is enqueued but not registered on this queue: it waits until a worker has it in jobs=[…]"
    ]
    assert database.count() == 2


def test_a_queue_setting_that_does_not_exist_is_refused() -> None:
    settings: Any = {"max_paylaod": 5}
    with pytest.raises(
        ConfigurationError, match=r"Queue got an unknown option 'max_paylaod'; did you mean 'max_payload'\?"
    ):
        Queue(None, **settings)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
