"""The HTTP API: what requests carry, and what responses hold.

Queries and bodies of requests are `Message`s: a field that is not known is an error. What responses hold are `Event`s:
clients ignore fields that they do not know. Events that are also published stand in `events`, `alerts` and `execution`.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)

from breakwater.contracts.alerts import Alert, AlertEvent, IncidentStatus
from breakwater.contracts.events import (
    BreakerState,
    CapRaise,
    Enforcement,
    GuardRule,
    Health,
    LiveHealth,
    Scope,
    Window,
)
from breakwater.contracts.execution import Attempt, Cancellation, CostBasis, ErrorKind, Execution, Reason, Status
from breakwater.contracts.job import MAX_DEPENDENCIES, MAX_FALLBACK_MODELS, ChatMessage, Job, OwnRules, TotalTimeout
from breakwater.contracts.types import (
    NO_CONTROLS,
    NO_CONTROLS_OR_EMPTY,
    Count,
    Event,
    FullId,
    Identifier,
    Message,
    ModelId,
    Money,
    Timestamp,
    UsdAmount,
)
from breakwater.contracts.validation import FieldError

KeyScope = Literal["submit", "read", "operate", "approve", "audit"]
"""What an API key may be used for: `submit` jobs and read their results; `read` the state of everything, redacted;
`operate`: what people do, such as reset a breaker or replay a job; `approve`: the part of that which decides on
incidents, stopped tasks and caps; `audit`: see who did that, in the console."""

KEY_SCOPES: tuple[KeyScope, ...] = get_args(KeyScope)

CallerKind = Literal["key", "person"]
"""Who sends a request: the holder of an API key, or somebody who signed in with OpenID Connect."""

Role = Literal["viewer", "operator", "approver", "admin"]
"""What a person may do who signs in with OpenID Connect."""

ReasonText = Annotated[str, StringConstraints(strip_whitespace=True, max_length=500, pattern=NO_CONTROLS_OR_EMPTY)]
"""A person's reason, in one line."""

Limit = Annotated[int, Field(ge=1, le=1_000, description="The most to list; the newest are listed.")]


# Errors


class ErrorDetails(Message):
    """What went wrong, and what to do about it."""

    code: str = Field(description="Stable, for programs: `invalid_job`, `unknown_agent`, …")
    message: str = Field(description="For people.")
    details: tuple[FieldError, ...] = ()


class ErrorBody(Message):
    """The body of every response with a status of 400 or above."""

    error: ErrorDetails


# Jobs


class SubmitQuery(Message):
    """How long to wait for the result of a job."""

    wait_s: Annotated[float, Field(gt=0, le=300)] | None = Field(
        default=None, description="Seconds to wait for the result. If it comes in time, the response is 200 with it."
    )


class AcceptedJob(Event):
    """A job that is stored and will be decided, whatever crashes."""

    job_id: FullId
    execution_id: FullId = Field(description="The same as `job_id`.")
    status: Literal["accepted"] = "accepted"
    duplicate: bool = Field(
        default=False,
        description="Whether a job with this id was queued within the last ten minutes; this one was not queued again.",
    )


class UndecidedJob(Event):
    """A job that was accepted and has not ended yet."""

    job_id: FullId
    execution_id: FullId = Field(description="The same as `job_id`.")
    status: Literal["accepted"] = "accepted"
    attempts: tuple[Attempt, ...] = Field(description="Those that have ended, in order.")


class CancelRequest(Message):
    """Why a job is cancelled."""

    reason: ReasonText | None = Field(default=None, description="For the record, redacted.")


class CancelledJob(Event):
    """What became of a job that was to be cancelled."""

    job_id: FullId
    execution_id: FullId = Field(description="The same as `job_id`.")
    status: Literal["cancelling"] | Status = Field(
        description="`cancelling`: it will end `cancelled`, without another call, unless its answer is just being "
        "stored. Otherwise how the job has ended; if not `cancelled`, it had ended before."
    )
    reason: Reason | None = None
    completed_at: Timestamp | None = None
    total_cost: Money | None = None
    cost_basis: CostBasis | None = None
    cancellation: Cancellation | None = Field(default=None, description="Who cancelled it first, and why.")


# Plans

PlanJobStatus = Literal["pending", "running"] | Status
"""`pending`: no model was called for it yet. A job is that, too, while it waits for those that it depends on."""
PlanState = Literal["draft", "pending", "running", "succeeded", "failed", "partial"]

MAX_PLANNED = 1_000


class PlanRequest(Message):
    """A plan to submit: all of its jobs, or none yet."""

    plan_id: Identifier | None = Field(default=None, description="The plan's id. If absent, it is generated.")
    jobs: Annotated[list[Job], Field(max_length=MAX_PLANNED)] = Field(
        default_factory=list[Job],
        description="In any order. A job without `job_id` gets `<plan_id>.<its number, from 1>`. Without jobs, the "
        "plan is a draft.",
    )


