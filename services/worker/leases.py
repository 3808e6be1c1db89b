"""What a worker holds for the jobs under way, kept for all of them by one task instead of one for each job."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from breakwater.bus.delivery import Delivery, still_held
from breakwater.bus.topology import ACK_WAIT_S
from breakwater.outage import Outages
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
        await asyncio.gather(self._keep_deliveries(), self._keep_claims())

    async def _keep_deliveries(self) -> None:
        while True:
            await asyncio.sleep(ACK_WAIT_S / 3)
            await still_held(tuple(self.deliveries))

    async def _keep_claims(self) -> None:
        while True:
            await asyncio.sleep(RENEW_EVERY_S)
            # Jobs that end during an outage are left out of the next try.
            await self._outages.retry_while_unavailable(lambda: self._executions.renew(self.claims))
            for renew in [renew for renew in self.claims.values() if renew is not None]:
                await renew()
