"""Documents that the HTTP API returns, of a small plane that is healthy unless a test says otherwise.

The command line and the console get the same ones from the API's stub, and the tests of the views parse them.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from breakwater.kernel.types import format_time
from tests.cli.api_stub import Stub

Document = dict[str, Any]

AT = "2026-11-21T10:00:00.000Z"


def health(agent: str, state: str = "healthy", *models: Document) -> Document:
    return {
        "agent_id": agent,
        "health": state,
        "health_reason": f"it is {state}",
        "consecutive_failures": 0,
        "last_failure_at": None,
        "last_success_at": AT,
        "circuit_open_until": None,
        "models": list(models) or [model("gpt-4.1")],
    }


def model(name: str, breaker: str | None = "closed", state: str = "healthy") -> Document:
    return {
        "model": name,
        "provider": "openai",
        "health": state,
        "health_reason": f"it is {state}",
        "breaker": breaker,
        "consecutive_failures": 0,
        "last_failure_at": None,
        "last_success_at": AT,
        "circuit_open_until": None,
    }


def breaker(
    agent: str = "writer", model: str = "gpt-4.1", state: str = "closed", reason: str | None = None, **fields: Any
) -> Document:
    return {
        "agent": agent,
        "model": model,
        "state": state,
        "health": "healthy" if state == "closed" else "unhealthy",
        "health_reason": f"breaker {state}",
        "reason": reason,
        "since": AT,
        "open_until": None,
        "probe_until": None,
        "consecutive_failures": 0,
        "total_failures": 0,
        "unique_errors": 0,
        "last_failure_at": None,
        "last_success_at": None,
        "version": 1,
        **fields,
    }


def stopped_task(task_id: str = "t1", **fields: Any) -> Document:
    return {
        "task_id": task_id,
        "task_key": task_id,
        "tenant": "acme",
        "agent": "writer",
        "execution_id": "e9",
        "rule": "max_cost",
        "reason": "$10.50 spent (limit: $10.00)",
        "since": AT,
        **fields,
    }


def budget(
    name: str = "global/daily", spent: str = "1", limit: str | None = "5", enforcement: str = "hard", **fields: Any
) -> Document:
    scope, _, window = name.rpartition("/")
    kind, _, owner = scope.partition(":")
    return {
        "budget": name,
        "scope": kind,
        "agent": owner if kind == "agent" else None,
        "tenant": owner if kind == "tenant" else None,
        "window": window,
        "period": "2026-11-21" if window == "daily" else "2026-11",
        "enforcement": enforcement,
        "limit": limit,
        "raised": None,
        "spent": spent,
        "reserved": "0",
        "remaining": None,
        "calls": 1,
        "calls_of_unknown_cost": 0,
        "resets_at": format_time(datetime.now(UTC) + timedelta(hours=5)),
        "estimate": None,
        **fields,
    }


def limit(scope: str = "key:acme-bot", per: str | None = "month", used: str | None = "5", **fields: Any) -> Document:
    """A limit of 20 USD, set by the API."""
    unit = fields.get("unit", "usd")
    return {
        "id": f"{scope}.{unit}" + (f".{per}" if per else ""),
        "source": "api",
        "scope": scope,
        "unit": unit,
        "amount": "20.000000000",
        "usd": "20.000000000" if unit == "usd" else None,
        "per": per,
        "action": "refuse",
        "thresholds": [50, 80, 100],
        "until": None,
        "used": used,
        "reserved": None if used is None else "1.000000000",
        "remaining": None if used is None else f"{19 - float(used):.9f}",
        "resets_at": format_time(datetime.now(UTC) + timedelta(days=12, hours=5)),
        "raised": None,
        "shadowed_by": None,
        "by": "ops",
        "reason": "pilot customer",
        "at": "2026-11-21T10:00:00.000Z",
        **fields,
    }


def limit_event(limit: Document, kind: str = "deleted") -> Document:
    return {
        "event_id": "e1",
        "kind": kind,
        "limit_id": limit["id"],
        "scope": limit["scope"],
        "before": None,
        "after": None,
        "raised": None,
        "by": "ops",
        "reason": "over",
        "at": "2026-11-21T10:00:00.000Z",
    }


def reconciled(budget: str = "global/daily", **fields: Any) -> Document:
    return {
        "budget": budget,
        "period": "2026-11-21",
        "counted": "8.412300000",
        "recorded": "8.412300000",
        "stored": "8.000000000",
        "logged": "0.412300000",
        "unrecorded": "0.000000000",
        "difference": "0.000000000",
        "counted_calls": 12,
        "recorded_calls": 12,
        **fields,
    }


def incident(number: int = 1, severity: str = "critical", status: str = "firing", **fields: Any) -> Document:
    return {
        "alert_id": f"alert_{number}_1",
        "incident_id": f"inc_{number}",
        "key": f"breaker_open/writer/{number}",
        "change": "opened",
        "status": status,
        "event": "breaker_open",
        "severity": severity,
        "highest_severity": severity,
        "agent": "writer",
        "title": "writer is stopped",
        "text": "It failed 3 times in a row.",
        "payload": {},
        "count": 1,
        "version": 1,
        "opened_at": AT,
        "last_at": AT,
        "source_id": "writer#1",
        "at": AT,
        **fields,
    }


def undelivered(dead_letter_id: int = 17, **fields: Any) -> Document:
    return {
        "dead_letter_id": dead_letter_id,
        "channel": "ops",
        "alert_id": "alert_1",
        "title": "writer is stopped",
        "error": "ops: the receiver answered 500 (tried 12 times)",
        "at": AT,
        "replayed": False,
        **fields,
    }


def dead_letter(number: int = 7, **fields: Any) -> Document:
    return {
        "dead_letter_id": number,
        "kind": "job",
        "reason": "error",
        "agent": "writer",
        "execution_id": "e/1",
        "error": "the provider answered 500",
        "at": AT,
        "replayable": True,
        "why_not": None,
        "replayed_as": None,
        "replay_status": None,
        "dismissed_by": None,
        "dismissed_at": None,
        **fields,
    }


def dead_letter_details(number: int = 7, **fields: Any) -> Document:
    return {
        **dead_letter(number),
        "stream": "JOBS",
        "subject": "bw.jobs.writer",
        "sequence": 4711,
        "headers": {"Nats-Msg-Id": "order-17"},
        "payload": {"agent": "writer", "prompt": "mail [REDACTED]"},
        "payload_bytes": 80_000,
        "payload_cut": False,
        "replayed_by": None,
        "replayed_at": None,
        "dismissed_why": None,
        **fields,
    }


def plan(plan_id: str = "report/47", **fields: Any) -> Document:
    return {
        "plan_id": plan_id,
        "plan_key": plan_id,
        "state": "partial",
        "refusal": None,
        "jobs_by_status": {"succeeded": 2, "dead_lettered": 1},
        "total_cost": "0.420000000",
        "wasted_cost": "0.020000000",
        "cost_basis": "estimated",
        "first_queued_at": AT,
        "last_completed_at": "2026-11-21T10:00:02.000Z",
        "jobs": [],
        **fields,
    }


def queue(agent: str, waiting: int | None = 0, in_progress: int | None = 0) -> Document:
    return {"agent": agent, "waiting": waiting, "in_progress": in_progress, "concurrency": 8}


def service(consumer: str, waiting: int | None = 0, in_progress: int | None = 0) -> Document:
    name = consumer.partition("-")[0]
    return {"service": name, "consumer": consumer, "stream": "EVENTS", "waiting": waiting, "in_progress": in_progress}


def answer(
    interface: Stub,
    *,
    agents: Iterable[Document] = (),
    breakers: Iterable[Document] = (),
    alive: bool = True,
    budgets: Iterable[Document] = (),
    filled: bool = True,
    alerts: Iterable[Document] = (),
    queues: Iterable[Document] = (),
    parked: int | None = 0,
    services: Iterable[Document] = (),
) -> None:
    """Has the HTTP API return this."""
    interface.answers |= {
        "GET agents": (200, list(agents)),
        "GET breakers": (200, {"breakers": list(breakers), "alive": alive}),
        "GET budgets": (200, {"filled": filled, "capped": len(list(budgets)), "budgets": list(budgets)}),
        "GET alerts": (200, {"alerts": list(alerts), "more": False, "channels": 1}),
        "GET queues": (200, {"agents": list(queues), "parked": parked, "services": list(services), "at": AT}),
    }


def current_job(job_id: str, **changed: Any) -> dict[str, Any]:
    """A job that has not ended, as `GET /api/v1/jobs` lists it."""
    return {
        "execution_id": job_id,
        "job_id": job_id,
        "agent": "writer",
        "tenant": "acme",
        "submitted_by": "batch",
        "state": "running",
        "queued_at": "2026-11-29T11:58:00.000Z",
        "age_ms": 120_000,
        "attempt": 2,
        "model": "gpt-4o",
        "wait": None,
        "cancelling": False,
        "prompt": "Write a haiku",
        **changed,
    }