class AcceptedPlan(Event):
    """A plan that was accepted: all of its jobs, or none yet."""

    plan_id: FullId
    job_ids: tuple[FullId, ...] = Field(description="In the order in which they were sent.")


class PlanQuery(Message):
    """Which plans to list."""

    limit: Annotated[int, Field(ge=1, le=200, description="The most to list; the newest are listed.")] = 50


class PlanJob(Event):
    """A job of a plan."""

    job_id: FullId
    agent: Identifier
    status: PlanJobStatus
    reason: Reason | None = None
    total_cost: Money | None = Field(default=None, description="Null while it is unknown.")
    wasted_cost: Money | None = None
    cost_basis: CostBasis | None = None
    queued_at: Timestamp
    completed_at: Timestamp | None = None


class PlanStatus(Event):
    """A plan: its state follows from its jobs, without dry runs."""

    plan_id: FullId
    state: PlanState = Field(
        description="`draft`: no job was accepted; `pending`: none has started; `running`: some have not ended; "
        "`succeeded`: all did; `partial`: all have ended, and some succeeded; `failed`: none did, or the plan was "
        "refused."
    )
    refusal: str | None = Field(default=None, description="Why the plan was refused, if none of its jobs was accepted.")
    jobs_by_status: dict[PlanJobStatus, Count]
    total_cost: Money | None = Field(
        default=None, description="Of the jobs that have ended; null when no part of it is known."
    )
    wasted_cost: Money | None = Field(
        default=None, description="The cost of all attempts that did not produce a result."
    )
    cost_basis: CostBasis
    first_queued_at: Timestamp | None = None
    last_completed_at: Timestamp | None = None
    jobs: tuple[PlanJob, ...] = Field(default=(), description="In the order of their ids; left out in lists.")


class PlanList(Event):
    """The newest plans, by what was queued or ended last."""

    plans: tuple[PlanStatus, ...]


# OpenAI's chat completions


class CallOptions(Message):
    """What OpenAI's requests have no field for: `breakwater` in the body, or headers. Each is what it is in a `Job`."""

    model_config = ConfigDict(strict=True)

    tenant: Identifier | None = None
    task_id: Identifier | None = None
    parent_execution_id: Identifier | None = None
    plan_id: Identifier | None = None
    depends_on: Annotated[list[Identifier], Field(max_length=MAX_DEPENDENCIES)] = Field(
        default_factory=list[Identifier]
    )
    fallback_models: list[ModelId] | None = Field(default=None, max_length=MAX_FALLBACK_MODELS)
    total_timeout_s: TotalTimeout | None = None
    breaker: OwnRules = None
    guard: OwnRules = None
    retry: OwnRules = None
    dry_run: bool = False
    skip_cache: bool = False
    metadata: dict[str, JsonValue] = Field(default_factory=dict)


class StreamOptions(Message):
    """OpenAI's `stream_options`."""

    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: bool | None = Field(default=None, description="Whether the last chunk carries the usage.")


class ChatCompletionRequest(Message):
    """OpenAI's request. All fields that are not named here become the job's `params`, except those that are null."""

    # `"stream": "no"` is a mistake, and no answer to it would be what is meant.
    model_config = ConfigDict(extra="allow", strict=True)

    model: Annotated[str, StringConstraints(min_length=1, max_length=400, pattern=NO_CONTROLS)] = Field(
        description="An agent, `agent/model`, or any model of the agent that the API key is bound to.",
        examples=["content-writer", "content-writer/gpt-4.1-mini"],
    )
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    stream: bool | None = Field(default=None, description="Whether the answer comes as server-sent events.")
    stream_options: StreamOptions | None = None
    breakwater: CallOptions | None = Field(default=None, description="In the SDK: `extra_body`.")


class ChatCompletion(Event):
    """OpenAI's `chat.completion`."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[dict[str, JsonValue]]
    usage: dict[str, JsonValue] | None = Field(default=None, description="Absent if unknown.")


class ModelName(Event):
    """A value of `model`."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="When this process read the config; seconds since the epoch.")
    owned_by: Literal["breakwater"] = "breakwater"


class ModelNames(Event):
    """The values of `model` that the API key may use."""

    object: Literal["list"] = "list"
    data: tuple[ModelName, ...]


class OpenAIErrorDetails(Event):
    """What went wrong, in OpenAI's words."""

    message: str
    type: str = Field(description="`invalid_request_error`, `insufficient_quota`, `rate_limit_error`, `server_error`.")
    param: str | None = Field(description="The field at fault, such as `messages[0].role`.")
    code: str = Field(description="Stable, for programs: `model_not_found`, `insufficient_quota`, …")


