"""The pages of breakers: their states and histories, stopped tasks, and the actions on them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import quote, urlencode

from starlette.routing import Route

from breakwater.breakers.contract import BreakerList, BreakerStatus, BreakerTransition
from breakwater.breakers.views import COLUMNS as BREAKERS
from breakwater.breakers.views import ORDER, SHADOWS
from breakwater.identity.pages.operator_actions import Fields, action
from breakwater.identity.pages.rendering import NavigationLink, PageContext, PagePart, fetch_part
from breakwater.identity.pages.visits import NotFound, ReadModels, Visit, page
from breakwater.kernel.columns import Column, columns_of_part
from breakwater.kernel.pages.charts import Series
from breakwater.kernel.pages.tables import PageTable
from breakwater.kernel.pages.time_range import BY_DATA
from breakwater.kernel.time_window import TimeWindow
from breakwater.kernel.types import ms_from_time
from breakwater.limits.contract import StoppedTasks
from breakwater.limits.views import TASKS
from breakwater.records.events import MOST, BreakerOpening, OperatorAction, openings, operator_actions, transitions


@dataclass(frozen=True, slots=True)
class BreakerRow:
    """A row of the list of breakers."""

    status: BreakerStatus
    opening: BreakerOpening | None
    """The latest opening in the time range; None if there was none, or it is unknown."""
    open_ms: int
    openings: int


COLUMNS: tuple[Column[BreakerRow], ...] = (
    *columns_of_part(BREAKERS, lambda row: row.status),
    Column("time open", lambda row: row.open_ms, "duration", name="open_ms"),
    Column("openings", lambda row: row.openings, page=False),
)
ACTIONS: tuple[Column[OperatorAction], ...] = (
    Column("time", lambda action: action.at, "time"),
    Column("operator", lambda action: action.by),
    Column("action", lambda action: action.action),
    Column("target", lambda action: action.task_id or f"{action.agent} on {action.model}"),
    Column("reason", lambda action: action.reason, below=True),
)
OPENINGS: tuple[Column[BreakerOpening], ...] = (
    Column("opened", lambda opening: opening.opened_at, "time"),
    Column("closed", lambda opening: opening.closed_at, "time", missing="not yet"),
    Column("lasted", lambda opening: opening.open_ms, "duration"),
    Column("rule", lambda opening: opening.rule or "by an operator", "words"),
    Column("reason", lambda opening: opening.reason, below=True),
)
CHANGES: tuple[Column[BreakerTransition], ...] = (
    Column("time", lambda change: change.at, "time"),
    Column("from", lambda change: change.from_state, "state"),
    Column("to", lambda change: change.to_state, "state"),
    Column("reason", lambda change: change.reason, below=True),
    Column("by", lambda change: change.by or change.rule, "words"),
    Column("failures in a row", lambda change: change.consecutive_failures, "count"),
)

LINK = NavigationLink("/breakers", "Breakers", "b")


def routes(context: PageContext) -> list[Route]:
    """The routes of these pages."""
    return [
        page(
            context,
            "/breakers",
            "breakers.html",
            view,
            default_range=BY_DATA,
            breaker_list=_breaker_list,
            opened=lambda visit, models: fetch_part(openings(models.analytics, visit.time_range.window, visit.now)),
            actions=lambda visit, models: fetch_part(operator_actions(models.analytics, visit.time_range.window)),
            stopped=lambda _, models: fetch_part(models.api.read(StoppedTasks, "guards")),
        ),
        # The breaker is in the query, because the names of agents and models may contain slashes.
        page(
            context,
            "/breakers/one",
            "breaker.html",
            view_breaker,
            default_range="7d",
            breaker_list=_breaker_list,
            opened=lambda visit, models: fetch_part(
                openings(models.analytics, visit.time_range.window, visit.now, *_agent_and_model(visit))
            ),
            changes=lambda visit, models: fetch_part(
                transitions(models.analytics, visit.time_range.window, *_agent_and_model(visit))
            ),
        ),
        action("/breakers/reset", "breakers/reset", dict[str, Any], _body, _outcome("reset"), _back),
        action("/breakers/isolate", "breakers/isolate", dict[str, Any], _body, _outcome("isolated"), _back),
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


def _breaker_list(_: Visit, models: ReadModels) -> Awaitable[PagePart[BreakerList]]:
    return fetch_part(models.api.read(BreakerList, "breakers"))


def _agent_and_model(visit: Visit) -> tuple[str, str]:
    return visit.get("agent"), visit.get("model")


def view(
    visit: Visit,
    breaker_list: PagePart[BreakerList],
    opened: PagePart[tuple[BreakerOpening, ...]],
    actions: PagePart[tuple[OperatorAction, ...]],
    stopped: PagePart[StoppedTasks],
) -> dict[str, Any]:
    """The values of the page of all breakers."""
    rows = _rows(breaker_list.value.breakers if breaker_list.value else (), opened.value or ())
    tasks = stopped.value.stopped if stopped.value else ()
    return {
        "rows": rows,
        "table": PageTable(visit.address, "breakers", "All breakers", COLUMNS, rows),
        "shadows": breaker_list.value.shadows if breaker_list.value else (),
        "shadow_columns": SHADOWS,
        "actions_table": PageTable(visit.address, "actions", "Operator actions", ACTIONS, actions.value or ()),
        "tasks_table": PageTable(visit.address, "tasks", "Stopped tasks", TASKS, tasks),
        "max_rows": MOST,
    }


def view_breaker(
    visit: Visit,
    breaker_list: PagePart[BreakerList],
    opened: PagePart[tuple[BreakerOpening, ...]],
    changes: PagePart[tuple[BreakerTransition, ...]],
) -> dict[str, Any] | NotFound:
    """The values of the page of a breaker."""
    agent, model = _agent_and_model(visit)
    breakers = breaker_list.value.breakers if breaker_list.value else ()
    status = next((breaker for breaker in breakers if (breaker.agent, breaker.model) == (agent, model)), None)
    is_missing = breaker_list.value and status is None and not changes.value and not changes.problem
    if not agent or not model or is_missing:
        text = f"There is no breaker of agent {agent!r} on model {model!r}, and none changed in this time range."
        return NotFound("Breaker not found", text)
    window = visit.time_range.window
    breaker_openings = opened.value or ()
    return {
        "agent": agent,
        "model": model,
        "breaker": status,
        "openings": OPENINGS,
        "open_ms": sum(opening.in_window_ms for opening in breaker_openings),
        "moments": [window.at(bucket) for bucket in range(window.buckets)],
        "step": timedelta(seconds=window.step_s),
        "series": [Series("open", "bad", _open_per_step(breaker_openings, window, visit.now), "bars")],
        "executions": {"model": model} | ({} if agent == "*" else {"agent": agent}),
        "changes_table": PageTable(visit.address, "changes", "State changes", CHANGES, changes.value or ()),
        "max_rows": MOST,
    }


def _body(fields: Fields) -> dict[str, str]:
    return {"agent": fields.get("agent"), "model": fields.get("model")}


def _outcome(change: str) -> Callable[[Fields, dict[str, Any]], str]:
    def outcome(fields: Fields, result: dict[str, Any]) -> str:
        agent = fields.get("agent")
        owner = "all agents" if agent == "*" else agent
        return f"The breaker of {owner} on {fields.get('model')} was {change}{' already' * ('unchanged' in result)}."

    return outcome


def _back(fields: Fields) -> str:
    return f"/breakers/one?{urlencode(_body(fields))}" if fields.get("from") == "one" else "/breakers"


def _rows(breakers: Sequence[BreakerStatus], opened: Sequence[BreakerOpening]) -> list[BreakerRow]:
    """Makes the rows: the most restrictive states first, then the breakers that were open longest."""
    by_key: dict[tuple[str, str], list[BreakerOpening]] = {}
    for opening in opened:
        by_key.setdefault((opening.agent, opening.model), []).append(opening)
    rows: list[BreakerRow] = []
    for status in breakers:
        openings = by_key.get((status.agent, status.model), [])
        open_ms = sum(opening.in_window_ms for opening in openings)
        rows.append(BreakerRow(status, openings[0] if openings else None, open_ms, len(openings)))
    return sorted(rows, key=lambda row: (ORDER[row.status.state], -row.open_ms, row.status.agent))


def _open_per_step(opened: Sequence[BreakerOpening], window: TimeWindow, now: datetime) -> Sequence[float]:
    """The milliseconds of each step for which a breaker was open."""
    step_ms = window.step_s * 1000
    open_ms = [0] * window.buckets
    for opening in opened:
        start = max(ms_from_time(opening.opened_at), window.start_ms)
        end = min(ms_from_time(opening.closed_at or now), window.end_ms)
        for bucket in range((start - window.start_ms) // step_ms, window.buckets):
            bucket_start = window.start_ms + bucket * step_ms
            if bucket_start >= end:
                break
            open_ms[bucket] += min(end, bucket_start + step_ms) - max(start, bucket_start)
    return open_ms
