"""The time range of a page: one of `WINDOWS`, or yesterday."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from urllib.parse import urlencode
from zoneinfo import ZoneInfo

from starlette.requests import Request

from breakwater.analytics.window import Window

WINDOWS = {
    "1h": timedelta(hours=1),
    "24h": timedelta(hours=24),
    "7d": timedelta(days=7),
    "30d": timedelta(days=30),
}
YESTERDAY = "yesterday"
_STEP = timedelta(minutes=15)
_BY_LENGTH = ("1h", "24h", YESTERDAY, "7d", "30d")

Links = list[tuple[str, str, bool]]
"""The same page for each time range: its name, the URL, whether it is the present one."""


@dataclass(frozen=True, slots=True)
class TimeRange:
    """A time range, and what a page needs of it."""

    name: str
    window: Window
    links: Links

    @property
    def words(self) -> str:
        """As part of a sentence: `in the last 24h`."""
        return YESTERDAY if self.name == YESTERDAY else f"in the last {self.name}"

    @property
    def bounds(self) -> str:
        """The exact bounds: it is made of whole steps, and starts a little earlier than its name says."""
        start, end = (f"{at.astimezone(UTC):%b %d %H:%M}" for at in (self.window.start, self.window.end))
        return f"{start} to {end} UTC" if self.name == YESTERDAY else f"since {start} UTC"

    @property
    def refresh_s(self) -> int:
        """How often the page refreshes itself. The sums of a week change slowly, and take longer to compute."""
        return 5 if self.name in ("1h", "24h") else 30

    def executions(self, **filters: str | None) -> str:
        """The URL of the executions that ended in it. Filters that are None are left out."""
        given = {name: value for name, value in filters.items() if value}
        return f"/executions?{urlencode(given | {'window': self.name})}"


def time_range_of(request: Request, now: datetime, zone: ZoneInfo) -> TimeRange:
    """The time range in `?window=`; the last 24 hours by default. `zone`: where days begin."""
    if request.query_params.get("window") == YESTERDAY:
        return TimeRange(YESTERDAY, yesterday(now, zone), window_links(request, YESTERDAY, _BY_LENGTH))
    name = window_of(request)
    return TimeRange(name, Window.last(WINDOWS[name], now), window_links(request, name, _BY_LENGTH))


def yesterday(now: datetime, zone: ZoneInfo) -> Window:
    """The last whole day, as budgets count days."""
    today = now.astimezone(zone).date()
    start, end = (datetime.combine(day, time.min, zone).astimezone(UTC) for day in (today - timedelta(days=1), today))
    # Days of 23 and of 25 hours are made of whole steps, too.
    return Window(start, end, int(_STEP.total_seconds()))


def window_of(request: Request, default: str = "24h") -> str:
    """Which of WINDOWS is in `?window=`."""
    wanted = request.query_params.get("window", default)
    return wanted if wanted in WINDOWS else default


def window_links(request: Request, present: str, names: Iterable[str] = WINDOWS) -> Links:
    """Links from a page to itself, for other time ranges."""
    others = {name: value for name, value in request.query_params.items() if name not in ("window", "after", "before")}
    return [(name, f"{request.url.path}?{urlencode(others | {'window': name})}", name == present) for name in names]
