"""What the HTTP interface answers of a small plane, healthy unless a test says otherwise."""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from breakwater.kernel.types import format_time
from tests.cli.api_stub import Stub

AT = "2026-11-21T10:00:00.000Z"


def health(agent: str, state: str = "healthy", *models: "dict[str, Any]") -> "dict[str, Any]":
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


def model(name: str, breaker: "str | None" = "closed", state: str = "healthy") -> "dict[str, Any]":
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


def breaker(agent: str, model: str, state: str = "closed", reason: "str | None" = None) -> "dict[str, Any]":
    return {
        "agent": agent,
        "model": model,
        "state": state,
        "health": "unhealthy" if state == "open" else "healthy",
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
    }


def budget(name: str, spent: str, limit: "str | None" = "5", enforcement: str = "hard") -> "dict[str, Any]":
    scope, _, window = name.partition("/")
    kind, _, who = scope.partition(":")
    return {
        "budget": name,
        "scope": kind,
        "agent": who if kind == "agent" else None,
        "tenant": None,
        "window": window,
        "period": "2026-11-21",
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
    }


def incident(number: int, severity: str = "critical", status: str = "firing") -> "dict[str, Any]":
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
    }


def queue(agent: str, waiting: "int | None" = 0, in_progress: "int | None" = 0) -> "dict[str, Any]":
    return {"agent": agent, "waiting": waiting, "in_progress": in_progress, "concurrency": 8}


def service(consumer: str, waiting: "int | None" = 0, in_progress: "int | None" = 0) -> "dict[str, Any]":
    name = consumer.partition("-")[0]
    return {"service": name, "consumer": consumer, "stream": "EVENTS", "waiting": waiting, "in_progress": in_progress}


def answer(
    interface: Stub,
    *,
    agents: "Iterable[dict[str, Any]]" = (),
    breakers: "Iterable[dict[str, Any]]" = (),
    alive: bool = True,
    budgets: "Iterable[dict[str, Any]]" = (),
    filled: bool = True,
    alerts: "Iterable[dict[str, Any]]" = (),
    queues: "Iterable[dict[str, Any]]" = (),
    parked: "int | None" = 0,
    services: "Iterable[dict[str, Any]]" = (),
) -> None:
    """Has the HTTP API return this."""
    interface.answers |= {
        "GET agents": (200, list(agents)),
        "GET breakers": (200, {"breakers": list(breakers), "alive": alive}),
        "GET budgets": (200, {"filled": filled, "budgets": list(budgets)}),
        "GET alerts": (200, {"alerts": list(alerts), "more": False, "channels": 1}),
        "GET queues": (200, {"agents": list(queues), "parked": parked, "services": list(services), "at": AT}),
    }
