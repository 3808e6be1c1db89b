"""The usage and the failures of tasks, and the tasks that are stopped. Counted here, judged in `limits.rules.guard`.

A task is one hash. Its life begins with its first job and ends when it is reset, or when it has had no job for a
week; a job under way then counts for nothing in the next one. Each job under way has one hold in it: its cost so far,
and the worst case of its present call. The list of stopped tasks is a sorted set by when they stopped. It may name too
many, which a reader finds out. Callers may name any tasks, so each has a list of those that began with its jobs, and of
the breakers that its jobs brought. Of too many, those that rest are forgotten before their time is over.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from breakwater.breakers.store import KEEP_OF_TASK_MS
from breakwater.jobs.store.task_keys import TaskKey, short_name
from breakwater.kernel.nats.subjects import decode_token
from breakwater.kernel.redis.connection import Redis, ScriptCommand, scripts_of
from breakwater.limits.contract import GuardRule
from breakwater.limits.rules.guard import JobOutcome, Task, Trip

KEEP_MS = 7 * 24 * 3_600_000
"""A task without a job for a week is deleted."""

KEEP_DONE_MS = 3_600_000
"""The time for which a counted job is remembered, because its worker may die before it publishes the job's record."""

KEEP_COPY_MS = 60_000
"""The time for which a repeated reset gets the same answer."""

MAX_KEPT = 100
"""The most distinct errors of a task, and confidences of its answers, that are kept."""

TRIPPED = "bw:tasks:tripped"
MAX_LISTED = 1_000
"""The most stopped tasks in a list: longer pages would not be read, and would keep Redis from other clients."""

MAX_OF_CALLER = 50_000
"""The most tasks, and breakers of tasks, that began with jobs of one caller, 0.3 KB each; more only while in use."""

MAX_STOPPED_OF_CALLER = 5_000
"""The most stopped tasks of a caller beyond those, so that no stopped task goes on because others begin."""

IN_USE_MS = 600_000
"""A task is in use for ten minutes after a job of it, and so is its breaker."""

_FORGOTTEN_AT_ONCE = 1_000

_LUA = scripts_of(__file__)

_COUNTS = ("iterations", "tokens", "cost", "consecutive_failures", "total_failures")
_FIELDS = (
    *_COUNTS,
    "errors",
    "confidences",
    "rule",
    "reason",
    "agent",
    "execution",
    "at_ms",
    "published",
    "task_id",
    "life",
    "warned",
    "read_ms",
)
"""The fields of a task in the order in which the scripts return them, and when that was; 0 if it was not asked."""

_LIFE = _FIELDS.index("life")


@dataclass(frozen=True, slots=True)
class TripRecord:
    """A task is stopped: why, by which agent's job, and when (ms since the epoch, by Redis' clock)."""

    trip: Trip
    agent: str
    execution_id: str
    at_ms: int
    published: bool
    """True if its event has been published."""
    task_id: str | None = None
    """The task as its caller named it; None if that is its key."""


@dataclass(frozen=True, slots=True)
class TaskTurn:
    """A job's turn in its task.

    Attributes:
        number: which iteration it is, from 1; 0 while tripped, or in a life that is over.
        task: with its concluded jobs.
        tripped: set where it is stopped.
        other_holds: the amount that the task's other jobs under way hold, in nano-dollars.
        over_cap: the cost limit has no room for the hold that was asked for, and the job's hold is what it was.
        unwarned: the life of the task, until people are notified that it is near a limit.
    """

    number: int
    task: Task
    tripped: TripRecord | None
    other_holds: int = 0
    over_cap: bool = False
    unwarned: str | None = field(default=None, compare=False)


