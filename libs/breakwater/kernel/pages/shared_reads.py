"""Reads that all viewers of the console share for some seconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")

MAX_ENTRIES = 200


class SharedReads:
    """Values that were read lately. Views at the same moment wait for one read, and views soon after it read nothing.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._values: dict[Hashable, tuple[float, Any]] = {}
        """The time of the read and its value, by key; in the order of the reads."""
        self._locks: dict[Hashable, asyncio.Lock] = {}

    async def get(self, key: Hashable, max_age_s: float, read: Callable[[], Awaitable[T]]) -> T:
        """Returns the value of a key, or reads it if it is older than `max_age_s`. Raises what `read` raises."""
        lock = self._locks.setdefault(key, asyncio.Lock())
        async with lock:
            read_at, value = self._values.get(key, (0.0, None))
            if key in self._values and self._clock() - read_at < max_age_s:
                return value
            try:
                value = await read()
            except BaseException:
                if key not in self._values:
                    self._locks.pop(key, None)
                raise
            self._values.pop(key, None)
            self._values[key] = self._clock(), value
            while len(self._values) > MAX_ENTRIES:
                oldest = next(iter(self._values))
                del self._values[oldest]
                self._locks.pop(oldest, None)
            return value