class OpenAIErrorBody(Event):
    """The body of every response under `/v1` with a status of 400 or above."""

    error: OpenAIErrorDetails


# The service and its API keys


class ServiceStatus(Event):
    """The state of the process."""

    status: Literal["alive", "ready"]


class KeyDetails(Event):
    """The API key that a request was sent with, without its secret; or the person whose session it belongs to."""

    id: str = Field(
        description="Public: names the key in `breakwater keys list` and in logs. Of a person: the provider's `sub`."
    )
    name: Identifier = Field(description="Who or what uses the key; actions are recorded under this name.")
    kind: CallerKind = "key"
    roles: tuple[Role, ...] = Field(default=(), description="Of a person. They have the scopes of all of them.")
    scopes: tuple[KeyScope, ...] = Field(description="What the key may be used for; at least one.")
    tenants: tuple[Identifier, ...] = Field(default=(), description="In whose name it submits; empty: in anyone's.")
    agents: tuple[Identifier, ...] = Field(default=(), description="For which agents it submits; empty: for all.")
    created_at: Timestamp = Field(description="When the key was made; of a person: when they signed in.")


class NewSession(Event):
    """A session, in which the holder of an API key, or a person, is signed in."""

    token: str = Field(description="Sent in place of a key. Shown once.")
    ends_at: Timestamp = Field(description="Or earlier, when it is ended, or the key is revoked.")


class EndedSession(Event):
    """A session that was ended."""

    ended: Literal[True] = True
    continue_at: str | None = Field(
        default=None,
        description="Of a person, where the OpenID provider offers it: the URL at which a browser ends the session "
        "there, too.",
    )


OPENID_CALLBACK = "/sign-in/openid/callback"
"""Where an OpenID provider sends browsers back to, below the console's URL."""


class OpenIdRedirect(Event):
    """How a sign-in with OpenID Connect begins."""

    url: str = Field(description="Where the browser is sent: the OpenID provider's page.")
    flow: str = Field(
        description="For the browser that signs in, and nobody else: it is sent back with what the provider answers."
    )


_OfProvider = Annotated[str, StringConstraints(max_length=4_096)]


class OpenIdCallback(Message):
    """What an OpenID provider has the browser bring back: the parameters of the redirect."""

    flow: Annotated[str, StringConstraints(min_length=1, max_length=200)] = Field(
        description="That of the browser, from the beginning of its sign-in."
    )
    state: _OfProvider = ""
    code: _OfProvider | None = None
    error: _OfProvider | None = None
    error_description: _OfProvider | None = None
    iss: _OfProvider | None = None


class BackChannelLogout(Message):
    """What an OpenID provider sends when somebody has signed out of it."""

    logout_token: Annotated[str, StringConstraints(min_length=1, max_length=8_192)] = Field(
        description="As OpenID Connect Back-Channel Logout 1.0 has it, signed by the provider."
    )


class EndedSessions(Event):
    """Sessions that were ended for somebody who has signed out elsewhere."""

    ended: int = Field(ge=0, description="How many.")


# Executions, and the stream of events


def _in_utc(moment: datetime) -> datetime:
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        raise ValueError("must be a time of the years 1 to 9999 in UTC") from None


Moment = Annotated[AwareDatetime, AfterValidator(_in_utc)]
"""A time in RFC 3339, with its zone."""

PageCursor = Annotated[str, StringConstraints(min_length=1, max_length=200)]


class ExecutionQuery(Message):
    """Which executions to list. What is left out restricts nothing."""

    agent: Identifier | None = Field(default=None, description="Only those of this agent.")
    status: Status | None = Field(default=None, description="Only those that ended so.")
    reason: Reason | None = Field(default=None, description="Only those that ended for this reason.")
    model: ModelId | None = Field(
        default=None, description="Only those that this model answered, or was asked for where none did."
    )
    tenant: Identifier | None = Field(default=None, description="Only those of this tenant.")
    task_id: FullId | None = Field(default=None, description="Only those of this task.")
    plan_id: FullId | None = Field(default=None, description="Only those of this plan.")
    error_kind: ErrorKind | None = Field(default=None, description="Only those that failed with an error of this kind.")
    text: Annotated[str, StringConstraints(min_length=1, max_length=500, pattern=NO_CONTROLS)] | None = Field(
        default=None,
        description="An id, or its beginning; or words of an error's message, an output or a prompt, in any case: "
        "these are looked for in the newest 20,000 that the other parameters leave.",
    )
    min_cost: UsdAmount | None = Field(
        default=None, description="Only those that cost at least so many dollars, such as `0.05`."
    )
    since: Moment | None = Field(default=None, description="Only those that ended from then on: a time in RFC 3339.")
    until: Moment | None = Field(default=None, description="Only those that ended before: a time in RFC 3339.")
    dry_runs: bool = Field(default=True, description="Whether dry runs are listed, too.")
    after: PageCursor | None = Field(
        default=None, description="`older` of a page, for the one that follows it; with the same other parameters."
    )
    before: PageCursor | None = Field(
        default=None, description="`newer` of a page, for the one in front of it; with the same other parameters."
    )
    limit: Annotated[int, Field(ge=1, le=1_000, description="How many there are on a page.")] = 100

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.after is not None and self.before is not None:
            raise ValueError("a page comes after one place or before one: leave out `after` or `before`")
        return self


