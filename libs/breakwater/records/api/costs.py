"""`/api/v1/costs`: costs of the calls of a month, as JSON and as CSV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

from breakwater.identity.operations import CLICKHOUSE_UNAVAILABLE, ApiRequest, operation
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.formats import csv_text
from breakwater.kernel.types import ms_from_time, time_from_ms, usd_from_nano
from breakwater.limits.rules.budget import LimitTable, period
from breakwater.records.api.executions import ask_clickhouse
from breakwater.records.contract import CostLine, Costs, CostsListQuery, CostsQuery
from breakwater.records.rules.costs import (
    CostSums,
    cap_of,
    cost_line,
    month_after,
    month_before,
    month_of,
    raises_of,
    scope_of,
)
from breakwater.records.spend import budget_notes, month_costs

_AMOUNTS = ("spend", "wasted", "estimated", "previous", "cap", "daily_cap", "forecast", "next_month")
_COUNTS = ("calls", "failed_calls", "calls_of_unknown_cost", "input_tokens", "output_tokens", "cached_tokens")
CSV_COLUMNS = ("month", "timezone", "by", "name", "currency", *_AMOUNTS, *_COUNTS)


@dataclass(frozen=True, slots=True)
class CostRoutes:
    """A month's costs, for people and their spreadsheets.

    Args:
        analytics: the database.
        limits: returns the current limits.
        zone: the time zone of the budgets.
        cost_tags: the names of the tags in the config.
        now: the clock.
    """

    analytics: Analytics
    limits: Callable[[], LimitTable]
    zone: ZoneInfo
    cost_tags: tuple[str, ...]
    now: Callable[[], datetime] = lambda: datetime.now(UTC)

    @operation(
        "GET",
        "/api/v1/costs",
        tag="costs",
        summary="Costs of the calls of a month",
        description="By agent, tenant, model, provider, API key, user, team or tag, with the month before, limits, "
        "the costs of failed calls, and forecasts of the month and the next one. The amounts are those that the "
        "budgets count. A call is included about a second after it has ended.",
        result="The month.",
        errors={503: CLICKHOUSE_UNAVAILABLE},
    )
    async def show_costs(self, request: ApiRequest[CostsListQuery]) -> Costs:
        """Shows the lines with the highest spend, and the sums of all lines."""
        return await self._costs(request.input, request.input.limit)

    @operation(
        "GET",
        "/api/v1/costs.csv",
        tag="costs",
        summary="Costs of the calls of a month, as CSV",
        description=(
            "All rows of `/api/v1/costs`, without the total. Amounts are in USD with nine "
            "decimal places; unknown ones are empty. A name that a spreadsheet would interpret "
            "as a formula gets an apostrophe in front."
        ),
        result="A header and the rows.",
        content_type="text/csv",
        errors={503: CLICKHOUSE_UNAVAILABLE},
    )
    async def export_costs(self, request: ApiRequest[CostsQuery]) -> str:
        """Exports all lines as CSV, without the total, which a sum over the lines would count, too."""
        costs = await self._costs(request.input, None)
        by = costs.by if costs.tag is None else f"tag {costs.tag}"
        place = (costs.month, costs.timezone, by)
        return csv_text(CSV_COLUMNS, ((*place, line.name, "USD", *_cells(line)) for line in costs.lines))

    async def _costs(self, query: CostsQuery, limit: int | None) -> Costs:
        now = self.now()
        month = period("monthly", now, self.zone) if query.month is None else month_of(query.month, self.zone)
        # The clock is cut to whole minutes, so that forecasts are the same however costs are grouped.
        before = month_before(month, self.zone)
        following = month_after(month, self.zone)
        now_ms = ms_from_time(now.replace(second=0, microsecond=0))
        sums = await ask_clickhouse(month_costs(self.analytics, month, before, query.by, tag=query.tag, now_ms=now_ms))
        # A daily cap is raised for one day, so that only the present month has one.
        today = [period("daily", now, self.zone)] if month.holds(ms_from_time(now)) else []
        raises = raises_of(await ask_clickhouse(budget_notes(self.analytics, [month, *today])))
        limits = self.limits()

        def line(name: str | None, sums: CostSums, key: str | None) -> CostLine:
            return cost_line(name, sums, cap_of(key, limits, raises), month, following, now_ms)

        dearest = sorted(sums.items(), key=_by_spend)
        listed = dearest[:limit]
        unlisted = dearest[len(dearest) if limit is None else limit :]
        return Costs(
            month=month.name,
            previous_month=before.name,
            timezone=self.zone.key,
            starts_at=time_from_ms(month.start_ms),
            ends_at=time_from_ms(month.end_ms),
            by=query.by,
            tag=query.tag,
            total=line(None, sum(sums.values(), CostSums()), "global"),
            lines=tuple(line(name, line_sums, scope_of(query.by, name)) for name, line_sums in listed),
            others=line(None, sum((line_sums for _, line_sums in unlisted), CostSums()), None) if unlisted else None,
            cost_tags=self.cost_tags,
        )


def _by_spend(named_sums: tuple[str | None, CostSums]) -> tuple[int, int, str]:
    """A sort key: the highest spend first, then the highest spend of the month before, then the name."""
    name, sums = named_sums
    return -sums.spend, -sums.previous, name or ""


def _cells(line: CostLine) -> tuple[str | int | None, ...]:
    amounts = (getattr(line, name) for name in _AMOUNTS)
    return (
        *(None if amount is None else usd_from_nano(amount) for amount in amounts),
        *(getattr(line, name) for name in _COUNTS),
    )
