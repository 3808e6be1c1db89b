"""The plans of late: the accepted jobs of each, and announcements and refusals.

A hash for each plan, and a sorted set of all by their latest notes. The states of jobs are not noted: they follow from
their results, and from their checkpoints while they have none.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from breakwater.contracts.types import ms_from_time, time_from_ms
from breakwater.state.connection import Redis, read_hashes
from breakwater.state.executions import Claim

KEEP_S = 72 * 3600
_NEWEST = "bw:plans"
_BY = "\0"
"""First character of an announcement's field, and of no job's id; the name of the announcer follows."""


@dataclass(frozen=True, slots=True)
class NotedJob:
    """A job that was accepted for a plan."""

    accepted_at: datetime
    agent: str
    tenant: str | None
    owner: str | None
    """The name of the API key that it belongs to."""


@dataclass(frozen=True, slots=True)
class KnownPlan:
    """Notes of a plan; the results of its jobs are elsewhere."""

    jobs: Mapping[str, NotedJob] = field(default_factory=dict[str, NotedJob])
    """By id."""
    announced: Mapping[str, str | None] = field(default_factory=dict[str, str | None])
    """Reason of the refusal, if it was refused, by the announcer, that has had no job of it accepted since."""


class Plans:
    """The plans of the last 72 hours. All methods raise StateUnavailableError."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def announce(self, plan_id: str, by: str, refusal: str | None = None) -> None:
        """Notes a plan of which nothing was accepted: a draft, or one that was refused."""
        await self._note(plan_id, {_BY + by: json.dumps(refusal)})

    async def accept(self, plan_id: str, jobs: Mapping[str, NotedJob], by: str | None = None) -> None:
        """Notes jobs of a plan; it is no draft of their sender any more."""
        notes = {
            job_id: json.dumps([ms_from_time(job.accepted_at), job.agent, job.tenant, job.owner])
            for job_id, job in jobs.items()
        }
        await self._note(plan_id, notes, *(() if by is None else (_BY + by,)))

    async def withdraw(self, plan_id: str, job_ids: Collection[str]) -> None:
        """Forgets jobs that were not accepted after all."""
        await self._note(plan_id, {}, *job_ids)

    async def known(self, plan_ids: Iterable[str]) -> dict[str, KnownPlan]:
        """The notes of plans, by id."""
        wanted = list(plan_ids)
        found = await read_hashes(self._redis.client, list(map(_key, wanted)))
        return dict(zip(wanted, map(_known, found), strict=True))

    async def newest(self, limit: int) -> dict[str, datetime]:
        """The plans of which something was noted last, and when, the latest first."""
        found: Any = await self._redis.client.zrevrange(_NEWEST, 0, limit - 1, withscores=True)
        return {plan_id: time_from_ms(int(at_ms)) for plan_id, at_ms in found}

    async def begun(self, job_ids: Collection[str]) -> set[str]:
        """Those of some jobs without a result for which a model was called, or asked to be."""
        async with self._redis.client.pipeline(transaction=False) as pipe:
            for job_id in job_ids:
                pipe.hexists(Claim(job_id, "").key, "checkpoint")
            found: list[Any] = await pipe.execute() if job_ids else []
        return {job_id for job_id, has in zip(job_ids, found, strict=True) if has}

    async def _note(self, plan_id: str, notes: Mapping[str, str], *removed: str) -> None:
        async with self._redis.client.pipeline(transaction=False) as pipe:
            if removed:
                pipe.hdel(_key(plan_id), *removed)
            if notes:
                note_planned(pipe, plan_id, notes)
            await pipe.execute()


def note_planned(pipe: Any, plan_id: str, notes: Mapping[str, str]) -> None:
    """Adds notes of a plan's jobs to a pipeline, as texts that begin as those of `Plans.accept`."""
    now_ms, key = time.time_ns() // 1_000_000, _key(plan_id)
    pipe.hset(key, mapping=dict[Any, Any](notes))
    pipe.expire(key, KEEP_S)
    pipe.zadd(_NEWEST, {plan_id: now_ms})
    pipe.zremrangebyscore(_NEWEST, 0, now_ms - KEEP_S * 1000)


def _known(notes: Mapping[str, str]) -> KnownPlan:
    jobs: dict[str, NotedJob] = {}
    announced: dict[str, str | None] = {}
    for name, text in notes.items():
        note = json.loads(text)
        if name.startswith(_BY):
            announced[name[1:]] = note
        else:
            epoch_ms, agent, tenant, owner, *_ = note
            jobs[name] = NotedJob(time_from_ms(epoch_ms), agent, tenant, owner)
    return KnownPlan(jobs, announced)


def _key(plan_id: str) -> str:
    return f"bw:plan:{plan_id}"
