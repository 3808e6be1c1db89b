"""What the OpenAPI document says of incidents, and of the channels by which people are told of them."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import BaseModel

from breakwater.contracts.alerts import Alert, AlertEvent, ChannelTest, IncidentStatus
from breakwater.contracts.api import (
    AlertList,
    AlertReplays,
    AlertRequest,
    ChannelRequest,
    ReplayAlertsRequest,
    UnchangedAlert,
    UndeliveredList,
)
from services.request import openapi_parts as parts

TAGS = [{"name": "alerts"}]

MODELS: list[tuple[type[BaseModel], Literal["validation", "serialization"]]] = [
    (Alert, "serialization"),
    (AlertList, "serialization"),
    (AlertRequest, "validation"),
    (UnchangedAlert, "serialization"),
    (ChannelRequest, "validation"),
    (ChannelTest, "serialization"),
    (UndeliveredList, "serialization"),
    (ReplayAlertsRequest, "validation"),
    (AlertReplays, "serialization"),
]

_INCIDENT = "inc_3f9a1c07d2e84b56a1c0d375"
_TEXT = "Task research-4711 of tenant acme was stopped: 10 iterations (limit: 10). To do: find out why it goes on."
_ALERT = {
    "alert_id": "alert_3f9a1c07d2e84b56a1c0d375_1",
    "incident_id": _INCIDENT,
    "key": "guard_tripped/acme/research-4711",
    "change": "opened",
    "status": "pending",
    "event": "guard_tripped",
    "severity": "critical",
    "agent": "researcher",
    "model": None,
    "tenant": "acme",
    "title": "Task stopped: research-4711 (max_iterations)",
    "text": _TEXT,
    "payload": {"agent": "researcher", "tenant": "acme", "task_id": "research-4711", "rule": "max_iterations"},
    "count": 1,
    "version": 1,
    "opened_at": "2026-11-21T10:00:00.000Z",
    "last_at": "2026-11-21T10:00:00.000Z",
    "ends_at": None,
    "reminders": 0,
    "remind_at": "2026-11-21T11:00:00.000Z",
    "acknowledged_by": None,
    "acknowledged_at": None,
    "resolved_by": None,
    "resolved_at": None,
    "reason": None,
    "source_id": "acme/research-4711@1795255200000",
    "at": "2026-11-21T10:00:00.000Z",
}
_ACKNOWLEDGED = {
    **_ALERT,
    "alert_id": "alert_3f9a1c07d2e84b56a1c0d375_2",
    "change": "acknowledged",
    "status": "acknowledged",
    "version": 2,
    "remind_at": None,
    "acknowledged_by": "ops",
    "acknowledged_at": "2026-11-21T10:04:12.000Z",
    "reason": "looking at it",
    "source_id": "acknowledged by ops",
    "at": "2026-11-21T10:04:12.000Z",
}
_UNDELIVERED = {
    "dead_letter_id": 17,
    "channel": "ops",
    "alert_id": "alert_3f9a1c07d2e84b56a1c0d375_1",
    "title": "Task stopped: research-4711 (max_iterations)",
    "error": "ops: the receiver answered 500 (tried 12 times)",
    "at": "2026-11-21T11:00:03.000Z",
    "replayed": False,
}


def paths() -> dict[str, Any]:
    """The operations, by path."""
    return {
        "/api/v1/alerts": {"get": _list()},
        "/api/v1/alerts/ack": {"post": _acknowledge()},
        "/api/v1/alerts/resolve": {"post": _resolve()},
        "/api/v1/alerts/test": {"post": _test()},
        "/api/v1/alerts/undelivered": {"get": _undelivered()},
        "/api/v1/alerts/replay": {"post": _replay()},
        "/api/v1/alerts/{incident_id}": {"get": _show()},
    }


_AWAY = {"503": parts.unavailable("NATS is away (`unavailable`).")}
_NAME = {"type": "string", "minLength": 1, "maxLength": 128}
_LIMIT = parts.parameter(
    "limit", "At most so many, the newest.", {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100}
)


def _list() -> dict[str, Any]:
    statuses = ["unresolved", *get_args(IncidentStatus), "all"]
    return {
        **parts.read(
            "alerts",
            "list_incidents",
            "What people are told of",
            "Each incident as it is now, the one that was opened last first. Those that are over are known for thirty "
            "days, and of them the last two thousand.",
            parts.with_examples(
                parts.json("Those that are meant.", "AlertList"), {"one": {"alerts": [_ALERT], "more": False}}
            ),
            {
                "404": parts.error("The agent is not known (`unknown_agent`)."),
                "422": parts.error("A parameter is wrong (`invalid_query`)."),
                **_AWAY,
            },
        ),
        "parameters": [
            parts.parameter(
                "status",
                "`unresolved` are those that are not over.",
                {"type": "string", "enum": statuses, "default": "unresolved"},
            ),
            parts.parameter(
                "event",
                "What happened last, or what it began with.",
                {"type": "string", "enum": list(get_args(AlertEvent))},
            ),
            parts.parameter("agent", "Only what is of this agent.", _NAME),
            _LIMIT,
        ],
    }


def _show() -> dict[str, Any]:
    return {
        **parts.read(
            "alerts",
            "show_incident",
            "One incident",
            "As its newest alert tells.",
            parts.with_examples(parts.json("The incident.", "Alert"), {"acknowledged": _ACKNOWLEDGED}),
            {**_unknown_incident(), **_AWAY},
        ),
        "parameters": [
            {
                "name": "incident_id",
                "in": "path",
                "required": True,
                "description": "Or the beginning of it, where no other one begins so: `inc_` and 6 characters or more.",
                "schema": {"type": "string", "examples": [_INCIDENT, "inc_3f9a1c07"]},
            }
        ],
    }


def _acknowledge() -> dict[str, Any]:
    return _act(
        "acknowledge_incident",
        "Say that somebody looks after it",
        "There are no more reminders. It ends as it does otherwise, or when somebody resolves it. One that is "
        "acknowledged or over already is answered as an `UnchangedAlert`.",
    )


def _resolve() -> dict[str, Any]:
    return _act(
        "resolve_incident",
        "Say that it is over",
        "If it happens again soon, it is reopened. One that is over already is answered as an `UnchangedAlert`. This "
        "changes nothing but the incident: it closes no breaker and lets no task go on.",
    )


def _act(operation: str, summary: str, description: str) -> dict[str, Any]:
    answer = {
        # Not `oneOf`: one that is unchanged has all of an alert, too.
        "schema": {"anyOf": [parts.ref("UnchangedAlert"), parts.ref("Alert")]},
        "examples": {
            "changed": {"value": _ACKNOWLEDGED},
            "unchanged": {"value": {**_ACKNOWLEDGED, "unchanged": True}},
        },
    }
    return parts.act(
        "alerts",
        operation,
        summary,
        description,
        parts.ref("AlertRequest"),
        {
            "whole id": {"incident_id": _INCIDENT, "reason": "looking at it"},
            "beginning": {"incident_id": "inc_3f9a1c07"},
        },
        {
            "200": {
                "description": "Published: the incident. Or there was nothing to do: the incident, and `unchanged`.",
                "content": {"application/json": answer},
            },
            **_unknown_incident(),
            "503": parts.unavailable(
                "NATS is away (`unavailable`): perhaps it was done all the same, and asking again tells."
            ),
        },
    )


def _unknown_incident() -> dict[str, Any]:
    return {
        "404": parts.error("No such incident is known (`unknown_incident`)."),
        "409": parts.error("More than one incident begins so (`ambiguous_incident`)."),
    }


def _test() -> dict[str, Any]:
    arrived = {"channel": "ops", "delivered": True, "error": None}
    refused = {"channel": "ops", "delivered": False, "error": "the receiver answered 404"}
    return parts.act(
        "alerts",
        "test_channel",
        "Send a test message to a channel",
        "An alerter sends it, as it sends alerts; where it did not arrive, the answer says why.",
        parts.ref("ChannelRequest"),
        {"by name": {"channel": "ops"}},
        {
            "200": parts.with_examples(
                parts.json("It was tried.", "ChannelTest"), {"arrived": arrived, "refused": refused}
            ),
            "404": parts.error("The config has no such channel (`unknown_channel`)."),
            "503": parts.unavailable(
                "No alerter is at work (`no_alerter`). Or it did not answer within 20 s, or NATS is away "
                "(`unavailable`): perhaps it was sent all the same."
            ),
        },
    )


def _undelivered() -> dict[str, Any]:
    return {
        **parts.read(
            "alerts",
            "list_undelivered_alerts",
            "The alerts that did not arrive",
            "Those that a channel has given up within thirty days, the latest first.",
            parts.with_examples(
                parts.json("The latest ones.", "UndeliveredList"),
                {"one": {"undelivered": [_UNDELIVERED], "more": False}},
            ),
            {"422": parts.error("A parameter is wrong (`invalid_query`)."), **_AWAY},
        ),
        "parameters": [parts.parameter("channel", "Only those of this channel.", _NAME), _LIMIT],
    }


def _replay() -> dict[str, Any]:
    done = {"replayed": 3, "already": 1, "skipped": 0, "channels": {"ops": 3}, "continue_after": None}
    return parts.act(
        "alerts",
        "replay_alerts",
        "Try alerts again that did not arrive",
        "Each is sent as it was, with the same id, once: what was tried again before is left alone, unless "
        "`dead_letter_id` names it. One request looks at a thousand; where there are more, the answer says where "
        "to go on.",
        parts.ref("ReplayAlertsRequest"),
        {"all": {}, "of a channel": {"channel": "ops"}, "one": {"dead_letter_id": 17}},
        {
            "200": parts.with_examples(parts.json("They will be tried.", "AlertReplays"), {"of a channel": done}),
            "404": parts.error("There is no such channel (`unknown_channel`) or dead letter (`unknown_dead_letter`)."),
            "503": parts.unavailable("NATS is away (`unavailable`). Ask again: none is sent twice."),
        },
    )