class ExecutionSummary(Event):
    """An execution without its texts and its attempts, as it is listed and as the stream of events has it."""

    execution_id: FullId
    agent: Identifier
    tenant: Identifier | None = None
    task_id: FullId | None = None
    plan_id: FullId | None = None
    status: Status
    reason: Reason | None = None
    requested_model: ModelId | None = None
    chosen_model: ModelId | None = None
    attempts_count: Count
    total_tokens: Count
    total_cost: Money | None = Field(default=None, description="Null when no part of it is known.")
    wasted_cost: Money | None = None
    cost_basis: CostBasis
    duration_ms: Count
    completed_at: Timestamp
    error_kind: ErrorKind | None = None
    error_message: str | None = Field(default=None, description="Redacted.")
    cache_hit: bool
    dry_run: bool

    @property
    def model(self) -> str | None:
        """The one that answered, or was asked for where none did."""
        return self.chosen_model or self.requested_model

    @classmethod
    def of(cls, record: Execution) -> Self:
        """The summary of a record."""
        error = record.error
        fields = {name: getattr(record, name) for name in cls.model_fields if not name.startswith("error_")}
        return cls(**fields, error_kind=error and error.kind, error_message=error and error.message)


class ExecutionList(Event):
    """Some of the executions that match, the newest first."""

    executions: tuple[ExecutionSummary, ...]
    older: str | None = Field(
        description="For `after`: where the page of those that ended earlier begins. Null on the last page."
    )
    newer: str | None = Field(
        description="For `before`: where the page of those that ended later ends. Null on the first page."
    )


EventKind = Literal["attempts", "executions", "breakers", "budgets", "guards", "alerts"]
"""What the stream of events has: the second token of their subjects on the bus."""

EVENT_KINDS: tuple[EventKind, ...] = get_args(EventKind)


def _split(value: object) -> object:
    return value.split(",") if isinstance(value, str) else value


class EventQuery(Message):
    """Which events to send."""

    kinds: Annotated[
        tuple[EventKind, ...],
        BeforeValidator(_split),
        WithJsonSchema({"type": "array", "items": {"type": "string", "enum": list(EVENT_KINDS)}}),
    ] = Field(default=EVENT_KINDS, description="Only those of these kinds, separated by commas; by default all.")
    agent: Identifier | None = Field(
        default=None, description="Only those that name this agent. Those of a breaker that agents share name none."
    )


class EventGap(Event):
    """Events between two places in a stream can't be sent: they were removed for their age, or the stream is new."""

    stream: Literal["EVENTS", "ALERTS"]
    after: Count = Field(description="The sequence of the last event that is known to have been sent.")
    next: Count = Field(description="The sequence with which the stream of events goes on.")


# Agents, their breakers, and the guards of tasks


class OperatorRequest(Message):
    """An action of a person."""

    reason: ReasonText | None = Field(
        default=None, description="For the record, and for people who are notified; redacted."
    )


class BreakerRequest(OperatorRequest):
    """Which breaker, and why."""

    agent: Identifier = Field(description="`*` for a breaker that agents share.")
    model: ModelId = Field(description="`<provider>/*` for a provider's breaker.")


class GuardRequest(OperatorRequest):
    """Which task, and why."""

    task_id: FullId
    tenant: Identifier | None = Field(default=None, description="Whose task; omit it for a task of no tenant.")


class ModelHealth(Event):
    """The health of an agent on one model."""

    model: ModelId
    health: Health
    known: bool = Field(
        default=True,
        description="False if no call has ended in the last 30 days and nothing is amiss: `healthy` is assumed then.",
    )
    breaker: BreakerState | None = Field(description="None where the agent has no breaker.")
    consecutive_failures: Count
    last_failure_at: Timestamp | None = Field(default=None, description="Null once a call has succeeded.")
    last_success_at: Timestamp | None = None
    circuit_open_until: Timestamp | None = Field(
        default=None, description="When a probe may call; none while it is closed, or isolated."
    )
    held_until: Timestamp | None = Field(
        default=None, description="Until when no call is made, as its provider's rate limit asks; null where none does."
    )

    @property
    def shown(self) -> LiveHealth:
        """The health as people see it: `unknown` where it is assumed."""
        return self.health if self.known else "unknown"


