"""Health of agents, their breakers, and the guards of tasks in the HTTP API."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from breakwater.contracts.events import BreakerState, GuardRule, Health, LiveHealth
from breakwater.contracts.http import OperatorRequest
from breakwater.contracts.types import Count, Event, FullId, Identifier, ModelId, Timestamp


class BreakerRequest(OperatorRequest):
    """A breaker, and the reason for the action."""

    agent: Identifier = Field(description="`*` for a breaker that agents share.")
    model: ModelId = Field(description="`<provider>/*` for a provider's breaker.")


class GuardRequest(OperatorRequest):
    """A task, and the reason for the action."""

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
        default=None, description="Time at which a probe may call; null while it is closed, or isolated."
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
        default=None, description="Time at which one of its models may be called again; set while none may."
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
    probe_until: Timestamp | None = Field(
        default=None, description="Time at which the lease of the probe in flight ends."
    )
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
    alive: bool = Field(description="True if a breaker service is running: without one, no failure opens a breaker.")


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
