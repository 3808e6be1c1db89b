from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from breakwater.breakers.contract import BreakerTransition
from breakwater.breakers.rules.breaker import Breaker, BreakerChange, BreakerKey, Observation, isolate, observe, reset
from breakwater.breakers.rules.health import open_for
from breakwater.breakers.rules.transitions import breaker_after, half_opened, transition
from breakwater.breakers.settings import BreakerRules
from breakwater.kernel.types import ms_from_time, time_from_ms
from tests.tables import each_row

NOW = 1_795_000_000_000
A, B = "a3f1b2c4", "0badc0de"
KEY = BreakerKey("writer", "gpt-4.1:mini")
RULES = BreakerRules(cooldown_s=30)


def reported(
    breaker: Breaker, *errors: str | None, attempt: str = "a", first: int = 1
) -> tuple[Breaker, BreakerChange | None]:
    """The breaker after calls with these errors, one second apart; None succeeds. And its last change."""
    change: BreakerChange | None = None
    for number, error in enumerate(errors, first):
        seen = Observation(number, attempt, NOW + number * 1000, error is not None, error or "", breaker.version)
        breaker, change = observe(breaker, seen, RULES, NOW + number * 1000)
    return breaker, change


CLOSED, _ = reported(Breaker(), A, B, None, A, B)
OPEN, OPENING = reported(CLOSED, A, first=6)
HALF_OPEN = replace(OPEN, state="half_open", probe="probe", probe_until_ms=NOW + 190_000, version=2)
PROBED = NOW + 40_000
_, CLOSING = reported(HALF_OPEN, None, attempt="probe", first=40)
_, REOPENING = reported(HALF_OPEN, A, attempt="probe", first=40)


def event_of(change: BreakerChange | None, now_ms: int) -> BreakerTransition:
    assert change is not None
    return transition(KEY, change, RULES, now_ms)


def by_hand(breaker: Breaker) -> tuple[BreakerTransition, BreakerTransition]:
    """Forced open, and reset."""
    _, forced = isolate(breaker, by="ops", why="", rules=RULES, now_ms=PROBED)
    _, back = reset(breaker, by="ops", why="", rules=RULES, now_ms=PROBED)
    return event_of(forced, PROBED), event_of(back, PROBED)


FORCED_OPEN, RESET = by_hand(OPEN)
OPENED = event_of(OPENING, NOW + 6_000)
HALF_OPENED = half_opened(KEY, HALF_OPEN, RULES, PROBED)
CLOSED_AGAIN = event_of(CLOSING, PROBED)
OPENED_AGAIN = event_of(REOPENING, PROBED)


@each_row(
    ("event", "steps", "stats"),
    [
        # In a row, in all, different ones, and within the window.
        (OPENED, ("closed", "open", 1), (3, 5, 2, 5)),
        (HALF_OPENED, ("open", "half_open", 2), (3, 5, 2, 5)),
        (CLOSED_AGAIN, ("half_open", "closed", 3), (3, 5, 2, 5)),
        (OPENED_AGAIN, ("half_open", "open", 3), (4, 6, 2, 6)),
        (FORCED_OPEN, ("open", "isolated", 2), (3, 5, 2, 5)),
        (RESET, ("open", "closed", 2), (3, 5, 2, 5)),
        (by_hand(CLOSED)[0], ("closed", "isolated", 1), (2, 4, 2, 4)),
        (by_hand(HALF_OPEN)[1], ("half_open", "closed", 3), (3, 5, 2, 5)),
    ],
)
def test_every_transition_reports_what_was_counted(
    event: BreakerTransition, steps: tuple[object, ...], stats: Sequence[int]
) -> None:
    assert (event.from_state, event.to_state, event.version) == steps
    assert (event.consecutive_failures, event.total_failures, event.unique_errors, event.errors) == stats
    assert event.last_failure_at is not None
    assert event.last_success_at is not None
    assert (event.agent, event.model, event.scope, event.within_s) == ("writer", "gpt-4.1:mini", "agent_model", 60)


