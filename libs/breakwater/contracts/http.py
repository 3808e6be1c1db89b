"""The HTTP API: errors, the parts that its requests share, the stream of events, and queues.

Queries and bodies of requests are `Message`s: a field that is not known is an error. Responses hold `Event`s: clients
ignore fields that they do not know.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, AwareDatetime, BeforeValidator, Field, StringConstraints, WithJsonSchema

from breakwater.contracts.types import NO_CONTROLS_OR_EMPTY, Count, Event, Identifier, Message, Timestamp
from breakwater.contracts.validation import FieldError

ReasonText = Annotated[str, StringConstraints(strip_whitespace=True, max_length=500, pattern=NO_CONTROLS_OR_EMPTY)]
"""A person's reason, in one line."""

Limit = Annotated[int, Field(ge=1, le=1_000, description="The most to list; the newest are listed.")]


class ErrorDetails(Message):
    """An error, and what to do about it."""

    code: str = Field(description="Stable, for programs: `invalid_job`, `unknown_agent`, …")
    message: str = Field(description="For people.")
    details: tuple[FieldError, ...] = ()


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
        raise ValueError("must be a time of the years 1 to 9999 in UTC") from None


Moment = Annotated[AwareDatetime, AfterValidator(_in_utc)]
"""A time in RFC 3339, with its zone."""

EventKind = Literal["attempts", "executions", "breakers", "budgets", "guards", "alerts"]
"""Kinds of events in the stream: the second token of their subjects on the bus."""

EVENT_KINDS: tuple[EventKind, ...] = get_args(EventKind)


def _split(value: object) -> object:
    return value.split(",") if isinstance(value, str) else value


class EventQuery(Message):
    """A filter of events."""

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


class OperatorRequest(Message):
    """An action of a person."""

    reason: ReasonText | None = Field(
        default=None, description="For the record, and for people who are notified; redacted."
    )


ReadingService = Literal["breaker", "budget", "alerter", "sink"]

_NO_QUEUE = "None where there is no such queue yet: `breakwater setup` makes it."


class AgentQueue(Event):
    """The jobs of one agent."""

    agent: Identifier
    waiting: Count | None = Field(description=f"Jobs that no worker has taken. {_NO_QUEUE}")
    in_progress: Count | None = Field(
        description="Jobs that a worker has taken, those between two attempts included. None as for `waiting`."
    )
    concurrency: Count = Field(description="The most that may be in progress, over all workers.")


class ServiceQueue(Event):
    """The backlog of one service on one stream."""

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
    at: Timestamp = Field(description="Time at which NATS was asked, at most about a second ago.")
