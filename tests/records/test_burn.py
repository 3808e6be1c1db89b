"""How the spend of budgets grows, on a real ClickHouse."""

from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from breakwater.kernel.clickhouse.client import Analytics
from breakwater.limits.rules.budget import period
from breakwater.records import schema
from breakwater.records.spend import burn, spent_since
from tests.records import samples

UTC_ZONE, BERLIN = ZoneInfo("UTC"), ZoneInfo("Europe/Berlin")
DAY = period("daily", samples.NOON, UTC_ZONE)
CENT = 10_000_000


async def store(analytics: Analytics, *attempts: Any) -> None:
    for sequence, one in enumerate(attempts, 1):
        await analytics.insert(schema.ATTEMPTS, [samples.attempt_row(one, sequence)])


def call(number: int, at: datetime, cost: int | None = CENT, **fields: Any) -> Any:
    basis = "unknown" if cost is None else "billed"
    return samples.attempt("e1", number, started_at=at, cost=cost, cost_basis=basis, **fields)


def hour(hours: float) -> datetime:
    return samples.NOON.replace(hour=0) + timedelta(hours=hours)


async def test_a_day_grows_hour_by_hour_until_now(analytics: Analytics):
    await store(
        analytics,
        call(1, hour(-0.001)),  # the day before
        call(2, hour(0)),
        call(3, hour(1.5), 2 * CENT),
        call(4, hour(3.25)),
        call(4, hour(3.25)),  # delivered twice
    )
    figures = await burn(analytics, DAY, "global", UTC_ZONE, hour(3.5))
    assert figures.points == (
        (hour(0), 0),
        (hour(1), CENT),
        (hour(2), 3 * CENT),
        (hour(3), 3 * CENT),
        (hour(3.5), 4 * CENT),
    )
    assert figures.spent == 4 * CENT
    assert figures.unknown_costs == 0


async def test_a_day_that_is_over_is_reported_whole_and_one_without_calls_is_flat(analytics: Analytics):
    await store(analytics, call(1, hour(23.999)))
    figures = await burn(analytics, DAY, "global", UTC_ZONE, hour(30))
    assert len(figures.points) == 25
    assert figures.points[-1] == (hour(24), CENT)
    assert figures.points[-2] == (hour(23), 0)
    empty = await burn(analytics, DAY, "agent:nobody", UTC_ZONE, hour(1.5))
    assert [spent for _, spent in empty.points] == [0, 0, 0]


async def test_a_call_counts_when_it_is_charged_and_not_when_it_begins(analytics: Analytics):
    early, late = hour(-0.0001), hour(0.0001)
    await store(
        analytics,
        call(1, late, reserved=CENT, reserved_at=early),
        call(2, early, reserved=CENT, reserved_at=late, attempt_id="e1:2b"),
    )
    figures = await burn(analytics, DAY, "global", UTC_ZONE, hour(1))
    assert figures.spent == CENT
    assert (await spent_since(analytics, hour(0), hour(1)))["global"] == CENT


async def test_each_scope_has_its_own_and_refusals_are_no_calls(analytics: Analytics):
    await store(
        analytics,
        call(1, hour(1)),
        call(2, hour(1), agent="other", tenant="acme"),
        call(3, hour(1), None, agent="other"),
        call(4, hour(1), 100 * CENT, short_circuited=True, outcome="error"),
    )
    now = hour(2)
    spent = {
        key: (await burn(analytics, DAY, key, UTC_ZONE, now)).spent
        for key in ("global", "agent:writer", "agent:other", "tenant:acme", "tenant:none")
    }
    assert spent == {
        "global": 2 * CENT,
        "agent:writer": CENT,
        "agent:other": CENT,
        "tenant:acme": CENT,
        "tenant:none": 0,
    }
    assert (await burn(analytics, DAY, "agent:other", UTC_ZONE, now)).unknown_costs == 1
    assert await spent_since(analytics, hour(0), now) == {key: cost for key, cost in spent.items() if cost}
    assert await spent_since(analytics, hour(1.5), now) == {}


async def test_a_month_grows_by_the_days_of_its_zone_over_a_change_of_clocks(analytics: Analytics):
    noon = datetime(2026, 10, 26, 11, tzinfo=UTC)
    month = period("monthly", noon, BERLIN)
    await store(
        analytics,
        call(1, datetime(2026, 9, 30, 22, tzinfo=UTC)),  # 00:00 of October 1st there
        call(2, datetime(2026, 10, 25, 22, 59, tzinfo=UTC)),  # 23:59 of the day of 25 hours
        call(3, datetime(2026, 10, 25, 23, 0, tzinfo=UTC)),  # 00:00 of the next one
    )
    points = (await burn(analytics, month, "global", BERLIN, noon)).points
    assert points[0] == (datetime(2026, 9, 30, 22, tzinfo=UTC), 0)
    assert points[1] == (datetime(2026, 10, 1, 22, tzinfo=UTC), CENT)
    assert points[-2] == (datetime(2026, 10, 25, 23, tzinfo=UTC), 2 * CENT)
    assert points[-1] == (noon, 3 * CENT)
