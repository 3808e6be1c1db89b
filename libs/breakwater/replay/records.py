"""Reads recorded jobs from ClickHouse, in the order in which they began, a few thousand at a time.

The tables lack some of what the log has: the program that called, if no API key did, and the figures of refusals.
"""

from __future__ import annotations

import asyncio
import gc
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeVar, cast

from breakwater.breakers.contract import BreakerTransition
from breakwater.jobs.contract.execution import Attempt, ErrorInfo, Execution, Reason
from breakwater.kernel.clickhouse.client import Analytics, statements
from breakwater.kernel.types import time_from_ms
from breakwater.limits.contract import GuardEvent, LimitUnit, Window
from breakwater.limits.rules.budget import periods_at
from breakwater.limits.rules.scopes import CallNames, Dimensions
from breakwater.records.rows import alert_of, budget_of, limit_event_of
from breakwater.replay.rules.counters import CountedPlace
from breakwater.replay.rules.engine import Replay, ReplayedEvent, ReplayedJob, ReplayFindings
from breakwater.replay.rules.history import Changes, LoggedAttempt, Policy, RecordedJob, in_order
from breakwater.replay.rules.limits import with_all_limits
from breakwater.replay.rules.renames import Renames, changes_with, job_with
from breakwater.replay.rules.world import World

EventT = TypeVar("EventT", Attempt, Execution, ErrorInfo)

SQL = statements(__file__)

MOST_JOBS = 5_000
"""The number of jobs that are read at a time, unless more begin within a minute."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of time, by the starts of jobs.

    Attributes:
        since: its beginning.
        until: its end, which is not of it.
        over: a time at which all jobs that were started in it had ended.
        jobs: how many were.
    """

    since: datetime
    until: datetime
    over: datetime
    jobs: int


async def stretches(analytics: Analytics, since: datetime, until: datetime) -> list[Stretch]:
    """Divides a stretch of time into parts with a few thousand jobs each. Raises as `Analytics.query`."""
    result = await analytics.query(SQL["minutes"], {"since": since, "until": until})
    parts: list[Stretch] = []
    minutes = cast(Sequence[tuple[datetime, int, int]], result.rows)
    begin = since
    jobs = longest_ms = 0
    if not minutes:
        return []
    for (minute, count, length_ms), following in zip(minutes, [*(row[0] for row in minutes[1:]), until], strict=True):
        del minute
        jobs += count
        longest_ms = max(longest_ms, length_ms)
        if jobs >= MOST_JOBS or following == until:
            parts.append(Stretch(begin, following, following + timedelta(milliseconds=longest_ms + 1), jobs))
            begin = following
            jobs = longest_ms = 0
    return parts


async def read_stretch(analytics: Analytics, stretch: Stretch) -> list[RecordedJob]:
    """Returns the jobs of a part, in the order in which they began. Raises as `Analytics.query`."""
    times = {"since": stretch.since, "until": stretch.until, "over": stretch.over}
    executions = await analytics.query(SQL["executions"], times)
    rows = await analytics.query(SQL["attempts"], times)
    by_job: dict[str, list[Sequence[Any]]] = defaultdict(list)
    for row in rows.rows:
        by_job[row[_EXECUTION_ID]].append(row)
    return in_order(_job(row, by_job.get(row[0], ())) for row in executions.rows)


async def replay_records(
    analytics: Analytics,
    policy: Policy,
    before: Policy,
    since: datetime,
    until: datetime,
    on_end: Callable[[ReplayedJob], None],
    on_event: Callable[[ReplayedEvent], None] | None = None,
    renames: Renames | None = None,
) -> tuple[ReplayFindings, Changes]:
    """Replays the jobs that were started in a stretch of time, a few thousand at a time.

    Args:
        analytics: the record.
        policy: the policy to try.
        before: the policy that the jobs ran under.
        since: the beginning.
        until: the end.
        on_end: is called with each job that has ended.
        on_event: is called with each event of the replay; None to keep them in the findings.
        renames: the names of agents in both policies, by those in the record.

    Returns:
        The findings without events, and what the services decided then.

    Raises:
        QueryError, AnalyticsUnavailableError: as `Analytics.query`.
    """
    renames = renames or {}
    changes = changes_with(renames, await read_changes(analytics, since, until))
    world = World()
    used = await read_used(analytics, policy, changes, since, renames)
    replay = Replay(policy, before, changes, world, on_end=on_end, on_event=on_event, used_before=used)

    def add(jobs: Sequence[RecordedJob]) -> None:
        world.add(logged.attempt for job in jobs for logged in job.attempts)
        replay.run(jobs)

    with uncollected():
        replaying: Awaitable[None] | None = None
        for stretch in await stretches(analytics, since, until):
            # ClickHouse reads the next jobs while these are replayed.
            jobs = in_order((job_with(renames, job) for job in await read_stretch(analytics, stretch)), changes.guards)
            if replaying is not None:
                await replaying
            replaying = asyncio.ensure_future(asyncio.to_thread(add, jobs))
        if replaying is not None:
            await replaying
        return replay.finish(), changes


