"""Waiting for Redis and NATS to come back: an outage of ours delays a job, and never fails it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from breakwater.bus.errors import BusUnavailable
from breakwater.state.connection import StateUnavailable
from breakwater.telemetry import Outage

Value = TypeVar("Value")

FIRST_DELAY_S = 0.1
LAST_DELAY_S = 2.0


class Patience:
    """Repeats what failed because a server is away. One for a process, so that an outage is told once."""

    def __init__(self) -> None:
        self._redis = Outage("redis")
        self._nats = Outage("nats_publish")

    async def redis(self, work: Callable[[], Awaitable[Value]]) -> Value:
        """Repeats work on Redis until it is done."""
        return await _repeat(work, StateUnavailable, self._redis)

    async def nats(self, work: Callable[[], Awaitable[Value]]) -> Value:
        """Repeats work on NATS until it is done. Only for work that may be done twice."""
        return await _repeat(work, BusUnavailable, self._nats)

    async def both(self, work: Callable[[], Awaitable[Value]]) -> Value:
        """Repeats work on Redis and NATS until it is done. Only for work that may be done twice."""
        return await self.redis(lambda: self.nats(work))


async def _repeat(work: Callable[[], Awaitable[Value]], away: type[Exception], outage: Outage) -> Value:
    delay_s = FIRST_DELAY_S
    while True:
        try:
            value = await work()
        except away as error:
            outage.failed(error)
        else:
            outage.worked()
            return value
        await asyncio.sleep(delay_s)
        delay_s = min(delay_s * 2, LAST_DELAY_S)
