from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from breakwater.limits.rules.guard import Task, Trip, after_job, before_call, confidence_of
from breakwater.limits.settings import GuardRules
from tests.tables import each_row

USD = 1_000_000_000
A, B = "a3f1b2c4", "0badc0de"
OFF = dict.fromkeys(
    ("max_iterations", "max_tokens", "max_cost_usd", "consecutive_failures", "same_error", "confidence"), "off"
)


def rules(**settings: Any) -> GuardRules:
    """Only what is set; all else is off."""
    return GuardRules.model_validate(OFF | settings)


def after(task: Task, error: str | None) -> Task:
    """The task after one more job, as seed 002 counts it."""
    if error is None:
        return replace(task, iterations=task.iterations + 1, consecutive_failures=0)
    return replace(
        task,
        iterations=task.iterations + 1,
        consecutive_failures=task.consecutive_failures + 1,
        total_failures=task.total_failures + 1,
        errors={**task.errors, error: task.errors.get(error, 0) + 1},
    )


def first_trip(jobs: list[str | None], limits: GuardRules) -> tuple[int, Trip] | None:
    """Which job trips the task, from 1, and why."""
    task = Task()
    for number, error in enumerate(jobs, start=1):
        task = after(task, error)
        if trip := after_job(task, limits):
            return number, trip
    return None


# Caps


@each_row(
    ("task", "number", "tokens", "cost", "trip"),
    [
        (Task(), 1, 0, 0, None),
        (Task(iterations=10), 10, 0, 0, None),
        (Task(iterations=11), 11, 0, 0, Trip("max_iterations", "10 iterations (limit: 10)")),
        (Task(tokens=199_999), 1, 0, 0, None),
        (Task(tokens=199_999), 1, 1, 0, Trip("max_tokens", "200,000 tokens used (limit: 200,000)")),
        (Task(tokens=210_000), 1, 0, 0, Trip("max_tokens", "210,000 tokens used (limit: 200,000)")),
        (Task(), 1, 210_000, 0, Trip("max_tokens", "210,000 tokens used (limit: 200,000)")),
        (Task(cost=10 * USD - 1), 1, 0, 0, None),
        (Task(cost=10 * USD - 1), 1, 0, 1, Trip("max_cost", "$10.00 spent (limit: $10.00)")),
        (Task(cost=9 * USD), 1, 0, 1_020_000_000, Trip("max_cost", "$10.02 spent (limit: $10.00)")),
        (Task(consecutive_failures=9, total_failures=9, errors={A: 9}, confidences=(0.9, 0.5, 0.1)), 1, 0, 0, None),
    ],
)
def test_the_caps_nobody_set_let_ten_jobs_two_hundred_thousand_tokens_and_ten_dollars_pass(
    task: Task, number: int, tokens: int, cost: int, trip: Trip | None
) -> None:
    assert before_call(task, number, GuardRules(), tokens=tokens, cost=cost) == trip


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"max_iterations": 1}, "1 iteration (limit: 1)"),
        ({"max_tokens": 1}, "1 token used (limit: 1)"),
        ({"max_cost_usd": "0.0015"}, "$0.0015 spent (limit: $0.0015)"),
    ],
)
def test_a_cap_is_reported_as_people_write_it(settings: dict[str, Any], reason: str) -> None:
    trip = before_call(Task(tokens=1, cost=1_500_000), 2, rules(**settings), tokens=0, cost=0)
    assert isinstance(trip, Trip)
    assert trip.reason == reason


CENT = USD // 100


@each_row(
    ("concluded", "own", "worst_case", "expected"),
    [
        (0, 0, 10 * USD, None),
        (0, 0, 10 * USD + 1, "$0.00 spent, and the next call may cost up to $10.000000001 (limit: $10.00)"),
        (9 * USD, 80 * CENT, 20 * CENT, None),
        (9 * USD, 80 * CENT, 40 * CENT, "$9.80 spent, and the next call may cost up to $0.40 (limit: $10.00)"),
        # A model without a price: nothing can be said of its next call.
        (9 * USD, 80 * CENT, None, None),
        (9 * USD, USD, None, "$10.00 spent (limit: $10.00)"),
        (10 * USD, 0, 0, "$10.00 spent (limit: $10.00)"),
    ],
)
def test_the_cost_cap_counts_what_the_next_call_may_cost(
    concluded: int, own: int, worst_case: int | None, expected: str | None
) -> None:
    judged = before_call(Task(cost=concluded), 1, GuardRules(), tokens=0, cost=own, worst_case=worst_case)
    assert judged == (None if expected is None else Trip("max_cost", expected))


