from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError

from breakwater.breakers.contract import BreakerState
from breakwater.breakers.rules.breaker import (
    ALL,
    MAX_ERRORS_SEEN,
    SLICES,
    Breaker,
    BreakerChange,
    BreakerKey,
    CountedFailure,
    Observation,
    awaits_call,
    calls_within,
    consecutive_failures,
    cooldown_ms,
    errors_within,
    isolate,
    observe,
    reset,
    state_at,
    wait_for_call,
)
from breakwater.breakers.settings import MAX_KEPT, BreakerRules, Preset
from breakwater.calls.rules.classify import error_identity
from breakwater.config import parse_config
from breakwater.kernel.errors import ConfigError
from tests.tables import each_row

NOW = 1_795_000_000_000
A, B, C = "a3f1b2c4", "0badc0de", "5eed0002"
OFF = dict.fromkeys(("errors", "consecutive_failures", "same_error", "failure_rate"), "off")


def rules(**given: Any) -> BreakerRules:
    """Only what is set; all else is off."""
    return BreakerRules.model_validate(OFF | given)


def seen(
    sequence: int,
    failed: bool | None = True,
    error: str = "",
    *,
    at_ms: int = NOW,
    attempt: str | None = None,
    version: int | None = None,
) -> Observation:
    return Observation(sequence, attempt or f"a{sequence}", at_ms, failed, error, version)


def reported(*errors: str | None) -> list[Observation]:
    """One call after the other, by their errors; None succeeds."""
    return [seen(number, error is not None, error or "") for number, error in enumerate(errors, 1)]


def fold(
    breaker: Breaker, observations: Sequence[Observation], limits: BreakerRules, now_ms: int = NOW
) -> tuple[Breaker, list[BreakerChange]]:
    changes: list[BreakerChange] = []
    for observation in observations:
        breaker, change = observe(breaker, observation, limits, now_ms)
        changes += [change] if change else []
    return breaker, changes


def opened_at(observations: Sequence[Observation], limits: BreakerRules) -> int | None:
    """The call that opens it, from 1."""
    breaker = Breaker()
    for number, observation in enumerate(observations, 1):
        breaker, change = observe(breaker, observation, limits, NOW)
        if change is not None:
            return number
    return None


# Rate limits


def limited(sequence: int, after_s: float, *, attempt: str | None = None) -> Observation:
    """A rate limit, seen so long after the first moment."""
    return replace(seen(sequence, None, A, at_ms=NOW + round(after_s * 1000), attempt=attempt), limited=True)


def watched(observations: Sequence[Observation], limits: BreakerRules) -> list[int]:
    """The sequences of those that changed its state, each taken into account as it comes."""
    breaker, changed = Breaker(), list[int]()
    for one in observations:
        breaker, change = observe(breaker, one, limits, one.at_ms)
        changed += [one.sequence] if change else []
    return changed


def test_rate_limits_open_no_breaker_within_a_window_nor_while_anything_else_succeeds() -> None:
    limits = BreakerRules(consecutive_failures=1, same_error=1)
    assert watched([limited(n, n / 20) for n in range(1, 1200)], limits) == []
    mixed = [
        seen(n, False, at_ms=NOW + n * 1000) if n % 50 == 0 else limited(n, n) for n in range(1, 500)
    ]  # fmt: skip
    assert watched(mixed, limits) == []


def test_rate_limits_count_once_nothing_else_has_succeeded_for_the_whole_window() -> None:
    limits = BreakerRules(consecutive_failures=3, same_error="off", within_s=60)
    every_ten = [limited(n, n * 10) for n in range(1, 12)]
    # Those after 60, 70 and 80 s of nothing but rate limits.
    assert watched(every_ten, limits) == [9]
    late = seen(5, False, at_ms=NOW + 55_000)
    assert watched([*every_ten[:5], late, *every_ten[5:]], limits) == []
    # One that is delivered again, from before the success, begins no window.
    again = [late, every_ten[0], limited(20, 80), limited(21, 81), limited(22, 82)]
    assert watched(again, limits) == []


def test_a_rate_limit_that_the_config_counts_is_a_failure_like_any_other() -> None:
    counted = [replace(limited(n, n), failed=True) for n in range(1, 4)]
    assert watched(counted, BreakerRules()) == [3]


def test_a_probe_that_meets_a_rate_limit_says_nothing_unless_nothing_else_succeeds() -> None:
    probing = Breaker(state="half_open", probe="p", probe_until_ms=NOW + 10**6, version=2)
    after, change = observe(probing, limited(9, 1, attempt="p"), BreakerRules(), NOW + 1000)
    assert (after.state, after.probe, change) == ("half_open", None, None)
    broken = replace(probing, limited_since_ms=NOW - 60_000)
    assert observe(broken, limited(9, 1, attempt="p"), BreakerRules(), NOW + 1000)[0].state == "open"


# The rules, and what they say


