"""What the calls of one month cost, and of the month before, by whom or for what.

A call counts in the month in which its budgets charge it, so these sums are what budgets count, to the nano-dollar.
"""

from __future__ import annotations

from decimal import Decimal

from breakwater.analytics.client import Analytics
from breakwater.analytics.spend import MARGIN_MS
from breakwater.analytics.window import SETTINGS, whole_sum
from breakwater.contracts.api import CostsBy
from breakwater.policy.budget import Period
from breakwater.policy.costs import CostSums
from breakwater.policy.forecast import recent_from

_NAMES = {
    "agent": "agent",
    "tenant": "tenant",
    "model": "model",
    "provider": "provider",
    "key": "submitted_by",
    "tag": "nullIf(cost_tags[{tag:String}], '')",
}

_CHARGED = "ifNull(reserved_at, started_at)"

# In sums, `attempts.cost` is the column: a bare `cost` could be the name of a sum.
MONTH = f"""
WITH {_CHARGED} >= fromUnixTimestamp64Milli({{start_ms:Int64}}) AS current,
    outcome != 'success' AS failure,
    attempts.cost IS NULL AS unpriced
SELECT
    %s AS name,
    sumIf(attempts.cost, current) AS spend,
    sumIf(attempts.cost, current AND failure) AS wasted,
    sumIf(attempts.cost, current AND cost_basis = 'estimated') AS estimated,
    sumIf(attempts.cost, {_CHARGED} >= fromUnixTimestamp64Milli({{recent_ms:Int64}})) AS recent,
    sumIf(attempts.cost, NOT current) AS previous,
    countIf(current) AS calls,
    countIf(current AND failure) AS failed,
    countIf(current AND unpriced) AS unknown,
    countIf(current AND failure AND unpriced) AS unknown_wasted,
    countIf(NOT current AND unpriced) AS unknown_previous,
    sumIf(attempts.input_tokens, current) AS input_tokens,
    sumIf(attempts.output_tokens, current) AS output_tokens,
    sumIf(attempts.cached_tokens, current) AS cached_tokens
FROM attempts FINAL
PREWHERE started_at >= fromUnixTimestamp64Milli({{earliest_ms:Int64}})
    AND started_at < fromUnixTimestamp64Milli({{latest_ms:Int64}})
WHERE NOT short_circuited
    AND {_CHARGED} >= fromUnixTimestamp64Milli({{previous_ms:Int64}})
    AND {_CHARGED} < fromUnixTimestamp64Milli({{end_ms:Int64}})
GROUP BY name
{SETTINGS}"""  # noqa: S608  of constants


async def month_costs(
    analytics: Analytics, month: Period, before: Period, by: CostsBy, *, tag: str | None, now_ms: int
) -> dict[str | None, CostSums]:
    """The sums of a month, by names.

    Args:
        analytics: the database.
        month: that is asked for.
        before: the month before it.
        by: whose name.
        tag: which tag, for `tag`.
        now_ms: in ms since the epoch; it says which part of the month is recent.

    Returns:
        None among the names is for calls without one.

    Raises as `Analytics.query` does.
    """
    parameters = {
        "start_ms": month.start_ms,
        "end_ms": month.end_ms,
        "previous_ms": before.start_ms,
        "recent_ms": recent_from(month, min(now_ms, month.end_ms)),
        "earliest_ms": before.start_ms - MARGIN_MS,
        "latest_ms": month.end_ms + MARGIN_MS,
        "tag": tag or "",
    }
    rows = (await analytics.query(MONTH % _NAMES[by], parameters)).named()
    return {row.pop("name"): CostSums(**{name: _whole(value) for name, value in row.items()}) for row in rows}


def _whole(value: Decimal | int | None) -> int:
    return whole_sum(value) if value is None or isinstance(value, Decimal) else value
