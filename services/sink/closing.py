"""Sums up the calls of past months for totals, which count them for longer than ClickHouse has their attempts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from zoneinfo import ZoneInfo

from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.clickhouse.errors import AnalyticsUnavailableError, QueryError
from breakwater.kernel.nats.errors import BusError
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.process import background
from breakwater.kernel.process.outage import Outage
from breakwater.records.spend import close_spend

EVERY_S = 3_600.0


@dataclass(frozen=True, slots=True)
class SpendCloser:
    """Closes months. Any number of sinks may do it."""

    analytics: Analytics
    lookup: Lookup
    zone: ZoneInfo
    now: Callable[[], datetime]

    async def run(self) -> None:
        """Closes what can be closed, every hour, until cancelled."""
        outage = Outage("summing up past months")
        while True:
            await outage.run_logged(self.close, expected=(BusError, AnalyticsUnavailableError, QueryError))
            await asyncio.sleep(background.aligned_delay(EVERY_S))

    async def close(self) -> bool:
        """Closes the months of which EVENTS has no call any more. Returns False if there are none.

        Raises BusError, AnalyticsUnavailableError, QueryError: repeat it.
        """
        log = await self.lookup.facts(Stream.EVENTS)
        first = await self.lookup.next(Stream.EVENTS, "bw.attempts.>", max(log.first, 1))
        return await close_spend(self.analytics, self.zone, self.now() if first is None else first.stored_at)
