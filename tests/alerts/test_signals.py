"""What events say of incidents, and in which words."""

import shlex
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from breakwater.alerts.contract import Alert
from breakwater.alerts.rules.alert_rules import budget_of, severity_of
from breakwater.alerts.rules.incidents import IncidentRules, decide
from breakwater.alerts.rules.signals import (
    Firing,
    Resolved,
    channel_works,
    of_dead_letter,
    of_execution,
    of_quotas,
    signals_of,
)
from breakwater.alerts.settings import Reminders
from breakwater.breakers.contract import BreakerState, BreakerTransition
from breakwater.jobs.contract.execution import Attempt, Execution
from breakwater.kernel.formats import moment
from breakwater.kernel.nats.contract import DeadLetter
from breakwater.kernel.types import nano_from_usd
from breakwater.limits.contract import BudgetEvent, GuardEvent
from tests.records.samples import alert, attempt, budget_event
from tests.tables import each_row

AT = datetime(2026, 11, 21, 10, 0, 0, tzinfo=UTC)
UNTIL = datetime(2026, 11, 21, 10, 1, 0, tzinfo=UTC)


def signal_of(event: BreakerTransition | GuardEvent | BudgetEvent) -> Firing | Resolved | None:
    said = signals_of(event)
    assert len(said) <= 1
    return said[0] if said else None


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
        "reason": "3 jobs in a row failed (threshold: 3)",
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
    given = {"rule": None, "reason": "isolated by ann: garbled answers", "by": "ann", "open_until": None}
    return transition(from_state, "isolated", **{**given, **fields})


def stopped(**fields: Any) -> GuardEvent:
    given: dict[str, Any] = {
        "event_id": "acme/nightly-review-17@1795255200000",
        "kind": "tripped",
        "agent": "writer",
        "tenant": "acme",
        "task_id": "nightly-review-17",
        "task_key": "nightly-review-17",
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


@each_row(
    ("from_state", "to_state", "expected"),
    [
        ("closed", "open", ("breaker_open", Firing)),
        ("open", "half_open", None),
        ("half_open", "open", ("breaker_open", Firing)),
        ("half_open", "closed", ("breaker_closed", Resolved)),
        ("open", "closed", ("breaker_closed", Resolved)),
        ("closed", "closed", None),
        ("closed", "isolated", ("breaker_open", Firing)),
        ("open", "isolated", None),
        ("half_open", "isolated", ("breaker_open", Firing)),
        ("isolated", "closed", ("breaker_closed", Resolved)),
    ],
)
def test_an_incident_is_reported_when_it_begins_and_when_it_ends_and_not_between(
    from_state: BreakerState, to_state: BreakerState, expected: tuple[str, type] | None
) -> None:
    alert = signal_of(transition(from_state, to_state))
    assert (alert and (alert.event, type(alert))) == expected


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("soft_cap", "budget_soft_cap"), ("hard_cap", "budget_hard_cap")],
)
def test_a_budget_crossing_is_an_incident_of_its_kind_until_the_period_ends(kind: str, expected: str) -> None:
    alert = signal_of(crossing(kind=kind, resets_at=UNTIL))
    assert isinstance(alert, Firing)
    assert (alert.event, alert.ends_at, alert.key) == (
        expected,
        UNTIL,
        f"{expected}/agent/writer/daily/2026-11-21/80",
    )


def test_what_an_incident_is_of_has_no_name_of_somebody_else_in_it() -> None:
    keys = [
        signal_of(transition(agent="a/b", model="c")),
        signal_of(transition(agent="a", model="b/c")),
        signal_of(stopped(tenant=None, task_id="t", task_key="t")),
        signal_of(stopped(tenant="t", task_id="t", task_key="t")),
    ]
    assert [one.key for one in keys if one] == [
        "breaker_open/a%2Fb/c",
        "breaker_open/a/b%2Fc",
        "guard_tripped//t",
        "guard_tripped/t/t",
    ]