class Tasks:
    """The tasks of the fleet. All methods that wait raise StateUnavailableError, and may then be called again."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._begun: dict[str, list[str]] = {}

    def note_begun(self, redis_key: str, caller: str | None) -> None:
        """Notes that a task, or its breaker, began with a caller's job. `delete_idle` processes the notes."""
        self._begun.setdefault(caller or "", []).append(redis_key)

    async def delete_idle(self) -> None:
        """Forgets a caller's oldest idle tasks where it has too many, at most a thousand of each caller."""
        begun = self._begun
        self._begun = {}
        for caller, keys in begun.items():
            listed = f"bw:tasks:of:{caller}"
            extra = await self._extra(listed, keys, MAX_OF_CALLER)
            outcomes = list(zip(extra, await self._redis.run([_forget(key) for key in extra]), strict=True))
            await self._extra(listed, [key for key, outcome in outcomes if outcome == "in use"], None)
            stopped = [key for key, outcome in outcomes if outcome == "stopped"]
            for key in await self._extra(f"bw:tasks:stopped-of:{caller}", stopped, MAX_STOPPED_OF_CALLER):
                await self._redis.client.unlink(key)

    async def _extra(self, listed: str, keys: Sequence[str], limit: int | None) -> list[str]:
        """Appends keys to a list, and removes and returns the first ones beyond the limit."""
        if not keys:
            return []
        async with self._redis.client.pipeline(transaction=False) as pipe:
            pipe.zadd(listed, dict.fromkeys(keys, time.time()), nx=True)
            pipe.pexpire(listed, KEEP_MS)
            pipe.zcard(listed)
            *_, count = await pipe.execute()
            extra = 0 if limit is None else min(count - limit, _FORGOTTEN_AT_ONCE)
            popped = await self._redis.client.zpopmin(listed, extra) if extra > 0 else []
        return [key for key, _ in cast(list[tuple[str, float]], popped)]

    @staticmethod
    def enter_command(
        key: TaskKey,
        execution_id: str,
        *,
        hold: int = 0,
        cap: int | None = None,
        dry_run: bool = False,
        only_first: bool = False,
        is_step: bool = True,
    ) -> ScriptCommand:
        """Counts a job as an iteration, once for each execution, and holds its cost after the next call at most.

        Not while tripped, and the hold only where the limit has room for it. Read the answer with `read_turn`.

        Args:
            key: the task.
            execution_id: the job.
            hold: the job's cost so far and the worst case of its next call, in nano-dollars.
            cap: of the task's cost; None where it has no limit.
            dry_run: count and hold nothing; the answer is that to a job that has not entered yet.
            only_first: the hold of a job that has entered stays as it is, as another than its worker asks.
            is_step: the job is an iteration.
        """
        limit = "" if cap is None else cap
        keys = [key.redis_key, _marker(key, execution_id)]
        flags = [int(only_first), int(is_step)]
        arguments = ["" if dry_run else KEEP_MS, KEEP_MS, short_name(execution_id), hold, limit, *flags]
        return ScriptCommand(_LUA["enter"], keys, arguments)

    @staticmethod
    def read_turn(answer: Sequence[Any]) -> TaskTurn:
        """Reads the answer to `enter_command`."""
        number, other_holds, over_cap, values = answer
        task, tripped = _read(values)
        life, warned = values[_LIFE : _LIFE + 2]
        return TaskTurn(int(number), task, tripped, int(other_holds), bool(over_cap), None if warned else life)

    @staticmethod
    def shrink_command(key: TaskKey, execution_id: str, *, spent: int) -> ScriptCommand:
        """Reduces a job's hold to what it has spent (nano-dollars), as it makes no call now. Answers nothing."""
        return ScriptCommand(_LUA["shrink"], [key.redis_key], [short_name(execution_id), spent])

    async def record(self, key: TaskKey, execution_id: str, outcome: JobOutcome) -> Task:
        """Counts a concluded job once in place of its hold, even if it never entered; returns the task after it."""
        error = (outcome.error_hash if outcome.failed else None) or ""
        confidence = "" if outcome.confidence is None else repr(outcome.confidence)
        failed = "" if outcome.failed is None else int(outcome.failed)
        counted = [outcome.tokens, outcome.cost, failed, int(outcome.called), error, confidence]
        # The first job of its own task is counted again by children that come late.
        keep_done_ms = KEEP_MS if execution_id == key.task_key else KEEP_DONE_MS
        arguments = [KEEP_MS, keep_done_ms, *counted, MAX_KEPT, short_name(execution_id), int(outcome.is_step)]
        command = ScriptCommand(_LUA["record"], [key.redis_key, _marker(key, execution_id)], arguments)
        [values] = await self._redis.run([command])
        return _read(values)[0]

    async def trip(
        self, key: TaskKey, trip: Trip, *, agent: str, execution_id: str, task_id: str | None = None
    ) -> TripRecord:
        """Stops a task, unless it is stopped already. Returns the trip that counts, which is the first one.

        `task_id` is the task as its caller named it; None if that is its key.
        """
        return await self._trip(key, trip, agent, execution_id, task_id, at_ms=None, published=False)

    async def restore(self, key: TaskKey, tripped: TripRecord) -> None:
        """Puts a trip back that Redis has lost, unless the task has tripped again."""
        await self._trip(
            key,
            tripped.trip,
            tripped.agent,
            tripped.execution_id,
            tripped.task_id,
            at_ms=tripped.at_ms,
            published=tripped.published,
        )

    async def _trip(
        self,
        key: TaskKey,
        trip: Trip,
        agent: str,
        execution_id: str,
        task_id: str | None,
        *,
        at_ms: int | None,
        published: bool,
    ) -> TripRecord:
        at = "" if at_ms is None else at_ms
        stored_task_id = "" if task_id in (None, key.task_key) else task_id
        arguments = [KEEP_MS, trip.rule, trip.reason, agent, execution_id, at, int(published), stored_task_id]
        [values] = await self._redis.run([ScriptCommand(_LUA["trip"], [key.redis_key], arguments)])
        tripped = _read(values)[1]
        assert tripped is not None
        await self._list(key, tripped.at_ms)
        return tripped

    async def mark_published(self, key: TaskKey) -> None:
        """Records that a trip's event has been published."""
        [at_ms] = await self._redis.run([ScriptCommand(_LUA["published"], [key.redis_key], [])])
        if at_ms:
            # Listed once more: the worker that tripped it may have died before it did so, and another one published it.
            await self._list(key, int(at_ms))

    async def mark_warned(self, key: TaskKey, life: str) -> None:
        """Records that people were notified of a task near a limit."""
        await self._redis.run([ScriptCommand(_LUA["warned"], [key.redis_key], [life])])

    async def reset(self, key: TaskKey) -> tuple[Task, TripRecord | None]:
        """Forgets a task, so that it may go on, and returns its last state; so do repeated calls for a minute."""
        command = ScriptCommand(_LUA["reset"], [key.redis_key, f"{key.redis_key}:was"], [KEEP_COPY_MS])
        [values] = await self._redis.run([command])
        task, tripped = _read(values)
        if tripped is not None:
            await self._redis.run([_unlist(key.name, tripped.at_ms)])
        return task, tripped

    async def load(self, key: TaskKey) -> tuple[Task, TripRecord | None]:
        """The present state of a task; an unknown task is empty."""
        [values] = await self._redis.run([ScriptCommand(_LUA["load"], [key.redis_key], [])])
        return _read(values)

    async def stopped_tasks(self) -> list[tuple[TaskKey, TripRecord]]:
        """The stopped tasks, in the order in which they were stopped; of too many, the latest."""
        scored_names = await self._redis.client.zrange(TRIPPED, -MAX_LISTED, -1, withscores=True)
        listed = cast(list[tuple[str, float]], scored_names)
        if not listed:
            return []
        keys = [task_named(name) for name, _ in listed]
        answers = await self._redis.run([ScriptCommand(_LUA["load"], [key.redis_key], []) for key in keys])
        states = [_read(values)[1] for values in answers]
        unlisted = [
            _unlist(name, int(at_ms)) for (name, at_ms), tripped in zip(listed, states, strict=True) if tripped is None
        ]
        if unlisted:
            await self._redis.run(unlisted)
        return [(key, tripped) for key, tripped in zip(keys, states, strict=True) if tripped is not None]

    async def _list(self, key: TaskKey, at_ms: int) -> None:
        async with self._redis.client.pipeline(transaction=False) as pipe:
            pipe.zadd(TRIPPED, {key.name: at_ms})
            pipe.zremrangebyrank(TRIPPED, 0, -10 * MAX_LISTED - 1)
            await pipe.execute()


