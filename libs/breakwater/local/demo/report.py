"""A run of the demo and its report: figures, the checks of everything that the scenario provokes, and the screen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from typing import Any, Literal

from breakwater.alerts.contract import Alert
from breakwater.jobs.contract.execution import Attempt, Execution
from breakwater.jobs.contract.job import Job
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.commands import output
from breakwater.kernel.commands.formats import counted, duration, exact, exact_money, money
from breakwater.kernel.commands.output import Cell, Column
from breakwater.local.demo.reconciliation import ComparedFigure, LedgerComparison
from breakwater.local.demo.scenario import BURST, RETRY_AFTER_S, STORY, trouble_at
from breakwater.records.figures import AgentSummary, agent_summaries
from breakwater.records.rows import attempt_of, execution_of

BreakerRecord = Mapping[str, Any]
"""A row of `BREAKERS`: the changes of a breaker, its state now, and why it opened first."""

BREAKERS = """
SELECT
    agent,
    model,
    countIf(to_state = 'open') AS opened,
    countIf(to_state = 'half_open') AS half_opened,
    countIf(to_state = 'closed') AS closed,
    argMax(to_state, version) AS now,
    argMinIf(reason, version, to_state = 'open') AS reason
FROM breaker_transitions FINAL
GROUP BY agent, model
ORDER BY agent, model
"""

_EXPECTED_ALERTS = frozenset({"breaker_open", "breaker_closed", "budget_soft_cap"})
"""The alerts that the scenario provokes in every run."""


@dataclass(slots=True)
class Delivered:
    """The alerts that a receiver got, in the order of their arrival."""

    alerts: list[Alert] = field(default_factory=list[Alert])
    repeated: int = 0
    """Deliveries of an alert that had arrived before."""
    refused: int = 0
    """Requests whose signature was not right."""


@dataclass(slots=True)
class DemoRun:
    """One run of the demo so far."""

    planned: Sequence[tuple[float, Job]]
    """All jobs, each with its time of submission: seconds since the load began."""
    delivered: Delivered = field(default_factory=Delivered)
    phase: Literal["starting", "running", "settling"] = "starting"
    began_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    load_began_at: datetime | None = None
    ready: list[str] = field(default_factory=list[str])
    """Processes that are up."""
    results: int = 0
    """Number of jobs that have one."""
    failed: dict[str, str] = field(default_factory=dict[str, str])
    """Errors of submitting jobs, by job id. A job that ended in failure is none."""

    @property
    def elapsed_s(self) -> float:
        """Seconds since the demo began."""
        return (datetime.now(UTC) - self.began_at).total_seconds()

    def words(self) -> str:
        """The state of the run, in a line."""
        if self.phase == "starting":
            return f"starting: {', '.join(self.ready) or 'servers'}"
        parts = [f"{self.phase}: {self.results}/{len(self.planned)} jobs have their results"]
        if self.phase == "running" and self.load_began_at is not None:
            parts += trouble_at((datetime.now(UTC) - self.load_began_at).total_seconds())
        if alerts := self.delivered.alerts:
            parts.append(f"{counted(len(alerts), 'alert')}, the last: {alerts[-1].title}")
        return " | ".join(parts)


@dataclass(frozen=True, slots=True)
class StoredRows:
    """The rows of ClickHouse."""

    agents: tuple[AgentSummary, ...]
    executions: tuple[Execution, ...]
    attempts: tuple[Attempt, ...]
    breakers: tuple[BreakerRecord, ...]
    incident_ids: frozenset[str]


async def read_stored(analytics: Analytics) -> StoredRows:
    """Reads all of them. Raises AnalyticsError."""
    return StoredRows(
        agents=await agent_summaries(analytics),
        executions=await analytics.read(execution_of, "SELECT * FROM executions FINAL ORDER BY execution_id"),
        attempts=await analytics.read(attempt_of, "SELECT * FROM attempts FINAL ORDER BY execution_id, number"),
        breakers=tuple((await analytics.query(BREAKERS)).named()),
        incident_ids=frozenset(row[0] for row in (await analytics.query("SELECT incident_id FROM incidents")).rows),
    )


@dataclass(frozen=True, slots=True)
class DemoCheck:
    """Something that must happen, and how it went."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True, slots=True)
