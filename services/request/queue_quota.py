"""How many bytes of JOBS each agent's jobs take: one agent's must leave room for those of the others.

The server limits the bytes of the whole stream alone. What an agent has of them is estimated from a few of its jobs,
and only while JOBS holds more than half of what one agent may have.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping

import structlog

from breakwater import background
from breakwater.bus.errors import BusError
from breakwater.bus.lookup import Facts, Lookup
from breakwater.contracts import subjects
from breakwater.contracts.subjects import Stream
from breakwater.outage import Outage

LOOK_EVERY_S = 2.0
IDLE_LOOKS = 5
"""How many times less often it is looked where there seems to be nothing."""

SAMPLES = 8
LARGEST = 8 * 1024**2
"""No message is larger: an agent with a few jobs is within its share, whatever they are."""


class QueueQuota:
    """What agents have in JOBS, as of the last look, and with what this process has added since."""

    def __init__(self, share: int | None, lookup: Lookup) -> None:
        """Takes the most bytes that one agent may have (None: a quarter of what JOBS may hold), and how to look."""
        self.set_share(share)
        self.lookup = lookup
        self._held: Mapping[str, float] = {}
        self._added: Counter[str] = Counter()
        self._over: set[str] = set()
        self._outage = Outage("the queue's shares")

    def set_share(self, share: int | None) -> None:
        """Takes another share; None is known at the next look."""
        self._configured = share
        self._share = float("inf") if share is None else share

    def has_room(self, agent: str, size: int) -> bool:
        """Whether a job of so many bytes is within its agent's share."""
        return self._held.get(agent, 0.0) + self._added[agent] + size <= self._share

    def add(self, agent: str, size: int) -> None:
        """Counts a job that JOBS has taken."""
        self._added[agent] += size

    async def run(self) -> None:
        """Looks again while there is something to look at, until cancelled."""
        looks = 0
        while True:
            await asyncio.sleep(background.aligned_delay(LOOK_EVERY_S))
            looks += 1
            # What programs publish on NATS is seen, too, if later.
            if self._added or self._held or looks % IDLE_LOOKS == 0:
                await self._outage.run_logged(self.look, expected=BusError)
                self._report()

    async def look(self) -> None:
        """Looks at what JOBS holds. Raises BusError: that can't be known now."""
        # What is added meanwhile may count twice until the next look, and nothing counts for none.
        seen = self._added.copy()
        self._held = await self._look()
        self._added -= seen

    def _report(self) -> None:
        """Logs which agents are over their share now, as HTTP alone refuses them, or are within it again."""
        over = {agent for agent, held in self._held.items() if held > self._share}
        for agent in over - self._over:
            effect = "refused over HTTP; programs on NATS can go on until JOBS is full"
            held = round(self._held[agent])
            structlog.get_logger().warning(
                "queue_share_exceeded", agent=agent, bytes=held, share=self._share, effect=effect
            )
        for agent in self._over - over:
            structlog.get_logger().info("queue_share_kept_again", agent=agent)
        self._over = over

    async def _look(self) -> dict[str, float]:
        facts = await self.lookup.facts(Stream.JOBS)
        if self._configured is None and facts.max_bytes > 0:
            self._share = facts.max_bytes / 4
        if facts.bytes <= self._share / 2:
            return {}
        counts = await self.lookup.counts(Stream.JOBS, "bw.jobs.>")
        mean = facts.bytes / max(sum(counts.values()), 1)
        estimates = {
            subject: count * (mean if count * LARGEST <= self._share else await self._mean_size(subject, facts, mean))
            for subject, count in counts.items()
        }
        # The total is known: with one agent that has nearly all, so is what it has.
        scale = facts.bytes / max(sum(estimates.values()), 1)
        held: dict[str, float] = {}
        for subject, estimate in estimates.items():
            agent = subjects.agent_of_job(subject)
            held[agent] = held.get(agent, 0.0) + estimate * scale
        return held

    async def _mean_size(self, subject: str, facts: Facts, default: float) -> float:
        step = max((facts.last - facts.first) // SAMPLES, 1)
        places = range(facts.first, facts.last + 1, step)
        found = await asyncio.gather(*(self.lookup.next(Stream.JOBS, subject, place) for place in places))
        sizes = [len(one.data) for one in found if one is not None]
        return sum(sizes) / len(sizes) if sizes else default
