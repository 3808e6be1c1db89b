"""What waits on the bus: the agents' jobs, and what services have not dealt with yet."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from breakwater.contracts.types import Count, Event, Identifier, Timestamp

ReadingService = Literal["breaker", "budget", "alerter", "sink"]

_NO_QUEUE = "None where there is no such queue yet: `breakwater setup` makes it."


class AgentQueue(Event):
    """The jobs of one agent."""

    agent: Identifier
    waiting: Count | None = Field(description=f"Jobs that no worker has taken. {_NO_QUEUE}")
    in_work: Count | None = Field(
        description="Jobs that a worker has taken, those between two attempts included. None as for `waiting`."
    )
    concurrency: Count = Field(description="How many may be in work at once, over all workers.")


class ServiceQueue(Event):
    """What one service reads from one stream."""

    service: ReadingService
    consumer: str = Field(description="Its name on the bus, such as `sink-events`.")
    stream: str
    waiting: Count | None = Field(description=f"Messages that the service has not been given. {_NO_QUEUE}")
    in_work: Count | None = Field(
        description="Messages that it was given and has not acknowledged; what an alert channel holds back is among "
        "them. None as for `waiting`."
    )


class Queues(Event):
    """What waits, at one moment."""

    agents: tuple[AgentQueue, ...] = Field(description="In the config's order.")
    parked: Count | None = Field(
        description=f"Jobs of all agents that sleep until their next attempt is due. {_NO_QUEUE}"
    )
    services: tuple[ServiceQueue, ...]
    at: Timestamp = Field(description="When NATS was asked, at most about a second ago.")
