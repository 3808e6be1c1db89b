"""Incidents that people were notified of, firing or resolved, and the changes of each."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import datetime

from breakwater.analytics.client import Analytics
from breakwater.analytics.rows import alert_of
from breakwater.analytics.window import Window
from breakwater.contracts.alerts import Alert
from breakwater.contracts.types import ms_from_time

MAX_CHANGES = 1_000
_FOREVER_MS = 2**62


@dataclass(frozen=True, slots=True)
class Incident:
    """An incident, as its newest change left it."""

    incident_id: str
    event: str
    severity: str
    first_event: str
    """What it was opened by; `event` is what happened last."""
    highest_severity: str
    status: str
    agent: str | None
    model: str | None
    tenant: str | None
    title: str
    count: int
    """How often it happened."""
    opened_at: datetime
    last_at: datetime
    acknowledged_by: str | None
    acknowledged_at: datetime | None
    resolved_by: str | None
    """None where it ended by itself, or goes on."""
    resolved_at: datetime | None
    reason: str | None
    duration_ms: int | None
    """None until it is over."""
    time_to_acknowledge_ms: int | None
    """None where it was not."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a page of incidents goes on: behind this one."""

    opened_ms: int
    incident_id: str


# By the incident's id where two were opened in one millisecond, so that no page leaves one out.
INCIDENTS = f"""
SELECT {", ".join(field.name for field in fields(Incident))}
FROM incidents
WHERE opened_at >= {{start:DateTime64(3, 'UTC')}} AND opened_at < {{end:DateTime64(3, 'UTC')}}
    AND ({{status:String}} = '' OR status = {{status:String}})
    AND ({{event:String}} = '' OR event = {{event:String}} OR first_event = {{event:String}})
    AND ({{agent:String}} = '' OR agent = {{agent:String}})
    AND (toUnixTimestamp64Milli(opened_at), incident_id) < ({{before_ms:Int64}}, {{before_id:String}})
ORDER BY opened_at DESC, incident_id DESC
LIMIT {{limit:UInt32}}
"""  # noqa: S608  of constants

CHANGES = """
SELECT * EXCEPT (event_sequence)
FROM alerts FINAL
WHERE incident_id = {incident_id:String}
ORDER BY version, event_sequence
LIMIT {limit:UInt32}
"""


async def incidents(
    analytics: Analytics,
    window: Window,
    *,
    status: str = "",
    event: str = "",
    agent: str = "",
    before: Place | None = None,
    limit: int = 50,
) -> tuple[Incident, ...]:
    """Incidents that were opened in a window, the latest first.

    Args:
        analytics: the database.
        window: of their opening.
        status: only those that are so.
        event: only those of which this happened last, or which it began.
        agent: only this one's.
        before: only those behind this one.
        limit: at most so many.

    Raises as `Analytics.query` does.
    """
    parameters = {
        "start": window.start,
        "end": window.end,
        "status": status,
        "event": event,
        "agent": agent,
        "before_ms": _FOREVER_MS if before is None else before.opened_ms,
        "before_id": "" if before is None else before.incident_id,
        "limit": limit,
    }
    return await analytics.read(Incident, INCIDENTS, parameters)


async def incident_changes(analytics: Analytics, incident_id: str) -> tuple[Alert, ...]:
    """All changes of an incident, the first one first; nothing for one that is not stored.

    Raises as `Analytics.query` does.
    """
    parameters = {"incident_id": incident_id, "limit": MAX_CHANGES}
    return tuple(alert_of(row) for row in (await analytics.query(CHANGES, parameters)).named())


def place_of(incident: Incident) -> Place:
    """Where the incidents behind this one begin."""
    return Place(ms_from_time(incident.opened_at), incident.incident_id)
