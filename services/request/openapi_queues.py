"""What the OpenAPI document says of queues."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from breakwater.contracts.api import Queues
from services.request import openapi_parts as parts

TAGS = [{"name": "queues"}]

MODELS: list[tuple[type[BaseModel], Literal["validation", "serialization"]]] = [(Queues, "serialization")]

_QUEUES = {
    "agents": [{"agent": "researcher", "waiting": 120, "in_work": 8, "concurrency": 8}],
    "parked": 3,
    "services": [
        {"service": "breaker", "consumer": "breaker", "stream": "EVENTS", "waiting": 0, "in_work": 0},
        {"service": "sink", "consumer": "sink-events", "stream": "EVENTS", "waiting": 0, "in_work": 41},
    ],
    "at": "2026-11-21T10:00:00.000Z",
}


def paths() -> dict[str, Any]:
    """The operations, by path."""
    return {
        "/api/v1/queues": {
            "get": parts.read(
                "queues",
                "list_queues",
                "What waits",
                "For each agent the jobs that wait and those that are in work; how many jobs sleep until their next "
                "attempt; and how far the services are behind with what happens. As of at most about a second ago.",
                parts.with_examples(parts.json("As it is now.", "Queues"), {"jobs wait": _QUEUES}),
                {"503": parts.unavailable("NATS is away (`unavailable`).")},
            )
        }
    }
