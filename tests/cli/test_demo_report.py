from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from breakwater.analytics.queries import AgentSummary
from breakwater.cli.demo import screen
from breakwater.cli.demo.live import Scene, Tally, line
from breakwater.cli.demo.receiver import Received
from breakwater.cli.demo.reconciliation import ProviderCall, RecordedCall, RedisCounters, compare
from breakwater.cli.demo.records import AttemptRow, ExecutionRow, Rows, TransitionRow
from breakwater.cli.demo.report import Check, Delivered, Handover, Report, breaker_summaries, checks
from breakwater.cli.demo.scenario import BURST
from tests.cli.conftest import Terminal

Drawn = Callable[[Report, int], str]

CAP = 5_000
WRITER = ("content-writer", "gpt-4o")


def attempt(execution: str, number: int, agent: str, model: str, **changes: object) -> AttemptRow:
    plain = AttemptRow(
        f"{execution}:{number}", execution, number, agent, model, 0, "billed", "error", False, "first", 0, None, None
    )
    return replace(plain, **changes)  # pyright: ignore[reportArgumentType]  # test data


def limited() -> tuple[AttemptRow, ...]:
    rows: list[AttemptRow] = []
    for number in range(BURST):
        job = f"triage-{number}"
        rows.append(attempt(job, 1, "support-triage", "gpt-4o-mini", error_status_code=429))
        rows.append(
            attempt(job, 2, "support-triage", "gpt-4o-mini", cause="retry", backoff_ms=1_050, outcome="success")
        )
    return tuple(rows)


ATTEMPTS = (
    attempt("writer-1", 1, *WRITER, error_status_code=503),
    attempt("writer-1", 2, *WRITER, short_circuited=True, outcome="short_circuited"),
    attempt("research-1", 1, "deep-research", "o3", error_kind="timeout", cost_basis="estimated"),
    attempt("wrong-1", 1, "wrong-key", "gpt-4.1", error_status_code=401),
    attempt("small-1", 1, "small-budget", "gpt-4.1-mini", cost=4_000, outcome="success"),
    *limited(),
)
EXECUTIONS = (
    ExecutionRow("writer-1", "content-writer", "succeeded", None),
    ExecutionRow("research-1", "deep-research", "succeeded", None),
    ExecutionRow("wrong-1", "wrong-key", "dead_lettered", "error"),
    ExecutionRow("small-1", "small-budget", "succeeded", None),
    ExecutionRow("small-2", "small-budget", "dead_lettered", "budget_exceeded"),
    *(ExecutionRow(f"triage-{number}", "support-triage", "succeeded", None) for number in range(BURST)),
)
TRANSITIONS = tuple(
    TransitionRow(*WRITER, state, reason)
    for state, reason in (
        ("open", "3 consecutive failures (threshold: 3)"),
        ("half_open", "the cool-down is over"),
        ("open", "the half-open probe failed"),
        ("half_open", "the cool-down is over"),
        ("closed", "the half-open probe succeeded"),
    )
)
ALERTS = tuple(
    Received(f"alert_{number}", incident, event, status, severity, f"Alert {number}")
    for number, (incident, event, status, severity) in enumerate(
        (
            ("inc_1", "breaker_open", "open", "critical"),
            ("inc_2", "budget_soft_cap", "firing", "warning"),
            ("inc_1", "breaker_closed", "resolved", "info"),
        )
    )
)
SUMMARY = AgentSummary("content-writer", 1, 1, 1_234, 12_345, 2, 1, 1, 1, 0, 344_123_456, 16_670_000)
ROWS = Rows((SUMMARY,), EXECUTIONS, ATTEMPTS, TRANSITIONS, frozenset({"inc_1", "inc_2"}))
JOB_IDS = frozenset(row.execution_id for row in EXECUTIONS)
HANDOVER = Handover(7, 6, {})


def failed(rows: Rows = ROWS, **changes: object) -> list[str]:
    given = {"job_ids": JOB_IDS, "handover": HANDOVER, "delivered": Delivered(ALERTS), "cap": CAP} | changes
    found = checks(rows, **given)  # pyright: ignore[reportArgumentType]  # test data
    return [check.name for check in found if not check.ok]


def report(**changes: object) -> Report:
    calls = (ProviderCall("a:1", "gpt-4o", 7),)
    rows = (RecordedCall("a:1", "writer", "gpt-4o", 7, "billed"),)
    comparison = compare(calls, RedisCounters(1, 7), {"writer": RedisCounters(1, 7)}, rows)
    found = checks(ROWS, JOB_IDS, HANDOVER, Delivered(ALERTS), CAP)
    plain = Report(len(JOB_IDS), 34.2, (SUMMARY,), breaker_summaries(ROWS), ALERTS, comparison, found)
    return replace(plain, **changes)  # pyright: ignore[reportArgumentType]  # test data


@pytest.fixture
def drawn(terminal: Terminal, capsys: pytest.CaptureFixture[str]) -> Drawn:
    """What a terminal of so many columns shows."""

    def draw(what: Report, width: int) -> str:
        terminal(width)
        screen.show(what)
        return capsys.readouterr().out

    return draw


