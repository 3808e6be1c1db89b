"""`/api/v1/queues`: what waits for workers and for the other services."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import cast

from breakwater.bus.errors import BusError
from breakwater.bus.lookup import Backlog, Connection, backlog
from breakwater.bus.topology import PARKED_CONSUMER, Plan, consumers, worker_consumer
from breakwater.contracts.http import AgentQueue, Queues, ReadingService, ServiceQueue
from breakwater.contracts.subjects import Stream
from breakwater.contracts.types import Message, ms_from_time, time_from_ms
from services.request.routing import ApiRequest

KEPT_S = 1.0
"""How long a response is cached, in seconds: many open pages cost NATS no more than one."""


class QueueRoutes:
    """What waits on the bus, for people.

    Args:
        agents: each agent's concurrency.
        channels: the names of the alert channels.
        connection: to NATS.
        clock: monotonic, in seconds.
    """

    def __init__(
        self,
        agents: Mapping[str, int],
        channels: tuple[str, ...],
        connection: Connection,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._agents = agents
        self._consumers = tuple(
            (stream, config.durable_name or "") for stream, config in consumers(Plan(agents, alert_channels=channels))
        )
        self._connection = connection
        self._clock = clock
        self._one_asks = asyncio.Lock()
        self._known: tuple[float, Queues | BusError] | None = None

    async def show(self, _: ApiRequest[Message]) -> Queues:
        """All of them."""
        return await self.read()

    async def read(self) -> Queues:
        """As of a second ago at most. Raises BusError."""
        async with self._one_asks:
            known = self._known
            # Requests that waited while NATS did not answer fail together, not one timeout after the other.
            if known is None or self._clock() - known[0] >= KEPT_S:
                answer = await self._ask()
                known = self._known = self._clock(), answer
        if isinstance(known[1], BusError):
            raise known[1]
        return known[1]

    async def _ask(self) -> Queues | BusError:
        at = time_from_ms(ms_from_time(datetime.now(UTC)))
        try:
            found = await asyncio.gather(*(backlog(self._connection, *one) for one in self._consumers))
        except BusError as error:
            return error
        by_consumer = dict(zip(self._consumers, found, strict=True))
        parked = by_consumer[(Stream.PARKED, PARKED_CONSUMER)]
        return Queues(
            agents=tuple(
                _agent(agent, most, by_consumer[(Stream.JOBS, worker_consumer(agent))])
                for agent, most in self._agents.items()
            ),
            # Those that sleep were delivered to the worker that will wake them.
            parked=None if parked is None else parked.waiting + parked.in_progress,
            services=tuple(
                _service(stream, name, one)
                for (stream, name), one in by_consumer.items()
                if stream not in (Stream.JOBS, Stream.PARKED)
            ),
            at=at,
        )


def _agent(agent: str, concurrency: int, found: Backlog | None) -> AgentQueue:
    waiting, in_progress = (None, None) if found is None else (found.waiting, found.in_progress)
    return AgentQueue(agent=agent, waiting=waiting, in_progress=in_progress, concurrency=concurrency)


def _service(stream: Stream, name: str, found: Backlog | None) -> ServiceQueue:
    waiting, in_progress = (None, None) if found is None else (found.waiting, found.in_progress)
    # All of a service's consumers begin with its name.
    service = cast(ReadingService, name.partition("-")[0])
    return ServiceQueue(service=service, consumer=name, stream=stream.value, waiting=waiting, in_progress=in_progress)
