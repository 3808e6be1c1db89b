from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from breakwater.jobs.contract.execution import Attempt, ErrorInfo
from breakwater.jobs.contract.job import Job
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.local.demo.reconciliation import ComparedFigure, LedgerComparison
from breakwater.local.demo.report import (
    DeliveredAlerts,
    DemoCheck,
    DemoReport,
    DemoRun,
    StoredRows,
    checks,
    read_stored,
    show,
)
from breakwater.local.demo.scenario import BURST
from breakwater.records import rows, schema
from breakwater.records.figures import AgentSummary
from tests.cli.conftest import Terminal
from tests.records import samples

Drawn = Callable[[DemoReport, int], str]

CAP = 5_000


def attempt(execution_id: str, agent: str, number: int = 1, **fields: Any) -> Attempt:
    status, kind = fields.pop("status", None), fields.pop("kind", "server")
    if status is not None or kind != "server":
        error = ErrorInfo(kind=kind, class_="E", message="…", status_code=status)
        fields = {"error": error, "outcome": "error", "cost": 0, **fields}
    return samples.attempt(execution_id, number, agent=agent, **fields)


ATTEMPTS = (
    attempt("writer-1", "content-writer", status=503),
    attempt("writer-1", "content-writer", 2, short_circuited=True, outcome="short_circuited", cost=None),
    attempt("research-1", "deep-research", kind="timeout", cost_basis="estimated"),
    attempt("wrong-1", "wrong-key", status=401),
    attempt("small-1", "small-budget", cost=4_000),
    *(attempt(f"triage-{number}", "support-triage", status=429) for number in range(BURST)),
    *(attempt(f"triage-{one}", "support-triage", 2, cause="retry", backoff_ms=1_050) for one in range(BURST)),
)
EXECUTIONS = (
    samples.execution("writer-1", agent="content-writer"),
    samples.execution("research-1", agent="deep-research"),
    samples.execution("wrong-1", agent="wrong-key", status="dead_lettered", reason="error"),
    samples.execution("small-1", agent="small-budget"),
    samples.execution("small-2", agent="small-budget", status="dead_lettered", reason="budget_exceeded"),
    *(samples.execution(f"triage-{number}", agent="support-triage") for number in range(BURST)),
)
BREAKER = {
    "agent": "content-writer",
    "model": "gpt-4o",
    "opened": 2,
    "half_opened": 2,
    "closed": 1,
    "now": "closed",
    "reason": "3 jobs in a row failed (threshold: 3)",
}


ALERTS = [
    samples.alert("alert_1", incident_id="inc_1", event="breaker_open", severity="critical"),
    samples.alert("alert_2", incident_id="inc_2", event="budget_soft_cap", severity="warning"),
    samples.alert("alert_3", incident_id="inc_1", event="breaker_closed", severity="info"),
]
SUMMARY = AgentSummary("content-writer", 1, 1, 1_234, 12_345, 2, 1, 1, 1, 0, 344_123_456, 16_670_000)
STORED = StoredRows((SUMMARY,), EXECUTIONS, ATTEMPTS, (BREAKER,), frozenset({"inc_1", "inc_2"}))
JOBS = tuple(Job(job_id=one.execution_id, agent=one.agent, prompt="…", metadata={"way": "http"}) for one in EXECUTIONS)
RUN = DemoRun([(0.0, job) for job in JOBS], DeliveredAlerts(ALERTS))
AGREED = LedgerComparison(
    True,
    (
        ComparedFigure("calls", 1, 1, 1, True),
        ComparedFigure("billed", "0.000000007", None, "0.000000007", True),
        ComparedFigure("spend", None, "0.000000007", "0.000000007", True),
    ),
    (),
)


def failed(stored: StoredRows = STORED, **changes: Any) -> list[str]:
    return [check.name for check in checks(replace(RUN, **changes), stored, CAP) if not check.ok]


def report(**changes: Any) -> DemoReport:
    found = checks(RUN, STORED, CAP)
    return replace(DemoReport(len(JOBS), 34.2, STORED, tuple(ALERTS), AGREED, found), **changes)


@pytest.fixture
def drawn(terminal: Terminal, capsys: pytest.CaptureFixture[str]) -> Drawn:
    """What a terminal of so many columns shows."""

    def draw(what: DemoReport, width: int) -> str:
        terminal(width)
        show(what)
        return capsys.readouterr().out

    return draw


def test_a_run_in_which_everything_happened_passes_all_checks() -> None:
    assert failed() == []


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("no job lost", {"executions": EXECUTIONS[1:]}),
        ("no job lost", {"executions": (*EXECUTIONS, EXECUTIONS[0])}),
        ("outage of gpt-4o", {"breakers": ()}),
        ("outage of gpt-4o", {"breakers": ({**BREAKER, "model": "gpt-4o-mini"},)}),
        ("outage of gpt-4o", {"breakers": ({**BREAKER, "now": "open"},)}),
        ("429, Retry-After", {"attempts": (*ATTEMPTS[:5], *ATTEMPTS[6:])}),
        (
            "429, Retry-After",
            {"attempts": (*ATTEMPTS[:-1], ATTEMPTS[-1].model_copy(update={"backoff_ms": 999}))},
        ),
        ("o3 hangs", {"attempts": ATTEMPTS[:2] + ATTEMPTS[3:]}),
        ("wrong key", {"attempts": (*ATTEMPTS, attempt("wrong-1", "wrong-key", 2, status=401, cause="retry"))}),
        ("small budget", {"attempts": (*ATTEMPTS, attempt("small-1", "small-budget", 2, cost=1_001))}),
        (
            "small budget",
            {
                "executions": (
                    *EXECUTIONS[:4],
                    EXECUTIONS[4].model_copy(update={"reason": "error"}),
                    *EXECUTIONS[5:],
                )
            },
        ),
        ("alerts", {"incident_ids": STORED.incident_ids | {"inc_9"}}),
        ("alerts", {"incident_ids": frozenset({"inc_1"})}),
    ],
)
def test_what_did_not_happen_as_it_should_fails_its_own_check_and_no_other(name: str, changes: Any) -> None:
    assert failed(replace(STORED, **changes)) == [name]


