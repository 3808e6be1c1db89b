"""Records of a job: its attempts, the terminal execution record, and the result for its submitter."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Literal, Self, get_args

from pydantic import AliasChoices, Field, JsonValue, StringConstraints, model_validator

from breakwater.jobs.contract.error_kinds import ErrorKind
from breakwater.jobs.contract.job import CallApi, RulesPart
from breakwater.kernel.formats import quantity
from breakwater.kernel.http.contract import Moment
from breakwater.kernel.types import (
    NO_CONTROLS,
    Count,
    Encrypted,
    Event,
    Identifier,
    Message,
    ModelId,
    Money,
    Timestamp,
    UsdAmount,
)

Outcome = Literal["success", "error", "short_circuited", "worker_lost", "cancelled"]
Cause = Literal[
    "first",
    "retry",
    "redeployment",
    "fallback",
    "orphan_recovery",
    "self_correction",
    "context_trim",
    "credential_refresh",
    "output_limit",
    "parameter",
    "provider_state",
    "probe",
    "batch",
]
"""The reason for an attempt. Attempts with a cause from `orphan_recovery` on do not count as tries of their model.

`redeployment` is a retry on a deployment of the model that the job has not called before.

`batch` is the first attempt for the next inputs of an embeddings job, if its model takes fewer inputs at a time.
"""
REPAIRS: frozenset[Cause] = frozenset(get_args(Cause)[get_args(Cause).index("orphan_recovery") :]) - {"probe"}
"""The causes of attempts that go on with a job after a repair, or with its next inputs."""
Waste = Literal["retry", "redeployment", "fallback", "self_correction", "worker_lost", "failed", "cancelled"]
"""The reason why the cost of an attempt was wasted: the step that followed it, or its failure."""
CostBasis = Literal["billed", "estimated", "unknown", "none"]
"""The source of a cost; `none` if no call was made."""
Status = Literal["succeeded", "dead_lettered", "cancelled"]
FinishReason = Annotated[
    str | None,
    Field(
        description="Why the model stopped: `stop`, `length` (the answer is truncated), `tool_calls`, "
        "`content_filter`, or the provider's own word. Null if not reported.",
    ),
]
Reason = Literal[
    "error",
    "timeout",
    "breaker_open",
    "budget_exceeded",
    "guard_tripped",
    "rate_limited",
    "invalid",
    "worker_lost",
    "dependency_failed",
    "cancelled",
]

RunId = Annotated[str, StringConstraints(min_length=1, max_length=512, pattern=NO_CONTROLS)]
# The fields that name a job in all records of it: the caller's own ids, and those by which the plane knows the same.
OwnJobId = Annotated[Identifier, Field(description="Id of the job, as its caller chose it, or generated.")]
OwnTaskId = Annotated[Identifier | None, Field(description="Task, as the caller named it.")]
OpaqueTaskKey = Annotated[
    Identifier | None, Field(description="The same task as the plane knows it: unique among all callers of a tenant.")
]
ParentExecutionId = Annotated[Identifier | None, Field(description="Execution that it is part of.")]
ParentJobId = Annotated[Identifier | None, Field(description="The same as the job named it.")]
OwnPlanId = Annotated[Identifier | None, Field(description="Plan, as the caller named it.")]
OpaquePlanKey = Annotated[Identifier | None, Field(description="The same plan as the plane knows it.")]


class ErrorInfo(Event):
    """The redacted reason why an attempt or an execution failed."""

    kind: ErrorKind
    class_: str = Field(
        validation_alias=AliasChoices("class", "class_"),
        serialization_alias="class",
        description="Class name, such as RateLimitError.",
    )
    message: str
    figures: str | None = Field(
        default=None,
        description="For operators: what was needed, what is left of which limit, and what to do. In attempts on "
        "EVENTS, in ClickHouse, and in results that the HTTP API shows to operators; never in what NATS users read.",
    )
    status_code: int | None = None
    retryable: bool = False
    retry_after_s: float | None = Field(default=None, description="Recommended wait before another try, if known.")
    param: str | None = Field(
        default=None, description="The field of the request at fault, if the provider names one: `temperature`."
    )
    hash: str | None = Field(default=None, description="Hash of the normalized error: 8 hex digits.")
    user_message: str | None = Field(default=None, description="A message that a parent agent or an end user may see.")


class FailureStatistics(Event):
    """The failures of a task or a model that a guard or a breaker stopped, without limits and thresholds."""

    consecutive_failures: Count
    total_failures: Count
    unique_errors: Count = Field(description="Number of different errors among them.")
    reason: str = Field(description="Reason for the stop, in words: `3 jobs in a row failed`.")

    def in_words(self) -> str:
        """Returns the reason and the failures: `3 jobs in a row failed (5 failures in all, 2 different errors)`."""
        if not self.total_failures:
            return f"{self.reason} (no failures)"
        failures = quantity(self.total_failures, "failure")
        return f"{self.reason} ({failures} in all, {quantity(self.unique_errors, 'different error')})"


class Attempt(Event):
    """An attempt: one call of one model, or its refusal. Recorded once, on its own subject."""

    __slots__ = ("_json",)

    attempt_id: str = Field(description="`<execution_id>:<number>`, numbered from 1.")
    execution_id: Identifier
    job_id: OwnJobId
    agent: Identifier
    tenant: Identifier | None = None
    task_id: OwnTaskId = None
    task_key: OpaqueTaskKey = None
    submitted_by: Identifier | None = Field(
        default=None,
        description="Name of the API key that the job was submitted with. Null over NATS, which does not say who its "
        "users are.",
    )
    user: Identifier | None = Field(
        default=None,
        description="User whose call it is: of the API key, else as a trusted proxy or the job itself names it.",
    )
    team: Identifier | None = Field(default=None, description="Team whose call it is, as `user`.")
    caller: Identifier | None = Field(
        default=None,
        description="That API key, or else the program that the job belongs to. Breakers distinguish callers by "
        "it, and by `tenant`.",
    )
    cost_tags: dict[str, str] = Field(
        default_factory=dict,
        description="Values for the `cost_tags` of the config: tags of the API key, or else the job's metadata.",
    )
    number: int = Field(ge=1)
    model: ModelId
    provider: str
    deployment: str | None = Field(
        default=None,
        description="Which of the model's `deployments`: `<provider>/<name there>`, and `#<key>` if it names a key. "
        "Null for a model without them.",
    )
    provider_key: str | None = Field(
        default=None,
        description="Name of the deployment's key, by its source in the config; null for the provider's own.",
    )
    started_at: Timestamp
    completed_at: Timestamp
    duration_ms: Count
    input_tokens: Count | None = Field(default=None, description="Estimated if the model reported none.")
    output_tokens: Count | None = Field(default=None, description="Estimated if the model reported none.")
    cached_tokens: Count | None = Field(default=None, description="Input tokens that the provider read from its cache.")
    reasoning_tokens: Count | None = Field(default=None, description="Output tokens that were spent on reasoning.")
    usage_problem: str | None = Field(
        default=None,
        description="Reported usage that can't be true or has no price. The cost is then an estimate.",
    )
    response_model: str | None = Field(
        default=None,
        description="The model named by the response, if it differs from the requested one. It is "
        "charged at its own price, or the cost is an estimate.",
    )
    finish_reason: FinishReason = None
    first_token_ms: Count | None = Field(
        default=None,
        description="Milliseconds from `started_at` until the answer began. Null if it never began, or did not stream.",
    )
    chunks: Count | None = Field(default=None, description="Number of chunks received. Null if not streamed.")
    cost: Money | None = Field(default=None, description="Null if unknown, never zero.")
    cost_basis: CostBasis = "unknown"
    reserved: Money | None = Field(
        default=None,
        description="Worst case, reserved in the budgets during the call; of a refused call, what it would have "
        "reserved. Null without a price.",
    )
    reserved_tokens: Count | None = Field(
        default=None,
        description="Same in tokens, which a call of unknown usage counts towards limits. Null for a program.",
    )
    reserved_at: Timestamp | None = Field(
        default=None, description="By Redis' clock. The cost counts for the day and the longer periods of this time."
    )
    task_asked_at: Timestamp | None = Field(
        default=None,
        description="When the guard of the job's task was asked last, by Redis' clock. Null if it was not asked, as "
        "for a job that is the whole task.",
    )
    outcome: Outcome
    error: ErrorInfo | None = None
    short_circuited: bool = False
    refused_by: str | None = Field(
        default=None,
        description="What refused the call: the name of a budget, such as `agent:writer/daily`, or of a limit.",
    )
    refused_cap: Money | None = Field(
        default=None,
        description="The hard limit that had no room for the call, unless it is too small for any such "
        "call. Like `figures` of errors, null in results and records.",
    )
    refused_reason: Reason | None = Field(
        default=None,
        description="For a refused call: reason of the job's end, unless another model succeeds.",
    )
    statistics: FailureStatistics | None = Field(
        default=None, description="For a call that a guard or a breaker refused."
    )
    ends_chain: bool = Field(default=False, description="For a refused call: true if no other model is tried.")
    counts_for_breaker: bool = Field(default=False, description="True if the breaker counts this failure.")
    tried_again: bool = Field(
        default=False,
        description="True if the job is to call the same model again after this failure, which is not its end there. "
        "Breakers with `count: jobs` wait for the last attempt.",
    )
    breaker_version: Count | None = Field(
        default=None,
        description="Version of the breaker that admitted the call; the outcome counts for that version only.",
    )
    cause: Cause
    backoff_ms: Count = Field(default=0, description="How long the job waited before this attempt.")
    dropped_messages: Count = Field(
        default=0, description="Messages of the job omitted from this call: orphaned tool calls, or trimmed turns."
    )
    dropped_params: tuple[str, ...] = Field(
        default=(),
        description="Params of the agent, or of the job itself (`on_unsupported_param: drop`), omitted from this call "
        "because the model refuses them; by their names in a chat.",
    )

    def json_bytes(self) -> bytes:
        """Overridden to write it once: it is in its event, and in the result and the record of its job."""
        written: bytes | None = getattr(self, "_json", None)
        if written is None:
            written = super().json_bytes()
            object.__setattr__(self, "_json", written)
        return written

    @property
    def unit(self) -> str:
        """The unit of its breaker and its health: the deployment if the model lists some, else the model."""
        return self.deployment or self.model

    @property
    def tokens_per_s(self) -> float | None:
        """The speed of a streamed answer, in output tokens per second after the first.

        None if the call failed, if its answer was not streamed or came in one piece, or if the number of its tokens is
        unknown.
        """
        tokens = (self.output_tokens or 0) - 1
        first_ms = self.first_token_ms
        if self.outcome != "success" or first_ms is None or (self.chunks or 0) < 2 or tokens < 1:
            return None
        return tokens * 1000 / (self.duration_ms - first_ms) if self.duration_ms > first_ms else None


class Cancellation(Event):
    """A job's cancellation: by whom, and why."""

    by: Literal["api_key", "person", "program", "client_disconnect"] = Field(
        description="`client_disconnect`: the client of a streamed answer disconnected."
    )
    name: str | None = Field(default=None, description="Name of the API key, the person, or the program's NATS user.")
    key_id: str | None = Field(default=None, description="Id of the API key.")
    reason: str | None = Field(default=None, description="As it was given, redacted.")
    at: Timestamp = Field(description="When it was requested.")


