"""The time range of a page, as its URL has it: `?window=` with a name, or `?from=` and `?to=`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from urllib.parse import urlencode
from zoneinfo import ZoneInfo

from starlette.exceptions import HTTPException

from breakwater.kernel.pages.tables import TableUrl
from breakwater.kernel.time_window import TimeWindow

WINDOWS = {
    "15m": timedelta(minutes=15),
    "1h": timedelta(hours=1),
    "24h": timedelta(hours=24),
    "7d": timedelta(days=7),
    "30d": timedelta(days=30),
}
YESTERDAY, THIS_MONTH, LAST_MONTH, CUSTOM = "yesterday", "this month", "last month", "custom"
BY_DATA = "by data"
"""For `Visit`: the shortest of the first three that holds what ran within 24 hours."""
_BY_LENGTH = ("15m", "1h", "24h", YESTERDAY, "7d", "30d")
_MONTHS = (THIS_MONTH, LAST_MONTH)
_NOT_KEPT = ("window", "from", "to", "after", "before", "whole")
_LONG = timedelta(days=2)
_LONGEST = timedelta(days=400)
_FEW_MINUTES = timedelta(minutes=5)

Links = list[tuple[str, str, bool]]
"""The same page for each time range: its name, the URL, whether it is the present one."""


@dataclass(frozen=True, slots=True)
class TimeRange:
    """The time range of a page, with the URLs and words for it."""

    name: str
    """One of WINDOWS, or of the four constants after them."""
    window: TimeWindow
    links: Links
    months: Links
    kept: Mapping[str, str]
    """The other parameters of the page's URL, which are kept for every time range."""

    @property
    def query(self) -> dict[str, str]:
        """The parameters that name it in a URL."""
        return {"window": self.name} if self.name != CUSTOM else between(self.window.start, self.window.end)

    @property
    def whole(self) -> dict[str, str]:
        """The page's own query, for a response that has all parts."""
        return {**self.kept, **self.query, "whole": "1"}

    @property
    def words(self) -> str:
        """As part of a sentence: `in the last 24h`."""
        if self.name in WINDOWS:
            return f"in the last {self.name}"
        if self.name != CUSTOM:
            return self.name
        start, end = self._bounds
        return f"from {start} to {end}"

    @property
    def bounds(self) -> str:
        """The exact bounds: it is made of whole steps, and starts a little earlier than its name says."""
        start, end = self._bounds
        until_now = self.name in WINDOWS or self.name == THIS_MONTH
        return f"since {start} UTC" if until_now else f"{start} to {end} UTC"

    @property
    def _bounds(self) -> tuple[str, str]:
        """Start and end, with seconds in a range of a few minutes that does not start and end on one."""
        start, end = self.window.start.astimezone(UTC), self.window.end.astimezone(UTC)
        of = "%b %d %H:%M:%S" if end - start < _FEW_MINUTES and (start.second or end.second) else "%b %d %H:%M"
        return f"{start:{of}}", f"{end:{of}}"

    @property
    def is_long(self) -> bool:
        """True if its sums may take longer than a page should."""
        return self.window.end - self.window.start > _LONG

    @property
    def refresh_s(self) -> int:
        """The interval at which the page refreshes itself. Sums of a week change slowly, and take longer."""
        return 5 if self.name in ("15m", "1h", "24h") else 30

    def executions(self, **filters: str | None) -> str:
        """The URL of the executions that ended in it. Filters that are None are left out."""
        given = {name: value for name, value in filters.items() if value}
        return f"/executions?{urlencode(given | self.query)}"


def time_range_of(address: TableUrl, now: datetime, zone: ZoneInfo, default: str = "24h") -> TimeRange:
    """The time range that the address of a page names.

    Args:
        address: its `from` and `to` count before its `window`; a time without an offset is in UTC.
        now: a time range ends there at the latest, and so it does without `to`.
        zone: where days and months begin.
        default: the name of the time range of an address without these.

    Raises:
        HTTPException: `from` or `to` can't be used; with status 400.
    """
    given = address.query
    name = given.get("window", default)
    if given.get("from") or given.get("to"):
        name, window = CUSTOM, _custom(given.get("from", ""), given.get("to", ""), now)
    elif name == YESTERDAY:
        window = yesterday(now, zone)
    elif name in _MONTHS:
        window = month(now, zone, last=name == LAST_MONTH)
    else:
        name = name if name in WINDOWS else default
        window = TimeWindow.last(WINDOWS[name], now)
    kept = {key: value for key, value in given.items() if key not in _NOT_KEPT}
    return TimeRange(name, window, window_links(address, name, _BY_LENGTH), window_links(address, name, _MONTHS), kept)


def between(start: datetime, end: datetime) -> dict[str, str]:
    """The parameters that name the time between two moments in a URL."""
    return {"from": f"{start.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}", "to": f"{end.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"}


def yesterday(now: datetime, zone: ZoneInfo) -> TimeWindow:
    """The last whole day, as budgets count days."""
    today = now.astimezone(zone).date()
    return TimeWindow.between(_midnight(today - timedelta(days=1), zone), _midnight(today, zone))


def month(now: datetime, zone: ZoneInfo, *, last: bool) -> TimeWindow:
    """This month until now, or the last whole one, as budgets count months."""
    first = now.astimezone(zone).date().replace(day=1)
    if last:
        return TimeWindow.between(_midnight((first - timedelta(days=1)).replace(day=1), zone), _midnight(first, zone))
    return TimeWindow.since(_midnight(first, zone), now)


def window_of(address: TableUrl, default: str = "24h") -> str:
    """The name in `?window=` if it is one of WINDOWS, otherwise the default."""
    wanted = address.query.get("window", default)
    return wanted if wanted in WINDOWS else default


def window_links(address: TableUrl, present: str, names: Iterable[str] = WINDOWS) -> Links:
    """Links from a page to itself, for other time ranges."""
    others = {name: value for name, value in address.query.items() if name not in _NOT_KEPT}
    return [(name, f"{address.path}?{urlencode(others | {'window': name})}", name == present) for name in names]


def _custom(start: str, end: str, now: datetime) -> TimeWindow:
    since, until = _moment("from", start, now), _moment("to", end, now)
    if since >= until or since >= now:
        raise HTTPException(400, "The time range is empty: `from` must be earlier than `to`, and than now.")
    if until - since > _LONGEST:
        raise HTTPException(400, f"The time range is too long: choose at most {_LONGEST.days} days.")
    return TimeWindow.between(since, until) if until < now else TimeWindow.since(since, now)


def _moment(name: str, text: str, now: datetime) -> datetime:
    try:
        moment = datetime.fromisoformat(text).replace(microsecond=0) if text else now
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError):
        raise HTTPException(400, f"`{name}` must be a time such as 2026-11-21T12:00Z, not {text!r}.") from None


def _midnight(day: date, zone: ZoneInfo) -> datetime:
    return datetime.combine(day, time.min, zone).astimezone(UTC)