@each_row(
    ("limits", "errors", "rule", "reason"),
    [
        (BreakerRules(), [None, A, B, A], "consecutive_failures", "3 jobs in a row failed (threshold: 3)"),
        (rules(consecutive_failures=1), [A], "consecutive_failures", "1 job failed (threshold: 1)"),
        (
            BreakerRules(),
            [A, A, None, A, B, None, A, None, B, A],
            "same_error",
            "Same error in 5 jobs within 60 s (threshold: 5)",
        ),
        (rules(same_error=1), [None, A], "same_error", "Same error in 1 job within 60 s (threshold: 1)"),
        (rules(errors=10), [A, B, None, C] * 3 + [""], "errors", "10 errors within 60 s (threshold: 10)"),
        (rules(errors=1, within_s=0.5), ["", None], "errors", "1 error within 0.5 s (threshold: 1)"),
        (
            rules(failure_rate=0.5, minimum_calls=10),
            [None] * 5 + [A] * 5,
            "failure_rate",
            "50% of 10 calls failed within 60 s (threshold: 50% of at least 10)",
        ),
        (
            rules(failure_rate=0.125, minimum_calls=1, within_s=3600),
            [None, None, A],
            "failure_rate",
            "33.3% of 3 calls failed within 3600 s (threshold: 12.5% of at least 1)",
        ),
        (
            rules(failure_rate=1, minimum_calls=1),
            [A],
            "failure_rate",
            "100% of 1 call failed within 60 s (threshold: 100% of at least 1)",
        ),
    ],
)
def test_each_rule_opens_it_when_it_is_due_and_says_so(
    limits: BreakerRules, errors: list[str | None], rule: str, reason: str
) -> None:
    last = max(place for place, error in enumerate(errors, 1) if error is not None)
    assert opened_at(reported(*errors), limits) == last
    breaker, [change] = fold(Breaker(), reported(*errors), limits)
    assert (change.rule, change.reason, breaker.reason) == (rule, reason, reason)
    assert (change.before.state, change.after, change.after.version) == ("closed", breaker, 1)
    assert (breaker.state, breaker.open_until_ms, breaker.changed_ms) == ("open", NOW + 60_000, NOW)
    assert change.error_hash == (A if rule == "same_error" else None)


@each_row("off", ["off", False])
@each_row(("name", "threshold"), [("errors", 4), ("consecutive_failures", 4), ("same_error", 4), ("failure_rate", 0.5)])
def test_each_rule_can_be_switched_off(name: str, threshold: float, off: object) -> None:
    other = "errors" if name != "errors" else "same_error"
    failing = reported(*[A] * 20)
    assert opened_at(failing, rules(**{name: threshold, other: 1000})) in {4, 10}
    assert opened_at(failing, rules(**{name: off, other: 1000})) is None


def test_what_nobody_set() -> None:
    limits = BreakerRules()
    assert (limits.errors, limits.consecutive_failures, limits.same_error, limits.failure_rate) == (None, 3, 5, None)
    assert (limits.within_s, limits.cooldown_s, limits.scope) == (60, 60, "agent_model")


def test_rules_without_a_rule_are_refused() -> None:
    with pytest.raises(ValidationError, match="set errors, consecutive_failures, same_error or failure_rate, or"):
        rules()


def test_an_error_that_is_not_known_is_the_same_as_no_other() -> None:
    assert opened_at(reported(*[""] * 50), rules(same_error=2)) is None


def test_a_success_clears_what_came_in_a_row_and_no_error() -> None:
    breaker, changes = fold(Breaker(), reported(A, B, None, A, A), BreakerRules())
    assert not changes
    assert (consecutive_failures(breaker), errors_within(breaker, BreakerRules(), NOW)) == (2, 4)


@each_row(("share", "of"), [(0.07, 100), (0.55, 100), (0.29, 100), (0.57, 100), (0.1, 30), (1 / 3, 3)])
def test_a_share_that_is_reached_exactly_is_reached(share: float, of: int) -> None:
    failed = round(share * of)
    limits = rules(failure_rate=share, minimum_calls=of)
    assert opened_at(reported(*[None] * (of - failed), *[A] * failed), limits) == of
    assert opened_at(reported(*[None] * (of - failed + 1), *[A] * (failed - 1)), limits) is None


def test_a_failure_rate_needs_calls() -> None:
    limits = rules(failure_rate=0.1, minimum_calls=10)
    assert opened_at(reported(*[A] * 9), limits) is None
    assert opened_at(reported(*[A] * 9, None, A), limits) == 11  # a success opens nothing


def test_breakers_are_shared_as_far_as_their_scope_says() -> None:
    of = {scope: BreakerKey.of(scope, "writer", "sim/m", "sim") for scope in ("agent_model", "model", "provider")}
    assert of == {
        "agent_model": BreakerKey("writer", "sim/m"),
        "model": BreakerKey(ALL, "sim/m"),
        "provider": BreakerKey(ALL, "sim/*"),
    }


# Jobs


def attempts_of(*jobs: str) -> list[Observation]:
    """`Arrf` is a job that fails with A: r is tried again, f is not; s succeeds, g is refused or cut off."""
    sequence, seen_attempts = 0, list[Observation]()
    for number, job in enumerate(jobs):
        for step in job[1:]:
            sequence += 1
            failed = {"r": True, "f": True, "s": False, "g": None}[step]
            outcome = seen(sequence, failed, {"A": A, "B": B}[job[0]] if failed else "")
            job_hash = f"{number:08x}"
            seen_attempts.append(replace(outcome, job=job_hash, tried_again=step == "r", gave_up=step == "g"))
    return seen_attempts


