"""What the OpenAPI document says of agents, breakers and guards."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from breakwater.contracts.api import (
    AgentHealth,
    BreakerList,
    BreakerRequest,
    GuardRequest,
    StoppedTasks,
    UnchangedBreaker,
)
from breakwater.contracts.events import BreakerTransition, GuardEvent
from services.request import openapi_parts as parts

TAGS = [{"name": "agents"}, {"name": "breakers"}, {"name": "guards"}]

MODELS: list[tuple[type[BaseModel], Literal["validation", "serialization"]]] = [
    (AgentHealth, "serialization"),
    (BreakerList, "serialization"),
    (BreakerRequest, "validation"),
    (BreakerTransition, "serialization"),
    (UnchangedBreaker, "serialization"),
    (StoppedTasks, "serialization"),
    (GuardRequest, "validation"),
    (GuardEvent, "serialization"),
]

_MODEL_HEALTH = {
    "model": "openai/gpt-4.1",
    "health": "unhealthy",
    "breaker": "open",
    "consecutive_failures": 3,
    "last_failure_at": "2026-11-21T10:00:00.000Z",
    "last_success_at": "2026-11-21T09:58:12.250Z",
    "circuit_open_until": "2026-11-21T10:01:00.000Z",
}
_AGENT_HEALTH = {
    "agent_id": "content-writer",
    **{name: value for name, value in _MODEL_HEALTH.items() if name not in {"model", "breaker"}},
    "models": [_MODEL_HEALTH],
}
_BREAKER = {
    "agent": "content-writer",
    "model": "openai/gpt-4.1",
    "state": "isolated",
    "health": "unhealthy",
    "reason": "forced open by ops: the provider has an incident",
    "since": "2026-11-21T10:00:00.000Z",
    "open_until": None,
    "probe_until": None,
    "consecutive_failures": 0,
    "total_failures": 0,
    "unique_errors": 0,
    "last_failure_at": None,
    "last_success_at": None,
    "version": 1,
}
_TRANSITION = {
    "transition_id": "content-writer/openai%2Fgpt-4%2E1#1@1795255200000",
    "scope": "agent_model",
    "agent": "content-writer",
    "model": "openai/gpt-4.1",
    "from_state": "closed",
    "to_state": "isolated",
    "reason": "forced open by ops: the provider has an incident",
    "by": "ops",
    "health": "unhealthy",
    "consecutive_failures": 0,
    "total_failures": 0,
    "unique_errors": 0,
    "errors": 0,
    "within_s": 60.0,
    "cooldown_s": 60.0,
    "version": 1,
    "at": "2026-11-21T10:00:00.000Z",
}
_STOPPED = {
    "task_id": "research-4711",
    "tenant": "acme",
    "agent": "researcher",
    "execution_id": "019aa8f2-7c1e-7d3a-9b54-2f6e8a1c0d37",
    "rule": "max_iterations",
    "reason": "10 iterations (limit: 10)",
    "since": "2026-11-21T10:00:00.000Z",
}
_RESET = {
    "event_id": "acme/research-4711@1795255200000#reset/0123456789ab",
    "kind": "reset",
    "agent": "researcher",
    "tenant": "acme",
    "task_id": "research-4711",
    "execution_id": "019aa8f2-7c1e-7d3a-9b54-2f6e8a1c0d37",
    "rule": "max_iterations",
    "reason": "reset by ops: the loop was a bug in the prompt",
    "by": "ops",
    "iterations": 10,
    "tokens": 48_112,
    "cost": "0.412300000",
    "consecutive_failures": 0,
    "total_failures": 1,
    "unique_errors": 1,
    "at": "2026-11-21T10:07:30.000Z",
}


def paths() -> dict[str, Any]:
    """The operations, by path."""
    return {
        "/api/v1/agents": {"get": _agents()},
        "/api/v1/breakers": {"get": _breakers()},
        "/api/v1/breakers/isolate": {"post": _isolate()},
        "/api/v1/breakers/reset": {"post": _reset_breaker()},
        "/api/v1/guards": {"get": _guards()},
        "/api/v1/guards/reset": {"post": _reset_guard()},
    }


def _agents() -> dict[str, Any]:
    answer = {
        "schema": {"type": "array", "items": parts.ref("AgentHealth")},
        "examples": {"unhealthy": {"value": [_AGENT_HEALTH]}},
    }
    return parts.read(
        "agents",
        "list_agents",
        "How every agent fares",
        "`circuit_open_until` is always still to come. It is absent while a call may be made, a probe too: so of an "
        "open breaker whose cool-down is over; and where only a person can close the breaker.",
        {"description": "All agents of the config, in its order.", "content": {"application/json": answer}},
    )


def _breakers() -> dict[str, Any]:
    value = {"breakers": [_BREAKER], "alive": True}
    return parts.read(
        "breakers",
        "list_breakers",
        "How every breaker stands",
        "Those of the agents' own models, and all others that were ever heard of within a week.",
        parts.with_examples(parts.json("By agent and model.", "BreakerList"), {"isolated": value}),
    )


def _isolate() -> dict[str, Any]:
    return _act_on_breaker(
        "isolate_breaker",
        "Force a breaker open",
        "No call passes it, no probe either, until it is reset. It may be one that nothing was ever counted for. One "
        "that is forced open already stays as it is, and is answered as an `UnchangedBreaker`.",
    )


def _reset_breaker() -> dict[str, Any]:
    return _act_on_breaker(
        "reset_breaker",
        "Close a breaker and forget what it counted",
        "Whatever state it is in, closed too. One that nothing was ever counted for is answered as an "
        "`UnchangedBreaker`.",
    )


def _act_on_breaker(operation: str, summary: str, description: str) -> dict[str, Any]:
    body = {"agent": "content-writer", "model": "openai/gpt-4.1", "reason": "the provider has an incident"}
    shared = {"agent": "*", "model": "openai/*"}
    answer = {
        "schema": {"oneOf": [parts.ref("BreakerTransition"), parts.ref("UnchangedBreaker")]},
        "examples": {
            "changed": {"value": _TRANSITION},
            "unchanged": {"value": {**_BREAKER, "unchanged": True}},
        },
    }
    return parts.act(
        "breakers",
        operation,
        summary,
        description,
        parts.ref("BreakerRequest"),
        {"agent and model": body, "all models of a provider": shared},
        {
            "200": {
                "description": "Done and published: the transition. Or there was nothing to do: the breaker, and "
                "`unchanged`.",
                "content": {"application/json": answer},
            },
            "404": parts.error("Neither the config nor Redis knows the breaker (`unknown_breaker`)."),
            "503": parts.unavailable(
                "Redis or NATS is away (`unavailable`): perhaps it was done all the same, and asking again tells. Or "
                "it was done and its event waits for NATS (`not_published`): a breaker service publishes it."
            ),
        },
    )


def _guards() -> dict[str, Any]:
    return parts.read(
        "guards",
        "list_stopped_tasks",
        "The tasks that their guard stopped",
        "Jobs of these tasks are answered with `guard_tripped` and call no model.",
        parts.with_examples(
            parts.json("In the order in which they were stopped.", "StoppedTasks"), {"one": {"stopped": [_STOPPED]}}
        ),
    )


def _reset_guard() -> dict[str, Any]:
    return parts.act(
        "guards",
        "reset_task",
        "Let a stopped task go on",
        "All that was counted of the task is forgotten, so that it has its caps anew. One that is not stopped may be "
        "reset as well; its event has the agent `*`.",
        parts.ref("GuardRequest"),
        {
            "of a tenant": {
                "task_id": "research-4711",
                "tenant": "acme",
                "reason": "the loop was a bug in the prompt",
            },
            "of no tenant": {"task_id": "nightly-report"},
        },
        {
            "200": parts.with_examples(parts.json("Done and published.", "GuardEvent"), {"reset": _RESET}),
            "404": parts.error("Nothing is known of the task (`unknown_task`)."),
            "503": parts.unavailable(
                "Redis or NATS is away (`unavailable`). The task may be stopped still: ask again; what was published "
                "already is not published twice."
            ),
        },
    )
