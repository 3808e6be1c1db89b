"""A budget of memory: how many bytes of large messages a process holds at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from breakwater.kernel.errors import BreakwaterError


class NoRoomError(BreakwaterError):
    """The budget has too few bytes left for somebody who must not wait for them."""


class ByteBudget:
    """Bytes that may be taken until they are given back. Whoever finds too few of them waits, in order of arrival."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.taken = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, size: int, *, holding: int = 0) -> int:
        """Takes `size` bytes, all at once and at most the whole budget. Returns how many to give back.

        Whoever is `holding` bytes already never waits for more: it might wait for another that does the same.

        Raises NoRoomError: it would have to wait.
        """
        size = min(size, self.total)
        if holding:
            if self.taken + size > self.total and self.taken > holding:
                raise NoRoomError
            self.taken += size
        elif self._waiting or self.taken + size > self.total:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((size, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.cancelled():
                    # Those behind it may want less.
                    self._serve()
                else:
                    self.give_back(size)
                raise
        else:
            self.taken += size
        return size

    def give_back(self, size: int) -> None:
        """Gives bytes back, to those that wait for them."""
        self.taken -= size
        self._serve()

    @asynccontextmanager
    async def taking(self, size: int) -> AsyncGenerator[None]:
        """Holds `size` bytes while the block runs."""
        taken = await self.take(size)
        try:
            yield
        finally:
            self.give_back(taken)

    def resize(self, total: int) -> None:
        """Sets another total. What is taken stays taken."""
        self.total = total
        self._serve()

    def _serve(self) -> None:
        while self._waiting:
            size, turn = self._waiting[0]
            if turn.cancelled():
                self._waiting.popleft()
                continue
            # After `resize`, the first in line may want more than there is in all.
            if self.taken and self.taken + size > self.total:
                return
            self._waiting.popleft()
            self.taken += size
            turn.set_result(None)
