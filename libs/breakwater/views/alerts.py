"""Incidents, and alerts that a channel did not take."""

from __future__ import annotations

from datetime import datetime

from breakwater.contracts.alerts import Alert, UndeliveredAlert
from breakwater.policy.alert_rules import began_with, highest_severity
from breakwater.policy.formats import counted
from breakwater.views.columns import Column, clock

NO_CHANNEL = (
    "Alerts are not sent to anyone: the config has no channel. Add one under `alerts.channels`, such as Slack or a "
    "webhook."
)
SEVERITIES = ("critical", "warning", "info")


INCIDENTS: tuple[Column[Alert], ...] = (
    Column("title", lambda one: one.title, name="incident", below=True),
    Column("incident", lambda one: one.incident_id, "id", name="incident_id", page=False),
    Column("status", lambda one: one.status, "state", name="state"),
    Column("severity", highest_severity, "state", order=lambda one: SEVERITIES.index(highest_severity(one)), drop=3),
    Column("event", began_with, "words"),
    Column("agent", lambda one: one.agent, "agent", drop=4),  # most titles name it
    Column("count", lambda one: one.count, "count", name="happened", drop=2),
    Column("since", lambda one: one.opened_at, "ago", drop=1),
)
UNDELIVERED: tuple[Column[UndeliveredAlert], ...] = (
    Column("dead letter", lambda one: one.dead_letter_id, "number", name="dead_letter"),
    Column("channel", lambda one: one.channel),
    Column("title", lambda one: one.title, name="alert", missing="its content can't be read", below=True),
    Column("error", lambda one: one.error, below=True),
    Column("given up", lambda one: one.at, "ago", name="gave_up"),
    Column("replayed", lambda one: "yes" if one.replayed else "no", drop=1),
    Column("alert", lambda one: one.alert_id, name="alert_id", drop=2, page=False),
)


def done(by: str | None, at: datetime | None) -> str:
    """The operator who changed an incident, and the time: `by zoë at 10:00:03`."""
    return "" if at is None else f"by {by or 'itself'} at {clock(at)}"


def _happened(alert: Alert) -> str:
    times = counted(alert.count, "occurrence")
    return times if alert.last_at == alert.opened_at else f"{times}, the last at {clock(alert.last_at)}"


FACTS: tuple[Column[Alert], ...] = (
    Column("status", lambda one: one.status, "state"),
    Column("severity", highest_severity, "state"),
    Column("event", began_with),
    Column("ended with", lambda one: one.event if one.event != began_with(one) else None),
    Column("agent", lambda one: one.agent),
    Column("model", lambda one: one.model),
    Column("tenant", lambda one: one.tenant),
    Column("since", lambda one: one.opened_at, "time"),
    Column("count", _happened),
    Column("ends", lambda one: one.ends_at if one.status != "resolved" else None, "time"),
    Column("reminders", lambda one: one.reminders or None, "count"),
    Column("acknowledged", lambda one: done(one.acknowledged_by, one.acknowledged_at)),
    Column("resolved", lambda one: done(one.resolved_by, one.resolved_at)),
    Column("reason", lambda one: one.reason),
    Column("text", lambda one: one.text),
)
