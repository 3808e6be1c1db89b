"""`/api/v1/guards`: stopped tasks, and resetting them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from breakwater.identity.operations import REDIS_UNAVAILABLE, ApiRequest, operation
from breakwater.jobs.store.task_keys import TaskKey
from breakwater.kernel.http.parsing import suggestion
from breakwater.kernel.http.problems import RequestError, unknown
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.types import Message, ms_from_time, time_from_ms
from breakwater.limits.contract import GuardEvent, GuardRequest, StoppedTask, StoppedTasks
from breakwater.limits.rules.guard import Task
from breakwater.limits.store.tasks import Tasks, TripRecord

NO_AGENT = "*"
"""The agent of a task that no job has tripped."""


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
        """Lists the stopped tasks."""
        stopped = (
            StoppedTask(
                task_id=tripped.task_id or key.task_key,
                task_key=key.task_key,
                tenant=key.tenant,
                agent=tripped.agent,
                execution_id=tripped.execution_id or None,
                rule=tripped.trip.rule,
                reason=tripped.trip.reason,
                since=time_from_ms(tripped.at_ms),
            )
            for key, tripped in await self.tasks.stopped_tasks()
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
        """Clears the counts of a task and publishes the reset.

        The event is published before the counts are cleared. If the process crashes in between, the operator repeats
        the reset, whose event has the same id. The other way round, the log might lack the reset, and whenever Redis is
        filled from the log, the task would be stopped again.
        """
        key = TaskKey(request.input.tenant, request.input.task_id)
        task, tripped = await self.tasks.load(key)
        if tripped is None and (stopped_task := await self._only_stopped(key)) is not None:
            # A task with this very key goes on, and another caller's of this name is stopped.
            key, tripped = stopped_task
            task, _ = await self.tasks.load(key)
        if (task, tripped) == (Task(), None):
            # The response may have been lost, so for a minute a repeated reset gets the same answer.
            task, tripped = await self.tasks.reset(key)
        if (task, tripped) == (Task(), None):
            raise await self._not_stopped(key)
        while True:
            event = self._event(key, request, task, tripped)
            await self.publisher.event(subjects.guard(event.agent), event, id=event.event_id, at=event.at)
            task, stopped = await self.tasks.reset(key)
            if stopped is None or (tripped is not None and stopped.at_ms == tripped.at_ms):
                request.log("guard_reset", task_id=event.task_id, tenant=key.tenant, agent=event.agent, rule=event.rule)
                return event
            tripped = stopped  # the task has tripped again in between

    def _event(
        self, key: TaskKey, request: ApiRequest[GuardRequest], task: Task, tripped: TripRecord | None
    ) -> GuardEvent:
        at = self.now()
        # The time in the id distinguishes two trips of the same task.
        tripped_at = f"untripped-{ms_from_time(at)}" if tripped is None else tripped.at_ms
        return GuardEvent(
            event_id=f"{key.name}@{tripped_at}#reset/{request.caller.id}",
            kind="reset",
            agent=NO_AGENT if tripped is None else tripped.agent,
            tenant=key.tenant,
            task_id=key.task_key if tripped is None else tripped.task_id or key.task_key,
            task_key=key.task_key,
            execution_id=(tripped.execution_id or None) if tripped is not None else None,
            rule=None if tripped is None else tripped.trip.rule,
            reason=request.reason("reset"),
            by=request.by,
            at=at,
            **task.counts,
        )

    async def _only_stopped(self, key: TaskKey) -> tuple[TaskKey, TripRecord] | None:
        """Returns the stopped task of a tenant that its caller gave this name; None unless there is exactly one."""
        stopped = await self.tasks.stopped_tasks()
        named = [(task, trip) for task, trip in stopped if (task.tenant, trip.task_id) == (key.tenant, key.task_key)]
        return named[0] if len(named) == 1 else None

    async def _not_stopped(self, key: TaskKey) -> RequestError:
        """Returns a 404 that says which stopped tasks may be meant."""
        stopped = await self.tasks.stopped_tasks()
        named = [(task, trip) for task, trip in stopped if key.task_key in (task.task_key, trip.task_id)]
        of_tenant = [task for task, _ in named if task.tenant == key.tenant]
        tenant_words = "" if key.tenant is None else f" of tenant {key.tenant!r}"
        message = f"nothing is known of a task {key.task_key!r}{tenant_words}"
        if of_tenant:
            keys = ", ".join(task.task_key for task in of_tenant)
            return unknown("task", message, "task_id", f"several callers have stopped tasks of that name: {keys}")
        if named:
            owners = ", ".join("no tenant" if task.tenant is None else f"tenant {task.tenant!r}" for task, _ in named)
            return unknown("task", message, "tenant", f"one of that id is stopped, of {owners}")
        names = {trip.task_id or task.task_key for task, trip in stopped if task.tenant == key.tenant}
        hint = suggestion(key.task_key, names).removeprefix("; ") if names else "no task is stopped"
        return unknown("task", message, "task_id", hint)
