"""What runs beside the work: how it is run, and how it is ended."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

AGAIN_S = 0.5


def aligned_delay(every_s: float) -> float:
    """How long until what is done every so many seconds is done again: half to one and a half times as long.

    All that has the same period has its turn at the same moments, so that an idle process is woken once for all of it:
    to wake it costs more than most of what it then does. The clock is the machine's, so other processes and the servers
    that they ask are woken at the same moments, too.
    """
    left_s = every_s - asyncio.get_running_loop().time() % every_s
    return left_s if left_s >= every_s / 2 else left_s + every_s


async def run_together(*parts: Coroutine[Any, Any, None]) -> None:
    """Runs parts side by side until they have ended; none outlives this, also if it is cancelled or one of them fails.

    `asyncio.gather` alone would leave one behind: it ends with the first part that was cancelled.
    """
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        await asyncio.gather(*tasks)
    finally:
        await stop(*tasks)


async def stop(*tasks: asyncio.Task[Any]) -> None:
    """Cancels tasks, and returns when they have ended, however they did, also if this is cancelled meanwhile.

    Once is not enough: `asyncio.wait_for` of Python 3.11, which redis-py sends commands with, loses a cancellation that
    comes at the moment its own waiting is over. A task that goes on for ever would then be waited for for ever.
    """
    cancelled: asyncio.CancelledError | None = None
    while left := [task for task in tasks if not task.done()]:
        for task in left:
            task.cancel()
        try:
            await asyncio.wait(left, timeout=AGAIN_S)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
