"""`/api/v1/queues`: the backlog of workers and of the other services."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import cast

from breakwater.identity.operations import NATS_UNAVAILABLE, ApiRequest, operation
from breakwater.kernel.http.contract import AgentQueue, Queues, ReadingService, ServiceQueue
from breakwater.kernel.nats.core import ClientGetter
from breakwater.kernel.nats.errors import BusError
from breakwater.kernel.nats.lookup import Backlog, Lookup
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.nats.topology import PARKED_CONSUMER, Plan, consumers, worker_consumer
from breakwater.kernel.types import Message, ms_from_time, time_from_ms

REUSE_S = 1.0
"""Age up to which a response is used again, so that many open pages cost NATS no more than one."""


class QueueRoutes:
    """The backlog on the bus, for people.

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
        connection: ClientGetter,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._agents = agents
        self._consumers = tuple(
            (stream, config.durable_name or "") for stream, config in consumers(Plan(agents, alert_channels=channels))
        )
        self._lookup = Lookup(connection)
        self._clock = clock
        self._reading_lock = asyncio.Lock()
        self._reading: tuple[float, Queues | BusError] | None = None

    @operation(
        "GET",
        "/api/v1/queues",
        tag="queues",
        summary="Queues",
        description="For each agent, the jobs that are waiting and in progress; the jobs waiting for their next "
        "attempt; and how far services are behind the event log. At most about a second old.",
        result="The queues.",
        errors={503: NATS_UNAVAILABLE},
    )
    async def list_queues(self, _: ApiRequest[Message]) -> Queues:
        """Lists all queues."""
        return await self.read()

    async def read(self) -> Queues:
        """Reads all queues, as of a second ago at most. Raises BusError."""
        async with self._reading_lock:
            reading = self._reading
            # An error is used again, too: requests that waited for NATS fail together, not one timeout after another.
            if reading is None or self._clock() - reading[0] >= REUSE_S:
                queues = await self._ask()
                reading = self._reading = self._clock(), queues
        if isinstance(reading[1], BusError):
            raise reading[1]
        return reading[1]

    async def _ask(self) -> Queues | BusError:
        at = time_from_ms(ms_from_time(datetime.now(UTC)))
        try:
            backlogs = await asyncio.gather(*(self._lookup.backlog(*backlog) for backlog in self._consumers))
        except BusError as error:
            return error
        by_consumer = dict(zip(self._consumers, backlogs, strict=True))
        agents = list[AgentQueue]()
        for agent, concurrency in self._agents.items():
            waiting, in_progress = _waiting_and_in_progress(by_consumer[(Stream.JOBS, worker_consumer(agent))])
            agents.append(AgentQueue(agent=agent, waiting=waiting, in_progress=in_progress, concurrency=concurrency))
        services = list[ServiceQueue]()
        for (stream, name), backlog in by_consumer.items():
            if stream not in (Stream.JOBS, Stream.PARKED):
                waiting, in_progress = _waiting_and_in_progress(backlog)
                # All of a service's consumers begin with its name.
                service = cast(ReadingService, name.partition("-")[0])
                services.append(
                    ServiceQueue(
                        service=service, consumer=name, stream=stream.value, waiting=waiting, in_progress=in_progress
                    )
                )
        # Sleeping jobs count as in progress: they were delivered to the worker that will wake them.
        waiting, in_progress = _waiting_and_in_progress(by_consumer[(Stream.PARKED, PARKED_CONSUMER)])
        parked = None if waiting is None or in_progress is None else waiting + in_progress
        return Queues(agents=tuple(agents), parked=parked, services=tuple(services), at=at)


def _waiting_and_in_progress(backlog: Backlog | None) -> tuple[int | None, int | None]:
    return (None, None) if backlog is None else (backlog.waiting, backlog.in_progress)
