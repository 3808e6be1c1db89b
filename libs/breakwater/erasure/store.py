"""The keys of a data subject in Redis: cached answers, dry runs, ids of callers, and counters of limits on the user."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Collection, Iterator, Sequence, Set
from pathlib import Path
from typing import Any, cast

import orjson
from redis.exceptions import ResponseError

from breakwater.erasure.rules import DataSubject, Key
from breakwater.erasure.waiting import comes_true
from breakwater.jobs.store.plans import VERSION, Plans
from breakwater.kernel.redis.connection import Redis
from breakwater.limits.rules.scopes import parts_of
from breakwater.limits.store.budgets import FILLED
from breakwater.limits.store.tasks import TRIPPED, task_named

PART = 500
_CACHE = "bw:cache:*"
_LIMITS = "bw:limits:*"
_THRESHOLD = re.compile(r"^announced:(.*)@\d+@\d+$")
"""The field of a threshold that was announced: its limit and its percentage come after the scope."""
_RATE = re.compile("^bw:limits:(?:(?:queue|waiters):bw:limits:)?(?:window:[^:]+|slots):")
"""The beginning of the keys of a limit on a rate; the scope comes after it."""
_NAMES = "bw:limits:names:"
"""The keys of the limits on rates that a caller's names have begun."""


