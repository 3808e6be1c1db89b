"""The HTTP API: errors, the parts that its requests share, the stream of events, and queues.

Queries and bodies of requests are `Message`s, in which unknown fields are errors. Responses are `Event`s, in which
clients ignore unknown fields.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, AwareDatetime, BeforeValidator, Field, StringConstraints, WithJsonSchema

from breakwater.kernel.types import NO_CONTROLS_OR_EMPTY, Count, Event, Identifier, Message, Timestamp
from breakwater.kernel.validation import FieldError

ReasonText = Annotated[str, StringConstraints(strip_whitespace=True, max_length=500, pattern=NO_CONTROLS_OR_EMPTY)]
"""A person's reason, in one line."""

PageLimit = Annotated[int, Field(ge=1, le=1_000, description="The most to list; the newest are listed.")]


class ErrorDetails(Message):
    """An error, and what to do about it."""

    code: str = Field(description="Stable, for programs: `invalid_job`, `unknown_agent`, …")
    message: str = Field(description="For people; may change.")
    details: tuple[FieldError, ...] = ()
    plan_id: str | None = Field(default=None, description="The plan that was not accepted.")
    correlation_id: str | None = Field(
        default=None, description="W3C trace id of the request that submitted the plan, as in the plan's `changes`."
    )


class ErrorBody(Message):
    """The body of every response with a status of 400 or above."""

    error: ErrorDetails


class ServiceStatus(Event):
    """The state of the process."""

    status: Literal["alive", "ready"]


def _in_utc(moment: datetime) -> datetime:
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        raise ValueError("must be a time in UTC, in the years 1 to 9999") from None


Moment = Annotated[AwareDatetime, AfterValidator(_in_utc)]
"""A time in RFC 3339, with its zone."""

EventKind = Literal["attempts", "executions", "breakers", "budgets", "guards", "limits", "alerts"]
"""The kinds of events in the stream: the second token of their subjects on the bus."""

EVENT_KINDS: tuple[EventKind, ...] = get_args(EventKind)


def _split(value: object) -> object:
    return value.split(",") if isinstance(value, str) else value


ALL_SENT = "these are all"
"""The comment that ends a stream of stored events."""


class EventQuery(Message):
    """A filter of events."""

    kinds: Annotated[
        tuple[EventKind, ...],
        BeforeValidator(_split),
        WithJsonSchema({"type": "array", "items": {"type": "string", "enum": list(EVENT_KINDS)}}),
    ] = Field(default=EVENT_KINDS, description="Filter by kinds, separated by commas; default: all.")
    agent: Identifier | None = Field(
        default=None, description="Filter by agent. Events of a shared breaker name no agent."
    )
    since: Moment | None = Field(
        default=None,
        description="Begin with the events that were stored since: a time in RFC 3339. `Last-Event-ID` precedes it.",
    )
    follow: bool = Field(default=True, description="False to end after the events that are stored already.")
    cloudevents: bool = Field(
        default=False, description="True for each event in the envelope of CloudEvents' JSON format, as its `data`."
    )


class EventGap(Event):
    """A gap in the events: those between two places can't be sent, because they have expired, or the stream is new."""

    stream: Literal["EVENTS", "ALERTS"]
    after: Count = Field(description="Sequence number of the last event before the gap.")
    next: Count = Field(description="Sequence number at which the stream continues.")


class ActionRequest(Message):
    """An action of a person, who may state a reason for the record."""

    @property
    def stated_reason(self) -> str | None:
        """The reason as the person wrote it."""
        raise NotImplementedError


class OperatorRequest(ActionRequest):
    """An action of a person."""

    reason: ReasonText | None = Field(
        default=None, description="Reason for the record and for notifications; stored redacted."
    )

    @property
    def stated_reason(self) -> str | None:
        """The reason as the person wrote it."""
        return self.reason


ReadingService = Literal["breaker", "budget", "alerter", "sink"]

_NO_QUEUE = "Null if the queue does not exist yet: `breakwater setup` creates it."


class AgentQueue(Event):
    """The jobs of one agent."""

    agent: Identifier
    waiting: Count | None = Field(description=f"Jobs that no worker has taken yet. {_NO_QUEUE}")
    in_progress: Count | None = Field(
        description="Jobs that a worker has taken, including those between two attempts. Null as for `waiting`."
    )
    concurrency: Count = Field(description="Maximum in progress, over all workers.")


class ServiceQueue(Event):
    """The backlog of one service on one stream."""

    service: ReadingService
    consumer: str = Field(description="Consumer name, such as `sink-events`.")
    stream: str
    waiting: Count | None = Field(description=f"Messages not yet delivered to the service. {_NO_QUEUE}")
    in_progress: Count | None = Field(
        description="Messages delivered and not acknowledged, including alerts that a channel delays. "
        "Null as for `waiting`."
    )


class Queues(Event):
    """The queues at one moment."""

    agents: tuple[AgentQueue, ...] = Field(description="In the config's order.")
    parked: Count | None = Field(description=f"Jobs of all agents that wait for their next attempt. {_NO_QUEUE}")
    services: tuple[ServiceQueue, ...]
    at: Timestamp = Field(description="When NATS was asked, at most about a second ago.")
