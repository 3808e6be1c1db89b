"""Columns of incidents, and of alerts that could not be delivered."""

from __future__ import annotations

from datetime import datetime

from breakwater.alerts.contract import Alert, UndeliveredAlert
from breakwater.alerts.rules.alert_rules import SEVERITIES, began_with, concerned_agents, severity_now
from breakwater.kernel.columns import Column, clock
from breakwater.kernel.formats import quantity

NO_CHANNEL = (
    "Alerts are not sent to anyone: the config has no channel. Add one under `alerts.channels`, such as Slack or a "
    "webhook."
)


def _agents(alert: Alert) -> str | None:
    return ", ".join(concerned_agents(alert)) or None


INCIDENTS: tuple[Column[Alert], ...] = (
    Column("title", lambda alert: alert.title, name="incident", below=True),
    Column("incident", lambda alert: alert.incident_id, "id", name="incident_id", page=False),
    Column("status", lambda alert: alert.status, "state", name="state"),
    Column("severity", severity_now, "state", order=lambda alert: -SEVERITIES.index(severity_now(alert)), drop=3),
    Column("event", began_with, "words"),
    Column("agent", _agents, name="agent", drop=4),  # most titles name it
    Column("count", lambda alert: alert.count, "count", name="happened", drop=2),
    Column("since", lambda alert: alert.opened_at, "ago", drop=1),
)
UNDELIVERED: tuple[Column[UndeliveredAlert], ...] = (
    Column("dead letter", lambda undelivered: undelivered.dead_letter_id, "number", name="dead_letter"),
    Column("channel", lambda undelivered: undelivered.channel),
    Column(
        "title", lambda undelivered: undelivered.title, name="alert", missing="its content can't be read", below=True
    ),
    Column("error", lambda undelivered: undelivered.error, below=True),
    Column("given up", lambda undelivered: undelivered.at, "ago", name="gave_up"),
    Column("replayed", lambda undelivered: "yes" if undelivered.replayed else "no", drop=1),
    Column("alert", lambda undelivered: undelivered.alert_id, name="alert_id", drop=2, page=False),
)


def changed_by(operator: str | None, at: datetime | None) -> str:
    """Says who changed an incident, and when: `by zoë at 10:00:03`; empty if `at` is None."""
    return "" if at is None else f"by {operator or 'itself'} at {clock(at)}"


def _occurrences(alert: Alert) -> str:
    times = quantity(alert.count, "occurrence")
    return times if alert.last_at == alert.opened_at else f"{times}, the last at {clock(alert.last_at)}"


FACTS: tuple[Column[Alert], ...] = (
    Column("status", lambda alert: alert.status, "state"),
    Column("severity", severity_now, "state"),
    Column("event", began_with),
    Column("ended with", lambda alert: alert.event if alert.event != began_with(alert) else None),
    Column("agent", _agents),
    Column("model", lambda alert: alert.model),
    Column("tenant", lambda alert: alert.tenant),
    Column("since", lambda alert: alert.opened_at, "time"),
    Column("count", _occurrences),
    Column("ends", lambda alert: alert.ends_at if alert.status != "resolved" else None, "time"),
    Column("reminders", lambda alert: alert.reminders or None, "count"),
    Column("acknowledged", lambda alert: changed_by(alert.acknowledged_by, alert.acknowledged_at)),
    Column("resolved", lambda alert: changed_by(alert.resolved_by, alert.resolved_at)),
    Column("reason", lambda alert: alert.reason),
    Column("text", lambda alert: alert.text),
)
