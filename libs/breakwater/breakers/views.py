"""Columns of breakers."""

from __future__ import annotations

from datetime import UTC, datetime

from breakwater.breakers.contract import BreakerState, BreakerStatus, ShadowBreakerStatus
from breakwater.kernel.columns import Column, clock
from breakwater.kernel.formats import duration

WAITS = "waits for a call to try it"

ORDER = {"isolated": 0, "open": 1, "half_open": 2, "closed": 3}
"""The sort order of breaker states: the most restrictive first."""


def open_until(
    state: BreakerState | None,
    until: datetime | None,
    now: datetime | None = None,
    held_until: datetime | None = None,
    probe_until: datetime | None = None,
) -> str:
    """Says when calls go through again; empty if they do now.

    Args:
        state: state of the breaker; None if it is off.
        until: end of the breaker's cool-down, if it is open.
        now: the present time, unless it is the clock's.
        held_until: end of the provider's own pause, such as a `Retry-After`.
        probe_until: end of the lease of the half-open breaker's probe; None if it waits for one.
    """
    now = now or datetime.now(UTC)
    if state in {None, "closed"} and held_until is not None and held_until > now:
        return f"held until {_time_and_distance(held_until, now)}"
    if state == "isolated":
        return "until reset"
    if state == "half_open":
        return WAITS if probe_until is None else "a call tries it"
    if state != "open" or until is None:
        return ""
    # It may have been read before the cool-down has ended.
    return WAITS if until <= now else _time_and_distance(until, now)


def _time_and_distance(until: datetime, now: datetime) -> str:
    return f"{clock(until, now)}, {duration((until - now).total_seconds() * 1000)}"


def _reason(breaker: BreakerStatus) -> str:
    """Returns the reason for the breaker's state, and the caller if it refuses only one."""
    reason = breaker.reason or breaker.health_reason
    return reason if breaker.open_for is None else f"{reason}; refuses only {breaker.open_for}"


COLUMNS: tuple[Column[BreakerStatus], ...] = (
    Column("agent", lambda breaker: breaker.agent),
    Column("model", lambda breaker: breaker.model, page=False),
    Column("state", lambda breaker: breaker.state, "state", order=lambda breaker: ORDER[breaker.state]),
    Column("reason", lambda breaker: breaker.reason, below=True, display=_reason),
    Column("health", lambda breaker: breaker.health, "state"),
    Column("health reason", lambda breaker: breaker.health_reason, terminal=False, page=False),
    Column(
        "open until",
        lambda breaker: breaker.open_until,
        "time",
        lambda breaker: open_until(
            breaker.state, breaker.open_until, held_until=breaker.held_until, probe_until=breaker.probe_until
        ),
        name="next_probe",
        smallest_first=True,
        drop=1,
    ),
    Column("since", lambda breaker: breaker.since, "ago", drop=3, page=False),
    Column("counted failures", lambda breaker: breaker.consecutive_failures, "count", name="failures", drop=2),
    Column("in total", lambda breaker: breaker.total_failures, "count", name="total_failures", drop=4, page=False),
)

SHADOWS: tuple[Column[ShadowBreakerStatus], ...] = (
    Column("agent", lambda shadow: shadow.agent),
    Column("model", lambda shadow: shadow.model),
    Column("shadow", lambda shadow: shadow.state, "state", order=lambda shadow: ORDER[shadow.state]),
    Column("reason", lambda shadow: shadow.reason, below=True),
    Column("since", lambda shadow: shadow.since, "ago", drop=1),
    Column("would have refused", lambda shadow: shadow.refused, "count", name="refused"),
)
"""Columns of shadows, whose state has a heading of its own: they refuse nothing."""