class AgentHealth(Event):
    """The health of an agent: `degraded` if anything is amiss, `unhealthy` if none of its models can be called."""

    agent_id: Identifier
    health: Health
    known: bool = Field(
        default=True,
        description="False if no call has ended in the last 30 days and nothing is amiss: `healthy` is assumed then.",
    )
    consecutive_failures: Count = Field(description="Failed calls in a row, over all its models.")
    last_failure_at: Timestamp | None = Field(default=None, description="Null once a call has succeeded.")
    last_success_at: Timestamp | None = None
    circuit_open_until: Timestamp | None = Field(
        default=None, description="When one of its models may be called again; set while none may."
    )
    models: tuple[ModelHealth, ...] = ()

    @property
    def shown(self) -> LiveHealth:
        """The health as people see it: `unknown` where it is assumed."""
        return self.health if self.known else "unknown"


class BreakerStatus(Event):
    """The state of a breaker."""

    agent: Identifier = Field(description="`*` where all agents share it.")
    model: ModelId = Field(description="`<provider>/*` where it is a provider's.")
    state: BreakerState = Field(description="One whose `open_until` has passed is open until a call probes it.")
    health: Health
    reason: str | None = Field(default=None, description="The reason for the state, in words.")
    since: Timestamp | None = None
    open_until: Timestamp | None = None
    probe_until: Timestamp | None = Field(default=None, description="When the lease of the probe in flight ends.")
    held_until: Timestamp | None = Field(
        default=None, description="Until when its model is held, as the provider's rate limit asks. No failure."
    )
    consecutive_failures: Count
    total_failures: Count
    unique_errors: Count
    last_failure_at: Timestamp | None = None
    last_success_at: Timestamp | None = None
    version: Count


class BreakerList(Event):
    """The breakers as they are now."""

    breakers: tuple[BreakerStatus, ...]
    alive: bool = Field(description="Whether a breaker service is running: without one, no failure opens a breaker.")


class UnchangedBreaker(BreakerStatus):
    """There was nothing to do, and nothing was published: the breaker as it is."""

    unchanged: Literal[True] = True


class StoppedTask(Event):
    """A task that its guard stopped."""

    task_id: FullId
    tenant: Identifier | None = None
    agent: Identifier
    execution_id: FullId | None = None
    rule: GuardRule
    reason: str
    since: Timestamp


class StoppedTasks(Event):
    """The tasks that their guard has stopped, in the order in which they were stopped: the last 1,000 of them."""

    stopped: tuple[StoppedTask, ...]


# Budgets


class BudgetQuery(Message):
    """Whose budgets: those that a call of this agent, for this tenant, is held against."""

    agent: Identifier | None = Field(default=None, description="The agent of the call.")
    tenant: Identifier | None = Field(default=None, description="The tenant of the call.")


class RaiseCapRequest(OperatorRequest):
    """Which cap to raise, to what, and why."""

    budget: Annotated[str, StringConstraints(min_length=1, max_length=160, pattern=NO_CONTROLS)] = Field(
        description="Its name: `global/daily`, `agent:<name>/monthly`, `tenant:<name>/daily`.",
        examples=["global/daily"],
    )
    limit_usd: UsdAmount = Field(
        description="The new cap. Setting exactly the config's cap revokes an earlier raise.", examples=["50.00"]
    )
    reason: Annotated[ReasonText, Field(min_length=1)] = Field(  # pyright: ignore[reportIncompatibleVariableOverride]  # is frozen
        description="For the record, as it is about money; redacted."
    )


class EstimateAccuracy(Event):
    """How the worst case reserved for calls compares with their actual cost. Over calls that succeeded."""

    calls: Count
    reserved: Money = Field(description="Reserved for them.")
    cost: Money = Field(description="What they cost.")
    percent: float | None = Field(
        description="`cost` in percent of `reserved`: 25 means that four times the cost is reserved."
    )
    exceeded: Count = Field(
        description="Calls that cost more than was reserved for them. A hard cap relies on there being none."
    )


class BudgetStatus(Event):
    """A budget as it is now."""

    budget: str = Field(description="Its name: `global/daily`, `agent:<name>/monthly`, `tenant:<name>/daily`.")
    scope: Scope
    agent: Identifier | None = None
    tenant: Identifier | None = None
    window: Window
    period: str = Field(description="`2026-11-21` or `2026-11`, in the budget's time zone.")
    enforcement: Enforcement
    limit: Money | None = Field(default=None, description="The cap in effect; null if there is none.")
    raised: CapRaise | None = Field(default=None, description="Who raised the cap for this period.")
    spent: Money
    reserved: Money = Field(description="Reserved for calls in flight.")
    remaining: Money | None = Field(default=None, description="What further calls may cost; null without a cap.")
    reached: bool = Field(
        default=False,
        description="Whether the cap is reached: by what is spent and reserved; or a hard one has refused a call, and "
        "what is left is less than a call reserves on average.",
    )
    calls: Count
    calls_of_unknown_cost: Count
    resets_at: Timestamp
    estimate: EstimateAccuracy | None = Field(default=None, description="None before the first call.")


