"""Which figures of budgets Prometheus is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import cast

import pytest

from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.clickhouse.errors import AnalyticsUnavailableError
from breakwater.kernel.telemetry.metrics import (
    BUDGET_FORECAST,
    BUDGET_LIMIT,
    BUDGET_RESERVED,
    BUDGET_SPENT,
    PlaneGauge,
    Readings,
)
from breakwater.kernel.types import NANO_PER_USD
from breakwater.limits.rules.budget import Period
from breakwater.limits.rules.ledger import AttemptSums
from breakwater.limits.settings import Caps
from breakwater.limits.store.budget_counters import BudgetCounters, CounterSource, PeriodCounters, Snapshot
from breakwater.services.budget.gauges import FORECAST_EVERY_S, FORECAST_KEPT_S, BudgetGauges
from tests.helpers import until
from tests.limits.limit_tables import limit, limit_table, with_raise

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
USD = NANO_PER_USD
CAPS = limit_table(
    Caps(monthly_usd=100),
    {"writer": Caps(daily_usd=10, enforcement="hard")},
    {"acme": Caps(daily_usd=4), "*": Caps(daily_usd=1)},
)


class Counters:
    """Counters in which the writer has spent $6 of this day, for a tenant that the config does not name."""

    zone = UTC

    def __init__(self) -> None:
        self.filled: CounterSource | None = CounterSource("log", "UTC", 0, True, "0")
        self.spent = 6 * USD

    async def read(self, periods: Sequence[Period]) -> Snapshot:
        keys = ("global", "agent:writer", "tenant:nobody")
        figures = {key: AttemptSums(spent=self.spent, calls=1) for key in keys}
        held = {"agent:writer": AttemptSums(spent=USD // 2)}
        return Snapshot(self.filled, tuple(PeriodCounters(one, figures, held, frozenset()) for one in periods), (), {})


class Plane:
    """The gauges of a budget service whose ClickHouse says what was spent lately."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counters, self.recent, self.queries = Counters(), {"agent:writer": 3 * USD}, 0
        self.seconds, self.unavailable = 0.0, False
        self.limits = CAPS

        async def spent_since(*_: object) -> dict[str, int]:
            self.queries += 1
            if self.unavailable:
                raise AnalyticsUnavailableError("ClickHouse does not answer")
            return self.recent

        monkeypatch.setattr("breakwater.services.budget.gauges.spent_since", spent_since)
        counters, analytics = cast(BudgetCounters, self.counters), cast(Analytics, None)
        self.gauges = BudgetGauges(lambda: self.limits, counters, analytics, lambda: NOON, lambda: self.seconds)

    async def read(self) -> dict[PlaneGauge, dict[str, float]]:
        """Values by the budget's name."""
        found: Readings = await self.gauges.read()
        return {gauge: {labels[0]: value for labels, value in values.items()} for gauge, values in found.items()}


@pytest.fixture
def plane(monkeypatch: pytest.MonkeyPatch) -> Plane:
    return Plane(monkeypatch)


async def test_budgets_that_the_config_names_are_shown_with_what_they_spent_and_hold_and_their_caps(
    plane: Plane,
) -> None:
    found = await plane.read()
    named = ("global", "agent:writer", "tenant:acme")
    assert set(found[BUDGET_SPENT]) == {f"{key}/{window}" for key in named for window in ("daily", "monthly")}
    assert found[BUDGET_SPENT]["agent:writer/daily"] == 6
    assert found[BUDGET_SPENT]["tenant:acme/daily"] == 0
    assert found[BUDGET_RESERVED]["agent:writer/daily"] == 0.5
    assert found[BUDGET_LIMIT] == {"global/monthly": 100, "agent:writer/daily": 10, "tenant:acme/daily": 4}
    [labels] = [labels for labels in (await plane.gauges.read())[BUDGET_LIMIT] if labels[0] == "agent:writer/daily"]
    assert labels == ("agent:writer/daily", "agent", "daily", "hard")


async def test_a_raised_cap_is_the_one_that_is_shown_until_the_config_has_another(plane: Plane) -> None:
    for configured, shown in ((10 * USD, 20), (9 * USD, 10)):
        of_writer = replace(limit("agent:writer", "daily", configured), id="agents.writer.budget.daily_usd")
        plane.limits = with_raise(CAPS, of_writer, 20 * USD, now=NOON)
        assert (await plane.read())[BUDGET_LIMIT]["agent:writer/daily"] == shown


async def test_counters_that_are_lost_are_not_shown_as_nothing_spent(plane: Plane) -> None:
    plane.counters.filled = None
    assert await plane.read() == {}


async def test_forecasts_come_beside_the_scrape_and_are_made_now_and_then(plane: Plane) -> None:
    assert (await plane.read())[BUDGET_FORECAST] == {}

    async def forecasts() -> dict[str, float]:
        return (await plane.read())[BUDGET_FORECAST]

    found = await until(forecasts)
    # Half of $6 in twelve hours and $3 in the last three: nine more until midnight, but for the cap.
    assert found["agent:writer/daily"] == 10
    assert found["global/daily"] == pytest.approx(9)
    assert "tenant:acme/daily" not in found
    assert plane.queries == 2
    plane.counters.spent = 12 * USD
    assert (await plane.read())[BUDGET_FORECAST]["global/daily"] == 12
    plane.seconds = FORECAST_EVERY_S
    await until(lambda: plane.read(), "a reading")
    await until(lambda: plane.queries == 4)
    await plane.gauges.stop()


async def test_a_total_is_shown_but_not_foreseen(plane: Plane) -> None:
    plane.limits = replace(CAPS, limits=(*CAPS.limits, limit("global", "total", 7 * USD)))
    await plane.gauges.make_forecasts()
    assert plane.queries == 2, "a total has no last eighth, which would be all that ClickHouse has"
    found = await plane.read()
    assert found[BUDGET_LIMIT]["global/total"] == 7
    assert "global/total" not in found[BUDGET_FORECAST]


async def test_without_clickhouse_a_forecast_is_shown_for_a_while_and_then_none(plane: Plane) -> None:
    await plane.gauges.make_forecasts()
    plane.unavailable, plane.seconds = True, FORECAST_KEPT_S - 1
    assert (await plane.read())[BUDGET_FORECAST]
    plane.seconds += 1
    found = await plane.read()
    assert found[BUDGET_FORECAST] == {}
    assert found[BUDGET_SPENT]["agent:writer/daily"] == 6
    await plane.gauges.stop()