class PendingCancel(Event):
    """A request to cancel a job, which is sent to all workers, and kept in Redis until the job ends."""

    execution_id: Identifier
    cancellation: Cancellation
    agents: tuple[Identifier, ...] = Field(default=(), description="Cancel only jobs of these agents; empty: any.")
    tenants: tuple[Identifier, ...] = Field(default=(), description="Cancel only jobs of these tenants; empty: any.")
    owner: Identifier | None = Field(default=None, description="Cancel only jobs of this owner; null: any.")


class Execution(Event):
    """The terminal record of a job, exactly one for each execution. It is stored redacted."""

    holds_texts = True

    execution_id: Identifier
    job_id: OwnJobId
    agent: Identifier
    api: CallApi = Field(default="chat", description="The API that the job's request is written for.")
    tenant: Identifier | None = None
    task_id: OwnTaskId = None
    task_key: OpaqueTaskKey = None
    parent_execution_id: ParentExecutionId = None
    parent_job_id: ParentJobId = None
    plan_id: OwnPlanId = None
    plan_key: OpaquePlanKey = None
    run_id: RunId | None = Field(
        default=None,
        description="Run that this execution is a step of: its task, else its session, else the run of its parent, "
        "else its trace, else a run of its own. With a tenant, prefixed with `<tenant>/`.",
    )
    status: Status
    reason: Reason | None = None
    requested_model: ModelId | None = None
    chosen_model: ModelId | None = None
    fallback_chain: tuple[ModelId, ...] = ()
    own_rules: tuple[RulesPart, ...] = Field(
        default=(), description="What the job brought rules of its own for, other than its agent's."
    )
    attempts: tuple[Attempt, ...] = ()
    attempts_count: Count = 0
    input_tokens: Count = 0
    output_tokens: Count = 0
    cached_tokens: Count = 0
    total_tokens: Count = 0
    total_cost: Money | None = Field(default=None, description="Sum over all attempts; null if no part of it is known.")
    wasted_cost: Money | None = Field(default=None, description="Cost of the attempts that did not produce the result.")
    wasted_by_cause: dict[Waste, Money] = Field(
        default_factory=dict, description="The known parts of `wasted_cost`, by cause."
    )
    cost_basis: CostBasis = "unknown"
    requested_model_cost: Money | None = Field(
        default=None,
        description="If a fallback model answered: what the tokens of its answer would have cost on the requested "
        "model. Null if a price is unknown.",
    )
    output: JsonValue = None
    finish_reason: FinishReason = None
    error: ErrorInfo | None = None
    statistics: FailureStatistics | None = Field(
        default=None,
        description="Failures of the task, or of the breaker's model, if a guard or a breaker ended the "
        "job or its failure stopped its task.",
    )
    messages: list[dict[str, JsonValue]] | None = None
    input: JsonValue = Field(default=None, description="Input of a process or python agent.")
    params: dict[str, JsonValue] | None = Field(
        default=None,
        description="The job's own `params`, if its texts are stored; its agent's are in the config.",
    )
    metadata: dict[str, JsonValue] = Field(default_factory=dict)
    queued_at: Timestamp
    dispatched_at: Timestamp
    started_at: Timestamp | None = None
    completed_at: Timestamp
    duration_ms: Count
    task_counted_at: Timestamp | None = Field(
        default=None,
        description="When the job's task counted its end, by Redis' clock. Null if it had none, or the job is the "
        "whole task, or a worker that was lost had it counted.",
    )
    cache_hit: bool = Field(default=False, description="Answered from the cache: no call, no cost.")
    cached_from: Identifier | None = Field(default=None, description="Execution that a cached answer comes from.")
    dry_run: bool = False
    owner: Identifier | None = Field(default=None, description="Name of the API key that the job belongs to, if any.")
    submitted_by: Identifier | None = Field(
        default=None,
        description="Name of the API key that the job was submitted with, or NATS user of the program. Null for the "
        "NATS user that all programs share.",
    )
    user: Identifier | None = Field(
        default=None,
        description="User whose job it is: of the API key, else as a trusted proxy or the job itself names it.",
    )
    team: Identifier | None = Field(default=None, description="Team whose job it is, as `user`.")
    job_digest: str | None = Field(
        default=None,
        description="Digest of the request. A different request with the same id is refused (`id_conflict`).",
    )
    config_version: str | None = Field(default=None, description="Digest of the config that the job ran with.")
    trace_id: str | None = Field(
        default=None,
        description="Trace id of the calls (W3C Trace Context): 32 hex digits. Null if not sampled.",
    )
    cancellation: Cancellation | None = Field(default=None, description="Who cancelled the job, and why.")
    encrypted: Encrypted = None

    @property
    def is_answered_by_model(self) -> bool:
        """True if a model answered the job: it was neither refused, nor failed, nor answered from the cache."""
        return self.status == "succeeded" and self.chosen_model is not None and not (self.cache_hit or self.dry_run)

    @property
    def fell_back(self) -> bool:
        """True if a fallback model answered."""
        return self.is_answered_by_model and self.chosen_model != self.requested_model

    @property
    def fallback_costs(self) -> tuple[int, int] | None:
        """The cost of a fallback model's answer, and the cost that it would have had on the requested model.

        None if no fallback model answered, or if one of the costs is unknown.
        """
        if not self.fell_back or not self.requested_model_cost:
            return None
        if self.total_cost is None or self.cost_basis == "unknown":
            return None
        return self.total_cost - (self.wasted_cost or 0), self.requested_model_cost

    @property
    def cost_usd(self) -> Decimal | None:
        """`total_cost` in dollars, exactly."""
        return None if self.total_cost is None else Decimal(self.total_cost).scaleb(-9)


