"""Which jobs were accepted lately, so that "accepted, not decided" can be told from "never heard of"."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import islice
from typing import Any

from breakwater import background
from breakwater.state.connection import Redis, StateUnavailable, translated
from breakwater.state.executions import Holder
from breakwater.telemetry import Outage

KEEP_S = 24 * 3600
SPAN_S = 4 * 3600
"""Jobs of four hours share a set: a key for each job would take twice the memory, and Redis frees a set at once."""

LINGER_S = 0.1
"""One round trip then serves all jobs that were accepted meanwhile."""

RETRY_S = 1.0
CLOSE_S = 1.0
_BATCH = 1_000
_MOST_UNSAVED = 50_000
"""During an outage of Redis the oldest marks go first; the jobs themselves are safe on the bus."""


class Accepted:
    """Notes accepted jobs for a day, out of the way of whoever accepts them."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._outage = Outage("redis")
        self._unsaved: dict[str, None] = {}
        self._saving: asyncio.Task[None] | None = None

    def mark(self, execution_id: str) -> None:
        """Notes that a job was accepted. Never waits and never fails: it is saved in the background."""
        self._unsaved[execution_id] = None
        if len(self._unsaved) > _MOST_UNSAVED:
            del self._unsaved[next(iter(self._unsaved))]
        if self._saving is None or self._saving.done():
            self._saving = asyncio.create_task(self._save_all())

    async def known(self, execution_id: str) -> bool:
        """Whether the job was accepted within a day over HTTP, or is being worked on, however it came.

        Raises:
            StateUnavailable: that can't be known now.
        """
        if execution_id in self._unsaved or await self._found(execution_id):
            return True
        # Another process may have accepted it and not have saved it yet.
        await asyncio.sleep(2 * LINGER_S)
        return await self._found(execution_id)

    async def close(self) -> None:
        """Saves what is left, if Redis takes it at once."""
        if self._saving is None:
            return
        await asyncio.wait([self._saving], timeout=CLOSE_S)
        await background.stop(self._saving)

    async def _found(self, execution_id: str) -> bool:
        async with translated(), self._redis.client.pipeline(transaction=False) as pipe:
            pipe.exists(Holder(execution_id, 0, 0).key)
            for key in recent_keys(time.time()):
                pipe.sismember(key, execution_id)
            answers: list[Any] = await pipe.execute()
        return any(answers)

    async def _save_all(self) -> None:
        await asyncio.sleep(LINGER_S)
        while self._unsaved:
            batch = list(islice(self._unsaved, _BATCH))
            try:
                await self._save(batch)
            except StateUnavailable as error:
                self._outage.failed(error)
                await asyncio.sleep(RETRY_S)
                continue
            self._outage.worked()
            for execution_id in batch:
                self._unsaved.pop(execution_id, None)

    async def _save(self, execution_ids: Sequence[str]) -> None:
        key = recent_keys(time.time())[0]
        async with translated(), self._redis.client.pipeline(transaction=False) as pipe:
            pipe.sadd(key, *execution_ids)
            pipe.expire(key, KEEP_S + SPAN_S)
            await pipe.execute()


def recent_keys(epoch_s: float) -> list[str]:
    """The keys that hold the jobs of the last day, that of now first."""
    now = int(epoch_s) // SPAN_S
    return [f"bw:accepted:{(now - age) * SPAN_S}" for age in range(KEEP_S // SPAN_S + 1)]
