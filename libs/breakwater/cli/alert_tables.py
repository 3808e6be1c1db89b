"""How incidents, and alerts that did not arrive, are shown to people."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING

from breakwater.cli import formats, output

if TYPE_CHECKING:
    from breakwater.contracts.alerts import Alert
    from breakwater.contracts.api import UndeliveredAlert

_SHORT = len("inc_") + 8


def short_ids(incident_ids: Iterable[str]) -> dict[str, str]:
    """The beginning of each id, as long as tells it from the others."""
    listed = sorted(set(incident_ids))
    length = _SHORT
    while len({one[:length] for one in listed}) < len(listed):
        length += 1
    return {one: one[:length] for one in listed}


def show(alerts: list[Alert], now: datetime, *, empty: str) -> None:
    """Prints incidents, one a row."""
    short = short_ids(alert.incident_id for alert in alerts)
    output.table(
        [
            output.Column("incident"),
            output.Column("status"),
            output.Column("severity", drop=3),
            output.Column("event"),
            output.Column("agent", drop=4),  # most titles name it
            output.Column("count", right=True, drop=2),
            output.Column("since", drop=1),
            output.Column("title", below=True),
        ],
        [
            (
                short[alert.incident_id],
                output.state(alert.status),
                output.state(alert.severity),
                alert.event,
                alert.agent or "",
                f"{alert.count:,}",
                formats.clock(alert.opened_at, now),
                alert.title,
            )
            for alert in alerts
        ],
        empty=empty,
    )


def show_one(alert: Alert, now: datetime) -> None:
    """Prints all that people want to know of an incident."""
    facts: list[tuple[str, output.Cell]] = [
        ("status", output.state(alert.status)),
        ("severity", output.state(alert.severity)),
        ("event", alert.event),
        ("agent", alert.agent or ""),
        ("model", alert.model or ""),
        ("tenant", alert.tenant or ""),
        ("since", formats.clock(alert.opened_at, now)),
        ("happened", _happened(alert, now)),
        ("ends", formats.clock(alert.ends_at, now) if alert.ends_at and alert.status != "resolved" else ""),
        ("reminders", f"{alert.reminders:,}" if alert.reminders else ""),
        ("acknowledged", _done(alert.acknowledged_by, alert.acknowledged_at, now)),
        ("resolved", _done(alert.resolved_by or "itself", alert.resolved_at, now)),
        ("reason", alert.reason or ""),
        ("text", alert.text),
    ]
    output.styled((alert.incident_id, "bold"), f"  {alert.title}")
    for name, value in facts:
        if output.text_of(value):
            output.styled((f"  {name:<14}", "dim"), value)


def tell(alert: Alert, now: datetime, *, unchanged: bool) -> None:
    """Prints what came of acknowledging or resolving an incident."""
    by, at = (
        (alert.resolved_by or "itself", alert.resolved_at)
        if alert.status == "resolved"
        else (alert.acknowledged_by, alert.acknowledged_at)
    )
    done = f" {_done(by, at, now)}" if unchanged else f" by {by}"
    why = f": {alert.reason}" if alert.reason else ""
    [short] = short_ids([alert.incident_id]).values()
    output.styled(f"{short} is {'already ' if unchanged else ''}", output.state(alert.status), done, why)
    output.note(alert.title)


def show_undelivered(undelivered: list[UndeliveredAlert], now: datetime, *, empty: str) -> None:
    """Prints alerts that did not arrive, one a row."""
    output.table(
        [
            output.Column("dead letter", right=True),
            output.Column("channel"),
            output.Column("given up"),
            output.Column("replayed", drop=1),
            output.Column("alert", drop=2),
            output.Column("title", below=True),
            output.Column("error", below=True),
        ],
        [
            (
                str(one.dead_letter_id),
                one.channel,
                formats.clock(one.at, now),
                "yes" if one.replayed else "no",
                one.alert_id or "",
                one.title or "",
                one.error,
            )
            for one in undelivered
        ],
        empty=empty,
    )


def _happened(alert: Alert, now: datetime) -> str:
    times = "once" if alert.count == 1 else f"{alert.count:,} times"
    return times if alert.last_at == alert.opened_at else f"{times}, the last at {formats.clock(alert.last_at, now)}"


def _done(by: str | None, at: datetime | None, now: datetime) -> str:
    return "" if at is None else f"by {by} at {formats.clock(at, now)}"