class BudgetList(Event):
    """The budgets of the current day and month."""

    filled: bool = Field(
        description="Whether the counters are complete. While they are rebuilt from the record, the figures mean "
        "nothing, and no call passes a hard cap."
    )
    budgets: tuple[BudgetStatus, ...]


class UnchangedBudget(BudgetStatus):
    """The cap is that already, and nothing was published: the budget as it is."""

    unchanged: Literal[True] = True


# Costs

CostsBy = Literal["agent", "tenant", "model", "provider", "key", "tag"]


class CostsQuery(Message):
    """A month, and by what its costs are grouped."""

    month: Annotated[str, StringConstraints(pattern=r"^20[0-9]{2}-(0[1-9]|1[0-2])$")] | None = Field(
        default=None, description="Such as `2026-11`, in the time zone of the budgets; by default the current one."
    )
    by: CostsBy = Field(
        default="agent", description="`key`: the name of the API key that submitted the job. `tag`: see `tag`."
    )
    tag: str | None = Field(
        default=None,
        max_length=64,
        description="With `by=tag`: which tag, one of `cost_tags` in the config, or of an earlier one.",
    )

    @model_validator(mode="after")
    def _tag_where_it_is_meant(self) -> Self:
        if self.by == "tag" and not self.tag:
            raise ValueError("tag: is missing; by=tag needs the name of one")
        if self.by != "tag" and self.tag:
            raise ValueError("tag: is for by=tag only")
        return self


class CostsListQuery(CostsQuery):
    """The same, and how many lines."""

    limit: Annotated[int, Field(ge=1, le=10_000)] = Field(
        default=1_000, description="The most lines; those of the highest spend come first, and `others` has the rest."
    )


class CostLine(Event):
    """What calls of one agent, tenant, … cost. An amount is null where nothing of it is known."""

    name: str | None = Field(description="Null for calls that have none: no tenant, no key, no such tag.")
    spend: Money | None = Field(description="A lower bound where there are `calls_of_unknown_cost`.")
    wasted: Money | None = Field(description="The part of `spend` for calls that failed.")
    estimated: Money = Field(description="The part of `spend` that is estimated, as no usage was reported.")
    previous: Money | None = Field(description="Spend of the whole month before.")
    cap: Money | None = Field(
        description="Of agents, tenants and the total: the monthly cap of the config as it is now, or what it was "
        "raised to in that month. Null if there is none."
    )
    forecast: Money | None = Field(
        description="Spend at the month's end, at the present pace. Null for a month that is over or has just begun."
    )
    calls: Count
    failed_calls: Count
    calls_of_unknown_cost: Count
    input_tokens: Count = Field(description="As far as they were reported; so for the other tokens.")
    output_tokens: Count
    cached_tokens: Count = Field(description="The part of the input tokens that came from the provider's cache.")


class Costs(Event):
    """What the calls of a month cost. A call counts in the month in which its budgets charge it."""

    month: str = Field(examples=["2026-11"])
    previous_month: str = Field(examples=["2026-10"])
    timezone: str = Field(description="Of the budgets.")
    starts_at: Timestamp
    ends_at: Timestamp = Field(description="The first moment that is no longer part of the month.")
    by: CostsBy
    tag: str | None = Field(default=None, description="With `by=tag`: which.")
    total: CostLine
    lines: tuple[CostLine, ...] = Field(description="Those of the highest spend first.")
    others: CostLine | None = Field(default=None, description="What the lines beyond `limit` have together.")
    cost_tags: tuple[str, ...] = Field(default=(), description="The tags that the config keeps now.")


# Alerts


class AlertQuery(Message):
    """Which incidents to list."""

    status: IncidentStatus | Literal["unresolved", "all"] = Field(
        default="unresolved", description="`unresolved` stands for every status but `resolved`."
    )
    event: AlertEvent | None = Field(
        default=None, description="The latest event of the incident, or its first: a breaker that closed was open."
    )
    agent: Identifier | None = Field(default=None, description="Only incidents of this agent.")
    limit: Limit = 100


class AlertRequest(OperatorRequest):
    """Which incident, and why."""

    incident_id: Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=NO_CONTROLS)] = Field(
        description="Its id, or a prefix that no other incident has: `inc_` and at least 6 characters.",
        examples=["inc_3f9a1c07"],
    )


class AlertList(Event):
    """Incidents, each as it is now; the one that was opened last comes first."""

    alerts: tuple[Alert, ...]
    more: bool = Field(description="Whether there are more than were asked for.")