@each_row(
    ("limits", "jobs", "at", "reason"),
    [
        # One job, however often it tries, is one failure, and its own last attempt is what counts.
        (BreakerRules(), ["Arrrrrrrrrf"], None, ""),
        (BreakerRules(), ["Arrf", "Arrf"], None, ""),
        (BreakerRules(), ["Arrf", "Arrf", "Arrf"], 9, "3 jobs in a row failed (threshold: 3)"),
        (rules(consecutive_failures=1), ["Arrf"], 3, "1 job failed (threshold: 1)"),
        # A job that succeeds in the end has not failed there, and neither has one whose end is open.
        (rules(same_error=2), ["Arrs"] * 9, None, ""),
        (BreakerRules(), ["Arr"] * 9, None, ""),
        (rules(same_error=3), ["Arrf", "Bs", "Arrf", "Bs", "Arrf"], 11,
         "Same error in 3 jobs within 60 s (threshold: 3)"),
        # It has failed, too, if its next try is refused or cut off: by a budget, its own breaker, or its deadline.
        (BreakerRules(), ["Arg", "Arrg", "Ag", "Arg"], 8, "3 jobs in a row failed (threshold: 3)"),
        (rules(errors=4), ["Arg", "Arg", "Ag", "Arg"], None, ""),
        (rules(same_error=2), ["Arg", "Bs", "Arg"], 5, "Same error in 2 jobs within 60 s (threshold: 2)"),
        # It ended with B, whatever its earlier attempts ended with.
        (rules(same_error=2), ["Brrf", "Arrf", "Af"], 7, "Same error in 2 jobs within 60 s (threshold: 2)"),
        # `errors` and `failure_rate` count attempts.
        (rules(errors=3), ["Arrf"], 3, "3 errors within 60 s (threshold: 3)"),
        (rules(failure_rate=0.6, minimum_calls=3), ["Arrs"], None, ""),
        (rules(failure_rate=0.6, minimum_calls=3), ["As", "Arrf"], 3,
         "66.7% of 3 calls failed within 60 s (threshold: 60% of at least 3)"),
        # And so do all rules that the config tells to.
        (BreakerRules(count="attempts"), ["Arrf"], 3, "3 calls in a row failed (threshold: 3)"),
        (rules(same_error=2, count="attempts"), ["Arrs"], 2, "Same error in 2 calls within 60 s (threshold: 2)"),
    ],
)  # fmt: skip
def test_consecutive_failures_and_same_error_count_a_job_once_by_how_it_ended_on_the_model(
    limits: BreakerRules, jobs: list[str], at: int | None, reason: str
) -> None:
    observations = attempts_of(*jobs)
    assert opened_at(observations, limits) == at
    _, changes = fold(Breaker(), observations, limits)
    assert [change.reason for change in changes[:1]] == [reason][: at is not None]


def test_a_probe_is_judged_by_its_attempt_even_if_its_job_tries_again() -> None:
    failed = replace(seen(9, error=C, attempt="probe", version=2), job="0badc0de", tried_again=True)
    assert observe(HALF_OPEN, failed, BreakerRules(), NOW)[0].state == "open"


JOB_LISTS = st.lists(st.tuples(st.integers(0, 4), st.sampled_from("fffs ")), max_size=12)


@given(jobs=JOB_LISTS, threshold=st.integers(1, 5), random=st.randoms())
def test_in_whatever_order_attempts_end_as_many_jobs_are_counted_as_have_failed_since_the_last_success(
    jobs: list[tuple[int, str]], threshold: int, random: random.Random
) -> None:
    observations = attempts_of(*(f"A{'r' * retries}{end.strip()}" for retries, end in jobs))
    random.shuffle(observations)
    in_order = [replace(outcome, sequence=number) for number, outcome in enumerate(observations, 1)]
    breaker, _ = fold(Breaker(), in_order, rules(consecutive_failures=1000))
    success = max((outcome.sequence for outcome in in_order if not outcome.failed), default=0)
    since = [outcome for outcome in in_order[success:] if not outcome.tried_again]
    assert consecutive_failures(breaker) == len({outcome.job for outcome in since})
    # Delivered again, and in another order, they count the same.
    again, _ = fold(Breaker(), random.sample(in_order, len(in_order)) + in_order, rules(consecutive_failures=1000))
    assert consecutive_failures(again) == consecutive_failures(breaker)
    # What is counted by attempts does not depend on jobs.
    plain = [replace(outcome, job="", tried_again=False) for outcome in in_order]
    limits = rules(consecutive_failures=threshold, count="attempts")
    assert opened_at(in_order, limits) == opened_at(plain, rules(consecutive_failures=threshold))


def test_a_threshold_of_jobs_is_reached_however_often_each_of_them_tries() -> None:
    tries = ["Arrf"] * MAX_KEPT
    limits = rules(consecutive_failures=MAX_KEPT, within_s=3600)
    breaker, [change] = fold(Breaker(), attempts_of(*tries), limits)
    assert len(breaker.failures) <= 2 * MAX_KEPT
    assert change.reason == "1,000 jobs in a row failed (threshold: 1000)"


# Presets


