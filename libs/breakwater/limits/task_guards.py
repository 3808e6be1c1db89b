"""The tasks of a worker's jobs beyond the gate: a job's task is found, ended jobs are counted, stops are published.

A job that names a parent and no task belongs to its parent's task. A job that names neither is its own task, with its
id. Until it has children, its attempts are the whole task, and Redis has no entry for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import structlog

from breakwater.calls.assignment import Assignment, Checkpoint
from breakwater.jobs.contract.execution import FailureStatistics, Result
from breakwater.jobs.contract.job import Job
from breakwater.jobs.rules.record import spent_by
from breakwater.jobs.store.executions import Executions
from breakwater.jobs.store.records import stored_result
from breakwater.jobs.store.task_keys import TaskKey
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.process import background
from breakwater.kernel.process.outage import Outage, Outages
from breakwater.kernel.redis.connection import Redis, ScriptCommand, StateUnavailableError
from breakwater.kernel.security.encryption import DecryptionError
from breakwater.kernel.types import time_from_ms
from breakwater.limits.contract import GuardEvent
from breakwater.limits.rules.guard import Task, Trip, after_job, outcome_of, task_statistics
from breakwater.limits.settings import GuardRules
from breakwater.limits.store.tasks import Tasks, TripRecord

BOUND_EVERY_S = 1.0

FIRST_JOBS = 2
"""The numbers of jobs that mark the start of a task: the first may be the parent of a job that names no task."""


def shared_task(job: Assignment) -> tuple[GuardRules, TaskKey] | None:
    """Returns the guard and the task of a job; None if the job is alone in it, or its agent has no guard."""
    task_key = job.ids.task_key
    if task_key is None:
        task_key = job.execution_id if job.lease.has_children else None
    if job.agent.guard is None or task_key is None:
        return None
    return job.agent.guard, TaskKey(job.job.tenant, task_key)


class ParentsTask(NamedTuple):
    """The task of a job that names a parent and no task."""

    key: str
    name: str | None = None
    """The task as its caller named it; None if it is called as the parent is."""
    run_id: str | None = None
    """The run of the parent, if it is known."""


class TaskGuards:
    """The guards of the tasks of one worker's jobs."""

    def __init__(
        self, redis: Redis, executions: Executions, publisher: Publisher, lookup: Lookup, outages: Outages
    ) -> None:
        self.tasks = Tasks(redis)
        self._redis = redis
        self._executions = executions
        self._publisher = publisher
        self._lookup = lookup
        self._outages = outages

    async def task_of_parent(
        self, job: Job, parent: str, owner: str | None, rules_of: Callable[[str], GuardRules | None], *, others: str
    ) -> ParentsTask:
        """Returns the task of a job that names a parent and no task.

        A parent without a task is the first job of the task with its id, and is counted there once. An unknown parent,
        or one of another tenant, only gives the task its name. A dry run changes nothing.

        Args:
            job: the child.
            parent: the execution that it names as its parent.
            owner: the owner of the child.
            rules_of: returns the guard of an agent, by its name.
            others: the task if the parent is another owner's, so that the child joins no task of that owner.
        """
        until_available = self._outages.retry_while_unavailable
        task_key, checkpoint, run_id, task_id = await until_available(
            partial(self._executions.parent, parent, job.tenant, dry_run=job.dry_run, owner=owner, others=others)
        )
        if task_key:
            named_as_parent = task_key in (parent, others)
            return ParentsTask(task_key, None if named_as_parent else task_id or task_key, run_id or None)
        # A parent that seems to run may be decided already: its claim is released after its answer.
        ended = await until_available(partial(self._result_of, parent, job.tenant))
        if ended is not None and owner is not None and ended.owner != owner:
            return ParentsTask(others)
        if ended is not None and ended.task_key is not None:
            return ParentsTask(ended.task_key, ended.task_id, ended.run_id)
        key = TaskKey(job.tenant, parent)
        if ended is not None and not job.dry_run:
            await until_available(partial(self.count_ended, key, ended, rules_of(ended.agent), if_alone=True))
        elif checkpoint and not job.dry_run:
            at = Checkpoint.model_validate_json(checkpoint)
            hold = spent_by(at.attempts) + (0 if at.in_flight is None else at.in_flight.reserved or 0)
            enter = self.tasks.enter_command(key, parent, hold=hold, only_first=True)
            await until_available(lambda: self._redis.run([enter]))
        return ParentsTask(parent, run_id=run_id or (ended and ended.run_id))

    def release_hold(self, job: Assignment, at: Checkpoint) -> ScriptCommand | None:
        """Reduces the job's hold on the task's limit to its cost, as the job makes no call now."""
        shared = shared_task(job)
        if shared is None:
            return None
        return self.tasks.shrink_command(shared[1], job.execution_id, spent=spent_by(at.attempts))

    async def count_job(self, job: Assignment, result: Result) -> Result:
        """Counts a job in its task before it is decided, and stops the task if a rule says so.

        Returns the result, with the time of that, and with the statistics of the task if the job stopped it.

        Raises:
            StateUnavailableError: count again.
        """
        shared = shared_task(job)
        if shared is None:
            return result
        rules, key = shared
        task, statistics = await self._count(key, result, rules)
        counted: dict[str, object] = {} if statistics is None else {"statistics": statistics}
        if task.read_ms:  # else it was counted before
            counted["task_counted_at"] = time_from_ms(task.read_ms)
        if task.iterations <= FIRST_JOBS:  # it may have made no call, as its answer was cached
            self.tasks.note_begun(key.redis_key, job.caller)
        return result.model_copy(update=counted)

    async def count_ended(
        self, key: TaskKey, result: Result, rules: GuardRules | None, *, if_alone: bool = False
    ) -> None:
        """Counts a decided job once, and stops its task if a rule says so. Raises StateUnavailableError.

        `rules` is None if the job's agent has no guard, or the config no longer has the agent. With `if_alone`, the job
        may have been counted long ago, and later jobs do not affect its verdict.
        """
        if rules is not None and not result.dry_run:
            await self._count(key, result, rules, if_alone=if_alone)

    async def _count(
        self, key: TaskKey, result: Result, rules: GuardRules, *, if_alone: bool = False
    ) -> tuple[Task, FailureStatistics | None]:
        outcome = outcome_of(result, rules)
        task = await self.tasks.record(key, result.execution_id, outcome)
        judged = task.iterations == 1 if if_alone else outcome.failed is not None
        trip = after_job(task, rules) if judged else None
        if trip is None:
            return task, None
        task_id = result.task_id or result.job_id
        await self.trip(key, trip, task, result.agent, result.execution_id, task_id=task_id)
        return task, task_statistics(task, trip)

    async def _result_of(self, execution_id: str, tenant: str | None) -> Result | None:
        """Returns the stored result of a tenant's job; None if its texts can no longer be decrypted."""
        try:
            result = await stored_result(self._lookup, execution_id, None)
        except DecryptionError:
            return None
        return result if result is not None and result.tenant == tenant else None

    async def trip(self, key: TaskKey, trip: Trip, task: Task, agent: str, execution_id: str, *, task_id: str) -> None:
        """Stops a task for an agent's job, and publishes that. Raises StateUnavailableError."""
        tripped = await self.tasks.trip(key, trip, agent=agent, execution_id=execution_id, task_id=task_id)
        await self.publish(key, tripped, task)

    async def warn(self, job: Assignment, life: str, near: Trip, task: Task) -> None:
        """Publishes that a job's task is near a limit, once in the task's life."""
        key = TaskKey(job.job.tenant, job.ids.own_task_key)
        event = GuardEvent(
            # Of two jobs that are near it at the same moment, both announce it, under one id.
            event_id=f"{key.name}@{life}#soft_cap",
            kind="soft_cap",
            agent=job.agent_name,
            tenant=key.tenant,
            task_id=job.ids.own_task_id,
            task_key=key.task_key,
            execution_id=job.execution_id,
            rule=near.rule,
            reason=near.reason,
            at=time_from_ms(task.read_ms),
            **task.counts,
        )
        await self._send(event)
        await self.tasks.mark_warned(key, life)

    async def _send(self, event: GuardEvent) -> None:
        await self._outages.retry_while_unavailable(
            lambda: self._publisher.event(subjects.guard(event.agent), event, id=event.event_id, at=event.at)
        )

    async def publish(self, key: TaskKey, tripped: TripRecord, task: Task) -> None:
        """Publishes a trip that is not published yet: the worker that tripped the task may have died before that."""
        if tripped.published:
            return
        at = time_from_ms(tripped.at_ms)
        event = GuardEvent(
            event_id=f"{key.name}@{tripped.at_ms}",
            kind="tripped",
            agent=tripped.agent,
            tenant=key.tenant,
            task_id=tripped.task_id or key.task_key,
            task_key=key.task_key,
            execution_id=tripped.execution_id or None,
            rule=tripped.trip.rule,
            reason=tripped.trip.reason,
            at=at,
            **task.counts,
        )
        await self._send(event)
        structlog.get_logger().warning(
            "task_stopped", agent=tripped.agent, task_id=event.task_id, tenant=event.tenant, reason=event.reason
        )
        await self.tasks.mark_published(key)


async def bound_tasks(tasks: Tasks) -> None:
    """Bounds the tasks that a caller has in Redis, until it is cancelled."""
    outage = Outage("bounds of tasks")
    while True:
        await asyncio.sleep(background.aligned_delay(BOUND_EVERY_S))
        try:
            await tasks.delete_idle()
        except StateUnavailableError as error:
            outage.note_failure(error)
        else:
            outage.note_success()
