"""What is shown of incidents, and of alerts that could not be delivered."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from breakwater.alerts.contract import Alert, UndeliveredAlert
from breakwater.alerts.rules.alert_rules import urgency
from breakwater.alerts.views import FACTS, INCIDENTS, UNDELIVERED, changed_by
from breakwater.kernel.columns import clock
from breakwater.kernel.types import format_time
from tests.api_documents import incident, undelivered
from tests.columns import texts, tones

NOW = datetime.now(UTC)
SINCE = NOW - timedelta(days=2)


def alert(**fields: Any) -> Alert:
    times = {"opened_at": format_time(SINCE), "last_at": format_time(SINCE)}
    return Alert.model_validate(incident(**times | fields))


def test_an_incident_shows_what_it_is_about_and_how_it_stands() -> None:
    assert texts(INCIDENTS, alert(count=1_200)) == {
        "title": "writer is stopped",
        "incident": "inc_1",
        "status": "firing",
        "severity": "critical",
        "event": "breaker_open",
        "agent": "writer",
        "count": "1,200",
        "since": clock(SINCE),
    }
    assert tones(INCIDENTS, alert(status="acknowledged")) == {"status": "warn", "severity": "bad"}


def test_the_dearest_severity_comes_first() -> None:
    [severity] = [column for column in INCIDENTS if column.title == "severity"]
    alerts = [alert(severity=name) for name in ("info", "critical", "warning")]
    assert severity.order is not None
    assert [one.severity for one in sorted(alerts, key=severity.order)] == ["critical", "warning", "info"]


def test_an_unresolved_incident_shows_its_severity_now():
    half_open = alert(severity="info", highest_severity="critical", first_event="breaker_open")
    assert texts(INCIDENTS, half_open)["severity"] == texts(FACTS, half_open)["severity"] == "info"


def test_incidents_are_listed_by_severity_then_age():
    hours = {"old": 9, "older": 12, "new": 1}

    def at(age: str, **fields: Any) -> Alert:
        return alert(opened_at=format_time(NOW - timedelta(hours=hours[age])), **fields)

    ordered = [
        at("old", severity="critical"),
        at("new", severity="critical"),
        at("older", severity="warning", status="pending"),
        at("old", severity="warning", status="acknowledged"),
        at("older", severity="info", highest_severity="critical"),
        at("new", severity="warning", status="resolved"),
        at("older", severity="critical", status="resolved"),
    ]
    assert sorted(ordered[4:] + ordered[:4], key=urgency) == ordered


def test_one_that_is_over_is_shown_as_what_it_was() -> None:
    over = {"event": "breaker_closed", "severity": "info", "status": "resolved"}
    for known in (
        {"first_event": "breaker_open", "highest_severity": "critical"},
        {"highest_severity": None},  # as an earlier version stored it, which said neither
    ):
        closed = alert(**over | known)
        facts = texts(FACTS, closed)
        assert (facts["severity"], facts["event"], facts["ended with"]) == (
            "critical",
            "breaker_open",
            "breaker_closed",
        )
        listed = texts(INCIDENTS, closed)
        assert (listed["severity"], listed["event"]) == ("critical", "breaker_open")


def test_all_that_is_known_of_one_is_shown() -> None:
    given = {
        "status": "acknowledged",
        "model": "gpt-4.1",
        "tenant": "acme",
        "count": 1_200,
        "last_at": format_time(NOW),
        "ends_at": format_time(NOW),
        "reminders": 2,
        "acknowledged_by": "ops",
        "acknowledged_at": format_time(NOW),
        "reason": "looking at it",
    }
    assert texts(FACTS, alert(**given)) == {
        "status": "acknowledged",
        "severity": "critical",
        "event": "breaker_open",
        "agent": "writer",
        "model": "gpt-4.1",
        "tenant": "acme",
        "since": clock(SINCE),
        "count": f"1,200 occurrences, the last at {clock(NOW)}",
        "ends": clock(NOW),
        "reminders": "2",
        "acknowledged": f"by ops at {clock(NOW)}",
        "reason": "looking at it",
        "text": "It failed 3 times in a row.",
    }
    once = texts(FACTS, alert(status="resolved", ends_at=format_time(NOW), resolved_at=format_time(NOW)))
    assert (once["count"], once["resolved"], "ends" in once) == ("1 occurrence", f"by itself at {clock(NOW)}", False)
    assert changed_by("zoë", None) == ""


def test_an_undelivered_alert_shows_its_channel_and_why_it_did_not_arrive() -> None:
    lost = UndeliveredAlert.model_validate(undelivered(at=format_time(NOW)))
    assert texts(UNDELIVERED, lost) == {
        "dead letter": "17",
        "channel": "ops",
        "title": "writer is stopped",
        "error": "ops: the receiver answered 500 (tried 12 times)",
        "given up": clock(NOW),
        "replayed": "no",
        "alert": "alert_1",
    }
    unreadable = UndeliveredAlert.model_validate(undelivered(title=None, alert_id=None, replayed=True))
    shown = texts(UNDELIVERED, unreadable)
    assert (shown["title"], shown["replayed"], "alert" in shown) == ("its content can't be read", "yes", False)
