"""The guard of a job's task: it judges before each call, and counts the job when it ends.

A job that names a parent and no task belongs to its parent's task. A job that names neither is its own task, with its
id. Until it has children, its attempts are the whole task, and Redis has no entry for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import structlog

from breakwater.calls.assignment import Assignment, Checkpoint
from breakwater.calls.gate import POLL_S, Gate, GateVerdict, Refused, WaitForCapacity
from breakwater.config import Agent
from breakwater.jobs.contract.execution import FailureStatistics, Result
from breakwater.jobs.contract.job import Job
from breakwater.jobs.rules.ownership import scope_in, scoped
from breakwater.jobs.store.executions import ClaimLostError
from breakwater.jobs.store.records import decided
from breakwater.jobs.store.task_keys import TaskKey
from breakwater.kernel.nats import subjects
from breakwater.kernel.process import background
from breakwater.kernel.process.outage import Outage
from breakwater.kernel.redis.connection import ScriptCall, StateUnavailableError
from breakwater.kernel.security.encryption import DecryptionError
from breakwater.kernel.types import time_from_ms
from breakwater.limits.contract import GuardEvent
from breakwater.limits.rules.budget import spent_by
from breakwater.limits.rules.failure_statistics import task_statistics
from breakwater.limits.rules.guard import Task, TaskBudgetHeld, Trip, after_job, before_call, near_cap, outcome_of
from breakwater.limits.rules.refusals import task_budget_held, task_stopped
from breakwater.limits.settings import GuardRules
from breakwater.limits.store.tasks import Entered, Tripped
from services.worker.context import WorkerContext

_ALONE = Entered(1, Task(), None)

BOUND_EVERY_S = 1.0
FIRST_JOBS = 2
"""The numbers of jobs that mark the start of a task: the first may be the parent of a job that names no task."""


@dataclass(frozen=True, slots=True)
class _Stopped:
    """A task that makes no more calls: it must be stopped now, or was stopped before."""

    why: Trip | Tripped
    task: Task


@dataclass(slots=True)
class TaskGate(Gate):
    """Counts the job as an iteration of its task, and holds the job's worst-case cost after the call."""

    _stopped: _Stopped | None = None
    _near: tuple[str, Trip, Task] | None = None
    """The life of a task that is near a cap, the cap, and the task."""

    @classmethod
    def applies(cls, worker: WorkerContext, agent: Agent) -> bool:
        """Returns False if the agent has no guard."""
        del worker
        return agent.guard is not None

    @classmethod
    def watch(cls, worker: WorkerContext) -> Coroutine[Any, Any, None]:
        """Bounds the tasks that a caller has in Redis."""
        return _bound_tasks(worker)

    def ask(self) -> ScriptCall | Refused | None:
        """Judges locally if the job is alone in its task. Returns None if it may call, or its agent has no guard."""
        request = self.request
        if request.job.agent.guard is None:
            return None
        if (shared := shared_task(self.worker, request.job)) is None:
            alone = self._judged(_ALONE)
            if not isinstance(alone, Refused):
                return None
            # Another model may cost less: only the last one's refusal stops the task, which is this job.
            why = None if self._stopped is None else self._stopped.why
            is_last = request.checkpoint.is_last_of(request.job.chain)
            tries_next = isinstance(why, Trip) and why.rule == "max_cost" and not is_last
            self.announces = not tries_next
            return replace(alone, ends_chain=not tries_next)
        rules, key = shared
        hold = spent_by(request.checkpoint.attempts) + (request.flight.reserved or 0)
        return self.worker.tasks.enter_call(
            key,
            request.job.execution_id,
            hold=hold,
            cap=rules.max_cost_usd,
            dry_run=request.lease_ms is None,
            is_step=request.job.job.api != "embeddings",
        )

    def read(self, answer: Any) -> Refused | WaitForCapacity | None:
        """Refuses if the task is stopped or must be. Waits if its other jobs hold the rest of its cost cap."""
        request = self.request
        entered = self.worker.tasks.entered(answer)
        shared = shared_task(self.worker, request.job)
        if shared is not None and 0 < entered.number <= FIRST_JOBS and request.lease_ms is not None:
            self.worker.tasks.begun(shared[1].redis_key, request.job.caller)
        return self._judged(entered)

    def _judged(self, entered: Entered) -> Refused | WaitForCapacity | None:
        rules = self.request.job.agent.guard
        attempts = self.request.checkpoint.attempts
        assert rules is not None
        if entered.tripped is not None:
            return self._stop(entered.tripped, entered.task)
        tokens = sum((attempt.input_tokens or 0) + (attempt.output_tokens or 0) for attempt in attempts)
        cost = spent_by(attempts)
        trip = before_call(
            entered.task,
            entered.number,
            rules,
            tokens=tokens,
            cost=cost,
            worst_case=self.request.flight.reserved,
            reserved=entered.other_holds,
        )
        match trip:
            case None:
                if entered.unwarned is not None and self.request.lease_ms is not None:
                    near = near_cap(entered.task, entered.number, rules, tokens=tokens, cost=cost)
                    if near is not None:
                        self._near = entered.unwarned, near, entered.task
                        self.announces = True
                return None
            case TaskBudgetHeld(held_by_others):
                error = task_budget_held(
                    self.request.job.agent_name,
                    used=entered.task.cost + cost + held_by_others,
                    worst_case=self.request.flight.reserved or 0,
                    cap=rules.max_cost_usd,
                )
                refused = Refused("budget_exceeded", error, refused_by="task")
                return WaitForCapacity(POLL_S * (1 + self.worker.jitter()), refused)
            case Trip():
                # Includes the usage of this job, which is no iteration if its first call is refused.
                iterations = entered.task.iterations if attempts else entered.number - 1
                used = replace(
                    entered.task,
                    iterations=iterations,
                    tokens=entered.task.tokens + tokens,
                    cost=entered.task.cost + cost,
                )
                return self._stop(trip, used)

    def _stop(self, why: Trip | Tripped, task: Task) -> Refused:
        self._stopped = _Stopped(why, task)
        self.announces = True
        job = self.request.job
        trip, agent, by = (
            (why, job.agent_name, job.execution_id)
            if isinstance(why, Trip)
            else (why.trip, why.agent, why.execution_id)
        )
        tenant = job.job.tenant
        task_id = job.job.task_id or job.execution_id
        error = task_stopped(trip.rule, trip.reason, agent=agent, task_id=task_id, tenant=tenant, execution_id=by)
        return Refused("guard_tripped", error, ends_chain=True, statistics=task_statistics(task, trip))

    def release(self) -> ScriptCall | None:
        """Reduces the hold to the cost of the job."""
        return release_hold(self.worker, self.request.job, self.request.checkpoint)

    async def announce(self, verdict: GateVerdict | None) -> None:
        """Stops the task and publishes that, unless both are done, or the claim on the job is lost.

        Publishes that the task is near a cap, once.
        """
        if isinstance(verdict, ClaimLostError):
            return
        if self._near is not None:
            await _warn(self.worker, self.request.job, *self._near)
        if self._stopped is None:
            return
        job = self.request.job
        shared = shared_task(self.worker, job)
        key = TaskKey(job.job.tenant, job.execution_id) if shared is None else shared[1]
        if isinstance(self._stopped.why, Trip):
            by = job.agent_name, job.execution_id
            await _trip(self.worker, key, self._stopped.why, self._stopped.task, *by)
        else:
            await _publish(self.worker, key, self._stopped.why, self._stopped.task)