def test_a_breaker_alert_carries_the_figures() -> None:
    alert = signal_of(transition())
    assert alert is not None
    assert alert.payload == {
        "agent": "writer",
        "model_id": "gpt-4.1:mini",
        "errors": 5,
        "within": 60.0,
        "cooldown": 60.0,
        "timestamp": "2026-11-21T10:00:00.000Z",
        "reason": "3 jobs in a row failed (threshold: 3)",
        "consecutive_failures": 3,
        "total_failures": 9,
        "unique_errors": 2,
        "open_for": None,
        "open_until": "2026-11-21T10:01:00.000Z",
        "waits": False,
        "scope": "agent_model",
        "by": None,
    }
    assert isinstance(alert, Firing)
    assert (alert.agent, alert.model, alert.at) == ("writer", "gpt-4.1:mini", AT)


def test_a_budget_alert_carries_the_figures_with_money_as_exact_text() -> None:
    alert = signal_of(crossing(total="4.000000001"))
    assert alert is not None
    assert alert.payload == {
        "scope": "agent",
        "limit": "5.000000000",
        "total": "4.000000001",
        "reserved": None,
        "window": "daily",
        "agent": "writer",
        "tenant": None,
        "period": "2026-11-21",
        "threshold_percent": 80,
        "enforcement": "hard",
        "resets_at": None,
        "timestamp": "2026-11-21T10:00:00.000Z",
    }


def test_a_budget_alert_distinguishes_what_is_spent_held_by_calls_in_flight_and_free() -> None:
    alert = signal_of(crossing(total="4", reserved="0.75"))
    assert alert is not None
    assert "$4.00 of $5.00 (80 %) spent by writer" in alert.text
    assert "$0.75 is held by calls in flight, and $0.25 is free." in alert.text
    assert alert.payload["reserved"] == "0.750000000"


@each_row(
    ("place", "budget"),
    [
        ({"scope": "global"}, "global/daily"),
        ({"scope": "tenant", "tenant": "acme"}, "tenant:acme/daily"),
        ({"scope": "key", "name": "acme-bot"}, "key:acme-bot/daily"),
        ({"scope": "user", "name": "ann", "within": "team:research"}, "user:ann within team:research/daily"),
        ({"scope": "agent", "within": "team:research"}, "agent:writer within team:research/daily"),
    ],
)
def test_the_incident_of_a_budget_of_any_scope_names_the_budget(place: dict[str, Any], budget: str) -> None:
    firing = signal_of(crossing(**place))
    assert isinstance(firing, Firing)
    assert budget_of(alert(event=firing.event, payload=firing.payload)) == budget


def test_a_budget_of_a_tenant_or_of_all_is_reported_as_theirs_with_the_agent_that_reached_it() -> None:
    tenant = signal_of(crossing(scope="tenant", tenant="acme"))
    assert isinstance(tenant, Firing)
    assert tenant.title == "Limit at 80 %: tenant acme, daily"
    assert "spent by tenant acme in 2026-11-21, last by agent writer, as of" in tenant.text
    assert (tenant.agent, tenant.payload["agent"], tenant.payload["tenant"]) == (None, "writer", "acme")
    everyone = signal_of(crossing(scope="global", threshold_percent=100))
    assert everyone is not None
    assert (everyone.event, everyone.title) == ("budget_soft_cap", "Limit used up: the plane, daily")
    refusing = signal_of(crossing(kind="hard_cap", threshold_percent=100))
    assert refusing is not None
    assert refusing.title == "Limit refuses calls: writer, daily"


@pytest.mark.parametrize("kind", ["raise_ended", "repaired"])
def test_what_people_and_services_did_to_a_budget_alerts_nobody(kind: str) -> None:
    assert signal_of(crossing(kind=kind, previous="4", by="ops", reason="launch day")) is None


