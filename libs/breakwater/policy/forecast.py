"""Where a budget is going: what its period will have cost in the end, and when its cap is reached.

Two rates are derived from what was spent. That of the whole period so far is steady, and late to notice a change; that
of its last part notices, and takes every busy hour for the rest of the month. Each is followed half the way. Both are
lines: no weekday or night is known of, so this is no promise, and is worded as one of a pace.
"""

from __future__ import annotations

from dataclasses import dataclass

from breakwater.policy.budget import Period

RECENT_PARTS = 8
"""The last part is an eighth of the period: three hours of a day, nearly four days of a month."""

LEAST_PARTS = 24
"""There is no forecast before this part of a period is over: an hour of a day, thirty hours of a month."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What comes of a period at its present pace."""

    total: int
    """Nano-dollars at its end; at least what is spent, and no more than a hard cap lets be spent."""
    reaches_ms: int | None
    """When its cap is reached, in ms since the epoch; None where that is not within the period, or is so already."""


def recent_from(period: Period, now_ms: int) -> int:
    """Since when spend counts as recent, in ms since the epoch: not before the period began."""
    return max(period.start_ms, now_ms - (period.end_ms - period.start_ms) // RECENT_PARTS)


def forecast(
    period: Period, now_ms: int, *, spent: int, recent: int, limit: int | None, hard: bool = False
) -> Forecast | None:
    """Follows the pace of a period to its end.

    Args:
        period: the budget's.
        now_ms: a moment of it, in ms since the epoch.
        spent: nano-dollars in the period so far.
        recent: what of it was spent since `recent_from`; never taken for more than `spent`.
        limit: the cap in nano-dollars; None where there is none.
        hard: it refuses what is beyond it.

    Returns:
        None where too little is known: the period has just begun, is over, or nothing was spent.
    """
    length, elapsed = period.end_ms - period.start_ms, now_ms - period.start_ms
    if spent <= 0 or not period.holds(now_ms) or elapsed * LEAST_PARTS < length:
        return None
    left, lately = period.end_ms - now_ms, now_ms - recent_from(period, now_ms)
    recent = min(max(recent, 0), spent)
    # Half of each pace over the time that is left, in one division, so that nothing is rounded twice.
    more = left * (spent * lately + recent * elapsed) // (2 * elapsed * lately)
    reaches_ms = None
    if limit is not None and spent < limit <= spent + more:
        reaches_ms = now_ms + left * (limit - spent) // more
    total = spent + more
    return Forecast(min(total, max(limit, spent)) if hard and limit is not None else total, reaches_ms)
