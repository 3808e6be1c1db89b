"""Search for executions: one by its id, pages of them or of their runs, their number, and those of plans.

Pages are found by key and not by number, so the last page of a million takes no longer than the first. They are looked
for in slices of time, the nearest first, each 24 times as long as the one before: a page of common ones is found in
a fraction of the table, and rare ones after having read all of it once. Only then are the lines of a page read. A run
is where the last of its steps is that match.

Statements are in `search.sql`. Filters are in PREWHERE, which is right as `figures.sql` explains. All functions raise
as `Analytics.query` does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import Any, Generic, Literal, NamedTuple, Self, TypeVar

from breakwater.jobs.contract.execution import Execution, ExecutionSummary, RunSummary
from breakwater.jobs.contract.plans import PlanChange
from breakwater.jobs.contract.submission import PlanJob
from breakwater.kernel.clickhouse.client import Analytics, statements
from breakwater.kernel.time_window import TimeWindow
from breakwater.kernel.types import is_identifier, ms_from_time, time_from_ms
from breakwater.records.rows import attempt_of, execution_of

Line = TypeVar("Line", ExecutionSummary, RunSummary)

SQL = statements(__file__)

_LAST_MS = 4_291_747_199_999
"""The end of 2105, the last year whose times are stored."""

_MAX_DIGITS = 20


async def find_execution(analytics: Analytics, execution_id: str) -> Execution | None:
    """The record of an execution with its attempts, or None. Without one of this id, the latest of a job with this id.

    An id that was used again after the bus forgot it has more than one record: this is the last one, with the attempts
    of all of them.
    """
    parameters = {"execution_id": execution_id}
    records = await analytics.read(execution_of, SQL["one_execution"], parameters)
    for record in records or await analytics.read(execution_of, SQL["one_of_job"], parameters):
        parameters = {"execution_id": record.execution_id}
        attempts = await analytics.read(attempt_of, SQL["its_attempts"], parameters)
        error = record.error
        for refused in (attempt.error for attempt in attempts if attempt.short_circuited):
            # Only the attempt of a refusal has the figures.
            if error is not None and refused is not None and refused.message.startswith(error.message):
                error = error.model_copy(update={"message": refused.message})
        return record.model_copy(update={"attempts": attempts, "error": error})
    return None


_CONDITIONS = {
    "agent": "agent = {agent:String}",
    "status": "status = {status:String}",
    "reason": "reason = {reason:String}",
    "model": "ifNull(chosen_model, requested_model) = {model:String}",
    "tenant": "tenant = {tenant:String}",
    "user": "user = {user:String}",
    "team": "team = {team:String}",
    "task_id": "(task_id = {task_id:String} OR task_key = {task_id:String})",
    "plan_id": "(plan_id = {plan_id:String} OR plan_key = {plan_id:String})",
    "run_id": "run_id = {run_id:String}",
    "error_kind": "error_kind = {error_kind:String}",
    "min_cost": "total_cost >= {min_cost:Decimal(18, 9)}",
}
"""The SQL of each filter. Unused ones are left out: ClickHouse takes time even for conditions that always hold."""
_WITHIN = "completed_at >= {from:DateTime64(3, 'UTC')} AND completed_at < {to:DateTime64(3, 'UTC')}"
_BY_ID = "(startsWith(execution_id, {text:String}) OR startsWith(job_id, {text:String}))"
_BY_WORDS = """
    ifNull(positionCaseInsensitiveUTF8(error_message, {text:String}) > 0, 0)
    OR ifNull(positionCaseInsensitiveUTF8(output, {text:String}) > 0, 0)
    OR ifNull(positionCaseInsensitiveUTF8(messages, {text:String}) > 0, 0)"""


@dataclass(frozen=True, slots=True)
class Filters:
    """The filters of a search. A filter that is None restricts nothing."""

    agent: str | None = None
    status: str | None = None
    reason: str | None = None
    model: str | None = None
    """The model that answered; if none did, the model that was called."""
    tenant: str | None = None
    user: str | None = None
    team: str | None = None
    task_id: str | None = None
    plan_id: str | None = None
    run_id: str | None = None
    error_kind: str | None = None
    text: str | None = None
    """An id: whole, which finds it whenever it ended; or its beginning. Or words of an error's message, an output or a
    prompt, in any case, which are looked for in the newest executions only: `search.WORDS_WITHIN`."""
    min_cost: int | None = None
    """The minimum cost in nano-dollars; executions of unknown cost do not match."""
    since: datetime | None = None
    """By the end of the execution; aware."""
    until: datetime | None = None
    """The end of the time; executions that end at this moment do not match."""
    dry_runs: bool = True

    def span(self) -> _Span:
        """The span from `since` to `until`."""
        from_ms = 0 if self.since is None else max(0, ms_from_time(self.since))
        return _Span(from_ms, _LAST_MS if self.until is None else min(_LAST_MS, ms_from_time(self.until)))

    def conditions(self) -> str:
        """The conditions of all filters but the time and the text, as SQL."""
        sql_conditions = [sql for name, sql in _CONDITIONS.items() if getattr(self, name) is not None]
        return " AND ".join(sql_conditions if self.dry_runs else [*sql_conditions, "NOT dry_run"]) or "1"

    def matching(self, span: _Span) -> tuple[str, str]:
        """The conditions in PREWHERE and in WHERE. Long texts are read only of rows that pass the others."""
        prewhere = f"{_WITHIN} AND {self.conditions()}"
        if span.words:
            return prewhere, f"{_BY_ID} OR {_BY_WORDS}"
        return f"{prewhere} AND {_BY_ID}" if self.text else prewhere, "1"

    def matching_later(self) -> tuple[str, str]:
        """The same of the executions after a span, to the moment `end`; words are looked for from `floor` on."""
        texts = f"{_BY_ID} OR completed_at >= {{floor:DateTime64(3, 'UTC')}} AND ({_BY_WORDS})" if self.text else "1"
        return self.conditions(), texts

    def parameters(self, span: _Span, **placeholders: object) -> dict[str, object]:
        """The values of a statement's placeholders."""
        named = {name: value for name in (*_CONDITIONS, "text") if (value := getattr(self, name)) is not None}
        if self.min_cost is not None:
            named["min_cost"] = f"{Decimal(self.min_cost).scaleb(-9):f}"
        return {**named, "from": time_from_ms(span.from_ms), "to": time_from_ms(span.to_ms), **placeholders}


