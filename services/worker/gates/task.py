"""The guard of the task that a job belongs to: judges before each call, and counts the job when it ends."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import structlog
from pydantic import JsonValue

from breakwater.config import Agent
from breakwater.contracts import subjects
from breakwater.contracts.events import GuardEvent
from breakwater.contracts.execution import ErrorInfo, Result
from breakwater.contracts.types import time_from_ms
from breakwater.policy.budget import spent_by
from breakwater.policy.guard import GuardRules, Task, TaskBudgetHeld, Trip, after_job, before_call, outcome_of
from breakwater.state.connection import ScriptCall
from breakwater.state.executions import ClaimLost
from breakwater.state.tasks import TaskKey, Tripped
from services.worker.assignment import Assignment
from services.worker.checkpoint import Checkpoint
from services.worker.context import WorkerContext
from services.worker.gates.gate import POLL_S, Gate, Refused, Verdict, WaitForCapacity

TASK_STOPPED = Refused(
    "guard_tripped",
    # Read by models and end users, so it names no limit: they stand in the guard's event.
    ErrorInfo(
        kind="guard_tripped", class_="GuardTrippedError", message="the task is stopped until an operator resets it"
    ),
    ends_chain=True,
)

TASK_BUDGET_HELD = Refused(
    "budget_exceeded",
    ErrorInfo(
        kind="budget_exceeded",
        class_="BudgetExceededError",
        message="other jobs of the task have reserved what is left of its cost cap; no call was made",
        user_message="This task has no budget left while its other jobs are running. Please try again later.",
    ),
    "task",
)


@dataclass(frozen=True, slots=True)
class _Stopped:
    """A task that makes no more calls: as it is to be stopped now, or was before."""

    why: Trip | Tripped
    task: Task


@dataclass(slots=True)
class TaskGate(Gate):
    """Counts the job as an iteration of its task, and holds what the job may have cost after the call."""

    _stopped: _Stopped | None = None

    @classmethod
    def applies(cls, worker: WorkerContext, agent: Agent, *, in_task: bool) -> bool:
        """Not where the job belongs to no task, or the agent has no guard."""
        del worker
        return in_task and agent.guard is not None

    def ask(self) -> ScriptCall | None:
        """None where the job belongs to no task, or its agent has no guard."""
        guarded, request = guarded_task(self.request.job), self.request
        if guarded is None:
            return None
        rules, key = guarded
        hold = spent_by(request.checkpoint.attempts) + (request.flight.reserved or 0)
        return self.worker.tasks.enter_call(
            key, request.job.execution_id, hold=hold, cap=rules.max_cost_usd, look_only=request.lease_ms is None
        )

    def read(self, answer: Any) -> Refused | WaitForCapacity | None:
        """Refused where the task is stopped or must be; waits where its other jobs hold what is left of its cap."""
        rules = self.request.job.agent.guard
        assert rules is not None
        entered, attempts = self.worker.tasks.entered(answer), self.request.checkpoint.attempts
        if entered.tripped is not None:
            self._stopped, self.announces = _Stopped(entered.tripped, entered.task), True
            return TASK_STOPPED
        tokens = sum((attempt.input_tokens or 0) + (attempt.output_tokens or 0) for attempt in attempts)
        cost = spent_by(attempts)
        trip = before_call(
            entered.task,
            entered.number,
            rules,
            tokens=tokens,
            cost=cost,
            worst_case=self.request.flight.reserved,
            held=entered.held,
        )
        match trip:
            case None:
                return None
            case TaskBudgetHeld():
                return WaitForCapacity(POLL_S * (1 + self.worker.jitter()), TASK_BUDGET_HELD)
            case Trip():
                # With what this job has used; but one that was refused its first call is no iteration.
                done = entered.task.iterations if attempts else entered.number - 1
                used = replace(
                    entered.task, iterations=done, tokens=entered.task.tokens + tokens, cost=entered.task.cost + cost
                )
                self._stopped, self.announces = _Stopped(trip, used), True
                return TASK_STOPPED

    def give_back(self) -> ScriptCall | None:
        """Holds no more than what the job has cost."""
        return release_hold(self.worker, self.request.job, self.request.checkpoint)

    async def announce(self, verdict: Verdict | None) -> None:
        """Stops the task and publishes that, unless both are done, or the claim on the job is lost."""
        job, guarded = self.request.job, guarded_task(self.request.job)
        if self._stopped is None or guarded is None or isinstance(verdict, ClaimLost):
            return
        _, key = guarded
        if isinstance(self._stopped.why, Trip):
            await _trip(self.worker, job, key, self._stopped.why, self._stopped.task)
        else:
            await _publish(self.worker, key, self._stopped.why, self._stopped.task)


def guarded_task(job: Assignment) -> tuple[GuardRules, TaskKey] | None:
    """The task of a job and what it may do; None where the job belongs to none, or its agent has no guard."""
    if job.agent.guard is None or job.job.task_id is None:
        return None
    return job.agent.guard, TaskKey(job.job.tenant, job.job.task_id)


def release_hold(worker: WorkerContext, job: Assignment, at: Checkpoint) -> ScriptCall | None:
    """Reduces the job's hold on the task's cap to what it has cost: it makes no call now, and may not for long."""
    guarded = guarded_task(job)
    if guarded is None:
        return None
    return worker.tasks.shrink_call(guarded[1], job.execution_id, spent=spent_by(at.attempts))


async def count_job(worker: WorkerContext, job: Assignment, result: Result, answer: JsonValue) -> None:
    """Counts a job that is about to be decided for its task, and stops the task if that is due.

    Args:
        worker: this one.
        job: the job.
        result: as it will be published.
        answer: the output that was checked; its confidence counts.

    Raises:
        StateUnavailable: count again.
    """
    guarded = guarded_task(job)
    if guarded is None:
        return
    rules, key = guarded
    outcome = outcome_of(result, answer, rules)
    task = await worker.tasks.record(key, job.execution_id, outcome)
    trip = after_job(task, rules) if outcome.failed is not None else None
    if trip is not None:
        await _trip(worker, job, key, trip, task)


async def _trip(worker: WorkerContext, job: Assignment, key: TaskKey, trip: Trip, task: Task) -> None:
    tripped = await worker.tasks.trip(key, trip, agent=job.agent_name, execution_id=job.execution_id)
    await _publish(worker, key, tripped, task)


async def _publish(worker: WorkerContext, key: TaskKey, tripped: Tripped, task: Task) -> None:
    """Publishes a trip, unless that is done. Whoever tripped the task may have died before it could."""
    if tripped.published:
        return
    at = time_from_ms(tripped.at_ms)
    event = GuardEvent(
        event_id=f"{key.name}@{tripped.at_ms}",
        kind="tripped",
        agent=tripped.agent,
        tenant=key.tenant,
        task_id=key.task_id,
        execution_id=tripped.execution_id or None,
        rule=tripped.trip.rule,
        reason=tripped.trip.reason,
        at=at,
        **task.counts,
    )
    await worker.outages.retry_while_unavailable(
        lambda: worker.publisher.event(subjects.guard(tripped.agent), event, id=event.event_id, at=at)
    )
    structlog.get_logger().warning(
        "task_stopped", agent=tripped.agent, task_id=event.task_id, tenant=event.tenant, reason=event.reason
    )
    await worker.tasks.mark_published(key)