class Choice(Event):
    """One of several answers to the same call."""

    index: Count
    output: JsonValue = Field(description="Same as the execution's; null if not reported.")
    finish_reason: FinishReason = None


class Allowance(Event):
    """The limit of a window, and the rest of it when the job's last call was admitted or refused."""

    limit: Count = Field(description="Requests or tokens that fit into the window.")
    remaining: Count = Field(description="What is left. A call takes the most tokens that it may use until it ends.")
    resets_at: Timestamp = Field(description="When all of it is available again, unless there are further calls.")


class CallerLimits(Event):
    """The rate limits of a job's caller, as of its last call or refusal.

    Of those of its key, user, team, tenant, agent and task, the one with the least left counts. Limits that it shares
    with strangers, such as those of a model, are not shown.
    """

    requests: Allowance | None = None
    tokens: Allowance | None = None


_LIMITS = "The rate limits of the caller; null if none applied to a call."


class Result(Execution):
    """The result of a job, for its submitter: the execution with its output as the model returned it."""

    is_sent_to_programs = True

    type: Literal["result"] = Field(default="result", description="Distinguishes it from `AnswerChunks` at `reply_to`.")
    choices: tuple[Choice, ...] = Field(
        default=(),
        description="All choices of a response with several, as with `n` in `params`, as the model "
        "returned them. `output` is the first one that is not empty.",
    )
    limits: CallerLimits | None = Field(default=None, description=_LIMITS)
    response: dict[str, JsonValue] | None = Field(
        default=None,
        description="The provider's own response, as JSON, if the job has `include_response`: all "
        "choices, ids and details of usage. Null if the answer comes from a process or a "
        "callable, or is over 3 MB. Of a process that failed, what it printed.",
    )


