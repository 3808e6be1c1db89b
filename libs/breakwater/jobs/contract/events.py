"""Events of the plane: breaker transitions, task guards, budget crossings, dead letters."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, JsonValue

from breakwater.jobs.contract.execution import Encrypted
from breakwater.kernel.types import Count, Event, FullId, Identifier, ModelId, Money, Timestamp

BreakerState = Literal["closed", "open", "half_open", "isolated"]
BreakerRule = Literal["errors", "consecutive_failures", "same_error", "failure_rate", "probe_failed"]
BreakerScope = Literal["agent_model", "model", "provider"]
Health = Literal["healthy", "degraded", "unhealthy"]
GuardRule = Literal[
    "max_iterations", "max_tokens", "max_cost", "consecutive_failures", "same_error", "confidence_drift"
]
Scope = Literal["global", "agent", "tenant"]
Window = Literal["daily", "monthly"]
Enforcement = Literal["none", "soft", "hard"]
PlanState = Literal["draft", "pending", "running", "succeeded", "failed", "partial"]


class BreakerTransition(Event):
    """A breaker changed its state. `version` grows by one with each transition of a breaker."""

    transition_id: str = Field(description="Unique; begins with `<agent>/<model>#<version>`, each token encoded.")
    scope: BreakerScope = "agent_model"
    agent: Identifier = Field(description="`*` if the breaker is shared by all agents.")
    model: ModelId = Field(description="`<provider>/*` if the breaker covers all models of a provider.")
    from_state: BreakerState
    to_state: BreakerState
    rule: BreakerRule | None = Field(default=None, description="The rule that opened it.")
    reason: str = Field(description="Reason in words: `3 consecutive failures (threshold: 3)`.")
    by: str | None = Field(default=None, description="Who isolated or reset it.")
    health: Health = Field(default="healthy", description="Health of the agent on the model after the transition.")
    consecutive_failures: Count
    total_failures: Count = Field(default=0, description="Failures since the last reset.")
    unique_errors: Count = Field(default=0, description="Number of different errors among them, at most 100.")
    errors: Count = Field(description="Failures within the window.")
    error_hash: str | None = Field(default=None, description="The repeated error (`same_error`).")
    alone: str | None = Field(
        default=None,
        description="Hashes of the only key and tenant whose calls opened the breaker. Calls of others pass.",
    )
    open_for: str | None = Field(
        default=None,
        description="The key, tenant or both that it is open for alone, as calls of others pass: `key app and tenant "
        "acme`. Null where it is open for all, or no others call.",
    )
    within_s: float | None = None
    cooldown_s: float = Field(description="Time that the breaker stays open, including growth and jitter.")
    open_until: Timestamp | None = None
    last_failure_at: Timestamp | None = None
    last_success_at: Timestamp | None = None
    version: Count
    at: Timestamp


class GuardEvent(Event):
    """A task used 80 % of a cap (`soft_cap`), its guard stopped it (`tripped`), or an operator reset it (`reset`)."""

    event_id: str = Field(description="Unique for the trip or the reset.")
    kind: Literal["soft_cap", "tripped", "reset"]
    agent: Identifier = Field(description="Agent of the job that tripped the guard; `*` in a reset.")
    tenant: Identifier | None = None
    task_id: FullId
    execution_id: FullId | None = Field(default=None, description="Job that tripped the guard.")
    rule: GuardRule | None = None
    reason: str = Field(description="Reason in words, with the limit; for operators only.")
    by: str | None = Field(default=None, description="Who reset it.")
    iterations: Count
    tokens: Count
    cost: Money
    consecutive_failures: Count
    total_failures: Count
    unique_errors: Count
    at: Timestamp


class BudgetEvent(Event):
    """A budget reached a threshold, a person raised its cap or revoked the raise, or its counter was repaired.

    Published once for each threshold, scope and period. The cap of a hard budget is a `hard_cap`; all other thresholds
    are `soft_cap`, because they refuse nothing.
    """

    event_id: str = Field(description="Unique for the crossing, raise or repair.")
    kind: Literal["soft_cap", "hard_cap", "raised", "raise_ended", "repaired"]
    scope: Scope
    agent: Identifier | None = Field(
        default=None,
        description="Agent of the budget for scope `agent`, otherwise of the call that reached the threshold.",
    )
    tenant: Identifier | None = Field(default=None, description="Tenant of the budget for scope `tenant`.")
    window: Window
    period: str = Field(description="`2026-11-21` or `2026-11`, in the budget's time zone.")
    threshold_percent: Count | None = Field(default=None, description="For `soft_cap` and `hard_cap`.")
    limit: Money | None = Field(default=None, description="The cap; null only if a budget without one is repaired.")
    total: Money = Field(description="Spent in the period until `at`.")
    reserved: Money | None = Field(
        default=None, description="Reserved by calls in flight at that time. For `soft_cap` and `hard_cap`."
    )
    refusal: str | None = Field(
        default=None, description="Of a cap that refused a call: why, with the figures, and what to do."
    )
    previous: Money | None = Field(default=None, description="The cap before the raise, or `total` before the repair.")
    configured: Money | None = Field(
        default=None, description="For a raise, the config's cap. If the config's cap changes, the raise ends."
    )
    enforcement: Enforcement
    by: str | None = Field(default=None, description="Who raised the cap, or revoked a raise.")
    reason: str | None = Field(default=None, description="Reason for the raise, or what was repaired.")
    resets_at: Timestamp | None = Field(default=None, description="End of the period, and of a raise.")
    at: Timestamp


class PlanChange(Event):
    """A plan changed its state. `version` grows with each change of the plan or its jobs."""

    change_id: str = Field(description="Unique: `<plan_id>#<version>`.")
    plan_id: FullId
    from_state: PlanState | None = Field(default=None, description="Null for a new plan.")
    to_state: PlanState
    reason: str = Field(description="Reason in words: why it was refused, or the job that changed it.")
    execution_id: FullId | None = Field(default=None, description="Job that changed it; null for a request.")
    tenant: Identifier | None = None
    owner: Identifier | None = Field(
        default=None, description="Name of the API key that sent the request, or that the job belongs to."
    )
    correlation_id: str | None = Field(default=None, description="W3C trace id of the request or the job.")
    version: Count
    at: Timestamp


class CapRaise(Event):
    """A raised cap; in effect until its period ends or the config's cap changes."""

    limit: Money
    configured: Money = Field(description="Cap in the config at that time.")
    by: str
    reason: str
    at: Timestamp


