"""The room in RESPONSES: each owner has a share of it, and responses under way are never dropped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from breakwater.kernel.redis.connection import Redis, ScriptCommand, scripts_of

SHARE = 1 / 4
"""Of the stream: what one owner may store within ten minutes, and while any response is under way."""

WINDOW = 3 / 4
"""Of the stream: what all may store while a response is under way. The rest is for chunks that are not counted yet."""

MESSAGE_BYTES = 256
"""The bytes that NATS stores with a message: subject, headers, and an entry of its own."""

COUNTED_BYTES = 256 * 1024
"""The amount of new chunks at which they are counted."""

_STORED = "bw:responses:stored"
_UNDER_WAY = "bw:responses:under-way"
_LUA = scripts_of(__file__)


@dataclass(frozen=True, slots=True)
class NoRoom:
    """A response that may not be stored now.

    Attributes:
        why: the owner has used its share, or the stream would drop a response that is under way.
        oldest: the execution that has been under way for longest; None if nothing is under way.
    """

    why: Literal["share", "under_way"]
    oldest: str | None


class ResponseRoom:
    """Counts what is stored in RESPONSES, and notes which responses are under way."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def take(self, owner: str, size: int, max_bytes: int) -> NoRoom | None:
        """Takes room for the request of a response. Raises StateUnavailableError.

        Args:
            owner: whose share it takes.
            size: of the request, in bytes.
            max_bytes: of the stream.

        Returns:
            None if there was room.
        """
        limits = [int(max_bytes * SHARE), int(max_bytes * WINDOW)]
        command = ScriptCommand(_LUA["take"], [_STORED, _of(owner), _UNDER_WAY], [size, *limits])
        [(verdict, oldest)] = await self._redis.run([command])
        return None if verdict == "taken" else NoRoom(verdict, oldest or None)

    async def begin(self, execution_id: str) -> None:
        """Notes that a response is under way. Raises StateUnavailableError."""
        await self._redis.run([ScriptCommand(_LUA["begin"], [_UNDER_WAY], [execution_id])])

    async def finish(self, execution_id: str) -> None:
        """Notes that a response has ended. Raises StateUnavailableError."""
        await self._redis.run([ScriptCommand(_LUA["finish"], [_UNDER_WAY], [execution_id])])

    # Of the worker, which needs no round trip for them: all of it joins its next one.

    def begin_soon(self, execution_id: str) -> None:
        """Notes that a response is under way."""
        self._redis.run_with_next([ScriptCommand(_LUA["begin"], [_UNDER_WAY], [execution_id])])

    def count_soon(self, owner: str, size: int) -> None:
        """Counts chunks that were stored."""
        self._redis.run_with_next([ScriptCommand(_LUA["count"], [_STORED, _of(owner)], [size])])

    def finish_soon(self, execution_id: str) -> None:
        """Notes that a response has ended."""
        self._redis.run_with_next([ScriptCommand(_LUA["finish"], [_UNDER_WAY], [execution_id])])


def _of(owner: str) -> str:
    return f"{_STORED}:{owner}"
