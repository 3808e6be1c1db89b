"""The large bodies of a worker's jobs: read from the object store, and removed with the end of the job."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime

from breakwater.jobs.contract.execution import Result
from breakwater.kernel.nats.bodies import BodyReader, BodyReference, BodyWriter, Leftovers
from breakwater.kernel.nats.errors import BusError, BusUnavailableError
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.process import background
from breakwater.kernel.process.byte_budget import ByteBudget
from breakwater.kernel.process.outage import Outage

LEFTOVERS_EVERY_S = 1800.0


class Bodies:
    """The object store of large bodies, and this process's budget of memory for them."""

    def __init__(self, publisher: Publisher, lookup: Lookup, in_memory_bytes: int) -> None:
        self.reader = BodyReader(lookup)
        self.budget = ByteBudget(in_memory_bytes)
        self._writer = BodyWriter(publisher)
        self._leftovers = Leftovers(lookup, self._writer)
        self._outage = Outage("leftovers of large bodies")

    async def remove(self, body: BodyReference, result: Result) -> None:
        """Removes the body of a job that has ended, unless a dead letter has it.

        If NATS does not respond, the body is left over: the job has ended, and must not wait for that.
        """
        if result.status == "dead_lettered":
            try:
                # This worker before a crash, or another one, may have written the dead letter.
                if await self.reader.is_kept(body):
                    return
            except BusUnavailableError:
                return
        await self._writer.remove_if_possible(body.name)

    async def remove_leftovers(self, now: Callable[[], datetime]) -> None:
        """Removes what no job and no dead letter has, regularly until cancelled."""
        while True:
            await asyncio.sleep(background.aligned_delay(LEFTOVERS_EVERY_S))
            await self._outage.run_logged(lambda: self._leftovers.remove(now()), expected=BusError)
