"""The report of the demo: its figures, the checks of what the scenario provokes, and its printing."""

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
from breakwater.kernel.commands.formats import duration, exact, exact_money, money, quantity
from breakwater.kernel.commands.output import Cell, Column
from breakwater.local.demo.reconciliation import ComparedFigure, LedgerComparison
from breakwater.local.demo.scenario import BURST, RETRY_AFTER_S, STORY, faults_at
from breakwater.records.figures import AgentSummary, agent_summaries
from breakwater.records.rows import attempt_of, execution_of

BreakerRecord = Mapping[str, Any]
"""A row of `BREAKERS`: how often a breaker changed, its current state, and why it first opened."""

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
WHERE NOT shadow
GROUP BY agent, model
ORDER BY agent, model
"""

_EXPECTED_ALERTS = frozenset({"breaker_open", "breaker_closed", "budget_soft_cap"})
"""The alerts that the scenario provokes in every run."""


@dataclass(slots=True)
class DeliveredAlerts:
    """The alerts that the receiver got, in the order of their arrival."""

    alerts: list[Alert] = field(default_factory=list[Alert])
    repeated: int = 0
    """Number of deliveries of an alert that had arrived before."""
    refused: int = 0
    """Number of requests with a wrong signature."""


@dataclass(slots=True)
class DemoRun:
    """The state of a run of the demo."""

    planned: Sequence[tuple[float, Job]]
    """All jobs, each with its time of submission in seconds since the load began."""
    delivered: DeliveredAlerts = field(default_factory=DeliveredAlerts)
    phase: Literal["starting", "running", "settling"] = "starting"
    began_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    load_began_at: datetime | None = None
    ready: list[str] = field(default_factory=list[str])
    """Names of the processes that are up."""
    results: int = 0
    """Number of jobs that have a result."""
    failed: dict[str, str] = field(default_factory=dict[str, str])
    """Errors of submissions by job id. A job that was accepted and failed is not among them."""

    @property
    def elapsed_s(self) -> float:
        """The seconds since the demo began."""
        return (datetime.now(UTC) - self.began_at).total_seconds()

    def describe(self) -> str:
        """Describes the state of the run in one line."""
        if self.phase == "starting":
            return f"starting: {', '.join(self.ready) or 'servers'}"
        parts = [f"{self.phase}: {self.results}/{len(self.planned)} jobs have their results"]
        if self.phase == "running" and self.load_began_at is not None:
            parts += faults_at((datetime.now(UTC) - self.load_began_at).total_seconds())
        if alerts := self.delivered.alerts:
            parts.append(f"{quantity(len(alerts), 'alert')}, the last: {alerts[-1].title}")
        return " | ".join(parts)


@dataclass(frozen=True, slots=True)
class StoredRows:
    """The rows in ClickHouse after a run."""

    agents: tuple[AgentSummary, ...]
    executions: tuple[Execution, ...]
    attempts: tuple[Attempt, ...]
    breakers: tuple[BreakerRecord, ...]
    incident_ids: frozenset[str]


async def read_stored(analytics: Analytics) -> StoredRows:
    """Reads all rows that the report needs. Raises AnalyticsError."""
    return StoredRows(
        agents=await agent_summaries(analytics),
        executions=await analytics.read(execution_of, "SELECT * FROM executions FINAL ORDER BY execution_id"),
        attempts=await analytics.read(attempt_of, "SELECT * FROM attempts FINAL ORDER BY execution_id, number"),
        breakers=tuple((await analytics.query(BREAKERS)).named_rows()),
        incident_ids=frozenset(row[0] for row in (await analytics.query("SELECT incident_id FROM incidents")).rows),
    )


@dataclass(frozen=True, slots=True)
class DemoCheck:
    """The check of something that must happen in a run."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True, slots=True)
class DemoReport:
    """The report of a run."""

    jobs: int
    seconds: float
    stored: StoredRows
    alerts: tuple[Alert, ...]
    comparison: LedgerComparison
    checks: tuple[DemoCheck, ...]

    @property
    def ok(self) -> bool:
        """Returns True if the ledgers agree and all checks succeeded."""
        return self.comparison.agree and all(check.ok for check in self.checks)

    def document(self) -> dict[str, Any]:
        """Converts the report to JSON, with money as decimal strings in USD."""
        fields_shown = {"alert_id", "incident_id", "event", "status", "severity", "title"}
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
            "alerts": [alert.model_dump(mode="json", include=fields_shown) for alert in self.alerts],
            "reconciliation": asdict(self.comparison),
            "checks": [asdict(check) for check in self.checks],
        }