@contextmanager
def uncollected() -> Generator[None]:
    """Stops the collector of cycles, which would look at all jobs again and again: they have none."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


async def read_used(
    analytics: Analytics, policy: Policy, changes: Changes, since: datetime, renames: Renames | None = None
) -> dict[CountedPlace, int]:
    """Returns what was used of each limit in its period before a moment. Raises as `Analytics.query`.

    Of limits in total, only what the table still has.
    """
    renames = renames or {}
    limits = with_all_limits(policy.limits, changes.limits)
    used: dict[CountedPlace, int] = defaultdict(int)
    dimensions = Dimensions(limits.dimensions)
    periods = periods_at(since, policy.zone)
    windows: set[Window] = {dimension.window for dimension in dimensions.all}
    for window in windows:
        counted = periods.of(window)
        begin = max(time_from_ms(counted.start_ms), _EARLIEST)
        times = {"begin": begin, "begin_of_calls": begin - LONGEST_WAIT, "since": since}
        result = await analytics.query(SQL["used"], times)
        for *names, tags, deployment, spent, tokens, calls in result.rows:
            recorded_agent, tenant, model, provider, key, user, team = names
            agent: str = renames.get(recorded_agent) or recorded_agent
            of_call = CallNames(agent, tenant, model, provider, key, user, team, tuple(tags.items()), deployment)
            amounts: Mapping[LimitUnit, int] = {"usd": spent, "tokens": tokens, "requests": calls}
            for counter in limits.counters(of_call, dimensions):
                if counter.window == window and counter.effective is not None:
                    used[counted.name, counter.key, counter.unit] += amounts[counter.unit]
    return dict(used)


_EARLIEST = datetime(2000, 1, 1, tzinfo=UTC)
"""A time before all records, which ClickHouse can store."""

LONGEST_WAIT = timedelta(days=1)
"""The most time between the start of an attempt and its reservation."""


async def read_changes(analytics: Analytics, since: datetime, until: datetime) -> Changes:
    """Returns what the services decided in a stretch of time. Raises as `Analytics.query`."""
    times = {"since": since, "until": until}

    async def rows(name: str) -> AsyncGenerator[dict[str, Any]]:
        result = await analytics.query(SQL[name], times)
        for row in result.named_rows():
            yield row

    return Changes(
        [BreakerTransition.model_validate(_without_nulls(row)) async for row in rows("transitions")],
        [budget_of(**row) async for row in rows("budgets")],
        [GuardEvent.model_validate(row) async for row in rows("guards")],
        [alert_of(**row) async for row in rows("alerts")],
        [limit_event_of(**row) async for row in rows("limits")],
        [BreakerTransition.model_validate(_without_nulls(row)) async for row in rows("earlier_transitions")],
    )


def _without_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row without the columns that rows of earlier versions lack."""
    return {name: value for name, value in row.items() if value is not None}


_REFUSED_REASONS: Mapping[str, Reason] = {
    "breaker_open": "breaker_open",
    "budget_exceeded": "budget_exceeded",
    "guard_tripped": "guard_tripped",
    "rate_limit": "rate_limited",
}
"""The reasons of refusals, by the kinds of their errors; all others are `error`."""


@lru_cache(maxsize=4096)
def _error(*cells: Any) -> ErrorInfo | None:
    """Returns the error of the cells for it; None if there is none. Many calls fail with the same one."""
    if cells[0] is None:
        return None
    return _message(ErrorInfo, {**_ERROR_DEFAULTS, **dict(zip(_ERROR_FIELDS, cells, strict=True))})


