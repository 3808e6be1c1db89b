"""A month's costs: the month that is meant, and the lines with their sums, caps and forecasts.

Months are those of budgets: calendar months of their time zone, in which a call counts at the moment that it is charged
at. So a line of an agent or a tenant says what its budget says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from datetime import datetime
from zoneinfo import ZoneInfo

from breakwater.jobs.contract.events import BudgetEvent
from breakwater.kernel.types import time_from_ms
from breakwater.limits.contract import CostLine, CostsBy
from breakwater.limits.rules.budget import CapTable, Period, effective_limit, forecast, period, scope_key


@dataclass(frozen=True, slots=True)
class CostSums:
    """Sums over calls; money in nano-dollars, and of each the known part.

    Attributes:
        spend: what the calls of the month cost.
        wasted: of it, what calls cost that did not succeed.
        estimated: of it, what is estimated.
        recent: of it, what was spent since `forecast.recent_from`.
        previous: what the calls of the month before cost.
        calls: of the month.
        failed: of those, how many did not succeed.
        unknown: of those, whose cost is not known.
        unknown_wasted: of those that did not succeed, the same.
        unknown_previous: of the month before, the same.
        input_tokens: as far as they were reported.
        output_tokens: the same.
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
        return CostSums(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class Cap:
    """The caps of a line, in nano-dollars."""

    limit: int | None = None
    hard: bool = False
    daily: int | None = None
    """The one of a day, whether there is one of the month or not."""


def month_of(name: str, zone: ZoneInfo) -> Period:
    """The month of a name: `2026-11`. Raises ValueError: it is no month."""
    return period("monthly", datetime.strptime(name, "%Y-%m").replace(tzinfo=zone), zone)


def month_before(month: Period, zone: ZoneInfo) -> Period:
    """The month before."""
    return period("monthly", time_from_ms(month.start_ms - 1), zone)


def raises_of(notes: Iterable[BudgetEvent]) -> dict[str, tuple[int, int]]:
    """The monthly caps that people raised, by the keys of scopes: to what, and the config's cap at that time.

    Args:
        notes: what happened to the budgets of one month, the earliest first.
    """
    raises: dict[str, tuple[int, int]] = {}
    for note in notes:
        if note.kind in ("raised", "raise_ended") and note.limit is not None and note.configured is not None:
            raises[scope_key(note)] = note.limit, note.configured
    return raises


def cap_of(key: str | None, caps: CapTable, raises: Mapping[str, tuple[int, int]]) -> Cap:
    """The caps of a scope: the config's as they are now, and what the monthly one was raised to in the month.

    Args:
        key: the scope's: `global`, `agent:<name>` or `tenant:<name>`; None for what has no budget.
        caps: of the config.
        raises: of `raises_of`.
    """
    if key is None:
        return Cap()
    daily, monthly = caps.counters_of(key)
    return Cap(effective_limit(monthly.limit, raises.get(key)), monthly.hard_limit is not None, daily.limit)


def scope_of(by: CostsBy, name: str | None) -> str | None:
    """The key of the scope whose budget a line is of; None where there is no budget of such."""
    return f"{by}:{name}" if by in ("agent", "tenant") and name is not None else None


def cost_line(name: str | None, sums: CostSums, cap: Cap, month: Period, now_ms: int) -> CostLine:
    """A line of the costs.

    Args:
        name: of the agent, tenant, …; None for calls that have none.
        sums: of its calls.
        cap: its own.
        month: that is asked for.
        now_ms: in ms since the epoch; without a forecast where the month has just begun, or is over.
    """
    expected = forecast(month, now_ms, spent=sums.spend, recent=sums.recent, limit=cap.limit, hard=cap.hard)
    return CostLine(
        name=name,
        spend=_known(sums.spend, sums.unknown),
        wasted=_known(sums.wasted, sums.unknown_wasted),
        estimated=sums.estimated,
        previous=_known(sums.previous, sums.unknown_previous),
        cap=cap.limit,
        daily_cap=cap.daily,
        forecast=None if expected is None else expected.total,
        calls=sums.calls,
        failed_calls=sums.failed,
        calls_of_unknown_cost=sums.unknown,
        input_tokens=sums.input_tokens,
        output_tokens=sums.output_tokens,
        cached_tokens=sums.cached_tokens,
    )


def _known(total: int, unknown: int) -> int | None:
    """A sum; None where nothing but zero is known, and something is not."""
    return total if total or not unknown else None
