"""Which events make an alert, and what it says."""

from datetime import UTC, datetime
from typing import Any, get_args

import pytest

from breakwater.contracts.events import AlertEvent, BreakerState, BreakerTransition, BudgetEvent
from breakwater.contracts.types import nano_from_usd
from breakwater.policy.alerts import alert_for, money_text

ALL: tuple[AlertEvent, ...] = get_args(AlertEvent)
AT = datetime(2026, 11, 21, 10, 0, 0, tzinfo=UTC)
UNTIL = datetime(2026, 11, 21, 10, 1, 0, tzinfo=UTC)


def transition(
    from_state: BreakerState = "closed", to_state: BreakerState = "open", **fields: Any
) -> BreakerTransition:
    given: dict[str, Any] = {
        "transition_id": "writer/gpt-4.1:mini#7.1",
        "agent": "writer",
        "model": "gpt-4.1:mini",
        "from_state": from_state,
        "to_state": to_state,
        "rule": "consecutive_failures",
        "reason": "3 consecutive failures (threshold: 3)",
        "consecutive_failures": 3,
        "errors": 5,
        "within_s": 60.0,
        "cooldown_s": 60.0,
        "open_until": UNTIL,
        "version": 1,
        "at": AT,
    }
    return BreakerTransition.model_validate(given | fields)


def crossing(**fields: Any) -> BudgetEvent:
    given: dict[str, Any] = {
        "event_id": "agent:writer/daily/2026-11-21/80",
        "kind": "soft_cap",
        "scope": "agent",
        "agent": "writer",
        "window": "daily",
        "period": "2026-11-21",
        "threshold_percent": 80,
        "limit": "5",
        "total": "4",
        "enforcement": "hard",
        "at": AT,
    }
    return BudgetEvent.model_validate(given | fields)


@pytest.mark.parametrize(
    ("from_state", "to_state", "expected"),
    [
        ("closed", "open", ("breaker_open", "critical")),
        ("open", "half_open", None),
        ("half_open", "open", None),
        ("half_open", "closed", ("breaker_closed", "info")),
        ("open", "closed", ("breaker_closed", "info")),
        ("closed", "closed", None),
    ],
)
def test_an_incident_is_told_when_it_begins_and_when_it_ends_and_not_between(
    from_state: BreakerState, to_state: BreakerState, expected: tuple[str, str] | None
) -> None:
    alert = alert_for(transition(from_state, to_state), ALL)
    assert (alert and (alert.event, alert.severity)) == expected


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("soft_cap", ("budget_soft_cap", "warning")), ("hard_cap", ("budget_hard_cap", "critical"))],
)
def test_a_budget_crossing_makes_an_alert_of_its_kind(kind: str, expected: tuple[str, str]) -> None:
    alert = alert_for(crossing(kind=kind), ALL)
    assert alert is not None
    assert (alert.event, alert.severity) == expected


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        (transition(), "breaker_open"),
        (transition("half_open", "closed"), "breaker_closed"),
        (crossing(), "budget_soft_cap"),
        (crossing(kind="hard_cap"), "budget_hard_cap"),
    ],
)
def test_nobody_is_told_what_nobody_asked_for(event: BreakerTransition | BudgetEvent, kind: AlertEvent) -> None:
    assert alert_for(event, {kind}) is not None
    assert alert_for(event, set(ALL) - {kind}) is None


def test_the_same_event_is_the_same_alert_and_another_event_is_another() -> None:
    first, again, later = (alert_for(transition(version=v), ALL) for v in (1, 1, 2))
    other = alert_for(transition(transition_id="writer/gpt-4.1:mini#7.4"), ALL)
    assert first is not None
    assert later is not None
    assert other is not None
    assert first == again
    assert first.alert_id == later.alert_id
    assert first.alert_id != other.alert_id


def test_an_alert_id_fits_http_headers_whatever_script_names_are_in() -> None:
    alert = alert_for(transition(transition_id="作家/модель.1#7.1"), ALL)
    assert alert is not None
    assert alert.alert_id.isascii()
    assert alert.alert_id.replace("_", "").isalnum()
    assert alert.source_id == "作家/модель.1#7.1"


def test_a_breaker_alert_carries_the_figures() -> None:
    alert = alert_for(transition(), ALL)
    assert alert is not None
    assert alert.payload == {
        "agent": "writer",
        "model_id": "gpt-4.1:mini",
        "errors": 5,
        "within": 60.0,
        "cooldown": 60.0,
        "timestamp": "2026-11-21T10:00:00.000Z",
        "reason": "3 consecutive failures (threshold: 3)",
        "consecutive_failures": 3,
        "open_until": "2026-11-21T10:01:00.000Z",
    }
    assert (alert.agent, alert.model, alert.at) == ("writer", "gpt-4.1:mini", AT)


