"""Looking for executions: pages of them, and how many there are.

Pages are found by key and not by number, so the last page of a million takes no longer than the first. They are looked
for in slices of time, the nearest first, each 24 times as long as the one before: a page of common ones is found in
a fraction of the table, and rare ones after having read all of it once. Only then are the lines of a page read.

Filters stand in PREWHERE, which is right as explained in `overview.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from datetime import datetime
from decimal import Decimal
from typing import Any, Literal, Self

from breakwater.analytics.client import Analytics
from breakwater.analytics.rows import in_nano
from breakwater.analytics.window import SETTINGS, Window
from breakwater.contracts.types import is_identifier, ms_from_time, time_from_ms

_EQUAL = {
    "status": "status",
    "reason": "reason",
    "model": "ifNull(chosen_model, requested_model)",
    "tenant": "tenant",
    "task_id": "task_id",
    "plan_id": "plan_id",
    "error_kind": "error_kind",
}
_LAST_MS = 4_291_747_199_999
"""The end of 2105, the last year whose times are stored."""

_MOST_DIGITS = 20


@dataclass(frozen=True, slots=True)
class Filters:
    """What is left out restricts nothing."""

    agent: str | None = None
    status: str | None = None
    reason: str | None = None
    model: str | None = None
    """The one that answered, or was asked for where none did."""
    tenant: str | None = None
    task_id: str | None = None
    plan_id: str | None = None
    error_kind: str | None = None
    text: str | None = None
    """An id: whole, which finds it whenever it ended; or its beginning. Or words of an error's message, an output or a
    prompt, in any case, which are looked for in the newest executions only: `search.WORDS_WITHIN`."""
    min_cost: int | None = None
    """In nano-dollars. Those of unknown cost are left out."""
    since: datetime | None = None
    """By when they ended; aware."""
    until: datetime | None = None
    """The first moment that is no part of it."""
    dry_runs: bool = True

    @property
    def start_ms(self) -> int:
        """Milliseconds since the epoch."""
        return 0 if self.since is None else max(0, ms_from_time(self.since))

    @property
    def end_ms(self) -> int:
        """Milliseconds since the epoch, the first that is no part of it."""
        return _LAST_MS if self.until is None else min(_LAST_MS, ms_from_time(self.until))

    def prewhere(self) -> str:
        """What the sorting key decides, as SQL; with `from_ms` and `to_ms` for the times."""
        times = (
            "completed_at >= fromUnixTimestamp64Milli({from_ms:Int64})"
            " AND completed_at < fromUnixTimestamp64Milli({to_ms:Int64})"
        )
        return times if self.agent is None else f"{times} AND agent = {{agent:String}}"

    def where(self) -> str:
        """The rest but for the text, as SQL."""
        parts = [f"{column} = {{{name}:String}}" for name, column in _EQUAL.items() if getattr(self, name) is not None]
        if self.min_cost is not None:
            parts.append("total_cost >= {min_cost:Decimal(18, 9)}")
        if not self.dry_runs:
            parts.append("NOT dry_run")
        return " AND ".join(parts) or "1"

    def parameters(self) -> dict[str, object]:
        """The values of both."""
        given: dict[str, object] = {
            name: value for name in ("agent", *_EQUAL) if (value := getattr(self, name)) is not None
        }
        if self.min_cost is not None:
            given["min_cost"] = f"{Decimal(self.min_cost).scaleb(-9):f}"
        return given


@dataclass(frozen=True, slots=True, order=True)
class Cursor:
    """A place in the list of executions, which is ordered by these two."""

    completed_at: datetime
    execution_id: str

    @property
    def text(self) -> str:
        """As it stands in URLs, where it is to be quoted: the milliseconds of the time, a dot, and the id."""
        return f"{ms_from_time(self.completed_at)}.{self.execution_id}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The cursor of a text.

        Raises:
            ValueError: it is none; the message says what is wrong.
        """
        time, dot, execution_id = text.partition(".")
        if not dot:
            raise ValueError("a page's address must look like 1795255200000.<execution id>; this one has no dot")
        if not (time.isascii() and time.isdigit() and len(time) <= _MOST_DIGITS) or int(time) > _LAST_MS:
            raise ValueError(f"a page's address begins with milliseconds since 1970, and not with {time[:40]!r}")
        if not is_identifier(execution_id):
            raise ValueError("a page's address ends with the id of an execution, and what stands there can't be one")
        return cls(time_from_ms(int(time)), execution_id)