@each_row(
    ("preset", "in_a_row", "same"),
    [
        ("feature", 3, 5),
        ("tdd-red-green", 5, 3),
        ("refactor", 2, 3),
        ("incident-response", 2, 2),
        ("migration-safety", 1, 2),
    ],
)
def test_presets_open_at_the_figures_of_their_table(preset: Preset, in_a_row: int, same: int) -> None:
    different = reported(*[f"{number:08x}" for number in range(10)])
    assert opened_at(different, BreakerRules(preset=preset)) == in_a_row
    now_and_then = reported(*[A, None] * 10)
    assert opened_at(now_and_then, BreakerRules(preset=preset, consecutive_failures=None)) == 2 * same - 1


def test_what_is_set_beside_a_preset_wins() -> None:
    limits = BreakerRules.model_validate({"preset": "migration-safety", "consecutive_failures": 3, "cooldown_s": 5})
    assert (limits.consecutive_failures, limits.same_error, limits.cooldown_s) == (3, 2, 5)
    limits = BreakerRules.model_validate({"preset": "migration-safety", "same_error": "off", "errors": 7})
    assert (limits.consecutive_failures, limits.same_error, limits.errors) == (1, None, 7)


def test_a_preset_that_is_not_known_is_reported_with_those_that_are() -> None:
    with pytest.raises(ConfigError) as reported_so:
        parse_config("""
            providers: {sim: {kind: openai, base_url: "http://127.0.0.1:1/v1"}}
            agents: {writer: {model: sim/m, breaker: {preset: migrations}}}
        """)
    assert "agents.writer.breaker.preset: should be 'feature', 'tdd-red-green', 'refactor'" in str(reported_so.value)
    assert "(found 'migrations')" in str(reported_so.value)


# The examples of seed 002


def test_the_iterations_of_the_seed_count_as_its_table_says() -> None:
    breaker, changes, figures = Breaker(), list[BreakerChange](), list[tuple[int, int]]()
    for outcome in reported(None, A, A, A):
        breaker, some = fold(breaker, [outcome], BreakerRules())
        changes += some
        figures.append((consecutive_failures(breaker), sum(failure.error == A for failure in breaker.failures)))
    assert figures == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert [change.reason for change in changes] == ["3 jobs in a row failed (threshold: 3)"]


def test_two_failures_a_success_and_two_more_are_two_in_a_row_and_four_of_the_same() -> None:
    breaker, changes = fold(Breaker(), reported(A, A, None, A, A), BreakerRules())
    assert not changes
    assert consecutive_failures(breaker) == 2
    assert sum(failure.error == A for failure in breaker.failures) == 4
    _, [change] = fold(breaker, [seen(6, False), seen(7, error=A)], BreakerRules())
    assert change.reason == "Same error in 5 jobs within 60 s (threshold: 5)"
    assert (change.consecutive_failures, change.after.total_failures) == (1, 5)


@each_row(
    ("given", "errors", "at"),
    [
        ({"consecutive_failures": 5}, [A, B, C, A], None),
        ({"consecutive_failures": 5}, [A, B, C, A, B], 5),
        ({"same_error": 3}, [A, None, A, None, B, None, A], 7),
        ({"consecutive_failures": 2, "same_error": 3}, [A, B], 2),
        ({"consecutive_failures": 2, "same_error": 3}, [A, None, A, None, A], 5),
        ({"consecutive_failures": 1, "same_error": 2}, [None, A], 2),
        ({"consecutive_failures": 8, "same_error": 10}, [A, B, C, A, B, C, A, None, B], None),
        ({"consecutive_failures": 8, "same_error": 10}, [A, B, C, A, B, C, A, B], 8),
        ({"consecutive_failures": 8, "same_error": 10}, [A, None] * 10, 19),
        ({"preset": "migration-safety"}, [A], 1),
        ({"preset": "migration-safety", "consecutive_failures": 3}, [A, B, C], 3),
    ],
)
def test_the_settings_of_the_seed_open_it_where_the_seed_says(
    given: dict[str, Any], errors: list[str | None], at: int | None
) -> None:
    assert opened_at(reported(*errors), BreakerRules.model_validate(given)) == at


def test_the_stats_of_the_seed_are_three_in_a_row_of_five_and_two_different_ones() -> None:
    breaker, [change] = fold(Breaker(), reported(A, B, None, A, B, A), BreakerRules())
    assert (change.consecutive_failures, change.errors) == (3, 5)
    assert (breaker.total_failures, breaker.errors_seen) == (5, (B, A))


def test_errors_that_differ_in_their_lines_only_are_the_same_error() -> None:
    first, second = (
        f"TypeError: Cannot read property 'id' of undefined at UserController (/src/controllers/user.ts:{place})"
        for place in ("42:15", "87:22")
    )
    assert opened_at(reported(error_identity(first), None, error_identity(second)), rules(same_error=2)) == 3


def half_open(breaker: Breaker, probe: str = "probe") -> Breaker:
    """As the admission of a probe leaves it."""
    return replace(breaker, state="half_open", probe=probe, probe_until_ms=NOW + 150_000, version=breaker.version + 1)


OPEN, _ = fold(Breaker(), reported(A, B, A), BreakerRules(cooldown_s=30))
HALF_OPEN = half_open(OPEN)


