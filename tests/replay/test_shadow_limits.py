"""Shadows of limits: what they would have refused is not spent, and what they reach is said once."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from breakwater.breakers.settings import MAX_KEPT
from breakwater.limits.contract import LimitAction, LimitSettings
from breakwater.limits.rules.budget import Counter, LimitTable, Period
from breakwater.limits.rules.limit import limit_of
from breakwater.replay.rules.shadow_limits import PaidCall, ShadowLimit, count, reported

DAY_MS = 86_400_000
TODAY = Period("daily", "2026-11-21", 20_000 * DAY_MS, 20_001 * DAY_MS)
TOMORROW = Period("daily", "2026-11-22", 20_001 * DAY_MS, 20_002 * DAY_MS)
CAP = 1_000
"""Nano-dollars."""


def counter(action: LimitAction = "refuse") -> Counter:
    settings = LimitSettings.model_validate(
        {"scope": "agent:writer", "usd": "0.000001", "per": "day", "action": action}
    )
    return LimitTable((limit_of("shadow.limits.0", settings),)).counter("agent:writer", "daily")


def calls(*costs: tuple[int, int], period: Period = TODAY, first: int = 1, step_ms: int = 1_000) -> list[PaidCall]:
    """Calls with these worst cases and costs."""
    return [
        PaidCall(number, period.start_ms + number * step_ms, "writer", period, worst_case, cost)
        for number, (worst_case, cost) in enumerate(costs, first)
    ]


def announced(shadow: ShadowLimit) -> Sequence[tuple[str, int | None, int, int | None]]:
    return [(event.kind, event.threshold_percent, event.total, event.refused) for event in shadow.unpublished]


def test_what_does_not_fit_is_refused_and_not_spent_and_leaves_its_room() -> None:
    told = calls((400, 400), (400, 150), (500, 500), (450, 450), (1, 1))
    shadow = count(counter(), ShadowLimit(), told, {})
    assert (shadow.spent, shadow.refused) == (1_000, 2)
    assert announced(shadow) == [
        ("soft_cap", 50, 550, 0),
        ("hard_cap", 100, 550, 1),  # it is reached, as it would have refused a call
        ("soft_cap", 80, 1_000, 1),
    ]
    assert {event.shadow for event in shadow.unpublished} == {True}
    assert len({event.event_id for event in shadow.unpublished}) == 3


def test_an_alert_alone_refuses_nothing() -> None:
    shadow = count(counter("alert"), ShadowLimit(), calls((900, 900), (900, 900)), {})
    assert (shadow.spent, shadow.refused) == (1_800, 0)
    assert announced(shadow) == [("soft_cap", 50, 900, 0), ("soft_cap", 80, 900, 0), ("soft_cap", 100, 1_800, 0)]


def test_further_refusals_are_reported_once_a_minute_at_most() -> None:
    told = calls((CAP, CAP), *[(1, 1)] * 100, step_ms=3_000)
    shadow = count(counter(), ShadowLimit(), told, {})
    assert shadow.refused == 100
    assert [event.refused for event in shadow.unpublished] == [0, 0, 0, 20, 40, 60, 80, 100]
    assert reported(shadow) == shadow


def test_the_end_of_a_burst_is_reported_without_a_further_call_in_its_period() -> None:
    burst = count(counter(), ShadowLimit(), calls((CAP, CAP), *[(1, 1)] * 5), {})
    assert burst.unpublished[-1].refused == 0
    later = reported(burst)
    of_next_period = count(counter(), burst, calls((0, 0), period=TOMORROW, first=9), {})
    for shadow in (later, of_next_period):
        last = shadow.unpublished[-1]
        assert (last.period, last.refused, last.kind) == (TODAY.name, 5, "hard_cap")
    assert reported(later) == later
    again = count(counter(), later, calls((1, 1), first=7, step_ms=2_000), {})
    assert (again.unpublished, reported(again).unpublished[-1].refused) == (later.unpublished, 6)


def test_it_begins_with_what_was_spent_before_and_anew_with_a_period() -> None:
    told = calls((100, 100), (100, 100))
    shadow = count(counter(), ShadowLimit(), told, {TODAY.name: 1_000})
    assert (shadow.spent, shadow.refused) == (1_000, 0), "800 before, and these two"
    shadow = count(counter(), shadow, calls((300, 300), period=TOMORROW, first=3), {TOMORROW.name: 300})
    assert (shadow.start_ms, shadow.spent) == (TOMORROW.start_ms, 300)
    late = calls((300, 300), first=4)
    assert count(counter(), shadow, late, {}) == shadow, "a call of the day before"


COSTS = st.integers(0, CAP).flatmap(lambda worst: st.tuples(st.just(worst), st.integers(0, worst)))


@given(st.lists(COSTS, max_size=30), st.data())
def test_it_refuses_as_the_limit_itself_would_and_counts_a_call_once(
    costs: list[tuple[int, int]], data: st.DataObject
) -> None:
    told = calls(*costs)
    shadow = count(counter(), ShadowLimit(), told, {})
    spent = refused = 0
    for worst_case, cost in costs:  # one at a time, as a hard limit admits them
        admitted = spent + worst_case <= CAP
        spent += cost * admitted
        refused += not admitted
    assert (shadow.spent, shadow.refused) == (spent, refused)
    assert spent <= CAP
    assert count(counter(), shadow, told[data.draw(st.integers(0, len(told))) :], {}) == shadow


def test_it_keeps_no_more_than_it_needs() -> None:
    shadow = count(counter(), ShadowLimit(), calls(*[(1, 0)] * (MAX_KEPT + 500)), {})
    assert len(shadow.sequences) == MAX_KEPT
