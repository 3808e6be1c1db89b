"""Runs background tasks together, stops them, and schedules them sparingly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

AGAIN_S = 0.5
RESTART_S = 1.0
"""The pause before work that failed, by a bug or a lack of memory, begins again."""


def aligned_delay(every_s: float) -> float:
    """Returns the seconds until the next run of periodic work: 0.5 to 1.5 times its period.

    Work with the same period runs at the same moments, so that an idle process wakes once for all of it: waking up
    costs more than most of the work. The clock is the machine's, so other processes, and the servers that they query,
    wake at the same moments too.
    """
    left_s = every_s - asyncio.get_running_loop().time() % every_s
    return left_s if left_s >= every_s / 2 else left_s + every_s


async def run_together(*parts: Coroutine[Any, Any, None]) -> None:
    """Runs coroutines concurrently; none outlives this call, even if it is cancelled or one of them fails.

    `asyncio.gather` alone can leave coroutines running: it ends with the first one that was cancelled.
    """
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        await asyncio.gather(*tasks)
    finally:
        await stop(*tasks)


async def keep_doing(work: Callable[[], Coroutine[Any, Any, None]], *, restart_s: float = RESTART_S) -> None:
    """Does work until it ends or this is cancelled; if it raises, logs the error and begins the work again.

    Without this, a process whose background work has died would run on, seem healthy, and never do that work again.
    """
    while True:
        try:
            return await work()
        except Exception:  # noqa: BLE001  whatever it is, the work has to go on
            structlog.get_logger().exception(
                "background_work_failed", work=getattr(work, "__qualname__", type(work).__name__)
            )
        await asyncio.sleep(restart_s)


async def stop(*tasks: asyncio.Future[Any]) -> None:
    """Cancels tasks and returns once all have ended, even if this call is cancelled meanwhile.

    One cancellation is not enough: `asyncio.wait_for` of Python 3.11, with which redis-py sends commands, loses a
    cancellation that arrives just as its wait ends. The wait for an endless task would then never end.
    """
    cancelled: asyncio.CancelledError | None = None
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        try:
            await asyncio.wait(pending, timeout=AGAIN_S)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
