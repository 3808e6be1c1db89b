"""Alerts and digests, as the alerter hands them to channels."""

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from breakwater.alerts.contract import Alert, AlertDigest, HeldBack
from breakwater.alerts.rules.incidents import IncidentRules, acknowledge, decide, resolve
from breakwater.alerts.rules.signals import signals_of
from breakwater.alerts.settings import Reminders
from tests.services.alerter.kit import AT, opened, stopped

RULES = IncidentRules(
    on_events=("breaker_open", "breaker_closed", "guard_tripped"),
    quiet_s=600,
    escalate=("guard_tripped",),
    reminders=Reminders(),
)


def alert(**fields: Any) -> Alert:
    """A breaker of writer on gpt-4.1 that opened at ten."""
    found = decide(signals_of(opened())[0], None, RULES)
    assert found is not None
    return found.model_copy(update=fields)


def stopped_task(**fields: Any) -> Alert:
    """A task that was stopped, and waits for a person."""
    found = decide(signals_of(stopped(**fields))[0], None, RULES)
    assert found is not None
    return found


def repeated(current: Alert, version: int = 2, after_s: float = 60) -> Alert:
    """It opens once more."""
    found = decide(signals_of(opened(version, at=AT + timedelta(seconds=after_s)))[0], current, RULES)
    assert found is not None
    return found


def acknowledged(current: Alert, by: str = "anna", reason: str | None = "calling the provider") -> Alert:
    found = acknowledge(current, by, reason, AT + timedelta(minutes=2))
    assert found is not None
    return found


def closed(current: Alert) -> Alert:
    """The breaker closes by itself after an hour and five minutes."""
    event = opened(
        9,
        from_state="half_open",
        to_state="closed",
        rule=None,
        reason="a probe succeeded",
        at=AT + timedelta(minutes=65),
    )
    found = decide(signals_of(event)[0], current, RULES)
    assert found is not None
    return found


def resolved(current: Alert, by: str = "ben", reason: str | None = "the key was renewed") -> Alert:
    found = resolve(current, by, reason, AT + timedelta(minutes=30))
    assert found is not None
    return found


def held(number: int, **fields: Any) -> HeldBack:
    given: dict[str, Any] = {
        "alert_id": f"alert_{number}_1",
        "incident_id": f"inc_{number}",
        "key": f"breaker_open/writer/{number}",
        "event": "breaker_open",
        "severity": "critical",
        "status": "firing",
        "agent": "writer",
        "title": f"Breaker open: number {number}",
        "count": 1,
        "opened_at": AT,
    }
    return HeldBack.model_validate(given | fields)


def digest(alerts: Sequence[HeldBack], **fields: Any) -> AlertDigest:
    given: dict[str, Any] = {
        "digest_id": "digest_1",
        "why": "rate_limit",
        "severity": "critical",
        "held_from": AT,
        "held_until": AT + timedelta(minutes=5),
        "counts": Counter(one.event for one in alerts),
        "alerts": tuple(alerts),
        "at": AT + timedelta(minutes=5),
    }
    return AlertDigest.model_validate(given | fields)