def shared_task(worker: WorkerContext, job: Assignment) -> tuple[GuardRules, TaskKey] | None:
    """Returns the guard and the task of a job; None if the job is alone in it, or its agent has no guard."""
    task_id = job.job.task_id
    if task_id is None:
        live_claim = worker.leases.claims.get(job.claim)
        task_id = job.execution_id if live_claim is not None and live_claim.has_children else None
    if job.agent.guard is None or task_id is None:
        return None
    return job.agent.guard, TaskKey(job.job.tenant, task_id)


async def task_of_parent(
    worker: WorkerContext, job: Job, parent_id: str, owner: str | None = None
) -> tuple[str, str | None]:
    """Returns the task of a job that names a parent and no task, and the parent's run if it is known.

    A parent without a task is the first job of the task with its id, and is counted there once. An unknown parent, or
    one of another tenant, only gives the task its name. The id of another owner's parent is scoped to the child's
    owner, so that the child joins no task of that owner.

    `owner` owns the child. A dry run changes nothing.
    """
    others = "" if owner is None else scoped(parent_id, scope_in(owner, None))
    until_available = worker.outages.retry_while_unavailable
    task_id, checkpoint, run_id = await until_available(
        partial(worker.executions.parent, parent_id, job.tenant, dry_run=job.dry_run, owner=owner, others=others)
    )
    if task_id:
        return task_id, run_id or None
    # A parent that seems to run may be decided already: its claim is released after its answer.
    ended = await until_available(partial(_result_of, worker, parent_id, job.tenant))
    if ended is not None and owner is not None and ended.owner != owner:
        return others, None
    if ended is not None and ended.task_id is not None:
        return ended.task_id, ended.run_id
    key = TaskKey(job.tenant, parent_id)
    if ended is not None and not job.dry_run:
        agent = worker.config.agents.get(ended.agent)
        await until_available(partial(count_ended, worker, key, ended, agent, if_alone=True))
    elif checkpoint and not job.dry_run:
        at = Checkpoint.model_validate_json(checkpoint)
        hold = spent_by(at.attempts) + (0 if at.in_flight is None else at.in_flight.reserved or 0)
        enter = worker.tasks.enter_call(key, parent_id, hold=hold, only_first=True)
        await until_available(lambda: worker.redis.run([enter]))
    return parent_id, run_id or (ended and ended.run_id)


