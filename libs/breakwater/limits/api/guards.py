"""`/api/v1/guards`: stopped tasks, and resetting them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from breakwater.breakers.contract import GuardRequest, StoppedTask, StoppedTasks
from breakwater.jobs.contract.events import GuardEvent
from breakwater.kernel.http.operations import REDIS_UNAVAILABLE, ApiRequest, operation
from breakwater.kernel.http.parsing import suggestion
from breakwater.kernel.http.problems import RequestError, unknown
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.types import Message, ms_from_time, time_from_ms
from breakwater.limits.rules.guard import Task
from breakwater.limits.store.tasks import TaskKey, Tasks, Tripped

NO_AGENT = "*"
"""In place of the agent if no job tripped the task."""


@dataclass(frozen=True, slots=True)
class GuardRoutes:
    """The guarded tasks, for people."""

    tasks: Tasks
    publisher: Publisher
    now: Callable[[], datetime] = lambda: datetime.now(UTC)

    @operation(
        "GET",
        "/api/v1/guards",
        tag="guards",
        summary="The tasks stopped by their guards",
        description="Jobs of these tasks end `guard_tripped` without calling a model.",
        result="In the order in which they were stopped.",
        errors={503: REDIS_UNAVAILABLE},
    )
    async def list_stopped_tasks(self, _: ApiRequest[Message]) -> StoppedTasks:
        """The stopped tasks."""
        stopped = (
            StoppedTask(
                task_id=key.task_id,
                tenant=key.tenant,
                agent=tripped.agent,
                execution_id=tripped.execution_id or None,
                rule=tripped.trip.rule,
                reason=tripped.trip.reason,
                since=time_from_ms(tripped.at_ms),
            )
            for key, tripped in await self.tasks.tripped()
        )
        return StoppedTasks(stopped=tuple(stopped))

    @operation(
        "POST",
        "/api/v1/guards/reset",
        tag="guards",
        summary="Let a stopped task continue",
        description="Clears all counts of the task. A task that is not stopped can be reset, too; its event has the "
        "agent `*`.",
        result="Done and published.",
        errors={
            404: "Nothing is known of the task (`unknown_task`).",
            503: "Redis or NATS is unavailable (`unavailable`). The task may still be stopped: ask again; nothing "
            "is published twice.",
        },
    )
    async def reset_task(self, request: ApiRequest[GuardRequest]) -> GuardEvent:
        """Clears the counts of a task, and publishes that.

        Publishes first, and forgets then: a reset that is only published is asked for again, with the same id. The
        other way round, a task that was reset without an event in the log would be stopped again whenever Redis is
        filled from it.
        """
        key = TaskKey(request.input.tenant, request.input.task_id)
        task, tripped = await self.tasks.load(key)
        if (task, tripped) == (Task(), None):
            # A repeated reset is answered for a minute, as its response may have been lost.
            task, tripped = await self.tasks.reset(key)
        if (task, tripped) == (Task(), None):
            raise await self._unknown(key)
        while True:
            event = self._event(key, request, task, tripped)
            await self.publisher.event(subjects.guard(event.agent), event, id=event.event_id, at=event.at)
            task, stopped = await self.tasks.reset(key)
            if stopped is None or (tripped is not None and stopped.at_ms == tripped.at_ms):
                request.log("guard_reset", task_id=key.task_id, tenant=key.tenant, agent=event.agent, rule=event.rule)
                return event
            tripped = stopped  # it has tripped in between

    def _event(
        self, key: TaskKey, request: ApiRequest[GuardRequest], task: Task, tripped: Tripped | None
    ) -> GuardEvent:
        at = self.now()
        # One that trips in the same millisecond has an event of its own.
        life = f"untripped-{ms_from_time(at)}" if tripped is None else tripped.at_ms
        return GuardEvent(
            event_id=f"{key.name}@{life}#reset/{request.caller.id}",
            kind="reset",
            agent=NO_AGENT if tripped is None else tripped.agent,
            tenant=key.tenant,
            task_id=key.task_id,
            execution_id=(tripped.execution_id or None) if tripped is not None else None,
            rule=None if tripped is None else tripped.trip.rule,
            reason=request.reason("reset"),
            by=request.by,
            at=at,
            **task.counts,
        )

    async def _unknown(self, key: TaskKey) -> RequestError:
        stopped = [one for one, _ in await self.tasks.tripped()]
        whose = "" if key.tenant is None else f" of tenant {key.tenant!r}"
        message = f"nothing is known of a task {key.task_id!r}{whose}"
        tenants = [one.tenant for one in stopped if one.task_id == key.task_id]
        if tenants:
            owners = ", ".join("no tenant" if tenant is None else f"tenant {tenant!r}" for tenant in tenants)
            return unknown("task", message, "tenant", f"one of that id is stopped, of {owners}")
        ids = {one.task_id for one in stopped if one.tenant == key.tenant}
        hint = suggestion(key.task_id, ids).removeprefix("; ") if ids else "no task is stopped"
        return unknown("task", message, "task_id", hint)
