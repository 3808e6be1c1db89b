"""The tasks of a replay, and the judgements of their guards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import NamedTuple

from breakwater.jobs.contract.execution import Attempt, Execution
from breakwater.jobs.rules.record import spent_by, tokens_of
from breakwater.kernel.immutable import immutable
from breakwater.kernel.types import ms_from_time, time_from_ms
from breakwater.limits.contract import GuardEvent
from breakwater.limits.rules.guard import (
    JobOutcome,
    Task,
    Trip,
    after_job,
    before_call,
    near_cap,
    outcome_of,
    with_job,
)
from breakwater.limits.settings import GuardRules

MAX_KEPT = 100
"""The most errors and confidences of a task that are kept."""

TRIP_MS = 2_000
"""The most time between a recorded trip and the moment at which the replay stops the task."""

KEEP_MS = 7 * 24 * 3_600_000
"""The time after which a task is forgotten that has no call."""


class TaskName(NamedTuple):
    """The identity of a task. Tenants do not share tasks."""

    tenant: str | None
    task_key: str


@dataclass(slots=True)
class TaskState:
    """A task, as Redis keeps it.

    Attributes:
        task: its counts.
        trip: why it is stopped; None while it is not.
        warned: True if people were notified that it is near a limit.
        numbers: the jobs that have entered it, each with its number among the iterations.
        holds: what jobs under way may have cost after their calls, in nano-dollars.
        over: the jobs that count for nothing any more: they are counted, or of a life before a reset.
        touched_ms: the time of its latest call or end of a job, in milliseconds since the epoch.
        touched_by: the job of that.
        earlier_ms: the time of the latest call or end of a job before those of `touched_by`.
        since_others_ms: the time from there to the moment at which the task was stopped.
        untimed_ms: the time of the latest call or end of a job of which no clock of Redis tells it.
        stops: why it will be stopped, and when, as Redis stops it a moment after the job that makes it do so.
    """

    task: Task = field(default_factory=Task)
    trip: Trip | None = None
    warned: bool = False
    numbers: dict[str, int] = field(default_factory=dict[str, int])
    holds: dict[str, int] = field(default_factory=dict[str, int])
    over: set[str] = field(default_factory=set[str])
    touched_ms: int = 0
    touched_by: str = ""
    earlier_ms: int = 0
    since_others_ms: float = math.inf
    untimed_ms: float = -math.inf
    stops: tuple[Trip, int] | None = None

    def touch(self, execution_id: str, now_ms: int, *, is_timed: bool = False) -> None:
        """Notes a call or the end of a job. `is_timed` is True if Redis' clock tells its time."""
        if not is_timed:
            self.untimed_ms = now_ms
        if self.stops is not None and now_ms >= self.stops[1]:
            self.trip = self.stops[0]
        if execution_id != self.touched_by:
            self.earlier_ms = self.touched_ms
            self.touched_by = execution_id
        self.touched_ms = now_ms

    def enter(self, execution_id: str, cost: int, cap: int | None, *, steps: int = 1) -> tuple[int, bool]:
        """Counts a job as an iteration, once, and holds its cost after its call where the limit has room for it.

        Args:
            execution_id: the job.
            cost: its cost so far and the worst case of its call, in nano-dollars.
            cap: the limit of the task's cost; None if there is none.
            steps: the iterations that it is: 1, or 0.

        Returns:
            The job's number among the iterations, 0 while the task is stopped; and True if the limit has no room.
        """
        is_over = cap is not None and self.task.cost + self.held_by_others(execution_id) + cost > cap
        if self.trip is not None:
            return 0, is_over
        number = self.numbers.get(execution_id, 0)
        if execution_id in self.over:
            return number, is_over
        if number == 0:
            self.task = replace(self.task, iterations=self.task.iterations + steps)
            number = self.numbers[execution_id] = max(1, self.task.iterations)
        if not is_over:
            self.hold(execution_id, cost)
        return number, is_over

    def held_by_others(self, execution_id: str) -> int:
        """Returns what other jobs hold, in nano-dollars."""
        return sum(self.holds.values()) - self.holds.get(execution_id, 0)

    def hold(self, execution_id: str, cost: int) -> None:
        """Holds an amount for a job in place of what it held; 0 for none."""
        self.holds.pop(execution_id, None)
        if cost:
            self.holds[execution_id] = cost

    def record(self, execution_id: str, outcome: JobOutcome) -> Task:
        """Counts a concluded job, once, in place of its hold. Returns the task after it."""
        if execution_id in self.over:
            return self.task
        task = self.task
        had_entered = self.numbers.get(execution_id, 0) > 0
        steps = int(outcome.is_step)
        iterations = task.iterations
        if outcome.failed is None and not outcome.called:
            iterations -= steps if had_entered else 0
            self.numbers[execution_id] = 0
        elif not had_entered:
            iterations += steps
            self.numbers[execution_id] = max(1, iterations)
        self.hold(execution_id, 0)
        errors = dict(task.errors)
        if outcome.failed and outcome.error_hash:
            times = errors.pop(outcome.error_hash, 0) + 1
            if len(errors) == MAX_KEPT:
                del errors[min(errors, key=errors.__getitem__)]
            errors[outcome.error_hash] = times
        confidences = task.confidences
        if outcome.confidence is not None:
            confidences = (*confidences, outcome.confidence)[-MAX_KEPT:]
        consecutive = 0 if outcome.failed is False else task.consecutive_failures + int(outcome.failed is True)
        self.task = Task(
            iterations=iterations,
            tokens=task.tokens + outcome.tokens,
            cost=task.cost + outcome.cost,
            consecutive_failures=consecutive,
            total_failures=task.total_failures + int(outcome.failed is True),
            errors=errors,
            confidences=confidences,
        )
        self.over.add(execution_id)
        return self.task

    def reset(self) -> None:
        """Forgets all that was counted; jobs of this life count for nothing from now on."""
        self.over |= self.numbers.keys()
        self.numbers.clear()
        self.holds.clear()
        self.task = Task()
        self.trip = self.stops = None
        self.warned = False


