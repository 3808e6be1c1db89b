"""Watches agents for anomalies: every minute, the leading alerter asks ClickHouse about all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial

import structlog

from breakwater.alerts.contract import Alert
from breakwater.alerts.rules.anomaly import (
    FIGURES,
    TURNED_OFF,
    Baseline,
    Place,
    is_watched,
    open_anomalies,
    signals,
    turned_off_signals,
    unwatched_signals,
)
from breakwater.alerts.rules.signals import Signal
from breakwater.alerts.settings import Alerts
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.clickhouse.errors import AnalyticsUnavailableError, QueryError
from breakwater.kernel.nats.errors import BusError
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.process.outage import Outage
from breakwater.records.anomalies import GRACE, baselines, latest_minutes
from breakwater.services.alerter.incident_recorder import IncidentRecorder

MINUTE_S = 60.0
RETRY_S = 5.0
MAX_FAILURES = 3
"""Failed questions in a row that open an incident: a restart of ClickHouse fails fewer."""
SINK = "sink-events"
"""The consumer of EVENTS whose messages ClickHouse has."""
LEARNING_PAUSE = 100
"""Baselines are learned again after this many times as long as that took, so they take 1 % of the time at most."""


class AnomalyWatch:
    """Opens and resolves the incidents of agents whose minutes are far from their baselines."""

    def __init__(
        self,
        analytics: Analytics | None,
        alerts: Alerts,
        incidents: IncidentRecorder,
        lookup: Lookup,
        now: Callable[[], datetime],
    ) -> None:
        """Creates it. `analytics` is None if the process has no ClickHouse."""
        self._analytics = analytics
        self._lookup = lookup
        self._stored: tuple[str, int] | None = None
        """EVENTS and its last message, if ClickHouse had that when it was last asked."""
        self._unchanged = 0
        self._rules = alerts.anomalies
        is_any_watched = any(is_watched(measure, alerts.anomalies) for measure in FIGURES)
        self._is_on = is_any_watched and "agent_anomaly" in alerts.on_events
        self._incidents = incidents
        self._now = now
        self._baselines: Mapping[Place, Baseline] = {}
        self._learn_at: datetime | None = None
        self._failures = 0
        self._clickhouse = Outage("ClickHouse, which anomalies are watched by")
        self._bus = Outage("recording anomalies")

    async def run(self) -> None:
        """Asks every minute until cancelled. If anomalies are not watched, it says so, and ends those that are open."""
        if self._analytics is None or not self._is_on:
            reason = TURNED_OFF if self._analytics else "BREAKWATER_CLICKHOUSE_URL is not set"
            structlog.get_logger().warning("anomalies_not_watched", reason=reason)
            await self._record(partial(turned_off_signals, reason, now=self._now()))
            await asyncio.Event().wait()
            return
        while True:
            await asyncio.sleep(MINUTE_S - (self._now() - GRACE).timestamp() % MINUTE_S)
            await self.ask(self._analytics, again=not await self.is_unchanged())

    async def is_unchanged(self) -> bool:
        """Returns True if ClickHouse has got nothing since it was asked about all of it, and no anomaly is open.

        It is asked about whole minutes, so it has to be asked once more after the one of the last message.
        """
        before = self._stored
        try:
            log = await self._lookup.facts(Stream.EVENTS)
            acknowledged = (await self._lookup.progress(Stream.EVENTS, SINK)).acknowledged
        except BusError:
            self._stored = None
        else:
            self._stored = (log.identity, log.last) if acknowledged >= log.last else None
        self._unchanged = self._unchanged + 1 if self._stored is not None and self._stored == before else 0
        is_open = self._failures or open_anomalies(self._incidents.known.all())
        return self._unchanged > 1 and not is_open

    async def ask(self, analytics: Analytics, *, again: bool = True) -> None:
        """Asks ClickHouse once, and records what has changed.

        Args:
            analytics: ClickHouse.
            again: False if the figures are the same as before, which take ClickHouse 40 ms of CPU: then it only has to
                answer.
        """
        now = self._now()
        try:
            if not again:
                await analytics.ping()
                return
            has_baselines = self._rules.deviations is not None
            if has_baselines and (self._learn_at is None or self._learn_at <= now):
                self._baselines = await baselines(analytics, self._rules, now)
                self._learn_at = now + LEARNING_PAUSE * (self._now() - now)
            latest = await latest_minutes(analytics, self._rules, now)
        except (AnalyticsUnavailableError, QueryError) as error:
            self._clickhouse.note_failure(error)
            self._failures += 1
            if self._failures == MAX_FAILURES:
                refused = "ClickHouse refuses the query: " if isinstance(error, QueryError) else ""
                await self._record(partial(unwatched_signals, f"{refused}{error}", now=now))
        else:
            self._clickhouse.note_success()
            self._failures = 0
            await self._record(partial(signals, latest, self._baselines, rules=self._rules, now=now))

    async def _record(self, decide: Callable[[Sequence[Alert]], Sequence[Signal]]) -> None:
        async def record() -> None:
            for signal in decide((await self._incidents.log.catch_up()).all()):
                await self._incidents.record(signal)

        # A signal that was recorded before the bus failed changes nothing the second time.
        await self._bus.retry_until_available(record, on=BusError, retry_s=RETRY_S)