def test_a_raised_cap_ends_the_incidents_of_what_is_above_the_spend_now() -> None:
    raised = signals_of(crossing(kind="raised", limit="8", total="5", by="ops", reason="raised by ops: launch day"))
    hard, soft = raised
    assert isinstance(hard, Resolved)
    assert isinstance(soft, Resolved)
    assert (hard.by, hard.above) == ("ops", 62)
    place = "agent/writer/daily/2026-11-21"
    assert hard.ends(f"budget_hard_cap/{place}/100")
    assert soft.ends(f"budget_soft_cap/{place}/80")
    assert not soft.ends(f"budget_soft_cap/{place}/50")
    assert not soft.ends(f"budget_soft_cap/{place.replace('21', '22')}/80")
    assert not soft.ends(f"budget_hard_cap/{place}/100")
    assert hard.text == "Raised by ops: launch day. $5.00 of $8.00 is spent. Nothing to do."


def test_a_breaker_that_waits_for_a_call_is_an_information_in_words_until_an_hour_is_over() -> None:
    reason = "the cool-down has ended; it waits for a call to try it"
    waits = signal_of(transition("open", "half_open", waits=True, reason=reason, open_until=None))
    assert isinstance(waits, Firing)
    assert (waits.severity, waits.ends_at, waits.times, waits.continues) == (
        "info", AT + timedelta(hours=1), 0, "unresolved",
    )  # fmt: skip
    assert waits.title == "Breaker half-open: writer on gpt-4.1:mini"
    assert waits.text == (
        "The cool-down has ended; it waits for a call to try it. If a call of writer to gpt-4.1:mini succeeds, the "
        "breaker closes; if it fails, it opens again. Nothing to do; `breakwater breakers reset writer gpt-4.1:mini` "
        "admits all calls now. The incident ends at 2026-11-21 11:00:00 UTC if none comes."
    )


def test_an_open_breaker_is_reported_with_what_where_since_when_and_what_to_do() -> None:
    alert = signal_of(transition())
    assert alert is not None
    assert alert.title == "Breaker open: writer on gpt-4.1:mini"
    assert alert.text == (
        "The breaker of agent writer for gpt-4.1:mini is open until 2026-11-21 10:01:00 UTC. "
        "3 jobs in a row failed (threshold: 3). To do: look at `breakwater executions --agent=writer --since=1h` and "
        "at the provider's status page; `breakwater breakers reset writer gpt-4.1:mini` admits calls now. "
        "Since 2026-11-21 10:00:00 UTC its jobs use other deployments or models, or fail if there are none. "
        "After the cool-down, one probe call is admitted."
    )


def test_a_breaker_that_is_open_for_one_caller_is_reported_with_whom_and_again_when_it_opens_for_all() -> None:
    for_one = signal_of(transition(open_for="key app and tenant acme"))
    assert isinstance(for_one, Firing)
    assert for_one.title == "Breaker open: writer on gpt-4.1:mini, for key app and tenant acme"
    assert "its jobs for key app and tenant acme, and no others, use other deployments or models" in for_one.text
    for_all = signal_of(transition("open", "open"))
    assert isinstance(for_all, Firing)
    assert (for_all.key, for_all.title) == (for_one.key, "Breaker open: writer on gpt-4.1:mini")


def test_what_stops_one_caller_is_a_warning_and_what_stops_everybody_is_critical() -> None:
    cap: dict[str, Any] = {"kind": "hard_cap", "enforcement": "hard", "threshold_percent": 100}
    of_tenant = budget_event(**cap, scope="tenant", agent=None, tenant="acme")
    for event, severity in (
        (transition(open_for="key app"), "warning"),
        (transition("open", "open", open_for="key app"), "warning"),
        (transition("half_open", "open", open_for="key app"), "warning"),
        (transition(), "critical"),
        (transition("open", "open"), "critical"),
        (of_tenant, "warning"),
        (budget_event(**cap), "critical"),
    ):
        signal = signal_of(event)
        assert isinstance(signal, Firing)
        assert (signal.severity or severity_of(signal.key)) == severity, event


