"""Ending what runs beside the work."""

from __future__ import annotations

import asyncio
from typing import Any

AGAIN_S = 0.5


async def stop(*tasks: asyncio.Task[Any]) -> None:
    """Cancels tasks, and returns when they have ended, however they did.

    Once is not enough: `asyncio.wait_for` of Python 3.11, which redis-py sends commands with, loses a cancellation that
    comes at the moment its own waiting is over. A task that goes on for ever would then be waited for for ever.
    """
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=AGAIN_S)
