"""Events as lines that a person reads: when, what, whose, how it went, and the figures. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any

from breakwater.cli import formats
from breakwater.cli.output import Cell, state

KINDS = ("attempts", "executions", "breakers", "budgets", "guards", "alerts", "progress")

_SINGULAR = {kind: kind.removesuffix("s") if kind != "progress" else kind for kind in KINDS}
_KIND_WIDTH = max(len(name) for name in _SINGULAR.values())
_AGENT_WIDTH = 16
_STATE_WIDTH = 15


@dataclass(frozen=True, slots=True)
class Told:
    """An event as it came."""

    subject: str
    data: bytes
    headers: Mapping[str, str]

    @property
    def kind(self) -> str:
        """The second token of the subject, such as `attempts`."""
        return self.subject.split(".", 2)[1]


def cells(kind: str, event: Mapping[str, Any], now: datetime) -> tuple[Cell, ...]:
    """The line of an event."""
    at = event.get("completed_at") or event.get("at")
    moment = formats.clock(datetime.fromisoformat(at), now) if isinstance(at, str) else ""
    how, figures = _KINDS.get(kind, _other)(event)
    agent = str(event.get("agent") or event.get("scope") or "-")
    name, text = how
    return (
        (f"{moment}  ", "dim"),
        f"{_SINGULAR.get(kind, kind):<{_KIND_WIDTH}}  {agent:<{_AGENT_WIDTH}}  ",
        state(name, f"{text:<{_STATE_WIDTH}}"),
        "  " + "  ".join(figure for figure in figures if figure),
    )


def cloud_event(told: Told, event: Mapping[str, Any]) -> dict[str, Any]:
    """An event with its envelope, as CloudEvents' JSON format has it."""
    header = told.headers.get
    made_up = f"{told.subject}/{event.get('state', '')}/{event.get('at', '')}"
    return {
        "specversion": "1.0",
        "id": header("ce-id") or made_up,
        "type": header("ce-type") or f"breakwater.{_SINGULAR.get(told.kind, told.kind).capitalize()}",
        "source": header("ce-source") or "breakwater",
        "time": header("ce-time") or event.get("at"),
        "subject": told.subject,
        "data": event,
    }


_Parts = tuple[tuple[str, str], list[str]]
"""The state, with the text that is shown in its colour, and the figures."""


def _attempt(event: Mapping[str, Any]) -> _Parts:
    outcome = str(event["outcome"])
    cause = "" if event["cause"] == "first" else f"({event['cause']})"
    figures = [event["model"], cause, formats.duration(event["duration_ms"]), _cost(event.get("cost"), event)]
    return (outcome, outcome), [*figures, _error(event)]


def _execution(event: Mapping[str, Any]) -> _Parts:
    status, count, error = str(event["status"]), event["attempts_count"], _error(event)
    return (status, status), [
        event.get("chosen_model") or event.get("requested_model") or "",
        "dry run" if event.get("dry_run") else f"{count} attempt{'' if count == 1 else 's'}",
        formats.duration(event["duration_ms"]),
        _cost(event.get("total_cost"), event),
        str(event["reason"]) if event.get("reason") and not error.startswith(str(event["reason"])) else "",
        error,
        event["execution_id"],
    ]


def _breaker(event: Mapping[str, Any]) -> _Parts:
    to = str(event["to_state"])
    return (to, to), [event["model"], f"was {event['from_state']}:", event["reason"]]


def _guard(event: Mapping[str, Any]) -> _Parts:
    kind, task, tenant = str(event.get("kind", "")), event.get("task_id"), event.get("tenant")
    whose = f"task {task}" + (f" of {tenant}" if tenant else "") if task else ""
    return (kind, kind), [whose, str(event.get("reason", ""))]


def _budget(event: Mapping[str, Any]) -> _Parts:
    kind, limit = str(event["kind"]), event.get("limit")
    scope = str(event["scope"])
    whose = {"agent": f"agent:{event.get('agent')}", "tenant": f"tenant:{event.get('tenant')}"}.get(scope, scope)
    when = f"{whose}/{event['window']} {event['period']}"
    if kind in {"raised", "raise_ended", "repaired"}:
        was, now = event.get("previous"), event["total"] if kind == "repaired" else limit
        change = f"{formats.dollars(was)} is now {formats.dollars(now)}" if was is not None and now is not None else ""
        return (kind, kind), [when, change, str(event.get("reason") or "")]
    spent = formats.dollars(event["total"]) + (f" of {formats.dollars(limit)}" if limit is not None else "")
    refuses = kind == "hard_cap" and event["enforcement"] == "hard"
    # A hard cap refuses what does not fit before it is spent.
    percent = event["threshold_percent"]
    passed = "" if refuses and Decimal(event["total"]) < Decimal(limit or 0) else f"passed {percent} %"
    return (kind, kind), [when, spent, passed, "calls that do not fit are refused" if refuses else ""]


def _alert(event: Mapping[str, Any]) -> _Parts:
    change, count = str(event.get("change", "")), event.get("count", 1)
    times = f"{count:,} times" if count > 1 else ""
    status = str(event.get("status", ""))
    by = event.get("resolved_by") if status == "resolved" else event.get("acknowledged_by")
    # An incident that was acknowledged is acknowledged; of the other changes the status tells more.
    stands = "" if status == change else status
    return (event["severity"], event["event"]), [
        change,
        stands,
        f"by {by}" if by and change == status else "",
        times,
        event["title"],
        event.get("incident_id", ""),
    ]


def _progress(event: Mapping[str, Any]) -> _Parts:
    attempt = event.get("attempt")
    name = str(event["state"])
    return (name, name), [
        event.get("model") or "",
        f"attempt {attempt}" if attempt else "",
        event.get("detail") or "",
        event["execution_id"],
    ]


def _other(event: Mapping[str, Any]) -> _Parts:
    return ("", ""), [str(event.get("reason") or event.get("title") or "")]


_KINDS: Mapping[str, Callable[[Mapping[str, Any]], _Parts]] = {
    "attempts": _attempt,
    "executions": _execution,
    "breakers": _breaker,
    "guards": _guard,
    "budgets": _budget,
    "alerts": _alert,
    "progress": _progress,
}


def _cost(cost: str | None, event: Mapping[str, Any]) -> str:
    if cost is None:
        # A call that was never made has no cost to be unknown.
        return "" if event.get("short_circuited") else "cost unknown"
    return formats.dollars(cost)


def _error(event: Mapping[str, Any]) -> str:
    error = event.get("error")
    if not error:
        return ""
    status = f" {error['status_code']}" if error.get("status_code") else ""
    first_line = str(error["message"]).splitlines()[0] if error["message"] else ""
    return f"{error['kind']}{status}: {first_line}"