class AnswerChunks(Event):
    """A part of an answer while it is produced: unredacted, not stored, and delivered at most once."""

    type: Literal["chunks"] = Field(default="chunks", description="Distinguishes them from the `Result` at `reply_to`.")
    execution_id: Identifier
    job_id: OwnJobId
    agent: Identifier
    number: int = Field(
        ge=1, description="From 1, without gaps. If one is missing, read the whole answer from the result."
    )
    attempt: int = Field(ge=1, description="The attempt's number, from 1.")
    model: ModelId
    dropped_params: tuple[str, ...] = Field(default=(), description="As in the attempt. Absent if there are none.")
    limits: CallerLimits | None = Field(default=None, description=f"{_LIMITS} Only in the first message.")
    chunks: tuple[dict[str, JsonValue], ...] = Field(
        description="`chat.completion.chunk` objects in OpenAI's format: the provider's own, or converted."
    )


Notification = Literal[
    "agent.attempt.start",
    "agent.attempt.finish",
    "agent.attempt.error",
    "agent.breaker.open",
    "agent.budget.exceeded",
    "llm_request_failed",
    "llm_retry_attempt",
    "llm_retry_exhausted",
    "orphan_tool_calls_pruned",
    "context_trimmed",
]


class Progress(Event):
    """A live step of an execution; not stored. Error texts are redacted.

    The first step is `queued`, the last is the end; `at` is read on the worker's clock and does not go back.
    """

    execution_id: Identifier
    job_id: OwnJobId
    agent: Identifier
    state: Literal[
        "queued", "dispatched", "in_progress", "retried", "waiting", "succeeded", "dead_lettered", "cancelled"
    ]
    event: Notification | None = Field(default=None, description="Step that has just happened.")
    at: Timestamp
    attempt: int | None = Field(default=None, description="The attempt's number, from 1.")
    model: ModelId | None = None
    tenant: Identifier | None = None
    task_id: OwnTaskId = None
    task_key: OpaqueTaskKey = None
    parent_execution_id: ParentExecutionId = None
    parent_job_id: ParentJobId = None
    plan_id: OwnPlanId = None
    plan_key: OpaquePlanKey = None
    run_id: RunId | None = None
    duration_ms: Count | None = None
    input_tokens: Count | None = None
    output_tokens: Count | None = None
    success: bool | None = None
    error_type: str | None = Field(default=None, description="Code such as `Unauthorized`.")
    error_class: str | None = Field(default=None, description="Class name such as `UnauthorizedError`.")
    error_message: str | None = None
    status_code: int | None = None
    retryable: bool | None = None
    delay_ms: Count | None = Field(default=None, description="Wait before the next attempt.")
    count: Count | None = Field(default=None, description="Number of dropped messages.")
    detail: str | None = None
    scope: str | None = Field(
        default=None, description="For `agent.budget.exceeded`: the limit that refused, such as `agent:writer/daily`."
    )
    enforcement: Literal["hard"] | None = Field(
        default=None, description="For the same step. Soft limits refuse nothing."
    )


