"""What the plane tells: breaker transitions, budget crossings, alerts, dead letters."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, JsonValue

from breakwater.contracts.types import Count, Event, Identifier, ModelId, Money, Timestamp

BreakerState = Literal["closed", "open", "half_open", "isolated"]
BreakerRule = Literal["errors", "consecutive_failures", "same_error", "failure_rate", "probe_failed"]
BreakerScope = Literal["agent_model", "model", "provider"]
Health = Literal["healthy", "degraded", "unhealthy"]
GuardRule = Literal[
    "max_iterations", "max_tokens", "max_cost", "consecutive_failures", "same_error", "confidence_drift"
]
Scope = Literal["global", "agent"]
Window = Literal["daily", "monthly"]
Enforcement = Literal["none", "soft", "hard"]
AlertEvent = Literal["breaker_open", "breaker_closed", "budget_soft_cap", "budget_hard_cap", "guard_tripped"]
Severity = Literal["info", "warning", "critical"]


class BreakerTransition(Event):
    """A breaker changed its state. `version` grows by one with each transition of a breaker."""

    transition_id: str = Field(description="Unique; begins with `<agent>/<model>#<version>`, each token encoded.")
    scope: BreakerScope = "agent_model"
    agent: Identifier = Field(description="`*` where the breaker is one model's or provider's, for all agents.")
    model: ModelId = Field(description="`<provider>/*` where the breaker is a provider's, for all its models.")
    from_state: BreakerState
    to_state: BreakerState
    rule: BreakerRule | None = Field(default=None, description="The rule that opened it.")
    reason: str = Field(description="In words: `3 consecutive failures (threshold: 3)`.")
    by: str | None = Field(default=None, description="Who forced it open or reset it.")
    health: Health = Field(default="healthy", description="Of the agent on the model, from then on.")
    consecutive_failures: Count
    total_failures: Count = Field(default=0, description="All that were counted since it was reset.")
    unique_errors: Count = Field(default=0, description="How many different errors those were; at most 100 are told.")
    errors: Count = Field(description="Failures within the window.")
    error_hash: str | None = Field(default=None, description="The error that came again and again (`same_error`).")
    within_s: float | None = None
    cooldown_s: float = Field(description="Of an opening how long it lasts, growth and jitter included.")
    open_until: Timestamp | None = None
    last_failure_at: Timestamp | None = None
    last_success_at: Timestamp | None = None
    version: Count
    at: Timestamp


class BreakerStatus(Event):
    """A breaker as it is now."""

    agent: Identifier = Field(description="`*` where all agents share it.")
    model: ModelId = Field(description="`<provider>/*` where it is a provider's.")
    state: BreakerState = Field(description="One whose `open_until` has passed is open until a call probes it.")
    health: Health
    reason: str | None = Field(default=None, description="Why it is so, in words.")
    since: Timestamp | None = None
    open_until: Timestamp | None = None
    probe_until: Timestamp | None = Field(default=None, description="When the lease of the probe under way ends.")
    consecutive_failures: Count
    total_failures: Count
    unique_errors: Count
    last_failure_at: Timestamp | None = None
    last_success_at: Timestamp | None = None
    version: Count


class StoppedTask(Event):
    """A task that its guard stopped."""

    task_id: Identifier
    tenant: Identifier | None = None
    agent: Identifier
    execution_id: Identifier | None = None
    rule: GuardRule
    reason: str
    since: Timestamp


class GuardEvent(Event):
    """The guard of a task stopped it (`tripped`), or a person let it go on (`reset`)."""

    event_id: str = Field(description="Unique for the trip, or the reset.")
    kind: Literal["tripped", "reset"]
    agent: Identifier = Field(description="Whose job tripped it; `*` where none did, in a reset.")
    tenant: Identifier | None = None
    task_id: Identifier
    execution_id: Identifier | None = Field(default=None, description="The job that tripped it.")
    rule: GuardRule | None = None
    reason: str = Field(description="In words, with the limit: for people who look after the plane, and for them only.")
    by: str | None = Field(default=None, description="Who reset it.")
    iterations: Count
    tokens: Count
    cost: Money
    consecutive_failures: Count
    total_failures: Count
    unique_errors: Count
    at: Timestamp


class ModelHealth(Event):
    """How an agent fares on one model."""

    model: ModelId
    health: Health
    breaker: BreakerState | None = Field(description="None where the agent has no breaker.")
    consecutive_failures: Count
    last_failure_at: Timestamp | None = None
    last_success_at: Timestamp | None = None
    circuit_open_until: Timestamp | None = Field(
        default=None, description="When a probe may call; none while it is closed, or isolated."
    )


class AgentHealth(Event):
    """How an agent fares: `degraded` if anything is amiss, `unhealthy` if none of its models can be called."""

    agent_id: Identifier
    health: Health
    consecutive_failures: Count = Field(description="Failed calls in a row, over all its models.")
    last_failure_at: Timestamp | None = None
    last_success_at: Timestamp | None = None
    circuit_open_until: Timestamp | None = Field(
        default=None, description="When one of its models may be called again; set while none may."
    )
    models: tuple[ModelHealth, ...] = ()


class BudgetEvent(Event):
    """Spend crossed a threshold. Published once for each threshold, scope and period."""

    event_id: str = Field(description="Unique for the crossing.")
    kind: Literal["soft_cap", "hard_cap"]
    scope: Scope
    agent: Identifier | None = Field(default=None, description="For scope `agent`.")
    window: Window
    period: str = Field(description="`2026-11-21` or `2026-11`, in the budget's time zone.")
    threshold_percent: Count
    limit: Money
    total: Money
    enforcement: Enforcement
    at: Timestamp


class Alert(Event):
    """Something people must know. The same incident has the same `alert_id`."""

    alert_id: str
    event: AlertEvent
    severity: Severity
    agent: Identifier | None = None
    model: ModelId | None = None
    title: str
    text: str
    payload: dict[str, JsonValue] = Field(description="The figures, as in the event that caused the alert.")
    source_id: str = Field(description="`ce-id` of the event that caused it.")
    at: Timestamp


class DeadLetter(Event):
    """Something that could not be handled, whole, so that it can be looked at and replayed."""

    reason: str
    agent: str | None = None
    error: str
    stream: str
    subject: str
    sequence: Count
    headers: dict[str, str] = Field(default_factory=dict)
    payload_base64: str = Field(description="The original bytes.")
    execution_id: str | None = None
    at: Timestamp
