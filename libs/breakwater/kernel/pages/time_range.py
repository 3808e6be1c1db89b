"""The time range that the URL of a page selects: `?window=` with a name, or `?from=` and `?to=`."""

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
YESTERDAY = "yesterday"
THIS_MONTH = "this month"
LAST_MONTH = "last month"
CUSTOM = "custom"
BY_DATA = "by data"
"""A default of `Visit`: the shortest of the first three windows that contains all runs of the last 24 hours."""
_BY_LENGTH = ("15m", "1h", "24h", YESTERDAY, "7d", "30d")
_MONTHS = (THIS_MONTH, LAST_MONTH)
_REPLACED = ("window", "from", "to", "after", "before", "whole")
"""Parameters that a link to another time range does not keep."""
_LONG = timedelta(days=2)
_LONGEST = timedelta(days=400)
_FEW_MINUTES = timedelta(minutes=5)

Links = list[tuple[str, str, bool]]
"""Links to the same page with other time ranges: name, URL, and True for the present one."""


@dataclass(frozen=True, slots=True)
class TimeRange:
    """The time range of a page, with its URLs and words."""

    name: str
    """A name of WINDOWS, or one of the four constants below them."""
    window: TimeWindow
    links: Links
    months: Links
    other_parameters: Mapping[str, str]
    """The other parameters of the page's URL, which links to other time ranges keep."""

    @property
    def query(self) -> dict[str, str]:
        """The parameters that select the time range in a URL."""
        return {"window": self.name} if self.name != CUSTOM else between(self.window.start, self.window.end)

    @property
    def full_page_query(self) -> dict[str, str]:
        """The query of the same page with all parts in one response."""
        return {**self.other_parameters, **self.query, "whole": "1"}

    @property
    def words(self) -> str:
        """The time range as a part of a sentence: `in the last 24h`."""
        if self.name in WINDOWS:
            return f"in the last {self.name}"
        if self.name != CUSTOM:
            return self.name
        start, end = self._bounds
        return f"from {start} to {end}"

    @property
    def bounds(self) -> str:
        """The exact bounds. They are a little earlier than the name says, because a time range has whole steps."""
        start, end = self._bounds
        until_now = self.name in WINDOWS or self.name == THIS_MONTH
        return f"since {start} UTC" if until_now else f"{start} to {end} UTC"

    @property
    def _bounds(self) -> tuple[str, str]:
        """The start and the end in UTC; with seconds for a few minutes that begin or end within a minute."""
        start = self.window.start.astimezone(UTC)
        end = self.window.end.astimezone(UTC)
        time_format = "%b %d %H:%M:%S" if end - start < _FEW_MINUTES and (start.second or end.second) else "%b %d %H:%M"
        return f"{start:{time_format}}", f"{end:{time_format}}"

    @property
    def is_long(self) -> bool:
        """Returns True if the sums of the time range may take longer than a page should."""
        return self.window.end - self.window.start > _LONG

    @property
    def refresh_s(self) -> int:
        """The seconds between refreshes of the page; more for a week, whose sums change slowly and take longer."""
        return 5 if self.name in ("15m", "1h", "24h") else 30

    def executions(self, **filters: str | None) -> str:
        """The URL of the executions that ended in the time range. Filters that are None are omitted."""
        set_filters = {name: value for name, value in filters.items() if value}
        return f"/executions?{urlencode(set_filters | self.query)}"


def time_range_of(address: TableUrl, now: datetime, zone: ZoneInfo, default: str = "24h") -> TimeRange:
    """Parses the time range in the URL of a page.

    Args:
        address: the URL. Its `from` and `to` take precedence over `window`; a time without an offset is in UTC.
        now: the present time, at which a time range ends at the latest, and without `to`.
        zone: the time zone in which days and months begin.
        default: name of the time range if the URL selects none.

    Raises:
        HTTPException: with status 400, if `from` or `to` is invalid.
    """
    query = address.query
    name = query.get("window", default)
    if query.get("from") or query.get("to"):
        name = CUSTOM
        window = _custom(query.get("from", ""), query.get("to", ""), now)
    elif name == YESTERDAY:
        window = yesterday(now, zone)
    elif name in _MONTHS:
        window = month(now, zone, last=name == LAST_MONTH)
    else:
        name = name if name in WINDOWS else default
        window = TimeWindow.last(WINDOWS[name], now)
    other_parameters = {key: value for key, value in query.items() if key not in _REPLACED}
    return TimeRange(
        name, window, window_links(address, name, _BY_LENGTH), window_links(address, name, _MONTHS), other_parameters
    )


def between(start: datetime, end: datetime) -> dict[str, str]:
    """The parameters that select the time between two moments in a URL."""
    return {"from": f"{start.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}", "to": f"{end.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"}


def yesterday(now: datetime, zone: ZoneInfo) -> TimeWindow:
    """The last complete day, in the time zone of budgets."""
    today = now.astimezone(zone).date()
    return TimeWindow.between(_midnight(today - timedelta(days=1), zone), _midnight(today, zone))


def month(now: datetime, zone: ZoneInfo, *, last: bool) -> TimeWindow:
    """Returns this month until now, or the last complete one, in the time zone of budgets."""
    first = now.astimezone(zone).date().replace(day=1)
    if last:
        return TimeWindow.between(_midnight((first - timedelta(days=1)).replace(day=1), zone), _midnight(first, zone))
    return TimeWindow.since(_midnight(first, zone), now)


def window_of(address: TableUrl, default: str = "24h") -> str:
    """The name in `?window=` if it is one of WINDOWS, otherwise the default."""
    name = address.query.get("window", default)
    return name if name in WINDOWS else default


def window_links(address: TableUrl, present: str, names: Iterable[str] = WINDOWS) -> Links:
    """Makes links from a page to itself, for other time ranges."""
    other_parameters = {name: value for name, value in address.query.items() if name not in _REPLACED}
    return [
        (name, f"{address.path}?{urlencode(other_parameters | {'window': name})}", name == present) for name in names
    ]


def _custom(start: str, end: str, now: datetime) -> TimeWindow:
    since = _moment("from", start, now)
    until = _moment("to", end, now)
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