class _Span(NamedTuple):
    """A stretch of time, in milliseconds since the epoch, without its end."""

    from_ms: int
    to_ms: int
    words: bool = False
    """True if the texts are searched, and not only the ids."""


@dataclass(frozen=True, slots=True, order=True)
class Cursor:
    """A place in the list of executions, which is ordered by these two fields."""

    completed_at: datetime
    execution_id: str

    @property
    def text(self) -> str:
        """The cursor as part of a URL, yet to be quoted: the milliseconds of the time, a dot, and the id."""
        return f"{ms_from_time(self.completed_at)}.{self.execution_id}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses a cursor. Raises ValueError with a message for the user."""
        time, dot, execution_id = text.partition(".")
        if not dot:
            raise ValueError("a page cursor must look like 1795255200000.<execution id>; this one has no dot")
        if not (time.isascii() and time.isdigit() and len(time) <= _MAX_DIGITS) or int(time) > _LAST_MS:
            raise ValueError(f"a page cursor begins with milliseconds since 1970, not with {time[:40]!r}")
        if not is_identifier(execution_id):
            raise ValueError("a page cursor ends with the id of an execution, and its end is not a valid id")
        return cls(time_from_ms(int(time)), execution_id)


WORDS_WITHIN = 20_000
"""Words are looked for in so many of the newest executions that the other filters leave: their texts are long."""

SHORTEST_MS = 3_600_000
GROWTH = 24


@dataclass(frozen=True, slots=True)
class Page(Generic[Line]):
    """A page of the matching executions or runs, the newest first."""

    lines: tuple[Line, ...]
    newer: Cursor | None = None
    """The cursor for `before`: the page of those that ended later. None on the first page."""
    older: Cursor | None = None
    """The cursor for `after`: the page of those that ended earlier. None on the last page."""


_KeyKind = Literal["keys", "runs"]
_Key = tuple[str, datetime, str]
"""The agent, the end and the id of one execution only, as an id may be used again. Or a run, and the end and the id of
its last step that matches."""

_COLUMNS = ", ".join(ExecutionSummary.model_fields)
_LINES = SQL["lines"] % _COLUMNS
_STEPS = SQL["steps"] % _COLUMNS


