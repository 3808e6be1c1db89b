"""The response cache, and in-flight deduplication: identical concurrent requests share one answer.

`bw:cache:…` holds the answer to a request, and `bw:flight:…` its leader: a lease, which ends by Redis' own clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from pydantic import JsonValue, TypeAdapter, ValidationError

from breakwater.jobs.contract.execution import Choice
from breakwater.kernel.redis.connection import Redis, Script, ScriptCommand
from breakwater.kernel.security.encryption import OFF, Cipher, DecryptionError
from breakwater.kernel.types import Timestamp

MAX_ANSWER_BYTES = 1_000_000
"""Of an answer as JSON. Redis holds all of them in memory, next to data that the plane can't do without."""

_ASK = Script.of("""
-- KEYS: answer, flight
-- Returns {'answer', text}, {'leader', 0} or {'follower', ms until the leader's lease ends}.
local answer, leader = redis.call('GET', KEYS[1]), redis.call('GET', KEYS[2])
if answer then return {'answer', answer} end
if leader and leader ~= ARGV[1] then return {'follower', redis.call('PTTL', KEYS[2])} end
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
return {'leader', 0}
""")
_LEAVE = Script.of("""
-- KEYS: flight, and the answer where there is one
if ARGV[2] then redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3]) end
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 1
""")


@dataclass(frozen=True, slots=True)
class CachedAnswer:
    """An answer, and where it came from. Its time is kept in milliseconds."""

    execution_id: str
    chosen_model: str | None
    output: JsonValue
    completed_at: Timestamp
    response: dict[str, JsonValue] | None = None
    finish_reason: str | None = None
    choices: tuple[Choice, ...] = ()


@dataclass(frozen=True, slots=True)
class Leader:
    """There is no cached answer, and the caller is to get it from the model."""


@dataclass(frozen=True, slots=True)
class Follower:
    """Another holder is getting the answer. Ask again; its lease ends in this many milliseconds, unless renewed."""

    for_ms: int


_STORED = TypeAdapter(CachedAnswer)


class AnswerCache:
    """The fleet's cached answers. A key is a digest of all that makes two requests identical."""

    def __init__(self, redis: Redis, cipher: Cipher = OFF) -> None:
        self._redis = redis
        self._cipher = cipher

    async def get(self, key: str) -> CachedAnswer | None:
        """The cached answer, or None. Raises StateUnavailableError."""
        text = cast(str | None, await self._redis.client.get(_answer(key)))
        return None if text is None else self._read(text)

    async def ask(self, key: str, holder: str | None, lease_ms: int) -> CachedAnswer | Leader | Follower | None:
        """The cached answer; where there is none, the role of the holder in getting it. One round trip.

        Args:
            key: of the request.
            holder: of the request, the same again after a crash. Asking again as the leader renews the lease. None: the
                request is not shared, and without an answer this returns None.
            lease_ms: how long the leader may be silent before the next one leads.

        Raises:
            StateUnavailableError: ask again.
        """
        if holder is None:
            return await self.get(key)
        [(verdict, detail)] = await self._redis.run(
            [ScriptCommand(_ASK, [_answer(key), _flight(key)], [holder, lease_ms])]
        )
        match verdict:
            case "answer":
                return self._read(detail) or Leader()
            case "leader":
                return Leader()
            case _:
                return Follower(int(detail))

    async def get_all(self, keys: Sequence[str]) -> list[CachedAnswer | None]:
        """The cached answers of several requests, each or None. Raises StateUnavailableError."""
        texts = cast(list[str | None], await self._redis.client.mget([_answer(key) for key in keys]))
        return [None if text is None else self._read(text) for text in texts]

    async def put_all(self, answers: Mapping[str, CachedAnswer], ttl_s: int) -> None:
        """Caches the answers of several requests, but for those that are too large. Raises StateUnavailableError."""
        async with self._redis.client.pipeline(transaction=False) as pipe:
            for key, cached in answers.items():
                if len(value := _STORED.dump_json(cached)) <= MAX_ANSWER_BYTES:
                    pipe.set(_answer(key), self._cipher.encrypt_line(value.decode()), ex=ttl_s)
            await pipe.execute()

    async def put(self, key: str, cached: CachedAnswer, ttl_s: int, flight: str | None) -> bool:
        """Caches an answer and ends the flight.

        Args:
            key: of the request.
            cached: the answer; errors are not to be cached.
            ttl_s: for how long.
            flight: its leader; None for a request that is not shared.

        Returns:
            False when it is too large to be cached; the flight is ended all the same.

        Raises:
            StateUnavailableError: it may or may not be cached; call again.
        """
        value = _STORED.dump_json(cached)
        if len(value) > MAX_ANSWER_BYTES:
            if flight is not None:
                await self.leave(key, flight)
            return False
        text = self._cipher.encrypt_line(value.decode())
        command = ScriptCommand(_LEAVE, [_flight(key), _answer(key)], [flight or "", text, ttl_s * 1000])
        await self._redis.run([command])
        return True

    async def leave(self, key: str, holder: str) -> None:
        """Ends a flight without an answer: the next caller of `ask` leads. Only the leader can.

        Raises:
            StateUnavailableError: call again, or let the lease end.
        """
        await self._redis.run([ScriptCommand(_LEAVE, [_flight(key)], [holder])])

    def _read(self, text: str) -> CachedAnswer | None:
        try:
            return _STORED.validate_json(self._cipher.decrypt_lines(text))
        except (ValidationError, DecryptionError):
            # Kept by another version, or under a key that is gone: as good as none, and soon replaced.
            return None


def _answer(key: str) -> str:
    return f"bw:cache:{key}"


def _flight(key: str) -> str:
    return f"bw:flight:{key}"
