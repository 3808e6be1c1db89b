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

    async def failed(
        self, event: Notification, attempt: Attempt, state: str = "in_progress", **details: object
    ) -> None:
        """Reports a failed attempt and its consequence; `details` are fields of `Progress`."""
        error = error_details(attempt.error)
        await self.report(state, event, attempt=attempt.number, model=attempt.model, **error, **details)

    async def attempt_ended(self, attempt: Attempt) -> None:
        """Reports a recorded attempt, a refused one, too."""
        for step in steps_of(attempt, self._parent):
            await self._worker.publisher.send(self._subject, step.json_bytes())
