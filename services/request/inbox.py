"""What waits for the reader of a stream."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

MOST_UNSENT = 256
"""Steps that a reader may be behind. Beyond, its stream ends; the next one begins with all that matters."""


@dataclass(slots=True, eq=False)
class Inbox:
    """What was heard and is not sent yet, and why the stream is to end. Never waits for its reader."""

    messages: deque[bytes] = field(default_factory=deque[bytes])
    ending: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    stirred: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, message: bytes) -> None:
        """Takes what was heard."""
        if len(self.messages) >= MOST_UNSENT:
            self.end("the reader is too slow; connect again")
        else:
            self.messages.append(message)
            self.stirred.set()

    def end(self, why: str) -> None:
        """Ends the stream, with a word for its reader."""
        if not self.ending.done():
            self.ending.set_result(why)

    async def wait(self, timeout_s: float) -> None:
        """Until there is a message, or the time is up."""
        self.stirred.clear()
        if not self.messages:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(timeout_s, 0.0)):
                    await self.stirred.wait()
