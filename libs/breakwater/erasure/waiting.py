"""Waits for what other processes do, which nobody tells of."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

POLL_S = 0.25


async def comes_true(condition: Callable[[], Awaitable[bool]], wait_s: float) -> bool:
    """Asks for a condition until it is true. Returns False if it is not after `wait_s`. Raises what it raises."""
    loop = asyncio.get_running_loop()
    ends = loop.time() + wait_s
    while not await condition():
        if loop.time() >= ends:
            return False
        await asyncio.sleep(POLL_S)
    return True
