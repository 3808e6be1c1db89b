"""Recent plans: the accepted jobs of each and how far they are, and announcements and refusals.

A hash for each plan, and a sorted set of all by their latest notes. Bringing a job to its next stage returns the change
of the plan that this makes, which the caller publishes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from breakwater.jobs.contract.plans import PlanState
from breakwater.jobs.rules.plans import state_by_stages
from breakwater.kernel.errors import BreakwaterError
from breakwater.kernel.redis.connection import Redis, ScriptCommand, read_hashes, scripts_of
from breakwater.kernel.types import ms_from_time, time_from_ms

KEEP_S = 72 * 3600
MAX_ANNOUNCED = 1_000
"""Drafts and refused plans of one caller: they take half a megabyte of Redis' memory at most."""
_NEWEST = "bw:plans"
_ANNOUNCED = "\0"
"""The first character of the fields of announcements. No job's id begins with it, nor with the next ones."""
_STAGE = "\1"
"""The first character of the fields of stages."""
_OTHERS = ("\2", "\3")
VERSION = "\3version"
"""The field with the number of changes, by which they are named."""
_NAME = "\4"
"""The field of the plan as its caller named it."""

Stage = Literal["pending", "running", "succeeded", "dead_lettered", "cancelled"]
_STAGES: Mapping[str, str] = {"pending": "p", "running": "r", "succeeded": "s"}

_LUA = scripts_of(__file__)


@dataclass(frozen=True, slots=True)
class NotedJob:
    """A job that was accepted for a plan."""

    accepted_at: datetime
    agent: str
    tenant: str | None
    owner: str | None
    """The name of the API key that it belongs to."""
    job_id: str
    """Its own id."""
    depends_on: tuple[str, ...] = ()
    """The executions that it waits for."""


@dataclass(frozen=True, slots=True)
class KnownPlan:
    """Notes of a plan; the results of its jobs are elsewhere."""

    jobs: Mapping[str, NotedJob] = field(default_factory=dict[str, NotedJob])
    """The accepted jobs, by execution id."""
    announced: Mapping[str, str | None] = field(default_factory=dict[str, str | None])
    """Reason of the refusal, if it was refused, by the announcer, that has had no job of it accepted since."""
    begun: frozenset[str] = frozenset()
    """The jobs that a worker has dispatched."""
    plan_id: str | None = None
    """The plan as its caller named it; None if that is its key."""


@dataclass(frozen=True, slots=True)
class PlanMove:
    """A change of a plan's state."""

    version: int
    """A number that grows with each change of the plan or its jobs."""
    before: PlanState | None
    """None for a new plan."""
    after: PlanState


class TooManyPlansError(BreakwaterError):
    """A caller has announced too many plans without jobs."""


