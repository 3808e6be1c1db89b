"""Ending tasks that do not end at the first word."""

from __future__ import annotations

import asyncio

from breakwater import background


async def test_a_task_that_loses_a_cancellation_ends_all_the_same() -> None:
    heard = 0

    async def deaf_at_first() -> None:
        nonlocal heard
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                heard += 1
                if heard == 2:
                    raise

    task = asyncio.create_task(deaf_at_first())
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await background.stop(task)
    assert (task.cancelled(), heard) == (True, 2)


async def test_tasks_that_have_ended_or_failed_are_no_trouble() -> None:
    async def fails() -> None:
        raise ValueError

    done, failed = asyncio.create_task(asyncio.sleep(0)), asyncio.create_task(fails())
    await asyncio.wait({done, failed})
    await background.stop(done, failed)
    await background.stop()
    assert isinstance(failed.exception(), ValueError)