def test_a_budget_alert_carries_the_figures_with_money_as_exact_text() -> None:
    alert = alert_for(crossing(total="4.000000001"), ALL)
    assert alert is not None
    assert alert.payload == {
        "scope": "agent",
        "limit": "5.000000000",
        "total": "4.000000001",
        "window": "daily",
        "agent": "writer",
        "period": "2026-11-21",
        "threshold_percent": 80,
        "enforcement": "hard",
        "timestamp": "2026-11-21T10:00:00.000Z",
    }


def test_an_open_breaker_is_told_with_what_where_since_when_and_what_to_do() -> None:
    alert = alert_for(transition(), ALL)
    assert alert is not None
    assert alert.title == "Breaker open: writer on gpt-4.1:mini"
    assert alert.text == (
        "3 consecutive failures (threshold: 3). Since 2026-11-21 10:00:00 UTC no call of writer goes to gpt-4.1:mini; "
        "its jobs use the fallback models, or fail where there are none. "
        "One probe call is let through after 2026-11-21 10:01:00 UTC. "
        "To do: look at the agent's latest failed attempts and at the provider's status page."
    )


def test_a_breaker_without_a_known_end_promises_no_probe() -> None:
    alert = alert_for(transition(open_until=None), ALL)
    assert alert is not None
    assert "probe" not in alert.text
    assert alert.payload["open_until"] is None


def test_a_closed_breaker_says_that_nothing_is_to_be_done() -> None:
    alert = alert_for(transition("half_open", "closed", reason="the half-open probe succeeded"), ALL)
    assert alert is not None
    assert alert.title == "Breaker closed: writer on gpt-4.1:mini"
    assert alert.text == (
        "The half-open probe succeeded. Since 2026-11-21 10:00:00 UTC calls of writer go to gpt-4.1:mini again. "
        "Nothing to do."
    )


@pytest.mark.parametrize(
    ("fields", "title", "text"),
    [
        (
            {},
            "Budget at 80 %: writer, daily",
            "$4.00 of $5.00 (80 %) spent by writer in 2026-11-21, as of 2026-11-21 10:00:00 UTC. "
            "Calls that might pass the cap will be refused. To do: check whether this is expected.",
        ),
        (
            {"enforcement": "soft", "scope": "global", "agent": None, "window": "monthly", "period": "2026-11"},
            "Budget at 80 %: all agents, monthly",
            "$4.00 of $5.00 (80 %) spent by all agents in 2026-11, as of 2026-11-21 10:00:00 UTC. "
            "The cap is not enforced: calls go on. To do: check whether this is expected.",
        ),
        (
            {"kind": "hard_cap", "threshold_percent": 100, "total": "5"},
            "Budget used up: writer, daily",
            "$5.00 of $5.00 (100 %) spent by writer in 2026-11-21, as of 2026-11-21 10:00:00 UTC. "
            "Calls are refused until the period ends or the cap is raised. To do: raise the cap, or find what spends.",
        ),
        (
            {"kind": "hard_cap", "threshold_percent": 100, "total": "6.019", "enforcement": "soft"},
            "Budget used up: writer, daily",
            "$6.01 of $5.00 (120 %) spent by writer in 2026-11-21, as of 2026-11-21 10:00:00 UTC. "
            "The cap is not enforced: calls go on. To do: raise the cap, or find what spends.",
        ),
    ],
)
def test_a_budget_is_told_with_its_spend_and_what_follows(fields: dict[str, Any], title: str, text: str) -> None:
    alert = alert_for(crossing(**fields), ALL)
    assert alert is not None
    assert (alert.title, alert.text) == (title, text)


def test_a_share_is_never_rounded_up_to_the_whole() -> None:
    alert = alert_for(crossing(total="4.999999999"), ALL)
    assert alert is not None
    assert alert.text.startswith("$4.99 of $5.00 (99 %)")


@pytest.mark.parametrize(
    ("usd", "text"),
    [
        ("0", "$0.00"),
        ("5", "$5.00"),
        ("4.5", "$4.50"),
        ("1.999999999", "$1.99"),
        ("0.5", "$0.50"),
        ("0.05", "$0.05"),
        ("0.0015", "$0.0015"),
        ("0.00159", "$0.0015"),
        ("0.000000001", "$0.000000001"),
        ("1234567.891", "$1,234,567.89"),
        ("-4.2", "-$4.20"),
    ],
)
def test_money_is_trimmed_for_people(usd: str, text: str) -> None:
    assert money_text(nano_from_usd(usd)) == text