def test_a_probe_that_succeeds_closes_it_with_a_clean_history() -> None:
    assert OPEN.open_until_ms == NOW + 30_000
    closed, [change] = fold(HALF_OPEN, [seen(9, False, attempt="probe", version=2)], BreakerRules())
    assert (closed.state, closed.failures, closed.version, closed.openings) == ("closed", (), 3, 0)
    assert (change.before.state, change.rule, change.reason) == ("half_open", None, "the half-open probe succeeded")
    assert (closed.total_failures, closed.errors_seen) == (3, (B, A))  # those are reported until somebody resets it
    assert (consecutive_failures(closed), closed.last_success_ms) == (0, NOW)


def test_the_errors_that_opened_it_are_not_counted_again_after_a_probe_that_succeeded() -> None:
    limits = rules(same_error=3, within_s=600)
    opened, _ = fold(Breaker(), reported(A, None, A, None, A), limits)
    closed, _ = fold(half_open(opened), [seen(9, False, attempt="probe", version=2)], limits)
    strays = [seen(number, error=A, version=3) for number in (10, 11, 12)]
    for stray in strays[:2]:
        closed, changes = fold(closed, [stray], limits)
        assert (closed.state, changes) == ("closed", [])
    assert fold(closed, strays[2:], limits)[0].state == "open"


def test_a_probe_that_fails_opens_it_for_another_cooldown() -> None:
    later = NOW + 31_000
    failed = seen(9, error=C, at_ms=later, attempt="probe", version=2)
    again, [change] = fold(HALF_OPEN, [failed], BreakerRules(cooldown_s=30), later)
    assert (again.state, again.open_until_ms, again.probe, again.version) == ("open", later + 30_000, None, 3)
    assert (change.rule, change.reason) == ("probe_failed", "the half-open probe failed")
    assert (change.consecutive_failures, again.total_failures, again.openings) == (4, 4, 2)


def test_only_one_that_was_reported_to_wait_for_a_call_is_probed() -> None:
    waits = replace(HALF_OPEN, waits=True, probe=None, probe_until_ms=0)
    assert awaits_call(waits, NOW)
    assert awaits_call(replace(waits, probe="lost", probe_until_ms=NOW), NOW)
    assert awaits_call(replace(waits, alone="k1a2b3c4d"), NOW)
    for breaker in (
        replace(waits, waits=False),
        replace(waits, probe="p", probe_until_ms=NOW + 1),
        replace(OPEN, open_until_ms=NOW - 1),
        Breaker(),
    ):
        assert not awaits_call(breaker, NOW)


def test_a_breaker_without_calls_is_half_open_once_its_cooldown_is_over_and_that_is_reported_once() -> None:
    limits = BreakerRules(cooldown_s=30)
    assert (state_at(OPEN, NOW + 29_999), state_at(OPEN, NOW + 30_000)) == ("open", "half_open")
    assert wait_for_call(OPEN, limits, NOW + 29_999) == (OPEN, None)
    waits, change = wait_for_call(OPEN, limits, NOW + 30_000)
    assert change is not None
    assert (waits.state, waits.version, waits.waits, waits.reason) == ("half_open", 2, True, OPEN.reason)
    assert change.reason == "the cool-down has ended; it waits for a call to try it"
    assert wait_for_call(waits, limits, NOW + 10**9) == (waits, None)
    # A probe in flight is no waiting; one that came to nothing is.
    assert wait_for_call(HALF_OPEN, limits, NOW) == (HALF_OPEN, None)
    lost, change = wait_for_call(replace(HALF_OPEN, probe=None, probe_until_ms=0), limits, NOW)
    assert (lost.state, lost.waits, change and change.reason) == (
        "half_open", True, "its probe has ended without an outcome; it waits for a call to try it",
    )  # fmt: skip
    for breaker in (Breaker(), Breaker(state="isolated", version=1)):
        assert wait_for_call(breaker, limits, NOW) == (breaker, None)


def test_a_probe_that_says_nothing_gives_its_lease_back() -> None:
    breaker, changes = fold(HALF_OPEN, [seen(9, None, attempt="probe")], BreakerRules())
    assert not changes
    assert breaker == replace(HALF_OPEN, probe=None, probe_until_ms=0)


# Cool-downs


@given(
    cooldown_s=st.floats(0.001, 86_400),
    growth=st.just(1.0) | st.floats(1, 10),
    most_s=st.floats(0.001, 86_400),
    share=st.floats(0, 1),
    openings=st.integers(1, 40) | st.just(10_000),
    jitter=st.floats(0, 1),
)
def test_a_cooldown_grows_to_its_ceiling_and_jitter_adds_no_more_than_its_share(
    cooldown_s: float, growth: float, most_s: float, share: float, openings: int, jitter: float
) -> None:
    assume(growth == 1 or most_s >= cooldown_s)
    limits = rules(
        errors=1, cooldown_s=cooldown_s, cooldown_growth=growth, max_cooldown_s=most_s, cooldown_jitter=share
    )
    ceiling = max(cooldown_s, most_s)
    # In logarithms, as the power may be more than a float holds.
    grown = math.log(cooldown_s) + (openings - 1) * math.log(growth)
    plain = min(math.exp(min(grown, 700)), ceiling) * 1000
    took = cooldown_ms(limits, openings, jitter)
    assert plain * (1 - 1e-9) - 1 <= took <= plain * (1 + share * jitter) * (1 + 1e-9) + 1
    assert cooldown_ms(limits, openings, 0) <= took <= cooldown_ms(limits, openings, 1)
    assert took <= cooldown_ms(limits, openings + 1, jitter)
    assert cooldown_ms(limits, 1, 0) == round(cooldown_s * 1000)