def test_a_breaker_without_a_known_end_promises_no_probe() -> None:
    alert = signal_of(transition(open_until=None))
    assert alert is not None
    assert "probe" not in alert.text
    assert alert.payload["open_until"] is None


def test_a_breaker_forced_open_says_by_whom_and_how_it_ends_and_promises_no_probe() -> None:
    alert = signal_of(isolated(open_until=UNTIL))
    assert alert is not None
    assert alert.title == "Breaker open: writer on gpt-4.1:mini"
    assert alert.text == (
        "The breaker of agent writer for gpt-4.1:mini is isolated until an operator resets it. "
        "Isolated by ann: garbled answers. "
        "To do: `breakwater breakers reset writer gpt-4.1:mini` once calls may resume. "
        "Since 2026-11-21 10:00:00 UTC its jobs use other deployments or models, or fail if there are none."
    )
    assert (alert.payload["by"], alert.payload["reason"]) == ("ann", "isolated by ann: garbled answers")


def test_a_breaker_that_was_reset_says_by_whom() -> None:
    alert = signal_of(transition("isolated", "closed", reason="reset by ann: answers are fine", by="ann"))
    assert alert is not None
    assert alert.title == "Breaker closed: writer on gpt-4.1:mini"
    assert alert.text.startswith("Reset by ann: answers are fine. Since 2026-11-21 10:00:00 UTC calls of writer go to")
    assert alert.payload["by"] == "ann"


@pytest.mark.parametrize(
    ("scope", "model", "named"), [("model", "gpt-4", "gpt-4"), ("provider", "openai/*", "provider openai")]
)
def test_a_breaker_that_agents_share_is_reported_as_theirs(scope: str, model: str, named: str) -> None:
    quoted = model if scope == "model" else f"'{model}'"
    shared: dict[str, Any] = {"scope": scope, "agent": "*", "model": model}
    opened = signal_of(transition(**shared))
    forced = signal_of(isolated(**shared))
    closed = signal_of(transition("half_open", "closed", reason="the half-open probe succeeded", **shared))
    assert opened is not None
    assert forced is not None
    assert closed is not None
    assert opened.title == f"Breaker open: all agents on {named}"
    assert opened.text == (
        f"The breaker of the agents that share it for {named} is open until 2026-11-21 10:01:00 UTC. "
        "3 jobs in a row failed (threshold: 3). To do: look at `breakwater executions --since=1h` and at the "
        f"provider's status page; `breakwater breakers reset '*' {quoted}` admits calls now. Since 2026-11-21 10:00:00 "
        "UTC their jobs use other deployments or models, or fail "
        "if there are none. After the cool-down, one probe call is "
        "admitted."
    )
    assert f"`breakwater breakers reset '*' {quoted}`" in forced.text
    assert closed.title == f"Breaker closed: all agents on {named}"
    assert f"calls of the agents that share this breaker go to {named} again" in closed.text
    assert [opened.payload[name] for name in ("agent", "model_id", "scope")] == ["*", model, scope]


def test_an_agent_of_any_name_is_not_taken_for_all_of_them() -> None:
    alert = signal_of(transition(agent="*", model="openai/*"))
    assert alert is not None
    assert alert.title == "Breaker open: * on openai/*"


def test_a_stopped_task_is_reported_with_what_where_since_when_why_and_what_to_do() -> None:
    alert = signal_of(stopped())
    assert alert is not None
    assert isinstance(alert, Firing)
    assert (alert.agent, alert.tenant, alert.model, alert.at) == ("writer", "acme", None, AT)
    assert alert.source_id == "acme/nightly-review-17@1795255200000"
    assert alert.title == "Task stopped: nightly-review-17 of writer"
    assert alert.text == (
        "Task nightly-review-17 of tenant acme is stopped by the guard of agent writer (max_iterations: it has "
        "reached its limit of iterations) until an operator resets it; other work needs another task_id. "
        "10 iterations (limit: 10). To do: look at its last executions; "
        "`breakwater guards reset --tenant=acme nightly-review-17` resumes it, and "
        "agents.writer.guard.max_iterations sets the limit (`preset: agent-run` allows 100). "
        "Stopped at 2026-11-21 10:00:00 UTC after 10 iterations, 52,311 tokens, $4.21."
    )


