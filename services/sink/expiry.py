"""Empties old texts in ClickHouse, by agent and tenant, before the rows expire."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

import structlog

from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.clickhouse.errors import AnalyticsUnavailableError, QueryError
from breakwater.kernel.clickhouse.table import Layout
from breakwater.kernel.process import background
from breakwater.kernel.process.outage import Outage
from breakwater.records.metrics import SinkMetrics
from breakwater.records.settings import ClickHouse
from breakwater.records.texts import UnfinishedChangeError, expire_texts

EVERY_S = 3_600.0
AGAIN_S = 60.0
"""After a failure, which people are told of while it lasts."""
WORK = "emptying old texts"


@dataclass(frozen=True, slots=True)
class TextExpiry:
    """Empties what is too old. Any number of sinks may do it."""

    analytics: Analytics
    settings: Callable[[], ClickHouse]
    now: Callable[[], datetime]
    metrics: SinkMetrics

    async def run(self) -> None:
        """Looks for old texts every hour, and sooner after a failure, until cancelled."""
        outage = Outage(WORK)
        expected = (AnalyticsUnavailableError, QueryError, UnfinishedChangeError)
        while True:
            done = await outage.run_logged(self.expire, expected=expected)
            self.metrics.set_unavailable(WORK, yes=not done)
            await asyncio.sleep(background.aligned_delay(EVERY_S if done else AGAIN_S))

    async def expire(self) -> None:
        """Empties texts once. Raises as `expire_texts`: repeat it."""
        settings = self.settings()
        layout = Layout(settings.cluster)
        if count := await expire_texts(self.analytics, settings.text_days, self.now(), layout):
            structlog.get_logger().info("texts_expired", rows=count)
