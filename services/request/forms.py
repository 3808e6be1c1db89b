"""What people send where they look after breakers, guards, budgets and incidents, and what they are answered."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from breakwater.contracts.alerts import Alert, AlertEvent, IncidentStatus, UndeliveredAlert
from breakwater.contracts.events import BreakerStatus, BudgetStatus, StoppedTask
from breakwater.contracts.types import Event, Identifier, Message, ModelId
from breakwater.policy.price import UsdAmount

Why = Annotated[str, StringConstraints(strip_whitespace=True, max_length=500, pattern=r"^[^\x00-\x1f\x7f]*$")]
"""A person's reason, in one line."""


class ByHand(Message):
    """What a person wants to be done."""

    reason: Why | None = Field(default=None, description="For the record, and for whoever is told of it; redacted.")


class BreakerRequest(ByHand):
    """Which breaker, and why."""

    agent: Identifier = Field(description="`*` for one that agents share.")
    model: ModelId = Field(description="`<provider>/*` for a provider's.")


class GuardRequest(ByHand):
    """Which task, and why."""

    task_id: Identifier
    tenant: Identifier | None = Field(default=None, description="Whose task; left out for one of no tenant.")


class RaiseRequest(ByHand):
    """Which cap, to what, and why."""

    budget: Annotated[str, StringConstraints(min_length=1, max_length=160, pattern=r"^[^\x00-\x1f\x7f]+$")] = Field(
        description="Its name: `global/daily`, `agent:<name>/monthly`, `tenant:<name>/daily`.",
        examples=["global/daily"],
    )
    limit_usd: UsdAmount = Field(
        description="What it is raised to; what the config says takes an earlier raise back.", examples=["50.00"]
    )
    reason: Annotated[Why, Field(min_length=1)] = Field(  # pyright: ignore[reportIncompatibleVariableOverride]  # is frozen
        description="For the record, as it is money; redacted."
    )


class AlertQuery(Message):
    """Which incidents."""

    status: IncidentStatus | Literal["unresolved", "all"] = Field(
        default="unresolved", description="`unresolved` are those that are not over."
    )
    event: AlertEvent | None = Field(
        default=None, description="What happened last, or what it began with: a breaker that closed was open before."
    )
    agent: Identifier | None = None
    limit: int = Field(default=100, ge=1, le=1_000, description="At most so many, the newest.")


class AlertRequest(ByHand):
    """Which incident, and why."""

    incident_id: Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f]+$")] = (
        Field(
            description="Its id, or the beginning where no other one begins so: `inc_` and 6 characters or more.",
            examples=["inc_3f9a1c07"],
        )
    )


class ChannelRequest(Message):
    """Which channel."""

    channel: Identifier = Field(description="Its name in `alerts.channels`.")


class UndeliveredQuery(Message):
    """Which alerts that did not arrive."""

    channel: Identifier | None = None
    limit: int = Field(default=100, ge=1, le=1_000, description="At most so many, the newest.")


class ReplayRequest(Message):
    """Which of the alerts that did not arrive shall be tried again. Left out: all that were not yet."""

    channel: Identifier | None = Field(default=None, description="Only those of this channel.")
    dead_letter_id: int | None = Field(
        default=None, ge=1, description="Only this one, even where it was tried again before."
    )
    after: int = Field(default=0, ge=0, description="Only those behind this one: `continue_after` of the last answer.")


class BreakerList(Event):
    """The breakers as they are now."""

    breakers: tuple[BreakerStatus, ...]
    alive: bool = Field(description="Whether a breaker service is at work: without one, no failure opens a breaker.")


class UnchangedBreaker(BreakerStatus):
    """There was nothing to do, and nothing was published. The breaker is as it is told here."""

    unchanged: Literal[True] = True


class StoppedTasks(Event):
    """The tasks that are stopped, in the order in which they were."""

    stopped: tuple[StoppedTask, ...]


class BudgetList(Event):
    """The budgets of the current day and month."""

    filled: bool = Field(
        description="Whether the counters are there. While they are rebuilt from the record, the figures tell nothing, "
        "and no call passes a hard cap."
    )
    budgets: tuple[BudgetStatus, ...]


class UnchangedBudget(BudgetStatus):
    """The cap is that already, and nothing was published. The budget is as it is told here."""

    unchanged: Literal[True] = True


class AlertList(Event):
    """Incidents, each as it is now; the one that was opened last comes first."""

    alerts: tuple[Alert, ...]
    more: bool = Field(description="Whether there are more than were asked for.")


class UnchangedAlert(Alert):
    """There was nothing to do, and nothing was published. The incident is as it is told here."""

    unchanged: Literal[True]


class UndeliveredList(Event):
    """The alerts that were given up within thirty days, the latest first."""

    undelivered: tuple[UndeliveredAlert, ...]
    more: bool = Field(description="Whether there are more than were asked for.")
