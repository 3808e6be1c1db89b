"""Several callers of one model: what one of them sends does not close it to the others, and an outage does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakwater.breakers.rules.breaker import (
    Breaker,
    BreakerChange,
    Observation,
    caller_of,
    concerns_caller,
    is_open_for_one,
    observe,
)
from breakwater.breakers.settings import BreakerRules
from tests.tables import each_row

NOW = 1_795_000_000_000
OFF = dict.fromkeys(("errors", "consecutive_failures", "same_error", "failure_rate"), "off")
A, B, C = (caller_of(None, tenant) for tenant in ("acme", "globex", "initech"))
CALLERS = {"A": A, "B": B, "C": C}


def rules(**given: Any) -> BreakerRules:
    return BreakerRules.model_validate(OFF | given)


def outcomes(calls: str) -> list[Observation]:
    """`A1 b2`: a call of A's job 1 fails, one of B's job 2 succeeds."""
    names = {"A": "acme", "B": "globex", "C": "initech"}
    return [
        Observation(
            *(n, f"{n}", NOW + n, one[0].isupper(), "e", 0),
            job=one,
            caller=CALLERS[one[0].upper()],
            names=("", names[one[0].upper()]),
            task=one,
        )
        for n, one in enumerate(calls.split(), 1)
    ]


def after(
    seen: list[Observation], limits: BreakerRules, breaker: Breaker | None = None
) -> tuple[Breaker, list[BreakerChange]]:
    breaker, changes = breaker or Breaker(), list[BreakerChange]()
    for one in seen:
        breaker, change = observe(breaker, replace(one, version=breaker.version), limits, NOW + 10_000)
        changes += [] if change is None else [change]
    return breaker, changes


@each_row(
    ("limits", "calls", "opens"),
    [
        # Alone.
        (rules(consecutive_failures=3), "A1 A2 A3", "3 jobs in a row failed (threshold: 3)"),
        (rules(consecutive_failures=3), "a1 A2 A3", None),
        # A job counts once, but where attempts are counted.
        (rules(consecutive_failures=3), "A1 A1 A1 A2 A2", None),
        (rules(consecutive_failures=3, count="attempts"), "A1 A1 A1", "3 calls in a row failed (threshold: 3)"),
        # Several: one caller's are not enough.
        (rules(consecutive_failures=3), "b1 A1 A1 a1 A2 a2 A3 A4", None),
        (rules(same_error=3), "b1 A1 A2 b2", None),
        (rules(errors=3), "b1 A1 A2 b2", None),
        (rules(failure_rate=0.5, minimum_calls=4), "b1 b2 A1 A2 A3 b3", None),
        # What fails again and again for one job of each is one failure each.
        (rules(consecutive_failures=3), "b1 A1 A1 B1 B1", None),
        # It fails for both: as fast as the threshold allows.
        (rules(consecutive_failures=3), "b0 A1 A2 B1", "3 jobs in a row failed (threshold: 3), of 2 callers"),
        (rules(consecutive_failures=3), "b0 A1 B1 A2", "3 jobs in a row failed (threshold: 3), of 2 callers"),
        (rules(consecutive_failures=5), "c0 A1 A2 A3 B1 C1",
         "5 jobs in a row failed (threshold: 5), of 3 callers"),
        (rules(same_error=3), "b0 A1 b1 A2 b2 B3",
         "Same error in 3 jobs within 60 s (threshold: 3), of 2 callers"),
        (rules(errors=3), "b0 A1 A2 b2 B3", "3 errors within 60 s (threshold: 3), of 3 jobs of 2 callers"),
        (rules(failure_rate=0.5, minimum_calls=4), "a1 A2 b1 B2",
         "50% of 4 calls failed within 60 s (threshold: 50% of at least 4), of 2 jobs of 2 callers"),
    ],
)  # fmt: skip
def test_a_rule_fires_for_what_fails_for_several(limits: BreakerRules, calls: str, opens: str | None) -> None:
    _, changes = after(outcomes(calls), limits)
    assert [change.reason for change in changes] == ([] if opens is None else [opens])


@each_row(
    ("limits", "calls", "reason"),
    [
        (rules(consecutive_failures=3), "b1 A1 A2 A3", "3 jobs in a row failed (threshold: 3)"),
        # The successes of others do not end a row of its own.
        (rules(consecutive_failures=3), "b1 A1 b2 A2 b3 A3", "3 jobs in a row failed (threshold: 3)"),
        (rules(consecutive_failures=1), "b0 A1", "1 job failed (threshold: 1)"),
        (rules(same_error=3), "b1 A1 a1 A2 b2 A3", "Same error in 3 jobs within 60 s (threshold: 3)"),
        (rules(errors=3), "b1 A1 A2 b2 A3", "3 errors within 60 s (threshold: 3)"),
        (
            rules(failure_rate=0.5, minimum_calls=4),
            "b1 b2 A1 A2 A3 A4",
            "100% of 4 calls failed within 60 s (threshold: 50% of at least 4)",
        ),
    ],
)
def test_what_fails_for_one_caller_opens_it_for_that_one_and_for_all_once_another_sees_it(
    limits: BreakerRules, calls: str, reason: str
) -> None:
    breaker, [opened] = after(outcomes(calls), limits)
    assert (opened.reason, breaker.state, breaker.alone_name, is_open_for_one(breaker)) == (
        reason,
        "open",
        "tenant acme",
        True,
    )
    assert [concerns_caller(breaker, one) for one in (A, B, C, "")] == [True, False, False, True]
    # What it sends no longer matters, and others are counted as before.
    later = [replace(one, sequence=one.sequence + 50) for one in outcomes("A7 A8 A9 b8 A7")]
    same, changes = after(later, limits, breaker)
    assert (changes, same.version, same.open_until_ms) == ([], breaker.version, breaker.open_until_ms)
    needed = [replace(one, sequence=one.sequence + 60) for one in outcomes("B1 B2 B3 B4 B5 B6 B7 B8")]
    for_all, [change] = after(needed, limits, same)
    assert (change.before.state, for_all.state, is_open_for_one(for_all)) == ("open", "open", False)
    assert all(concerns_caller(for_all, caller_of(None, tenant)) for tenant in ("acme", "globex", "initech"))


def test_a_probe_of_the_one_caller_closes_it_and_forgets_what_that_one_did() -> None:
    limits = rules(consecutive_failures=3)
    opened, _ = after(outcomes("b1 A1 A2 A3"), limits)
    counted_b, _ = after([replace(one, sequence=9) for one in outcomes("B1")], rules(consecutive_failures=9), opened)
    half_open = replace(counted_b, state="half_open", probe="p", version=counted_b.version + 1)
    # The outcome of a call of another, which was admitted before, counts.
    late = Observation(10, "x", NOW, False, "", opened.version, caller=B)
    assert observe(half_open, late, limits, NOW)[0].last_success == 10
    assert (
        observe(half_open, Observation(11, "p", NOW, None, "", half_open.version, caller=A), limits, NOW)[0].probe
        is None
    )
    closed, change = observe(half_open, Observation(11, "p", NOW, False, "", half_open.version, caller=A), limits, NOW)
    assert change is not None
    assert (closed.state, closed.alone, closed.task, closed.alone_name) == ("closed", "", "", "")
    assert [one.caller for one in closed.failures] == [B]
    again, changes = after([replace(one, sequence=one.sequence) for one in outcomes("A1 A1 A2 A3")[1:]], limits, closed)
    assert (again, changes) == (closed, []), "delivered again"
    reopened, change = observe(half_open, Observation(11, "p", NOW, True, "", half_open.version, caller=A), limits, NOW)
    assert change is not None
    assert (reopened.state, reopened.alone) == ("open", A)


@pytest.mark.parametrize("calls", ["A1 A2 A3", "b1 A1 A2 A3"], ids=["the only caller", "one of two"])
def test_calls_of_the_one_caller_that_began_before_it_opened_say_nothing_once_it_is_closed(calls: str) -> None:
    limits = rules(consecutive_failures=3)
    opened, _ = after(outcomes(calls), limits)
    half_open = replace(opened, state="half_open", probe="p", version=opened.version + 1)
    closed, _ = observe(half_open, Observation(11, "p", NOW, False, "", half_open.version, caller=A), limits, NOW)
    late = [replace(one, sequence=20 + n) for n, one in enumerate(outcomes("A4 A5 A6"))]
    breaker = closed
    for one in late:
        breaker, change = observe(breaker, one, limits, NOW)
        assert (breaker, change) == (closed, None)
    counted, changes = after(late, limits, closed)
    assert (counted.state, len(changes)) == ("open", 1), "admitted since"


def test_two_tenants_of_a_key_and_two_keys_of_a_tenant_are_two_callers() -> None:
    limits = rules(consecutive_failures=3)
    pairs = [(("k", "a"), ("k", "b")), (("ka", "t"), ("kb", "t")), (("ka", None), ("kb", None))]
    for failing, fine in pairs:
        ok = Observation(1, "1", NOW, False, "", 0, caller=caller_of(*fine))
        failed = [
            Observation(n, f"{n}", NOW, True, "", 0, job=f"{n}", caller=caller_of(*failing)) for n in range(2, 12)
        ]
        breaker, changes = after([ok, *failed], limits)
        assert [len(changes), breaker.state] == [1, "open"]
        assert concerns_caller(breaker, caller_of(*failing))
        assert not concerns_caller(breaker, caller_of(*fine))


def test_many_tenants_of_a_key_or_many_keys_of_a_tenant_are_stopped_as_the_one_that_they_are() -> None:
    limits = rules(consecutive_failures=3)
    other = Observation(1, "1", NOW, False, "", 0, job="o", caller=caller_of("honest", "globex"))
    for hostile in ([("evil", f"t{n}") for n in range(9)], [(f"k{n}", "evil") for n in range(9)]):
        failed = [
            Observation(n, f"{n}", NOW + n, True, "", 0, job=f"j{n}", caller=caller_of(*one))
            for n, one in enumerate(hostile, 2)
        ]
        for seen in ([other, *failed], failed):
            opened, changes = after(seen, limits)
            assert len(changes) == 1
            assert all(concerns_caller(opened, caller_of(*one)) for one in hostile)
            assert not concerns_caller(opened, caller_of("honest", "globex"))
            assert not concerns_caller(opened, caller_of("honest", None))


def test_what_several_keys_without_tenants_open_is_open_for_all() -> None:
    limits = rules(consecutive_failures=3)
    failed = [
        Observation(n, f"{n}", NOW + n, True, "", 0, job=f"j{n}", caller=caller_of(f"k{n}", None)) for n in range(1, 4)
    ]
    assert after(failed, limits)[0].alone == ""


def test_it_is_of_a_task_that_made_more_than_half_of_the_failures_that_opened_it() -> None:
    limits = rules(consecutive_failures=3, count="attempts")
    for calls, task in (("A1 A1 A1", "A1"), ("A2 A1 A1", "A1"), ("A1 A2 A3", ""), ("b1 A1 A1 A1", "A1")):
        assert after(outcomes(calls), limits)[0].task == task, calls


def test_who_has_not_called_for_a_whole_window_is_no_other_caller() -> None:
    limits = rules(consecutive_failures=3, within_s=5)
    of_b, *of_a = (replace(one, at_ms=NOW + 9_000) for one in outcomes("b1 A1 A2 A3"))
    assert after([replace(of_b, at_ms=NOW + 4_000), *of_a], limits)[0].alone == A


def test_a_failed_probe_lets_one_other_caller_probe_at_once() -> None:
    limits = rules(consecutive_failures=3)
    opened, [_] = after(outcomes("b0 A1 B1 A2"), limits)
    assert (opened.alone, opened.probed_by) == (A.split()[0], "")
    probed = opened
    for caller, by in ((A, A), (B, ""), (A, A)):
        probing = replace(probed, state="half_open", probe="p", version=probed.version + 1)
        failed = Observation(30, "p", NOW, True, "", probing.version, job="x", caller=caller)
        probed, change = observe(probing, failed, limits, NOW)
        assert change is not None
        assert (probed.state, probed.probed_by) == ("open", by)


CALLS = st.lists(st.tuples(st.sampled_from("AaBbC"), st.integers(0, 3)), max_size=40)
LIMITS = st.sampled_from(
    [
        rules(consecutive_failures=1), rules(consecutive_failures=3), rules(same_error=4), rules(errors=5),
        rules(failure_rate=0.3, minimum_calls=3), BreakerRules(failure_rate=0.5, minimum_calls=2, errors=4),
    ]
)  # fmt: skip


@given(CALLS, LIMITS)
def test_where_others_succeed_no_caller_opens_it_for_them(calls: list[tuple[str, int]], limits: BreakerRules) -> None:
    """All failures but A's are taken for successes: whatever A sends, calls of others pass."""
    others = " ".join(f"{kind if kind in 'Aa' else kind.lower()}{job}" for kind, job in calls)
    breaker, _ = after(outcomes(f"b9 {others}"), limits)
    assert breaker.state == "closed" or not concerns_caller(breaker, B)
    assert breaker.state == "closed" or concerns_caller(breaker, A)