def test_a_job_that_was_not_accepted_fails() -> None:
    assert failed(failed={"writer-1": "HTTP 503"}) == ["no job lost"]


@pytest.mark.parametrize(
    ("delivered", "words"),
    [
        (DeliveredAlerts(ALERTS, refused=1), "1 with a wrong signature"),
        (DeliveredAlerts(ALERTS, repeated=2), "2 messages came again"),
        (DeliveredAlerts(ALERTS[:1]), "1 incidents were not announced; none of breaker_closed, budget_soft_cap"),
        (DeliveredAlerts(ALERTS[:2]), "none of breaker_closed"),
    ],
    ids=["signature", "twice", "missing", "no recovery"],
)
def test_what_is_wrong_with_alerts_is_said(delivered: DeliveredAlerts, words: str) -> None:
    assert failed(delivered=delivered) == ["alerts"]
    [check] = [check for check in checks(replace(RUN, delivered=delivered), STORED, CAP) if check.name == "alerts"]
    assert check.detail == words


async def test_what_is_stored_is_read_back_with_transitions_summed_up_for_each_breaker(analytics: Analytics) -> None:
    states = ("open", "half_open", "open", "half_open", "closed")
    reasons = ("3 jobs in a row failed (threshold: 3)", *("…" for _ in states[1:]))
    transitions = [
        samples.transition(version=version, agent="content-writer", model="gpt-4o", to_state=state, reason=reason)
        for version, (state, reason) in enumerate(zip(states, reasons, strict=True), 1)
    ]
    await analytics.insert(schema.BREAKER_TRANSITIONS, [rows.transition_row(one, 1) for one in transitions])
    await analytics.insert(schema.EXECUTIONS, [rows.execution_row(one, 1) for one in EXECUTIONS])
    await analytics.insert(schema.ATTEMPTS, [samples.attempt_row(one, 1) for one in ATTEMPTS])
    await analytics.insert(schema.ALERTS, [rows.alert_row(one, 1) for one in ALERTS])
    stored = await read_stored(analytics)
    assert stored.breakers == (BREAKER,)
    assert stored.incident_ids == {"inc_1", "inc_2"}
    assert failed(stored) == []


@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_screen_fits_the_terminal_and_shows_every_figure(drawn: Drawn, width: int) -> None:
    text = drawn(report(), width)
    assert max(len(row.rstrip()) for row in text.splitlines()) <= width
    [agent] = [row.split() for row in text.splitlines() if row.startswith("content-writer  ")]
    figures = ["content-writer", "1", "100%", "2", "1", "1", "1"]
    assert agent[: len(figures)] == figures
    assert agent[-2:] == ["$0.344", "$0.0167"]
    assert "…" not in text
    assert "agree to the nano-dollar and the call" in text


def test_the_screen_in_a_pipe_has_no_blanks_at_the_end_of_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    show(report())
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert all(row == row.rstrip() for row in printed.splitlines())


def test_a_failed_run_says_what_failed(drawn: Drawn) -> None:
    differences = tuple(f"a:{number}: not in ClickHouse" for number in range(12))
    comparison = replace(AGREED, agree=False, differences=differences)
    wrong = report(comparison=comparison, checks=(DemoCheck("alerts", False, "2 raised, 1 delivered"),))
    assert not wrong.ok
    text = drawn(wrong, 100)
    assert "FAILED after 34 s: the ledgers differ; not as expected: alerts." in text
    assert "differs: a:9: not in ClickHouse" in text
    assert "and 2 more" in text
    assert "2 raised, 1 delivered" in text


def test_the_document_has_money_as_decimal_strings() -> None:
    document = json.loads(json.dumps(report().document()))
    assert document["ok"] is True
    assert document["agents"][0]["spend"] == "0.344123456"
    lines = {one["name"]: one for one in document["reconciliation"]["figures"]}
    assert lines["billed"]["clickhouse"] == "0.000000007"
    assert lines["calls"]["redis"] == 1
    assert lines["spend"]["provider"] is None
    assert document["alerts"][0]["event"] == "breaker_open"


def test_progress_says_how_many_jobs_are_done_and_what_the_last_alert_was() -> None:
    run = DemoRun(RUN.planned, ready=["redis", "nats"])
    assert run.describe() == "starting: redis, nats"
    run.phase, run.results = "settling", 2
    assert run.describe() == f"settling: 2/{len(JOBS)} jobs have their results"
    run.delivered.alerts.extend(ALERTS)
    assert run.describe().endswith(f"| 3 alerts, the last: {ALERTS[-1].title}")