PageCursor = Annotated[str, StringConstraints(min_length=1, max_length=200)]


class ExecutionQuery(Message):
    """A filter of executions, and a page of them."""

    agent: Identifier | None = Field(default=None, description="Filter by agent.")
    status: Status | None = Field(default=None, description="Filter by status.")
    reason: Reason | None = Field(default=None, description="Filter by reason.")
    model: ModelId | None = Field(
        default=None, description="Filter by model: the one that answered, or else the requested one."
    )
    tenant: Identifier | None = Field(default=None, description="Filter by tenant.")
    user: Identifier | None = Field(default=None, description="Filter by user.")
    team: Identifier | None = Field(default=None, description="Filter by team.")
    task_id: Identifier | None = Field(default=None, description="Filter by task: its `task_id` or `task_key`.")
    run_id: RunId | None = Field(default=None, description="Filter by run.")
    plan_id: Identifier | None = Field(default=None, description="Filter by plan: its `plan_id` or `plan_key`.")
    error_kind: ErrorKind | None = Field(default=None, description="Filter by kind of error.")
    text: Annotated[str, StringConstraints(min_length=1, max_length=500, pattern=NO_CONTROLS)] | None = Field(
        default=None,
        description="An id or its beginning, or words in an error message, output or prompt "
        "(case-insensitive). Texts are searched in the newest 20,000 executions that match "
        "the other parameters.",
    )
    min_cost: UsdAmount | None = Field(default=None, description="Minimum cost in USD, such as `0.05`.")
    since: Moment | None = Field(default=None, description="Earliest end (inclusive): a time in RFC 3339.")
    until: Moment | None = Field(default=None, description="Latest end (exclusive): a time in RFC 3339.")
    dry_runs: bool = Field(default=True, description="True to include dry runs.")
    after: PageCursor | None = Field(
        default=None, description="`older` of a page, to get the next one. Keep the other parameters."
    )
    before: PageCursor | None = Field(
        default=None, description="`newer` of a page, to get the previous one. Keep the other parameters."
    )
    limit: Annotated[int, Field(ge=1, le=1_000, description="Maximum number of results per page.")] = 100

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.after is not None and self.before is not None:
            raise ValueError("`after` and `before` exclude each other; leave one out")
        return self


