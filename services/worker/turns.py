"""Jobs that wait for a slot of their agent, in fair order.

A job that finds no slot for its caller is moved to PARKED, out of the way of all that stand behind it in its queue. Its
message there is delivered to one worker, which keeps it in memory, in the order of weighted fair queueing, and returns
it to its queue when it is its turn. If that worker dies, NATS delivers the message to another one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import orjson
import structlog

from breakwater.jobs.rules.turns import AGED_S, CallerTurn
from breakwater.kernel.nats.core import ClientGetter, core_subscription
from breakwater.kernel.nats.delivery import Delivery, PutBack
from breakwater.kernel.nats.errors import BusError, BusUnavailableError
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.subjects import NEW_CALLERS, WAITING_CALLERS, Stream
from breakwater.kernel.nats.topology import worker_consumer
from breakwater.kernel.process import background
from breakwater.kernel.process.outage import Outage
from breakwater.services.worker.slots import Slots, WaitingJob

KEPT_S = 60.0
"""A waiting job is delivered again after so long, so that it survives the worker that has it in memory."""

MAX_BYTES = 64 * 1024**2
"""The most bytes of waiting jobs in memory. Others are delivered again."""

MANY = 1_000
"""With so many jobs in memory, the slots have enough to do until those that found no room are delivered again."""

FULL_S = 5.0
"""The wait of a job that found no room beside fewer: they are large, and soon gone."""

ENTRY_BYTES = 3_000
"""About what a waiting job takes in memory beside its data."""

PRUNE_EVERY_S = 2.0
"""Less than what is between the end of a job's wait here and its next delivery."""

TRANSIT_S = 0.25
"""A job should be back from its queue after so long. It may be with another worker."""

TICK_S = 0.5
RETRY_S = 1.0


