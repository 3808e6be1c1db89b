"""The heartbeats of workers: which of them run, and which have not been heard of for a moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from breakwater.state.connection import Redis, Script, ScriptCall, translated

LATE_MS = 1_500
"""A heartbeat comes every second."""

FORGET_MS = 600_000
"""The claims of whoever has been silent for so long have ended long ago."""

_KEY = "bw:workers"
_BEAT = Script.named("worker_beat")


@dataclass(frozen=True, slots=True)
class LateWorker:
    """A worker whose heartbeat is late."""

    id: str
    silent_s: float
    """Since its last heartbeat, by Redis' clock."""
    heard_on: str
    """The NATS server that had its connection then; empty where none had."""


class Workers:
    """The workers of the plane."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def beat(self, worker: str, heard_on: str) -> tuple[int, list[LateWorker]]:
        """Leaves a worker's heartbeat.

        Returns:
            How many workers run, this one included, and the others whose heartbeat is late.

        Raises:
            StateUnavailable: Redis does not answer.
        """
        [(running, late)] = await self._redis.run([ScriptCall(_BEAT, [_KEY], [worker, heard_on, LATE_MS, FORGET_MS])])
        return running, [LateWorker(one, int(silent_ms) / 1000, heard_on) for one, silent_ms, heard_on in late]

    async def forget(self, worker: str) -> None:
        """Removes a worker: it has stopped in order, or its jobs are taken over. Raises StateUnavailable."""
        async with translated():
            await cast(Any, self._redis.client.hdel(_KEY, worker))

    async def kept_for_s(self) -> float:
        """For how long Redis has run, and so lost no claim. Raises StateUnavailable."""
        async with translated():
            return float((await self._redis.client.info("server"))["uptime_in_seconds"])

    async def running(self) -> dict[str, str]:
        """The workers whose heartbeat is not late, by id: the NATS server that each was heard on, or an empty text.

        Raises:
            StateUnavailable: Redis does not answer.
        """
        async with translated():
            seconds, microseconds = cast(tuple[int, int], await cast(Any, self._redis.client.time()))
            known = cast(dict[str, str], await cast(Any, self._redis.client.hgetall(_KEY)))
        since = seconds * 1000 + microseconds // 1000 - LATE_MS
        found = {worker: text.partition(" ") for worker, text in known.items()}
        return {worker: heard_on for worker, (at, _, heard_on) in found.items() if int(at) > since}
