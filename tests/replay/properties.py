"""Properties that hold a part of the replay beside the scripts in a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from breakwater.kernel.redis.connection import Redis

Steps = list[tuple[Any, ...]]


def check_beside_redis(
    url: str, steps: st.SearchStrategy[tuple[Any, ...]], agree: Callable[[Redis, Steps], Awaitable[None]], times: int
) -> None:
    """Takes made-up steps, each time in an empty Redis, with `agree`, which raises where the two differ.

    Args:
        url: the server, which is emptied.
        steps: a step.
        agree: takes the steps in both.
        times: how many times as often as properties usually are.
    """
    with asyncio.Runner() as runner:
        redis = Redis(url)

        async def on_empty(made_up: Steps) -> None:
            await redis.client.flushall()
            await agree(redis, made_up)

        @settings(max_examples=times * settings.default.max_examples)
        @given(st.lists(steps, min_size=5, max_size=25))
        def holds(made_up: Steps) -> None:
            runner.run(on_empty(made_up))

        try:
            holds()
        finally:
            runner.run(redis.close())
