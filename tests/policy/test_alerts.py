"""Which events make an alert, and what it says."""

import shlex
from datetime import UTC, datetime
from typing import Any, get_args

import pytest

from breakwater.contracts.events import AlertEvent, BreakerState, BreakerTransition, BudgetEvent, GuardEvent
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
        "total_failures": 9,
        "unique_errors": 2,
        "errors": 5,
        "within_s": 60.0,
        "cooldown_s": 60.0,
        "open_until": UNTIL,
        "version": 1,
        "at": AT,
    }
    return BreakerTransition.model_validate(given | fields)


def isolated(from_state: BreakerState = "closed", **fields: Any) -> BreakerTransition:
    given = {"rule": None, "reason": "forced open by ann: garbled answers", "by": "ann", "open_until": None}
    return transition(from_state, "isolated", **{**given, **fields})


def stopped(**fields: Any) -> GuardEvent:
    given: dict[str, Any] = {
        "event_id": "acme/nightly-review-17@1795255200000",
        "kind": "tripped",
        "agent": "writer",
        "tenant": "acme",
        "task_id": "nightly-review-17",
        "execution_id": "e11",
        "rule": "max_iterations",
        "reason": "10 iterations (limit: 10)",
        "iterations": 10,
        "tokens": 52_311,
        "cost": "4.209",
        "consecutive_failures": 1,
        "total_failures": 4,
        "unique_errors": 2,
        "at": AT,
    }
    return GuardEvent.model_validate(given | fields)


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
        ("closed", "isolated", ("breaker_open", "critical")),
        ("open", "isolated", None),
        ("half_open", "isolated", None),
        ("isolated", "closed", ("breaker_closed", "info")),
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
        (isolated(), "breaker_open"),
        (stopped(), "guard_tripped"),
        (crossing(), "budget_soft_cap"),
        (crossing(kind="hard_cap"), "budget_hard_cap"),
    ],
)
def test_nobody_is_told_what_nobody_asked_for(
    event: BreakerTransition | GuardEvent | BudgetEvent, kind: AlertEvent
) -> None:
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
        "total_failures": 9,
        "unique_errors": 2,
        "open_until": "2026-11-21T10:01:00.000Z",
        "scope": "agent_model",
        "by": None,
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
        "tenant": None,
        "period": "2026-11-21",
        "threshold_percent": 80,
        "enforcement": "hard",
        "resets_at": None,
        "timestamp": "2026-11-21T10:00:00.000Z",
    }


def test_a_budget_of_a_tenant_or_of_all_is_told_as_theirs_with_the_agent_that_reached_it() -> None:
    tenant = alert_for(crossing(scope="tenant", tenant="acme"), ALL)
    assert tenant is not None
    assert tenant.title == "Budget at 80 %: tenant acme, daily"
    assert "spent by tenant acme in 2026-11-21, last by agent writer, as of" in tenant.text
    assert (tenant.agent, tenant.payload["agent"], tenant.payload["tenant"]) == (None, "writer", "acme")
    everyone = alert_for(crossing(scope="global", threshold_percent=100), ALL)
    assert everyone is not None
    assert (everyone.event, everyone.title) == ("budget_soft_cap", "Budget used up: all agents, daily")
    refusing = alert_for(crossing(kind="hard_cap", threshold_percent=100), ALL)
    assert refusing is not None
    assert refusing.title == "Budget refuses calls: writer, daily"


@pytest.mark.parametrize("kind", ["raised", "repaired"])
def test_what_people_and_services_did_to_a_budget_alerts_nobody(kind: str) -> None:
    assert alert_for(crossing(kind=kind, previous="4", by="ops", reason="launch day"), ALL) is None


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


def test_a_breaker_forced_open_says_by_whom_and_how_it_ends_and_promises_no_probe() -> None:
    alert = alert_for(isolated(open_until=UNTIL), ALL)
    assert alert is not None
    assert alert.title == "Breaker open: writer on gpt-4.1:mini"
    assert alert.text == (
        "Forced open by ann: garbled answers. Since 2026-11-21 10:00:00 UTC no call of writer goes to gpt-4.1:mini; "
        "its jobs use the fallback models, or fail where there are none. It stays so until somebody resets it. "
        "To do: `breakwater breakers reset writer gpt-4.1:mini` once calls may go on."
    )
    assert (alert.payload["by"], alert.payload["reason"]) == ("ann", "forced open by ann: garbled answers")


def test_a_breaker_that_was_reset_says_by_whom() -> None:
    alert = alert_for(transition("isolated", "closed", reason="reset by ann: answers are fine", by="ann"), ALL)
    assert alert is not None
    assert alert.title == "Breaker closed: writer on gpt-4.1:mini"
    assert alert.text.startswith("Reset by ann: answers are fine. Since 2026-11-21 10:00:00 UTC calls of writer go to")
    assert alert.payload["by"] == "ann"


