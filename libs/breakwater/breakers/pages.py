"""Breakers: the state and the history of each, isolating and resetting them; and stopped tasks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import quote, urlencode

from starlette.routing import Route

from breakwater.breakers.contract import BreakerList, BreakerStatus, StoppedTasks
from breakwater.breakers.views import COLUMNS as BREAKERS
from breakwater.breakers.views import ORDER, TASKS
from breakwater.identity.pages.operator_actions import Fields, action
from breakwater.identity.pages.pages import Fetched, PageContext, fetched
from breakwater.identity.pages.visits import NotFound, ReadModels, Visit, page
from breakwater.jobs.contract.events import BreakerTransition
from breakwater.kernel.columns import Column, lifted
from breakwater.kernel.pages.charts import Series
from breakwater.kernel.pages.tables import PageTable
from breakwater.kernel.pages.time_range import BY_DATA
from breakwater.kernel.time_window import TimeWindow
from breakwater.kernel.types import ms_from_time
from breakwater.records.events import MOST, Opening, OperatorAction, openings, operator_actions, transitions


@dataclass(frozen=True, slots=True)
class BreakerRow:
    """One breaker in the list."""

    status: BreakerStatus
    opening: Opening | None
    """The latest in the time range; None if there was none, or if that is unknown."""
    open_ms: int
    openings: int


COLUMNS: tuple[Column[BreakerRow], ...] = (
    *lifted(BREAKERS, lambda row: row.status),
    Column("time open", lambda row: row.open_ms, "duration", name="open_ms"),
    Column("openings", lambda row: row.openings, page=False),
)
ACTIONS: tuple[Column[OperatorAction], ...] = (
    Column("time", lambda one: one.at, "time"),
    Column("operator", lambda one: one.by),
    Column("action", lambda one: one.what),
    Column("target", lambda one: one.task_id or f"{one.agent} on {one.model}"),
    Column("reason", lambda one: one.reason, below=True),
)
OPENINGS: tuple[Column[Opening], ...] = (
    Column("opened", lambda one: one.opened_at, "time"),
    Column("closed", lambda one: one.closed_at, "time", missing="not yet"),
    Column("lasted", lambda one: one.open_ms, "duration"),
    Column("rule", lambda one: one.rule or "by an operator", "words"),
    Column("reason", lambda one: one.reason, below=True),
)
CHANGES: tuple[Column[BreakerTransition], ...] = (
    Column("time", lambda one: one.at, "time"),
    Column("from", lambda one: one.from_state, "state"),
    Column("to", lambda one: one.to_state, "state"),
    Column("reason", lambda one: one.reason, below=True),
    Column("by", lambda one: one.by or one.rule, "words"),
    Column("failures in a row", lambda one: one.consecutive_failures, "count"),
)


def routes(context: PageContext) -> list[Route]:
    """The routes of these pages."""
    return [
        page(
            context,
            "/breakers",
            "breakers.html",
            view,
            default_range=BY_DATA,
            known=_known,
            opened=lambda visit, models: fetched(openings(models.analytics, visit.time_range.window, visit.now)),
            actions=lambda visit, models: fetched(operator_actions(models.analytics, visit.time_range.window)),
            stopped=lambda _, models: fetched(models.api.read(StoppedTasks, "guards")),
        ),
        # In the query, as the names of agents and models may contain slashes.
        page(
            context,
            "/breakers/one",
            "breaker.html",
            view_one,
            default_range="7d",
            known=_known,
            opened=lambda visit, models: fetched(
                openings(models.analytics, visit.time_range.window, visit.now, *_named(visit))
            ),
            changes=lambda visit, models: fetched(
                transitions(models.analytics, visit.time_range.window, *_named(visit))
            ),
        ),
        action("/breakers/reset", "breakers/reset", dict[str, Any], _body, _was("reset"), _back),
        action("/breakers/isolate", "breakers/isolate", dict[str, Any], _body, _was("isolated"), _back),
        action(
            "/breakers/end-hold",
            "breakers/reset",
            dict[str, Any],
            _body,
            lambda fields, _: f"The hold of {fields.get('model')} has ended: calls are let through again.",
            lambda fields: f"/agents/{quote(fields.get('agent'), safe='')}",
        ),
        action(
            "/breakers/tasks/reset",
            "guards/reset",
            dict[str, Any],
            lambda fields: {"task_id": fields.get("task_id"), "tenant": fields.get("tenant") or None},
            lambda fields, _: f"The task {fields.get('task_id')} may continue: its counts are reset.",
            lambda _: "/breakers",
            approval=True,
        ),
    ]


def _known(_: Visit, models: ReadModels) -> Awaitable[Fetched[BreakerList]]:
    return fetched(models.api.read(BreakerList, "breakers"))


def _named(visit: Visit) -> tuple[str, str]:
    return visit.get("agent"), visit.get("model")


def view(
    visit: Visit,
    known: Fetched[BreakerList],
    opened: Fetched[tuple[Opening, ...]],
    actions: Fetched[tuple[OperatorAction, ...]],
    stopped: Fetched[StoppedTasks],
) -> dict[str, Any]:
    """The page of all breakers."""
    rows = _rows(known.value.breakers if known.value else (), opened.value or ())
    tasks = stopped.value.stopped if stopped.value else ()
    return {
        "rows": rows,
        "table": PageTable(visit.address, "breakers", "All breakers", COLUMNS, rows),
        "acts": PageTable(visit.address, "actions", "Operator actions", ACTIONS, actions.value or ()),
        "tasks": PageTable(visit.address, "tasks", "Stopped tasks", TASKS, tasks),
        "most": MOST,
    }


def view_one(
    visit: Visit,
    known: Fetched[BreakerList],
    opened: Fetched[tuple[Opening, ...]],
    changes: Fetched[tuple[BreakerTransition, ...]],
) -> dict[str, Any] | NotFound:
    """The page of one breaker."""
    agent, model = _named(visit)
    listed = known.value.breakers if known.value else ()
    status = next((one for one in listed if (one.agent, one.model) == (agent, model)), None)
    if not agent or not model or (known.value and status is None and not changes.value and not changes.problem):
        text = f"There is no breaker of agent {agent!r} on model {model!r}, and none changed in this time range."
        return NotFound("Breaker not found", text)
    period, its_openings = visit.time_range.window, opened.value or ()
    return {
        "agent": agent,
        "model": model,
        "breaker": status,
        "openings": OPENINGS,
        "open_ms": sum(one.in_window_ms for one in its_openings),
        "moments": [period.at(bucket) for bucket in range(period.buckets)],
        "step": timedelta(seconds=period.step_s),
        "series": [Series("open", "bad", _open_per_step(its_openings, period, visit.now), "bars")],
        "executions": {"model": model} | ({} if agent == "*" else {"agent": agent}),
        "changes_table": PageTable(visit.address, "changes", "State changes", CHANGES, changes.value or ()),
        "most": MOST,
    }


def _body(fields: Fields) -> dict[str, str]:
    return {"agent": fields.get("agent"), "model": fields.get("model")}


def _was(done: str) -> Callable[[Fields, dict[str, Any]], str]:
    def outcome(fields: Fields, result: dict[str, Any]) -> str:
        agent = fields.get("agent")
        whose = "all agents" if agent == "*" else agent
        return f"The breaker of {whose} on {fields.get('model')} was {done}{' already' * ('unchanged' in result)}."

    return outcome


def _back(fields: Fields) -> str:
    return f"/breakers/one?{urlencode(_body(fields))}" if fields.get("from") == "one" else "/breakers"


def _rows(breakers: Sequence[BreakerStatus], opened: Sequence[Opening]) -> list[BreakerRow]:
    """First those that let no call through, then those that were open longest."""
    by_key: dict[tuple[str, str], list[Opening]] = {}
    for one in opened:
        by_key.setdefault((one.agent, one.model), []).append(one)
    rows: list[BreakerRow] = []
    for status in breakers:
        its = by_key.get((status.agent, status.model), [])
        rows.append(BreakerRow(status, its[0] if its else None, sum(one.in_window_ms for one in its), len(its)))
    return sorted(rows, key=lambda row: (ORDER[row.status.state], -row.open_ms, row.status.agent))


def _open_per_step(opened: Sequence[Opening], period: TimeWindow, now: datetime) -> Sequence[float]:
    """Milliseconds of each step for which one breaker was open."""
    step_ms, open_ms = period.step_s * 1000, [0] * period.buckets
    for one in opened:
        start = max(ms_from_time(one.opened_at), period.start_ms)
        end = min(ms_from_time(one.closed_at or now), period.end_ms)
        for bucket in range((start - period.start_ms) // step_ms, period.buckets):
            begins = period.start_ms + bucket * step_ms
            if begins >= end:
                break
            open_ms[bucket] += min(end, begins + step_ms) - max(start, begins)
    return open_ms