WORDS_WITHIN = 20_000
"""Words are looked for in so many of the newest executions that the other filters leave: their texts are long."""

SHORTEST_MS = 3_600_000
GROWTH = 24

_BY_ID = "startsWith(execution_id, {text:String})"
_BY_WORDS = " OR ".join(
    f"ifNull(positionCaseInsensitiveUTF8({column}, {{text:String}}) > 0, 0)"
    for column in ("error_message", "output", "messages")
)

# Granules may be skipped under FINAL: the id is in the sorting key, so every version of a row has the same one.
_KEYS_OF_ID = f"""
SELECT agent, completed_at, execution_id
FROM executions FINAL
WHERE execution_id = {{text:String}} AND %s
ORDER BY completed_at DESC
LIMIT {{limit:UInt32}}
{SETTINGS}, use_skip_indexes_if_final = 1"""  # noqa: S608  of constants


@dataclass(frozen=True, slots=True)
class ListedExecution:
    """One execution in a list; money in nano-dollars, None where it is unknown."""

    execution_id: str
    agent: str
    tenant: str | None
    task_id: str | None
    plan_id: str | None
    status: str
    reason: str | None
    chosen_model: str | None
    requested_model: str | None
    attempts_count: int
    total_tokens: int
    total_cost: int | None
    wasted_cost: int | None
    cost_basis: str
    duration_ms: int
    completed_at: datetime
    error_kind: str | None
    error_message: str | None
    cache_hit: bool
    dry_run: bool

    @property
    def model(self) -> str | None:
        """The one that answered, or was asked for where none did."""
        return self.chosen_model or self.requested_model


_LINES = f"""
SELECT {", ".join(field.name for field in fields(ListedExecution))}
FROM executions FINAL
PREWHERE agent IN {{agents:Array(String)}}
    AND completed_at IN (SELECT fromUnixTimestamp64Milli(arrayJoin({{times_ms:Array(Int64)}}), 'UTC'))
    AND execution_id IN {{ids:Array(String)}}
ORDER BY completed_at DESC, execution_id DESC
{SETTINGS}"""  # noqa: S608  of constants


@dataclass(frozen=True, slots=True)
class Page:
    """Some of the executions that were looked for, the newest first."""

    lines: tuple[ListedExecution, ...]
    newer: Cursor | None
    """For `before`: the page of those that ended later. None where this is the first."""
    older: Cursor | None
    """For `after`: the page of those that ended earlier. None where this is the last."""


@dataclass(frozen=True, slots=True)
class _Slice:
    from_ms: int
    to_ms: int
    words: bool
    """Whether the texts are looked through."""


async def search(
    analytics: Analytics,
    filters: Filters,
    *,
    after: Cursor | None = None,
    before: Cursor | None = None,
    limit: int = 50,
) -> Page:
    """A page of executions.

    Args:
        analytics: the database.
        filters: what is looked for.
        after: `older` of the page before.
        before: `newer` of the page that comes after.
        limit: how many there are on a page, from 1.

    Raises:
        ValueError: both cursors are given.
        QueryFailed, AnalyticsUnavailable: as `Analytics.query` does.
    """
    if after is not None and before is not None:
        raise ValueError("a page comes after one place or before one, not both")
    if after is None and before is None and (keys := await _of_id(analytics, filters, limit)):
        return Page(await _lines(analytics, keys), None, None)
    keys = await _keys(analytics, filters, after or before, limit + 1, upwards=before is not None)
    more, keys = len(keys) > limit, keys[:limit]
    lines = await _lines(analytics, keys)
    if not lines:
        return Page((), None, None)
    first, last = _cursor(lines[0]), _cursor(lines[-1])
    if before is not None:
        return Page(lines, first if more else None, last)
    return Page(lines, None if after is None else first, last if more else None)


Size = Literal["total_cost", "wasted_cost", "duration_ms", "total_tokens", "attempts_count"]
"""What executions may be sorted by, besides their end."""


