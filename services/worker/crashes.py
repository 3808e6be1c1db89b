"""Jobs that can't be handled: they are repeated, wait for a missing key, and finally end without a run."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial

import structlog

from breakwater.calls.assignment import Assignment
from breakwater.config import Agent
from breakwater.jobs.contract.execution import ErrorInfo
from breakwater.jobs.contract.job import Job
from breakwater.kernel.errors import BreakwaterError, UnavailableError
from breakwater.kernel.nats.delivery import Delivery, dead_letter, park
from breakwater.kernel.nats.errors import PublishRefusedError
from breakwater.kernel.process.outage import StoppedWaitingError
from breakwater.kernel.security.encryption import DecryptionError
from breakwater.services.worker.conclude import end_without_run
from breakwater.services.worker.context import WorkerContext
from breakwater.services.worker.parsing import JobReader
from breakwater.services.worker.results import result_without_run

KEY_WAIT = timedelta(hours=1)
"""The longest wait of a job for a missing key."""

KEY_POLL = timedelta(minutes=1)
"""The interval at which a waiting job checks for its key."""

MAX_CRASHES = 10
"""The number of internal failures of a job, on any worker, before it is dead-lettered."""


class CrashedEachTimeError(BreakwaterError):
    """Each worker that handled a message crashed."""


class Crashes:
    """Counts and handles the failures to handle one agent's jobs."""

    def __init__(self, worker: WorkerContext, agent_name: str, agent: Agent, reader: JobReader) -> None:
        self._worker = worker
        self._agent_name = agent_name
        self._agent = agent
        self._reader = reader

    async def count(self, delivery: Delivery, by: int = 1) -> int:
        """Counts a crash of a message, and returns the number of its crashes."""
        message = f"{self._agent_name}/{delivery.sequence}/{int(delivery.published_at.timestamp())}"
        count = partial(self._worker.executions.count_crash, message, by)
        return await self._worker.outages.retry_while_unavailable(count)

    async def repeat_or_end(self, delivery: Delivery, job: Assignment | None, error: Exception) -> None:
        """Handles a failure: repeats the job, makes it wait for its key, or ends it.

        `job` is None if it could not be read.
        """
        if isinstance(error, DecryptionError):
            try:
                await self._wait_for_key(self._reader.as_invalid(delivery, str(error)))
            except PublishRefusedError as refusal:
                error = refusal
            else:
                return
        crashes = await self.count(delivery)
        if crashes < MAX_CRASHES:
            await delivery.retry_in(min(2.0**crashes, 60.0))
        else:
            message = f"{type(error).__name__} in the worker"
            await self._end(delivery, job, ErrorInfo(kind="server", class_="InternalError", message=message))

    async def _wait_for_key(self, job: Assignment) -> None:
        """Parks a job whose key is missing, and dead-letters it after `KEY_WAIT`."""
        worker = self._worker
        structlog.get_logger().error("job_not_decrypted", execution_id=job.execution_id, error=job.problem)
        if worker.now() - job.delivery.queued_at > KEY_WAIT:
            text = "The request could not be read."
            error = ErrorInfo(kind="invalid", class_="UndecryptableJobError", message=job.problem, user_message=text)
            # This fails if the job is already decided with a result that can't be decrypted, either.
            with suppress(DecryptionError):
                await end_without_run(worker, job, "invalid", error)
                return
        await worker.outages.retry_while_unavailable(
            partial(
                park,
                worker.publisher,
                job.delivery,
                agent=self._agent_name,
                execution_id=job.execution_id,
                job_id=job.ids.job_id,
                due=worker.now() + KEY_POLL,
            )
        )
        await worker.publisher.acknowledge(job.delivery.ack_subject)

    async def _end(self, delivery: Delivery, job: Assignment | None, error: ErrorInfo) -> None:
        """Ends a job that crashes each time; without a record if making that fails, too."""
        worker = self._worker
        try:
            # Not parsed again, as parsing may be the crash.
            job = job or self._reader.as_invalid(delivery, error.message)
            await end_without_run(worker, job, "error", error)
        except (UnavailableError, StoppedWaitingError):
            raise
        except Exception:  # noqa: BLE001  the message must end in any case
            place = {"agent": self._agent_name, "sequence": delivery.sequence}
            execution_id = None if job is None else job.execution_id
            structlog.get_logger().exception("job_ended_without_a_record", **place, execution_id=execution_id)
            await worker.outages.retry_while_unavailable(
                lambda: dead_letter(
                    worker.publisher,
                    delivery,
                    reason="error",
                    error=error.message,
                    agent=self._agent_name,
                    at=worker.now(),
                    withheld=not self._agent.persist_prompts,
                    private=not self._agent.keeps_error_texts,
                )
            )
            if job is not None and job.job.reply_to is not None:
                # Its sender still gets an answer.
                bare_job = Job.model_construct(agent=self._agent_name, prompt="")
                result = result_without_run(worker, replace(job, job=bare_job), "error", error)
                await worker.publisher.send(job.job.reply_to, result.json_bytes())
            await delivery.terminate()