class UnchangedAlert(Alert):
    """There was nothing to do, and nothing was published: the incident as it is."""

    unchanged: Literal[True]


class ChannelRequest(Message):
    """Which channel."""

    channel: Identifier = Field(description="Its name in `alerts.channels`.")


class UndeliveredQuery(Message):
    """Which undelivered alerts to list."""

    channel: Identifier | None = Field(default=None, description="Only alerts of this channel.")
    limit: Limit = 100


class UndeliveredAlert(Event):
    """An alert that did not reach a channel."""

    dead_letter_id: Count = Field(description="Its sequence in DLQ.")
    channel: str
    alert_id: str | None = Field(description="Or the id of a digest; None where what was kept can't be read.")
    title: str | None
    error: str = Field(description="Why it was given up.")
    at: Timestamp = Field(description="When it was given up.")
    replayed: bool = Field(
        description="Whether it was sent again since; if that failed too, there is another dead letter."
    )


class UndeliveredList(Event):
    """The alerts that were given up within thirty days, the latest first."""

    undelivered: tuple[UndeliveredAlert, ...]
    more: bool = Field(description="Whether there are more than were asked for.")


class ReplayAlertsRequest(Message):
    """Which undelivered alerts to send again; with no field set, all that were not sent again yet."""

    channel: Identifier | None = Field(default=None, description="Only alerts of this channel.")
    dead_letter_id: int | None = Field(
        default=None, ge=1, description="Only this one, even if it was sent again before."
    )
    after: int = Field(default=0, ge=0, description="Only those after this one: `continue_after` of the last response.")


class AlertReplays(Event):
    """The result of a request to send undelivered alerts again."""

    replayed: Count
    already: Count = Field(description="Those that were sent again before, and were left alone now.")
    skipped: Count = Field(description="Those of channels that are no longer in the config.")
    channels: dict[str, Count] = Field(description="How many each channel sends again.")
    continue_after: int | None = Field(
        default=None, description="There are more: ask again with this as `after`. None where that was all."
    )


# Dead letters

MAX_DEAD_LETTERS = 1_000
"""How many dead letters one request lists, or looks at to replay them, so that it is answered within seconds."""

DeadLetterKind = Literal["job", "alert", "event"]
ReplayStatus = Literal["accepted"] | Status


Number = Annotated[int, Field(strict=True)]
"""In JSON, `true` and `"1"` are none."""

ReasonFilter = Annotated[
    Annotated[str, StringConstraints(min_length=1, max_length=100, pattern=NO_CONTROLS)] | None,
    Field(description="Only those with this reason: error, timeout, invalid, …"),
]
AgentFilter = Annotated[
    Identifier | None, Field(description="Only those of this agent; `unknown` are those of which it is not known.")
]
Since = Annotated[
    Moment | None,
    Field(description="Only what was given up from then on: a time in RFC 3339. By default the last seven days."),
]


class DeadLetterQuery(Message):
    """Which dead letters to list."""

    reason: ReasonFilter = None
    agent: AgentFilter = None
    execution_id: FullId | None = Field(default=None, description="Only those of this execution.")
    since: Since = None
    limit: Limit = 100


class ListedDeadLetter(Event):
    """A dead letter, as it is listed."""

    dead_letter_id: Count = Field(description="Its sequence in DLQ.")
    kind: DeadLetterKind = Field(description="What the original is, by the stream that it was on.")
    reason: str = Field(description="Why it was given up, in a word.")
    agent: str | None = Field(description="None where it is not known, or where it is of no agent.")
    execution_id: str | None
    error: str = Field(description="Why it was given up, in words; redacted.")
    at: Timestamp = Field(description="When it was given up.")
    replayable: bool = Field(description="Whether a replay would run it.")
    why_not: str | None = Field(default=None, description="Why a replay would not, and what to do instead.")
    replayed_as: FullId | None = Field(default=None, description="The execution id of its replay, where it has one.")
    replay_status: ReplayStatus | None = Field(
        default=None,
        description="The status of its replay: `accepted` until it is decided. None where there was none, or where "
        "its record has aged out.",
    )


class DeadLetterDetails(ListedDeadLetter):
    """One dead letter, with the original message as far as it may be shown."""

    stream: str = Field(description="Where the original was.")
    subject: str
    sequence: Count
    headers: dict[str, JsonValue] = Field(description="Of the original; redacted.")
    payload: JsonValue = Field(
        description="The original, redacted: JSON; or a text where it is not JSON, or where it is cut. None where it "
        "is withheld."
    )
    payload_withheld: bool = Field(
        default=False,
        description="Whether nobody is shown the original, as its agent keeps no prompts or is configured no more. "
        "A replay reads it all the same.",
    )
    payload_omitted: bool = Field(
        default=False, description="Whether the original was too large to be kept; then a replay has nothing to run."
    )
    payload_sha256: str | None = Field(default=None, description="Of an original that was not kept, in hex.")
    payload_bytes: Count = Field(description="The length of the original.")
    payload_cut: bool = Field(description="Whether `payload` is only the beginning, as a text.")
    replayed_by: str | None = Field(default=None, description="Who replayed it.")
    replayed_at: Timestamp | None = None