async def largest(
    analytics: Analytics, filters: Filters, size: Size, *, smallest: bool = False, limit: int = 50
) -> tuple[ListedExecution, ...]:
    """Those with the largest cost, duration and so on, or with the smallest; those of unknown size come last.

    All that match are read, but for their texts. Raises as `Analytics.query` does.
    """
    floor_ms = await _floor(analytics, filters)
    span = _Slice(max(filters.start_ms, floor_ms), filters.end_ms, words=bool(filters.text))
    sql = (
        f"SELECT agent, completed_at, execution_id {_matching(filters, span)} ORDER BY {size} "
        f"{'ASC' if smallest else 'DESC'} NULLS LAST, completed_at DESC, execution_id DESC LIMIT {limit} {SETTINGS}"
    )
    keys = list((await analytics.query(sql, _parameters(filters, span))).named())
    place = {(key["agent"], key["completed_at"], key["execution_id"]): number for number, key in enumerate(keys)}
    lines = await _lines(analytics, keys)
    return tuple(sorted(lines, key=lambda line: place[line.agent, line.completed_at, line.execution_id]))


async def count(analytics: Analytics, filters: Filters) -> int:
    """How many executions there are, with the same bounds as `search` has. Raises as `Analytics.query` does."""
    of_id = await _of_id(analytics, filters, 1_000)
    if of_id:
        return len(of_id)
    floor_ms = await _floor(analytics, filters)
    spans = [_Slice(filters.start_ms, filters.end_ms, words=False)]
    if filters.text and filters.start_ms < floor_ms:
        spans = [_Slice(filters.start_ms, floor_ms, words=False), _Slice(floor_ms, filters.end_ms, words=True)]
    elif filters.text:
        spans = [_Slice(filters.start_ms, filters.end_ms, words=True)]
    counted = 0
    for span in spans:
        sql = f"SELECT count() {_matching(filters, span)} {SETTINGS}"
        counted += (await analytics.query(sql, _parameters(filters, span))).rows[0][0]
    return counted


async def _of_id(analytics: Analytics, filters: Filters, limit: int) -> list[dict[str, Any]]:
    if not filters.text:
        return []
    agent = "1" if filters.agent is None else "agent = {agent:String}"
    sql = _KEYS_OF_ID % f"{agent} AND {filters.where()}"
    parameters = {**filters.parameters(), "text": filters.text, "limit": limit}
    return list((await analytics.query(sql, parameters)).named())


async def _keys(
    analytics: Analytics, filters: Filters, cursor: Cursor | None, limit: int, *, upwards: bool
) -> list[dict[str, Any]]:
    """The keys of a page, the newest first."""
    whole = _Slice(filters.start_ms, filters.end_ms, words=False)
    found = await analytics.query(
        f"SELECT max(completed_at), count() FROM executions PREWHERE {filters.prewhere()}",  # noqa: S608
        _parameters(filters, whole),
    )
    newest, rows = found.rows[0]
    if not rows:
        return []
    low, high = filters.start_ms, ms_from_time(newest) + 1
    place = ""
    if cursor is not None:
        at_ms = ms_from_time(cursor.completed_at)
        low, high = (max(low, at_ms), high) if upwards else (low, min(high, at_ms + 1))
        than = ">" if upwards else "<"
        place = f"AND (completed_at, execution_id) {than} (fromUnixTimestamp64Milli({{at_ms:Int64}}), {{at_id:String}})"
    order = "ASC" if upwards else "DESC"
    keys = list[dict[str, Any]]()
    for span in _slices(low, high, await _floor(analytics, filters), words=bool(filters.text), upwards=upwards):
        sql = (
            f"SELECT agent, completed_at, execution_id {_matching(filters, span)} {place} "
            f"ORDER BY completed_at {order}, execution_id {order} LIMIT {limit - len(keys)} {SETTINGS}"
        )
        parameters = _parameters(filters, span)
        if cursor is not None:
            parameters |= {"at_ms": ms_from_time(cursor.completed_at), "at_id": cursor.execution_id}
        keys += (await analytics.query(sql, parameters)).named()
        if len(keys) >= limit:
            break
    return keys


async def _floor(analytics: Analytics, filters: Filters) -> int:
    """From when on words are looked for. Without FINAL: what is stored twice makes it a little later at most."""
    if not filters.text:
        return 0
    newest = (
        f"SELECT completed_at FROM executions PREWHERE {filters.prewhere()} WHERE {filters.where()} "  # noqa: S608
        f"ORDER BY completed_at DESC LIMIT {WORDS_WITHIN}"
    )
    whole = _Slice(filters.start_ms, filters.end_ms, words=False)
    found = await analytics.query(f"SELECT min(completed_at) FROM ({newest})", _parameters(filters, whole))  # noqa: S608
    return ms_from_time(found.rows[0][0])


