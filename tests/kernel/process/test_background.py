"""Ending tasks that do not end at the first word, and turns that come together."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from breakwater.kernel.process import background


class LosesCancellations:
    """Goes on for ever, and loses the first cancellations."""

    def __init__(self, lost: int = 1) -> None:
        self._lost, self.heard = lost, 0

    async def run(self) -> None:
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.heard += 1
                if self.heard > self._lost:
                    raise


async def test_a_task_that_loses_a_cancellation_ends_all_the_same() -> None:
    deaf_at_first = LosesCancellations()
    task = asyncio.create_task(deaf_at_first.run())
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await background.stop(task)
    assert (task.cancelled(), deaf_at_first.heard) == (True, 2)


async def test_work_that_raises_is_logged_and_begins_again() -> None:
    begun: list[int] = []

    async def work() -> None:
        begun.append(len(begun))
        if len(begun) < 3:
            raise MemoryError("no memory is left for now")

    with capture_logs() as logs:
        await background.keep_doing(work, restart_s=0)
    assert begun == [0, 1, 2]
    assert [entry["event"] for entry in logs] == ["background_work_failed"] * 2


async def test_ending_tasks_is_not_given_up_when_it_is_cancelled() -> None:
    deaf_at_first = LosesCancellations(2)
    task = asyncio.create_task(deaf_at_first.run())
    await asyncio.sleep(0)
    stopping = asyncio.create_task(background.stop(task))
    await asyncio.sleep(0)
    stopping.cancel()
    async with asyncio.timeout(60):
        await asyncio.wait({stopping})
    assert (task.cancelled(), stopping.cancelled(), deaf_at_first.heard) == (True, True, 3)


@pytest.mark.parametrize("fails", [False, True])
async def test_no_part_outlives_those_it_was_run_with(fails: bool) -> None:
    deaf_at_first, begun = LosesCancellations(), asyncio.Event()

    async def other() -> None:
        begun.set()
        if fails:
            raise ValueError
        await asyncio.sleep(60)

    together = asyncio.create_task(background.run_together(other(), deaf_at_first.run()))
    await begun.wait()
    async with asyncio.timeout(60):
        await (asyncio.wait({together}) if fails else background.stop(together))
    assert deaf_at_first.heard == 2
    assert together.cancelled() is not fails


async def test_tasks_that_have_ended_or_failed_are_no_trouble() -> None:
    async def fails() -> None:
        raise ValueError

    done, failed = asyncio.create_task(asyncio.sleep(0)), asyncio.create_task(fails())
    await asyncio.wait({done, failed})
    await background.stop(done, failed)
    await background.stop()
    assert isinstance(failed.exception(), ValueError)


@given(now=st.floats(0, 1e6), period=st.sampled_from([0.05, 1.0, 2.0, 7.0]))
def test_all_with_the_same_period_have_their_turn_at_the_same_moments(now: float, period: float) -> None:
    class Loop(asyncio.SelectorEventLoop):
        def time(self) -> float:
            return now

    loop = Loop()

    async def asked() -> float:
        return background.aligned_delay(period)

    left_s = loop.run_until_complete(asked())
    loop.close()
    assert period / 2 <= left_s < period * 1.5 + 1e-9
    turns = (now + left_s) / period
    assert turns == pytest.approx(round(turns), abs=1e-6)
