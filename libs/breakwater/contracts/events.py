"""What the plane tells: breaker transitions, budget crossings, alerts, dead letters."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, JsonValue

from breakwater.contracts.types import Count, Event, Identifier, ModelId, Money, Timestamp

BreakerState = Literal["closed", "open", "half_open"]
BreakerRule = Literal["errors", "consecutive_failures", "probe_failed"]
Scope = Literal["global", "agent"]
Window = Literal["daily", "monthly"]
Enforcement = Literal["none", "soft", "hard"]
AlertEvent = Literal["breaker_open", "breaker_closed", "budget_soft_cap", "budget_hard_cap"]
Severity = Literal["info", "warning", "critical"]


class BreakerTransition(Event):
    """A breaker changed its state. `version` grows by one with each transition of a breaker."""

    transition_id: str = Field(description="Unique; begins with `<agent>/<model>#<version>`, each token encoded.")
    agent: Identifier
    model: ModelId
    from_state: BreakerState
    to_state: BreakerState
    rule: BreakerRule | None = Field(default=None, description="The rule that opened it.")
    reason: str = Field(description="In words: `3 consecutive failures (threshold: 3)`.")
    consecutive_failures: Count
    errors: Count = Field(description="Failures within the window.")
    within_s: float | None = None
    cooldown_s: float
    open_until: Timestamp | None = None
    version: Count
    at: Timestamp


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