def _log_entry(row: Sequence[Any], following: Sequence[Any] | None) -> LoggedAttempt:
    """Returns the attempt of a row, without the checks that it passed when it was recorded.

    Args:
        row: the row.
        following: the row of the job's next attempt, which says whether the model was tried again; None without one.
    """
    sequence, at_ms, asked_ms = row[-3:]
    values = _ATTEMPT_DEFAULTS.copy()
    values.update(zip(_ATTEMPT_FIELDS, row, strict=False))
    error = values["error"] = None if row[_ERROR_KIND] is None else _error(*row[_ERROR_KIND:-3])
    if error is not None and values["short_circuited"]:
        values["refused_reason"] = _REFUSED_REASONS.get(error.kind, "error")
    elif error is not None and following is not None:
        is_same = following[_MODEL] == row[_MODEL]
        values["tried_again"] = is_same and following[_CAUSE] != "redeployment"
    return LoggedAttempt(sequence, at_ms, asked_ms, _message(Attempt, values))


def _attempts(chain: Sequence[str], rows: Sequence[Sequence[Any]]) -> tuple[LoggedAttempt, ...]:
    """Returns a job's attempts, and says of a refusal whether it ended the chain, which the table does not."""
    attempts = [_log_entry(row, following) for row, following in pairwise((*rows, None)) if row is not None]
    last = attempts[-1] if attempts else None
    if last is not None and last.attempt.short_circuited:
        is_at_last = bool(chain) and chain[-1] == last.attempt.model
        ended = last.attempt.model_copy(update={"ends_chain": not is_at_last})
        attempts[-1] = last._replace(attempt=ended)
    return tuple(attempts)


def _job(row: Sequence[Any], attempt_rows: Sequence[Sequence[Any]]) -> RecordedJob:
    """Returns the job of a row and those of its attempts, without the checks that it passed when it was recorded."""
    values = _EXECUTION_DEFAULTS.copy()
    values.update(zip(_EXECUTION_FIELDS, row, strict=False))
    values["fallback_chain"] = tuple(values["fallback_chain"])
    values["own_rules"] = tuple(values["own_rules"])
    values["error"] = _error(*row[-6:])
    attempts = _attempts(values["fallback_chain"], attempt_rows)
    values["attempts"] = tuple([logged.attempt for logged in attempts])
    return RecordedJob(_message(Execution, values), attempts)


def _message(model: type[EventT], values: dict[str, Any]) -> EventT:
    """Makes a message of valid values for exactly its fields; unlike `of_valid`, it does not note which were set."""
    message = object.__new__(model)
    object.__setattr__(message, "__dict__", values)
    object.__setattr__(message, "__pydantic_fields_set__", _NONE_SET)
    object.__setattr__(message, "__pydantic_extra__", None)
    object.__setattr__(message, "__pydantic_private__", None)
    return message


_NONE_SET: set[str] = set()


def _defaults(model: type[Attempt | Execution | ErrorInfo]) -> dict[str, Any]:
    return {
        name: None if field.is_required() else field.get_default(call_default_factory=True)
        for name, field in model.model_fields.items()
    }


def _fields(statement: str) -> tuple[str, ...]:
    """Returns the columns of a statement before those of the error, which are fields of a message."""
    columns = statement.partition("error_kind")[0].removeprefix("SELECT").replace("\n", " ").strip(" ,").split(",")
    return tuple(column.split()[-1] for column in columns)


_ERROR_DEFAULTS = _defaults(ErrorInfo)
_ERROR_FIELDS = ("kind", "class_", "message", "status_code", "retryable", "hash")
_ATTEMPT_DEFAULTS = _defaults(Attempt)
_ATTEMPT_FIELDS = _fields(SQL["attempts"])
_EXECUTION_DEFAULTS = _defaults(Execution)
_EXECUTION_FIELDS = _fields(SQL["executions"])
_ERROR_KIND = len(_ATTEMPT_FIELDS)
_EXECUTION_ID, _MODEL, _CAUSE = map(_ATTEMPT_FIELDS.index, ("execution_id", "model", "cause"))
"""The places of columns in a row of attempts."""
