from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from breakwater.policy.breaker import Breaker, BreakerRules, Change, Observation, consecutive_failures, observe

NOW = 1_000_000


def seen(sequence: int, failed: bool | None = True, at_ms: int = NOW, attempt: str | None = None) -> Observation:
    return Observation(sequence, attempt or f"a{sequence}", at_ms, failed)


def fold(breaker: Breaker, observations: list[Observation], rules: BreakerRules) -> tuple[Breaker, list[Change]]:
    changes: list[Change] = []
    for observation in observations:
        breaker, change = observe(breaker, observation, rules, NOW)
        changes += [change] if change else []
    return breaker, changes


def test_it_opens_at_so_many_consecutive_failures_and_says_so() -> None:
    breaker, [change] = fold(Breaker(), [seen(1), seen(2), seen(3)], BreakerRules())
    assert breaker.state == "open"
    assert breaker.open_until_ms == NOW + 60_000
    assert (change.rule, change.reason) == ("consecutive_failures", "3 consecutive failures (threshold: 3)")
    assert (change.before.state, change.after.state, change.after.version) == ("closed", "open", 1)


def test_a_success_in_between_starts_the_count_anew() -> None:
    breaker, changes = fold(Breaker(), [seen(1), seen(2), seen(3, failed=False), seen(4), seen(5)], BreakerRules())
    assert not changes
    assert consecutive_failures(breaker) == 2


def test_it_opens_at_so_many_errors_within_the_window_also_with_successes_between() -> None:
    rules = BreakerRules(errors=3, within_s=10, consecutive_failures=None)
    observations = [seen(1), seen(2, failed=False), seen(3), seen(4, failed=False), seen(5)]
    _, [change] = fold(Breaker(), observations, rules)
    assert change.reason == "3 errors within 10 s (threshold: 3)"


def test_errors_that_have_left_the_window_do_not_count() -> None:
    rules = BreakerRules(errors=3, within_s=10, consecutive_failures=None)
    old = NOW - 10_000
    _, changes = fold(Breaker(), [seen(1, at_ms=old), seen(2, at_ms=old), seen(3)], rules)
    assert not changes
    _, changes = fold(Breaker(), [seen(1, at_ms=old + 1), seen(2, at_ms=old + 1), seen(3)], rules)
    assert changes


@given(
    st.lists(st.tuples(st.integers(1, 30), st.booleans()), unique_by=lambda pair: pair[0], max_size=12), st.randoms()
)
def test_order_and_repetition_of_events_change_nothing_while_closed(
    pairs: list[tuple[int, bool]], shuffler: random.Random
) -> None:
    rules = BreakerRules(consecutive_failures=1000)
    observations = [seen(sequence, failed) for sequence, failed in pairs]
    mixed = observations * 2
    shuffler.shuffle(mixed)
    one, _ = fold(Breaker(), sorted(observations, key=lambda item: item.sequence), rules)
    other, _ = fold(Breaker(), mixed, rules)
    assert one == other


def test_what_arrives_while_it_is_open_changes_nothing() -> None:
    opened, _ = fold(Breaker(), [seen(1), seen(2), seen(3)], BreakerRules())
    assert fold(opened, [seen(4), seen(5, failed=False), seen(6)], BreakerRules()) == (opened, [])


HALF_OPEN = Breaker(state="half_open", probe="probe", probe_until_ms=NOW + 5_000, version=2)


def test_only_the_probe_decides_while_it_is_half_open() -> None:
    assert fold(HALF_OPEN, [seen(9), seen(10, failed=False)], BreakerRules()) == (HALF_OPEN, [])


def test_a_probe_that_succeeds_closes_it_with_a_clean_history() -> None:
    breaker, [change] = fold(HALF_OPEN, [seen(9, failed=False, attempt="probe")], BreakerRules())
    assert (breaker.state, breaker.failures, breaker.version) == ("closed", (), 3)
    assert (change.before.state, change.after.state) == ("half_open", "closed")


def test_a_probe_that_fails_opens_it_for_another_cooldown() -> None:
    breaker, [change] = fold(HALF_OPEN, [seen(9, attempt="probe")], BreakerRules())
    assert (breaker.state, breaker.open_until_ms, breaker.probe) == ("open", NOW + 60_000, None)
    assert change.rule == "probe_failed"


def test_a_probe_that_says_nothing_gives_its_lease_back() -> None:
    breaker, changes = fold(HALF_OPEN, [seen(9, failed=None, attempt="probe")], BreakerRules())
    assert not changes
    assert breaker == replace(HALF_OPEN, probe=None, probe_until_ms=0)


@given(st.lists(st.booleans(), max_size=200), st.integers(1, 20))
def test_its_history_stays_bounded(outcomes: list[bool], threshold: int) -> None:
    rules = BreakerRules(errors=None, consecutive_failures=threshold)
    breaker, _ = fold(Breaker(), [seen(number, failed) for number, failed in enumerate(outcomes, 1)], rules)
    assert len(breaker.failures) <= threshold


def test_rules_without_a_rule_are_refused() -> None:
    with pytest.raises(ValidationError, match="set errors or consecutive_failures"):
        BreakerRules(errors=None, consecutive_failures=None)


def test_what_the_log_told_before_it_closed_is_over_also_when_it_is_told_again() -> None:
    rules = BreakerRules(errors=3, within_s=60, consecutive_failures=None)
    closed, _ = fold(HALF_OPEN, [seen(9, failed=False, attempt="probe")], rules)
    again, changes = fold(closed, [seen(1), seen(2), seen(3), seen(8)], rules)
    assert (again, changes) == (closed, [])
    _, changes = fold(closed, [seen(10), seen(11), seen(12)], rules)
    assert len(changes) == 1
