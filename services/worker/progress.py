"""The progress of a job while it runs, on core NATS: at most once, to those that are subscribed."""

from __future__ import annotations

from breakwater.contracts import subjects
from breakwater.contracts.execution import Attempt, Notification, Progress
from breakwater.policy.record import error_details, steps_of
from services.worker.context import WorkerContext


class ProgressReporter:
    """Reports on one job."""

    def __init__(self, worker: WorkerContext, agent: str, execution_id: str, parent_execution_id: str | None) -> None:
        self._worker = worker
        self._agent = agent
        self._execution_id = execution_id
        self._parent = parent_execution_id
        self._subject = subjects.progress(agent, execution_id)

    async def report(self, state: str, event: Notification | None = None, **details: object) -> None:
        """Reports a step; `details` are fields of `Progress`."""
        step = Progress.model_validate(
            {
                "execution_id": self._execution_id,
                "agent": self._agent,
                "parent_execution_id": self._parent,
                "state": state,
                "event": event,
                "at": self._worker.now(),
                **details,
            }
        )
        await self._worker.publisher.send(self._subject, step.json_bytes())

    async def attempt_ended(self, attempt: Attempt) -> None:
        """An attempt is recorded, a refused one, too."""
        for step in steps_of(attempt, self._parent):
            await self._worker.publisher.send(self._subject, step.json_bytes())

    async def request_failed(self, attempt: Attempt) -> None:
        """A failure that no retry can fix."""
        await self._report_error("in_progress", "llm_request_failed", attempt)

    async def retries_exhausted(self, attempt: Attempt, why: str) -> None:
        """A failure that a retry might have fixed, if another one were allowed."""
        await self._report_error("in_progress", "llm_retry_exhausted", attempt, detail=why)

    async def retries(self, attempt: Attempt, delay_s: float, *, long: bool) -> None:
        """The same model is tried again."""
        detail = f"trying again in {delay_s:.1f} s"
        state = "waiting" if long else "retried"
        await self._report_error(state, "llm_retry_attempt", attempt, delay_ms=round(delay_s * 1000), detail=detail)

    async def waits(self, delay_s: float) -> None:
        """The job is put back on the bus for the rest of a long wait."""
        await self.report("waiting", detail=f"trying again in {delay_s:.0f} s")

    async def repaired(self, event: Notification, attempt: Attempt, count: int) -> None:
        """The conversation was repaired; `count` messages or tool calls are left out of it."""
        await self.report("retried", event, attempt=attempt.number, model=attempt.model, count=count)

    async def _report_error(self, state: str, event: Notification, attempt: Attempt, **details: object) -> None:
        error = error_details(attempt.error)
        await self.report(state, event, attempt=attempt.number, model=attempt.model, **error, **details)
