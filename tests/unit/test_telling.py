"""Hints to other processes: the first at once, the rest together after a while, and the last never left out."""

import asyncio
import gc
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any

import pytest

from queue_core.errors import BackendUnavailable

telling: Any = import_module("queue_core.backends.telling")

HOUR = 3600.0


class Time:
    """The time of the running loop, which a test can move: what is to come in an hour comes at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        real = loop.time
        self._moved = 0.0
        monkeypatch.setattr(loop, "time", lambda: real() + self._moved)

    def advance(self, seconds: float) -> None:
        self._moved += seconds


class Told:
    """What others were told, call by call. A call fails with the next of the given errors; None is one that works."""

    def __init__(self, *fail: Exception | None) -> None:
        self._fail = list(fail)
        self.calls: list[set[str]] = []
        self._called = asyncio.Event()
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def tell(self, queues: frozenset[str]) -> None:
        self.calls.append(set(queues))
        self._called.set()
        await self.may_end.wait()
        if self._fail and (error := self._fail.pop(0)):
            raise error

    async def times(self, count: int) -> Sequence[set[str]]:
        """All calls, once there are that many and whoever made them has gone on as far as it can."""
        async with asyncio.timeout(10):
            while len(self.calls) < count:
                self._called.clear()
                await self._called.wait()
        await settle()
        return self.calls


@pytest.fixture
async def time(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Time]:
    """A rest that no test lives to see the end of, unless it moves the time."""
    monkeypatch.setattr(telling, "REST", HOUR)
    yield Time(monkeypatch)
    monkeypatch.undo()


@asynccontextmanager
async def opened(told: Told) -> AsyncGenerator[Any]:
    teller = telling.Telling(told.tell)
    try:
        yield teller
    finally:
        await teller.close()


async def settle() -> None:
    """Let everything run that can run without the time going on."""
    for _ in range(20):
        await asyncio.sleep(0)


def running() -> Collection[str]:
    return [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("queue-core")]


# The first, and what follows it


async def test_the_first_hint_goes_out_at_once(time: Time) -> None:
    del time
    told = Told()
    async with opened(told) as teller:
        teller.announce(["a"])
        assert await told.times(1) == [{"a"}]


async def test_queues_that_are_announced_together_are_told_together(time: Time) -> None:
    del time
    told = Told()
    async with opened(told) as teller:
        teller.announce(["a", "b"])
        teller.announce(["c", "a"])
        assert await told.times(1) == [{"a", "b", "c"}]
        await settle()
    assert told.calls == [{"a", "b", "c"}]


async def test_what_comes_during_the_rest_goes_out_together_after_it(time: Time) -> None:
    told = Told()
    async with opened(told) as teller:
        teller.announce(["a", "b", "c"])
        await told.times(1)
        for queue in ("a", "b", "a", "b", "a"):
            teller.announce([queue])
            await settle()
        time.advance(HOUR / 2)
        teller.announce(["b"])
        await settle()
        assert told.calls == [{"a", "b", "c"}]
        time.advance(HOUR / 2)
        assert await told.times(2) == [{"a", "b", "c"}, {"a", "b"}]


async def test_the_hint_after_a_rest_is_followed_by_a_rest_too(time: Time) -> None:
    told = Told()
    async with opened(told) as teller:
        teller.announce(["a"])
        for calls in (1, 2, 3):
            assert await told.times(calls) == [{"a"}] * calls
            teller.announce(["a"])
            await settle()
            assert len(told.calls) == calls
            time.advance(HOUR)


async def test_a_queue_that_has_rested_is_told_at_once_again(time: Time) -> None:
    told = Told()
    async with opened(told) as teller:
        for calls in (1, 2, 3):
            teller.announce(["a"])
            assert await told.times(calls) == [{"a"}] * calls
            time.advance(HOUR)


async def test_nothing_runs_when_there_is_nothing_left_to_say(time: Time) -> None:
    told = Told()
    async with opened(told) as teller:
        teller.announce(["a"])
        await told.times(1)
        await settle()
        assert running() == []
        teller.announce(["a"])
        assert running() == ["queue-core tell"]
        time.advance(HOUR)
        await told.times(2)
        await settle()
        assert running() == []


async def test_a_queue_is_told_at_once_although_another_one_rests(time: Time) -> None:
    del time
    told = Told()
    async with opened(told) as teller:
        teller.announce(["a"])
        await told.times(1)
        teller.announce(["b"])
        assert await told.times(2) == [{"a"}, {"b"}]


async def test_a_queue_is_told_at_once_although_another_one_has_more_to_say_after_its_rest(time: Time) -> None:
    told = Told()
    async with opened(told) as teller:
        teller.announce(["a"])
        await told.times(1)
        teller.announce(["a"])
        await settle()
        teller.announce(["b"])
        await settle()
        assert told.calls == [{"a"}, {"b"}]
        time.advance(HOUR)
        assert await told.times(3) == [{"a"}, {"b"}, {"a"}]


async def test_each_queue_rests_from_when_it_was_told_itself(time: Time) -> None:
    told = Told()
    async with opened(told) as teller:
        teller.announce(["a"])
        await told.times(1)
        time.advance(HOUR / 2)
        teller.announce(["b"])
        await told.times(2)
        teller.announce(["a", "b"])
        await settle()
        time.advance(HOUR / 2)
        assert await told.times(3) == [{"a"}, {"b"}, {"a"}]
        await settle()
        assert len(told.calls) == 3
        time.advance(HOUR / 2)
        assert await told.times(4) == [{"a"}, {"b"}, {"a"}, {"b"}]


async def test_what_comes_while_others_are_being_told_is_told_after_that(time: Time) -> None:
    told = Told()
    async with opened(told) as teller:
        told.may_end.clear()
        teller.announce(["a"])
        await told.times(1)
        teller.announce(["a", "b"])
        await settle()
        assert told.calls == [{"a"}]
        told.may_end.set()
        assert await told.times(2) == [{"a"}, {"b"}]
        time.advance(HOUR)
        assert await told.times(3) == [{"a"}, {"b"}, {"a"}]


async def test_what_comes_in_the_very_moment_in_which_the_last_one_is_done_is_told_too(time: Time) -> None:
    """Between the task's last look and the loop's hearing of its end."""
    del time
    loop = asyncio.get_running_loop()
    told = Told()

    async def tell(queues: frozenset[str]) -> None:
        await told.tell(queues)
        if "a" in queues:
            loop.call_soon(teller.announce, ["b"])

    teller = telling.Telling(tell)
    teller.announce(["a"])
    await settle()
    calls = list(told.calls)
    await teller.close()
    assert calls == [{"a"}, {"b"}]


# The end


async def test_what_waits_at_the_close_is_told_at_once(time: Time) -> None:
    del time
    told = Told()
    async with opened(told) as teller:
        teller.announce(["a", "b"])
        await told.times(1)
        teller.announce(["a"])
        teller.announce(["b"])
        await settle()
        assert told.calls == [{"a", "b"}]
    assert told.calls == [{"a", "b"}, {"a", "b"}]
    assert running() == []


async def test_a_close_that_comes_before_the_first_hint_is_out_waits_for_it(time: Time) -> None:
    del time
    told = Told()
    async with opened(told) as teller:
        teller.announce(["a"])
        assert told.calls == []
    assert told.calls == [{"a"}]


async def test_a_close_waits_for_the_hint_that_is_on_its_way_and_for_what_came_after_it(time: Time) -> None:
    del time
    told = Told()
    teller = telling.Telling(told.tell)
    told.may_end.clear()
    teller.announce(["a"])
    await told.times(1)
    teller.announce(["a", "b"])
    closing = asyncio.create_task(teller.close())
    await settle()
    assert not closing.done()
    told.may_end.set()
    await asyncio.wait_for(closing, 10)
    assert set().union(*told.calls[1:]) == {"a", "b"}
    assert running() == []


async def test_closing_twice_says_everything_once(time: Time) -> None:
    del time
    told = Told()
    teller = telling.Telling(told.tell)
    teller.announce(["a"])
    await told.times(1)
    teller.announce(["a"])
    await asyncio.gather(teller.close(), teller.close())
    await teller.close()
    assert told.calls == [{"a"}, {"a"}]


async def test_closing_without_ever_having_had_anything_to_say_says_nothing(time: Time) -> None:
    del time
    told = Told()
    teller = telling.Telling(told.tell)
    await teller.close()
    await teller.close()
    assert told.calls == []


async def test_after_the_close_nothing_is_told(time: Time) -> None:
    told = Told()
    teller = telling.Telling(told.tell)
    await teller.close()
    teller.announce(["a"])
    time.advance(HOUR)
    await settle()
    await teller.close()
    assert told.calls == []
    assert running() == []


# Trouble


@pytest.mark.parametrize(
    "error",
    [BackendUnavailable("away"), ConnectionRefusedError("refused"), TimeoutError()],
    ids=["ours", "the network's", "a timeout"],
)
async def test_a_hint_that_the_database_did_not_take_is_let_go_and_the_next_one_is_told(
    time: Time, error: Exception
) -> None:
    told = Told(error, None)
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    async with opened(told) as teller:
        teller.announce(["a"])
        await told.times(1)
        await settle()
        teller.announce(["b"])
        assert await told.times(2) == [{"a"}, {"b"}]
        teller.announce(["a"])
        time.advance(HOUR)
        assert await told.times(3) == [{"a"}, {"b"}, {"a"}]
    gc.collect()
    assert complaints == []


async def test_a_failure_holds_up_nothing_that_waits_behind_it(time: Time) -> None:
    del time
    told = Told(BackendUnavailable("away"), None)
    async with opened(told) as teller:
        told.may_end.clear()
        teller.announce(["a"])
        await told.times(1)
        teller.announce(["b"])
        told.may_end.set()
        assert await told.times(2) == [{"a"}, {"b"}]


async def test_a_mistake_in_code_is_heard_of_and_does_not_end_the_telling(time: Time) -> None:
    """The loop hears of it: to whoever enqueued, it is none of their business."""
    del time
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    told = Told(ZeroDivisionError("a bug"), None)
    async with opened(told) as teller:
        teller.announce(["a"])
        await told.times(1)
        await settle()
        teller.announce(["b"])
        assert await told.times(2) == [{"a"}, {"b"}]
    gc.collect()
    (complaint,) = complaints
    assert isinstance(complaint["exception"], ZeroDivisionError)
