"""What operators do, once for every way in: over HTTP, on the command line, in the console."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class OperatorCase:
    """One action on one target.

    Attributes:
        action: its path below `/api/v1`, for POST.
        body: the request that names the target.
        command: the same on the command line, behind `breakwater`.
        form: the same in the console: where its form is sent, and behind the `?` its fields.
        unknown: the error code of the API where there is no such target.
        look: the command that lists the targets.
    """

    action: str
    body: dict[str, Any]
    command: tuple[str, ...]
    form: str
    unknown: str
    look: str

    def __str__(self) -> str:
        return self.action


OPERATOR_CASES = (
    OperatorCase(
        "breakers/isolate",
        {"agent": "writer", "model": "m", "reason": "garbled"},
        ("breakers", "isolate", "writer", "m", "--reason", "garbled"),
        "/breakers/isolate?agent=writer&model=m&reason=garbled",
        "unknown_breaker",
        "breakwater breakers",
    ),
    OperatorCase(
        "breakers/reset",
        {"agent": "*", "model": "local/*"},
        ("breakers", "reset", "*", "local/*"),
        "/breakers/reset?agent=%2A&model=local%2F%2A&reason=",
        "unknown_breaker",
        "breakwater breakers",
    ),
    OperatorCase(
        "guards/reset",
        {"task_id": "t2", "tenant": "acme", "reason": "mended"},
        ("guards", "reset", "t2", "--tenant", "acme", "--reason", "mended"),
        "/breakers/tasks/reset?task_id=t2&tenant=acme&reason=mended",
        "unknown_task",
        "breakwater guards",
    ),
    OperatorCase(
        "budgets/raise",
        {"budget": "agent:writer/daily", "limit_usd": "50", "reason": "launch day"},
        ("budgets", "raise", "agent:writer/daily", "50", "--reason", "launch day"),
        "/budgets/agent%3Awriter%2Fdaily?limit_usd=50&reason=launch+day",
        "unknown_budget",
        "breakwater budgets",
    ),
    OperatorCase(
        "alerts/ack",
        {"incident_id": "inc_3f9a1c07", "reason": "looking at it"},
        ("alerts", "ack", "inc_3f9a1c07", "--reason", "looking at it"),
        "/alerts/ack?incident_id=inc_3f9a1c07&reason=looking+at+it",
        "unknown_incident",
        "breakwater alerts list --status all",
    ),
    OperatorCase(
        "alerts/resolve",
        {"incident_id": "inc_3f9a1c07"},
        ("alerts", "resolve", "inc_3f9a1c07"),
        "/alerts/resolve?incident_id=inc_3f9a1c07&reason=",
        "unknown_incident",
        "breakwater alerts list --status all",
    ),
    OperatorCase(
        "alerts/replay",
        {"dead_letter_id": 1},
        ("alerts", "replay", "--dead-letter", "1"),
        "/alerts/replay?dead_letter_id=1&reason=",
        "unknown_dead_letter",
        "breakwater alerts undelivered",
    ),
    OperatorCase(
        "dlq/replay",
        {"dead_letters": [2, 3], "why": "the provider is back"},
        ("dlq", "replay", "2", "3", "--why", "the provider is back"),
        "/dead-letters/replay?dead_letter_id=2&dead_letter_id=3&why=the+provider+is+back",
        "unknown_dead_letter",
        "breakwater dlq list",
    ),
    OperatorCase(
        "dlq/dismiss",
        {"dead_letters": [2, 3], "why": "sent again"},
        ("dlq", "dismiss", "2", "3", "--why", "sent again"),
        "/dead-letters/dismiss?dead_letter_id=2&dead_letter_id=3&why=sent+again",
        "unknown_dead_letter",
        "breakwater dlq list",
    ),
)
