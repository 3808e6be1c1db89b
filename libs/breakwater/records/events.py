"""Lists of events: breaker changes, operator actions, incidents and the audit log. Statements: `events.sql`.

All tables are small, and are read with FINAL: an event that was stored twice counts once. All functions raise as
`Analytics.query` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

from breakwater.alerts.contract import Alert
from breakwater.breakers.contract import BreakerTransition
from breakwater.identity.contract import AuditEvent
from breakwater.kernel.clickhouse.client import Analytics, statements
from breakwater.kernel.time_window import TimeWindow
from breakwater.kernel.types import ms_from_time
from breakwater.records.rows import alert_of, audit_event_of

SQL = statements(__file__)
MOST = 200
"""The maximum length of a list of breaker changes, operator actions or audit events; the latest are kept."""

MAX_CHANGES = 1_000
_FOREVER_MS = 2**62


@dataclass(frozen=True, slots=True)
class BreakerOpening:
    """A stretch of time in which a breaker was not closed, but open, isolated or half-open."""

    agent: str
    model: str
    rule: str | None
    """The rule that opened it; None if an operator opened it."""
    reason: str
    opened_at: datetime
    closed_at: datetime | None
    """None while it lasts."""
    open_ms: int
    """Its length so far."""
    in_window_ms: int
    """The length of the part within the window."""


@dataclass(frozen=True, slots=True)
class OperatorAction:
    """An operator action on a breaker or a stopped task."""

    at: datetime
    by: str
    action: str
    """`isolated` or `reset`."""
    agent: str
    model: str | None
    """None for an action on a task."""
    task_id: str | None
    tenant: str | None
    reason: str


async def transitions(
    analytics: Analytics, window: TimeWindow, agent: str, model: str, *, limit: int = MOST
) -> tuple[BreakerTransition, ...]:
    """The changes of one breaker in a window, the latest first."""
    parameters = {**_bounds(window), "agent": agent, "model": model, "limit": limit}
    return await analytics.read(BreakerTransition, SQL["transitions"], parameters)


async def openings(
    analytics: Analytics, window: TimeWindow, now: datetime, agent: str = "", model: str = ""
) -> tuple[BreakerOpening, ...]:
    """The times that breakers were open in a window, the latest first.

    Args:
        analytics: the database.
        window: those count that have a moment in it.
        now: until when one that goes on has lasted.
        agent: only this agent's; `*` for those that agents share.
        model: only on this model.
    """

    def opening(**row: Any) -> BreakerOpening:
        start = ms_from_time(row["opened_at"])
        end = ms_from_time(row["closed_at"] or now)
        inside = min(end, window.end_ms) - max(start, window.start_ms)
        return BreakerOpening(**row, open_ms=max(end - start, 0), in_window_ms=max(inside, 0))

    return await analytics.read(opening, SQL["openings"], {**_bounds(window), "agent": agent, "model": model})


async def operator_actions(
    analytics: Analytics, window: TimeWindow, *, limit: int = MOST
) -> tuple[OperatorAction, ...]:
    """The operator actions in a window, the latest first."""
    return await analytics.read(OperatorAction, SQL["operator_actions"], {**_bounds(window), "limit": limit})


@dataclass(frozen=True, slots=True)
class Incident:
    """An incident, as its newest change left it."""

    incident_id: str
    event: str
    """The latest event; `first_event` opened it."""
    severity: str
    first_event: str
    highest_severity: str
    status: str
    agent: str | None
    model: str | None
    tenant: str | None
    title: str
    count: int
    """The number of times it happened."""
    opened_at: datetime
    last_at: datetime
    acknowledged_by: str | None
    acknowledged_at: datetime | None
    resolved_by: str | None
    """None if it ended by itself, or is still open."""
    resolved_at: datetime | None
    reason: str | None
    duration_ms: int | None
    """None until it is over."""
    time_to_acknowledge_ms: int | None
    """None where it was not."""
    agents: tuple[str, ...] = ()
    """The agents of a deployment that it has concerned."""

    @property
    def concerned_agents(self) -> tuple[str, ...]:
        """Returns the agents that it concerns; `*` stands for all of them. Empty if it concerns none."""
        return self.agents or (() if self.agent is None else (self.agent,))


@dataclass(frozen=True, slots=True)
class IncidentCursor:
    """A place in the list of incidents, from which a page continues."""

    opened_ms: int
    incident_id: str


_INCIDENTS = SQL["incidents"] % ", ".join(field.name for field in fields(Incident) if field.name != "agents")


async def incidents(
    analytics: Analytics,
    window: TimeWindow,
    *,
    status: str = "",
    event: str = "",
    agent: str = "",
    before: IncidentCursor | None = None,
    limit: int = 50,
) -> tuple[Incident, ...]:
    """Incidents that were opened in a window, the latest first.

    Args:
        analytics: the database.
        window: of their opening.
        status: only those with this status.
        event: only those whose first or latest event this is.
        agent: only this agent's.
        before: only those behind this place.
        limit: at most so many.
    """
    parameters = {
        **_bounds(window),
        "status": status,
        "event": event,
        "agent": agent,
        "before_ms": _FOREVER_MS if before is None else before.opened_ms,
        "before_id": "" if before is None else before.incident_id,
        "limit": limit,
    }
    return await analytics.read(Incident, _INCIDENTS, parameters)


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """A config that was applied to the running plane."""

    at: datetime
    version: str
    by: str


async def config_changes(analytics: Analytics, window: TimeWindow) -> tuple[ConfigChange, ...]:
    """The configs that were applied in a window, the earliest first; the latest ones, if there are many."""
    applied = await analytics.read(ConfigChange, SQL["config_changes"], {**_bounds(window), "limit": MOST})
    return tuple(reversed(applied))


async def incident_changes(analytics: Analytics, incident_id: str) -> tuple[Alert, ...]:
    """All changes of an incident, the earliest first; empty if it is not stored."""
    return await analytics.read(alert_of, SQL["changes"], {"incident_id": incident_id, "limit": MAX_CHANGES})


def cursor_of(incident: Incident) -> IncidentCursor:
    """The place behind an incident."""
    return IncidentCursor(ms_from_time(incident.opened_at), incident.incident_id)


async def audit_events(
    analytics: Analytics, window: TimeWindow, *, by: str = "", action: str = "", limit: int = MOST
) -> tuple[AuditEvent, ...]:
    """The audit log of a window, the latest first; of one name or kind only, if they are not empty."""
    parameters = {**_bounds(window), "by": by, "action": action, "limit": limit}
    return await analytics.read(audit_event_of, SQL["audit"], parameters)


async def audit_events_of(
    analytics: Analytics, actions: Sequence[str], name: str, value: str, *, limit: int = MOST
) -> tuple[AuditEvent, ...]:
    """The audit log of some kinds of actions whose parameter has a value, the latest first."""
    parameters = {"actions": list(actions), "name": name, "value": value, "limit": limit}
    return await analytics.read(audit_event_of, SQL["audit_of"], parameters)


async def audit_names(analytics: Analytics, window: TimeWindow) -> tuple[list[str], list[str]]:
    """The people who acted in a window, and the kinds of actions."""
    people, kinds = (await analytics.query(SQL["audit_names"], _bounds(window))).rows[0]
    return sorted(people), sorted(kinds)


def _bounds(window: TimeWindow) -> dict[str, object]:
    return {"start": window.start, "end": window.end}
