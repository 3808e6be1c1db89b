"""What a window of time cost: what was paid for nothing, whether retrying helped, and who spent what.

Executions count by when they ended, calls by when they began; dry runs are left out. `overview.py` explains how
the tables are read. Money is in nano-dollars, None where nothing of it is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from breakwater.analytics.client import Analytics
from breakwater.analytics.window import CALLED, ENDED, SETTINGS, Window, known_sum, whole_sum, within

WASTE = f"""
SELECT agent, cause, sum(amount) AS cost, count() AS executions
FROM executions FINAL
ARRAY JOIN mapKeys(wasted_by_cause) AS cause, mapValues(wasted_by_cause) AS amount{ENDED}
GROUP BY agent, cause
ORDER BY cost DESC, agent, cause
{SETTINGS}"""  # noqa: S608  of constants

RETRIES = f"""
SELECT
    countIf(calls_by_cause['retry'] > 0) AS retried,
    countIf(calls_by_cause['retry'] > 0 AND status = 'succeeded') AS saved,
    sum(cost_by_cause['retry']) AS cost,
    countIf(calls_by_cause['fallback'] > 0) AS fell_back,
    countIf(calls_by_cause['fallback'] > 0 AND status = 'succeeded') AS saved_by_fallback
FROM executions FINAL{ENDED}
{SETTINGS}"""  # noqa: S608  of constants

# The column is a name of ours, from `Spender`: never user input.
SPEND_BY = f"""
SELECT
    %s AS key,
    sum(cost) AS spend,
    sumIf(cost, outcome != 'success') AS wasted,
    count() AS calls,
    countIf(cost IS NULL) AS unknown_costs,
    countIf(outcome != 'success' AND cost IS NULL) AS unknown_waste
{CALLED}
WHERE NOT short_circuited
GROUP BY key
ORDER BY spend DESC NULLS LAST, key
LIMIT {{limit:UInt32}}
{SETTINGS}"""

Spender = Literal["agent", "tenant", "model"]


@dataclass(frozen=True, slots=True)
class WasteLine:
    """What an agent paid for nothing, for one reason."""

    agent: str
    cause: str
    """Such as `retry`: `breakwater.contracts.execution.Waste`."""
    cost: int
    """The known part of it."""
    executions: int
    """That wasted something so. One may have wasted for several reasons, and counts in each."""


@dataclass(frozen=True, slots=True)
class RetryFigures:
    """Whether trying again helped. By executions that ended in the window."""

    retried: int
    """Executions that called a model again after a failure."""
    saved: int
    """Of those, how many succeeded."""
    cost: int
    """What the calls that were retries cost: the known part of it."""
    fell_back: int
    """Executions that called another model."""
    saved_by_fallback: int
    """Of those, how many succeeded."""

    @property
    def rate(self) -> float | None:
        """How many of those that retried succeeded, from 0 to 1; None where none did retry."""
        return self.saved / self.retried if self.retried else None

    @property
    def fallback_rate(self) -> float | None:
        """The same of those that fell back."""
        return self.saved_by_fallback / self.fell_back if self.fell_back else None


@dataclass(frozen=True, slots=True)
class SpendLine:
    """What calls cost, of one agent, tenant or model."""

    key: str | None
    """None for calls without a tenant."""
    spend: int | None
    wasted: int | None
    """What calls that did not succeed cost."""
    calls: int
    unknown_costs: int
    """Calls whose cost is unknown; `spend` is a lower bound where there are any."""
    unknown_waste: int
    """Those of them that did not succeed; the same of `wasted`."""


async def waste(analytics: Analytics, window: Window, *, agent: str | None = None) -> tuple[WasteLine, ...]:
    """What was paid for nothing, by agent and cause, the dearest first. Raises as `Analytics.query` does."""
    rows = (await analytics.query(WASTE, within(window, agent))).named()
    return tuple(WasteLine(row["agent"], row["cause"], whole_sum(row["cost"]), row["executions"]) for row in rows)


async def retries(analytics: Analytics, window: Window, *, agent: str | None = None) -> RetryFigures:
    """Whether trying again helped, and what it cost. Raises as `Analytics.query` does."""
    row = next((await analytics.query(RETRIES, within(window, agent))).named())
    return RetryFigures(**{**row, "cost": whole_sum(row["cost"])})


async def spend_by(analytics: Analytics, window: Window, by: Spender, limit: int = 20) -> tuple[SpendLine, ...]:
    """Who spent most on calls that began in the window. Raises as `Analytics.query` does."""
    parameters = {**within(window, None), "limit": limit}
    rows = (await analytics.query(SPEND_BY % by, parameters)).named()
    return tuple(
        SpendLine(
            key=row["key"],
            spend=known_sum(row["spend"], row["unknown_costs"]),
            wasted=known_sum(row["wasted"], row["unknown_waste"]),
            calls=row["calls"],
            unknown_costs=row["unknown_costs"],
            unknown_waste=row["unknown_waste"],
        )
        for row in rows
    )
