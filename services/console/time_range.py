"""Which stretch of time a page tells of: one of `WINDOWS`, or yesterday."""

from __future__ import annotations

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

OFTEN_S, SELDOM_S = 5, 30
"""How often a page renews itself. What a week or more sums up changes slowly, and takes longer to sum up."""


@dataclass(frozen=True, slots=True)
class TimeRange:
    """A stretch of time, and what a page needs of it."""

    name: str
    window: Window
    links: list[tuple[str, str, bool]]
    """The same page for each other one: `window_links`."""

    @property
    def words(self) -> str:
        """When it is, within a sentence."""
        return YESTERDAY if self.name == YESTERDAY else f"in the last {self.name}"

    @property
    def bounds(self) -> str:
        """When it really begins, as its steps are whole: a little before what its name says."""
        start, end = (f"{at.astimezone(UTC):%b %d %H:%M}" for at in (self.window.start, self.window.end))
        return f"{start} to {end} UTC" if self.name == YESTERDAY else f"since {start} UTC"

    @property
    def renew_s(self) -> int:
        """How often the page renews itself."""
        return OFTEN_S if self.name in ("1h", "24h") else SELDOM_S

    def executions(self, **filters: str | None) -> str:
        """The address of the executions that ended in it, with these filters; one that is None restricts nothing."""
        given = {name: value for name, value in filters.items() if value}
        return f"/executions?{urlencode(given | {'window': self.name})}"


def time_range_of(request: Request, now: datetime, zone: ZoneInfo) -> TimeRange:
    """The one that a page is asked for: `?window=`; 24 hours where it is none of them. `zone`: where days are days."""
    wanted = request.query_params.get("window")
    name = YESTERDAY if wanted == YESTERDAY else window_of(request)
    links = window_links(request, name)
    others = {key: value for key, value in request.query_params.items() if key not in ("window", "after", "before")}
    address = f"{request.url.path}?{urlencode(others | {'window': YESTERDAY})}"
    # By length: an hour, a day, then that other day.
    links.insert(2, (YESTERDAY, address, name == YESTERDAY))
    return TimeRange(name, yesterday(now, zone) if name == YESTERDAY else Window.last(WINDOWS[name], now), links)


def yesterday(now: datetime, zone: ZoneInfo) -> Window:
    """The last whole day, as budgets count days."""
    today = now.astimezone(zone).date()
    start, end = (datetime.combine(day, time.min, zone).astimezone(UTC) for day in (today - timedelta(days=1), today))
    # A day of 23 or 25 hours has whole steps too.
    return Window(start, end, int(_STEP.total_seconds()))


def window_of(request: Request, default: str = "24h") -> str:
    """Which of WINDOWS a page is asked for."""
    wanted = request.query_params.get("window", default)
    return wanted if wanted in WINDOWS else default


def window_links(request: Request, here: str) -> list[tuple[str, str, bool]]:
    """The same page for each of WINDOWS: its text, its address, whether it is this one."""
    others = {name: value for name, value in request.query_params.items() if name not in ("window", "after", "before")}
    return [(name, f"{request.url.path}?{urlencode(others | {'window': name})}", name == here) for name in WINDOWS]
