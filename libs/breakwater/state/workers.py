"""The heartbeats of workers: some are running, others have been silent for a moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from breakwater.state.connection import Redis, Script, ScriptCall, read_hashes

LATE_MS = 1_500
"""A heartbeat comes every second."""

FORGET_MS = 600_000
"""The claims of a worker that has been silent for so long have ended long ago."""

_KEY = "bw:workers"
_BEAT = Script.of("""
-- Takes the heartbeat of a worker, and names the others whose last one is older than it should be.
-- KEYS: workers: by id, the time of the last heartbeat in ms, and the NATS server that the worker was heard on
-- Returns how many are not late, this one included, and {{id, ms since its last heartbeat, server}…}
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
return {running, late}
""")


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
            StateUnavailableError: Redis does not answer.
        """
        [(running, late)] = await self._redis.run([ScriptCall(_BEAT, [_KEY], [worker, heard_on, LATE_MS, FORGET_MS])])
        return running, [LateWorker(one, int(silent_ms) / 1000, heard_on) for one, silent_ms, heard_on in late]

    async def forget(self, worker: str) -> None:
        """Removes a worker: it has stopped in order, or its jobs are taken over. Raises StateUnavailableError."""
        await cast(Any, self._redis.client.hdel(_KEY, worker))

    async def kept_for_s(self) -> float:
        """Seconds since Redis started, in which it lost no claim. Raises StateUnavailableError."""
        return float((await self._redis.client.info("server"))["uptime_in_seconds"])

    async def running(self) -> dict[str, str]:
        """The workers whose heartbeat is not late, by id: the NATS server that each was heard on, or an empty text.

        Raises:
            StateUnavailableError: Redis does not answer.
        """
        seconds, microseconds = cast(tuple[int, int], await cast(Any, self._redis.client.time()))
        [known] = await read_hashes(self._redis.client, [_KEY])
        since = seconds * 1000 + microseconds // 1000 - LATE_MS
        found = {worker: text.partition(" ") for worker, text in known.items()}
        return {worker: heard_on for worker, (at, _, heard_on) in found.items() if int(at) > since}