def test_caps_that_are_off_never_trip() -> None:
    most = 10**18
    judged = before_call(Task(10**9, 10**12, most), 10**9, rules(), tokens=10**12, cost=most, worst_case=most)
    assert judged is None


def test_a_job_that_passed_the_caps_last_is_not_held_against_the_task() -> None:
    assert after_job(Task(iterations=10, tokens=300_000, cost=11 * USD), GuardRules()) is None


# Failures


@each_row(
    ("jobs", "tripped_by", "trip"),
    [
        ([None, A, A, A], 4, Trip("consecutive_failures", "3 consecutive failures (threshold: 3)")),
        ([A, B, A], 3, Trip("consecutive_failures", "3 consecutive failures (threshold: 3)")),
        ([A, A, None, A, A, None, A], 7, Trip("same_error", "Same error repeated 5 times (threshold: 5)")),
        (
            [A, None, B, A, None, A, B, None, A, None, A],
            11,
            Trip("same_error", "Same error repeated 5 times (threshold: 5)"),
        ),
    ],
)
def test_three_failures_in_a_row_or_five_of_the_same_trip_where_nothing_is_set(
    jobs: list[str | None], tripped_by: int, trip: Trip
) -> None:
    assert first_trip(jobs, GuardRules()) == (tripped_by, trip)


def test_a_success_clears_the_failures_in_a_row_and_not_the_errors() -> None:
    jobs: list[str | None] = [A, A, None, A, A]
    assert first_trip(jobs, GuardRules()) is None
    assert first_trip([*jobs, A], rules(same_error=5)) == (
        6,
        Trip("same_error", "Same error repeated 5 times (threshold: 5)"),
    )


@each_row(
    ("jobs", "settings", "tripped_by"),
    [
        ([A], {"consecutive_failures": 1}, 1),
        ([A], {"consecutive_failures": 2}, None),
        ([A] * 50, {}, None),
        ([A, A], {"consecutive_failures": 8, "same_error": 2}, 2),
        ([A, B] * 4, {"consecutive_failures": 8, "same_error": 5}, 8),
    ],
)
def test_thresholds_are_as_set(jobs: list[str | None], settings: dict[str, Any], tripped_by: int | None) -> None:
    trip = first_trip(jobs, rules(**settings))
    assert (trip and trip[0]) == tripped_by


@given(st.lists(st.sampled_from([None, A, B]), max_size=30), st.integers(1, 6), st.integers(1, 6))
def test_a_task_trips_at_the_first_job_that_fills_a_threshold(jobs: list[str | None], in_a_row: int, same: int) -> None:
    def filled(upto: int) -> bool:
        seen = jobs[:upto]
        tail = seen[-in_a_row:]
        return (len(tail) == in_a_row and None not in tail) or any(seen.count(error) >= same for error in (A, B))

    expected = next((upto for upto in range(1, len(jobs) + 1) if filled(upto)), None)
    trip = first_trip(jobs, rules(consecutive_failures=in_a_row, same_error=same))
    assert (trip and trip[0]) == expected


COUNTS = st.integers(0, 50)


@given(COUNTS, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS)
def test_more_use_never_lifts_a_cap(tokens: int, cost: int, number: int, more: int, dearer: int, later: int) -> None:
    limits = rules(max_iterations=20, max_tokens=30, max_cost_usd="0.00000003")
    before = before_call(Task(tokens=tokens), number, limits, tokens=0, cost=cost)
    assert before == before_call(Task(cost=cost), number, limits, tokens=tokens, cost=0)
    if before is not None:
        assert before_call(Task(tokens=tokens, cost=cost), number + later, limits, tokens=more, cost=dearer) is not None


# Confidence