def test_an_alert_of_a_job_that_was_given_no_task_says_what_helps_that_job() -> None:
    alert = signal_of(stopped(task_id="j11", task_key="e11", tenant=None))
    assert alert is not None
    assert (
        "To do: make the job smaller, or raise agents.writer.guard.max_iterations, and replay its dead letter; "
        "`breakwater guards reset e11` resolves the alert."
    ) in alert.text


def test_a_guard_alert_carries_the_figures() -> None:
    alert = signal_of(stopped())
    assert alert is not None
    assert alert.payload == {
        "agent": "writer",
        "task_id": "nightly-review-17",
        "task_key": "nightly-review-17",
        "tenant": "acme",
        "execution_id": "e11",
        "rule": "max_iterations",
        "reason": "10 iterations (limit: 10)",
        "iterations": 10,
        "tokens": 52_311,
        "cost": "4.209000000",
        "timestamp": "2026-11-21T10:00:00.000Z",
    }


def test_a_task_near_a_cap_is_an_incident_of_its_own_that_ends_by_itself() -> None:
    alert = signal_of(stopped(kind="soft_cap", reason="8 iterations (limit: 10)"))
    assert isinstance(alert, Firing)
    assert (alert.event, alert.fades, severity_of(alert.key)) == ("guard_soft_cap", True, "warning")
    assert alert.title == "Task near its limit: nightly-review-17 of writer"
    assert alert.text == (
        "Task nightly-review-17 of tenant acme has used at least 80 % of max_iterations of the guard of agent writer: "
        "8 iterations (limit: 10). At the limit its jobs are refused. To do: check whether it loops; if it needs more, "
        "raise agents.writer.guard.max_iterations (`preset: agent-run` allows 100)."
    )


def test_a_task_without_a_tenant_names_none() -> None:
    alert = signal_of(stopped(tenant=None, iterations=1))
    assert alert is not None
    assert "tenant" not in alert.text
    assert " after 1 iteration, " in alert.text
    assert "`breakwater guards reset nightly-review-17`" in alert.text
    assert alert.payload["tenant"] is None


def test_a_task_that_may_go_on_ends_its_incident_whoever_tripped_it() -> None:
    over, near_over = signals_of(stopped(kind="reset", agent="*", reason="reset by ann", by="ann"))
    trip, near = signal_of(stopped()), signal_of(stopped(kind="soft_cap", reason="8 iterations (limit: 10)"))
    assert isinstance(over, Resolved)
    assert trip is not None
    assert near is not None
    assert (over.key, over.by, near_over.key) == (trip.key, "ann", near.key)
    assert over.text == "Reset by ann. Its usage counts from zero again. Nothing to do."


@each_row("tenant", ["acme", "a b; x"])
@each_row("task_id", ["t1", "nightly; rm -rf $HOME", "it's `mine`", "--url=http://x", "задача"])
def test_the_command_of_an_alert_resets_that_task_whatever_it_is_called(task_id: str, tenant: str) -> None:
    alert = signal_of(stopped(task_key=task_id, tenant=tenant))
    assert alert is not None
    shown = alert.text.partition("executions; `")[2].partition("` resumes it")[0]
    end = ["--"] if task_id.startswith("-") else []
    assert shlex.split(shown) == ["breakwater", "guards", "reset", f"--tenant={tenant}", *end, task_id]


def test_a_closed_breaker_says_that_nothing_is_to_be_done() -> None:
    alert = signal_of(transition("half_open", "closed", reason="the half-open probe succeeded"))
    assert alert is not None
    assert alert.title == "Breaker closed: writer on gpt-4.1:mini"
    assert alert.text == (
        "The half-open probe succeeded. Since 2026-11-21 10:00:00 UTC calls of writer go to gpt-4.1:mini again. "
        "Nothing to do."
    )


