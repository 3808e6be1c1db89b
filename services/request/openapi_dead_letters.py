"""What the OpenAPI document says of dead letters."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from breakwater.contracts.api import (
    MOST_DEAD_LETTERS,
    DeadLetterDetails,
    DeadLetterList,
    DeadLetterQuery,
    DeadLetterReplays,
    ReplayDeadLettersRequest,
)
from services.request import openapi_parts as parts

TAGS = [{"name": "dead letters"}]

MODELS: list[tuple[type[BaseModel], Literal["validation", "serialization"]]] = [
    (DeadLetterList, "serialization"),
    (DeadLetterDetails, "serialization"),
    (ReplayDeadLettersRequest, "validation"),
    (DeadLetterReplays, "serialization"),
]

_DEAD_LETTER = {
    "dead_letter_id": 17,
    "kind": "job",
    "reason": "error",
    "agent": "researcher",
    "execution_id": "order-4711",
    "error": "the provider answered 500",
    "at": "2026-11-21T10:00:00.000Z",
    "replayable": True,
    "why_not": None,
    "replayed_as": None,
    "replay_status": None,
}
_AGAIN = "rpl_5f0c8a41d2b94e7794c3a1de02f6b8c9"
_REPLAYED = {
    **_DEAD_LETTER,
    "dead_letter_id": 12,
    "execution_id": "order-4698",
    "replayable": False,
    "why_not": f"it was replayed before, as {_AGAIN}",
    "replayed_as": _AGAIN,
    "replay_status": "succeeded",
}
_SHOWN = {
    **_DEAD_LETTER,
    "stream": "JOBS",
    "subject": "bw.jobs.researcher",
    "sequence": 4711,
    "headers": {"Nats-Msg-Id": "researcher/order-4711"},
    "payload": {"agent": "researcher", "job_id": "order-4711", "prompt": "Mail [REDACTED] about harbours."},
    "payload_bytes": 93,
    "payload_cut": False,
    "replayed_by": None,
    "replayed_at": None,
}


def paths() -> dict[str, Any]:
    """The operations, by path."""
    return {
        "/api/v1/dlq": {"get": _list()},
        "/api/v1/dlq/replay": {"post": _replay()},
        "/api/v1/dlq/{dead_letter_id}": {"get": _show()},
    }


_AWAY = {"503": parts.unavailable("NATS is away (`unavailable`).")}


def _described(name: str) -> str:
    return DeadLetterQuery.model_fields[name].description or ""


_NAME = {"type": "string", "minLength": 1, "maxLength": 128}


def _list() -> dict[str, Any]:
    counts = [{"reason": "error", "agent": "researcher", "count": 2}]
    answer = {"dead_letters": [_DEAD_LETTER, _REPLAYED], "more": False, "counts": counts}
    return {
        **parts.read(
            "dead letters",
            "list_dead_letters",
            "What was given up",
            "The latest first: jobs that failed for good or are no jobs, alerts that did not arrive, events that could "
            "not be stored. Each is kept for 30 days.",
            parts.with_examples(parts.json("Those that are meant.", "DeadLetterList"), {"one was replayed": answer}),
            {"422": parts.error("A parameter is wrong (`invalid_query`)."), **_AWAY},
        ),
        "parameters": [
            parts.parameter("reason", _described("reason"), {"type": "string", "minLength": 1, "maxLength": 100}),
            parts.parameter("agent", _described("agent"), _NAME),
            parts.parameter("execution_id", _described("execution_id"), _NAME),
            parts.parameter("since", _described("since"), {"type": "string", "format": "date-time"}),
            parts.parameter(
                "limit",
                "At most so many, the latest.",
                {"type": "integer", "minimum": 1, "maximum": MOST_DEAD_LETTERS, "default": 100},
            ),
        ],
    }


def _show() -> dict[str, Any]:
    return {
        **parts.read(
            "dead letters",
            "show_dead_letter",
            "One dead letter",
            "With the original message, as the config's redaction rules let it be seen. Of one that is longer than "
            "64 KiB, the beginning. The original itself is not told.",
            parts.with_examples(parts.json("The dead letter.", "DeadLetterDetails"), {"a job": _SHOWN}),
            {"404": parts.error("There is no such dead letter (`unknown_dead_letter`)."), **_AWAY},
        ),
        "parameters": [
            {
                "name": "dead_letter_id",
                "in": "path",
                "required": True,
                "description": "Its number.",
                "schema": {"type": "integer", "minimum": 1, "examples": [17]},
            }
        ],
    }


def _replay() -> dict[str, Any]:
    done = {
        "replayed": [{"dead_letter_id": 17, "execution_id": _AGAIN}],
        "already": 1,
        "skipped": [{"dead_letter_id": 18, "why": "agent 'gone' is not configured; known are researcher"}],
        "continue_after": None,
        "up_to": None,
    }
    return parts.act(
        "dead letters",
        "replay_dead_letters",
        "Run jobs again that were given up",
        "Each once: its job is queued as it was, under an id that is made from the dead letter, and with the old "
        "execution as `metadata.replay_of`. A dead letter that was replayed before is left alone; a replay that fails "
        f"again has a dead letter of its own. One request looks at {MOST_DEAD_LETTERS:,} dead letters at most; where "
        "there are more, the answer says where to go on.",
        parts.ref("ReplayDeadLettersRequest"),
        {
            "some": {"dead_letters": [12, 17, 18]},
            "all of a reason": {"reason": "error", "agent": "researcher", "why": "the provider is back"},
            "the next of them": {"reason": "error", "agent": "researcher", "after": 2034, "up_to": 2500},
            "all": {"all": True, "since": "2026-11-21T00:00:00Z"},
        },
        {
            "200": parts.with_examples(parts.json("Those are queued.", "DeadLetterReplays"), {"some": done}),
            "503": parts.unavailable(
                "NATS is away (`unavailable`), or JOBS is full (`refused`). Nothing is lost, and what was replayed is "
                "not replayed again: ask again."
            ),
        },
    )
