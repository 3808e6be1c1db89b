"""Where a budget is going, in words and as a chart."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from zoneinfo import ZoneInfo

from markupsafe import Markup

from breakwater.analytics.burn import Burn
from breakwater.contracts.api import BudgetStatus
from breakwater.contracts.types import NANO_PER_USD, ms_from_time, time_from_ms
from breakwater.policy.forecast import Forecast, forecast
from breakwater.policy.periods import Period
from services.console import charts
from services.console.words import short_money

NEARLY = 0.8
"""From this share of a cap on, its bar warns."""

_LENGTH = {"daily": "day", "monthly": "month"}


@dataclass(frozen=True, slots=True)
class Line:
    """A budget, and where it is going."""

    status: BudgetStatus
    forecast: Forecast | None
    outlook: str
    tone: str
    """`bad` where the cap is reached, or will be; `warn` where it is near; else empty."""

    @property
    def bar(self) -> Markup | None:
        """What is spent and held, as a part of the cap; None without one."""
        spent, held, limit = self.status.spent, self.status.reserved, self.status.limit
        if limit is None or self.used is None:
            return None
        colour = "bad" if self.used >= 1 else "warn" if self.used >= NEARLY else "good"
        label = f"{short_money(spent)} spent and {short_money(held)} held of {short_money(limit)}"
        parts = [(colour, float(spent)), ("second", float(held))] if limit else [(colour, 1.0)]
        return charts.share(parts, label, of=float(limit) or 1.0)

    @property
    def used(self) -> float | None:
        """What is spent and held of the cap, as a share; None without a cap."""
        limit = self.status.limit
        if limit is None:
            return None
        held = self.status.spent + self.status.reserved
        return held / limit if limit else 1.0


def line(status: BudgetStatus, period: Period, recent: int | None, now: datetime, zone: ZoneInfo) -> Line:
    """Puts together what is known of a budget.

    Args:
        status: as it is now.
        period: the calendar's present one of its window.
        recent: what was spent lately, in nano-dollars; None where that is not known, and nothing is foretold.
        now: the time.
        zone: of the budgets.
    """
    told = None
    # The counters may be of the period that has just ended.
    if recent is not None and status.period == period.name:
        told = forecast(period, ms_from_time(now), spent=status.spent, recent=recent, limit=status.limit)
    return Line(status, told, outlook(status, told, recent is not None, zone), _tone(status, told))


def outlook(status: BudgetStatus, told: Forecast | None, known: bool, zone: ZoneInfo) -> str:
    """Where a budget is going, in words; `known` says whether what was spent lately is."""
    length, limit = _LENGTH[status.window], status.limit
    if limit is not None and status.spent >= limit:
        return "the cap is reached" if limit else "the cap is nothing at all"
    if not status.spent:
        return "nothing spent yet"
    if told is None:
        return f"too early in the {length} to tell" if known else "not known: ClickHouse does not answer"
    if told.reaches_ms is not None:
        return f"at this pace the cap is reached {_when(time_from_ms(told.reaches_ms), status, zone)}"
    of = "" if limit is None else f" of {short_money(limit)}"
    return f"at this pace ends the {length} at {short_money(told.total)}{of}"


def chart(status: BudgetStatus, of: Period, burnt: Burn, told: Forecast | None, now: datetime) -> Markup:
    """The spend through the period against its cap, in dollars."""
    points = [(moment, _usd(spent)) for moment, spent in burnt.points]
    if status.period == of.name and points[-1][0] <= now:
        # What Redis has counted is a little ahead of what is stored.
        points[-1] = (points[-1][0], max(points[-1][1], _usd(status.spent)))
    return charts.burn(
        f"Spend of {title(status)}, {status.period}",
        points,
        start=time_from_ms(of.start_ms),
        end=time_from_ms(of.end_ms),
        unit=lambda usd: short_money(round(usd * NANO_PER_USD)),
        cap=None if status.limit is None else _usd(status.limit),
        forecast=None if told is None else _usd(told.total),
    )


def title(status: BudgetStatus) -> str:
    """`everything, daily`, `content-writer, monthly`, `tenant acme, daily`."""
    whose = {"global": "everything", "agent": status.agent, "tenant": f"tenant {status.tenant}"}[status.scope]
    return f"{whose}, {status.window}"


def _tone(status: BudgetStatus, told: Forecast | None) -> str:
    if status.limit is None:
        return ""
    if status.spent + status.reserved >= status.limit:
        return "bad"
    if told is not None and told.reaches_ms is not None:
        return "warn"
    return "warn" if status.spent + status.reserved >= status.limit * NEARLY else ""


def _when(moment: datetime, status: BudgetStatus, zone: ZoneInfo) -> str:
    at = moment.astimezone(zone)
    day = "" if status.window == "daily" else f"on {at:%A}, {at:%b} {at.day}, "
    return f"{day}at {at:%H:%M} {at.tzname()}"


def _usd(nano: int) -> float:
    return nano / NANO_PER_USD
