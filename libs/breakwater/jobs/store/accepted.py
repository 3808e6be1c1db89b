"""Notes of accepted jobs, which distinguish a job that is not decided yet from an unknown one.

A note lives until its job is decided: the claim of the job takes it over into the execution's hash, which is forgotten
a minute after the end. Only notes of jobs that no worker claims stay for a day.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from typing import Any, cast

from breakwater.jobs.rules.current_jobs import waits_for_turn
from breakwater.jobs.rules.workers import LIVENESS
from breakwater.jobs.store.claim_states import claim_states
from breakwater.jobs.store.executions import SPAN_S, Claim, accepted_key
from breakwater.kernel.process import background
from breakwater.kernel.process.outage import Outage
from breakwater.kernel.redis.connection import Redis, Script, ScriptCommand, StateUnavailableError
from breakwater.kernel.types import ms_from_time, time_from_ms

KEEP_S = 24 * 3600

LINGER_S = 0.1
"""One round trip then serves all jobs that were accepted meanwhile."""

RETRY_S = 1.0
CLOSE_S = 1.0
_BATCH = 1_000

_NOTE = Script.of("""
-- Keeps notes of jobs: with the execution where a worker has claimed the job already, or ended it.
-- KEYS: notes of now, executions...   ARGV from the 2nd: ids and notes
for at = 2, #KEYS do
  local id, note = ARGV[2 * at - 2], ARGV[2 * at - 1]
  if redis.call('EXISTS', KEYS[at]) == 1 then
    redis.call('HSET', KEYS[at], 'note', note)
  else
    redis.call('HSET', KEYS[1], id, note)
  end
end
return redis.call('EXPIRE', KEYS[1], ARGV[1])
""")
_MAX_UNSAVED = 50_000
"""During an outage of Redis the oldest marks go first; the jobs themselves are safe on the bus."""


@dataclass(frozen=True, slots=True)
class JobStatus:
    """The state of a job that may not be decided yet."""

    agent: str | None
    """None if it was not accepted over HTTP within a day. The claim then names its tenant and owner."""
    accepted_at: datetime | None
    taken: bool
    """True if a worker has it, or had it and another one will take it over."""
    checkpoint: str | None
    """The progress that this worker saved last, as JSON."""
    tenant: str | None = None
    owner: str | None = None
    """The name of the API key that it belongs to."""
    digest: str | None = None
    """The digest of its content."""
    job_id: str | None = None
    """Its own id; None if that is its execution's or unknown."""

    @property
    def is_owner_known(self) -> bool:
        """Returns False if no owner and tenant may also mean that Redis has lost them."""
        return self.agent is not None or self.digest is not None