def checks(run: DemoRun, stored: StoredRows, cap: int) -> tuple[DemoCheck, ...]:
    """Checks everything that the scenario provokes. `cap` is that of `small-budget`, in nano-dollars. Pure."""
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
    counts = Counter(record.job_id for record in stored.executions)
    problems = [f"{job}: {reason}" for job, reason in sorted(run.failed.items())]
    if missing := sorted({str(job.job_id) for job in jobs} - counts.keys()):
        problems.append(f"{len(missing)} without an execution: {', '.join(missing[:5])}")
    if repeated := counts.total() - len(counts):
        problems.append(f"{repeated} executions too many")
    ways = Counter(str(job.metadata["way"]) for job in jobs)
    detail = f"{ways['http']} over HTTP, {ways['nats']} over NATS; {len(counts)} decided, once each"
    return DemoCheck("no job lost", not problems, "; ".join(problems[:5]) or detail)


def _outage(stored: StoredRows) -> DemoCheck:
    failed = sum(_status(attempt) == 503 for attempt in stored.attempts)
    breakers = {(breaker["agent"], breaker["model"]): breaker for breaker in stored.breakers}
    breaker = breakers.get(("content-writer", "gpt-4o"))
    if breaker is None:
        return DemoCheck("outage of gpt-4o", False, f"{failed} calls failed, and the breaker did not open")
    spared = sum(attempt.short_circuited for attempt in _of(stored, "content-writer"))
    opened = breaker["opened"]
    state = "closed again" if breaker["now"] == "closed" else breaker["now"].replace("_", "-")
    detail = f"{failed} calls failed; the breaker opened {opened} times, spared {spared} calls, and is {state}"
    return DemoCheck("outage of gpt-4o", breaker["now"] == "closed", detail)


def _burst(attempts: Sequence[Attempt]) -> DemoCheck:
    limited = {(attempt.execution_id, attempt.number) for attempt in attempts if _status(attempt) == 429}
    retries = [
        attempt
        for attempt in attempts
        if attempt.cause == "retry" and (attempt.execution_id, attempt.number - 1) in limited
    ]
    early = sum(retry.backoff_ms < RETRY_AFTER_S * 1000 for retry in retries)
    waits = f"{early or 'none'} sooner than {RETRY_AFTER_S} s"
    detail = f"{len(limited)} calls answered so; {len(retries)} retried, {waits}"
    return DemoCheck("429, Retry-After", len(limited) == BURST and bool(retries) and not early, detail)


def _hang(stored: StoredRows) -> DemoCheck:
    hung = [
        attempt
        for attempt in _of(stored, "deep-research")
        if attempt.error is not None and attempt.error.kind == "timeout"
    ]
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
    refused = sum(
        execution.agent == "small-budget" and execution.reason == "budget_exceeded" for execution in stored.executions
    )
    spent = sum(attempt.cost or 0 for attempt in _of(stored, "small-budget"))
    detail = f"{refused} jobs refused; spent {money(spent)} of {money(cap)}"
    return DemoCheck("small budget", refused > 0 and spent <= cap, detail)


def _alerts(delivered: DeliveredAlerts, stored: StoredRows) -> DemoCheck:
    # Compares incidents, not changes: of several changes that wait to be sent, only the newest is a message.
    incidents = {alert.incident_id for alert in delivered.alerts}
    counts = {
        "incidents were not announced": len(stored.incident_ids - incidents),
        "announced that ClickHouse does not have": len(incidents - stored.incident_ids),
        "messages came again": delivered.repeated,
        "with a wrong signature": delivered.refused,
    }
    problems = [f"{count} {problem}" for problem, count in counts.items() if count]
    if missing := sorted(_EXPECTED_ALERTS - {alert.event for alert in delivered.alerts}):
        problems.append(f"none of {', '.join(missing)}")
    kinds = Counter(alert.event.replace("_", " ") for alert in delivered.alerts).most_common()
    kind_list = ", ".join(f"{count} {kind}" for kind, count in kinds)
    detail = f"{len(incidents)} incidents, each announced, every signature right: {kind_list}"
    return DemoCheck("alerts", not problems, "; ".join(problems) or detail)


