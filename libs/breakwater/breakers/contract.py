"""Health of agents, their breakers, and the guards of tasks in the HTTP API."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from breakwater.kernel.http.contract import OperatorRequest
from breakwater.kernel.types import Count, Event, Identifier, ModelId, Timestamp


class BreakerRequest(OperatorRequest):
    """A breaker, and the reason for the action."""

    agent: Identifier = Field(description="`*` for a breaker that agents share.")
    model: ModelId = Field(description="`<provider>/*` for a provider's breaker.")


class ModelHealth(Event):
    """The health of an agent on one model."""

    model: ModelId
    provider: Identifier | None = Field(default=None, description="None if the config names none for this model.")
    health: Health
    health_reason: str = Field(description="The reason for the health, in a few words, such as `no calls yet`.")
    breaker: BreakerState | None = Field(description="Null if the agent has no breaker.")
    consecutive_failures: Count
    last_failure_at: Timestamp | None = Field(default=None, description="Null once a call has succeeded.")
    last_success_at: Timestamp | None = None
    circuit_open_until: Timestamp | None = Field(
        default=None, description="When a probe may call; null while the breaker is closed or isolated."
    )
    held_until: Timestamp | None = Field(
        default=None, description="End of a pause that the provider's rate limit asked for; null without one."
    )


class AgentHealth(Event):
    """The health of an agent: `degraded` if its last call failed or a model is down, else `unhealthy` or `healthy`."""

    agent_id: Identifier
    health: Health
    health_reason: str = Field(description="The reason for the health, in a few words, such as `no calls yet`.")
    consecutive_failures: Count = Field(description="Consecutive failed calls, over all models.")
    last_failure_at: Timestamp | None = Field(default=None, description="Null once a call has succeeded.")
    last_success_at: Timestamp | None = None
    circuit_open_until: Timestamp | None = Field(
        default=None, description="When one of its models may be called again; set while none may."
    )
    models: tuple[ModelHealth, ...] = ()


class BreakerStatus(Event):
    """The state of a breaker."""

    agent: Identifier = Field(description="`*` if all agents share it.")
    model: ModelId = Field(description="`<provider>/*` for a provider's breaker.")
    state: BreakerState = Field(
        description="Half-open as soon as its cool-down is over, whether or not a call has come to try it."
    )
    health: Health = Field(description="Health of the agent on this model; of a shared one, of all its agents.")
    health_reason: str = Field(description="The reason for the health, in a few words.")
    reason: str | None = Field(default=None, description="Reason for the state.")
    open_for: str | None = Field(
        default=None,
        description="The key, tenant or both whose calls it refuses; those of others pass. Null if it refuses all.",
    )
    since: Timestamp | None = None
    open_until: Timestamp | None = None
    probe_until: Timestamp | None = Field(
        default=None,
        description="When the lease of the probe in flight ends. Null for a half-open breaker that waits for a call.",
    )
    held_until: Timestamp | None = Field(
        default=None,
        description="End of a pause that the provider's rate limit asked for. Does not count as a failure.",
    )
    count: CountedUnit = Field(default="jobs", description="What `consecutive_failures` counts, as in the config.")
    consecutive_failures: Count = Field(
        description="Consecutive jobs that ended in failure on the model; with `count: attempts`, failed calls."
    )
    total_failures: Count = Field(description="Failed calls since the last reset.")
    unique_errors: Count = Field(description="Number of different errors among them, at most 100.")
    last_failure_at: Timestamp | None = None
    last_success_at: Timestamp | None = None
    version: Count


class ShadowBreakerStatus(Event):
    """The state of a shadow: of a breaker that sees an agent's calls and refuses none."""

    agent: Identifier = Field(description="`*` if all agents share it.")
    model: ModelId = Field(description="`<provider>/*` for a provider's breaker.")
    state: BreakerState
    reason: str | None = Field(default=None, description="Reason for the state.")
    since: Timestamp | None = None
    refused: Count = Field(description="Calls that were made and that it would have refused.")
    version: Count


class BreakerList(Event):
    """The current state of the breakers."""

    breakers: tuple[BreakerStatus, ...]
    shadows: tuple[ShadowBreakerStatus, ...] = ()
    alive: bool = Field(description="True if a breaker service is running. Without one, failures open no breaker.")


class UnchangedBreaker(BreakerStatus):
    """The breaker, which was not changed: there was nothing to do, and nothing was published."""

    unchanged: Literal[True] = True


BreakerState = Literal["closed", "open", "half_open", "isolated"]


BreakerRule = Literal["errors", "consecutive_failures", "same_error", "failure_rate", "probe_failed"]


BreakerScope = Literal["agent_model", "model", "provider"]


CountedUnit = Literal["jobs", "attempts"]
"""The unit in which a breaker counts consecutive failures and equal errors."""


Health = Literal["healthy", "degraded", "unhealthy"]


class BreakerTransition(Event):
    """A breaker changed its state. `version` grows by one with each transition of a breaker."""

    transition_id: str = Field(description="Unique; begins with `<agent>/<model>#<version>`, each token encoded.")
    scope: BreakerScope = "agent_model"
    agent: Identifier = Field(description="`*` if the breaker is shared by all agents.")
    model: ModelId = Field(description="`<provider>/*` if the breaker covers all models of a provider.")
    from_state: BreakerState
    to_state: BreakerState
    waits: bool = Field(default=False, description="True if it is half-open and waits for a call to try it.")
    rule: BreakerRule | None = Field(default=None, description="The rule that opened it.")
    reason: str = Field(description="Reason in words: `3 jobs in a row failed (threshold: 3)`.")
    by: str | None = Field(default=None, description="Who isolated or reset it.")
    health: Health = Field(default="healthy", description="Health of the agent on the model after the transition.")
    consecutive_failures: Count = Field(
        description="Consecutive jobs that ended in failure on the model; with `count: attempts`, failed calls."
    )
    total_failures: Count = Field(default=0, description="Failed calls since the last reset.")
    unique_errors: Count = Field(default=0, description="Number of different errors among them, at most 100.")
    errors: Count = Field(description="Failed calls within the window.")
    error_hash: str | None = Field(default=None, description="The repeated error (`same_error`).")
    alone: str | None = Field(
        default=None,
        description="Hashes of the only key and tenant whose calls opened the breaker. Calls of others pass.",
    )
    open_for: str | None = Field(
        default=None,
        description="The key, tenant or both whose calls it refuses, such as `key app and tenant acme`; those of "
        "others pass. Null if it refuses all, or no others call.",
    )
    within_s: float | None = None
    cooldown_s: float = Field(description="Time that the breaker stays open, including growth and jitter.")
    open_until: Timestamp | None = None
    last_failure_at: Timestamp | None = None
    last_success_at: Timestamp | None = None
    version: Count
    at: Timestamp
    shadow: bool = Field(default=False, description="True if it is a shadow's, which refuses nothing.")
    refused: Count | None = Field(
        default=None, description="Calls that a shadow would have refused since its last transition."
    )