class DeadLetterCount(Event):
    """How many dead letters there are of a reason and an agent."""

    reason: str
    agent: str = Field(description="`unknown` where it is not known.")
    count: Count


class DeadLetterList(Event):
    """Dead letters, the latest first."""

    dead_letters: tuple[ListedDeadLetter, ...]
    more: bool = Field(description="Whether there are more since then than were asked for.")
    counts: tuple[DeadLetterCount, ...] = Field(
        description="Of all dead letters, whatever was asked for; the largest count first."
    )


class ReplayDeadLettersRequest(Message):
    """Which dead letters to replay: some by their ids, or all of a reason, of an agent, or at all."""

    dead_letters: (
        Annotated[tuple[Annotated[Number, Field(ge=1)], ...], Field(min_length=1, max_length=MAX_DEAD_LETTERS)] | None
    ) = Field(default=None, description="Their ids; excludes all other filters.", examples=[[17]])
    reason: ReasonFilter = None
    agent: AgentFilter = None
    all: bool = Field(default=False, description="Of every reason and agent, where neither is named.")
    since: Since = None
    after: Number = Field(
        default=0, ge=0, description="Only those after this one: `continue_after` of the last response."
    )
    up_to: Number | None = Field(default=None, ge=0, description="None after this one: `up_to` of the last response.")
    why: ReasonText | None = Field(default=None, description="For the record; redacted.")

    @model_validator(mode="after")
    def _says_which(self) -> Self:
        chosen = self.reason is not None or self.agent is not None or self.all
        if self.dead_letters is not None and (chosen or self.since or self.after or self.up_to is not None):
            raise ValueError(
                "dead_letters says which ones are meant; leave out reason, agent, all, since, after and up_to"
            )
        if self.dead_letters is None and not chosen:
            raise ValueError("say which ones: dead_letters, or a reason, an agent, or all")
        if self.after and self.up_to is None:
            # A replay that fails again is another dead letter: without an end, they would be replayed for ever.
            raise ValueError("after needs up_to, which is in the same response as continue_after")
        return self


class ReplayedDeadLetter(Event):
    """A dead letter whose job runs again."""

    dead_letter_id: Count
    execution_id: FullId = Field(description="Of the new execution; its `metadata.replay_of` names the old one.")


class SkippedDeadLetter(Event):
    """A dead letter that was not replayed."""

    dead_letter_id: Count
    why: str


class DeadLetterReplays(Event):
    """The result of a request to replay dead letters."""

    replayed: tuple[ReplayedDeadLetter, ...] = Field(description="Those whose jobs this request has queued.")
    already: Count = Field(description="Those that were replayed before, and were left alone now.")
    skipped: tuple[SkippedDeadLetter, ...]
    continue_after: Count | None = Field(
        default=None, description="There are more: ask again with this as `after`. None where that was all."
    )
    up_to: Count | None = Field(
        default=None,
        description="Send it back together with `continue_after`. What fails again becomes a later dead letter, and "
        "is not meant.",
    )


# Queues

ReadingService = Literal["breaker", "budget", "alerter", "sink"]

_NO_QUEUE = "None where there is no such queue yet: `breakwater setup` makes it."


class AgentQueue(Event):
    """The jobs of one agent."""

    agent: Identifier
    waiting: Count | None = Field(description=f"Jobs that no worker has taken. {_NO_QUEUE}")
    in_progress: Count | None = Field(
        description="Jobs that a worker has taken, those between two attempts included. None as for `waiting`."
    )
    concurrency: Count = Field(description="How many may be in progress at once, over all workers.")


class ServiceQueue(Event):
    """What one service reads from one stream."""

    service: ReadingService
    consumer: str = Field(description="Its name on the bus, such as `sink-events`.")
    stream: str
    waiting: Count | None = Field(description=f"Messages that the service has not been given. {_NO_QUEUE}")
    in_progress: Count | None = Field(
        description="Messages that it was given and has not acknowledged; what an alert channel holds back is among "
        "them. None as for `waiting`."
    )


class Queues(Event):
    """The queues at one moment."""

    agents: tuple[AgentQueue, ...] = Field(description="In the config's order.")
    parked: Count | None = Field(
        description=f"Jobs of all agents that sleep until their next attempt is due. {_NO_QUEUE}"
    )
    services: tuple[ServiceQueue, ...]
    at: Timestamp = Field(description="When NATS was asked, at most about a second ago.")
