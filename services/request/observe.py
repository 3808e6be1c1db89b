"""The metrics and health of this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import get_args

import structlog
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from breakwater.breakers.api import AgentRoutes
from breakwater.breakers.contract import Health
from breakwater.identity.operations import operation
from breakwater.jobs.api.queues import QueueRoutes
from breakwater.kernel.http.contract import AgentQueue, ServiceStatus
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.delivery import queued_at, trusted_headers
from breakwater.kernel.nats.errors import BusError
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.nats.topology import NEARLY_FULL, WHEN_FULL
from breakwater.kernel.process.outage import Outage
from breakwater.kernel.telemetry import metrics
from breakwater.kernel.telemetry.metrics import (
    AGENT_HEALTH,
    CONSUMER_IN_PROGRESS,
    CONSUMER_WAITING,
    JOBS_WAITING,
    OLDEST_JOB,
    PARKED_JOBS,
    Readings,
    StreamMetrics,
    one_of,
)

CHECK_EVERY_S = 30.0
WATCHED = (Stream.JOBS, Stream.EVENTS, Stream.RESULTS, Stream.RESPONSES, Stream.DLQ, Stream.ALERTS, Stream.BODIES)


@dataclass(frozen=True, slots=True)
class ServiceRoutes:
    """The health and the metrics of this process."""

    check_ready: Callable[[], None]

    @operation(
        "GET",
        "/healthz",
        tag="health",
        summary="Liveness of the process",
        results={200: ("It is.", ServiceStatus)},
    )
    async def alive(self, _: Request) -> Response:
        """Responds with 200."""
        return JSONResponse({"status": "alive"})

    @operation(
        "GET",
        "/readyz",
        tag="health",
        summary="Readiness to accept jobs",
        results={200: ("They can.", ServiceStatus)},
        errors={503: "NATS is unavailable (`not_ready`)."},
    )
    async def ready(self, _: Request) -> Response:
        """Responds with 200, or with 503 and the reason."""
        self.check_ready()
        return JSONResponse({"status": "ready"})

    @operation(
        "GET",
        "/metrics",
        tag="metrics",
        summary="Metrics of this process, for Prometheus",
        description="In OpenMetrics format if the scraper accepts it.",
        results={200: ("All metrics.", str)},
        content_type="text/plain",
    )
    def metrics(self, request: Request) -> Response:
        """Responds with the metrics. It is not a coroutine, so that gathering them blocks no request."""
        body, content_type = metrics.exposition(request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": content_type})


class RequestGauges:
    """Gauges of agents and queues, as `/api/v1/agents` and `/api/v1/queues` show them, and of the oldest jobs."""

    def __init__(
        self,
        agents: AgentRoutes,
        queues: QueueRoutes,
        lookup: Lookup,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._agents = agents
        self._queues = queues
        self._lookup = lookup
        self._now = now

    async def health(self) -> Readings:
        """Reads the health of the agents. Raises StateUnavailableError."""
        healths: dict[tuple[str, ...], float] = {}
        for agent in await self._agents.read():
            healths |= one_of(agent.health, get_args(Health), agent.agent_id)
        return {AGENT_HEALTH: healths}

    async def backlog(self) -> Readings:
        """Reads the backlogs of workers and services, except those without a queue yet. Raises BusError."""
        queues = await self._queues.read()
        existing = [queue for queue in queues.agents if queue.waiting is not None]
        oldest = await asyncio.gather(*(self._oldest_s(queue) for queue in existing))
        return {
            JOBS_WAITING: {(queue.agent,): queue.waiting or 0 for queue in existing},
            OLDEST_JOB: {(queue.agent,): age_s for queue, age_s in zip(existing, oldest, strict=True)},
            PARKED_JOBS: {} if queues.parked is None else {(): queues.parked},
            CONSUMER_WAITING: {
                (queue.consumer,): queue.waiting for queue in queues.services if queue.waiting is not None
            },
            CONSUMER_IN_PROGRESS: {
                (queue.consumer,): queue.in_progress for queue in queues.services if queue.in_progress is not None
            },
        }

    async def _oldest_s(self, queue: AgentQueue) -> float:
        """Returns the seconds since the oldest job in an agent's queue was accepted; 0 if the queue is empty."""
        if not (queue.waiting or queue.in_progress):
            return 0.0
        messages = await asyncio.gather(
            *(self._lookup.next(Stream.JOBS, subject, 1) for subject in subjects.jobs_of(queue.agent))
        )
        now = self._now()
        # The times come from the clocks of two machines, so the difference may be below 0.
        return max(
            (
                0.0,
                *(
                    (
                        now - queued_at(trusted_headers(message.subject, message.headers), message.stored_at)
                    ).total_seconds()
                    for message in messages
                    if message is not None
                ),
            )
        )


class StreamFill:
    """Watches how full the streams with a limit in bytes are, to warn before one is full."""

    def __init__(self, lookup: Lookup, metrics: StreamMetrics) -> None:
        self._lookup = lookup
        self._metrics = metrics
        self._warned: set[Stream] = set()
        self._outage = Outage("the streams' sizes")

    async def run(self) -> None:
        """Checks regularly until cancelled."""
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            await self._outage.run_logged(self.check, expected=BusError)

    async def check(self) -> None:
        """Publishes how full each stream is, and logs when that changes for the worse or better. Raises BusError."""
        for stream in WATCHED:
            facts = await self._lookup.facts(stream)
            used = facts.bytes / facts.max_bytes if facts.max_bytes > 0 else 0.0
            self._metrics.set_used_share(stream, used)
            log = structlog.get_logger().bind(stream=stream.value, used=round(used, 2))
            # When ALERTS is full, NATS removes the oldest alerts, so no action is needed.
            if used >= NEARLY_FULL and stream is not Stream.ALERTS and stream not in self._warned:
                self._warned.add(stream)
                log.warning("stream_nearly_full", when_full=WHEN_FULL[stream])
            elif used < NEARLY_FULL and stream in self._warned:
                self._warned.discard(stream)
                log.info("stream_has_room_again")
