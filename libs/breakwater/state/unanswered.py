"""Calls that were accepted and whose response has not been sent, by what they ask.

A client whose connection broke sends its request again, and finds the first one here instead of paying twice.
"""

from __future__ import annotations

from typing import Any, cast

from breakwater.state.connection import Redis, translated

KEEP_S = 900
"""Longer than a client waits before it tries again: OpenAI's give up a call after ten minutes."""


class Unanswered:
    """The ids of calls without a response. Two calls that ask the same are two; each is taken over once."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def add(self, question: str, job_id: str) -> None:
        """Records a call. Raises StateUnavailable.

        Args:
            question: stands for what is asked, and by whom.
            job_id: of the call.
        """
        async with translated(), self._redis.client.pipeline(transaction=False) as pipe:
            pipe.rpush(_key(question), job_id)
            pipe.expire(_key(question), KEEP_S)
            await pipe.execute()

    async def give_up(self, question: str, job_id: str) -> None:
        """Notes that nobody waits for a call any more: of those that ask the same, it is taken first.

        Raises:
            StateUnavailable: it keeps its place.
        """
        async with translated(), self._redis.client.pipeline(transaction=True) as pipe:
            pipe.lrem(_key(question), 1, job_id)
            pipe.lpush(_key(question), job_id)
            pipe.expire(_key(question), KEEP_S)
            await pipe.execute()

    async def take(self, question: str) -> str | None:
        """The id of a call that asks this, which is forgotten here; None if there is none.

        Raises:
            StateUnavailable: that can't be known now.
        """
        async with translated():
            return cast(str | None, await cast(Any, self._redis.client.lpop(_key(question))))

    async def remove(self, question: str, job_id: str) -> None:
        """Forgets a call: its response is sent. Raises StateUnavailable."""
        async with translated():
            await cast(Any, self._redis.client.lrem(_key(question), 1, job_id))


def _key(question: str) -> str:
    return f"bw:unanswered:{question}"
