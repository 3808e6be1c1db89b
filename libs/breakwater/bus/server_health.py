"""What the servers say of themselves: whether one can't write a stream any more, as its disk was full.

A server that fails to write a stream takes nothing more into it until it is started again, also when its disk has space
by then. It does not refuse: whoever publishes gets no answer.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import dataclass

import nats.errors
from nats.aio.client import Client

from breakwater.bus.permissions import HEALTH

ANSWERS_WITHIN_S = 0.5

_WRITE_ERROR = " write error: "

RESTART = "Make space on its disk, then restart it: it takes nothing into that stream before."


@dataclass(frozen=True, slots=True)
class Unhealthy:
    """A server that is not well."""

    server: str
    error: str
    """What it says is wrong."""

    @property
    def cannot_write(self) -> bool:
        """Whether a stream could not be written, which lasts until the server is started again."""
        return _WRITE_ERROR in self.error

    @property
    def in_short(self) -> str:
        """Without the path on its disk, which is for its operators alone."""
        what, _, why = self.error.partition(_WRITE_ERROR)
        return f"{what} can't be written: {why.rpartition(': ')[2]}" if why else what


async def unhealthy_servers(client: Client) -> tuple[Unhealthy, ...]:
    """Those of the cluster that are not well. None where no server answers, or this user may not ask."""
    found: list[Unhealthy] = []
    with suppress(TimeoutError, nats.errors.Error, OSError, ValueError):
        inbox = client.new_inbox()
        answers = await client.subscribe(inbox)
        try:
            await client.publish(HEALTH, b"", reply=inbox)
            async with asyncio.timeout(ANSWERS_WITHIN_S):
                async for answer in answers.messages:  # how many servers there are is not known
                    said = json.loads(answer.data or b"{}")  # empty where nobody answers
                    if error := said.get("data", {}).get("error"):
                        found.append(Unhealthy(said["server"]["name"], error))
        finally:
            await answers.unsubscribe()
    return tuple(found)
