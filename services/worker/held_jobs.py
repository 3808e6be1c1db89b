"""The jobs that workers hold: their messages were delivered, and are not acknowledged."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing

from breakwater.calls.assignment import Assignment
from breakwater.jobs.queued_message import ids_of_unread
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.delivery import Delivery, held_deliveries
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.nats.topology import worker_consumer
from breakwater.kernel.security.encryption import DecryptionError, may_be_encrypted
from breakwater.services.worker.context import WorkerContext


async def held_jobs(worker: WorkerContext, agent: str) -> AsyncGenerator[tuple[Delivery, str]]:
    """Yields the held deliveries of an agent's jobs, without their bodies, each with the id of its execution.

    Raises:
        BusUnavailableError: NATS does not answer.
    """
    deliveries = held_deliveries(worker.lookup, Stream.JOBS, worker_consumer(agent), subjects.jobs_of(agent))
    async with aclosing(deliveries):
        async for delivery in deliveries:
            if (execution_id := _execution_id(worker, delivery)) is not None:
                delivery.data = b""
                yield delivery, execution_id


class EarlierMessages:
    """Finds the earlier messages of an agent's jobs whose claims Redis may have lost.

    Only what was held as Redis' data began can have lost its claim, so one look is enough for each beginning.
    """

    def __init__(self, worker: WorkerContext, agent: str) -> None:
        self._worker = worker
        self._agent = agent
        self._lock = asyncio.Lock()
        self._kept_since_ms = 0
        self._held_then: dict[str, set[int]] = {}
        """The sequences of the messages that were held then and are not known to be acknowledged, by execution."""

    def checked_since_ms(self, job: Assignment) -> int:
        """Returns the beginning of Redis' data at which no earlier message of a job was held; 0 if that is unknown."""
        return 0 if self._earlier_of(job) else self._kept_since_ms

    async def has_of(self, job: Assignment, kept_since_ms: int) -> bool:
        """Returns True if some worker has held an earlier message of a job since Redis' data began. Raises as `look`.

        An acknowledged one does not count: its job is decided, or was parked.
        """
        await self.look(kept_since_ms)
        held_then = self._held_then.get(job.execution_id, set())
        for sequence in self._earlier_of(job):
            stored = await self._worker.lookup.as_stored().next(Stream.JOBS, ">", sequence)
            if stored is not None and stored.sequence == sequence:
                return True
            held_then.discard(sequence)
        return False

    async def look(self, kept_since_ms: int) -> None:
        """Notes which messages were held as Redis' data began, unless that is known.

        Raises:
            BusUnavailableError: NATS does not answer.
        """
        async with self._lock:
            if self._kept_since_ms != kept_since_ms:
                held: defaultdict[str, set[int]] = defaultdict(set)
                async for delivery, execution_id in held_jobs(self._worker, self._agent):
                    if delivery.published_at.timestamp() * 1000 <= kept_since_ms:
                        held[execution_id].add(delivery.sequence)
                self._held_then = held
                self._kept_since_ms = kept_since_ms

    def _earlier_of(self, job: Assignment) -> list[int]:
        return [sequence for sequence in self._held_then.get(job.execution_id, ()) if sequence < job.delivery.sequence]


def _execution_id(worker: WorkerContext, delivery: Delivery) -> str | None:
    if may_be_encrypted(delivery.data):
        try:
            delivery.data = worker.cipher.decrypt_document(delivery.data)
        except DecryptionError:
            return None  # this worker could not run the job, either; NATS redelivers it after the ack wait
    return ids_of_unread(delivery).execution_id
