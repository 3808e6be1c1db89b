"""A Redis that counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from breakwater.kernel.redis.connection import Redis, ScriptCommand


class CountingRedis(Redis):
    """Counts its round trips."""

    round_trips = 0

    async def run(self, commands: Sequence[ScriptCommand]) -> list[Any]:
        self.round_trips += 1
        return await super().run(commands)
