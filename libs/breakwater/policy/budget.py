"""Which counters a call is held against, in which period, and which thresholds a new total crosses."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

from pydantic import Field, field_validator

from breakwater.contracts.events import Enforcement, Scope, Window
from breakwater.contracts.types import Message
from breakwater.policy.price import UsdAmount


class Caps(Message):
    """The caps of one scope. Without caps the spend is tracked only."""

    daily_usd: UsdAmount | None = Field(default=None, description="Spend allowed in a calendar day.")
    monthly_usd: UsdAmount | None = Field(default=None, description="Spend allowed in a calendar month.")
    enforcement: Enforcement = Field(
        default="soft",
        description="none: track; soft: alert at the thresholds; hard: refuse calls that might pass the cap.",
    )
    soft_at_percent: tuple[int, ...] = Field(default=(80,), description="Thresholds that raise a soft-cap alert.")

    @field_validator("soft_at_percent")
    @classmethod
    def _percentages(cls, percents: tuple[int, ...]) -> tuple[int, ...]:
        if any(not 1 <= percent <= 100 for percent in percents):
            raise ValueError("thresholds are percentages from 1 to 100")
        return tuple(sorted(set(percents)))

    def limit(self, window: Window) -> int | None:
        """The cap of a window in nano-dollars."""
        return self.daily_usd if window == "daily" else self.monthly_usd


@dataclass(frozen=True, slots=True)
class Counter:
    """One budget that a call is held against."""

    scope: Scope
    agent: str | None
    window: Window
    limit: int | None
    """Nano-dollars; None where there is no cap."""
    enforcement: Enforcement
    soft_at_percent: tuple[int, ...]

    @property
    def key(self) -> str:
        """The scope's name among the counters of a period: `global`, or `agent:<name>`."""
        return self.scope if self.agent is None else f"{self.scope}:{self.agent}"

    @property
    def name(self) -> str:
        """The budget's name: its scope's, and its window's."""
        return f"{self.key}/{self.window}"

    @property
    def hard_limit(self) -> int | None:
        """The cap where it must hold, in nano-dollars."""
        return self.limit if self.enforcement == "hard" else None


def counters(agent: str, agent_caps: Caps, global_caps: Caps) -> tuple[Counter, ...]:
    """The four budgets of an agent's call: global and agent, daily and monthly."""
    windows: tuple[Window, Window] = ("daily", "monthly")
    scopes: tuple[tuple[Scope, str | None, Caps], ...] = (("global", None, global_caps), ("agent", agent, agent_caps))
    return tuple(
        Counter(scope, name, window, caps.limit(window), caps.enforcement, caps.soft_at_percent)
        for scope, name, caps in scopes
        for window in windows
    )


@dataclass(frozen=True, slots=True)
class Period:
    """A calendar day or month: its name (`2026-11-21`, `2026-11`) and its end in milliseconds since the epoch."""

    window: Window
    name: str
    end_ms: int


def period(window: Window, now: datetime, zone: ZoneInfo) -> Period:
    """The calendar period of a time zone in which a moment lies. Days of 23 and 25 hours are handled by the zone."""
    midnight = now.astimezone(zone).replace(hour=0, minute=0, second=0, microsecond=0)
    if window == "daily":
        name = f"{midnight:%Y-%m-%d}"
        following = midnight + timedelta(days=1)
    else:
        first = midnight.replace(day=1)
        name = f"{first:%Y-%m}"
        following = (first + timedelta(days=32)).replace(day=1)
    # Wall-clock arithmetic above, so that the end is midnight there whatever the offset is by then.
    return Period(window, name, int(following.timestamp()) * 1000)


def current_and_next(window: Window, now: datetime, zone: ZoneInfo) -> tuple[Period, Period]:
    """The period of `now` and the one after it; Redis' clock then chooses, not the caller's."""
    current = period(window, now, zone)
    return current, period(window, datetime.fromtimestamp(current.end_ms / 1000, zone), zone)


def reached(counter: Counter, spent: int, *, refused: bool = False) -> tuple[int, ...]:
    """The thresholds (percent, ascending) that a spend in nano-dollars has reached; the cap itself is 100.

    Args:
        counter: the budget.
        spent: nano-dollars.
        refused: the cap has refused a call: it is reached, though the spend stays below it, as a hard cap sees to.
    """
    if not counter.limit or counter.enforcement == "none":
        return ()
    percents = (*(percent for percent in counter.soft_at_percent if percent < 100), 100)
    # In hundredths of the limit, so that no threshold is rounded.
    by_spend = tuple(percent for percent in percents if spent * 100 >= counter.limit * percent)
    return (*by_spend, 100) if refused and 100 not in by_spend else by_spend