@immutable()
class TaskVerdict:
    """The verdict of a guard on a call.

    Attributes:
        trip: why it refuses it; None if it does not.
        task: the counts of the task.
        waits: True if other jobs of the task hold the rest of its cost limit.
    """

    trip: Trip | None
    task: Task
    waits: bool = False


class ReplayedTasks:
    """All tasks of a replay. A job that belongs to no other is a task of its own, and has no entry."""

    def __init__(self, publish: Callable[[GuardEvent], None], recorded: Iterable[GuardEvent] = ()) -> None:
        """Takes `publish`, which is called with each event of a guard, and the recorded events."""
        self._publish = publish
        self._trips: dict[TaskName, list[GuardEvent]] = {}
        """The recorded trips."""
        self._stopped_ms: dict[str | None, int] = {}
        """The time at which each job has stopped its task."""
        self._at: dict[tuple[str, str | None, str | None, str], datetime] = {}
        """The time of each recorded event, by its kind, job, rule and reason."""
        for event in recorded:
            self._at[event.kind, event.execution_id, event.rule, event.reason] = event.at
            if event.kind == "tripped":
                self._trips.setdefault(TaskName(event.tenant, event.task_key), []).append(event)
                self._stopped_ms[event.execution_id] = ms_from_time(event.at)
        self._tasks: dict[TaskName, TaskState] = {}

    def judge(
        self,
        name: TaskName | None,
        record: Execution,
        rules: GuardRules,
        attempts: Sequence[Attempt],
        worst_case: int | None,
        now_ms: int,
        *,
        is_timed: bool = False,
    ) -> TaskVerdict:
        """Judges a call of a job before it is made.

        Args:
            name: the job's task; None if it is one of its own.
            record: the job.
            rules: the guard's rules.
            attempts: the job's earlier attempts.
            worst_case: the most that the call can cost, in nano-dollars; None without a price.
            now_ms: the current time, in milliseconds since the epoch.
            is_timed: True if Redis' clock tells it.
        """
        tokens = cost = 0
        if attempts:
            tokens = tokens_of(attempts)
            cost = spent_by(attempts)
        state = _ALONE
        number = 1
        is_over = False
        if name is not None:
            state = self._state_of(name)
            state.touch(record.execution_id, now_ms, is_timed=is_timed)
            steps = int(record.api != "embeddings")
            number, is_over = state.enter(
                record.execution_id, cost + (worst_case or 0), rules.max_cost_usd, steps=steps
            )
        task = state.task
        if state.trip is not None:
            return TaskVerdict(state.trip, task)
        trip = before_call(task, number, rules, tokens=tokens, cost=cost, worst_case=worst_case)
        if trip is not None:
            return TaskVerdict(trip, with_job(task, number, tokens=tokens, cost=cost, has_called=bool(attempts)))
        if is_over:
            return TaskVerdict(None, task, waits=True)
        if name is None:
            return _ADMITTED
        if not state.warned:
            near = near_cap(task, number, rules, tokens=tokens, cost=cost)
            if near is not None:
                state.warned = True
                self._announce("soft_cap", name, record, near, task, now_ms)
        return TaskVerdict(None, task)

    def stop(
        self,
        name: TaskName | None,
        record: Execution,
        verdict: TaskVerdict,
        now_ms: int,
        *,
        as_recorded: bool = False,
    ) -> None:
        """Stops a task, unless it is stopped already.

        With `as_recorded`, it is left to the job that the record says: of several that find a reason, the first to say
        so to Redis stops it.
        """
        if verdict.trip is None or (
            as_recorded and name is not None and self._is_stopped_by_other(name, record, now_ms)
        ):
            return
        if name is None:
            own_name = TaskName(record.tenant, record.execution_id)
            self._announce("tripped", own_name, record, verdict.trip, verdict.task, now_ms)
            return
        state = self._state_of(name)
        if state.trip is None and state.stops is None:
            at = self._at.get(("tripped", record.execution_id, verdict.trip.rule, verdict.trip.reason))
            stops_ms = now_ms if at is None else ms_from_time(at)
            if now_ms < stops_ms <= now_ms + TRIP_MS:
                state.stops = verdict.trip, stops_ms
            else:
                state.trip = verdict.trip
            state.since_others_ms = now_ms - state.earlier_ms
            self._announce("tripped", name, record, verdict.trip, verdict.task, now_ms)

    def give_back(self, name: TaskName | None, execution_id: str, attempts: Sequence[Attempt]) -> None:
        """Holds no more for a job than it has spent, as it makes no call now."""
        if name is not None and (state := self._tasks.get(name)) is not None:
            spent = spent_by(attempts)
            if state.holds.get(execution_id, 0) > spent:
                state.hold(execution_id, spent)

    def changes_near(self, name: TaskName, now_ms: int, within_ms: int) -> bool:
        """Returns True if another job of the task has called or ended within some time before its latest, or stop.

        If Redis' clock tells the times of all of these, their order is known.
        """
        state = self._tasks.get(name)
        if state is None or now_ms - state.untimed_ms > within_ms:
            return False
        return min(now_ms - state.earlier_ms, state.since_others_ms) <= within_ms

    def is_stopped(self, name: TaskName) -> bool:
        """Returns True if a task is stopped."""
        state = self._tasks.get(name)
        return state is not None and state.trip is not None

    def recorded_trip(self, name: TaskName, now_ms: int) -> Trip | None:
        """Returns why a task was stopped at about a moment; None if it was not."""
        for event in self._trips.get(name, ()):
            if event.rule is not None and abs(ms_from_time(event.at) - now_ms) <= TRIP_MS:
                return Trip(event.rule, event.reason)
        return None

    def counted_ms(self, record: Execution, now_ms: int) -> int:
        """Returns the time at which a task counts a job whose last call has ended.

        Without it in the record, as in those of earlier versions, it is that of the job's own stop, or of its record. A
        worker may be lost in between.
        """
        if record.task_counted_at is not None:
            return max(now_ms, ms_from_time(record.task_counted_at))
        completed_ms = ms_from_time(record.completed_at)
        stopped_ms = self._stopped_ms.get(record.execution_id, completed_ms)
        return stopped_ms if now_ms <= stopped_ms else max(now_ms, completed_ms)

    def trip_by(self, name: TaskName, execution_id: str) -> Trip | None:
        """Returns why the record says that a job stopped a task; None if it did not."""
        return next(
            (
                Trip(event.rule, event.reason)
                for event in self._trips.get(name, ())
                if event.rule is not None and event.execution_id == execution_id
            ),
            None,
        )

    def _is_stopped_by_other(self, name: TaskName, record: Execution, now_ms: int) -> bool:
        """Returns True if the record says that another job stops a task soon."""
        return any(
            event.execution_id != record.execution_id and 0 <= ms_from_time(event.at) - now_ms <= TRIP_MS
            for event in self._trips.get(name, ())
        )

    def repeat_trip(self, name: TaskName, record: Execution, now_ms: int) -> None:
        """Stops the task of a concluded job whose own guard did."""
        self.stop(name, record, TaskVerdict(self.trip_by(name, record.execution_id), self._state_of(name).task), now_ms)

    def end(
        self, name: TaskName, record: Execution, rules: GuardRules, now_ms: int, *, as_recorded: bool = False
    ) -> bool:
        """Counts a concluded job in its task, and stops the task if a rule says so.

        Args:
            name: the task.
            record: the job.
            rules: the guard's rules.
            now_ms: the current time, in milliseconds since the epoch.
            as_recorded: True to stop it for the recorded reason, if it was stopped for another at about that moment.

        Returns:
            True if the reason is the recorded one, and another was found.
        """
        state = self._state_of(name)
        state.touch(record.execution_id, now_ms, is_timed=as_recorded and record.task_counted_at is not None)
        outcome = outcome_of(record, rules)
        task = state.record(record.execution_id, outcome)
        is_stopped = state.trip is not None or state.stops is not None
        trip = None if outcome.failed is None or is_stopped else after_job(task, rules)
        if trip is None:
            return False
        recorded = self.recorded_trip(name, now_ms) if as_recorded else None
        verdict = TaskVerdict(recorded or trip, task)
        self.stop(name, record, verdict, now_ms, as_recorded=as_recorded and record.task_counted_at is not None)
        return recorded not in (None, trip)

    def reset(self, event: GuardEvent) -> None:
        """Repeats an operator's reset of a task."""
        if (state := self._tasks.get(TaskName(event.tenant, event.task_key))) is not None:
            state.reset()
        self._publish(event)

    def _state_of(self, name: TaskName) -> TaskState:
        state = self._tasks.get(name)
        if state is None:
            state = self._tasks[name] = TaskState()
        return state

    def forget(self, now_ms: int) -> None:
        """Forgets tasks that have had no call for a week."""
        self._tasks = {name: state for name, state in self._tasks.items() if now_ms - state.touched_ms < KEEP_MS}

    def _announce(self, kind: str, name: TaskName, record: Execution, trip: Trip, task: Task, now_ms: int) -> None:
        """Publishes an event, with its recorded time if it has one: the log has calls only once they end."""
        self._publish(
            GuardEvent(
                event_id=f"{name.tenant or ''}/{name.task_key}@{now_ms}#{kind}",
                kind="soft_cap" if kind == "soft_cap" else "tripped",
                agent=record.agent,
                tenant=name.tenant,
                task_id=record.task_id or record.job_id,
                task_key=name.task_key,
                execution_id=record.execution_id,
                rule=trip.rule,
                reason=trip.reason,
                at=self._at.get((kind, record.execution_id, trip.rule, trip.reason)) or time_from_ms(now_ms),
                **task.counts,
            )
        )


_ADMITTED = TaskVerdict(None, Task())
_ALONE = TaskState()
"""The task of a job that is alone in it."""
