"""A Redis that counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from breakwater.kernel.redis.connection import Redis, ScriptCall


class CountingRedis(Redis):
    """Counts its round trips."""

    round_trips = 0

    async def run(self, calls: Sequence[ScriptCall]) -> list[Any]:
        self.round_trips += 1
        return await super().run(calls)