def _of(stored: StoredRows, agent: str) -> list[Attempt]:
    return [attempt for attempt in stored.attempts if attempt.agent == agent]


def _status(attempt: Attempt) -> int | None:
    return None if attempt.error is None else attempt.error.status_code


MAX_DIFFERENCES = 10
"""Maximum number of differences that are printed; --json prints all."""

_NONE = ("·", "dim")

AGENTS: tuple[Column[AgentSummary], ...] = (
    Column("agent", lambda agent: (agent.agent, "bold" if agent.agent == "all" else "")),
    Column("jobs", lambda agent: agent.executions, align_right=True),
    Column("ok", lambda agent: _success(agent), align_right=True),
    Column("tries", lambda agent: agent.attempts, align_right=True),
    Column("retry", lambda agent: agent.retries or _NONE, align_right=True),
    Column("fall", lambda agent: agent.fallbacks or _NONE, align_right=True),
    Column("short", lambda agent: agent.short_circuits or _NONE, align_right=True),
    Column("p50", lambda agent: duration(agent.p50_ms), align_right=True),
    Column("p95", lambda agent: duration(agent.p95_ms), align_right=True),
    Column("spend", lambda agent: money(agent.spend), align_right=True),
    Column("wasted", lambda agent: money(agent.wasted), align_right=True),
)
CHECKS: tuple[Column[DemoCheck], ...] = (
    Column("", lambda check: ("ok", "green") if check.ok else ("FAILED", "bold red")),
    Column("provoked", lambda check: check.name),
    Column("result", lambda check: check.detail),
)
FIGURES: tuple[Column[ComparedFigure], ...] = (
    Column("", lambda figure: figure.name),
    Column("provider", lambda figure: _amount(figure.provider), align_right=True),
    Column("Redis", lambda figure: _amount(figure.redis), align_right=True),
    Column("ClickHouse", lambda figure: _amount(figure.clickhouse), align_right=True),
    Column("agree", lambda figure: ("yes", "green") if figure.agree else ("NO", "bold red")),
)


def announce(jobs: int) -> None:
    """Prints what the scenario will provoke."""
    output.print_styled(("Breakwater demo", "bold"), f": {jobs} jobs, 6 agents, local servers, a simulated provider")
    for sentence in STORY:
        output.print_styled((f"  - {sentence}", "dim"))
    output.write("")


def show(report: DemoReport) -> None:
    """Prints the report."""
    _heading("Agents", "read from ClickHouse; fall: fallbacks, short: calls that were refused")
    summed_fields = [field.name for field in fields(AgentSummary) if field.name not in ("agent", "p50_ms", "p95_ms")]
    totals = {name: sum(getattr(agent, name) or 0 for agent in report.stored.agents) for name in summed_fields}
    output.table(AGENTS, [*report.stored.agents, AgentSummary(agent="all", p50_ms=None, p95_ms=None, **totals)], gap=1)
    _heading("What was provoked, and what became of it")
    output.table(CHECKS, report.checks)
    _heading("Reconciliation", "the provider's own ledger, Redis' counters, ClickHouse's sums")
    output.table(FIGURES, report.comparison.figures)
    output.print_styled(("estimated: the worst case of calls whose answer never came", "dim"))
    differences = report.comparison.differences
    for difference in differences[:MAX_DIFFERENCES]:
        output.print_styled((f"differs: {difference}", "red"))
    if len(differences) > MAX_DIFFERENCES:
        output.print_styled((f"and {len(differences) - MAX_DIFFERENCES} more; --json lists all", "red"))
    output.write("")
    output.print_styled(_verdict(report))


def _heading(title: str, note: str = "") -> None:
    output.write("")
    output.print_styled((title, "bold cyan"), (f"  {note}" if note else "", "dim"))


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
    problems = [] if report.comparison.agree else ["the ledgers differ"]
    if failed:
        problems.append(f"not as expected: {failed}")
    return (f"FAILED after {seconds}: {'; '.join(problems)}.", "bold red")
