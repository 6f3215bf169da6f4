"""Back-off policies: bounds, caps, what is stored with a job."""

import math
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queue_core import ConfigurationError, Fixed, FullJitter, Linear, PowersOfTwo
from queue_core.checks import Duration
from queue_core.retry import DEFAULT_BACKOFF, StoredBackoff, decode_backoff, delay_after, encode_backoff

_attempts = st.integers(1, 10_000)
_seconds = st.floats(0.001, 1_000_000)
_policies: st.SearchStrategy[StoredBackoff] = st.one_of(
    st.builds(FullJitter, base=_seconds, cap=_seconds),
    st.builds(PowersOfTwo, cap=_seconds),
    st.builds(Fixed, wait=_seconds),
    st.builds(Linear, step=_seconds, cap=_seconds),
)


def seconds(policy: StoredBackoff, *attempts: int) -> list[float]:
    return [delay_after(policy, attempt).total_seconds() for attempt in attempts]


def kept(field: Duration) -> float:
    """A policy's field, which holds seconds whatever it was given."""
    assert isinstance(field, float)
    return field


# The policies


def test_the_default_is_full_jitter_from_5_seconds_to_15_minutes() -> None:
    assert (DEFAULT_BACKOFF.base, DEFAULT_BACKOFF.cap) == (5, 15 * 60)


@given(_attempts, _seconds, _seconds)
def test_full_jitter_stays_below_a_bound_that_doubles_up_to_the_cap(attempt: int, base: float, cap: float) -> None:
    policy = FullJitter(base=base, cap=cap)
    bound = min(kept(policy.cap), kept(policy.base) * 2.0 ** min(attempt - 1, 64))
    assert 0 <= policy.delay(attempt) <= bound


def test_full_jitter_spreads_over_the_whole_bound() -> None:
    waits = [FullJitter(base=8, cap=1_000).delay(4) for _ in range(1_000)]
    assert {int(wait // 16) for wait in waits} == {0, 1, 2, 3}


def test_powers_of_two_start_at_4_seconds() -> None:
    assert seconds(PowersOfTwo(), 1, 2, 3, 4) == [4, 8, 16, 32]
    assert seconds(PowersOfTwo(cap=20), 3, 4, 10_000) == [16, 20, 20]
    assert seconds(PowersOfTwo(), 10_000) == [86_400]


def test_fixed_is_the_same_each_time() -> None:
    assert seconds(Fixed(7.5), 1, 2, 10_000) == [7.5, 7.5, 7.5]


def test_linear_takes_a_step_more_each_time() -> None:
    assert seconds(Linear(10), 1, 2, 3) == [10, 20, 30]
    assert seconds(Linear(10, cap=25), 2, 3, 10_000) == [20, 25, 25]


@given(_policies, _attempts)
def test_no_policy_waits_longer_than_its_cap_or_less_than_nothing(policy: StoredBackoff, attempt: int) -> None:
    longest = policy.wait if isinstance(policy, Fixed) else policy.cap
    assert timedelta(0) <= delay_after(policy, attempt) <= timedelta(seconds=kept(longest))


# What is stored


@given(_policies)
def test_a_stored_policy_comes_back_as_it_was(policy: StoredBackoff) -> None:
    assert decode_backoff(encode_backoff(policy, "backoff")) == policy


@pytest.mark.parametrize(
    ("policy", "stored"),
    [
        (FullJitter(), '{"policy":"full_jitter","base":5.0,"cap":900.0}'),
        (PowersOfTwo(), '{"policy":"powers_of_two","cap":86400.0}'),
        (Fixed(1), '{"policy":"fixed","wait":1.0}'),
        (Linear(2), '{"policy":"linear","step":2.0,"cap":86400.0}'),
    ],
)
def test_what_is_stored_stays_readable_by_later_versions(policy: StoredBackoff, stored: str) -> None:
    assert encode_backoff(policy, "backoff") == stored
    assert decode_backoff(stored) == policy


# Values that can't work


@pytest.mark.parametrize(
    ("policy", "keywords", "message"),
    [
        (FullJitter, {"base": 0}, "FullJitter.base must be more than 0 s, got 0"),
        (FullJitter, {"cap": -1}, "FullJitter.cap must be more than 0 s, got -1"),
        (FullJitter, {"base": math.nan}, "FullJitter.base must be seconds or a timedelta, got nan"),
        (PowersOfTwo, {"cap": math.inf}, "PowersOfTwo.cap must be seconds or a timedelta, got inf"),
        (Fixed, {"wait": "5"}, "Fixed.wait must be seconds or a timedelta, got '5'"),
        (Linear, {"step": 1e12}, "Linear.step must be at most 100 years, got 1000000000000.0"),
    ],
)
def test_a_policy_that_can_not_work_is_refused_when_it_is_made(
    policy: Any, keywords: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        policy(**keywords)
    assert str(refused.value) == message


def test_a_policy_takes_a_timedelta_as_well() -> None:
    assert Fixed(timedelta(minutes=1)) == Fixed(60)


# A function of one's own


@pytest.mark.parametrize("answer", [90, 90.0, timedelta(seconds=90)])
def test_a_function_may_answer_in_seconds_or_with_a_timedelta(answer: float | timedelta) -> None:
    assert delay_after(lambda _attempt: answer, 1) == timedelta(seconds=90)


def test_a_function_gets_the_attempt_that_failed() -> None:
    assert delay_after(lambda attempt: attempt * 10, 3) == timedelta(seconds=30)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (-1, "what backoff returned must be 0 s or more, got -1"),
        (None, "what backoff returned must be seconds or a timedelta, got None"),
        (math.nan, "what backoff returned must be seconds or a timedelta, got nan"),
        (1e300, "what backoff returned must be at most 100 years, got 1e+300"),
    ],
)
def test_what_a_function_answers_is_checked(answer: Any, message: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        delay_after(lambda _attempt: answer, 1)
    assert str(refused.value) == message
