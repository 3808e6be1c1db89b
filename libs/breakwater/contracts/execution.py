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
    "retry_budget",
    "guard_tripped",
    "worker_lost",
    "invalid",
]
Outcome = Literal["success", "error", "short_circuited", "worker_lost"]
Cause = Literal[
    "first",
    "retry",
    "fallback",
    "orphan_recovery",
    "self_correction",
    "context_trim",
    "credential_refresh",
    "probe",
]
"""Why an attempt was made. The last five are not counted as tries of their model."""
Waste = Literal["retry", "fallback", "self_correction", "worker_lost", "failed"]
"""Why the cost of an attempt was wasted: what followed it, or what was wrong with it."""
CostBasis = Literal["billed", "estimated", "unknown"]
Status = Literal["succeeded", "dead_lettered", "cancelled"]
Reason = Literal[
    "error", "timeout", "breaker_open", "budget_exceeded", "guard_tripped", "rate_limited", "invalid", "worker_lost"
]


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
    retry_after_s: float | None = Field(
        default=None, description="How long to wait before asking again, as far as that is known."
    )
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
    cached_tokens: Count | None = Field(default=None, description="Part of the input tokens: read from a cache.")
    reasoning_tokens: Count | None = Field(default=None, description="Part of the output tokens.")
    cost: Money | None = Field(default=None, description="None where it is unknown; never zero for unknown.")
    cost_basis: CostBasis = "unknown"
    reserved: Money | None = Field(
        default=None, description="The worst case, held in the budgets while it was called. None without a price."
    )
    reserved_at: Timestamp | None = Field(
        default=None, description="By Redis' clock: its cost counts in the day and the month of this moment."
    )
    outcome: Outcome
    error: ErrorInfo | None = None
    short_circuited: bool = False
    refused_by: str | None = Field(
        default=None, description="What refused the call: a budget's name, such as `agent:writer/daily`, or a limit's."
    )
    refused_cap: Money | None = Field(
        default=None, description="The hard cap that had no room for the call, where it has room for such calls at all."
    )
    refused_reason: Reason | None = Field(
        default=None, description="Of a refused call: what the job ends with, unless another model answers."
    )
    ends_chain: bool = Field(default=False, description="Of a refused call: no other model is tried.")
    counts_for_breaker: bool = Field(default=False, description="Whether the breaker counts this failure.")
    breaker_version: Count | None = Field(
        default=None, description="Of the breaker that let the call pass; its outcome counts for that version only."
    )
    cause: Cause
    backoff_ms: Count = Field(default=0, description="How long the job waited before this attempt.")
    dropped_messages: Count = Field(
        default=0, description="Messages of the job left out of this call: orphaned tool calls, or turns trimmed away."
    )


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
    wasted_by_cause: dict[Waste, Money] = Field(
        default_factory=dict, description="The known parts of `wasted_cost`, by why they were wasted."
    )
    cost_basis: CostBasis = "unknown"
    output: JsonValue = None
    error: ErrorInfo | None = None
    messages: list[dict[str, JsonValue]] | None = None
    input: JsonValue = Field(default=None, description="What a process or python agent was asked.")
    metadata: dict[str, JsonValue] = Field(default_factory=dict)
    queued_at: Timestamp
    dispatched_at: Timestamp
    started_at: Timestamp | None = None
    completed_at: Timestamp
    duration_ms: Count
    cache_hit: bool = Field(default=False, description="Answered from the cache: nothing was called and nothing spent.")
    cached_from: Identifier | None = Field(default=None, description="The execution that gave a cached answer.")
    dry_run: bool = False


class Result(Execution):
    """The answer to a job, for its submitter: the execution with its output as the model gave it."""

    job_id: Identifier


Notification = Literal[
    "agent.attempt.start",
    "agent.attempt.finish",
    "agent.attempt.error",
    "llm_request_failed",
    "llm_retry_attempt",
    "llm_retry_exhausted",
    "orphan_tool_calls_pruned",
    "context_trimmed",
]


class Progress(Event):
    """A live step of an execution; not stored. What an event says of an error is redacted."""

    execution_id: Identifier
    agent: Identifier
    state: Literal["queued", "dispatched", "in_progress", "retried", "waiting", "succeeded", "dead_lettered"]
    event: Notification | None = Field(default=None, description="What has just happened, where it has a name.")
    at: Timestamp
    attempt: int | None = Field(default=None, description="The attempt's number, from 1.")
    model: ModelId | None = None
    parent_execution_id: Identifier | None = None
    duration_ms: Count | None = None
    input_tokens: Count | None = None
    output_tokens: Count | None = None
    success: bool | None = None
    error_type: str | None = Field(default=None, description="Such as `Unauthorized`.")
    error_class: str | None = Field(default=None, description="Such as `UnauthorizedError`.")
    error_message: str | None = None
    status_code: int | None = None
    retryable: bool | None = None
    delay_ms: Count | None = Field(default=None, description="The wait before the next attempt.")
    count: Count | None = Field(default=None, description="How many messages were dropped.")
    detail: str | None = None