def test_a_run_in_which_everything_happened_passes_all_checks() -> None:
    assert failed() == []


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("no job lost", replace(ROWS, executions=EXECUTIONS[1:])),
        ("no job lost", replace(ROWS, executions=(*EXECUTIONS, EXECUTIONS[0]))),
        ("outage of gpt-4o", replace(ROWS, transitions=())),
        ("outage of gpt-4o", replace(ROWS, transitions=TRANSITIONS[:3])),
        ("429, Retry-After", replace(ROWS, attempts=ATTEMPTS[:-2])),
        ("429, Retry-After", replace(ROWS, attempts=(*ATTEMPTS[:-1], replace(ATTEMPTS[-1], backoff_ms=999)))),
        ("o3 hangs", replace(ROWS, attempts=ATTEMPTS[:2] + ATTEMPTS[3:])),
        ("wrong key", replace(ROWS, attempts=(*ATTEMPTS, replace(ATTEMPTS[3], number=2, cause="retry")))),
        ("small budget", replace(ROWS, attempts=(*ATTEMPTS, replace(ATTEMPTS[4], cost=1_001)))),
        (
            "small budget",
            replace(ROWS, executions=(*EXECUTIONS[:4], replace(EXECUTIONS[4], reason="error"), *EXECUTIONS[5:])),
        ),
        ("alerts", replace(ROWS, incident_ids=ROWS.incident_ids | {"inc_9"})),
        ("alerts", replace(ROWS, incident_ids=frozenset({"inc_1"}))),
    ],
)
def test_what_did_not_happen_as_it_should_fails_its_own_check_and_no_other(name: str, rows: Rows) -> None:
    assert failed(rows) == [name]


def test_a_job_that_was_not_accepted_fails() -> None:
    assert failed(handover=Handover(7, 5, {"writer-1": "HTTP 503"})) == ["no job lost"]


@pytest.mark.parametrize(
    ("delivered", "words"),
    [
        (Delivered(ALERTS, refused=1), "1 with a wrong signature"),
        (Delivered(ALERTS, repeated=2), "2 messages came again"),
        (Delivered(ALERTS[:1]), "1 incidents were not announced; none of breaker_closed, budget_soft_cap"),
        (Delivered(ALERTS[:2]), "none of breaker_closed"),
    ],
    ids=["signature", "twice", "missing", "no recovery"],
)
def test_what_is_wrong_with_alerts_is_said(delivered: Delivered, words: str) -> None:
    assert failed(delivered=delivered) == ["alerts"]
    [check] = [check for check in checks(ROWS, JOB_IDS, HANDOVER, delivered, CAP) if check.name == "alerts"]
    assert check.detail == words


def test_transitions_are_summed_up_for_each_breaker() -> None:
    [breaker] = breaker_summaries(ROWS)
    assert (breaker.opened, breaker.half_opened, breaker.closed, breaker.now) == (2, 2, 1, "closed")
    assert breaker.reason == "3 consecutive failures (threshold: 3)"


@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_screen_fits_the_terminal_and_shows_every_figure(drawn: Drawn, width: int) -> None:
    text = drawn(report(), width)
    assert max(len(row.rstrip()) for row in text.splitlines()) <= width
    [agent] = [row.split() for row in text.splitlines() if row.startswith("content-writer  ")]
    figures = ["content-writer", "1", "100%", "2", "1", "1", "1"]
    assert agent[: len(figures)] == figures
    assert agent[-2:] == ["$0.3441", "$0.0166"]
    assert "…" not in text
    assert "agree to the nano-dollar and the call" in text


def test_the_screen_in_a_pipe_has_no_blanks_at_the_end_of_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    screen.show(report())
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert all(row == row.rstrip() for row in printed.splitlines())


def test_a_failed_run_says_what_failed(drawn: Drawn) -> None:
    ledger = (ProviderCall("a:1", "gpt-4o", 8),)
    recorded = (RecordedCall("a:1", "writer", "gpt-4o", 7, "billed"),)
    comparison = compare(ledger, RedisCounters(1, 7), {"writer": RedisCounters(1, 7)}, recorded)
    wrong = report(comparison=comparison, checks=(Check("alerts", False, "2 raised, 1 delivered"),))
    assert not wrong.ok
    text = drawn(wrong, 100)
    assert "FAILED after 34 s: the ledgers differ; not as expected: alerts." in text
    assert "differs: gpt-4o: 1 calls and $0.000000008 billed at the provider" in text
    assert "2 raised, 1 delivered" in text


def test_the_document_has_money_as_decimal_strings() -> None:
    document = json.loads(json.dumps(report().document()))
    assert document["ok"] is True
    assert document["agents"][0]["spend"] == "0.344123456"
    lines = {one["name"]: one for one in document["reconciliation"]["figures"]}
    assert lines["billed"]["clickhouse"] == "0.000000007"
    assert lines["calls"]["redis"] == 1
    assert lines["spend"]["provider"] is None


def test_live_events_are_counted() -> None:
    tally = Tally()
    tally.count("executions", {"status": "succeeded"})
    tally.count("executions", {"status": "dead_lettered"})
    tally.count("attempts", {"short_circuited": False, "cause": "retry", "cost": "0.001200000"})
    tally.count("attempts", {"short_circuited": True, "cause": "fallback", "cost": None})
    tally.count("breakers", {"agent": "writer", "model": "gpt-4o", "to_state": "open"})
    words = line(Scene(10, phase="running", tally=tally))
    assert "2/10 jobs" in words
    assert "attempts 2" in words
    assert "spend $0.0012" in words
    assert "breakers open 1" in words
