"""What the OpenAPI document says of budgets."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from breakwater.contracts.api import BudgetList, RaiseCapRequest, UnchangedBudget
from breakwater.contracts.events import BudgetEvent, Reconciliation
from services.request import openapi_parts as parts

TAGS = [{"name": "budgets"}]

MODELS: list[tuple[type[BaseModel], Literal["validation", "serialization"]]] = [
    (BudgetList, "serialization"),
    (Reconciliation, "serialization"),
    (RaiseCapRequest, "validation"),
    (BudgetEvent, "serialization"),
    (UnchangedBudget, "serialization"),
]

_BUDGET = {
    "budget": "agent:content-writer/daily",
    "scope": "agent",
    "agent": "content-writer",
    "tenant": None,
    "window": "daily",
    "period": "2026-11-21",
    "enforcement": "hard",
    "limit": "50.000000000",
    "raised": {
        "limit": "50.000000000",
        "configured": "10.000000000",
        "by": "ops",
        "reason": "launch day",
        "at": "2026-11-21T09:12:00.000Z",
    },
    "spent": "8.412300000",
    "reserved": "0.120000000",
    "remaining": "41.467700000",
    "calls": 1204,
    "calls_of_unknown_cost": 1,
    "resets_at": "2026-11-22T00:00:00.000Z",
    "estimate": {
        "calls": 1190,
        "reserved": "39.870000000",
        "cost": "8.373000000",
        "percent": 21.0,
        "exceeded": 0,
    },
}
_RECONCILIATION = {
    "equal": False,
    "budgets": [
        {
            "budget": "agent:content-writer/daily",
            "period": "2026-11-21",
            "counted": "8.412300000",
            "recorded": "8.402300000",
            "stored": "8.300000000",
            "logged": "0.102300000",
            "unrecorded": "0.000000000",
            "difference": "0.010000000",
            "counted_calls": 1204,
            "recorded_calls": 1203,
        }
    ],
    "reserved": "0.120000000",
    "held": "0.120000000",
    "at": "2026-11-21T10:00:00.000Z",
}
_RAISED = {
    "event_id": "agent:content-writer/daily/2026-11-21/raised/1795252320000/0123456789ab",
    "kind": "raised",
    "scope": "agent",
    "agent": "content-writer",
    "tenant": None,
    "window": "daily",
    "period": "2026-11-21",
    "threshold_percent": None,
    "limit": "50.000000000",
    "total": "8.112300000",
    "previous": "10.000000000",
    "configured": "10.000000000",
    "enforcement": "hard",
    "by": "ops",
    "reason": "launch day",
    "resets_at": "2026-11-22T00:00:00.000Z",
    "at": "2026-11-21T09:12:00.000Z",
}


def paths() -> dict[str, Any]:
    """The operations, by path."""
    return {
        "/api/v1/budgets": {"get": _budgets()},
        "/api/v1/budgets/reconciliation": {"get": _reconciliation()},
        "/api/v1/budgets/raise": {"post": _raise()},
    }


def _budgets() -> dict[str, Any]:
    return {
        **parts.read(
            "budgets",
            "list_budgets",
            "How every budget stands",
            "Of the current day and month: those of all agents and tenants that the config names, and of all others "
            "that called a model. With a parameter only those that such a call is held against.",
            parts.with_examples(
                parts.json("Global, then agents, then tenants.", "BudgetList"),
                {"raised": {"filled": True, "budgets": [_BUDGET]}},
            ),
            {
                "404": parts.error("The agent is not known (`unknown_agent`)."),
                "422": parts.error("A parameter can't be a name (`invalid_query`)."),
            },
        ),
        "parameters": [_name("agent", "The agent of the call."), _name("tenant", "The tenant of the call.")],
    }


def _name(parameter: str, description: str) -> dict[str, Any]:
    schema = {"type": "string", "minLength": 1, "maxLength": 128}
    return parts.parameter(parameter, description, schema)


def _reconciliation() -> dict[str, Any]:
    return parts.read(
        "budgets",
        "reconcile_budgets",
        "Whether Redis has counted what is on record",
        "Reads the counters in Redis, and adds up all attempts that ClickHouse and the event log hold, as of one "
        "moment. What differs the budget service repairs by itself.",
        parts.with_examples(
            parts.json("The counters beside the record.", "Reconciliation"), {"one call too many": _RECONCILIATION}
        ),
        {
            "503": parts.unavailable(
                "Redis, NATS or ClickHouse is away (`unavailable`), or the counters are being rebuilt (`not_filled`)."
            )
        },
    )


def _raise() -> dict[str, Any]:
    answer = {
        "schema": {"oneOf": [parts.ref("BudgetEvent"), parts.ref("UnchangedBudget")]},
        "examples": {"raised": {"value": _RAISED}, "unchanged": {"value": {**_BUDGET, "unchanged": True}}},
    }
    return parts.act(
        "budgets",
        "raise_cap",
        "Raise a cap until its day or month ends",
        "The cap of the config, exactly, takes an earlier raise back. Where the cap is what was asked for already, the "
        "answer is an `UnchangedBudget`.",
        parts.ref("RaiseCapRequest"),
        {
            "of an agent": {"budget": "agent:content-writer/daily", "limit_usd": "50.00", "reason": "launch day"},
            "of all agents": {"budget": "global/monthly", "limit_usd": 2000, "reason": "the backlog of October"},
        },
        {
            "200": {
                "description": "Published, and it holds: the raise. Or there was nothing to do: the budget, and "
                "`unchanged`.",
                "content": {"application/json": answer},
            },
            "404": parts.error("There is no such budget (`unknown_budget`)."),
            "409": parts.error("The config gives this budget no cap (`no_cap`)."),
            "422": parts.error(
                "The body does not have this form (`invalid_request`), or it is below the config's cap (`below_cap`)."
            ),
            "503": parts.unavailable(
                "Redis or NATS is away (`unavailable`), or the counters are being rebuilt (`not_filled`). Ask again: "
                "to raise it twice does no harm."
            ),
        },
    )