@each_row(
    ("confidences", "settings", "reason"),
    [
        ((0.2, 0.25, 0.1), {"floor": 0.3}, "confidence below 0.3 in 3 answers: 0.2, 0.25, 0.1"),
        ((0.9, 0.2, 0.25, 0.1), {"floor": 0.3}, "confidence below 0.3 in 3 answers: 0.2, 0.25, 0.1"),
        ((0.2, 0.3, 0.1), {"floor": 0.3}, None),
        ((0.2, 0.1), {"floor": 0.3}, None),
        ((0.9, 0.8, 0.7), {}, "confidence fell through 3 answers: 0.9, 0.8, 0.7"),
        ((0.1, 0.9, 0.8, 0.7), {}, "confidence fell through 3 answers: 0.9, 0.8, 0.7"),
        ((0.9, 0.8, 0.8), {}, None),
        ((0.9, 0.8, 0.7, 0.75), {}, None),
        ((0.9, 0.8), {}, None),
        ((0.9, 0.8), {"answers": 2}, "confidence fell through 2 answers: 0.9, 0.8"),
        ((0.9, 0.8, 0.7), {"answers": 4}, None),
        ((0.9, 0.8, 0.7), {"falling": False, "floor": 0.5}, None),
        ((), {}, None),
    ],
)
def test_confidence_drifts_when_it_falls_or_stays_low(
    confidences: tuple[float, ...], settings: dict[str, Any], reason: str | None
) -> None:
    trip = after_job(Task(confidences=confidences), rules(confidence=settings))
    assert trip == (None if reason is None else Trip("confidence_drift", reason))


def test_of_many_answers_the_last_are_listed() -> None:
    confidences = tuple(number / 100 for number in range(20, 0, -1))
    trip = after_job(Task(confidences=confidences), rules(confidence={"answers": 20}))
    assert trip is not None
    assert trip.reason.endswith("20 answers: ..., 0.1, 0.09, 0.08, 0.07, 0.06, 0.05, 0.04, 0.03, 0.02, 0.01")


def test_confidence_is_no_matter_where_nothing_is_set() -> None:
    assert after_job(Task(confidences=(0.9, 0.5, 0.0)), GuardRules()) is None
    assert confidence_of({"confidence": 0.5}, GuardRules()) is None


@given(st.lists(st.floats(0, 1), max_size=8), st.integers(2, 5), st.none() | st.floats(0, 1))
def test_only_the_last_answers_tell_a_drift(confidences: list[float], answers: int, floor: float | None) -> None:
    trip = after_job(Task(confidences=tuple(confidences)), rules(confidence={"answers": answers, "floor": floor}))
    last = confidences[-answers:]
    low = floor is not None and all(confidence < floor for confidence in last)
    falls = all(earlier > later for earlier, later in pairwise(last))
    assert (trip is not None) == (len(last) == answers and (low or falls))


@each_row(
    ("output", "confidence"),
    [
        ({"action": "refund", "reasoning": "it broke", "confidence": 0.4}, 0.4),
        ({"confidence": 0}, 0.0),
        ({"confidence": 1}, 1.0),
        ('{"confidence": 0.25}', 0.25),
        ('  ```json\n{"confidence": 0.25}\n```\n', 0.25),
        ({"confidence": True}, None),
        ({"confidence": "0.4"}, None),
        ({"confidence": None}, None),
        ({"confidence": 1.01}, None),
        ({"confidence": -0.01}, None),
        ({"confidence": 10**400}, None),
        ({"confidence": float("nan")}, None),
        ({}, None),
        ([{"confidence": 0.4}], None),
        ("[0.4]", None),
        ("0.4", None),
        (0.4, None),
        (None, None),
        ("", None),
        ('my "confidence": 0.4', None),
        ('{"confidence": 0.4', None),
        ('{"confidence": NaN}', None),
    ],
)
def test_an_answer_says_how_sure_it_is_or_does_not(output: JsonValue, confidence: float | None) -> None:
    assert confidence_of(output, rules(confidence={})) == confidence


def test_the_field_may_have_another_name() -> None:
    assert confidence_of({"confidence": 0.1, "sureness": 0.7}, rules(confidence={"field": "sureness"})) == 0.7


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["confidence", "x"]), inner, max_size=2)
    ),
    max_leaves=8,
)


@given(JSON)
def test_no_answer_gives_a_confidence_beyond_its_bounds(output: JsonValue) -> None:
    said = confidence_of(output, rules(confidence={}))
    assert said is None or (isinstance(said, float) and 0 <= said <= 1)