async def search(
    analytics: Analytics,
    filters: Filters,
    *,
    after: Cursor | None = None,
    before: Cursor | None = None,
    limit: int = 50,
) -> Page[ExecutionSummary]:
    """A page of executions.

    Args:
        analytics: the database.
        filters: what is looked for.
        after: `older` of the page before.
        before: `newer` of the page that comes after.
        limit: how many there are on a page, from 1.

    Raises:
        ValueError: both cursors are given.
    """
    return await _page(analytics, filters, "keys", _lines, after, before, limit)


async def search_runs(
    analytics: Analytics,
    filters: Filters,
    *,
    after: Cursor | None = None,
    before: Cursor | None = None,
    limit: int = 50,
) -> Page[RunSummary]:
    """A page of the runs that have a matching execution. The arguments are those of `search`."""
    return await _page(analytics, filters, "runs", _runs, after, before, limit)


async def _page(
    analytics: Analytics,
    filters: Filters,
    kind: _KeyKind,
    read: Callable[[Analytics, Sequence[_Key]], Awaitable[tuple[Line, ...]]],
    after: Cursor | None,
    before: Cursor | None,
    limit: int,
) -> Page[Line]:
    if after is not None and before is not None:
        raise ValueError("a page comes either after or before a cursor, not both")
    if after is None and before is None and (keys := await _of_id(analytics, filters, limit, kind)):
        return Page(await read(analytics, keys))
    keys = await _keys(analytics, filters, after or before, limit + 1, kind, upwards=before is not None)
    more = len(keys) > limit
    keys = sorted(keys[:limit], key=lambda key: key[1:], reverse=True)
    lines = await read(analytics, keys)
    if not lines:
        return Page(())
    first, last = (Cursor(*key[1:]) for key in (keys[0], keys[-1]))
    if before is not None:
        return Page(lines, first if more else None, last)
    return Page(lines, None if after is None else first, last if more else None)


SortColumn = Literal["total_cost", "wasted_cost", "duration_ms", "total_tokens", "attempts_count"]
"""A column that executions may be sorted by instead of their end."""


async def largest(
    analytics: Analytics, filters: Filters, size: SortColumn, *, smallest: bool = False, limit: int = 50
) -> tuple[ExecutionSummary, ...]:
    """The executions with the largest cost, duration and so on, or with the smallest; unknown sizes come last.

    All that match are read, but for their texts.
    """
    span = (await _parts(analytics, filters, filters.span()))[-1]
    parameters = filters.parameters(span, size=size, sign=1 if smallest else -1, limit=limit)
    return await _lines(analytics, (await analytics.query(SQL["largest"] % filters.matching(span), parameters)).rows)


async def largest_runs(
    analytics: Analytics, filters: Filters, size: SortColumn, *, smallest: bool = False, limit: int = 50
) -> tuple[RunSummary, ...]:
    """Returns what `largest` does for runs: by the sum over their matching steps, or by the time that they span."""
    span = (await _parts(analytics, filters, filters.span()))[-1]
    size_sql = "dateDiff('millisecond', min(queued_at), max(completed_at))" if size == "duration_ms" else f"sum({size})"
    parameters = filters.parameters(span, sign=1 if smallest else -1, limit=limit)
    sql = SQL["largest_runs"] % (*filters.matching(span), size_sql)
    return await _runs(analytics, (await analytics.query(sql, parameters)).rows)


async def count(analytics: Analytics, filters: Filters) -> int:
    """The number of executions, with the same bounds as `search` has."""
    if of_id := await _of_id(analytics, filters, 1_000, "keys"):
        return len(of_id)
    parts = await _parts(analytics, filters, filters.span())
    queries = [(SQL["count"] % filters.matching(part), filters.parameters(part)) for part in parts]
    return sum([(await analytics.query(*query)).rows[0][0] for query in queries])


MAX_STEPS = 1_000


async def steps(analytics: Analytics, run_id: str) -> tuple[ExecutionSummary, ...]:
    """The executions of a run in the order in which they were queued, at most `MAX_STEPS`."""
    parameters = {"run_id": run_id, "limit": MAX_STEPS}
    return await analytics.read(ExecutionSummary.model_construct, _STEPS, parameters)