class DemoReport:
    """One run of the demo."""

    jobs: int
    seconds: float
    stored: StoredRows
    alerts: tuple[Alert, ...]
    comparison: LedgerComparison
    checks: tuple[DemoCheck, ...]

    @property
    def ok(self) -> bool:
        """True if the ledgers agree, and everything happened that had to."""
        return self.comparison.agree and all(check.ok for check in self.checks)

    def document(self) -> dict[str, Any]:
        """The report as JSON has it: money as decimal strings in USD."""
        shown = {"alert_id", "incident_id", "event", "status", "severity", "title"}
        return {
            "ok": self.ok,
            "jobs": self.jobs,
            "seconds": round(self.seconds, 1),
            "agents": [
                asdict(agent)
                | {"success_rate": agent.success_rate, "spend": exact(agent.spend), "wasted": exact(agent.wasted)}
                for agent in self.stored.agents
            ],
            "breakers": self.stored.breakers,
            "alerts": [alert.model_dump(mode="json", include=shown) for alert in self.alerts],
            "reconciliation": asdict(self.comparison),
            "checks": [asdict(check) for check in self.checks],
        }


def checks(run: DemoRun, stored: StoredRows, cap: int) -> tuple[DemoCheck, ...]:
    """One check for each thing that the scenario provokes; `cap` is that of `small-budget`, in nano-dollars. Pure."""
    return (
        _each_job_once(run, stored),
        _outage(stored),
        _burst(stored.attempts),
        _hang(stored),
        _wrong_key(stored),
        _small_budget(stored, cap),
        _alerts(run.delivered, stored),
    )


def _each_job_once(run: DemoRun, stored: StoredRows) -> DemoCheck:
    jobs = [job for _, job in run.planned]
    decided = Counter(record.execution_id for record in stored.executions)
    problems = [f"{job}: {why}" for job, why in sorted(run.failed.items())]
    if lost := sorted({str(job.job_id) for job in jobs} - decided.keys()):
        problems.append(f"{len(lost)} without an execution: {', '.join(lost[:5])}")
    if repeated := decided.total() - len(decided):
        problems.append(f"{repeated} executions too many")
    ways = Counter(str(job.metadata["way"]) for job in jobs)
    detail = f"{ways['http']} over HTTP, {ways['nats']} over NATS; {len(decided)} decided, once each"
    return DemoCheck("no job lost", not problems, "; ".join(problems[:5]) or detail)


def _outage(stored: StoredRows) -> DemoCheck:
    failed = sum(_status(attempt) == 503 for attempt in stored.attempts)
    breakers = {(one["agent"], one["model"]): one for one in stored.breakers}
    breaker = breakers.get(("content-writer", "gpt-4o"))
    if breaker is None:
        return DemoCheck("outage of gpt-4o", False, f"{failed} calls failed, and the breaker did not open")
    spared = sum(attempt.short_circuited for attempt in _of(stored, "content-writer"))
    now = "closed again" if breaker["now"] == "closed" else breaker["now"].replace("_", "-")
    detail = f"{failed} calls failed; the breaker opened {breaker['opened']} times, spared {spared} calls, and is {now}"
    return DemoCheck("outage of gpt-4o", breaker["now"] == "closed", detail)


def _burst(attempts: Sequence[Attempt]) -> DemoCheck:
    limited = {(one.execution_id, one.number) for one in attempts if _status(one) == 429}
    retries = [one for one in attempts if one.cause == "retry" and (one.execution_id, one.number - 1) in limited]
    early = sum(retry.backoff_ms < RETRY_AFTER_S * 1000 for retry in retries)
    waits = f"{early or 'none'} sooner than {RETRY_AFTER_S} s"
    detail = f"{len(limited)} calls answered so; {len(retries)} retried, {waits}"
    return DemoCheck("429, Retry-After", len(limited) == BURST and bool(retries) and not early, detail)


def _hang(stored: StoredRows) -> DemoCheck:
    hung = [one for one in _of(stored, "deep-research") if one.error is not None and one.error.kind == "timeout"]
    succeeded = {record.execution_id for record in stored.executions if record.status == "succeeded"}
    saved = sum(attempt.execution_id in succeeded for attempt in hung)
    detail = f"{len(hung)} calls cut off, {saved} of their jobs done by the fallback"
    return DemoCheck("o3 hangs", 0 < saved == len(hung), detail)


def _wrong_key(stored: StoredRows) -> DemoCheck:
    attempts = _of(stored, "wrong-key")
    jobs = sum(record.agent == "wrong-key" for record in stored.executions)
    denied = sum(_status(attempt) == 401 for attempt in attempts)
    detail = f"{jobs} jobs, {denied} calls answered 401, {len(attempts) - jobs} retries"
    return DemoCheck("wrong key", 0 < jobs == denied == len(attempts), detail)


