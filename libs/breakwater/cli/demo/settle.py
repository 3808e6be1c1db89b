"""Waiting until all that was handed in has gone its way through the plane, and nothing is on its way any more."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from nats.aio.client import Client

from breakwater.bus.survey import survey
from breakwater.bus.topology import Plan

LOOK_EVERY_S = 0.25

Look = Callable[[], Coroutine[Any, Any, list[str]]]
"""Tells what is still on its way, in words; nothing when all is where it belongs."""


async def until_settled(look: Look, *, deadline_s: float) -> list[str]:
    """Looks again and again until nothing is on its way, twice in a row.

    Once is not enough: what has left one place may reach the next one just after that was looked at.

    Returns:
        What was still on its way at the deadline, in words; empty when all settled.
    """
    deadline, calm = time.monotonic() + deadline_s, 0
    while True:
        left = await look()
        calm = 0 if left else calm + 1
        if calm == 2:
            return []
        if time.monotonic() > deadline:
            return left
        await asyncio.sleep(LOOK_EVERY_S)


async def on_the_bus(client: Client, plan: Plan) -> list[str]:
    """Which consumers have something to do yet.

    Args:
        client: a connection of the administrator's.
        plan: what of the config shapes the bus.
    """
    found = await survey(client, plan)
    return [
        f"{consumer.name}: {_count(consumer.waiting)} waiting, {_count(consumer.in_work)} in work"
        for consumer in found.consumers
        if consumer.waiting != 0 or consumer.in_work != 0
    ]


def _count(number: int | None) -> str:
    return "unknown" if number is None else str(number)