@given(CALLS, LIMITS)
def test_it_opens_for_all_no_earlier_than_for_a_lone_caller(calls: list[tuple[str, int]], limits: BreakerRules) -> None:
    seen = outcomes(" ".join(f"{kind}{job}" for kind, job in calls))
    lone = [replace(one, caller=A) for one in seen]

    def first(of: list[Observation]) -> float:
        return next((n for n in range(1, len(of) + 1) if after(of[:n], limits)[1]), float("inf"))

    opened = first(seen)
    if opened < float("inf") and not is_open_for_one(after(seen[: int(opened)], limits)[0]):
        assert first(lone) <= opened
    assert first([replace(one, caller="") for one in seen]) == first(lone)
    assert first([replace(one, caller="", job="") for one in seen]) <= first(lone)


@given(CALLS, LIMITS, st.randoms())
def test_what_is_delivered_again_changes_nothing(
    calls: list[tuple[str, int]], limits: BreakerRules, random: Any
) -> None:
    seen = outcomes(" ".join(f"{kind}{job}" for kind, job in calls))
    breaker, _ = after(seen, limits)
    again = [replace(one, version=breaker.version) for one in random.choices(seen, k=5)] if seen else []
    if breaker.state == "closed":
        for one in again:
            assert observe(breaker, one, limits, NOW + 10_000) == (breaker, None)
