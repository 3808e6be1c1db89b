"""Several callers of one model: what one of them sends does not close it to the others, and an outage does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakwater.policy.breaker import Breaker, BreakerChange, BreakerRules, Observation, caller_of, give_way, observe

NOW = 1_795_000_000_000
OFF = dict.fromkeys(("errors", "consecutive_failures", "same_error", "failure_rate"), "off")
A, B, C = (caller_of(None, tenant) for tenant in ("acme", "globex", "initech"))
CALLERS = {"A": A, "B": B, "C": C}


def rules(**given: Any) -> BreakerRules:
    return BreakerRules.model_validate(OFF | given)


def outcomes(calls: str) -> list[Observation]:
    """`A1 b2`: a call of A's job 1 fails, one of B's job 2 succeeds."""
    return [
        Observation(n, f"{n}", NOW + n, one[0].isupper(), "e", 0, job=one, caller=CALLERS[one[0].upper()])
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


@pytest.mark.parametrize(
    ("limits", "calls", "opens"),
    [
        # Alone: as the seeds say, also with one job.
        (rules(consecutive_failures=3), "A1 A1 A1", "3 consecutive failures (threshold: 3)"),
        (rules(consecutive_failures=3), "a1 A2 A2", None),
        # Several: one caller's are not enough, how many ever.
        (rules(consecutive_failures=3), "b1 A1 A1 A1 A2 A3 A4 A5 A6", None),
        (rules(same_error=3), "b1 A1 A2 b2 A3 A4 A5", None),
        (rules(errors=3), "b1 A1 A2 b2 A3 A4 A5", None),
        (rules(failure_rate=0.5, minimum_calls=4), "b1 b2 A1 A2 A3 A4 A5 A6 A7 A8", None),
        (rules(failure_rate=0.5, minimum_calls=4), "b1 b2 A1 A2 A3 A4 A5 A6 A7 A8 B3", None),
        # What fails again and again for one job of each is one failure each.
        (rules(consecutive_failures=3), "b1 A1 A1 A1 B1 B1 B1", None),
        # It fails for both: as fast as the threshold allows.
        (rules(consecutive_failures=3), "b0 A1 A2 B1", "3 consecutive failures (threshold: 3), of 3 jobs of 2 callers"),
        (rules(consecutive_failures=3), "b0 A1 B1 A2", "3 consecutive failures (threshold: 3), of 3 jobs of 2 callers"),
        (rules(consecutive_failures=1), "b0 A1", None),
        (rules(consecutive_failures=1), "b0 A1 B1", "2 consecutive failures (threshold: 1), of 2 jobs of 2 callers"),
        (rules(consecutive_failures=5), "c0 A1 A2 A3 A4 B1 C1",
         "6 consecutive failures (threshold: 5), of 6 jobs of 3 callers"),
        (rules(same_error=3), "b0 A1 b1 A2 b2 B3",
         "Same error repeated 3 times (threshold: 3), of 3 jobs of 2 callers"),
        (rules(errors=3), "b0 A1 A2 b2 B3", "3 errors within 60 s (threshold: 3), of 3 jobs of 2 callers"),
        (rules(failure_rate=0.5, minimum_calls=4), "a1 A2 b1 B2",
         "50% of 4 calls failed within 60 s (threshold: 50% of at least 4), of 2 jobs of 2 callers"),
        # Who sends most of the calls hides no outage.
        (rules(failure_rate=0.5, minimum_calls=4), "b0 A1 A2 A3 A4 A5 A6 A7 A8 B1",
         "90% of 10 calls failed within 60 s (threshold: 50% of at least 4), of 9 jobs of 2 callers"),
    ],
)  # fmt: skip
def test_a_rule_fires_for_what_fails_for_several(limits: BreakerRules, calls: str, opens: str | None) -> None:
    _, changes = after(outcomes(calls), limits)
    assert [change.reason for change in changes] == ([] if opens is None else [opens])


def test_neither_many_tenants_of_a_key_nor_many_keys_of_a_tenant_are_several_callers() -> None:
    limits = rules(consecutive_failures=3)
    other = Observation(1, "1", NOW, False, "", 0, job="o", caller=caller_of("honest", "globex"))
    for hostile in ([("evil", f"t{n}") for n in range(9)], [(f"k{n}", "evil") for n in range(9)]):
        failed = [
            Observation(n, f"{n}", NOW + n, True, "", 0, job=f"j{n}", caller=caller_of(*one))
            for n, one in enumerate(hostile, 2)
        ]
        assert after([other, *failed], limits)[1] == []
        # One program that serves many tenants is several callers, where nobody else calls.
        assert len({caller_of(*one) for one in hostile}) == 9
        opened, changes = after(failed, limits)
        assert len(changes) == 1
        # It gives way to others as one caller's does: nobody has called but one key, or but one tenant.
        assert give_way(opened, caller_of(*hostile[5]), limits, NOW) == (opened, None)
        assert give_way(opened, caller_of("honest", "globex"), limits, NOW)[0].state == "closed"
        assert give_way(opened, caller_of("honest", None), limits, NOW)[0].state == "closed"


def test_what_several_keys_without_tenants_open_gives_way_to_nobody() -> None:
    limits = rules(consecutive_failures=3)
    failed = [
        Observation(n, f"{n}", NOW + n, True, "", 0, job=f"j{n}", caller=caller_of(f"k{n}", None)) for n in range(1, 4)
    ]
    assert after(failed, limits)[0].alone == ""


def test_who_has_not_called_for_a_whole_window_is_no_other_caller() -> None:
    limits = rules(consecutive_failures=3, within_s=5)
    of_b, *of_a = (replace(one, at_ms=NOW + 9_000) for one in outcomes("b1 A1 A1 A1"))
    assert after([replace(of_b, at_ms=NOW + 4_000), *of_a], limits)[0].alone == A
    assert after([replace(of_b, at_ms=NOW + 6_000), *of_a], limits)[1] == []


def test_what_one_caller_has_opened_alone_gives_way_to_another_and_opens_again_only_for_both() -> None:
    limits = rules(consecutive_failures=3)
    opened, [_] = after(outcomes("A1 A1 A1"), limits)
    assert (opened.state, opened.alone) == ("open", A)
    assert give_way(opened, A, limits, NOW) == give_way(opened, "", limits, NOW) == (opened, None)
    for state in (opened, replace(opened, state="half_open", probe="p", probe_until_ms=NOW + 9)):
        closed, change = give_way(state, B, limits, NOW + 10_000)
        assert change is not None
        assert (closed.state, closed.version, closed.probe, closed.alone) == ("closed", state.version + 1, None, "")
        more = [replace(one, sequence=one.sequence + 10) for one in outcomes("A2 A3 A4 A5")]
        still, changes = after(more, limits, closed)
        assert (still.state, changes) == ("closed", [])
        both, [change] = after([replace(one, sequence=20) for one in outcomes("B1")], limits, still)
        assert (both.state, both.alone) == ("open", A.split()[0])
        assert give_way(both, C, limits, NOW) == (both, None)


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
def test_where_others_succeed_no_caller_opens_it_alone(calls: list[tuple[str, int]], limits: BreakerRules) -> None:
    """All failures but A's are taken for successes: whatever A sends, it stays closed."""
    others = " ".join(f"{kind if kind in 'Aa' else kind.lower()}{job}" for kind, job in calls)
    breaker, changes = after(outcomes(f"b9 {others}"), limits)
    assert (breaker.state, changes) == ("closed", [])


@given(CALLS, LIMITS)
def test_it_never_opens_earlier_than_for_a_lone_caller_nor_later_than_for_distinct_ones(
    calls: list[tuple[str, int]], limits: BreakerRules
) -> None:
    seen = outcomes(" ".join(f"{kind}{job}" for kind, job in calls))
    lone = [replace(one, caller=A) for one in seen]

    def first(of: list[Observation]) -> float:
        return next((n for n in range(1, len(of) + 1) if after(of[:n], limits)[1]), float("inf"))

    assert first(lone) <= first(seen)
    assert first([replace(one, caller="", job="") for one in seen]) == first(lone)


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
