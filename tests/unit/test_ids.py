"""Ids that a client makes itself."""

import uuid
from types import SimpleNamespace

import pytest

from queue_core import ids
from queue_core.ids import new_request_id, time_ordered_uuid


def test_an_id_is_a_uuid_of_version_7() -> None:
    for _ in range(1_000):
        text = time_ordered_uuid()
        parsed = uuid.UUID(text)
        assert (parsed.version, parsed.variant, str(parsed)) == (7, uuid.RFC_4122, text)


def test_ids_sort_by_the_time_they_were_made(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = [0, 1_000_000, 999_000_000, 1_893_456_000_000_000_000, 1_893_456_000_001_000_000]
    monkeypatch.setattr(ids, "time", SimpleNamespace(time_ns=iter(moments).__next__))
    made = [time_ordered_uuid() for _ in moments]
    assert made == sorted(made)
    assert [uuid.UUID(text).int >> 80 for text in made] == [moment // 1_000_000 for moment in moments]


def test_ids_of_the_same_instant_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ids, "time", SimpleNamespace(time_ns=lambda: 1_893_456_000_000_000_000))
    assert len({new_request_id() for _ in range(10_000)}) == 10_000
