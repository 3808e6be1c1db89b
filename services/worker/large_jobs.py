"""The reading of jobs whose bodies are in the object store."""

from __future__ import annotations

import asyncio
from functools import partial

import structlog

from breakwater.calls.assignment import Assignment
from breakwater.jobs.queued_message import ids_of_unread
from breakwater.jobs.store.records import stored_result
from breakwater.kernel.nats.bodies import BodyLostError, BodyReference
from breakwater.kernel.nats.delivery import Delivery
from breakwater.services.worker.context import WorkerContext
from breakwater.services.worker.parsing import JobReader

TRIES = 5
RETRY_S = 0.5
"""The wait before a lost body is looked for again: a replica that lags may not know yet that its job has ended."""


class LargeJobs:
    """Reads the large jobs of one agent."""

    def __init__(self, worker: WorkerContext, reader: JobReader) -> None:
        self._worker = worker
        self._reader = reader

    async def read(self, delivery: Delivery, body: BodyReference) -> Assignment | None:
        """Reads a delivered job with its body.

        Returns:
            The job, which is invalid if its body is lost; None if its body is gone because the job has ended, and the
            delivery is acknowledged.

        Raises:
            DecryptionError: the body's key is missing.
        """
        worker = self._worker
        tries = 0
        while True:
            tries += 1
            try:
                data = await worker.outages.retry_while_unavailable(partial(worker.bodies.reader.read, body))
                break
            except BodyLostError as error:
                if await self._has_ended(delivery):
                    # Its body is removed only after everything else that its end entails.
                    await worker.publisher.acknowledge(delivery.ack_subject)
                    return None
                if tries == TRIES:
                    delivery.body_is_lost = True
                    place = {"sequence": delivery.sequence, "body": body.name}
                    structlog.get_logger().error("body_lost", **place, error=str(error))
                    return self._reader.as_invalid(delivery, f"{error}: submit the job again")
            await worker.sleep(RETRY_S)
        # In threads, so that megabytes of text stop the event loop, which renews claims, as little as possible.
        if body.encrypted:
            data = await asyncio.to_thread(worker.cipher.decrypt_document, data)
        delivery.data = data
        job = await asyncio.to_thread(self._reader.read, delivery)
        delivery.data = delivery.stored_data
        return job

    async def _has_ended(self, delivery: Delivery) -> bool:
        worker = self._worker
        find = partial(stored_result, worker.lookup.as_stored(), ids_of_unread(delivery).execution_id)
        return await worker.outages.retry_while_unavailable(find) is not None
