"""A month's costs: lines with sums, limits and forecasts.

The months are those of the budgets: calendar months in the budgets' time zone, and a call counts in the month that it
is charged in. So the line of an agent or a tenant agrees with its budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from datetime import datetime
from zoneinfo import ZoneInfo

from breakwater.kernel.types import time_from_ms
from breakwater.limits.contract import BudgetEvent, Window
from breakwater.limits.rules.budget import (
    LimitTable,
    Period,
    forecast,
    next_forecast,
    period,
    scope_key,
)
from breakwater.records.contract import CostLine, CostsBy


@dataclass(frozen=True, slots=True)
class CostSums:
    """Sums over calls. Money is in nano-dollars; calls of unknown cost are counted and add nothing to it.

    Attributes:
        spend: the cost of the month's calls.
        wasted: the part of `spend` for calls that did not succeed.
        estimated: the part of `spend` that is estimated.
        recent: the part of `spend` since `forecast.recent_from`.
        previous: the cost of the previous month's calls.
        calls: the number of the month's calls.
        failed: how many of them did not succeed.
        unknown: how many of them have an unknown cost.
        unknown_wasted: how many of the failed ones have an unknown cost.
        unknown_previous: how many of the previous month's calls have an unknown cost.
        input_tokens: the reported input tokens.
        output_tokens: the reported output tokens.
        cached_tokens: the part of the input that came from providers' caches.
    """

    spend: int = 0
    wasted: int = 0
    estimated: int = 0
    recent: int = 0
    previous: int = 0
    calls: int = 0
    failed: int = 0
    unknown: int = 0
    unknown_wasted: int = 0
    unknown_previous: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0

    def __add__(self, other: CostSums) -> CostSums:
        return CostSums(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


Raises = Mapping[tuple[Window, str], tuple[int, int]]
"""Raised limits by window and scope's key: the raised limit, and the config's at that time, in nano-dollars."""


@dataclass(frozen=True, slots=True)
class Cap:
    """The limits of a line, in nano-dollars.

    Attributes:
        limit: the monthly limit; None if there is none.
        hard: True if the monthly limit refuses calls.
        daily: the daily limit; None if there is none.
        raised_from: the config's limit, if an operator raised it: of `limit`, or of `daily` without a monthly limit.
    """

    limit: int | None = None
    hard: bool = False
    daily: int | None = None
    raised_from: int | None = None

    @property
    def next_hard_limit(self) -> int | None:
        """The monthly limit that refuses calls in the next month, when raises have ended; None if there is none."""
        if not self.hard or self.limit is None:
            return None
        return self.limit if self.raised_from is None else self.raised_from


def month_of(name: str, zone: ZoneInfo) -> Period:
    """Parses a month's name, such as `2026-11`. Raises ValueError if it is none."""
    return period("monthly", datetime.strptime(name, "%Y-%m").replace(tzinfo=zone), zone)


def month_before(month: Period, zone: ZoneInfo) -> Period:
    """Returns the previous month."""
    return period("monthly", time_from_ms(month.start_ms - 1), zone)


def month_after(month: Period, zone: ZoneInfo) -> Period:
    """Returns the next month."""
    return period("monthly", time_from_ms(month.end_ms), zone)


def raises_of(events: Iterable[BudgetEvent]) -> Raises:
    """Returns the limits that operators raised.

    Args:
        events: the events of one month's budgets, and of at most one day's, in chronological order.
    """
    raises: dict[tuple[Window, str], tuple[int, int]] = {}
    for event in events:
        if event.kind in ("raised", "raise_ended") and event.limit is not None and event.configured is not None:
            raises[event.window, scope_key(event)] = event.limit, event.configured
    return raises


def cap_of(key: str | None, limits: LimitTable, raises: Raises) -> Cap:
    """Returns the limits of a scope: the config's current ones, as operators raised them.

    Args:
        key: the scope's key: `global`, `agent:<name>` or `tenant:<name>`; None for a line without a budget.
        limits: the limits.
        raises: the result of `raises_of`.
    """
    if key is None:
        return Cap()
    daily, monthly = limits.counters_of(key)
    caps = {
        counter.window: _raised_limit(counter.limit, raises.get((counter.window, key))) for counter in (daily, monthly)
    }
    capping_counter = daily if monthly.limit is None else monthly
    raised_from = capping_counter.limit if caps[capping_counter.window] != capping_counter.limit else None
    return Cap(caps["monthly"], monthly.hard_limit is not None, caps["daily"], raised_from)


def _raised_limit(limit: int | None, raised: tuple[int, int] | None) -> int | None:
    """Returns a limit, in nano-dollars, as it was raised; a raise is of one amount, and its limit may have changed."""
    if limit is None or raised is None or raised[1] != limit:
        return limit
    return max(limit, raised[0])


def scope_of(by: CostsBy, name: str | None) -> str | None:
    """Returns the key of the scope whose budget a line belongs to; None if such lines have no budget."""
    return f"{by}:{name}" if by != "tag" and name is not None else None


def cost_line(name: str | None, sums: CostSums, cap: Cap, month: Period, following: Period, now_ms: int) -> CostLine:
    """Builds a line of the month's costs, without forecasts if the month has just begun or is over.

    Args:
        name: the agent, tenant or other value that the line sums up; None for calls without one.
        sums: the sums over its calls.
        cap: its limits.
        month: the month.
        following: the month after it.
        now_ms: the current time, in milliseconds since the epoch.
    """
    spend = {"spent": sums.spend, "recent": sums.recent}
    expected = forecast(month, now_ms, **spend, limit=cap.limit, hard=cap.hard)
    expected_next = next_forecast(month, following, now_ms, **spend, hard_cap=cap.next_hard_limit)
    return CostLine(
        name=name,
        spend=_known_sum(sums.spend, sums.unknown),
        wasted=_known_sum(sums.wasted, sums.unknown_wasted),
        estimated=sums.estimated,
        previous=_known_sum(sums.previous, sums.unknown_previous),
        cap=cap.limit,
        daily_cap=cap.daily,
        raised_from=cap.raised_from,
        forecast=None if expected is None else expected.total,
        next_month=expected_next,
        calls=sums.calls,
        failed_calls=sums.failed,
        calls_of_unknown_cost=sums.unknown,
        input_tokens=sums.input_tokens,
        output_tokens=sums.output_tokens,
        cached_tokens=sums.cached_tokens,
    )


def _known_sum(total: int, unknown: int) -> int | None:
    """Returns a sum; None if it is zero only because the costs are unknown."""
    return total if total or not unknown else None
