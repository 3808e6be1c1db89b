"""Jobs that can't be handled: they are repeated, wait for a missing key, and finally end without a run."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial

import structlog

from breakwater.config import Agent
from breakwater.jobs.contract.execution import ErrorInfo
from breakwater.kernel.errors import BreakwaterError, UnavailableError
from breakwater.kernel.nats.delivery import Delivery, dead_letter, park
from breakwater.kernel.process.outage import StoppedWaitingError
from breakwater.kernel.security.encryption import DecryptionError
from services.worker.conclude import end_without_run, result_without_run
from services.worker.context import WorkerContext
from services.worker.parsing import JobDelivery, ids_of_unread, unread_job

KEY_WAIT = timedelta(hours=1)
"""The longest wait of a job for a missing key."""

KEY_POLL = timedelta(minutes=1)
"""The interval at which a waiting job checks for its key."""

MAX_CRASHES = 10
"""The number of internal failures of a job, on any worker, before it is dead-lettered."""


class CrashedEachTimeError(BreakwaterError):
    """Each worker that handled a message crashed."""


class Crashes:
    """Counts and handles the crashes of one agent's jobs."""

    def __init__(self, worker: WorkerContext, agent_name: str, agent: Agent) -> None:
        self._worker = worker
        self._agent_name = agent_name
        self._agent = agent

    async def count(self, delivery: Delivery, by: int = 1) -> int:
        """Counts a crash of a message, and returns the number of its crashes."""
        message = f"{self._agent_name}/{delivery.sequence}/{int(delivery.published_at.timestamp())}"
        count = partial(self._worker.executions.crashed, message, by)
        return await self._worker.outages.retry_while_unavailable(count)

    async def repeat_or_end(self, delivery: Delivery, received: JobDelivery | None, error: Exception) -> None:
        """Returns a message for redelivery after a crash, or ends its job after too many crashes."""
        crashes = await self.count(delivery)
        if crashes < MAX_CRASHES:
            await delivery.retry_in(min(2.0**crashes, 60.0))
            return
        info = ErrorInfo(kind="server", class_="InternalError", message=f"{type(error).__name__} in the worker")
        try:
            # Not parsed again, as parsing may be the crash.
            received = received or self._unread(delivery, info.message)
            await end_without_run(self._worker, received, "error", info)
        except (UnavailableError, StoppedWaitingError):
            raise
        except Exception:  # noqa: BLE001  the message must end in any case
            place = {"agent": self._agent_name, "sequence": delivery.sequence}
            execution_id = None if received is None else received.execution_id
            structlog.get_logger().exception("job_ended_without_a_record", **place, execution_id=execution_id)
            await self._end_without_record(received, delivery, info)

    async def wait_for_key(self, delivery: Delivery, decryption_error: DecryptionError) -> None:
        """Parks a job whose key is missing, and dead-letters it after `KEY_WAIT`."""
        worker = self._worker
        ids = ids_of_unread(delivery)
        structlog.get_logger().error("job_not_decrypted", execution_id=ids.execution_id, error=str(decryption_error))
        if worker.now() - delivery.queued_at > KEY_WAIT:
            text = "The request could not be read."
            error = ErrorInfo(
                kind="invalid", class_="UndecryptableJobError", message=str(decryption_error), user_message=text
            )
            # This fails if the job is already decided with a result that can't be decrypted, either.
            with suppress(DecryptionError):
                await end_without_run(worker, self._unread(delivery, str(decryption_error)), "invalid", error)
                return
        due = worker.now() + KEY_POLL
        await worker.outages.retry_while_unavailable(
            partial(
                park,
                worker.publisher,
                delivery,
                agent=self._agent_name,
                execution_id=ids.execution_id,
                job_id=ids.job_id,
                due=due,
            )
        )
        await worker.publisher.acknowledge(delivery.ack_subject)

    async def _end_without_record(self, received: JobDelivery | None, delivery: Delivery, info: ErrorInfo) -> None:
        """Ends a message without a record, as making the record failed. Its sender still gets an answer."""
        worker = self._worker
        await worker.outages.retry_while_unavailable(
            lambda: dead_letter(
                worker.publisher,
                delivery,
                reason="error",
                error=info.message,
                agent=self._agent_name,
                at=worker.now(),
                withheld=not self._agent.persist_prompts,
                private=not self._agent.keeps_error_texts,
            )
        )
        if received is not None and received.reply_to is not None:
            result = result_without_run(worker, replace(received, job=None), "error", info)
            await worker.publisher.send(received.reply_to, result.json_bytes())
        await delivery.terminate()

    def _unread(self, delivery: Delivery, problem: str) -> JobDelivery:
        return unread_job(self._worker.config, self._agent_name, self._agent, delivery, problem)
