"""Jobs whose responses have not been sent, by their questions, and the number of requests that wait for each.

A client whose connection broke sends its request again, and finds the first one here instead of paying twice. And a
job is cancelled with its client only if no other request waits for it, at any process.
"""

from __future__ import annotations

from breakwater.kernel.redis.connection import Redis, Script, ScriptCommand

KEEP_S = 900
"""Longer than clients wait before they try again: OpenAI's give up after ten minutes."""

_BEGIN = Script.of("""
-- A request begins to wait for the answer to a question. One that repeats another attaches to the job with the fewest
-- requests, of which there may be none any more.
-- KEYS: jobs by the number of requests that wait for each; the job of this request
-- Returns the job that it waits for: its own, or an earlier one.
local job, attaches, keep_s = ARGV[1], ARGV[2] == '1', tonumber(ARGV[3])
local begun = redis.call('GET', KEYS[2])
if begun and redis.call('ZSCORE', KEYS[1], begun) then return begun end
local fewest = attaches and redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2]
if fewest then
  -- The latest of equals: a process that died may have left an earlier one behind.
  job = redis.call('ZREVRANGEBYSCORE', KEYS[1], fewest, fewest, 'LIMIT', 0, 1)[1]
end
redis.call('ZINCRBY', KEYS[1], 1, job)
redis.call('SET', KEYS[2], job, 'EX', keep_s)
if redis.call('TTL', KEYS[1]) < keep_s then redis.call('EXPIRE', KEYS[1], keep_s) end
return job
""")
_LEAVE = Script.of("""
-- A request no longer waits for its job, which has no answer yet. A job without any other request is kept for a
-- repeated one, or is forgotten, as it is about to be cancelled: a later request then has a job of its own.
-- KEYS: as above
-- Returns 1 if no request waits for the job any more, else 0.
local job, cancelled, keep_s = ARGV[1], ARGV[2] == '1', tonumber(ARGV[3])
local waiting = redis.call('ZSCORE', KEYS[1], job) -- none where it was answered to another request
if waiting and redis.call('DEL', KEYS[2]) == 1 then waiting = redis.call('ZINCRBY', KEYS[1], -1, job) end
if waiting and tonumber(waiting) > 0 then return 0 end
if cancelled then
  redis.call('ZREM', KEYS[1], job)
elseif waiting and redis.call('TTL', KEYS[1]) < keep_s then
  redis.call('EXPIRE', KEYS[1], keep_s)
end
return 1
""")


class InFlightRequests:
    """The jobs without a response. A repeated request attaches to the job with its question and the fewest requests."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def begin(self, question: str, request: str, job_id: str, *, attaches: bool, longest_s: float) -> str:
        """Records that a request waits for a job.

        Args:
            question: a digest of the question and its sender.
            request: its id.
            job_id: the id of its own job.
            attaches: it waits for another job with the same question, if there is one.
            longest_s: the longest time that a job may take.

        Returns:
            The id of the job that it waits for.

        Raises:
            StateUnavailableError: that can't be known now.
        """
        keep_s = KEEP_S + round(longest_s)
        command = ScriptCommand(_BEGIN, [_key(question), _of_request(request)], [job_id, int(attaches), keep_s])
        [waits_for] = await self._redis.run([command])
        return waits_for

    async def leave(self, question: str, request: str, job_id: str, *, cancels: bool) -> bool:
        """Records that a request no longer waits for a job that has no response yet.

        Args:
            question: as it began.
            request: its id.
            job_id: the id of the job that it waited for.
            cancels: the job is cancelled if no other request waits for it: from now on none attaches to it.

        Returns:
            True if no other request waits for it.

        Raises:
            StateUnavailableError: it keeps its place.
        """
        command = ScriptCommand(_LEAVE, [_key(question), _of_request(request)], [job_id, int(cancels), KEEP_S])
        return bool((await self._redis.run([command]))[0])

    async def end(self, question: str, job_id: str) -> None:
        """Forgets a job, whose response is sent. Raises StateUnavailableError."""
        await self._redis.client.zrem(_key(question), job_id)


def _key(question: str) -> str:
    return f"bw:unanswered-calls:{question}"


def _of_request(request: str) -> str:
    return f"bw:unanswered-requests:{request}"
