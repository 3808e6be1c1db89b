"""Every kind of event is a line that says what matters."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from breakwater.kernel.nats.cloud_events import EventAttributes
from breakwater.records.commands.tail import KINDS, cells, subject_of
from tests.tables import each_row

NOW = datetime(2026, 11, 21, 10, 0, tzinfo=UTC)
AT = "2026-11-21T09:59:58.000Z"
ATTEMPT = {
    "agent": "writer",
    "model": "gpt-4.1",
    "outcome": "error",
    "cause": "retry",
    "duration_ms": 1200,
    "cost": "0.000042000",
    "error": {"kind": "rate_limit", "status_code": 429, "message": "slow down\nplease"},
    "completed_at": AT,
}
ALERT = {
    "incident_id": "inc_1",
    "agent": "writer",
    "event": "breaker_open",
    "severity": "critical",
    "change": "opened",
    "status": "firing",
    "count": 1,
    "title": "writer is failing",
    "at": AT,
}
CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    (
        "attempts",
        ATTEMPT,
        ["attempt ", "writer", "error", "gpt-4.1", "(retry)", "1.2 s", "$0.000042", "rate_limit 429: slow down"],
        ["please"],
    ),
    ("attempts", ATTEMPT | {"cost": None}, ["cost unknown"], ["$"]),
    ("attempts", ATTEMPT | {"cost": None, "short_circuited": True, "outcome": "short_circuited"}, [], ["cost", "$"]),
    ("attempts", ATTEMPT | {"cause": "first", "error": None}, [], ["first"]),
    (
        "executions",
        {
            "execution_id": "x-1",
            "job_id": "order-1",
            "agent": "writer",
            "status": "dead_lettered",
            "reason": "budget_exceeded",
            "attempts_count": 2,
            "duration_ms": 9,
            "total_cost": None,
            "requested_model": "m",
            "completed_at": AT,
            "error": {"kind": "budget_exceeded", "message": "the daily budget is spent"},
        },
        ["execution", "dead_lettered", "m", "2 attempts", "budget_exceeded: the daily budget is spent", "order-1"],
        ["budget_exceeded  budget_exceeded", "x-1"],
    ),
    (
        "breakers",
        {"agent": "writer", "model": "m", "from_state": "closed", "to_state": "open", "reason": "3 in a row", "at": AT},
        ["breaker", "open", "m", "was closed: ", "3 in a row"],
        [],
    ),
    (
        "budgets",
        {
            "kind": "hard_cap",
            "scope": "global",
            "agent": None,
            "window": "daily",
            "period": "2026-11-21",
            "threshold_percent": 100,
            "limit": "5.000000000",
            "total": "5.010000000",
            "enforcement": "hard",
            "at": AT,
        },
        [
            "budget",
            "global",
            "hard_cap",
            "daily 2026-11-21",
            "$5.01 of $5.00",
            "passed 100 %",
            "calls that do not fit are refused",
        ],
        [],
    ),
    (
        "alerts",
        ALERT,
        ["alert", "breaker_open", "opened", "open", "writer is failing", "inc_1"],
        ["times"],
    ),
    ("alerts", ALERT | {"change": "reminded", "status": "pending"}, ["reminded  pending  writer"], ["by"]),
    ("alerts", ALERT | {"change": "repeated", "count": 1200}, ["repeated  firing  1,200 times"], []),
    (
        "alerts",
        ALERT | {"change": "acknowledged", "status": "acknowledged", "acknowledged_by": "ops"},
        ["  acknowledged  by ops  writer"],
        [],
    ),
    (
        "alerts",
        ALERT | {"change": "repeated", "status": "acknowledged", "acknowledged_by": "ops", "count": 2},
        ["repeated  acknowledged  2 times"],
        ["by ops"],
    ),
    (
        "alerts",
        ALERT | {"change": "resolved", "status": "resolved", "acknowledged_by": "ops", "event": "breaker_closed"},
        ["breaker_closed", "  resolved  writer"],
        ["by ops", "resolved  resolved"],
    ),
    (
        "alerts",
        # As a program of an earlier version reported it, which stands in the stream for a while.
        {"agent": "writer", "event": "breaker_open", "severity": "critical", "title": "writer is failing", "at": AT},
        ["alert", "breaker_open", "writer is failing"],
        ["None", "times"],
    ),
    (
        "progress",
        {"agent": "writer", "job_id": "j", "state": "retried", "attempt": 2, "detail": "in 500 ms", "at": AT},
        ["progress", "retried", "attempt 2", "in 500 ms"],
        [],
    ),
    (
        "limits",
        {
            "kind": "changed",
            "limit_id": "key:bot.usd.month",
            "by": "ops",
            "reason": "too much",
            "raised": None,
            "at": AT,
        },
        ["limit", "changed", "key:bot.usd.month  by ops"],
        ["None"],
    ),
    (
        "guards",
        {"agent": "writer", "kind": "tripped", "task_id": "t-1", "tenant": "acme", "reason": "10 iterations", "at": AT},
        ["guard", "writer", "tripped", "task t-1 of acme", "10 iterations"],
        [],
    ),
]


@each_row(("kind", "event", "shown", "hidden"), CASES, ids=[case[0] for case in CASES])
def test_a_line_says_what_matters(kind: str, event: dict[str, Any], shown: list[str], hidden: list[str]) -> None:
    line = "".join(cell if isinstance(cell, str) else cell[0] for cell in cells(kind, event, NOW))
    assert "\n" not in line
    for part in shown:
        assert part in line
    for part in hidden:
        assert part not in line


def test_every_kind_has_a_line() -> None:
    assert {kind for kind, *_ in CASES} == set(KINDS)


def test_a_json_line_is_a_cloud_event() -> None:
    headers = {"ce-id": "j:1", "ce-type": "breakwater.Attempt", "ce-source": "breakwater/worker", "ce-time": AT}
    attributes = EventAttributes.of("bw.attempts.writer.j.1", headers)
    event = attributes.document(ATTEMPT)
    assert json.loads(attributes.envelope(json.dumps(ATTEMPT).encode())) == event
    assert {"specversion", "id", "source", "type"} <= event.keys()
    assert event["id"] == "j:1"
    assert event["data"] == ATTEMPT


def test_progress_comes_without_headers_and_still_has_an_id_of_its_own() -> None:
    def event(state: str) -> dict[str, Any]:
        content = {"state": state, "at": AT}
        return EventAttributes.of("bw.progress.a.e", {}, content).document(content)

    assert event("queued")["type"] == "breakwater.Progress"
    assert event("queued")["id"] != event("dispatched")["id"]
    assert event("queued")["time"] == AT


@each_row(
    ("kind", "subject"),
    [
        ("attempts", "bw.attempts.a%2Eb.>"),
        ("progress", "bw.progress.a%2Eb.>"),
        ("guards", "bw.guards.a%2Eb"),
        ("budgets", "bw.budgets.>"),
        ("alerts", "bw.alerts.>"),
    ],
)
def test_an_agent_narrows_the_subjects_that_name_it(kind: str, subject: str) -> None:
    assert subject_of(kind, "a.b") == subject
    assert subject_of(kind, None) == f"bw.{kind}.>"