async def _of_id(analytics: Analytics, filters: Filters, limit: int, kind: _KeyKind) -> Sequence[_Key]:
    if not filters.text:
        return ()
    sql = SQL[f"{kind}_of_id"]
    sql %= (filters.conditions(),) * sql.count("%s")
    parameters = filters.parameters(filters.span(), limit=limit)
    return (await analytics.query(sql, parameters)).rows


async def _keys(
    analytics: Analytics, filters: Filters, cursor: Cursor | None, limit: int, kind: _KeyKind, *, upwards: bool
) -> Sequence[_Key]:
    """The keys of a page, the nearest to the cursor first; without a cursor, the newest first."""
    whole_span = filters.span()
    of_agent = "1" if filters.agent is None else _CONDITIONS["agent"]
    newest, rows = (await analytics.query(SQL["newest"] % of_agent, filters.parameters(whole_span))).rows[0]
    if not rows:
        return ()
    low = whole_span.from_ms
    high = ms_from_time(newest) + 1
    end = time_from_ms(high)
    at_ms, at_id = (high, "") if cursor is None else (ms_from_time(cursor.completed_at), cursor.execution_id)
    low, high = (max(low, at_ms), high) if upwards else (low, min(high, at_ms + 1))
    keys = list[_Key]()
    parts = await _parts(analytics, filters, _Span(low, high))
    place: dict[str, Any] = {
        "at": time_from_ms(at_ms),
        "at_id": at_id,
        "end": end,
        "floor": time_from_ms(parts[-1].from_ms),
    }
    statement = SQL[f"{kind}_{'upwards' if upwards else 'downwards'}"]
    for part in parts if upwards else reversed(parts):
        # A search for words does not slice its part: every query on long texts has a high fixed cost.
        for span in [part] if part.words else _slices(part, upwards=upwards):
            while True:
                parameters = filters.parameters(span, limit=limit, **place)
                matched_keys: Sequence[_Key] = (
                    await analytics.query(statement % filters.matching(span), parameters)
                ).rows
                later = (
                    await _later(analytics, filters, span, place, matched_keys, upwards=upwards)
                    if kind == "runs"
                    else set[str]()
                )
                keys += [key for key in matched_keys if key[0] not in later]
                if len(keys) >= limit:
                    return keys[:limit]
                if len(matched_keys) < limit:
                    break
                # The runs that were left out make room for the next keys.
                place |= {"at": matched_keys[-1][1], "at_id": matched_keys[-1][2]}
    return keys


async def _later(
    analytics: Analytics,
    filters: Filters,
    span: _Span,
    place: Mapping[str, Any],
    keys: Sequence[_Key],
    *,
    upwards: bool,
) -> set[str]:
    """The runs that have a later matching step: they belong on the page of that step."""
    to = time_from_ms(span.to_ms)
    placeholders = {**place, "later": to if upwards else min(to, place["at"])}
    sql = SQL["runs_later"] % filters.matching_later()
    later = set[str]()
    for begin in range(0, len(keys), _IDS_AT_ONCE):
        ids = [key[0] for key in keys[begin : begin + _IDS_AT_ONCE]]
        later |= {
            row[0] for row in (await analytics.query(sql, filters.parameters(span, runs=ids, **placeholders))).rows
        }
    return later


async def _parts(analytics: Analytics, filters: Filters, span: _Span) -> list[_Span]:
    """A span; where there is a text, the part of it where only ids are compared, and then the newest executions."""
    if not filters.text:
        return [span]
    # Without FINAL: rows that are stored twice only make the part a little shorter.
    parameters = filters.parameters(filters.span(), within=WORDS_WITHIN)
    ((floor,),) = (await analytics.query(SQL["floor"] % f"{_WITHIN} AND {filters.conditions()}", parameters)).rows
    middle = min(max(span.from_ms, ms_from_time(floor)), span.to_ms)
    parts = _Span(span.from_ms, middle), _Span(middle, span.to_ms, words=True)
    return [part for part in parts if part.from_ms < part.to_ms] or [span]


def _slices(span: _Span, *, upwards: bool) -> Iterator[_Span]:
    """The consecutive parts of a span, the nearest to the page's start first."""
    start, end, _ = span
    length = SHORTEST_MS
    while start < end:
        if upwards:
            cut = min(start + length, end)
            yield _Span(start, cut)
            start = cut
        else:
            cut = max(end - length, start)
            yield _Span(cut, end)
            end = cut
        length *= GROWTH