def test_an_opening_says_why_and_until_when() -> None:
    assert (OPENED.rule, OPENED.reason) == ("consecutive_failures", "3 jobs in a row failed (threshold: 3)")
    assert (OPENED.at, OPENED.open_until) == (time_from_ms(NOW + 6_000), time_from_ms(NOW + 36_000))
    assert (OPENED.last_failure_at, OPENED.last_success_at) == (time_from_ms(NOW + 6_000), time_from_ms(NOW + 3_000))
    assert (OPENED_AGAIN.rule, OPENED_AGAIN.open_until) == ("probe_failed", time_from_ms(PROBED + 30_000))
    assert OPENED.transition_id == f"writer/gpt-4%2E1%3Amini#1@{NOW + 6_000}"
    assert [event.open_until for event in (HALF_OPENED, CLOSED_AGAIN, FORCED_OPEN, RESET)] == [None] * 4


def test_only_what_people_did_names_them() -> None:
    assert (FORCED_OPEN.by, FORCED_OPEN.reason) == ("ops", "isolated by ops")
    assert (RESET.by, RESET.reason) == ("ops", "reset by ops")
    assert [event.by for event in (OPENED, HALF_OPENED, CLOSED_AGAIN, OPENED_AGAIN)] == [None] * 4


def test_the_health_is_that_from_then_on() -> None:
    events = (OPENED, HALF_OPENED, OPENED_AGAIN, FORCED_OPEN, CLOSED_AGAIN, RESET)
    assert [event.health for event in events] == ["unhealthy"] * 4 + ["healthy"] * 2


def test_the_same_error_is_reported_by_its_hash() -> None:
    rules = BreakerRules(preset="tdd-red-green")
    breaker, change = Breaker(), None
    for number, error in enumerate((A, B, A, A), 1):
        breaker, change = observe(breaker, Observation(number, "a", NOW, True, error), rules, NOW)
    assert change is not None
    event = transition(KEY, change, rules, NOW)
    assert (event.rule, event.error_hash) == ("same_error", A)
    assert event.reason == "Same error in 3 jobs within 60 s (threshold: 3)"


def test_a_half_open_one_reported_twice_has_one_id_and_each_cooldown_another() -> None:
    again = half_opened(KEY, replace(HALF_OPEN, probe="other"), RULES, PROBED + 700)
    assert again.transition_id == HALF_OPENED.transition_id
    other = half_opened(KEY, replace(HALF_OPEN, open_until_ms=NOW + 99_000), RULES, PROBED)
    assert other.transition_id != HALF_OPENED.transition_id


@each_row(
    ("event", "expected"),
    [
        (OPENED, {"state": "open", "open_until_ms": NOW + 36_000, "openings": 1}),
        # Whose probe it was is not known: the next call may probe.
        (HALF_OPENED, {"state": "open", "open_until_ms": 0, "openings": 1, "probe": None}),
        (CLOSED_AGAIN, {"state": "closed", "openings": 0, "total_failures": 5, "last_success_ms": PROBED}),
        (OPENED_AGAIN, {"state": "open", "open_until_ms": PROBED + 30_000, "total_failures": 6}),
        (FORCED_OPEN, {"state": "isolated", "open_until_ms": 0, "total_failures": 5}),
        # Its event reports what was counted before it, and that is forgotten.
        (RESET, {"state": "closed", "total_failures": 0, "last_failure_ms": NOW + 6_000}),
    ],
)
def test_a_lost_breaker_is_recalled_from_its_latest_transition(
    event: BreakerTransition, expected: dict[str, Any]
) -> None:
    breaker = breaker_after(BreakerTransition.model_validate_json(event.json_bytes()), sequence=77)
    assert {name: getattr(breaker, name) for name in expected} == expected
    assert (breaker.version, breaker.reason, breaker.closed_at) == (event.version, event.reason, 77)
    assert time_from_ms(breaker.changed_ms) == event.at


def test_what_was_reported_before_the_transition_counts_for_no_recalled_one() -> None:
    breaker = breaker_after(CLOSED_AGAIN, sequence=77)
    for sequence in (1, 6, 77):
        assert observe(breaker, Observation(sequence, "a", NOW, True, A), RULES, NOW) == (breaker, None)
    counted, _ = observe(breaker, Observation(78, "a", NOW, True, A), RULES, NOW)
    assert counted.total_failures == 6


def test_a_recalled_breaker_that_was_open_for_its_only_caller_is_open_for_one_once_another_calls() -> None:
    alone = OPENED_AGAIN.model_copy(update={"alone": "k1a2b3c4d", "open_for": None})
    breaker = replace(breaker_after(alone, sequence=77), callers=(("k5eed0002", ms_from_time(alone.at)),))
    assert open_for(breaker) == "one caller"
