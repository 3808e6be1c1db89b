"""What happened to a job: attempts, the terminal execution record, and the result for its submitter."""

from __future__ import annotations

from typing import Literal

from pydantic import AliasChoices, Field, JsonValue

from breakwater.contracts.types import Count, Event, Identifier, ModelId, Money, Timestamp

ErrorKind = Literal[
    "client",
    "rate_limit",
    "server",
    "timeout",
    "network",
    "logic",
    "context_overflow",
    "orphan_tool_calls",
    "breaker_open",
    "budget_exceeded",
    "worker_lost",
    "invalid",
]
Outcome = Literal["success", "error", "short_circuited", "worker_lost"]
Cause = Literal["first", "retry", "fallback", "orphan_recovery", "self_correction", "probe"]
CostBasis = Literal["billed", "estimated", "unknown"]
Status = Literal["succeeded", "dead_lettered", "cancelled"]
Reason = Literal["error", "timeout", "breaker_open", "budget_exceeded", "guard_tripped", "invalid", "worker_lost"]


class ErrorInfo(Event):
    """Why an attempt or an execution failed, after redaction."""

    kind: ErrorKind
    class_: str = Field(
        validation_alias=AliasChoices("class", "class_"),
        serialization_alias="class",
        description="Such as RateLimitError.",
    )
    message: str
    status_code: int | None = None
    retryable: bool = False
    hash: str | None = Field(default=None, description="Identity of the normalised error text: 8 hex digits.")
    user_message: str | None = Field(default=None, description="What a parent agent or an end user may read.")


class Attempt(Event):
    """One try on one model. Recorded once, on its own subject."""

    attempt_id: str = Field(description="`<execution_id>:<number>`, numbered from 1.")
    execution_id: Identifier
    agent: Identifier
    tenant: Identifier | None = None
    task_id: Identifier | None = None
    number: int = Field(ge=1)
    model: ModelId
    provider: str
    started_at: Timestamp
    completed_at: Timestamp
    duration_ms: Count
    input_tokens: Count | None = None
    output_tokens: Count | None = None
    cached_tokens: Count | None = None
    cost: Money | None = Field(default=None, description="None where it is unknown; never zero for unknown.")
    cost_basis: CostBasis = "unknown"
    outcome: Outcome
    error: ErrorInfo | None = None
    short_circuited: bool = False
    refused_by: str | None = Field(
        default=None, description="The budget that refused the call: `<global or agent:NAME>/<daily or monthly>`."
    )
    counts_for_breaker: bool = Field(default=False, description="Whether the breaker counts this failure.")
    cause: Cause
    backoff_ms: Count = Field(default=0, description="How long the job waited before this attempt.")


class Execution(Event):
    """The terminal record of a job. Exactly one for each execution id. Redacted where it is stored."""

    execution_id: Identifier
    agent: Identifier
    tenant: Identifier | None = None
    task_id: Identifier | None = None
    parent_execution_id: Identifier | None = None
    status: Status
    reason: Reason | None = None
    requested_model: ModelId | None = None
    chosen_model: ModelId | None = None
    fallback_chain: tuple[ModelId, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    attempts_count: Count = 0
    input_tokens: Count = 0
    output_tokens: Count = 0
    cached_tokens: Count = 0
    total_tokens: Count = 0
    total_cost: Money | None = Field(
        default=None, description="Sum over all attempts; None when no part of it is known."
    )
    wasted_cost: Money | None = Field(default=None, description="What the attempts cost that did not give the answer.")
    cost_basis: CostBasis = "unknown"
    output: JsonValue = None
    error: ErrorInfo | None = None
    messages: list[dict[str, JsonValue]] | None = None
    metadata: dict[str, JsonValue] = Field(default_factory=dict)
    queued_at: Timestamp
    dispatched_at: Timestamp
    started_at: Timestamp | None = None
    completed_at: Timestamp
    duration_ms: Count
    cache_hit: bool = False
    dry_run: bool = False


class Result(Execution):
    """The answer to a job, for its submitter: the execution with its output as the model gave it."""

    job_id: Identifier


class Progress(Event):
    """A live step of an execution; not stored."""

    execution_id: Identifier
    agent: Identifier
    state: Literal["queued", "dispatched", "in_progress", "retried", "waiting", "succeeded", "dead_lettered"]
    at: Timestamp
    attempt: int | None = None
    model: ModelId | None = None
    detail: str | None = None
