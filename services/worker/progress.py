"""The progress of a running job, on core NATS: each step reaches its current subscribers at most once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from breakwater.calls.assignment import Assignment
from breakwater.jobs.contract.execution import Attempt, Notification, Progress
from breakwater.jobs.rules.chat_messages import encode_json
from breakwater.jobs.rules.record import error_details, step_fields
from breakwater.kernel.nats import subjects
from breakwater.kernel.types import format_time
from breakwater.services.worker.context import WorkerContext

_EMPTY = dict.fromkeys(Progress.model_fields)


class ProgressReporter:
    """Reports on one job.

    Its steps are written without their model, which would take ten times as long: nothing in them is to be checked.
    """

    def __init__(self, worker: WorkerContext, job: Assignment) -> None:
        self._worker = worker
        self._subject = subjects.progress(job.agent_name, job.execution_id)
        self._no_step: Mapping[str, Any] = {**_EMPTY, **job.names}
        self._queued_at = job.delivery.queued_at

    async def queued(self) -> None:
        """Reports that the job was queued. A publisher's report might come after the first call; the worker's can't."""
        # The clock of NATS may be ahead of this worker's, which times all later steps.
        await self.report("queued", at=min(self._queued_at, self._worker.now()))

    async def report(self, state: str, event: Notification | None = None, **details: object) -> None:
        """Reports a step; `details` are fields of `Progress`."""
        await self._send({"state": state, "event": event, "at": self._worker.now(), **details})

    async def failed(
        self, event: Notification, attempt: Attempt, state: str = "in_progress", **details: object
    ) -> None:
        """Reports a failed attempt and its consequence; `details` are fields of `Progress`."""
        error = error_details(attempt.error)
        await self.report(state, event, attempt=attempt.number, model=attempt.model, **error, **details)

    async def attempt_ended(self, attempt: Attempt) -> None:
        """Reports a recorded attempt, including a refused one."""
        for step in step_fields(attempt):
            await self._send(step)

    async def _send(self, step: Mapping[str, Any]) -> None:
        message = encode_json({**self._no_step, **step, "at": format_time(step["at"])})
        await self._worker.publisher.send(self._subject, message)
