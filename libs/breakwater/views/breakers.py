"""Breakers, and the tasks that a guard has stopped."""

from __future__ import annotations

from datetime import UTC, datetime

from breakwater.contracts.breakers import BreakerStatus, StoppedTask
from breakwater.contracts.events import BreakerState
from breakwater.policy.formats import duration
from breakwater.views.columns import Column, clock

ORDER = {"isolated": 0, "open": 1, "half_open": 2, "closed": 3}
"""States, those that let no call through first."""


def open_until(
    state: BreakerState | None, until: datetime | None, now: datetime | None = None, held: datetime | None = None
) -> str:
    """The moment when a breaker, or else the provider, lets calls through again; empty if it does now."""
    now = now or datetime.now(UTC)
    if state in {None, "closed"} and held is not None and held > now:
        return f"held until {_moment(held, now)}"
    if state == "isolated":
        return "until reset"
    if state == "half_open":
        return "a call probes it"
    if state != "open":
        return ""
    if until is None or until <= now:
        return "next call probes it"
    return _moment(until, now)


def _moment(until: datetime, now: datetime) -> str:
    return f"{clock(until, now)}, {duration((until - now).total_seconds() * 1000)}"


def _reason(one: BreakerStatus) -> str:
    """The reason for its state, and the caller that it is open for, if that is one alone."""
    reason = one.reason or one.health_reason
    return reason if one.open_for is None else f"{reason}; open for {one.open_for} alone"


COLUMNS: tuple[Column[BreakerStatus], ...] = (
    Column("agent", lambda one: one.agent),
    Column("model", lambda one: one.model, page=False),
    Column("state", lambda one: one.state, "state", order=lambda one: ORDER[one.state]),
    Column("reason", lambda one: one.reason, below=True, words=_reason),
    Column("health", lambda one: one.health, "state"),
    Column("health reason", lambda one: one.health_reason, terminal=False, page=False),
    Column(
        "open until",
        lambda one: one.open_until,
        "time",
        lambda one: open_until(one.state, one.open_until, held=one.held_until),
        name="next_probe",
        smallest_first=True,
        drop=1,
    ),
    Column("since", lambda one: one.since, "ago", drop=3, page=False),
    Column("counted failures", lambda one: one.consecutive_failures, "count", name="failures", drop=2),
    Column("in total", lambda one: one.total_failures, "count", name="total_failures", drop=4, page=False),
)
TASKS: tuple[Column[StoppedTask], ...] = (
    Column("task", lambda task: task.task_id, "id"),
    Column("tenant", lambda task: task.tenant, drop=1),
    Column("agent", lambda task: task.agent, "agent"),
    Column("rule", lambda task: task.rule, "words", lambda task: (task.rule, "bad")),
    Column("since", lambda task: task.since, "ago", drop=2),
    Column("execution", lambda task: task.execution_id, "execution", drop=3),
    Column("reason", lambda task: task.reason, below=True),
)