class BudgetReconciliation(Event):
    """One budget in one period: its counter in Redis, and the record of attempts."""

    budget: str
    period: str
    counted: Money = Field(description="Counter in Redis.")
    recorded: Money = Field(description="Recorded: the sum of `stored` and `logged`.")
    stored: Money = Field(description="Part that was read from ClickHouse.")
    logged: Money = Field(description="Part that was read from EVENTS.")
    unrecorded: Money = Field(description="Estimated cost of calls whose worker died and that are not recorded yet.")
    difference: Money = Field(
        description="`counted` minus `unrecorded` and `recorded`: the amount that a repair subtracts."
    )
    counted_calls: Count
    recorded_calls: Count


class Reconciliation(Event):
    """The budgets' counters and the record of attempts, as of one moment."""

    equal: bool
    budgets: tuple[BudgetReconciliation, ...]
    reserved: Money = Field(description="Reserved by calls in flight, according to the counters of all agents.")
    held: Money = Field(description="The same according to the calls' leases.")
    at: Timestamp


class DeadLetter(Event):
    """A message that could not be handled, kept unchanged so that it can be inspected and replayed."""

    reason: str
    agent: str | None = None
    error: str
    stream: str
    subject: str
    sequence: Count
    headers: dict[str, str] = Field(default_factory=dict)
    payload_base64: str = Field(default="", description="The original bytes; empty if `omitted_bytes` is set.")
    omitted_bytes: Count | None = Field(
        default=None,
        description="Size of an original that is too large to keep, or that DLQ refused.",
    )
    omitted_sha256: str | None = Field(default=None, description="SHA-256 of that original, in hex.")
    encrypted: Encrypted = None
    withheld: bool = Field(
        default=False, description="True if the original must not be shown, because its agent keeps no prompts."
    )
    execution_id: str | None = None
    at: Timestamp


class ReplayNote(Event):
    """Record of a replay, kept with its dead letter."""

    dead_letter_id: Count
    execution_id: FullId = Field(description="Id of the new execution.")
    agent: Identifier
    by: str
    why: str | None = Field(default=None, description="Redacted.")
    at: Timestamp


ActorKind = Literal["key", "person", "link"]
"""An actor: the holder of an API key, a person who signed in, or the holder of a signed link in an alert."""

AuditOutcome = Literal["begun", "done", "refused", "failed"]
"""`begun` stays if the process crashed, so that the outcome of the action is unknown."""


class AuditEvent(Event):
    """A person's action.

    Published as `begun` before anything is done, and again with the outcome and the same `audit_id`.
    """

    audit_id: str = Field(description="Unique per action.")
    action: Identifier = Field(description="The operation's id in the HTTP API, such as `raise_cap`.")
    outcome: AuditOutcome
    by: str = Field(description="Name of the person, or of the API key.")
    actor: ActorKind
    actor_id: str | None = Field(
        default=None, description="Id of the API key, or a person's `sub` at the provider; null for a signed link."
    )
    details: dict[str, JsonValue] = Field(default_factory=dict, description="Parameters of the action, redacted.")
    reason: str | None = Field(default=None, description="Reason as it was given, redacted.")
    error: str | None = Field(default=None, description="Error code of the HTTP API if the action failed.")
    at: Timestamp = Field(description="When the action began.")
