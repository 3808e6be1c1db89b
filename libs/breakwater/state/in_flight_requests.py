"""Calls whose response has not been sent, by what they ask, and which requests wait for each.

A client whose connection broke sends its request again, and finds the first one here instead of paying twice. And a
call is cancelled with its client only where no other request waits for it, at whichever process.
"""

from __future__ import annotations

from breakwater.state.connection import Redis, Script, ScriptCall

KEEP_S = 900
"""Longer than a client waits before it tries again: OpenAI's give up a call after ten minutes."""

_BEGIN = Script.named("unanswered_begin")
_LEAVE = Script.named("unanswered_leave")
_END = Script.named("unanswered_end")


class InFlightRequests:
    """The calls without a response. Two calls that ask the same are two; each is attached to once before any twice."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def begin(self, question: str, request: str, job_id: str, *, attaches: bool, longest_s: float) -> str:
        """Records that a request waits for a call.

        Args:
            question: stands for what is asked, and by whom.
            request: its id.
            job_id: of its own call.
            attaches: it waits for a call that asks the same, where there is one.
            longest_s: how long a call may take.

        Returns:
            The id of the call that it waits for.

        Raises:
            StateUnavailable: that can't be known now.
        """
        keep_s = KEEP_S + round(longest_s)
        arguments = [request, job_id, int(attaches), keep_s]
        [waits_for] = await self._redis.run([ScriptCall(_BEGIN, [_key(question)], arguments)])
        return waits_for

    async def leave(self, question: str, request: str, job_id: str, *, cancels: bool) -> bool:
        """Records that a request waits no longer for a call, which has no response.

        Args:
            question: as it began.
            request: its id.
            job_id: of the call that it waited for.
            cancels: the call is cancelled where nobody else waits for it: from now on nobody attaches to it.

        Returns:
            Whether nobody else waits for it.

        Raises:
            StateUnavailable: it keeps its place.
        """
        call = ScriptCall(_LEAVE, [_key(question)], [request, job_id, int(cancels), KEEP_S])
        return bool((await self._redis.run([call]))[0])

    async def end(self, question: str, job_id: str) -> None:
        """Forgets a call: its response is sent. Raises StateUnavailable."""
        await self._redis.run([ScriptCall(_END, [_key(question)], [job_id])])


def _key(question: str) -> str:
    return f"bw:unanswered-calls:{question}"