@each_row(
    ("fields", "title", "text"),
    [
        (
            {},
            "Limit at 80 %: writer, daily",
            "$4.00 of $5.00 (80 %) spent by writer in 2026-11-21, as of 2026-11-21 10:00:00 UTC. "
            "Calls that could exceed the limit will be refused. To do: check whether this is expected.",
        ),
        (
            {"enforcement": "soft", "scope": "global", "agent": None, "window": "monthly", "period": "2026-11"},
            "Limit at 80 %: the plane, monthly",
            "$4.00 of $5.00 (80 %) spent by the plane in 2026-11, as of 2026-11-21 10:00:00 UTC. "
            "The limit is not enforced: calls continue. To do: check whether this is expected.",
        ),
        (
            {"kind": "hard_cap", "threshold_percent": 100, "total": "5"},
            "Limit used up: writer, daily",
            "$5.00 of $5.00 (100 %) spent by writer in 2026-11-21, as of 2026-11-21 10:00:00 UTC. "
            "Calls that do not fit are refused until the period ends or the limit is raised. To do: find what spends, "
            "or raise the limit: `breakwater limits raise agent:writer --per day --to USD --reason WHY`.",
        ),
        (
            {"kind": "hard_cap", "threshold_percent": 100, "total": "6.019", "enforcement": "soft"},
            "Limit used up: writer, daily",
            "$6.02 of $5.00 (120.4 %) spent by writer in 2026-11-21, as of 2026-11-21 10:00:00 UTC. "
            "The limit is not enforced: calls continue. To do: find what spends, or raise "
            "the limit: `breakwater limits raise agent:writer --per day --to USD --reason WHY`.",
        ),
    ],
)
def test_a_budget_is_reported_with_its_spend_and_what_follows(fields: dict[str, Any], title: str, text: str) -> None:
    alert = signal_of(crossing(**fields))
    assert alert is not None
    assert (alert.title, alert.text) == (title, text)


def test_a_share_is_never_rounded_up_to_the_whole() -> None:
    alert = signal_of(crossing(total="4.999999999"))
    assert alert is not None
    assert alert.text.startswith("$4.999999999 of $5.00 (99.9 %)")


def ended(**fields: Any) -> Execution:
    given: dict[str, Any] = {
        "execution_id": "e11",
        "job_id": "e11",
        "agent": "writer",
        "status": "dead_lettered",
        "reason": "error",
        "requested_model": "gpt-4.1",
        "attempts_count": 3,
        "total_cost": "0.5",
        "error": {"kind": "server", "class": "ServerError", "message": "overloaded", "status_code": 503},
        "queued_at": AT,
        "dispatched_at": AT,
        "completed_at": AT,
        "duration_ms": 12_300,
    }
    return Execution.model_validate(given | fields)


REFUSED = {"kind": "budget_exceeded", "message": "no such call ever fits"}


