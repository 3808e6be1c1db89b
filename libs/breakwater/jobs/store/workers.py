"""The heartbeats of workers: some are running, others have been silent for a moment."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, cast

from breakwater.jobs.rules.workers import LIVENESS, Liveness
from breakwater.kernel.redis.connection import KEPT_SINCE, Redis, Script, ScriptCommand, read_hashes

FORGET_MS = 600_000
"""A worker that is silent for this long is forgotten: its claims have ended long ago."""

WORKERS = "bw:workers"
"""The key of the last heartbeat of each worker: by its id, the time in ms, and the NATS server that it was heard on."""

_KEYS = [WORKERS, KEPT_SINCE]
_BEAT = Script.of("""
-- Takes the heartbeat of a worker, and names the others whose last one is older than it should be.
-- KEYS: workers: by id, the time of the last heartbeat in ms, and the NATS server that the worker was heard on;
-- since when Redis has its data
-- Returns how many are not late, this one included; {{id, ms since its last heartbeat, server}…}; and since when Redis
-- has its data
local worker, server, late_ms, forget_ms = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local known, late, running = redis.call('HGETALL', KEYS[1]), {}, 1
for i = 1, #known, 2 do
  local at, heard_on = string.match(known[i + 1], '^(%d+) (.*)$')
  local silent_ms = now - at
  if silent_ms > forget_ms then
    redis.call('HDEL', KEYS[1], known[i])
  elseif known[i] ~= worker and silent_ms > late_ms then
    late[#late + 1] = {known[i], silent_ms, heard_on}
  elseif known[i] ~= worker then
    running = running + 1
  end
end
redis.call('HSET', KEYS[1], worker, string.format('%d %s', now, server))
redis.call('SET', KEYS[2], now, 'NX')
return {running, late, redis.call('GET', KEYS[2])}
""")


@dataclass(frozen=True, slots=True)
class LateWorker:
    """A worker whose heartbeat is late."""

    id: str
    silent_s: float
    """Seconds since its last heartbeat, by Redis' clock."""
    heard_on: str
    """The NATS server that it was connected to then; empty if unknown."""


class Workers:
    """The workers of the plane."""

    def __init__(self, redis: Redis, liveness: Liveness = LIVENESS) -> None:
        self._redis = redis
        self._late_ms = liveness.late_ms
        self.was_emptied = False
        """True if Redis may have lost data between the last two heartbeats."""
        self._kept_since: str | None = None

    @property
    def kept_since_ms(self) -> int:
        """The time since which Redis has its data, as of the last heartbeat; 0 before the first one."""
        return int(self._kept_since or 0)

    async def beat(self, worker: str, heard_on: str) -> tuple[int, list[LateWorker]]:
        """Records a worker's heartbeat.

        Returns:
            How many workers run, this one included, and the others whose heartbeat is late.

        Raises:
            StateUnavailableError: Redis does not answer.
        """
        [(running, late, kept_since)] = await self._redis.run(
            [ScriptCommand(_BEAT, _KEYS, [worker, heard_on, self._late_ms, FORGET_MS])]
        )
        self.was_emptied = self._kept_since not in {None, kept_since}
        self._kept_since = kept_since
        return running, [
            LateWorker(late_worker, int(silent_ms) / 1000, heard_on) for late_worker, silent_ms, heard_on in late
        ]

    async def forget(self, worker: str) -> None:
        """Removes a worker that has stopped in order, or whose jobs were taken over. Raises StateUnavailableError."""
        await cast(Any, self._redis.client.hdel(WORKERS, worker))

    async def kept_for_s(self) -> float:
        """The seconds since Redis started or was emptied, in which it lost no claim. Raises StateUnavailableError."""
        info, age_s = await asyncio.gather(self._redis.client.info("server"), self.age_of_data_s())
        return min(float(info["uptime_in_seconds"]), age_s)

    async def age_of_data_s(self) -> float:
        """The seconds since Redis was last empty; 0 if it is. Raises StateUnavailableError."""
        since_ms, (seconds, _) = await asyncio.gather(self._redis.client.get(KEPT_SINCE), self._redis.client.time())
        return 0.0 if since_ms is None else float(seconds) - int(since_ms) / 1000

    async def have_returned(self, since_ms: int) -> bool:
        """Returns True if each worker that was heard before a time has been heard after it, or counts as stopped.

        Raises:
            StateUnavailableError: Redis does not answer.
        """
        [texts] = await read_hashes(self._redis.client, [WORKERS])
        return all(int(text.partition(" ")[0]) >= since_ms for text in texts.values())

    async def running(self) -> dict[str, str]:
        """The workers whose heartbeat is not late, by id: the NATS server that each was heard on, or an empty text.

        Raises:
            StateUnavailableError: Redis does not answer.
        """
        seconds, microseconds = cast(tuple[int, int], await cast(Any, self._redis.client.time()))
        [texts] = await read_hashes(self._redis.client, [WORKERS])
        since = seconds * 1000 + microseconds // 1000 - self._late_ms
        heartbeats = {worker: text.partition(" ") for worker, text in texts.items()}
        return {worker: heard_on for worker, (at, _, heard_on) in heartbeats.items() if int(at) > since}
