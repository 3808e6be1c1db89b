"""What the demo found: the figures, and whether everything happened that the scenario provokes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from breakwater.analytics.client import Analytics
from breakwater.analytics.figures import AgentSummary, agent_summaries
from breakwater.analytics.rows import attempt_of, execution_of
from breakwater.cli.demo.progress import DemoRun
from breakwater.cli.demo.receiver import Delivered
from breakwater.cli.demo.reconciliation import LedgerComparison
from breakwater.cli.demo.scenario import BURST, RETRY_AFTER_S
from breakwater.cli.formats import money
from breakwater.contracts.alerts import Alert
from breakwater.contracts.execution import Attempt, Execution
from breakwater.contracts.types import usd_from_nano

Breaker = Mapping[str, Any]
"""How often a breaker changed its state, where it stands, and why it opened first: a row of the following."""

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
"""Of what the scenario provokes, what people are alerted of in every run."""


@dataclass(frozen=True, slots=True)
class StoredRows:
    """What ClickHouse holds."""

    agents: tuple[AgentSummary, ...]
    executions: tuple[Execution, ...]
    attempts: tuple[Attempt, ...]
    breakers: tuple[Breaker, ...]
    incident_ids: frozenset[str]


async def read_stored(analytics: Analytics) -> StoredRows:
    """Reads it. Raises AnalyticsError."""
    return StoredRows(
        agents=await agent_summaries(analytics),
        executions=await analytics.read(execution_of, "SELECT * FROM executions FINAL ORDER BY execution_id"),
        attempts=await analytics.read(attempt_of, "SELECT * FROM attempts FINAL ORDER BY execution_id, number"),
        breakers=tuple((await analytics.query(BREAKERS)).named()),
        incident_ids=frozenset(row[0] for row in (await analytics.query("SELECT incident_id FROM incidents")).rows),
    )


@dataclass(frozen=True, slots=True)
class Check:
    """Something that must have happened, and how it went."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Report:
    """One run of the demo."""

    jobs: int
    seconds: float
    stored: StoredRows
    alerts: tuple[Alert, ...]
    comparison: LedgerComparison
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether the ledgers agree, and everything happened that had to."""
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
                | {"success_rate": agent.success_rate, "spend": _usd(agent.spend), "wasted": _usd(agent.wasted)}
                for agent in self.stored.agents
            ],
            "breakers": self.stored.breakers,
            "alerts": [alert.model_dump(mode="json", include=shown) for alert in self.alerts],
            "reconciliation": asdict(self.comparison),
            "checks": [asdict(check) for check in self.checks],
        }


def checks(run: DemoRun, stored: StoredRows, cap: int) -> tuple[Check, ...]:
    """Whether what the scenario provokes has happened; `cap` is that of `small-budget`, in nano-dollars. Pure."""
    return (
        _each_job_once(run, stored),
        _outage(stored),
        _burst(stored.attempts),
        _hang(stored),
        _wrong_key(stored),
        _small_budget(stored, cap),
        _alerts(run.delivered, stored),
    )


def _each_job_once(run: DemoRun, stored: StoredRows) -> Check:
    jobs = [job for _, job in run.planned]
    decided = Counter(record.execution_id for record in stored.executions)
    problems = [f"{job}: {why}" for job, why in sorted(run.failed.items())]
    if lost := sorted({str(job.job_id) for job in jobs} - decided.keys()):
        problems.append(f"{len(lost)} without an execution: {', '.join(lost[:5])}")
    if repeated := decided.total() - len(decided):
        problems.append(f"{repeated} executions too many")
    ways = Counter(str(job.metadata["way"]) for job in jobs)
    detail = f"{ways['http']} over HTTP, {ways['nats']} over NATS; {len(decided)} decided, once each"
    return Check("no job lost", not problems, "; ".join(problems[:5]) or detail)


def _outage(stored: StoredRows) -> Check:
    failed = sum(_status(attempt) == 503 for attempt in stored.attempts)
    breakers = {(one["agent"], one["model"]): one for one in stored.breakers}
    breaker = breakers.get(("content-writer", "gpt-4o"))
    if breaker is None:
        return Check("outage of gpt-4o", False, f"{failed} calls failed, and the breaker did not open")
    spared = sum(attempt.short_circuited for attempt in _of(stored, "content-writer"))
    now = "closed again" if breaker["now"] == "closed" else breaker["now"].replace("_", "-")
    detail = f"{failed} calls failed; the breaker opened {breaker['opened']} times, spared {spared} calls, and is {now}"
    return Check("outage of gpt-4o", breaker["now"] == "closed", detail)


def _burst(attempts: Sequence[Attempt]) -> Check:
    limited = {(one.execution_id, one.number) for one in attempts if _status(one) == 429}
    retries = [one for one in attempts if one.cause == "retry" and (one.execution_id, one.number - 1) in limited]
    early = sum(retry.backoff_ms < RETRY_AFTER_S * 1000 for retry in retries)
    waits = f"{early or 'none'} sooner than {RETRY_AFTER_S} s"
    detail = f"{len(limited)} calls answered so; {len(retries)} retried, {waits}"
    return Check("429, Retry-After", len(limited) == BURST and bool(retries) and not early, detail)


def _hang(stored: StoredRows) -> Check:
    hung = [one for one in _of(stored, "deep-research") if one.error is not None and one.error.kind == "timeout"]
    succeeded = {record.execution_id for record in stored.executions if record.status == "succeeded"}
    saved = sum(attempt.execution_id in succeeded for attempt in hung)
    detail = f"{len(hung)} calls cut off, {saved} of their jobs done by the fallback"
    return Check("o3 hangs", 0 < saved == len(hung), detail)


def _wrong_key(stored: StoredRows) -> Check:
    attempts = _of(stored, "wrong-key")
    jobs = sum(record.agent == "wrong-key" for record in stored.executions)
    denied = sum(_status(attempt) == 401 for attempt in attempts)
    detail = f"{jobs} jobs, {denied} calls answered 401, {len(attempts) - jobs} retries"
    return Check("wrong key", 0 < jobs == denied == len(attempts), detail)


def _small_budget(stored: StoredRows, cap: int) -> Check:
    refused = sum(one.agent == "small-budget" and one.reason == "budget_exceeded" for one in stored.executions)
    spent = sum(attempt.cost or 0 for attempt in _of(stored, "small-budget"))
    detail = f"{refused} jobs refused; spent {money(spent)} of {money(cap)}"
    return Check("small budget", refused > 0 and spent <= cap, detail)


def _alerts(delivered: Delivered, stored: StoredRows) -> Check:
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
    return Check("alerts", not problems, "; ".join(problems) or detail)


def _of(stored: StoredRows, agent: str) -> list[Attempt]:
    return [attempt for attempt in stored.attempts if attempt.agent == agent]


def _status(attempt: Attempt) -> int | None:
    return None if attempt.error is None else attempt.error.status_code


def _usd(nano: int | None) -> str | None:
    return None if nano is None else usd_from_nano(nano)
