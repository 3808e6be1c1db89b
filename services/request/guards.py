"""`/api/v1/guards`: the tasks that are stopped, and resetting them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from breakwater.bus.publisher import Publisher
from breakwater.contracts import subjects
from breakwater.contracts.breakers import GuardRequest, StoppedTask, StoppedTasks
from breakwater.contracts.events import GuardEvent
from breakwater.contracts.types import Message, ms_from_time, time_from_ms
from breakwater.contracts.validation import FieldError
from breakwater.policy.guard import Task
from breakwater.state.tasks import TaskKey, Tasks, Tripped
from services.request.parsing import suggestion
from services.request.problems import Problem
from services.request.routing import ApiRequest

NO_AGENT = "*"
"""Stands for the agent where no job tripped the task."""


class GuardRoutes:
    """The guarded tasks, for people."""

    def __init__(
        self,
        tasks: Tasks,
        publisher: Publisher,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._tasks = tasks
        self._publisher = publisher
        self._now = now

    async def show(self, _: ApiRequest[Message]) -> StoppedTasks:
        """Those that are stopped."""
        return StoppedTasks(stopped=tuple(_stopped(key, one) for key, one in await self._tasks.tripped()))

    async def reset(self, asked: ApiRequest[GuardRequest]) -> GuardEvent:
        """Clears what was counted for a task, and publishes that."""
        key = TaskKey(asked.form.tenant, asked.form.task_id)
        event = await self._reset(key, asked)
        asked.log("guard_reset", task_id=key.task_id, tenant=key.tenant, agent=event.agent, rule=event.rule)
        return event

    async def _reset(self, key: TaskKey, asked: ApiRequest[GuardRequest]) -> GuardEvent:
        """Publishes first, and forgets then: what is only published is asked for again, with the same id.

        The other way round, a task that was reset without an event in the log would be stopped again whenever Redis
        is filled from it.
        """
        task, tripped = await self._tasks.load(key)
        if (task, tripped) == (Task(), None):
            # For a minute a reset is answered again, as its response may have been lost.
            task, tripped = await self._tasks.reset(key)
        if (task, tripped) == (Task(), None):
            raise await self._unknown(key)
        while True:
            event = self._event(key, asked, task, tripped)
            await self._publisher.event(subjects.guard(event.agent), event, id=event.event_id, at=event.at)
            task, stopped = await self._tasks.reset(key)
            if stopped is None or (tripped is not None and stopped.at_ms == tripped.at_ms):
                return event
            tripped = stopped  # it has tripped in between

    def _event(self, key: TaskKey, asked: ApiRequest[GuardRequest], task: Task, tripped: Tripped | None) -> GuardEvent:
        at = self._now()
        # One that trips in the same millisecond has an event of its own.
        life = f"untripped-{ms_from_time(at)}" if tripped is None else tripped.at_ms
        return GuardEvent(
            event_id=f"{key.name}@{life}#reset/{asked.caller.id}",
            kind="reset",
            agent=NO_AGENT if tripped is None else tripped.agent,
            tenant=key.tenant,
            task_id=key.task_id,
            execution_id=(tripped.execution_id or None) if tripped is not None else None,
            rule=None if tripped is None else tripped.trip.rule,
            reason=asked.reason("reset"),
            by=asked.by,
            at=at,
            **task.counts,
        )

    async def _unknown(self, key: TaskKey) -> Problem:
        stopped = [one for one, _ in await self._tasks.tripped()]
        whose = "" if key.tenant is None else f" of tenant {key.tenant!r}"
        message = f"nothing is known of a task {key.task_id!r}{whose}"
        tenants = [one.tenant for one in stopped if one.task_id == key.task_id]
        if tenants:
            owners = ", ".join("no tenant" if tenant is None else f"tenant {tenant!r}" for tenant in tenants)
            detail = FieldError(path="tenant", message=f"one of that id is stopped, of {owners}")
        elif ids := {one.task_id for one in stopped if one.tenant == key.tenant}:
            detail = FieldError(path="task_id", message=suggestion(key.task_id, ids).removeprefix("; "))
        else:
            detail = FieldError(path="task_id", message="no task is stopped")
        return Problem(404, "unknown_task", f"{message}; {detail.message}", [detail])


def _stopped(key: TaskKey, tripped: Tripped) -> StoppedTask:
    return StoppedTask(
        task_id=key.task_id,
        tenant=key.tenant,
        agent=tripped.agent,
        execution_id=tripped.execution_id or None,
        rule=tripped.trip.rule,
        reason=tripped.trip.reason,
        since=time_from_ms(tripped.at_ms),
    )