def _small_budget(stored: StoredRows, cap: int) -> DemoCheck:
    refused = sum(one.agent == "small-budget" and one.reason == "budget_exceeded" for one in stored.executions)
    spent = sum(attempt.cost or 0 for attempt in _of(stored, "small-budget"))
    detail = f"{refused} jobs refused; spent {money(spent)} of {money(cap)}"
    return DemoCheck("small budget", refused > 0 and spent <= cap, detail)


def _alerts(delivered: Delivered, stored: StoredRows) -> DemoCheck:
    # Not each change of an incident is a message: of changes that wait together, only the newest is sent.
    incidents = {alert.incident_id for alert in delivered.alerts}
    counts = {
        "incidents were not announced": len(stored.incident_ids - incidents),
        "announced that ClickHouse does not have": len(incidents - stored.incident_ids),
        "messages came again": delivered.repeated,
        "with a wrong signature": delivered.refused,
    }
    problems = [f"{count} {words}" for words, count in counts.items() if count]
    if lacking := sorted(_EXPECTED_ALERTS - {alert.event for alert in delivered.alerts}):
        problems.append(f"none of {', '.join(lacking)}")
    kinds = Counter(alert.event.replace("_", " ") for alert in delivered.alerts).most_common()
    listed = ", ".join(f"{count} {kind}" for kind, count in kinds)
    detail = f"{len(incidents)} incidents, each announced, every signature right: {listed}"
    return DemoCheck("alerts", not problems, "; ".join(problems) or detail)


def _of(stored: StoredRows, agent: str) -> list[Attempt]:
    return [attempt for attempt in stored.attempts if attempt.agent == agent]


def _status(attempt: Attempt) -> int | None:
    return None if attempt.error is None else attempt.error.status_code


DIFFERENCES = 10
"""Number of those shown; the document of --json has all."""

_NONE = ("·", "dim")

AGENTS: tuple[Column[AgentSummary], ...] = (
    Column("agent", lambda one: (one.agent, "bold" if one.agent == "all" else "")),
    Column("jobs", lambda one: one.executions, align_right=True),
    Column("ok", lambda one: _success(one), align_right=True),
    Column("tries", lambda one: one.attempts, align_right=True),
    Column("retry", lambda one: one.retries or _NONE, align_right=True),
    Column("fall", lambda one: one.fallbacks or _NONE, align_right=True),
    Column("short", lambda one: one.short_circuits or _NONE, align_right=True),
    Column("p50", lambda one: duration(one.p50_ms), align_right=True),
    Column("p95", lambda one: duration(one.p95_ms), align_right=True),
    Column("spend", lambda one: money(one.spend), align_right=True),
    Column("wasted", lambda one: money(one.wasted), align_right=True),
)
CHECKS: tuple[Column[DemoCheck], ...] = (
    Column("", lambda check: ("ok", "green") if check.ok else ("FAILED", "bold red")),
    Column("provoked", lambda check: check.name),
    Column("result", lambda check: check.detail),
)
FIGURES: tuple[Column[ComparedFigure], ...] = (
    Column("", lambda one: one.name),
    Column("provider", lambda one: _amount(one.provider), align_right=True),
    Column("Redis", lambda one: _amount(one.redis), align_right=True),
    Column("ClickHouse", lambda one: _amount(one.clickhouse), align_right=True),
    Column("agree", lambda one: ("yes", "green") if one.agree else ("NO", "bold red")),
)


def announce(jobs: int) -> None:
    """Prints the scenario in words."""
    output.styled(("Breakwater demo", "bold"), f": {jobs} jobs, 6 agents, local servers, a simulated provider")
    for sentence in STORY:
        output.styled((f"  - {sentence}", "dim"))
    output.write("")


def show(report: DemoReport) -> None:
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


def _success(agent: AgentSummary) -> Cell:
    rate = agent.success_rate or 0
    return (f"{rate:.0%}", "green" if rate >= 0.99 else "yellow" if rate >= 0.5 else "red")


def _amount(value: int | str | None) -> Cell:
    return _NONE if value is None else exact_money(value) if isinstance(value, str) else str(value)


def _verdict(report: DemoReport) -> Cell:
    seconds = f"{report.seconds:.0f} s"
    if report.ok:
        return (
            f"The three ledgers agree to the nano-dollar and the call: {report.jobs} jobs in {seconds}.",
            "bold green",
        )
    failed = ", ".join(check.name for check in report.checks if not check.ok)
    words = ("" if report.comparison.agree else "the ledgers differ", f"not as expected: {failed}" if failed else "")
    return (f"FAILED after {seconds}: {'; '.join(filter(None, words))}.", "bold red")