def test_each_probe_that_fails_lengthens_the_next_cooldown_until_one_succeeds() -> None:
    limits = BreakerRules(consecutive_failures=1, cooldown_s=10, cooldown_growth=2, max_cooldown_s=60)
    breaker, waits, sequence = Breaker(), list[int](), 0
    for _ in range(5):
        breaker, _ = observe(breaker, seen(sequence := sequence + 1, attempt="probe"), limits, NOW)
        waits.append(breaker.open_until_ms - NOW)
        breaker = half_open(breaker)
    assert waits == [10_000, 20_000, 40_000, 60_000, 60_000]
    breaker, _ = observe(breaker, seen(sequence := sequence + 1, False, attempt="probe"), limits, NOW)
    breaker, _ = observe(breaker, seen(sequence + 1), limits, NOW)
    assert breaker.open_until_ms == NOW + 10_000


# The rolling window

STEPS = st.lists(st.tuples(st.integers(0, 4_000), st.booleans(), st.integers(0, 3_000)), max_size=60)
"""Of each call: how long it ended after the one before, whether it failed, and how much later it is reported (ms)."""


@given(steps=STEPS, threshold=st.integers(1, 8), window_ms=st.integers(1, 20_000))
def test_errors_are_counted_in_an_exact_window(
    steps: list[tuple[int, bool, int]], threshold: int, window_ms: int
) -> None:
    limits = rules(errors=threshold, within_s=window_ms / 1000)
    breaker, at_ms, now_ms, failures = Breaker(), NOW, NOW, list[int]()
    for sequence, (gap, failed, delay) in enumerate(steps, 1):
        at_ms += gap
        now_ms = max(now_ms, at_ms + delay)
        failures += [at_ms] if failed else []
        breaker, change = observe(breaker, seen(sequence, failed, at_ms=at_ms), limits, now_ms)
        recent = sum(now_ms - window_ms < moment <= now_ms for moment in failures)
        assert errors_within(breaker, limits, now_ms) == recent
        assert (change is not None) == (failed and recent >= threshold)
        if change is not None:
            return


