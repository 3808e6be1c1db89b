"""Metrics of the budgets that the config names, in the current periods."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.clickhouse.errors import QueryError
from breakwater.kernel.errors import UnavailableError
from breakwater.kernel.process import background
from breakwater.kernel.process.outage import Outage
from breakwater.kernel.telemetry.metrics import BUDGET_FORECAST, BUDGET_LIMIT, BUDGET_RESERVED, BUDGET_SPENT, Readings
from breakwater.kernel.types import NANO_PER_USD, ms_from_time, time_from_ms
from breakwater.limits.contract import Window
from breakwater.limits.rules.budget import TOTAL, Counter, LimitTable, forecast, periods_at, recent_from
from breakwater.limits.rules.ledger import AttemptSums, BudgetPlace
from breakwater.limits.rules.scopes import BASE, dimension_of
from breakwater.limits.store.budget_counters import BudgetCounters, Snapshot
from breakwater.records.spend import spent_since

FORECAST_EVERY_S = 300.0
"""The interval of forecasts while Prometheus scrapes. They are rare, as they sum up days of attempts in ClickHouse."""

FORECAST_KEPT_S = 3 * FORECAST_EVERY_S
"""The time for which a forecast is shown while ClickHouse is unavailable."""


class BudgetGauges:
    """Reads the metrics from Redis. Forecasts are made separately: ClickHouse delays no scrape.

    Args:
        limits: returns the current limits.
        counters: in Redis.
        analytics: ClickHouse.
        now: the clock.
        clock: monotonic, in seconds.
    """

    def __init__(
        self,
        limits: Callable[[], LimitTable],
        counters: BudgetCounters,
        analytics: Analytics,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._counters = counters
        self._analytics = analytics
        self._now = now
        self._clock = clock
        self._outage = Outage("forecasts of budgets for metrics")
        self._forecasting: asyncio.Task[bool] | None = None
        self._forecasts: Mapping[BudgetPlace, int] = {}
        self._tried_at = self._made_at = -FORECAST_KEPT_S

    async def read(self) -> Readings:
        """All metrics; none while the counters are being rebuilt. Raises StateUnavailableError."""
        snapshot = await self._snapshot(self._now())
        if snapshot.filled is None:
            return {}
        if self._clock() - self._tried_at >= FORECAST_EVERY_S and (
            self._forecasting is None or self._forecasting.done()
        ):
            self._tried_at = self._clock()
            work = self._outage.run_logged(self.make_forecasts, expected=(UnavailableError, QueryError))
            self._forecasting = asyncio.create_task(work)
        is_recent = self._clock() - self._made_at < FORECAST_KEPT_S
        return readings(self._limits(), snapshot, self._forecasts if is_recent else {})

    async def make_forecasts(self) -> None:
        """Updates the forecasts. Raises StateUnavailableError, AnalyticsUnavailableError, QueryError."""
        now = self._now()
        limits = self._limits()
        snapshot = await self._snapshot(now)
        now_ms = ms_from_time(now)
        forecasts: dict[BudgetPlace, int] = {}
        for counters in snapshot.periods:
            period = counters.period
            if period == TOTAL:
                continue  # it never ends, so there is nothing to foresee
            named = _named(limits, period.window)
            dimensions = {dimension_of(counter.key, period.window) for counter in named}
            recent = await spent_since(self._analytics, time_from_ms(recent_from(period, now_ms)), now, dimensions)
            for counter in named:
                expected = forecast(
                    period,
                    now_ms,
                    spent=counters.figures.get(counter.key, AttemptSums()).spent,
                    recent=recent.get(counter.key, 0),
                    limit=counter.effective,
                    hard=counter.enforcement == "hard",
                )
                if expected is not None:
                    forecasts[period.name, counter.key] = expected.total
        self._forecasts = forecasts
        self._made_at = self._clock()

    async def stop(self) -> None:
        """Ends a forecast that is being made."""
        if self._forecasting is not None:
            await background.stop(self._forecasting)

    async def _snapshot(self, now: datetime) -> Snapshot:
        windows = {dimension.window for dimension in self._limits().dimensions.union(BASE)}
        periods = periods_at(now, self._counters.zone).all
        return await self._counters.read([period for period in periods if period.window in windows])


def _named(limits: LimitTable, window: Window) -> list[Counter]:
    """Returns the budgets that the config names, in a window in which they are counted."""
    counted = limits.dimensions.union(BASE)
    keys = limits.keys()
    return [limits.counter(key, window) for key in keys if dimension_of(key, window) in counted]


def readings(table: LimitTable, snapshot: Snapshot, forecasts: Mapping[BudgetPlace, int]) -> Readings:
    """The spend, reservations, limits and known forecasts of budgets.

    Args:
        table: all limits; tenants that the config does not name have none here.
        snapshot: the counters.
        forecasts: nano-dollars at the period's end.
    """
    spent: dict[tuple[str, ...], float] = {}
    reserved: dict[tuple[str, ...], float] = {}
    limits: dict[tuple[str, ...], float] = {}
    expected: dict[tuple[str, ...], float] = {}
    for counters in snapshot.periods:
        for counter in _named(table, counters.period.window):
            labels = (counter.name, counter.scope, counter.window, counter.enforcement)
            nano = counters.figures.get(counter.key, AttemptSums()).spent
            spent[labels] = nano / NANO_PER_USD
            reserved[labels] = counters.reserved.get(counter.key, 0) / NANO_PER_USD
            if (limit := counter.effective) is not None:
                limits[labels] = limit / NANO_PER_USD
            if (total := forecasts.get((counters.period.name, counter.key))) is not None:
                # More may have been spent since the forecast.
                expected[labels] = max(total, nano) / NANO_PER_USD
    return {BUDGET_SPENT: spent, BUDGET_RESERVED: reserved, BUDGET_LIMIT: limits, BUDGET_FORECAST: expected}
