"""What all replicas know of people who are signing in: the key that sign-ins are signed with, and what was used."""

from __future__ import annotations

import hashlib
import secrets
from typing import cast

from breakwater.state.connection import Redis, translated

_KEY = "bw:openid:key"


class SignIns:
    """Sign-ins on their way. All methods raise StateUnavailable."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def key(self) -> bytes:
        """The key of this plane, which is made when it is first asked for."""
        async with translated(), self._redis.client.pipeline(transaction=False) as pipe:
            pipe.set(_KEY, secrets.token_hex(32), nx=True)
            pipe.get(_KEY)
            _, key = cast("tuple[object, str]", await pipe.execute())
        return bytes.fromhex(key)

    async def is_used(self, what: str) -> bool:
        """Whether it was used before."""
        async with translated():
            return bool(await self._redis.client.exists(_used(what)))

    async def use(self, what: str, lasts_s: int) -> bool:
        """Marks as used what may be used once; False where it was before. It is remembered for so long."""
        async with translated():
            return bool(await self._redis.client.set(_used(what), "1", nx=True, ex=lasts_s))


def _used(what: str) -> str:
    return f"bw:openid:used:{hashlib.sha256(what.encode()).hexdigest()}"