@given(steps=STEPS, window_ms=st.integers(1, 20_000) | st.integers(20_000, 86_400_000), late=st.integers(0, 30_000))
def test_a_failure_rates_window_is_exact_to_one_percent(
    steps: list[tuple[int, bool, int]], window_ms: int, late: int
) -> None:
    limits = rules(failure_rate=1, minimum_calls=1_000_000, within_s=window_ms / 1000)
    breaker, at_ms, now_ms, calls = Breaker(), NOW, NOW, list[tuple[int, bool]]()
    off_ms = -(-window_ms // 100)
    for sequence, (gap, failed, delay) in enumerate(steps, 1):
        at_ms += gap
        now_ms = max(now_ms, at_ms + delay)
        calls.append((at_ms, failed))
        breaker, _ = observe(breaker, seen(sequence, failed, at_ms=at_ms), limits, now_ms)
        for asked in (now_ms, now_ms + late):
            counted = calls_within(breaker, limits, asked)
            for found, ended in zip(counted, (calls, [call for call in calls if call[1]]), strict=True):
                most = sum(asked - window_ms < moment <= asked for moment, _ in ended)
                least = sum(asked - window_ms + off_ms <= moment <= asked for moment, _ in ended)
                assert least <= found <= most


def test_errors_that_have_left_the_window_do_not_count_but_in_a_row() -> None:
    old = [seen(1, error=A, at_ms=NOW - 10_000), seen(2, error=A, at_ms=NOW - 10_000), seen(3, error=A)]
    for name in ("errors", "same_error", "failure_rate"):
        limits = rules(**{name: 1 if name == "failure_rate" else 3}, minimum_calls=3, within_s=10)
        assert opened_at(old, limits) is None
        assert opened_at([replace(one, at_ms=NOW) for one in old], limits) == 3
    assert opened_at(old, rules(consecutive_failures=3, within_s=10)) == 3


def test_calls_that_were_counted_under_another_window_say_nothing() -> None:
    for before_s, after_s in ((60, 600), (600, 60), (60, 61), (60, 60.1)):
        before, after = (rules(failure_rate=0.5, minimum_calls=10, within_s=window) for window in (before_s, after_s))
        breaker, _ = fold(Breaker(), reported(*[None] * 500), before)
        later = NOW + 600_001
        assert calls_within(breaker, after, later) == (0, 0)
        failing = [seen(sequence, at_ms=later) for sequence in range(501, 511)]
        opened, [change] = fold(breaker, failing, after, later)
        assert change.reason.startswith("100% of 10 calls failed")
        assert len(opened.slices) == 1


def test_a_log_whose_clock_is_ahead_lengthens_no_window() -> None:
    limits = rules(errors=3, failure_rate=1, minimum_calls=3, within_s=10)
    ahead = NOW + 300_000
    breaker, _ = fold(Breaker(), [seen(1, at_ms=ahead), seen(2, at_ms=ahead)], limits)
    assert (errors_within(breaker, limits, NOW), calls_within(breaker, limits, NOW)) == (2, (2, 2))
    assert breaker.last_failure_ms == NOW
    later = NOW + 10_000
    assert (errors_within(breaker, limits, later), calls_within(breaker, limits, later)) == (0, (0, 0))


# What is reported late, again or out of order


@given(
    st.lists(st.tuples(st.integers(1, 60), st.sampled_from([None, "", A, B])), unique_by=lambda one: one[0]),
    st.randoms(),
)
def test_order_and_repetition_change_nothing_while_closed(
    calls: list[tuple[int, str | None]], shuffler: random.Random
) -> None:
    limits = rules(errors=1000, consecutive_failures=1000, same_error=1000, failure_rate=1, minimum_calls=1_000_000)
    observations = [
        seen(sequence, error is not None, error or "", at_ms=NOW - 59_000 + 900 * sequence) for sequence, error in calls
    ]
    mixed = observations * 2
    shuffler.shuffle(mixed)
    ordered, _ = fold(Breaker(), sorted(observations, key=lambda one: one.sequence), limits)
    assert fold(Breaker(), mixed, limits) == (ordered, [])


@given(st.lists(st.booleans(), max_size=80), st.randoms())
def test_order_and_repetition_change_no_figure_beyond_the_window_either(
    outcomes: list[bool], shuffler: random.Random
) -> None:
    limits = rules(consecutive_failures=1000, failure_rate=1, minimum_calls=1_000_000, within_s=10)
    observations = [seen(number, failed, at_ms=NOW - 80_000 + 1000 * number) for number, failed in enumerate(outcomes)]
    mixed = observations * 2
    shuffler.shuffle(mixed)
    (one, _), (other, _) = fold(Breaker(), observations[1:], limits), fold(Breaker(), mixed, limits)
    for figure in (errors_within, calls_within):
        assert figure(one, limits, NOW) == figure(other, limits, NOW)
    assert consecutive_failures(one) == consecutive_failures(other)


def test_a_failure_that_is_reported_again_opens_nothing_though_the_successes_have_left_the_window() -> None:
    limits = rules(failure_rate=0.5, minimum_calls=10, within_s=10)
    early = [seen(number, False, at_ms=NOW - 9_000) for number in range(1, 21)]
    failures = [seen(number, at_ms=NOW) for number in range(21, 36)]
    breaker, changes = fold(Breaker(), early + failures, limits)
    assert not changes
    later = NOW + 5_000
    assert calls_within(breaker, limits, later) == (15, 15)
    assert fold(breaker, failures, limits, later) == (breaker, [])
    assert fold(breaker, [seen(36, at_ms=later)], limits, later)[1]


OBSERVATIONS = st.builds(
    Observation,
    sequence=st.integers(1, 40),
    attempt_id=st.sampled_from(["probe", "a1", "a2"]),
    at_ms=st.integers(NOW - 70_000, NOW + 70_000),
    failed=st.sampled_from([True, False, None]),
    error=st.sampled_from(["", A, B]),
    version=st.none() | st.integers(0, 5),
)
ISOLATED, _ = isolate(OPEN, by="ops", why="", rules=BreakerRules(), now_ms=NOW)


@given(st.lists(OBSERVATIONS, max_size=30), st.sampled_from([OPEN, ISOLATED]))
def test_no_result_closes_opens_or_lengthens_one_that_is_open_or_isolated(
    results: list[Observation], breaker: Breaker
) -> None:
    assert fold(breaker, results, BreakerRules(consecutive_failures=1)) == (breaker, [])


@given(st.lists(OBSERVATIONS.filter(lambda one: one.attempt_id != "probe"), max_size=30))
def test_only_the_probe_decides_while_it_is_half_open(results: list[Observation]) -> None:
    assert fold(HALF_OPEN, results, BreakerRules(consecutive_failures=1)) == (HALF_OPEN, [])


@given(
    st.lists(OBSERVATIONS.filter(lambda one: one.version not in {None, 7}), max_size=30),
    st.sampled_from([Breaker(), HALF_OPEN, OPEN]),
)
def test_an_outcome_of_another_version_changes_nothing(results: list[Observation], breaker: Breaker) -> None:
    breaker = replace(breaker, version=7, counts_from=7)
    assert fold(breaker, results, BreakerRules(consecutive_failures=1)) == (breaker, [])


def test_what_the_log_reported_before_it_closed_is_over_also_when_it_is_reported_again() -> None:
    limits = rules(errors=3)
    closed, _ = fold(HALF_OPEN, [seen(9, False, attempt="probe")], limits)
    assert fold(closed, [seen(1), seen(2), seen(3), seen(8)], limits) == (closed, [])
    _, changes = fold(closed, [seen(10), seen(11), seen(12)], limits)
    assert len(changes) == 1


# By hand


def in_state(state: BreakerState) -> Breaker:
    closed, _ = fold(Breaker(), reported(A, B), BreakerRules())
    return {"closed": closed, "open": OPEN, "half_open": HALF_OPEN, "isolated": ISOLATED}[state]


@pytest.mark.parametrize("state", ["closed", "open", "half_open"])
def test_it_can_be_forced_open_from_every_state(state: BreakerState) -> None:
    before = in_state(state)
    after, change = isolate(before, by="ops", why="provider is down", rules=BreakerRules(), now_ms=NOW + 5)
    assert change is not None
    assert (change.before, change.after, change.by) == (before, after, "ops")
    assert change.reason == after.reason == "isolated by ops: provider is down"
    assert (after.state, after.open_until_ms, after.probe, after.probe_until_ms) == ("isolated", 0, None, 0)
    assert (after.version, after.changed_ms) == (before.version + 1, NOW + 5)
    assert change.consecutive_failures == consecutive_failures(before)
    assert isolate(after, by="dev", why="", rules=BreakerRules(), now_ms=NOW + 9) == (after, None)


@each_row("state", ["closed", "open", "half_open", "isolated"])
def test_it_can_be_reset_from_every_state_and_forgets_what_was_counted(state: BreakerState) -> None:
    before = in_state(state)
    after, change = reset(before, by="ops", why="", rules=BreakerRules(), now_ms=NOW + 5)
    assert (change.before, change.after, change.by, change.reason) == (before, after, "ops", "reset by ops")
    assert (after.state, after.version, after.total_failures, after.errors_seen) == (
        "closed",
        before.version + 1,
        0,
        (),
    )
    assert (change.consecutive_failures, change.errors) == (consecutive_failures(before), len(before.failures))
    assert (after.last_failure_ms, after.openings, after.probe) == (NOW, 0, None)
    # Neither what it forgot nor calls that were under way count for it.
    old = [*reported(A, B), seen(50, version=before.version), seen(51, attempt="probe", version=before.version)]
    assert fold(after, old, BreakerRules(consecutive_failures=1)) == (after, [])


def test_what_was_dropped_from_memory_is_over_after_a_reset_too() -> None:
    limits = rules(errors=1, within_s=10)
    old = [seen(3, at_ms=NOW - 20_000)]
    counted, _ = fold(Breaker(last_success=2), [*old, seen(4, False)], limits)
    counted, _ = fold(replace(counted, failures=(), forgotten=7), [], limits)
    after, _ = reset(counted, by="ops", why="", rules=limits, now_ms=NOW)
    assert after.closed_at == 7


# Memory


def test_memory_is_bounded_whatever_is_reported() -> None:
    limits = rules(failure_rate=1, minimum_calls=1_000_000, within_s=3600)
    breaker, now_ms = Breaker(), NOW
    for sequence in range(1, 2_600):
        now_ms += 1_700
        failed = sequence % 50 != 0
        breaker, _ = observe(breaker, seen(sequence, failed, f"{sequence:08x}", at_ms=now_ms), limits, now_ms)
    assert len(breaker.failures) == len(breaker.counted) == MAX_KEPT
    assert len(breaker.slices) == SLICES
    assert len(breaker.errors_seen) == MAX_ERRORS_SEEN
    assert breaker.total_failures == 2_599 - 51
    assert breaker.forgotten == breaker.failures[0].sequence - 1
    assert breaker.failures[-1].sequence == breaker.counted[-1] == 2_599
    # One that is older than all that are remembered changes nothing.
    old = [seen(breaker.forgotten, at_ms=now_ms), seen(breaker.counted[0] - 1, False, at_ms=now_ms)]
    after, _ = fold(breaker, old, limits, now_ms)
    assert (after.failures, after.slices, after.counted) == (breaker.failures, breaker.slices, breaker.counted)


def test_failures_that_nobody_asks_for_are_forgotten() -> None:
    limits = rules(consecutive_failures=5, within_s=10)
    old = [seen(number, at_ms=NOW - 60_000) for number in range(1, 4)]
    breaker, _ = fold(Breaker(), [*old, seen(4, False), seen(5)], limits)
    assert breaker.failures == (CountedFailure(5, NOW),)
    assert (breaker.forgotten, breaker.total_failures) == (3, 4)
    assert fold(breaker, old, limits) == (breaker, [])


# All of it

LEGAL = {("closed", "open"), ("open", "half_open"), ("half_open", "open"), ("half_open", "closed")}
BY_HAND = {(state, "isolated") for state in ("closed", "open", "half_open")} | {
    (state, "closed") for state in ("closed", "open", "half_open", "isolated")
}


@given(st.lists(OBSERVATIONS | st.sampled_from(["isolate", "reset", "admit"]), max_size=60), st.integers(1, 3))
def test_whatever_happens_only_legal_transitions_follow_and_each_has_the_next_version(
    happenings: list[Observation | str], threshold: int
) -> None:
    limits = BreakerRules(consecutive_failures=threshold, same_error=2, errors=4, failure_rate=0.9, minimum_calls=5)
    breaker = Breaker()
    for what in happenings:
        before, change, legal = breaker, None, LEGAL - {("open", "half_open")}
        if isinstance(what, Observation):
            breaker, change = observe(breaker, what, limits, NOW)
        elif what == "admit":
            breaker = half_open(breaker) if breaker.state == "open" else breaker
            continue
        else:
            by_hand = {"isolate": isolate, "reset": reset}[what]
            breaker, change = by_hand(breaker, by="ops", why="", rules=limits, now_ms=NOW)
            legal = BY_HAND
        if change is None:
            assert (breaker.state, breaker.version) == (before.state, before.version)
        else:
            assert (change.before.state, change.before.version, change.after) == (before.state, before.version, breaker)
            assert (before.state, breaker.state) in legal
            assert breaker.version == before.version + 1
        assert (breaker.probe is None) or breaker.state == "half_open"
        assert (breaker.open_until_ms > 0) or breaker.state != "open"
