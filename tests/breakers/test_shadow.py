"""Shadows of breakers: beside a breaker of the same rules they do what it does, and refuse nothing beside another."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from breakwater.breakers.contract import BreakerTransition
from breakwater.breakers.rules.admission import admit
from breakwater.breakers.rules.breaker import Breaker, BreakerKey, Observation, caller_of, observe
from breakwater.breakers.rules.shadow import STATES_KEPT, Shadow, ShadowedCall, follow
from breakwater.breakers.rules.transitions import half_opened, transition
from breakwater.breakers.settings import MAX_KEPT, BreakerRules

KEY = BreakerKey("writer", "m")
RULES = BreakerRules(consecutive_failures=2, same_error=None, cooldown_s=10)
T = 1_800_000_000_000


@dataclass(frozen=True)
class Call:
    starts_s: int
    lasts_s: int
    failed: bool | None
    error: str = "5eed0001"
    caller: str = caller_of("app", "acme")


def ended(sequence: int, call: Call, rules: BreakerRules = RULES, *, is_refused: bool = False) -> ShadowedCall:
    at_s = call.starts_s if is_refused else call.starts_s + call.lasts_s
    observation = Observation(
        sequence,
        attempt_id=f"{call.starts_s}-{sequence}:1",
        at_ms=T + at_s * 1000,
        failed=None if is_refused else call.failed,
        error=call.error,
        job=f"job-{sequence}",
        caller=call.caller,
        gave_up=is_refused,
    )
    return ShadowedCall(observation, rules, None if is_refused else T + call.starts_s * 1000)


def run(calls: Sequence[Call], rules: BreakerRules) -> tuple[list[BreakerTransition], list[ShadowedCall]]:
    """Returns the transitions of a real breaker, and its calls in the order in which its shadow is told of them."""
    breaker = Breaker()
    transitions: list[BreakerTransition] = []
    told: list[ShadowedCall] = []
    # What ends comes before what starts at the same time.
    moments: list[tuple[int, bool, int, Call, int | None]] = [
        (call.starts_s, True, number, call, None) for number, call in enumerate(calls)
    ]
    heapq.heapify(moments)
    while moments:
        at_s, starts, number, call, version = heapq.heappop(moments)
        now_ms = T + at_s * 1000
        if starts:
            attempt_id = f"{call.starts_s}-{number + 1}:1"
            breaker, answer = admit(breaker, attempt_id, now_ms, 3_600_000, call.caller)
            if answer.became_half_open:
                transitions.append(half_opened(KEY, breaker, rules, now_ms))
            if answer.admitted:
                heapq.heappush(moments, (at_s + call.lasts_s, False, number, call, answer.version))
                continue
        shadowed = ended(number + 1, call, rules, is_refused=starts)
        told.append(shadowed)
        observation = replace(shadowed.observation, version=version)
        breaker, change = observe(breaker, observation, rules, now_ms, 0.5)
        if change is not None:
            transitions.append(transition(KEY, change, rules, now_ms))
    return transitions, told


CALLS = st.builds(
    Call,
    starts_s=st.integers(0, 90),
    lasts_s=st.integers(1, 12),
    failed=st.sampled_from([True, True, True, False, None]),
    error=st.sampled_from(["5eed0001", "5eed0002"]),
)
ALL_RULES = st.builds(
    BreakerRules,
    consecutive_failures=st.sampled_from([1, 2, 3, None]),
    same_error=st.sampled_from([1, 2, None]),
    errors=st.just(3),
    failure_rate=st.sampled_from([None, 0.5]),
    minimum_calls=st.just(3),
    cooldown_s=st.sampled_from([1, 5, 10]),
    cooldown_growth=st.sampled_from([1.0, 2.0]),
    count=st.sampled_from(["jobs", "attempts"]),
)


def as_shadow(event: BreakerTransition) -> BreakerTransition:
    return event.model_copy(update={"transition_id": f"shadow/{event.transition_id}", "shadow": True, "refused": 0})


@given(st.lists(CALLS, max_size=40, unique_by=lambda call: call.starts_s), ALL_RULES)
def test_a_shadow_with_the_rules_of_its_breaker_makes_the_same_transitions(
    calls: list[Call], rules: BreakerRules
) -> None:
    transitions, told = run(calls, rules)
    shadow = follow(KEY, Shadow(), told, 0.5)
    assert list(shadow.unpublished) == [as_shadow(event) for event in transitions]
    assert shadow.refused == 0


@given(st.lists(CALLS, max_size=40, unique_by=lambda call: call.starts_s), ALL_RULES, st.data())
def test_calls_that_are_told_again_change_nothing(calls: list[Call], rules: BreakerRules, data: st.DataObject) -> None:
    # Beside a breaker that is off: it refuses nothing, so its shadow would have refused some.
    told = sorted(
        (ended(number, call, rules) for number, call in enumerate(calls, 1)), key=lambda call: call.observation.at_ms
    )
    told = [replace(call, observation=replace(call.observation, sequence=n)) for n, call in enumerate(told, 1)]
    shadow = follow(KEY, Shadow(), told, 0.5)
    transitions = shadow.unpublished
    number = data.draw(st.integers(0, len(told)))
    assert follow(KEY, shadow, told[number:], 0.5) == shadow
    assert sum(event.refused or 0 for event in transitions) == shadow.reported <= shadow.refused <= len(told)
    assert [event.version for event in transitions] == list(range(1, shadow.breaker.version + 1))
    assert len(shadow.earlier) <= STATES_KEPT


def test_what_a_stricter_shadow_would_have_refused_counts_for_nothing_else() -> None:
    calls = [
        Call(0, 1, failed=True),
        Call(1, 1, failed=True),  # it opens at 2, for 10 s
        Call(1, 3, failed=False),  # was in flight
        Call(3, 1, failed=False),  # would have been refused
        Call(11, 6, failed=False),  # would have been refused, and ends when it is closed again
        Call(13, 2, failed=False),  # the probe
        Call(14, 2, failed=True),  # would have been refused: another call was the probe
        Call(17, 1, failed=True),  # the first failure since
    ]
    told = [ended(number, call) for number, call in enumerate(sorted(calls, key=lambda c: c.starts_s + c.lasts_s), 1)]
    shadow = follow(KEY, Shadow(), told, 0.5)
    transitions = shadow.unpublished
    assert [(event.to_state, event.at.timestamp() - T / 1000, event.refused) for event in transitions] == [
        ("open", 2, 0),
        ("half_open", 13, 1),
        ("closed", 15, 0),
    ]
    assert (shadow.breaker.state, shadow.refused, len(shadow.breaker.failures)) == ("closed", 3, 1)


def test_a_shadow_keeps_no_more_than_it_needs() -> None:
    failures = [ended(number, Call(0, 1, failed=True)) for number in range(1, 3)]
    refused = [ended(number, Call(2, 1, failed=True)) for number in range(3, MAX_KEPT + 500)]
    shadow = follow(KEY, Shadow(), [*failures, *refused], 0.5)
    assert shadow.refused == len(refused)
    assert len(shadow.sequences) == MAX_KEPT