Preview = Annotated[str | None, Field(max_length=200)]

_IN_LISTS = "Redacted; null if its agent does not keep it, if texts are encrypted, and in the stream of events."


class ExecutionSummary(Event):
    """An execution without its texts and attempts, for lists and for the stream of events."""

    execution_id: Identifier
    job_id: OwnJobId
    agent: Identifier
    tenant: Identifier | None = None
    task_id: OwnTaskId = None
    task_key: OpaqueTaskKey = None
    parent_execution_id: ParentExecutionId = None
    parent_job_id: ParentJobId = None
    plan_id: OwnPlanId = None
    plan_key: OpaquePlanKey = None
    run_id: RunId | None = None
    status: Status
    reason: Reason | None = None
    requested_model: ModelId | None = None
    chosen_model: ModelId | None = None
    attempts_count: Count
    total_tokens: Count
    total_cost: Money | None = Field(default=None, description="Null if no part of it is known.")
    wasted_cost: Money | None = None
    cost_basis: CostBasis
    duration_ms: Count
    completed_at: Timestamp
    error_kind: ErrorKind | None = None
    error_message: str | None = Field(default=None, description="Redacted.")
    error_status_code: int | None = Field(default=None, description="HTTP status that the provider answered with.")
    cache_hit: bool
    dry_run: bool
    submitted_by: Identifier | None = Field(default=None, description="As in the execution.")
    user: Identifier | None = Field(default=None, description="As in the execution.")
    team: Identifier | None = Field(default=None, description="As in the execution.")
    prompt_preview: Preview = Field(
        default=None, description=f"The beginning of the prompt, or of the last message of a user. {_IN_LISTS}"
    )
    output_preview: Preview = Field(default=None, description=f"The beginning of the output. {_IN_LISTS}")

    @property
    def model(self) -> str | None:
        """The model that answered, or the requested model if none did."""
        return self.chosen_model or self.requested_model

    @classmethod
    def of(cls, record: Execution) -> Self:
        """Returns the summary of a record."""
        error = record.error
        left_out = ("error_", "prompt_preview", "output_preview")
        fields = {name: getattr(record, name) for name in cls.model_fields if not name.startswith(left_out)}
        return cls(
            **fields,
            error_kind=error and error.kind,
            error_message=error and error.message,
            error_status_code=error and error.status_code,
        )


