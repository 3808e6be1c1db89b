"""What the demo prints: what is going to happen, and at the end the report. The same for terminals and pipes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields

from breakwater.analytics.queries import AgentSummary
from breakwater.cli import output
from breakwater.cli.demo.live import dollars
from breakwater.cli.demo.reconciliation import ComparedFigure, LedgerComparison
from breakwater.cli.demo.report import BreakerSummary, Check, Report
from breakwater.cli.demo.scenario import STORY
from breakwater.cli.formats import duration
from breakwater.cli.output import Cell, Column
from breakwater.contracts.types import usd_from_nano

WIDE = 110
"""From here on, headings are written out."""

_NONE = "·"


def announce(jobs: int) -> None:
    """Says what is going to happen."""
    output.styled(("Breakwater demo", "bold"), f": {jobs} jobs, 6 agents, local servers, a simulated provider")
    for sentence in STORY:
        output.styled(("  - " + sentence, "dim"))
    output.write("")


def show(report: Report) -> None:
    """Prints the report."""
    _heading("Agents", "read back from ClickHouse")
    _show_agents(report.agents)
    _heading("Breakers")
    _show_breakers(report.breakers)
    _heading("Alerts", "delivered to a local receiver, which checked every signature")
    _show_alerts(report)
    _heading("What was provoked, and what became of it")
    _show_checks(report.checks)
    _heading("Reconciliation", "the provider's own ledger, Redis' counters, ClickHouse's sums")
    _show_comparison(report.comparison)
    output.write("")
    output.styled(_verdict(report))


def _heading(title: str, note: str = "") -> None:
    output.write("")
    output.styled((title, "bold cyan"), (f"  {note}" if note else "", "dim"))


def _show_agents(agents: Sequence[AgentSummary]) -> None:
    wide = (output.terminal_width() or WIDE) >= WIDE

    summed = [field.name for field in fields(AgentSummary) if field.name not in ("agent", "p50_ms", "p95_ms")]
    totals = {name: sum(getattr(agent, name) or 0 for agent in agents) for name in summed}
    everything = AgentSummary(agent="all", p50_ms=None, p95_ms=None, **totals)
    figures: list[tuple[str, str, Callable[[AgentSummary], Cell]]] = [
        ("executions", "jobs", lambda one: str(one.executions)),
        ("success", "ok", _success),
        ("attempts", "tries", lambda one: str(one.attempts)),
        ("retries", "retry", lambda one: str(one.retries or _NONE)),
        ("fallbacks", "fall", lambda one: str(one.fallbacks or _NONE)),
        ("short circuits", "short", lambda one: str(one.short_circuits or _NONE)),
        ("p50", "p50", lambda one: duration(one.p50_ms)),
        ("p95", "p95", lambda one: duration(one.p95_ms)),
        ("spend", "spend", lambda one: dollars(one.spend)),
        ("wasted", "wasted", lambda one: dollars(one.wasted)),
    ]
    columns: list[Column[AgentSummary]] = [
        Column("agent", lambda one: (one.agent, "bold" if one is everything else "")),
        *(Column(full if wide else short, cell, right=True) for full, short, cell in figures),
    ]
    output.table(columns, [*agents, everything], gap=1)


def _success(agent: AgentSummary) -> Cell:
    rate = agent.success_rate
    if rate is None:
        return ""
    return (f"{rate:.0%}", "green" if rate >= 0.99 else "yellow" if rate >= 0.5 else "red")


def _show_breakers(breakers: Sequence[BreakerSummary]) -> None:
    columns: list[Column[BreakerSummary]] = [
        Column("breaker", lambda one: f"{one.agent} on {one.model}"),
        Column("opened", lambda one: one.opened, right=True),
        Column("half-open", lambda one: one.half_opened, right=True),
        Column("closed", lambda one: one.closed, right=True),
        Column("now", lambda one: output.state(one.now, one.now.replace("_", "-"))),
        Column("opened first by", lambda one: (one.reason.partition(" (")[0], "dim"), below=True),
    ]
    output.table(columns, breakers, empty="none opened")


def _show_alerts(report: Report) -> None:
    # Incidents, however many changes of each were announced; one of a breaker has two events: it opened, it closed.
    incidents = dict.fromkeys((alert.event, alert.severity, alert.incident_id) for alert in report.alerts)
    kinds = Counter((event, severity) for event, severity, _ in incidents)
    cells: list[Cell] = []
    for (event, severity), count in kinds.items():
        cells += ["   " if cells else "", (f"{count} ", "bold"), output.state(severity, event.replace("_", " "))]
    output.styled(*cells or [("none", "dim")])


def _show_checks(checks: Sequence[Check]) -> None:
    columns: list[Column[Check]] = [
        Column("", lambda check: ("ok", "green") if check.ok else ("FAILED", "bold red")),
        Column("provoked", lambda check: check.name),
        Column("result", lambda check: check.detail),
    ]
    output.table(columns, checks)


def _show_comparison(comparison: LedgerComparison) -> None:
    def amount(figure: ComparedFigure, value: int | None) -> Cell:
        if value is None:
            return (_NONE, "dim")
        return f"${usd_from_nano(value)}" if figure.is_money else str(value)

    columns: list[Column[ComparedFigure]] = [
        Column("", lambda one: one.name),
        Column("provider", lambda one: amount(one, one.provider), right=True),
        Column("Redis", lambda one: amount(one, one.redis), right=True),
        Column("ClickHouse", lambda one: amount(one, one.clickhouse), right=True),
        Column("agree", lambda one: ("yes", "green") if one.agree else ("NO", "bold red")),
    ]
    output.table(columns, comparison.figures)
    if any(one.name == "estimated" and one.clickhouse for one in comparison.figures):
        output.styled(("estimated: the worst case of calls whose answer never came", "dim"))
    for difference in comparison.differences:
        output.styled((f"differs: {difference}", "red"))


def _verdict(report: Report) -> Cell:
    jobs, seconds = f"{report.jobs} jobs", f"{report.seconds:.0f} s"
    if report.ok:
        return (f"The three ledgers agree to the nano-dollar and the call: {jobs} in {seconds}.", "bold green")
    failed = [check.name for check in report.checks if not check.ok]
    words = ["the ledgers differ"] if not report.comparison.agree else []
    words += [f"not as expected: {', '.join(failed)}"] if failed else []
    return (f"FAILED after {seconds}: {'; '.join(words)}.", "bold red")
