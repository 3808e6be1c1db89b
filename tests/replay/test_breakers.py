"""Breakers of a replay that count successes late, against ones that count each at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from breakwater.breakers.contract import BreakerTransition
from breakwater.breakers.rules.breaker import Breaker, BreakerKey, observe, reset
from breakwater.breakers.rules.observations import observation_of
from breakwater.breakers.rules.transitions import breaker_after, transition
from breakwater.breakers.settings import BreakerRules
from breakwater.jobs.contract.execution import ErrorInfo
from breakwater.kernel.types import time_from_ms
from breakwater.replay.rules.breakers import JITTER, ReplayedBreakers, Success
from tests.records.test_messages import attempt

KEY = BreakerKey("a", "m")
RULES = BreakerRules(consecutive_failures=3, same_error=4, errors=6, within_s=5, cooldown_s=1)
ERROR = ErrorInfo(kind="server", class_="ServerError", message="500", hash="0badc0de")
CALLERS = st.sampled_from([(None, None), ("app", None), ("app", "acme"), ("cli", "acme"), ("bot", "beta")])
CALLS = st.lists(st.tuples(st.booleans(), CALLERS, st.integers(0, 3000)), min_size=5, max_size=40)


@given(CALLS)
def test_successes_that_are_counted_late_change_no_breaker(
    calls: list[tuple[bool, tuple[str | None, str | None], int]],
) -> None:
    transitions: list[BreakerTransition] = []
    breakers = ReplayedBreakers({KEY: RULES}, (), transitions.append)
    breaker = Breaker()
    expected: list[BreakerTransition] = []
    now_ms = 1_795_000_000_000
    for number, (fails, (caller, tenant), pause_ms) in enumerate(calls, 1):
        now_ms += pause_ms
        fields = {"outcome": "error", "error": ERROR, "counts_for_breaker": True} if fails else {}
        call = attempt(
            attempt_id=f"j{number}:1", execution_id=f"j{number}", caller=caller, tenant=tenant,
            breaker_version=breaker.version, **fields,
        )  # fmt: skip
        observation = observation_of(number, now_ms, call)
        breaker, change = observe(breaker, observation, RULES, now_ms, JITTER)
        if change is not None:
            expected.append(transition(KEY, change, RULES, now_ms))
        if fails or not breakers.succeed(KEY, Success(call, number, now_ms, breaker.version), RULES):
            breakers.observe(KEY, observation, RULES, now_ms)
    assert transitions == expected
    assert breakers.get(KEY) == breaker


def test_a_breaker_goes_on_from_its_latest_transition_before_the_replay() -> None:
    now_ms = 1_795_000_000_000
    opened = time_from_ms(now_ms + 40)
    earlier = transition(KEY, reset(Breaker(version=6), by="ann", why="", rules=RULES, now_ms=now_ms)[1], RULES, now_ms)
    earlier = earlier.model_copy(update={"at": time_from_ms(now_ms - 60_000)})
    failures = [
        observation_of(number, now_ms, attempt(
            attempt_id=f"j{number}:1", execution_id=f"j{number}", outcome="error", error=ERROR, counts_for_breaker=True,
            breaker_version=7,
        ))
        for number in (1, 2, 3)
    ]  # fmt: skip
    breaker = breaker_after(earlier, 0)
    for failure in failures:
        breaker, change = observe(breaker, failure, RULES, now_ms, 0.25)
    assert change is not None
    recorded = transition(KEY, change, RULES, now_ms)
    recorded = recorded.model_copy(update={"at": opened})
    transitions: list[BreakerTransition] = []
    breakers = ReplayedBreakers({KEY: RULES}, [recorded], transitions.append, [earlier])
    for failure in failures:
        breakers.observe(KEY, failure, RULES, now_ms)
    assert [(event.version, event.at, event.cooldown_s) for event in transitions] == [(8, opened, recorded.cooldown_s)]