class Turns:
    """Returns waiting jobs to their queues, as many as there are free slots in this worker."""

    def __init__(self, slots: Slots, concurrency: Callable[[str], int], lookup: Lookup, publisher: Publisher) -> None:
        """Takes the slots, a function that returns the concurrency of an agent, and a lookup of the queues."""
        self.concurrency = concurrency
        self._slots = slots
        self._lookup = lookup
        self._publisher = publisher
        self._agents: set[str] = set()
        """The agents with waiting jobs."""
        self._bytes = 0
        self._is_closed = False
        self._pruned_at = 0.0
        self._held_up: set[str] = set()
        """The agents whose queue has jobs that no worker has taken."""
        self._looked_at: dict[str, float] = {}
        self._announced: dict[tuple[str, CallerTurn], float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._begun = asyncio.Event()
        """Set while jobs wait, or were announced a moment ago."""
        slots.on_release = self.advance

    async def announce(self, agent: str, *turns: CallerTurn) -> None:
        """Says that jobs of some callers wait, unless that was said a moment ago."""
        now = self._slots.clock()
        callers = [(agent, turn) for turn in turns if self._announced.get((agent, turn), 0.0) <= now]
        if callers:
            self._announced |= dict.fromkeys(callers, now + TICK_S)
            self._begun.set()
            with suppress(BusError):  # it is said again
                notice = orjson.dumps([(agent, turn.text) for agent, turn in callers])
                await self._publisher.send(WAITING_CALLERS, notice)

    async def add(self, agent: str, execution_id: str, delivery: Delivery, put_back: PutBack) -> None:
        """Lets a job wait for its turn."""
        size = _size_of(delivery)
        if self._is_closed or self._bytes + size > MAX_BYTES:
            has_many = sum(len(self._slots[name].waiting) for name in self._agents) >= MANY
            await delivery.retry_in(TICK_S if self._is_closed else KEPT_S if has_many else FULL_S)
            return
        self._bytes += size
        try:
            await delivery.retry_in(KEPT_S)
        except BaseException:
            self._bytes -= size
            raise
        turn = CallerTurn.parse(delivery.turn or "")
        until = self._slots.clock() + KEPT_S * 0.9
        job = WaitingJob(execution_id, turn, delivery, until, put_back)
        self._slots[agent].waiting.add(turn, delivery.queued_at.timestamp(), job)
        self._agents.add(agent)
        self._begun.set()
        self.advance(agent)

    def advance(self, agent: str) -> None:
        """Returns the next jobs of an agent, if there are free slots."""
        if agent not in self._agents or agent in self._held_up:
            return
        slots = self._slots[agent]
        total = self._slots.share(self.concurrency(agent))
        while slots.held < total:
            now = self._slots.clock()
            job = slots.waiting.take(
                lambda turn: slots.key_may_take(total, turn, now),  # noqa: B023  called at once
                lambda turn: slots.tenant_may_take(total, turn, now),  # noqa: B023  the same
                time.time() - AGED_S,
            )
            if job is None:
                break
            self._bytes -= _size_of(job.delivery)
            if job.until <= now:
                continue  # another worker may have it
            slots.keep_for(job, now)
            loop = asyncio.get_running_loop()
            # With several workers, most come to another one, and mostly sooner.
            loop.call_later(TRANSIT_S / self._slots.workers, self._expect, agent, job.execution_id)
            self._begin(job.put_back(job.delivery))
        if not len(slots.waiting):
            self._agents.discard(agent)

    def _expect(self, agent: str, execution_id: str) -> None:
        """Looks at the queue if a job has not come back, and nobody has looked for a while."""
        now = self._slots.clock()
        if self._slots[agent].arrived(execution_id) and self._looked_at.get(agent, 0.0) < now - TICK_S:
            self._looked_at[agent] = now
            self._begin(self._look(agent))

    async def close(self) -> None:
        """Gives all waiting jobs to other workers, as this one stops."""
        self._is_closed = True
        for agent in tuple(self._agents):
            while (job := self._slots[agent].waiting.take(lambda _: True)) is not None:
                await self._publisher.give_back(job.delivery.ack_subject)
        self._agents.clear()

    async def run(self) -> None:
        """Looks regularly whether there is a turn: slots become free in other workers, too."""
        while True:
            await self._begun.wait()
            await asyncio.sleep(background.aligned_delay(TICK_S))
            now = self._slots.clock()
            self._announced = {caller: until for caller, until in self._announced.items() if until > now}
            if now >= self._pruned_at + PRUNE_EVERY_S:
                self._prune(now)
            for agent in tuple(self._agents):
                if agent in self._held_up:
                    await self._look(agent)
                self.advance(agent)
                await self.announce(agent, *self._slots[agent].waiting.turns())
            if not self._agents and not self._announced:
                self._begun.clear()

    def _prune(self, now: float) -> None:
        """Forgets the jobs that NATS is about to deliver again, which their callers have had no turn for."""
        self._pruned_at = now
        for agent in self._agents:
            over = self._slots[agent].waiting.prune(lambda job: job.until <= now)
            self._bytes -= sum(_size_of(job.delivery) for job in over)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _look(self, agent: str) -> None:
        """Lets jobs return only while all that have returned were delivered, to this or another worker."""
        try:
            backlog = await self._lookup.backlog(Stream.JOBS, worker_consumer(agent))
        except BusError as error:
            structlog.get_logger().debug("queue_not_read", agent=agent, error=str(error))
            return
        if backlog is not None and backlog.waiting:
            self._held_up.add(agent)
        else:
            self._held_up.discard(agent)
            self.advance(agent)


def _size_of(delivery: Delivery) -> int:
    return len(delivery.data) + ENTRY_BYTES


async def receive_new_callers(connection: ClientGetter, slots: Slots) -> None:
    """Receives notices of callers that begin to call an agent until it is cancelled."""

    def hear(data: bytes) -> None:
        agent, turn = orjson.loads(data)
        slots[agent].expect(CallerTurn.parse(turn), slots.clock())

    async def receive() -> None:
        async with core_subscription(connection, NEW_CALLERS, hear):
            await asyncio.Event().wait()

    await Outage("new callers").retry_until_available(receive, on=BusUnavailableError, retry_s=RETRY_S)
