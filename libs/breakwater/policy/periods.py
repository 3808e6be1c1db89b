"""The calendar days and months of a budget's time zone."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

from breakwater.contracts.events import Window
from breakwater.contracts.types import ms_from_time, time_from_ms

WINDOWS: tuple[Window, Window] = ("daily", "monthly")


@dataclass(frozen=True, slots=True)
class Period:
    """A calendar day or month: its name (`2026-11-21`, `2026-11`), and from when to when in ms since the epoch."""

    window: Window
    name: str
    start_ms: int
    end_ms: int
    """The first moment that is no longer part of it."""

    def holds(self, moment_ms: int) -> bool:
        """Whether a moment lies in it."""
        return self.start_ms <= moment_ms < self.end_ms


@dataclass(frozen=True, slots=True)
class Periods:
    """The day and the month of one moment."""

    day: Period
    month: Period

    def of(self, window: Window) -> Period:
        """The one of a window."""
        return self.day if window == "daily" else self.month


def period(window: Window, moment: datetime, zone: ZoneInfo) -> Period:
    """The calendar period of a time zone in which a moment lies. Days of 23 and 25 hours are handled by the zone."""
    # Wall-clock arithmetic: it begins and ends at midnight there, whatever the offset is by then.
    midnight = moment.astimezone(zone).replace(hour=0, minute=0, second=0, microsecond=0, fold=0)
    if window == "daily":
        name, first, following = f"{midnight:%Y-%m-%d}", midnight, midnight + timedelta(days=1)
    else:
        first = midnight.replace(day=1)
        name, following = f"{first:%Y-%m}", (first + timedelta(days=32)).replace(day=1)
    return Period(window, name, ms_from_time(first), ms_from_time(following))


def periods_at(moment: datetime, zone: ZoneInfo) -> Periods:
    """The day and the month of a moment."""
    return Periods(period("daily", moment, zone), period("monthly", moment, zone))


def periods_since(earliest: datetime, now: datetime, zone: ZoneInfo) -> tuple[Period, ...]:
    """All days and months that have any moment from `earliest` to `now` in them, the days first, in their order."""
    found: list[Period] = []
    for window in WINDOWS:
        current = period(window, earliest, zone)
        last = period(window, now, zone)
        while current.start_ms < last.start_ms:
            found.append(current)
            current = period(window, time_from_ms(current.end_ms), zone)
        found.append(last)
    return tuple(found)
