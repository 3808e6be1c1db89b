"""What Prometheus is shown of agents and queues: as `/api/v1/agents` and `/api/v1/queues` do, and the oldest jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import get_args

from breakwater.bus.delivery import believed, queued_at
from breakwater.bus.lookup import Lookup
from breakwater.contracts import subjects
from breakwater.contracts.events import LiveHealth
from breakwater.contracts.http import AgentQueue
from breakwater.contracts.subjects import Stream
from breakwater.metrics import (
    AGENT_HEALTH,
    CONSUMER_IN_PROGRESS,
    CONSUMER_WAITING,
    JOBS_WAITING,
    OLDEST_JOB,
    PARKED_JOBS,
    Readings,
    one_of,
)
from services.request.agents import Agents
from services.request.queues import QueueRoutes


class RequestGauges:
    """Reads them.

    Args:
        agents: the agents' health.
        queues: how much waits.
        lookup: for the first job of each queue.
        now: the clock.
    """

    def __init__(
        self,
        agents: Agents,
        queues: QueueRoutes,
        lookup: Lookup,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._agents, self._queues, self._lookup, self._now = agents, queues, lookup, now

    async def health(self) -> Readings:
        """Of the agents. Raises StateUnavailable."""
        healths: dict[tuple[str, ...], float] = {}
        for agent in await self._agents.read():
            healths |= one_of(agent.shown, get_args(LiveHealth), agent.agent_id)
        return {AGENT_HEALTH: healths}

    async def backlog(self) -> Readings:
        """Of workers and services; one that has no queue yet is left out. Raises BusError."""
        queues = await self._queues.read()
        known = [one for one in queues.agents if one.waiting is not None]
        oldest = await asyncio.gather(*(self._oldest_s(one) for one in known))
        return {
            JOBS_WAITING: {(one.agent,): one.waiting or 0 for one in known},
            OLDEST_JOB: {(one.agent,): age_s for one, age_s in zip(known, oldest, strict=True)},
            PARKED_JOBS: {} if queues.parked is None else {(): queues.parked},
            CONSUMER_WAITING: {(one.consumer,): one.waiting for one in queues.services if one.waiting is not None},
            CONSUMER_IN_PROGRESS: {
                (one.consumer,): one.in_progress for one in queues.services if one.in_progress is not None
            },
        }

    async def _oldest_s(self, queue: AgentQueue) -> float:
        """How long ago the job was accepted that has been in an agent's queue for longest; 0 where it is empty."""
        if not (queue.waiting or queue.in_progress):
            return 0.0
        found = await asyncio.gather(
            *(self._lookup.next(Stream.JOBS, subject, 1) for subject in subjects.jobs_of(queue.agent))
        )
        now = self._now()
        # The two clocks are two machines'.
        return max(
            (
                0.0,
                *(
                    (now - queued_at(believed(one.subject, one.headers), one.stored_at)).total_seconds()
                    for one in found
                    if one is not None
                ),
            )
        )