class ExecutionList(Event):
    """Some of the executions that match, the newest first."""

    executions: tuple[ExecutionSummary, ...]
    older: str | None = Field(description="Pass as `after` to get the page of older executions. Null on the last page.")
    newer: str | None = Field(
        description="Pass as `before` to get the page of newer executions. Null on the first page."
    )


class RunSummary(Event):
    """A run: the executions of one task, session, trace, or tree of parents and children, with their totals."""

    run_id: RunId
    tenant: Identifier | None = None
    execution_id: Identifier = Field(description="The first step.")
    job_id: Identifier = Field(description="Id of its job.")
    agents: tuple[Identifier, ...]
    models: tuple[ModelId, ...] = Field(description="Models that answered, or else were requested.")
    steps: Count = Field(description="Number of completed executions, including dry runs.")
    failed: Count = Field(description="Number of dead-lettered steps.")
    status: Status = Field(description="Worst status of all steps: `dead_lettered`, `cancelled`, or `succeeded`.")
    reason: Reason | None = Field(default=None, description="Reason of the last step with this status.")
    error_message: str | None = Field(default=None, description="Error of the last step with this status; redacted.")
    attempts_count: Count
    total_tokens: Count
    total_cost: Money | None = Field(default=None, description="Null when no part of it is known.")
    wasted_cost: Money | None = None
    cost_basis: CostBasis = Field(description="Weakest basis of all steps.")
    started_at: Timestamp = Field(description="Time at which the first step was queued.")
    completed_at: Timestamp = Field(description="Time at which the last step ended.")
    duration_ms: Count = Field(description="From `started_at` to `completed_at`.")
    cache_hit: bool = Field(description="True if all steps were answered from the cache.")
    dry_run: bool = Field(description="True if all steps are dry runs.")
    submitted_by: Identifier | None = Field(default=None, description="Of the first step.")
    user: Identifier | None = Field(default=None, description="Of the first step.")
    prompt_preview: Preview = Field(default=None, description="Of the first step, as in `ExecutionSummary`.")
    output_preview: Preview = Field(default=None, description="Of the last step, as in `ExecutionSummary`.")


class RunList(Event):
    """Runs with a matching step, ordered by the end of the last matching step, newest first."""

    runs: tuple[RunSummary, ...]
    older: str | None = Field(description="Pass as `after` to get the page of older runs. Null on the last page.")
    newer: str | None = Field(description="Pass as `before` to get the page of newer runs. Null on the first page.")


class RunSteps(Event):
    """The executions of one run that have ended."""

    steps: tuple[ExecutionSummary, ...] = Field(description="In the order in which they were queued; at most 1,000.")
