"""How alerts are worded, by default or by a template of the config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from decimal import ROUND_DOWN, Decimal
from string import Template

from breakwater.contracts.alerts import Alert
from breakwater.contracts.types import NANO_PER_USD

_VALUES: Mapping[str, Callable[[Alert], str]] = {
    "title": lambda alert: alert.title,
    "text": lambda alert: alert.text,
    "event": lambda alert: alert.event,
    "severity": lambda alert: alert.severity,
    "status": lambda alert: alert.status,
    "change": lambda alert: alert.change,
    "agent": lambda alert: alert.agent or "",
    "model": lambda alert: alert.model or "",
    "tenant": lambda alert: alert.tenant or "",
    "count": lambda alert: f"{alert.count:,}",
    "opened_at": lambda alert: moment(alert.opened_at),
    "last_at": lambda alert: moment(alert.last_at),
    "incident_id": lambda alert: alert.incident_id,
    "by": lambda alert: alert.resolved_by or alert.acknowledged_by or "",
    "reason": lambda alert: alert.reason or "",
}

PLACEHOLDERS = (*_VALUES, "link")
"""What `${…}` may name in a template. What an alert has not is empty."""


def fill(template: str, alert: Alert, link: str) -> str:
    """A template's words for an alert. `link` is empty where links are not set up.

    Raises:
        KeyError: a name that is none of PLACEHOLDERS.
    """
    return Template(template).substitute({name: value(alert) for name, value in _VALUES.items()}, link=link)


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
