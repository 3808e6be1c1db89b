"""Columns of breakers."""

from __future__ import annotations

from datetime import UTC, datetime

from breakwater.breakers.contract import BreakerState, BreakerStatus
from breakwater.kernel.columns import Column, clock
from breakwater.kernel.formats import duration

ORDER = {"isolated": 0, "open": 1, "half_open": 2, "closed": 3}
"""The sort order of breaker states: the most restrictive first."""


def open_until(
    state: BreakerState | None, until: datetime | None, now: datetime | None = None, held_until: datetime | None = None
) -> str:
    """Says when calls go through again; empty if they do now.

    Args:
        state: state of the breaker; None if it is off.
        until: end of the breaker's cool-down.
        now: the present time, unless it is the clock's.
        held_until: end of the provider's own pause, such as a `Retry-After`.
    """
    now = now or datetime.now(UTC)
    if state in {None, "closed"} and held_until is not None and held_until > now:
        return f"held until {_time_and_distance(held_until, now)}"
    if state == "isolated":
        return "until reset"
    if state == "half_open":
        return "a call probes it"
    if state != "open":
        return ""
    if until is None or until <= now:
        return "next call probes it"
    return _time_and_distance(until, now)


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
        lambda breaker: open_until(breaker.state, breaker.open_until, held_until=breaker.held_until),
        name="next_probe",
        smallest_first=True,
        drop=1,
    ),
    Column("since", lambda breaker: breaker.since, "ago", drop=3, page=False),
    Column("counted failures", lambda breaker: breaker.consecutive_failures, "count", name="failures", drop=2),
    Column("in total", lambda breaker: breaker.total_failures, "count", name="total_failures", drop=4, page=False),
)
