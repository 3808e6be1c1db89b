"""The jobs that workers hold: their messages were delivered, and are not acknowledged."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from breakwater.calls.assignment import Assignment
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.delivery import Delivery, held_deliveries
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.nats.topology import worker_consumer
from breakwater.kernel.security.encryption import DecryptionError, may_be_encrypted
from services.worker.context import WorkerContext
from services.worker.parsing import ids_of_unread


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


async def is_behind_another(worker: WorkerContext, job: Assignment) -> bool:
    """Returns True if an earlier message of the same job is held, by this or another worker.

    Raises:
        BusUnavailableError: NATS does not answer.
    """
    async with aclosing(held_jobs(worker, job.agent_name)) as jobs:
        async for delivery, execution_id in jobs:
            if execution_id == job.execution_id and delivery.sequence < job.delivery.sequence:
                return True
    return False


def _execution_id(worker: WorkerContext, delivery: Delivery) -> str | None:
    if may_be_encrypted(delivery.data):
        try:
            delivery.data = worker.cipher.decrypt_document(delivery.data)
        except DecryptionError:
            return None  # this worker could not run the job, either; NATS redelivers it after the ack wait
    return ids_of_unread(delivery, worker.config).execution_id
