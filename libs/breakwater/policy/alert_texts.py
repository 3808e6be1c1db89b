"""How alerts are worded, by us or by a template of somebody's own."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import ROUND_DOWN, Decimal
from string import Template

from breakwater.contracts.alerts import Alert
from breakwater.contracts.types import NANO_PER_USD

PLACEHOLDERS = (
    "title",
    "text",
    "event",
    "severity",
    "status",
    "change",
    "agent",
    "model",
    "tenant",
    "count",
    "opened_at",
    "last_at",
    "incident_id",
    "by",
    "reason",
    "link",
)
"""What `${…}` may name in a template. What an alert has not is empty."""


def fill(template: str, alert: Alert, link: str) -> str:
    """A template's words for an alert. `link` is empty where links are not set up.

    Raises:
        KeyError: a name that is none of PLACEHOLDERS.
    """
    values: Mapping[str, str] = {
        "title": alert.title,
        "text": alert.text,
        "event": alert.event,
        "severity": alert.severity,
        "status": alert.status,
        "change": alert.change,
        "agent": alert.agent or "",
        "model": alert.model or "",
        "tenant": alert.tenant or "",
        "count": f"{alert.count:,}",
        "opened_at": moment(alert.opened_at),
        "last_at": moment(alert.last_at),
        "incident_id": alert.incident_id,
        "by": alert.resolved_by or alert.acknowledged_by or "",
        "reason": alert.reason or "",
        "link": link,
    }
    return Template(template).substitute(values)


def money_text(nano: int) -> str:
    """Nano-dollars for people: cents from one dollar up, below it two figures that count: `$4.00`, `$0.0015`.

    Cut off, not rounded: a text never shows more than was spent.
    """
    amount = Decimal(nano) / NANO_PER_USD
    places = 2 if nano == 0 or abs(amount) >= 1 else min(9, max(2, 1 - amount.adjusted()))
    shown = f"{abs(amount).quantize(Decimal(1).scaleb(-places), ROUND_DOWN):,f}"
    whole, _, decimals = shown.partition(".")
    return f"{'-' if nano < 0 else ''}${whole}.{decimals.rstrip('0').ljust(2, '0')}"


def moment(at: datetime) -> str:
    """A time for people: `2026-11-21 10:00:00 UTC`."""
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def sentence(words: str) -> str:
    """Words as one sentence."""
    return f"{words[:1].upper()}{words[1:].rstrip('.')}."