@pytest.mark.parametrize(
    ("scope", "model", "named"), [("model", "gpt-4", "gpt-4"), ("provider", "openai/*", "provider openai")]
)
def test_a_breaker_that_agents_share_is_told_as_theirs(scope: str, model: str, named: str) -> None:
    shared: dict[str, Any] = {"scope": scope, "agent": "*", "model": model}
    opened = alert_for(transition(**shared), ALL)
    forced = alert_for(isolated(**shared), ALL)
    closed = alert_for(transition("half_open", "closed", reason="the half-open probe succeeded", **shared), ALL)
    assert opened is not None
    assert forced is not None
    assert closed is not None
    assert opened.title == f"Breaker open: all agents on {named}"
    assert opened.text == (
        "3 consecutive failures (threshold: 3). Since 2026-11-21 10:00:00 UTC no call of the agents that share this "
        f"breaker goes to {named}; their jobs use the fallback models, or fail where there are none. "
        "One probe call is let through after 2026-11-21 10:01:00 UTC. "
        "To do: look at the agents' latest failed attempts and at the provider's status page."
    )
    quoted = model if scope == "model" else f"'{model}'"
    assert f"`breakwater breakers reset '*' {quoted}`" in forced.text
    assert closed.title == f"Breaker closed: all agents on {named}"
    assert f"calls of the agents that share this breaker go to {named} again" in closed.text
    assert [opened.payload[name] for name in ("agent", "model_id", "scope")] == ["*", model, scope]


def test_an_agent_of_any_name_is_not_taken_for_all_of_them() -> None:
    alert = alert_for(transition(agent="*", model="openai/*"), ALL)
    assert alert is not None
    assert alert.title == "Breaker open: * on openai/*"


def test_a_stopped_task_is_told_with_what_where_since_when_why_and_what_to_do() -> None:
    alert = alert_for(stopped(), ALL)
    assert alert is not None
    assert (alert.severity, alert.agent, alert.model, alert.at) == ("critical", "writer", None, AT)
    assert alert.source_id == "acme/nightly-review-17@1795255200000"
    assert alert.title == "Task stopped: nightly-review-17 of writer"
    assert alert.text == (
        "10 iterations (limit: 10). Since 2026-11-21 10:00:00 UTC task nightly-review-17 of tenant acme makes no "
        "calls, and its jobs fail; so far 10 iterations, 52,311 tokens, $4.20. To do: look at the task's last "
        "executions; `breakwater guards reset --tenant=acme nightly-review-17` lets it go on."
    )


def test_a_guard_alert_is_pending_and_carries_the_figures() -> None:
    alert = alert_for(stopped(), ALL)
    assert alert is not None
    assert alert.payload == {
        "agent": "writer",
        "task_id": "nightly-review-17",
        "tenant": "acme",
        "execution_id": "e11",
        "rule": "max_iterations",
        "reason": "10 iterations (limit: 10)",
        "iterations": 10,
        "tokens": 52_311,
        "cost": "4.209000000",
        "status": "pending",
        "timestamp": "2026-11-21T10:00:00.000Z",
    }


def test_a_task_without_a_tenant_names_none() -> None:
    alert = alert_for(stopped(tenant=None, iterations=1), ALL)
    assert alert is not None
    assert "tenant" not in alert.text
    assert "so far 1 iteration, " in alert.text
    assert "`breakwater guards reset nightly-review-17`" in alert.text
    assert alert.payload["tenant"] is None


def test_a_task_that_may_go_on_makes_no_alert() -> None:
    assert alert_for(stopped(kind="reset", reason="reset by ann", by="ann"), ALL) is None


@pytest.mark.parametrize("tenant", ["acme", "a b; x"])
@pytest.mark.parametrize("task_id", ["t1", "nightly; rm -rf $HOME", "it's `mine`", "--url=http://x", "задача"])
def test_the_command_of_an_alert_resets_that_task_whatever_it_is_called(task_id: str, tenant: str) -> None:
    alert = alert_for(stopped(task_id=task_id, tenant=tenant), ALL)
    assert alert is not None
    shown = alert.text.partition("executions; `")[2].removesuffix("` lets it go on.")
    end = ["--"] if task_id.startswith("-") else []
    assert shlex.split(shown) == ["breakwater", "guards", "reset", f"--tenant={tenant}", *end, task_id]


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
            "Calls that do not fit are refused until the period ends or the cap is raised. To do: find what spends, "
            "or raise the cap: `breakwater budgets raise agent:writer/daily USD --reason WHY`.",
        ),
        (
            {"kind": "hard_cap", "threshold_percent": 100, "total": "6.019", "enforcement": "soft"},
            "Budget used up: writer, daily",
            "$6.01 of $5.00 (120 %) spent by writer in 2026-11-21, as of 2026-11-21 10:00:00 UTC. "
            "The cap is not enforced: calls go on. To do: find what spends, or raise "
            "the cap: `breakwater budgets raise agent:writer/daily USD --reason WHY`.",
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