def _slices(low: int, high: int, floor: int, *, words: bool, upwards: bool) -> Iterator[_Slice]:
    """Parts of a span that together are all of it, the nearest to where a page begins first."""
    if words and low < floor < high:
        parts = [_Slice(low, floor, words=False), _Slice(floor, high, words=True)]
    else:
        parts = [_Slice(low, high, words=words and low >= floor)]
    for part in parts if upwards else reversed(parts):
        if part.words:
            # Whole, as reading long texts takes the longer the more often it is begun.
            yield part
            continue
        start, length = (part.from_ms if upwards else part.to_ms), SHORTEST_MS
        while part.from_ms <= start <= part.to_ms and (start < part.to_ms if upwards else start > part.from_ms):
            end = min(start + length, part.to_ms) if upwards else max(start - length, part.from_ms)
            yield _Slice(min(start, end), max(start, end), words=False)
            start, length = end, length * GROWTH


def _matching(filters: Filters, span: _Slice) -> str:
    kept = f"{filters.prewhere()} AND {filters.where()}"
    if not filters.text:
        return f"FROM executions FINAL PREWHERE {kept}"
    if span.words:
        return f"FROM executions FINAL PREWHERE {kept} WHERE ({_BY_ID} OR {_BY_WORDS})"
    return f"FROM executions FINAL PREWHERE {kept} AND {_BY_ID}"


def _parameters(filters: Filters, span: _Slice) -> dict[str, object]:
    text = {"text": filters.text} if filters.text else {}
    return {**filters.parameters(), **text, "from_ms": span.from_ms, "to_ms": span.to_ms}


async def _lines(analytics: Analytics, keys: list[dict[str, Any]]) -> tuple[ListedExecution, ...]:
    if not keys:
        return ()
    parameters = {
        "agents": sorted({key["agent"] for key in keys}),
        "times_ms": sorted({ms_from_time(key["completed_at"]) for key in keys}),
        "ids": [key["execution_id"] for key in keys],
    }
    rows = (await analytics.query(_LINES, parameters)).named()
    lines = (ListedExecution(**in_nano(row, "total_cost", "wasted_cost")) for row in rows)
    # An id that was used again may have ended when another one of the page did: only whole keys are asked for.
    wanted = {(key["agent"], key["completed_at"], key["execution_id"]) for key in keys}
    return tuple(line for line in lines if (line.agent, line.completed_at, line.execution_id) in wanted)


def _cursor(line: ListedExecution) -> Cursor:
    return Cursor(line.completed_at, line.execution_id)


MOST_FACETS = 50

_FACETS = ("agent", "model", "tenant", "reason", "error_kind")
FACETS = f"""
SELECT agent, ifNull(chosen_model, requested_model) AS model, tenant, reason, error_kind, count() AS executions,
    {", ".join(f"grouping({name}) AS by_{name}" for name in _FACETS)}
FROM executions FINAL
PREWHERE completed_at >= fromUnixTimestamp64Milli({{start_ms:Int64}})
    AND completed_at < fromUnixTimestamp64Milli({{end_ms:Int64}})
GROUP BY GROUPING SETS ({", ".join(f"({name})" for name in _FACETS)})
{SETTINGS}"""  # noqa: S608  of constants


@dataclass(frozen=True, slots=True)
class Facets:
    """What can be asked for: each value with how many executions have it, the most frequent first, at most 50."""

    agents: tuple[tuple[str, int], ...]
    models: tuple[tuple[str, int], ...]
    tenants: tuple[tuple[str, int], ...]
    reasons: tuple[tuple[str, int], ...]
    error_kinds: tuple[tuple[str, int], ...]


async def facets(analytics: Analytics, window: Window) -> Facets:
    """What executions of a window have, dry runs included. Raises as `Analytics.query` does."""
    parameters = {"start_ms": window.start_ms, "end_ms": window.end_ms}
    rows = list((await analytics.query(FACETS, parameters)).named())

    def seen(name: str) -> tuple[tuple[str, int], ...]:
        # `grouping` is 0 for the one column that a row is a group of.
        found = [(row[name], row["executions"]) for row in rows if row[f"by_{name}"] == 0 and row[name] is not None]
        return tuple(sorted(found, key=lambda one: (-one[1], one[0]))[:MOST_FACETS])

    return Facets(*(seen(name) for name in _FACETS))