class SubjectKeys:
    """Finds and deletes it. All methods raise StateUnavailableError, and may be repeated."""

    def __init__(self, redis: Redis, subject: DataSubject) -> None:
        self._redis = redis
        self._client: Any = redis.client
        self._subject = subject
        self._plans = Plans(redis)

    async def claimed(self, ids: Collection[str]) -> int:
        """The number of executions that a worker holds, or has just ended."""
        total = 0
        for part in _parts(sorted(ids)):
            async with self._client.pipeline(transaction=False) as pipe:
                pipe.time()
                for execution_id in part:
                    pipe.hmget(f"bw:execution:{execution_id}", "token", "digest", "ended", "lease_until")
                (seconds, _), *claims = await pipe.execute()
            for token, digest, ended, lease_until in claims:
                # The claim on a job that was taken over is kept for days.
                is_over = ended is not None and int(lease_until or 0) <= seconds * 1_000
                total += int(not is_over and (token is not None or digest is not None))
        return total

    async def answers(self, ids: Collection[str]) -> list[str]:
        """The keys of cached answers of their executions, and of encrypted ones, which name no execution."""
        keys: list[str] = []
        async for part in self._scan(_CACHE):
            values: list[str | None] = await self._client.mget(part)
            keys += [key for key, value in zip(part, values, strict=True) if _is_own(value, ids)]
        return keys

    async def dry_runs(self, ids: Collection[str]) -> list[str]:
        """The keys of the answers to their dry runs, and of notices for their jobs."""
        keys: list[str] = []
        for part in _parts(sorted(ids)):
            names = [f"bw:{kind}:{execution_id}" for execution_id in part for kind in ("dry-run", "cancel")]
            async with self._client.pipeline(transaction=False) as pipe:
                for name in names:
                    pipe.exists(name)
                keys += [name for name, exists in zip(names, await pipe.execute(), strict=True) if exists]
        return keys

    async def counters(self) -> list[tuple[str, str]]:
        """The fields of counters on the user, with their keys; no field for a whole key.

        Reserved amounts stay until they are zero.
        """
        fields: list[tuple[str, str]] = []
        async for part in self._scan(_LIMITS):
            for key in part:
                if _RATE.match(key):
                    fields += [(key, "")] if self._has_rate(key) else []
                elif key.startswith(_NAMES):
                    names = cast(list[str], await self._client.zrange(key, 0, -1))
                    fields += [(key, name) for name in names if self._has_rate(name)]
                elif await self._client.type(key) == "hash":
                    pairs = cast(AsyncIterator[tuple[str, str]], self._client.hscan_iter(key, count=1_000))
                    fields += [(key, name) async for name, value in pairs if self._has_counter(name, value)]
        return fields

    async def noted_ids(self, ids: Set[str], keys: Set[Key], shared: Set[Key]) -> list[tuple[str, str]]:
        """The fields with ids that callers chose in notes of plans, stopped tasks and claims.

        Of a plan that others share, or that has jobs which stay, only their own jobs. Of another, the number of changes
        stays: a change by a later job would else have the name of an earlier one, and be dropped as that.
        """
        fields: list[tuple[str, str]] = []
        for part in _parts([key for name, key in sorted(keys) if name == "plan_key"]):
            for plan_key, plan in (await self._plans.notes_of(part)).items():
                redis_key = f"bw:plan:{plan_key}"
                names: set[str] = plan.jobs.keys() & ids
                if ("plan_key", plan_key) not in shared and plan.jobs.keys() <= ids:
                    names = {*cast(list[str], await self._client.hkeys(redis_key))} - {VERSION}
                fields += [(redis_key, name) for name in sorted(names)]
        own_keys = keys - shared
        for name in cast(list[str], await self._client.zrange(TRIPPED, 0, -1)):
            task = task_named(name)
            is_theirs = ("task_key", task.task_key) in own_keys
            if is_theirs and await self._client.hexists(task.redis_key, "task_id"):
                fields.append((task.redis_key, "task_id"))
        of_claim = ("task_id", "note")
        for part in _parts(sorted(ids)):
            async with self._client.pipeline(transaction=False) as pipe:
                for execution_id in part:
                    pipe.hmget(f"bw:execution:{execution_id}", *of_claim)
                for execution_id, values in zip(part, await pipe.execute(), strict=True):
                    noted = (name for name, value in zip(of_claim, values, strict=True) if value is not None)
                    fields += [(f"bw:execution:{execution_id}", name) for name in noted]
        return fields

    async def delete(self, keys: Sequence[str], fields: Sequence[tuple[str, str]]) -> None:
        """Deletes keys, and what `counters` and `noted_ids` have returned."""
        for part in _parts(keys):
            await self._client.unlink(*part)
        for part in _parts(fields):
            async with self._client.pipeline(transaction=False) as pipe:
                for key, name in part:
                    if not name:
                        pipe.unlink(key)
                    elif key.startswith(_NAMES):
                        pipe.zrem(key, name)
                    else:
                        pipe.hdel(key, name)
                await pipe.execute()

    async def refuse_repairs(self) -> None:
        """Has repairs of counters refused that were computed before now."""
        if await self._client.exists(FILLED):
            await self._client.hincrby(FILLED, "repairs", 1)

    async def rewrite_files(self, wait_s: float) -> str | None:
        """Has Redis write its files anew, without what was deleted. Returns why it did not; None if it did."""
        try:
            settings = await self._client.config_get("appendonly", "save")
        except ResponseError as error:
            return f"Redis' files: its user may not ask for its settings ({error})"
        try:
            if settings.get("appendonly") == "yes":
                await self._client.bgrewriteaof()
            if settings.get("save"):
                await self._client.bgsave()
        except ResponseError as error:
            if "in progress" not in str(error):
                return f"Redis' files: {error}"

        async def are_written() -> bool:
            state = await self._client.info("persistence")
            flags = ("aof_rewrite_in_progress", "aof_rewrite_scheduled", "rdb_bgsave_in_progress")
            return not any(state.get(flag) for flag in flags)

        return None if await comes_true(are_written, wait_s) else "Redis' files: it is still writing them"

    async def folder(self) -> Path | None:
        """The folder of Redis' files, if its user may ask for it; it need not be on this machine."""
        try:
            return Path((await self._client.config_get("dir"))["dir"])
        except (ResponseError, KeyError):
            return None

    def _has_counter(self, name: str, value: str) -> bool:
        threshold = _THRESHOLD.match(name)
        scope = name.partition(":")[2] if threshold is None else threshold[1]
        return not (name.startswith("reserved") and value != "0") and self._subject.has_scope(parts_of(scope))

    def _has_rate(self, key: str) -> bool:
        return self._subject.has_scope(parts_of(_RATE.sub("", key)))

    async def _scan(self, pattern: str) -> AsyncIterator[list[str]]:
        part: list[str] = []
        async for key in cast(AsyncIterator[str], self._client.scan_iter(match=pattern, count=1_000)):
            part.append(key)
            if len(part) >= PART:
                yield part
                part = []
        if part:
            yield part


def _is_own(value: str | None, ids: Collection[str]) -> bool:
    if value is None:
        return False
    try:
        return orjson.loads(value)["execution_id"] in ids
    except (ValueError, KeyError, TypeError):
        return True  # encrypted


def _parts(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (items[start : start + PART] for start in range(0, len(items), PART))