def release_hold(worker: WorkerContext, job: Assignment, at: Checkpoint) -> ScriptCall | None:
    """Reduces the job's hold on the task's cap to its cost, as the job makes no call now."""
    shared = shared_task(worker, job)
    if shared is None:
        return None
    return worker.tasks.shrink_call(shared[1], job.execution_id, spent=spent_by(at.attempts))


async def count_job(worker: WorkerContext, job: Assignment, result: Result) -> Result:
    """Counts a job in its task before it is decided, and stops the task if a rule says so.

    Returns the result, with the statistics of the task if the job stopped it.

    Raises:
        StateUnavailableError: count again.
    """
    shared = shared_task(worker, job)
    if shared is None:
        return result
    rules, key = shared
    task, statistics = await _count(worker, key, result, rules)
    if task.iterations <= FIRST_JOBS:  # it may have made no call, as its answer was cached
        worker.tasks.begun(key.redis_key, job.caller)
    return result if statistics is None else result.model_copy(update={"statistics": statistics})


async def count_ended(
    worker: WorkerContext, key: TaskKey, result: Result, agent: Agent | None, *, if_alone: bool = False
) -> None:
    """Counts a decided job once, and stops its task if a rule says so. Raises StateUnavailableError.

    `agent` is None if the config no longer has it. With `if_alone`, the job may have been counted long ago, and later
    jobs do not affect its verdict.
    """
    if agent is not None and agent.guard is not None and not result.dry_run:
        await _count(worker, key, result, agent.guard, if_alone=if_alone)


async def _count(
    worker: WorkerContext, key: TaskKey, result: Result, rules: GuardRules, *, if_alone: bool = False
) -> tuple[Task, FailureStatistics | None]:
    outcome = outcome_of(result, rules)
    task = await worker.tasks.record(key, result.execution_id, outcome)
    judged = task.iterations == 1 if if_alone else outcome.failed is not None
    trip = after_job(task, rules) if judged else None
    if trip is None:
        return task, None
    await _trip(worker, key, trip, task, result.agent, result.execution_id)
    return task, task_statistics(task, trip)


async def _bound_tasks(worker: WorkerContext) -> None:
    outage = Outage("bounds of tasks")
    while True:
        await asyncio.sleep(background.aligned_delay(BOUND_EVERY_S))
        try:
            await worker.tasks.bound()
        except StateUnavailableError as error:
            outage.failed(error)
        else:
            outage.worked()


async def _result_of(worker: WorkerContext, execution_id: str, tenant: str | None) -> Result | None:
    """Returns the stored result of a tenant's job; None if its texts can no longer be decrypted."""
    try:
        result = await decided(worker.lookup, execution_id, None)
    except DecryptionError:
        return None
    return result if result is not None and result.tenant == tenant else None


async def _trip(worker: WorkerContext, key: TaskKey, trip: Trip, task: Task, agent: str, execution_id: str) -> None:
    tripped = await worker.tasks.trip(key, trip, agent=agent, execution_id=execution_id)
    await _publish(worker, key, tripped, task)


async def _warn(worker: WorkerContext, job: Assignment, life: str, near: Trip, task: Task) -> None:
    # The key that `shared_task` returned before: once the claim is lost, it no longer knows of the children.
    key = TaskKey(job.job.tenant, job.job.task_id or job.execution_id)
    event = GuardEvent(
        # Of two jobs that are near it at the same moment, both announce it, under one id.
        event_id=f"{key.name}@{life}#soft_cap",
        kind="soft_cap",
        agent=job.agent_name,
        tenant=key.tenant,
        task_id=key.task_id,
        execution_id=job.execution_id,
        rule=near.rule,
        reason=near.reason,
        at=worker.now(),
        **task.counts,
    )
    await _send(worker, event)
    await worker.tasks.mark_warned(key, life)


async def _send(worker: WorkerContext, event: GuardEvent) -> None:
    await worker.outages.retry_while_unavailable(
        lambda: worker.publisher.event(subjects.guard(event.agent), event, id=event.event_id, at=event.at)
    )


async def _publish(worker: WorkerContext, key: TaskKey, tripped: Tripped, task: Task) -> None:
    """Publishes a trip that is not published yet: the worker that tripped the task may have died before that."""
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
    await _send(worker, event)
    structlog.get_logger().warning(
        "task_stopped", agent=tripped.agent, task_id=event.task_id, tenant=event.tenant, reason=event.reason
    )
    await worker.tasks.mark_published(key)