def _forget(key: str) -> ScriptCommand:
    keep_ms = KEEP_MS if key.startswith("bw:task:") else KEEP_OF_TASK_MS
    return ScriptCommand(_LUA["forget"], [key], [keep_ms - IN_USE_MS])


def _unlist(name: str, at_ms: int) -> ScriptCommand:
    return ScriptCommand(_LUA["unlist"], [TRIPPED], [name, at_ms])


def _marker(key: TaskKey, execution_id: str) -> str:
    return f"{key.redis_key}:x:{short_name(execution_id)}"


def task_named(name: str) -> TaskKey:
    """Returns the task of a name: the inverse of `TaskKey.name`."""
    tenant, _, task_key = name.partition("/")
    return TaskKey(decode_token(tenant) if tenant else None, decode_token(task_key))


def _read(values: Sequence[Any]) -> tuple[Task, TripRecord | None]:
    fields = dict(zip(_FIELDS, values, strict=True))
    counts = [int(fields[name] or 0) for name in _COUNTS]
    errors = (error.split("=") for error in (fields["errors"] or "").split())
    confidences = tuple(map(float, (fields["confidences"] or "").split()))
    counted = {error: int(count) for error, count in errors}
    task = Task(*counts, errors=counted, confidences=confidences, read_ms=fields["read_ms"])
    if fields["rule"] is None:
        return task, None
    # A trip's fields are always written together.
    trip = Trip(cast(GuardRule, fields["rule"]), cast(str, fields["reason"]))
    agent, execution_id, at_ms = (cast(str, fields[name]) for name in ("agent", "execution", "at_ms"))
    return task, TripRecord(
        trip, agent, execution_id, int(at_ms), fields["published"] == "1", fields["task_id"] or None
    )