class AcceptedJobs:
    """Records accepted jobs for a day, without delaying the requests that accept them."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._outage = Outage("redis")
        self._unsaved: dict[str, str] = {}
        self._saving: asyncio.Task[None] | None = None

    def mark(
        self,
        execution_id: str,
        agent: str,
        *,
        job_id: str | None = None,
        at: datetime | None = None,
        tenant: str | None = None,
        owner: str | None = None,
        digest: str | None = None,
    ) -> None:
        """Records that a job was accepted, at a time or now. Never waits or fails: it is saved in the background."""
        note = [ms_from_time(at or datetime.now(UTC)), agent, tenant, owner, digest]
        if job_id not in (None, execution_id):
            note.append(job_id)
        self._unsaved[execution_id] = json.dumps(note)
        if len(self._unsaved) > _MAX_UNSAVED:
            del self._unsaved[next(iter(self._unsaved))]
        if self._saving is None or self._saving.done():
            self._saving = asyncio.create_task(self._save_all())

    async def status(self, execution_id: str, *, just_now: bool = True) -> JobStatus | None:
        """The state of a job that was accepted over HTTP and has not ended, or is running; None if it is unknown.

        Args:
            execution_id: of the job.
            just_now: it may have been accepted at this moment, which takes longer to find out.

        Raises:
            StateUnavailableError: that can't be known now.
        """
        try:
            status = await self._find(execution_id)
            if status is None and just_now:
                # Another process may have accepted the job, but not saved its note yet.
                await asyncio.sleep(2 * LINGER_S)
                status = await self._find(execution_id)
        except StateUnavailableError:
            if execution_id not in self._unsaved:
                raise
            return _status(self._unsaved[execution_id], taken=False, checkpoint=None)
        return status

    async def waits_for_turn(self, execution_id: str) -> bool:
        """Returns True if an accepted job waits for its turn to call a model. Raises StateUnavailableError."""
        now, [claim] = await claim_states(self._redis, [execution_id])
        return waits_for_turn(claim, now, LIVENESS.missed_s)

    async def note_dry_run(self, asked_id: str, execution_id: str) -> None:
        """Notes the execution of the newest dry run of an id, which takes no id. Raises StateUnavailableError."""
        await self._redis.client.set(_dry_run_key(asked_id), execution_id, ex=KEEP_S)

    async def dry_run(self, asked_ids: Iterable[str]) -> str | None:
        """The newest dry run of the first of some ids that has one. Raises StateUnavailableError."""
        dry_runs = await self._redis.client.mget([_dry_run_key(asked_id) for asked_id in asked_ids])
        return next((str(execution_id) for execution_id in dry_runs if execution_id is not None), None)

    async def close(self) -> None:
        """Saves the remaining notes, if Redis takes them immediately."""
        if self._saving is None:
            return
        await asyncio.wait([self._saving], timeout=CLOSE_S)
        await background.stop(self._saving)

    async def _find(self, execution_id: str) -> JobStatus | None:
        unsaved = self._unsaved.get(execution_id)  # before Redis is read: it may be saved meanwhile
        async with self._redis.client.pipeline(transaction=False) as pipe:
            key = Claim(execution_id, "").key
            pipe.exists(key)
            pipe.hmget(key, "checkpoint", "digest", "note", "tenant", "owner")
            for recent in recent_keys(time.time()):
                pipe.hget(recent, execution_id)
            answers: list[Any] = await pipe.execute()
        taken, (checkpoint, digest, taken_over, tenant, owner), *saved = answers
        notes: list[str | None] = [unsaved, taken_over, *saved]
        note = next((note for note in notes if note is not None), None)
        if note is None and not taken:
            return None
        status = _status(note, taken=bool(taken), checkpoint=checkpoint)
        if digest is None:
            return status
        if note is None:
            status = replace(status, tenant=tenant, owner=owner)
        return replace(status, digest=digest)

    async def _save_all(self) -> None:
        await asyncio.sleep(LINGER_S)
        while self._unsaved:
            batch = dict(islice(self._unsaved.items(), _BATCH))
            try:
                await self._save(batch)
            except StateUnavailableError as error:
                self._outage.note_failure(error)
                await asyncio.sleep(RETRY_S)
                continue
            self._outage.note_success()
            for execution_id in batch:
                self._unsaved.pop(execution_id, None)

    async def _save(self, notes: Mapping[str, str]) -> None:
        keys = [accepted_key(time.time()), *(Claim(execution_id, "").key for execution_id in notes)]
        flat = [part for note in notes.items() for part in note]
        await self._redis.run([ScriptCommand(_NOTE, keys, [KEEP_S + SPAN_S, *flat])])


@dataclass(frozen=True, slots=True)
class RememberedJob:
    """A job that was accepted over HTTP within a day, and not claimed by a worker."""

    execution_id: str
    agent: str
    accepted_at: datetime


async def lately_accepted(redis: Redis, before: datetime, limit: int) -> tuple[list[RememberedJob], int]:
    """Unclaimed jobs that were accepted in the day before a moment, the newest first, and the number of those left out.

    Where there are more than `limit`, these are of the latest hours, and of the earliest of those a random choice:
    Redis would answer no other client while it reads a hash of all jobs. Raises StateUnavailableError.
    """
    jobs: list[RememberedJob] = []
    remaining = limit
    left_out = 0
    for key in recent_keys(before.timestamp()):
        count: int = await cast(Any, redis.client.hlen(key))
        take = min(count, remaining)
        remaining -= take
        left_out += count - take
        flat: list[str] = await cast(Any, redis.client.hrandfield(key, take, withvalues=True)) if take else []
        for execution_id, note in zip(flat[::2], flat[1::2], strict=True):
            epoch_ms, agent, *_ = json.loads(note)
            jobs.append(RememberedJob(execution_id, agent, time_from_ms(epoch_ms)))
    jobs = [job for job in jobs if job.accepted_at < before]
    return sorted(jobs, key=lambda job: job.accepted_at, reverse=True), left_out


async def unclaimed_jobs(redis: Redis, jobs: Sequence[RememberedJob]) -> list[RememberedJob]:
    """The jobs that no worker holds, and that no dead worker held. Raises StateUnavailableError."""
    async with redis.client.pipeline(transaction=False) as pipe:
        for job in jobs:
            pipe.exists(Claim(job.execution_id, "").key)
        claimed: list[Any] = await pipe.execute()
    return [job for job, has in zip(jobs, claimed, strict=True) if not has]


def _dry_run_key(asked_id: str) -> str:
    return f"bw:dry-run:{asked_id}"


def _status(note: str | None, *, taken: bool, checkpoint: str | None) -> JobStatus:
    if note is None:
        return JobStatus(None, None, taken, checkpoint)
    epoch_ms, agent, *owner_fields = json.loads(note)
    return JobStatus(agent, time_from_ms(epoch_ms), taken, checkpoint, *owner_fields)


def recent_keys(epoch_s: float) -> list[str]:
    """The keys that hold the jobs of the last day, the current one first."""
    return [accepted_key(epoch_s - age * SPAN_S) for age in range(KEEP_S // SPAN_S + 1)]
