"""What a worker holds for the jobs under way, kept for all of them by one task instead of one for each job."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from breakwater.bus.delivery import Delivery, still_held
from breakwater.bus.topology import ACK_WAIT_S
from breakwater.outage import Outage, Outages
from breakwater.state.executions import Claim, Executions

RENEW_EVERY_S = 20.0
"""A third of the lease of a claim."""


class Leases:
    """The deliveries and the claims of jobs under way. Jobs add theirs, and remove them when they end."""

    def __init__(self, executions: Executions, outages: Outages) -> None:
        self._executions = executions
        self._outages = outages
        self.deliveries: set[Delivery] = set()
        self.claims: dict[Claim, Callable[[], Awaitable[None]] | None] = {}
        """With what else is to be renewed for the job: its lead among those that ask the same."""

    async def run(self) -> None:
        """Keeps them until cancelled. The deliveries by themselves, as they are kept whether Redis answers or not."""
        await asyncio.gather(
            _keep("keeping deliveries", ACK_WAIT_S / 3, lambda: still_held(tuple(self.deliveries))),
            _keep("renewing claims", RENEW_EVERY_S, self._renew_claims),
        )

    async def _renew_claims(self) -> None:
        # Jobs that end during an outage are left out of the next try.
        await self._outages.retry_while_unavailable(lambda: self._executions.renew(self.claims))
        for renew in [renew for renew in self.claims.values() if renew is not None]:
            await renew()


async def _keep(what: str, every_s: float, work: Callable[[], Awaitable[None]]) -> None:
    """Does work every so often, whatever it raised the last time: all jobs of the worker depend on it."""
    outage = Outage(what)
    while True:
        await asyncio.sleep(every_s)
        await outage.survived(work, expected=())