@each_row(
    ("fields", "key", "title"),
    [
        ({}, "retries_exhausted/writer/error", "Retries exhausted: writer (error)"),
        ({"reason": "timeout"}, "retries_exhausted/writer/timeout", "Retries exhausted: writer (timeout)"),
        ({"attempts_count": 1}, "job_dead_lettered/writer/error", "Jobs fail: writer (error)"),
        ({"reason": "invalid", "attempts_count": 0}, "job_dead_lettered/writer/invalid", "Jobs fail: writer (invalid)"),
        ({"reason": "worker_lost"}, "job_dead_lettered/writer/worker_lost", "Jobs fail: writer (worker_lost)"),
        # What caused these is an incident of its own, or meant.
        ({"reason": "breaker_open"}, None, None),
        ({"reason": "budget_exceeded"}, None, None),
        ({"reason": "guard_tripped"}, None, None),
        ({"reason": "rate_limited"}, None, None),
        # Unless no call of the agent is ever made, or its provider allows none for longer than its jobs may wait.
        (
            {"reason": "budget_exceeded", "error": {**REFUSED, "class": "CallOverCapError"}},
            "job_dead_lettered/writer/budget_exceeded",
            "Jobs fail: writer (budget_exceeded)",
        ),
        ({"reason": "budget_exceeded", "error": {**REFUSED, "class": "BudgetExceededError"}}, None, None),
        (
            {"reason": "rate_limited", "error": {"kind": "rate_limit", "message": "held", "class": "ModelHeldError"}},
            "job_dead_lettered/writer/rate_limited",
            "Jobs fail: writer (rate_limited)",
        ),
        ({"status": "succeeded", "reason": None}, None, None),
        ({"status": "cancelled"}, None, None),
        ({"dry_run": True}, None, None),
    ],
)
def test_jobs_that_end_without_an_answer_are_one_incident_of_their_agent_and_reason(
    fields: dict[str, Any], key: str | None, title: str | None
) -> None:
    said = of_execution(ended(**fields), None, None)
    assert [(one.key, one.title) for one in said] == ([] if key is None else [(key, title)])
    assert all(one.fades for one in said)


def test_a_failed_job_is_reported_with_its_kind_of_error_its_cost_and_where_to_look_and_not_with_its_error_text() -> (
    None
):
    [said] = of_execution(ended(job_id="report-7"), None, None)
    assert said.text == (
        "Job report-7 of writer: no answer after 3 attempts (server 503). They cost $0.50. "
        "To do: `breakwater executions e11` shows what was tried."
    )
    assert "overloaded" not in str(said)


def test_an_execution_that_costs_or_takes_too_much_is_an_anomaly_though_it_succeeds() -> None:
    good = ended(status="succeeded", reason=None, error=None)
    assert of_execution(good, nano_from_usd("0.5"), 12_300) == ()
    costly, long = of_execution(good, nano_from_usd("0.25"), 10_000)
    assert (costly.key, costly.event) == ("agent_anomaly/writer/execution_cost", "agent_anomaly")
    assert "cost $0.50, more than $0.25." in costly.text
    assert long.key == "agent_anomaly/writer/execution_duration"
    assert "took 12.3 s, more than 10.0 s." in long.text
    assert of_execution(ended(status="succeeded", reason=None, total_cost=None), 1, None) == ()


def test_usage_that_is_not_credible_is_an_anomaly_of_the_agent() -> None:
    problem = "1e+15 output tokens were reported, over 100,000,000 are not credible for one call"
    [said] = of_execution(
        ended(status="succeeded", reason=None, attempts=(attempt("e11", usage_problem=problem),)), None, None
    )
    assert (said.key, said.event, said.fades) == ("agent_anomaly/writer/reported_usage", "agent_anomaly", True)
    assert f"Job e11 of writer: {problem}, so its cost is estimated" in said.text


SPENT = {"kind": "quota", "class": "QuotaExceededError", "message": "acct-1 is empty", "status_code": 429}


def of_attempts(
    *attempts: Attempt, known: Alert | None = None, traffic: str | None = None
) -> tuple[Firing | Resolved, ...]:
    return of_quotas(
        ended(attempts=attempts),
        lambda key: known if known is not None and key == known.key else None,
        lambda _provider, _model: traffic,
    )


def test_a_spent_account_is_one_incident_of_its_provider_that_names_the_reset() -> None:
    spent = [
        attempt("e11", number, outcome="error", provider="zhipu", model=f"zhipu/glm-{number}", error={**SPENT, **more})
        for number, more in enumerate(({}, {"retry_after_s": 86_400}), 1)
    ]
    [said] = of_attempts(*spent)
    assert isinstance(said, Firing)
    assert (said.key, said.event, said.agent) == ("quota_exhausted/zhipu", "quota_exhausted", "*")
    at = spent[1].completed_at
    assert said.ends_at == at + timedelta(days=1)
    assert f"It resets at {moment(said.ends_at)}." in said.text
    assert "HTTP 429" in said.text
    assert "acct-1" not in str(said)
    assert said.payload["model_id"] == "zhipu/glm-2"
    [silent] = of_attempts(spent[0], traffic="all of writer's traffic is on openai/other")
    assert isinstance(silent, Firing)
    assert "It does not say when that changes. All of writer's traffic is on openai/other. To do:" in silent.text
    assert silent.ends_at is None
    assert of_execution(ended(error=SPENT), None, None) == (), "the provider's incident says it"


