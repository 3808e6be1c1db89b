"""The guard of a job's task, which judges before each call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from breakwater.calls.gate import Gate, GateVerdict, Refused, WaitForCapacity
from breakwater.calls.rules.waits import POLL_S
from breakwater.jobs.rules.record import spent_by, tokens_of
from breakwater.jobs.store.executions import ClaimLostError
from breakwater.jobs.store.task_keys import TaskKey
from breakwater.kernel.redis.connection import ScriptCommand
from breakwater.kernel.types import time_from_ms
from breakwater.limits.rules.guard import Task, Trip, before_call, near_cap, task_statistics, with_job
from breakwater.limits.rules.refusals import task_budget_held, task_stopped
from breakwater.limits.store.tasks import TaskTurn, TripRecord
from breakwater.limits.task_guards import FIRST_JOBS, TaskGuards, shared_task

_ALONE = TaskTurn(1, Task(), None)


@dataclass(frozen=True, slots=True)
class _StopVerdict:
    """A task that makes no more calls: it must be stopped now, or was stopped before."""

    why: Trip | TripRecord
    task: Task


@dataclass(slots=True, kw_only=True)
class TaskGate(Gate):
    """Counts the job as an iteration of its task, and holds the job's worst-case cost after the call."""

    guards: TaskGuards
    jitter: Callable[[], float]
    _stopped: _StopVerdict | None = None
    _near: tuple[str, Trip, Task] | None = None
    """The life of a task that is near a limit, the limit, and the task."""

    def ask(self) -> ScriptCommand | Refused | None:
        """Judges locally if the job is alone in its task. Returns None if it may call, or its agent has no guard."""
        admission = self.admission
        if admission.job.agent.guard is None:
            return None
        if (shared := shared_task(admission.job)) is None:
            alone = self._judge(_ALONE)
            if not isinstance(alone, Refused):
                return None
            # Another model may cost less: only the last one's refusal stops the task, which is this job.
            why = None if self._stopped is None else self._stopped.why
            is_last = admission.checkpoint.is_last_of(admission.job.chain)
            tries_next = isinstance(why, Trip) and why.rule == "max_cost" and not is_last
            self.announces = not tries_next
            return replace(alone, ends_chain=not tries_next)
        rules, key = shared
        return self.guards.tasks.enter_command(
            key,
            admission.job.execution_id,
            hold=spent_by(admission.checkpoint.attempts) + (admission.flight.reserved or 0),
            cap=rules.max_cost_usd,
            dry_run=admission.lease_ms is None,
            is_step=admission.job.job.api != "embeddings",
        )

    def read(self, answer: Any) -> Refused | WaitForCapacity | None:
        """Refuses if the task is stopped or must be. Waits if its other jobs hold the rest of its cost limit."""
        admission = self.admission
        entered = self.guards.tasks.read_turn(answer)
        admission.flight = admission.flight.model_copy(update={"task_asked_at": time_from_ms(entered.task.read_ms)})
        shared = shared_task(admission.job)
        if shared is not None and 0 < entered.number <= FIRST_JOBS and admission.lease_ms is not None:
            self.guards.tasks.note_begun(shared[1].redis_key, admission.job.caller)
        return self._judge(entered)

    def _judge(self, entered: TaskTurn) -> Refused | WaitForCapacity | None:
        rules = self.admission.job.agent.guard
        attempts = self.admission.checkpoint.attempts
        assert rules is not None
        if entered.tripped is not None:
            return self._stop(entered.tripped, entered.task)
        worst_case = self.admission.flight.reserved
        cost = spent_by(attempts)
        tokens = tokens_of(attempts)
        trip = before_call(entered.task, entered.number, rules, tokens=tokens, cost=cost, worst_case=worst_case)
        if trip is not None:
            used = with_job(entered.task, entered.number, tokens=tokens, cost=cost, has_called=bool(attempts))
            return self._stop(trip, used)
        if entered.over_cap:
            error = task_budget_held(
                self.admission.job.agent_name,
                used=entered.task.cost + cost + entered.other_holds,
                worst_case=worst_case or 0,
                cap=rules.max_cost_usd,
            )
            refused = Refused("budget_exceeded", error, refused_by="task")
            return WaitForCapacity(POLL_S * (1 + self.jitter()), refused)
        if entered.unwarned is not None and self.admission.lease_ms is not None:
            near = near_cap(entered.task, entered.number, rules, tokens=tokens, cost=cost)
            if near is not None:
                self._near = entered.unwarned, near, entered.task
                self.announces = True
        return None

    def _stop(self, why: Trip | TripRecord, task: Task) -> Refused:
        self._stopped = _StopVerdict(why, task)
        self.announces = True
        job = self.admission.job
        this_job = job.agent_name, job.execution_id
        trip, agent, by = (why, *this_job) if isinstance(why, Trip) else (why.trip, why.agent, why.execution_id)
        error = task_stopped(
            trip.rule,
            trip.reason,
            agent=agent,
            task_id=job.ids.own_task_id,
            task_key=job.ids.own_task_key,
            tenant=job.job.tenant,
            execution_id=by,
        )
        return Refused("guard_tripped", error, ends_chain=True, statistics=task_statistics(task, trip))

    def release(self) -> ScriptCommand | None:
        """Reduces the hold to the cost of the job."""
        return self.guards.release_hold(self.admission.job, self.admission.checkpoint)

    async def announce(self, verdict: GateVerdict | None) -> None:
        """Stops the task and publishes that, unless both are done, or the claim on the job is lost.

        Publishes that the task is near a limit, once.
        """
        if isinstance(verdict, ClaimLostError):
            return
        if self._near is not None:
            await self.guards.warn(self.admission.job, *self._near)
        if self._stopped is None:
            return
        job = self.admission.job
        shared = shared_task(job)
        key = TaskKey(job.job.tenant, job.execution_id) if shared is None else shared[1]
        if isinstance(self._stopped.why, Trip):
            by = job.agent_name, job.execution_id
            await self.guards.trip(key, self._stopped.why, self._stopped.task, *by, task_id=job.ids.own_task_id)
        else:
            await self.guards.publish(key, self._stopped.why, self._stopped.task)