class Plans:
    """The plans of the last 72 hours. All methods raise StateUnavailableError."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def announce(
        self, plan_key: str, by: str, refusal: str | None = None, *, plan_id: str | None = None
    ) -> PlanMove | None:
        """Notes a plan of which nothing was accepted: a draft, or one that was refused.

        `plan_id` is the plan as its caller named it; None if that is its key.

        Returns:
            The change of its state; None where it stays the same.

        Raises:
            TooManyPlansError: the caller has announced too many. It is not noted.
        """
        arguments = [
            plan_key,
            by,
            json.dumps(refusal),
            MAX_ANNOUNCED,
            KEEP_S,
            _now_ms(),
            _chosen_id(plan_key, plan_id),
        ]
        [answer] = await self._redis.run([ScriptCommand(_LUA["announce"], self._keys(plan_key, by), arguments)])
        is_noted, *state_fields = answer
        if not int(is_noted):
            raise TooManyPlansError
        version, announced, *stages = state_fields
        after = state_by_stages(map(int, stages), refused=refusal is not None)
        return _move(version, _before(announced, map(int, stages)), after)

    async def change(
        self,
        plan_key: str,
        stage: Stage,
        jobs: Mapping[str, NotedJob | None],
        by: str | None = None,
        *,
        plan_id: str | None = None,
    ) -> PlanMove | None:
        """Brings jobs of a plan to a stage, if they have not reached a later one. Repeating it is safe.

        Args:
            plan_key: of the plan.
            stage: of all of these jobs from now on.
            jobs: by execution id; None for one that changes only if it is noted.
            by: the caller whose draft it no longer is.
            plan_id: the plan as its caller named it; None if that is its key.

        Returns:
            The change of the plan's state that this makes; None where it stays the same.
        """
        arguments: list[str | int] = [plan_key, by or "", _STAGES.get(stage, "f"), KEEP_S, _now_ms()]
        arguments.append(_chosen_id(plan_key, plan_id))
        for execution_id, job in jobs.items():
            arguments += [execution_id, "" if job is None else _note(job)]
        [answer] = await self._redis.run([ScriptCommand(_LUA["change"], self._keys(plan_key, by), arguments)])
        if not answer:
            return None
        version, announced, *stages = answer
        numbers = list(map(int, stages))
        return _move(version, _before(announced, numbers[:4]), state_by_stages(numbers[4:]))

    async def withdraw(self, plan_key: str, execution_ids: Collection[str]) -> None:
        """Forgets jobs that were noted, but not accepted."""
        await self._redis.run([ScriptCommand(_LUA["withdraw"], [_key(plan_key)], list(execution_ids))])

    async def notes_of(self, plan_keys: Iterable[str]) -> dict[str, KnownPlan]:
        """The notes of plans, by key."""
        wanted = list(plan_keys)
        hashes = await read_hashes(self._redis.client, list(map(_key, wanted)))
        return dict(zip(wanted, map(_read_plan, hashes), strict=True))

    async def newest(self, limit: int) -> dict[str, datetime]:
        """The keys of the plans with the latest notes, each with the time of its last one, the latest first."""
        scored_keys: Any = await self._redis.client.zrevrange(_NEWEST, 0, limit - 1, withscores=True)
        return {plan_key: time_from_ms(int(at_ms)) for plan_key, at_ms in scored_keys}

    @staticmethod
    def _keys(plan_key: str, by: str | None) -> list[str]:
        return [_key(plan_key), _NEWEST, f"bw:announced-plans:{by or ''}"]


def _move(version: object, before: PlanState | None, after: PlanState) -> PlanMove | None:
    return None if before == after else PlanMove(int(str(version)), before, after)


def _before(announced: str, stages: Iterable[int]) -> PlanState | None:
    numbers = list(stages)
    if not any(numbers) and not announced:
        return None
    return state_by_stages(numbers, refused=bool(announced) and json.loads(announced) is not None)


def _read_plan(notes: Mapping[str, str]) -> KnownPlan:
    jobs: dict[str, NotedJob] = {}
    announced: dict[str, str | None] = {}
    begun: set[str] = set()
    plan_id: str | None = None
    for name, text in notes.items():
        if name.startswith(_ANNOUNCED):
            announced[name[1:]] = json.loads(text)
        elif name.startswith(_STAGE):
            if text != "p":
                begun.add(name[1:])
        elif name == _NAME:
            plan_id = text
        elif not name.startswith(_OTHERS):
            epoch_ms, agent, tenant, owner, *later_fields = json.loads(text)
            job_id = later_fields[0] if later_fields else name
            dependencies = tuple(later_fields[1]) if len(later_fields) > 1 else ()
            jobs[name] = NotedJob(time_from_ms(epoch_ms), agent, tenant, owner, job_id, dependencies)
    return KnownPlan(jobs, announced, frozenset(begun), plan_id)


def _note(job: NotedJob) -> str:
    return json.dumps([ms_from_time(job.accepted_at), job.agent, job.tenant, job.owner, job.job_id, job.depends_on])


def _key(plan_key: str) -> str:
    return f"bw:plan:{plan_key}"


def _chosen_id(plan_key: str, plan_id: str | None) -> str:
    return "" if plan_id in (None, plan_key) else str(plan_id)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
