"""What the demo prints: what is going to happen, and at the end the report. The same for terminals and pipes."""

from __future__ import annotations

from dataclasses import fields

from breakwater.analytics.figures import AgentSummary
from breakwater.cli import output
from breakwater.cli.demo.reconciliation import ComparedFigure
from breakwater.cli.demo.report import Check, Report
from breakwater.cli.demo.scenario import STORY
from breakwater.cli.formats import duration
from breakwater.cli.output import Cell, Column
from breakwater.contracts.types import usd_from_nano

DIFFERENCES = 10
"""So many are shown; the document of --json has all."""

_NONE = ("·", "dim")

AGENTS: tuple[Column[AgentSummary], ...] = (
    Column("agent", lambda one: (one.agent, "bold" if one.agent == "all" else "")),
    Column("jobs", lambda one: one.executions, right=True),
    Column("ok", lambda one: _success(one.success_rate or 0), right=True),
    Column("tries", lambda one: one.attempts, right=True),
    Column("retry", lambda one: one.retries or _NONE, right=True),
    Column("fall", lambda one: one.fallbacks or _NONE, right=True),
    Column("short", lambda one: one.short_circuits or _NONE, right=True),
    Column("p50", lambda one: duration(one.p50_ms), right=True),
    Column("p95", lambda one: duration(one.p95_ms), right=True),
    Column("spend", lambda one: _dollars(one.spend), right=True),
    Column("wasted", lambda one: _dollars(one.wasted), right=True),
)
CHECKS: tuple[Column[Check], ...] = (
    Column("", lambda check: ("ok", "green") if check.ok else ("FAILED", "bold red")),
    Column("provoked", lambda check: check.name),
    Column("result", lambda check: check.detail),
)
FIGURES: tuple[Column[ComparedFigure], ...] = (
    Column("", lambda one: one.name),
    Column("provider", lambda one: _amount(one.provider), right=True),
    Column("Redis", lambda one: _amount(one.redis), right=True),
    Column("ClickHouse", lambda one: _amount(one.clickhouse), right=True),
    Column("agree", lambda one: ("yes", "green") if one.agree else ("NO", "bold red")),
)


def announce(jobs: int) -> None:
    """Says what is going to happen."""
    output.styled(("Breakwater demo", "bold"), f": {jobs} jobs, 6 agents, local servers, a simulated provider")
    for sentence in STORY:
        output.styled((f"  - {sentence}", "dim"))
    output.write("")


def show(report: Report) -> None:
    """Prints the report."""
    _heading("Agents", "read from ClickHouse; fall: fallbacks, short: calls that were refused")
    summed = [field.name for field in fields(AgentSummary) if field.name not in ("agent", "p50_ms", "p95_ms")]
    totals = {name: sum(getattr(agent, name) or 0 for agent in report.stored.agents) for name in summed}
    output.table(AGENTS, [*report.stored.agents, AgentSummary(agent="all", p50_ms=None, p95_ms=None, **totals)], gap=1)
    _heading("What was provoked, and what became of it")
    output.table(CHECKS, report.checks)
    _heading("Reconciliation", "the provider's own ledger, Redis' counters, ClickHouse's sums")
    output.table(FIGURES, report.comparison.figures)
    output.styled(("estimated: the worst case of calls whose answer never came", "dim"))
    differences = report.comparison.differences
    for difference in differences[:DIFFERENCES]:
        output.styled((f"differs: {difference}", "red"))
    if len(differences) > DIFFERENCES:
        output.styled((f"and {len(differences) - DIFFERENCES} more; --json lists all", "red"))
    output.write("")
    output.styled(_verdict(report))


def _heading(title: str, note: str = "") -> None:
    output.write("")
    output.styled((title, "bold cyan"), (f"  {note}" if note else "", "dim"))


def _success(rate: float) -> Cell:
    return (f"{rate:.0%}", "green" if rate >= 0.99 else "yellow" if rate >= 0.5 else "red")


def _dollars(nano: int | None) -> str:
    """To a hundredth of a cent."""
    if nano is None or 0 < nano < 100_000:
        return "unknown" if nano is None else "<$0.0001"
    return f"${usd_from_nano(nano)[:-5]}"


def _amount(value: int | str | None) -> Cell:
    return _NONE if value is None else f"${value}" if isinstance(value, str) else str(value)


def _verdict(report: Report) -> Cell:
    seconds = f"{report.seconds:.0f} s"
    if report.ok:
        return (
            f"The three ledgers agree to the nano-dollar and the call: {report.jobs} jobs in {seconds}.",
            "bold green",
        )
    failed = ", ".join(check.name for check in report.checks if not check.ok)
    words = ("" if report.comparison.agree else "the ledgers differ", f"not as expected: {failed}" if failed else "")
    return (f"FAILED after {seconds}: {'; '.join(filter(None, words))}.", "bold red")
