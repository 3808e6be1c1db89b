"""Reads that viewers share."""

from __future__ import annotations

import asyncio

import pytest

from breakwater.kernel.pages.shared_reads import MAX_ENTRIES, SharedReads


async def test_views_at_the_same_time_and_soon_after_share_one_read_of_each_key() -> None:
    now = 0.0
    reads: list[str] = []
    shared = SharedReads(lambda: now)

    async def view(key: str = "a") -> int:
        async def read() -> int:
            reads.append(key)
            await asyncio.sleep(0)
            return len(reads)

        return await shared.get(key, 10.0, read)

    assert await asyncio.gather(*(view() for _ in range(20))) == [1] * 20
    now = 9.9
    assert await view() == 1
    now = 10.0
    assert (await view(), await view("b")) == (2, 3)
    assert reads == ["a", "a", "b"]
    for number in range(2 * MAX_ENTRIES):
        await view(str(number))
    assert await view("a") == len(reads), "its memory is bounded"


async def test_a_read_that_fails_is_not_remembered() -> None:
    shared = SharedReads()

    async def fail() -> None:
        raise ValueError("ClickHouse is away")

    async def succeed() -> str:
        return "here"

    with pytest.raises(ValueError, match="away"):
        await shared.get("a", 10.0, fail)
    assert await shared.get("a", 10.0, succeed) == "here"