def test_a_spent_account_serves_again_once_a_call_of_the_same_model_succeeds() -> None:
    failed = attempt("e11", outcome="error", error=SPENT)
    [said] = of_attempts(failed)
    rules = IncidentRules(on_events={"quota_exhausted"}, quiet_s=600, escalate=(), reminders=Reminders())
    known = decide(said, None, rules)
    assert known is not None
    began = failed.completed_at + timedelta(seconds=1)
    later = {"started_at": began, "completed_at": began + timedelta(seconds=9)}
    [over] = of_attempts(attempt("e12", **later), known=known)
    assert isinstance(over, Resolved)
    ended_incident = decide(over, known, rules)
    assert ended_incident is not None
    assert (ended_incident.change, ended_incident.status) == ("resolved", "resolved")
    assert of_attempts(attempt("e12", **later), known=ended_incident) == ()
    assert of_attempts(attempt("e12", **later, model="openai/other"), known=known) == ()
    assert of_attempts(attempt("e12", **later, provider="other"), known=known) == ()
    under_way = {"started_at": failed.completed_at, "completed_at": began}
    assert of_attempts(attempt("e12", **under_way), known=known) == (), "what had begun before says nothing of now"
    assert of_attempts(attempt("e12", **later)) == ()


def dead_letter(**fields: Any) -> DeadLetter:
    given: dict[str, Any] = {
        "reason": "unreadable",
        "agent": None,
        "error": "body: it is no JSON",
        "stream": "JOBS",
        "subject": "bw.jobs.writer",
        "sequence": 7,
        "payload_base64": "eyJwcm9tcHQiOiAic2VjcmV0In0=",
        "at": AT,
    }
    return DeadLetter.model_validate(given | fields)


def test_a_dead_letter_without_a_record_is_an_incident_and_one_with_a_record_is_reported_by_that() -> None:
    [said] = of_dead_letter(dead_letter(), "dlq/JOBS/7")
    assert (said.key, said.source_id) == ("job_dead_lettered//unreadable", "dlq/JOBS/7")
    assert "eyJ" not in str(said)
    assert of_dead_letter(dead_letter(reason="error", agent="writer", execution_id="e1"), "x") == ()


def test_alerts_that_do_not_arrive_are_an_incident_of_their_channel_of_which_it_does_not_hear_for_ever() -> None:
    headers = {"Breakwater-Channel": "ops", "Breakwater-Incident": "breaker_open/writer/gpt"}
    unsent = dead_letter(stream="ALERTS", reason="undeliverable", agent="writer", error="ops: gone", headers=headers)
    [said] = of_dead_letter(unsent, "y")
    assert (said.key, said.title) == ("job_dead_lettered//undeliverable/ops", "Alerts are not delivered: channel ops")
    assert "`breakwater alerts replay --channel=ops`" in said.text
    assert not said.fades
    assert channel_works("ops", "alert_1", AT).ends(said.key)
    other = {"Breakwater-Channel": "other", "Breakwater-Incident": said.key}
    for dead in (headers | {"Breakwater-Incident": said.key}, other):
        assert of_dead_letter(unsent.model_copy(update={"headers": dead}), "z") == ()


def test_a_dead_letter_of_an_agent_that_can_not_be_one_is_reported_all_the_same() -> None:
    [said] = of_dead_letter(dead_letter(agent="x" * 129), "y")
    assert said.agent is None
