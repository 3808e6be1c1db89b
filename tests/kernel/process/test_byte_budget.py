"""The memory for large messages: nobody takes what is not there, and nobody waits for what is."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakwater.kernel.process.byte_budget import ByteBudget, NoRoomError


async def test_who_comes_first_is_served_first_and_at_once_if_there_is_room() -> None:
    budget = ByteBudget(10)
    assert await budget.take(6) == 6
    order: list[int] = []

    async def take(size: int) -> None:
        async with budget.taking(size):
            order.append(size)

    waiting = [asyncio.create_task(take(size)) for size in (7, 1, 2)]
    await asyncio.sleep(0)
    assert order == [], "what would fit does not overtake"
    budget.give_back(6)
    await asyncio.gather(*waiting)
    assert order == [7, 1, 2]
    assert budget.taken == 0


async def test_who_gives_up_waiting_holds_up_nobody() -> None:
    budget = ByteBudget(10)
    await budget.take(8)
    first, second = (asyncio.create_task(budget.take(size)) for size in (5, 2))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await second == 2
    assert budget.taken == 10


async def test_more_than_there_is_takes_all_of_it_even_after_the_budget_shrinks() -> None:
    budget = ByteBudget(10)
    taken = await budget.take(12)
    assert taken == 10
    waiting = asyncio.create_task(budget.take(9))
    await asyncio.sleep(0)
    budget.resize(5)
    budget.give_back(taken)
    assert await waiting == 9


async def test_who_holds_some_and_needs_more_never_waits_for_others_that_do_the_same() -> None:
    budget = ByteBudget(10)
    first, second = await budget.take(5), await budget.take(5)
    for holding in (first, second):
        with pytest.raises(NoRoomError):
            await budget.take(3, holding=holding)
    budget.give_back(second)
    assert await budget.take(7, holding=first) == 7, "alone, it gets more than there is"
    waiting = asyncio.create_task(budget.take(1))
    await asyncio.sleep(0)
    assert not waiting.done()
    budget.give_back(7)
    assert await waiting == 1


@given(st.lists(st.tuples(st.integers(1, 12), st.booleans()), max_size=12))
def test_no_more_is_taken_than_there_is_and_all_is_given_back(wishes: list[tuple[int, bool]]) -> None:
    async def run() -> None:
        budget = ByteBudget(10)

        async def use(size: int) -> None:
            async with budget.taking(size):
                assert budget.taken <= 10
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(use(size)) for size, _ in wishes]
        await asyncio.sleep(0)
        for task, (_, gives_up) in zip(tasks, wishes, strict=True):
            if gives_up:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert budget.taken == 0

    asyncio.run(run())