async def _runs(analytics: Analytics, keys: Sequence[_Key]) -> tuple[RunSummary, ...]:
    """The summaries of runs, in the order of their keys."""
    ids = [key[0] for key in keys]
    runs: dict[str, RunSummary] = {}
    for begin in range(0, len(ids), _IDS_AT_ONCE):
        parameters = {"runs": ids[begin : begin + _IDS_AT_ONCE]}
        summaries = await analytics.read(RunSummary.model_construct, SQL["run_summaries"], parameters)
        runs |= {run.run_id: run for run in summaries}
    return tuple(runs[run_id] for run_id in ids if run_id in runs)


async def _lines(analytics: Analytics, keys: Sequence[_Key]) -> tuple[ExecutionSummary, ...]:
    """The summaries of executions, in the order of their keys."""
    if not keys:
        return ()
    agents, times, ids = (set(column) for column in zip(*keys, strict=True))
    parameters = {"agents": sorted(agents), "times_ms": sorted(map(ms_from_time, times)), "ids": sorted(ids)}
    rows = await analytics.read(ExecutionSummary.model_construct, _LINES, parameters)
    # Compares whole keys, because an id that was used again may have ended at the same moment as another of the page.
    lines = {(line.agent, line.completed_at, line.execution_id): line for line in rows}
    return tuple(lines[key] for key in keys if key in lines)


MAX_FACETS = 50


@dataclass(frozen=True, slots=True)
class Facets:
    """The values to filter by, each with its number of executions: the most frequent first, at most `MAX_FACETS`."""

    agents: tuple[tuple[str, int], ...]
    models: tuple[tuple[str, int], ...]
    tenants: tuple[tuple[str, int], ...]
    reasons: tuple[tuple[str, int], ...]
    error_kinds: tuple[tuple[str, int], ...]


async def facets(analytics: Analytics, window: TimeWindow) -> Facets:
    """The facets of the executions in a window, dry runs included."""
    rows = await analytics.read(dict[str, Any], SQL["facets"], {"start": window.start, "end": window.end})

    def values_of(facet: str) -> tuple[tuple[str, int], ...]:
        values = ((row[facet[:-1]], row["executions"]) for row in rows if row["facet"] == facet)
        counted_values = [(value, number) for value, number in values if value is not None]
        return tuple(sorted(counted_values, key=lambda counted: (-counted[1], counted[0]))[:MAX_FACETS])

    return Facets(*map(values_of, ("agents", "models", "tenants", "reasons", "error_kinds")))


_IDS_AT_ONCE = 200


@dataclass(slots=True)
class EndedJobs:
    """The ended jobs of a plan."""

    plan_id: str | None = None
    """The plan as its caller named it; None without an ended job."""
    jobs: list[PlanJob] = field(default_factory=list[PlanJob])


async def ended_jobs(analytics: Analytics, plan_keys: Sequence[str]) -> dict[str, EndedJobs]:
    """The ended jobs of plans, by plan."""
    jobs_by_plan = {plan_key: EndedJobs() for plan_key in plan_keys}
    for start in range(0, len(plan_keys), _IDS_AT_ONCE):
        plans = list(plan_keys[start : start + _IDS_AT_ONCE])
        for row in await analytics.read(dict[str, Any], SQL["plan_jobs"], {"plans": plans}):
            plan = jobs_by_plan[row["plan_key"]]
            plan.plan_id = row["plan_id"]
            plan.jobs.append(PlanJob.model_validate(row))
    return jobs_by_plan


async def plan_changes(analytics: Analytics, plan_keys: Sequence[str]) -> dict[str, list[PlanChange]]:
    """The recorded changes of plans, by plan."""
    changes_by_plan: dict[str, list[PlanChange]] = {plan_key: [] for plan_key in plan_keys}
    for start in range(0, len(plan_keys), _IDS_AT_ONCE):
        plans = list(plan_keys[start : start + _IDS_AT_ONCE])
        for change in await analytics.read(PlanChange, SQL["plan_changes"], {"plans": plans}):
            changes_by_plan[change.plan_key].append(change)
    return changes_by_plan


async def newest_plans(analytics: Analytics, limit: int) -> dict[str, datetime]:
    """The keys of the plans of the last 30 days, each with its latest end of a job, announcement or refusal."""
    return dict((await analytics.query(SQL["newest_plans"], {"limit": limit})).rows)
