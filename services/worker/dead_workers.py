"""Dead workers: each worker sends a heartbeat, and takes over the jobs of workers whose heartbeat stops.

This costs nothing per job. Only once a worker is dead does another one look for its jobs: messages that are delivered
and not acknowledged, and whose execution is claimed by the dead worker or has had no claim for some seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from time import monotonic

import structlog

from breakwater.jobs.rules.workers import Silence, is_dead
from breakwater.jobs.store.executions import MAYBE_HELD_MS
from breakwater.jobs.store.workers import LateWorker, Workers
from breakwater.kernel.errors import UnavailableError
from breakwater.kernel.nats.core import ClientGetter, Presence
from breakwater.kernel.nats.errors import BusUnavailableError
from breakwater.kernel.process import background
from breakwater.kernel.process.outage import Outage
from breakwater.services.worker import process
from breakwater.services.worker.context import WorkerContext
from breakwater.services.worker.held_jobs import held_jobs

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
        """Takes its worker, and a function that returns the names of the agents that it serves."""
        self._worker = worker
        self._connection = connection
        self._agents = agents
        self._runs = runs
        self._liveness = worker.executions.liveness
        self._workers = Workers(worker.redis, self._liveness)
        self._presence = Presence(connection, worker.id)
        self.heartbeat = Outage("heartbeat")
        """The outage of the heartbeat, which is written to Redis whether or not there are jobs."""
        self._must_restore = False
        """True until all claims are written again to a Redis that may have lost them."""
        self._beaten_at = self._watched_from = monotonic()
        self._unclaimed: dict[str, tuple[float, set[int]]] = {}
        """When the jobs of each dead worker were freed, and the sequences of those that had no claim then."""

    async def run(self) -> None:
        """Sends heartbeats and takes over jobs until it is cancelled."""

        async def beat() -> None:
            with self._presence.listening():
                while True:
                    await self.heartbeat.run_logged(self._beat, expected=UnavailableError)
                    await asyncio.sleep(background.aligned_delay(self._liveness.beat_every_s))

        await Outage("connections of workers").retry_until_available(beat, on=BusUnavailableError, retry_s=RETRY_S)

    async def join(self) -> int | None:
        """Sends the first heartbeat, before the worker has jobs. Raises StateUnavailableError.

        Returns:
            The beginning of Redis' data (ms since the epoch); None if it is so long ago that a claim that was lost then
            is no worker's any more.
        """
        await self._workers.beat(self._worker.id, "")
        is_young = await self._workers.age_of_data_s() * 1000 < MAYBE_HELD_MS
        return self._workers.kept_since_ms if is_young else None

    async def leave(self) -> None:
        """Removes this worker, which stops in order and has released its jobs. Raises StateUnavailableError."""
        await self._workers.forget(self._worker.id)

    async def _beat(self) -> None:
        running, late = await self._workers.beat(self._worker.id, await self._presence.heard_on())
        self._worker.slots.workers = running
        self._must_restore = self._must_restore or self._workers.was_emptied
        if self._must_restore:
            await self._worker.leases.renew(restore_all=True)
            self._must_restore = False
        now = monotonic()
        if now - self._beaten_at > self._liveness.gap_s:
            self._watched_from = now
        self._beaten_at = now
        # A worker that is no longer late is alive, or another worker has taken over all its jobs.
        self._unclaimed = {
            late_worker.id: self._unclaimed[late_worker.id] for late_worker in late if late_worker.id in self._unclaimed
        }
        # Concurrently: a worker that does not answer takes half a second, and the next heartbeat is due soon.
        dead = await asyncio.gather(*(self._is_dead(late_worker) for late_worker in late))
        for late_worker, is_dead_now in zip(late, dead, strict=True):
            if late_worker.id in self._unclaimed or is_dead_now:
                await self._take_over(late_worker)

    async def _is_dead(self, late_worker: LateWorker) -> bool:
        runs = self._runs(late_worker.id)
        liveness = self._liveness
        if runs or (runs is None and not liveness.missed_s <= late_worker.silent_s <= liveness.latest_s):
            return False
        return is_dead(
            Silence(
                late_worker.silent_s,
                runs,
                await self._presence.has(late_worker.id) if late_worker.heard_on else None,
                self._presence.knows_since(late_worker.heard_on, late_worker.silent_s),
                monotonic() - self._watched_from,
            ),
            liveness,
        )

    async def _take_over(self, dead: LateWorker) -> None:
        """Takes over the jobs of a dead worker. Several workers may do so at the same time."""
        now = monotonic()
        since, unclaimed_then = self._unclaimed.get(dead.id, (now, set[int]()))
        if since < now < since + self._liveness.unclaimed_s:
            return
        keeps_claims = await self._workers.kept_for_s() > 2 * self._liveness.unclaimed_s
        freed = await asyncio.gather(
            *(self._free_jobs(dead.id, agent, None if keeps_claims else unclaimed_then) for agent in self._agents())
        )
        unclaimed = {sequence for _, unclaimed_sequences in freed for sequence in unclaimed_sequences}
        if dead.id not in self._unclaimed and unclaimed:
            self._unclaimed[dead.id] = now, unclaimed
        else:
            await self._workers.forget(dead.id)
        jobs = sum(count for count, _ in freed)
        structlog.get_logger().warning("worker_died", worker=dead.id, silent_s=dead.silent_s, jobs_taken_over=jobs)

    async def _free_jobs(self, dead: str, agent: str, unclaimed_before: set[int] | None) -> tuple[int, set[int]]:
        """Makes NATS redeliver the jobs of an agent that a dead worker had.

        Args:
            dead: the id of the dead worker.
            agent: the agent.
            unclaimed_before: the sequences that had no claim some time ago; None if Redis can't have lost a claim.

        Returns:
            The number of these jobs, and the sequences of jobs without a claim that another worker may still have.
        """
        execution_ids = {delivery: execution_id async for delivery, execution_id in held_jobs(self._worker, agent)}
        states = dict(
            zip(execution_ids, await self._worker.executions.free(dead, tuple(execution_ids.values())), strict=True)
        )
        returned = [
            delivery
            for delivery, state in states.items()
            if state == "freed"
            or (state == "unclaimed" and (unclaimed_before is None or delivery.sequence in unclaimed_before))
        ]
        for delivery in returned:
            await delivery.retry_in(0)
        unclaimed_now = {delivery.sequence for delivery, state in states.items() if state == "unclaimed"}
        return len(returned), unclaimed_now.difference(delivery.sequence for delivery in returned)
