"""The kinds of errors, which executions report and the settings of retries name."""

from typing import Literal

ErrorKind = Literal[
    "client",
    "quota",
    "rate_limit",
    "transient",
    "server",
    "timeout",
    "network",
    "logic",
    "context_overflow",
    "orphan_tool_calls",
    "breaker_open",
    "budget_exceeded",
    "retry_budget",
    "guard_tripped",
    "worker_lost",
    "invalid",
    "dependency_failed",
    "cancelled",
]
