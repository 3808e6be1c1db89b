"""Workers that have died: each worker sends a heartbeat, and takes over the jobs of those whose heartbeat stays away.

Nothing of this is done for each job. The jobs of a dead worker are found when it has died: all that NATS has delivered
and no worker has acknowledged, if the claim of the execution is the dead worker's, or missing for some seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from contextlib import aclosing
from time import monotonic

import structlog

from breakwater.jobs.rules.workers import LATEST_S, MISSED_S, Silence, is_dead
from breakwater.jobs.store.workers import LateWorker, Workers
from breakwater.kernel.errors import UnavailableError
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.core import Presence
from breakwater.kernel.nats.delivery import Delivery, held_deliveries
from breakwater.kernel.nats.errors import BusUnavailableError
from breakwater.kernel.nats.lookup import ClientGetter
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.nats.topology import worker_consumer
from breakwater.kernel.process import background
from breakwater.kernel.process.outage import Outage
from breakwater.kernel.security.encryption import DecryptionError, may_be_encrypted
from services.worker import process
from services.worker.context import WorkerContext
from services.worker.leases import RENEW_EVERY_S
from services.worker.parsing import execution_id_of

BEAT_EVERY_S = 1.0
GAP_S = 2.5
"""A heartbeat that comes so long after the one before means that Redis or this process was away meanwhile."""

UNCLAIMED_S = RENEW_EVERY_S + 1.0
"""A job that has been unclaimed for so long has no holder: one whose claim Redis has lost writes it again before."""

RETRY_S = 1.0


class DeadWorkers:
    """Sends the heartbeat of one worker, and takes over the jobs of others."""

    def __init__(
        self,
        worker: WorkerContext,
        connection: ClientGetter,
        agents: Callable[[], Collection[str]],
        *,
        runs: Callable[[str], bool | None] = process.runs,
    ) -> None:
        """Takes its worker, and what gives the names of the agents that it serves."""
        self._worker = worker
        self._connection = connection
        self._agents = agents
        self._runs = runs
        self._workers = Workers(worker.redis)
        self._presence = Presence(connection, worker.id)
        self._beaten_at = self._watched_from = monotonic()
        self._unclaimed: dict[str, tuple[float, set[int]]] = {}
        """Of dead workers: when their jobs were freed, and the sequences of those without a claim then."""

    async def run(self) -> None:
        """Does so until it is cancelled."""
        outage = Outage("heartbeat")

        async def beat() -> None:
            async with self._presence.listening():
                while True:
                    await outage.run_logged(self._beat, expected=UnavailableError)
                    await asyncio.sleep(background.aligned_delay(BEAT_EVERY_S))

        await Outage("connections of workers").retry_until_available(beat, on=BusUnavailableError, retry_s=RETRY_S)

    async def leave(self) -> None:
        """Removes this worker, which stops in order and has released its jobs. Raises StateUnavailableError."""
        await self._workers.forget(self._worker.id)

    async def _beat(self) -> None:
        running, late = await self._workers.beat(self._worker.id, await self._presence.heard_on())
        self._worker.slots.workers = running
        if self._workers.was_emptied:
            await self._worker.leases.renew()
        now = monotonic()
        if now - self._beaten_at > GAP_S:
            self._watched_from = now
        self._beaten_at = now
        # A worker that is late no more lives, or another worker has taken over all that it had.
        self._unclaimed = {one.id: self._unclaimed[one.id] for one in late if one.id in self._unclaimed}
        # All at the same time: one that does not answer takes half a second, and the next heartbeat comes soon.
        dead = await asyncio.gather(*(self._is_dead(one) for one in late))
        for one, is_dead_now in zip(late, dead, strict=True):
            if one.id in self._unclaimed or is_dead_now:
                await self._take_over(one)

    async def _is_dead(self, late: LateWorker) -> bool:
        runs = self._runs(late.id)
        if runs or (runs is None and not MISSED_S <= late.silent_s <= LATEST_S):
            return False
        return is_dead(
            Silence(
                late.silent_s,
                runs,
                await self._presence.has(late.id) if late.heard_on else None,
                self._presence.knows_since(late.heard_on, late.silent_s),
                monotonic() - self._watched_from,
            )
        )

    async def _take_over(self, dead: LateWorker) -> None:
        """Several may do so at the same time: the second one finds less to do."""
        now = monotonic()
        since, known = self._unclaimed.get(dead.id, (now, set[int]()))
        if since < now < since + UNCLAIMED_S:
            return
        sure = await self._workers.kept_for_s() > 2 * UNCLAIMED_S
        freed = await asyncio.gather(
            *(self._free_jobs(dead.id, agent, None if sure else known) for agent in self._agents())
        )
        unclaimed = {sequence for _, left in freed for sequence in left}
        if dead.id not in self._unclaimed and unclaimed:
            self._unclaimed[dead.id] = now, unclaimed
        else:
            await self._workers.forget(dead.id)
        jobs = sum(count for count, _ in freed)
        structlog.get_logger().warning("worker_died", worker=dead.id, silent_s=dead.silent_s, jobs_taken_over=jobs)

    async def _free_jobs(self, dead: str, agent: str, unclaimed: set[int] | None) -> tuple[int, set[int]]:
        """Has NATS deliver the jobs of an agent again that a dead worker had.

        Args:
            dead: the worker.
            agent: whose jobs.
            unclaimed: the sequences of those without a claim some time ago; None where no claim can be lost.

        Returns:
            Their number, and the sequences of those without a claim, which may have had one then.
        """
        held: dict[Delivery, str] = {}
        deliveries = held_deliveries(self._connection, Stream.JOBS, worker_consumer(agent), subjects.jobs_of(agent))
        async with aclosing(deliveries):
            async for delivery in deliveries:
                if (execution_id := self._execution_id(delivery)) is not None:
                    held[delivery] = execution_id
                delivery.data = b""
        states = dict(zip(held, await self._worker.executions.free(dead, tuple(held.values())), strict=True))
        given_back = [
            one
            for one, now in states.items()
            if now == "freed" or (now == "unclaimed" and (unclaimed is None or one.sequence in unclaimed))
        ]
        for delivery in given_back:
            await delivery.retry_in(0)
        left = {one.sequence for one, now in states.items() if now == "unclaimed"}
        return len(given_back), left.difference(one.sequence for one in given_back)

    def _execution_id(self, delivery: Delivery) -> str | None:
        if may_be_encrypted(delivery.data):
            try:
                delivery.data = self._worker.cipher.decrypt_document(delivery.data)
            except DecryptionError:
                return None  # this worker could not run it, either: it is left to the ack wait
        return execution_id_of(delivery, None)
