"""The guard of the task that a job belongs to: asked before each call, told how the job ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import structlog
from pydantic import JsonValue

from breakwater.config import Agent
from breakwater.contracts import subjects
from breakwater.contracts.events import GuardEvent
from breakwater.contracts.execution import Attempt, Result
from breakwater.contracts.job import Job
from breakwater.contracts.types import time_from_ms
from breakwater.policy.caps import spent_by
from breakwater.policy.guard import GuardRules, Task, TaskBudgetHeld, Trip, after_job, before_call, outcome_of
from breakwater.state.connection import ScriptCall
from breakwater.state.tasks import TaskKey, Tripped
from services.worker.plane import Plane


@dataclass(frozen=True, slots=True)
class Stopped:
    """A task that makes no more calls: as it is to be stopped now, or was before."""

    why: Trip | Tripped
    task: Task


class TaskGuard:
    """Guards the task of one job."""

    def __init__(self, plane: Plane, rules: GuardRules, key: TaskKey, *, agent: str, execution_id: str) -> None:
        self._plane = plane
        self._rules = rules
        self._key = key
        self._agent = agent
        self._execution_id = execution_id

    def ask(self, attempts: Sequence[Attempt], worst_case: int | None) -> ScriptCall:
        """What to ask Redis in the round trip of an admission; read its answer with `judge`.

        Args:
            attempts: of the job so far.
            worst_case: the most that the call can cost; None where its model has no price.
        """
        hold, cap = spent_by(attempts) + (worst_case or 0), self._rules.max_cost_usd
        return self._plane.tasks.enter_call(self._key, self._execution_id, hold=hold, cap=cap)

    def let_go(self, attempts: Sequence[Attempt]) -> ScriptCall:
        """Holds no more than what these attempts have cost: the job is at no call, and may not be for long."""
        return self._plane.tasks.shrink_call(self._key, self._execution_id, spent=spent_by(attempts))

    def judge(
        self, answer: Sequence[Any], attempts: Sequence[Attempt], worst_case: int | None
    ) -> Stopped | TaskBudgetHeld | None:
        """Why no call may be made, as asked; None where one may. What is stopped is to be told with `stop`."""
        entered = self._plane.tasks.entered(answer)
        if entered.tripped is not None:
            return Stopped(entered.tripped, entered.task)
        tokens = sum((attempt.input_tokens or 0) + (attempt.output_tokens or 0) for attempt in attempts)
        cost = spent_by(attempts)
        trip = before_call(
            entered.task,
            entered.number,
            self._rules,
            tokens=tokens,
            cost=cost,
            worst_case=worst_case,
            held=entered.held,
        )
        if isinstance(trip, TaskBudgetHeld):
            return trip
        if trip is None:
            return None
        # With what this job has used; but one that was refused its first call is no iteration.
        done = entered.task.iterations if attempts else entered.number - 1
        task = replace(
            entered.task, iterations=done, tokens=entered.task.tokens + tokens, cost=entered.task.cost + cost
        )
        return Stopped(trip, task)

    async def stop(self, stopped: Stopped) -> None:
        """Stops the task, and tells people, unless both is done.

        Raises:
            StateUnavailable: stop it again.
        """
        if isinstance(stopped.why, Trip):
            await self._trip(stopped.why, stopped.task)
        else:
            await self._tell(stopped.why, stopped.task)

    async def record(self, result: Result, answer: JsonValue) -> None:
        """Counts a job that is about to be decided, and stops its task if that is due.

        Args:
            result: as it will be published.
            answer: the output that was checked; its confidence counts.

        Raises:
            StateUnavailable: record again.
        """
        outcome = outcome_of(result, answer, self._rules)
        task = await self._plane.tasks.record(self._key, self._execution_id, outcome)
        trip = after_job(task, self._rules) if outcome.failed is not None else None
        if trip is not None:
            await self._trip(trip, task)

    async def _trip(self, trip: Trip, task: Task) -> None:
        standing = await self._plane.tasks.trip(self._key, trip, agent=self._agent, execution_id=self._execution_id)
        await self._tell(standing, task)

    async def _tell(self, tripped: Tripped, task: Task) -> None:
        """Publishes a trip, unless that is done. Whoever tripped it may have died before it could."""
        if tripped.published:
            return
        at = time_from_ms(tripped.at_ms)
        event = GuardEvent(
            event_id=f"{self._key.name}@{tripped.at_ms}",
            kind="tripped",
            agent=tripped.agent,
            tenant=self._key.tenant,
            task_id=self._key.task_id,
            execution_id=tripped.execution_id or None,
            rule=tripped.trip.rule,
            reason=tripped.trip.reason,
            iterations=task.iterations,
            tokens=task.tokens,
            cost=task.cost,
            consecutive_failures=task.consecutive_failures,
            total_failures=task.total_failures,
            unique_errors=len(task.errors),
            at=at,
        )
        subject = subjects.guard(tripped.agent)
        await self._plane.outages.retry_while_unavailable(
            lambda: self._plane.publisher.event(subject, event, id=event.event_id, at=at)
        )
        structlog.get_logger().warning(
            "task_stopped", agent=tripped.agent, task_id=event.task_id, tenant=event.tenant, reason=event.reason
        )
        await self._plane.tasks.mark_published(self._key)


def guard_of(plane: Plane, agent_name: str, agent: Agent, job: Job, execution_id: str) -> TaskGuard | None:
    """The guard of a job's task; None where it belongs to none, or its agent has no guard."""
    if agent.guard is None or job.task_id is None:
        return None
    key = TaskKey(job.tenant, job.task_id)
    return TaskGuard(plane, agent.guard, key, agent=agent_name, execution_id=execution_id)
