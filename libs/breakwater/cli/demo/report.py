"""What the demo found: the figures, and whether everything happened that the scenario provokes. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from breakwater.analytics.queries import AgentSummary
from breakwater.cli.demo.receiver import Received
from breakwater.cli.demo.reconciliation import LedgerComparison
from breakwater.cli.demo.records import AttemptRow, Rows
from breakwater.cli.demo.scenario import BURST, RETRY_AFTER_S
from breakwater.cli.formats import money
from breakwater.contracts.types import usd_from_nano

_EVENTS_EXPECTED = frozenset({"breaker_open", "breaker_closed", "budget_soft_cap"})
"""Of what the scenario provokes, what people are alerted of in every run."""


@dataclass(frozen=True, slots=True)
class Check:
    """Something that must have happened, and how it went."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True, slots=True)
class BreakerSummary:
    """How often a breaker changed its state, where it stands, and why it opened first."""

    agent: str
    model: str
    opened: int
    half_opened: int
    closed: int
    now: str
    reason: str


@dataclass(frozen=True, slots=True)
class Handover:
    """How the jobs were submitted: how many by each way, and which were not accepted, with the reason."""

    http: int
    nats: int
    failed: dict[str, str]


@dataclass(frozen=True, slots=True)
class Delivered:
    """What the receiver of alerts got: the alerts, how many messages came again, how many had a wrong signature."""

    alerts: tuple[Received, ...]
    repeated: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """One run of the demo."""

    jobs: int
    seconds: float
    agents: tuple[AgentSummary, ...]
    breakers: tuple[BreakerSummary, ...]
    alerts: tuple[Received, ...]
    comparison: LedgerComparison
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether the ledgers agree, and everything happened that had to."""
        return self.comparison.agree and all(check.ok for check in self.checks)

    def document(self) -> dict[str, Any]:
        """The report as JSON has it: money as decimal strings in USD."""
        return {
            "ok": self.ok,
            "jobs": self.jobs,
            "seconds": round(self.seconds, 1),
            "agents": [
                {
                    **asdict(agent),
                    "success_rate": agent.success_rate,
                    "spend": _usd(agent.spend),
                    "wasted": _usd(agent.wasted),
                }
                for agent in self.agents
            ],
            "breakers": [asdict(line) for line in self.breakers],
            "alerts": [asdict(alert) for alert in self.alerts],
            "reconciliation": {
                "agree": self.comparison.agree,
                "figures": [
                    {
                        "name": figure.name,
                        **{name: _usd(value) if figure.is_money else value for name, value in figure.ledgers()},
                        "agree": figure.agree,
                    }
                    for figure in self.comparison.figures
                ],
                "differences": list(self.comparison.differences),
            },
            "checks": [asdict(check) for check in self.checks],
        }


def breaker_summaries(rows: Rows) -> tuple[BreakerSummary, ...]:
    """Sums the transitions up, one line for each breaker that ever opened."""
    lines: list[BreakerSummary] = []
    for agent, model in dict.fromkeys((row.agent, row.model) for row in rows.transitions):
        states = [row for row in rows.transitions if (row.agent, row.model) == (agent, model)]
        to = [row.to_state for row in states]
        lines.append(
            BreakerSummary(
                agent=agent,
                model=model,
                opened=to.count("open"),
                half_opened=to.count("half_open"),
                closed=to.count("closed"),
                now=to[-1],
                reason=next((row.reason for row in states if row.to_state == "open"), ""),
            )
        )
    return tuple(lines)


def checks(
    rows: Rows, job_ids: frozenset[str], handover: Handover, delivered: Delivered, cap: int
) -> tuple[Check, ...]:
    """Whether what the scenario provokes has happened.

    Args:
        rows: what ClickHouse holds.
        job_ids: all jobs of the load.
        handover: how they were handed in.
        delivered: what the receiver of alerts got.
        cap: the daily cap of `small-budget`, in nano-dollars.
    """
    return (
        _each_job_once(rows, job_ids, handover),
        _outage(rows),
        _burst(rows),
        _hang(rows),
        _wrong_key(rows),
        _small_budget(rows, cap),
        _alerts(rows, delivered),
    )


def _each_job_once(rows: Rows, job_ids: frozenset[str], handover: Handover) -> Check:
    found = [row.execution_id for row in rows.executions]
    detail = f"{handover.http} over HTTP, {handover.nats} over NATS; {len(set(found))} decided, once each"
    problems = [f"{job}: not accepted: {why}" for job, why in sorted(handover.failed.items())]
    if lost := sorted(job_ids - set(found)):
        problems.append(f"{len(lost)} without an execution: {', '.join(lost[:5])}")
    if len(found) > len(set(found)):
        problems.append(f"{len(found) - len(set(found))} executions too many")
    return Check("no job lost", not problems, "; ".join(problems[:5]) or detail)


def _outage(rows: Rows) -> Check:
    breaker = next((b for b in breaker_summaries(rows) if (b.agent, b.model) == ("content-writer", "gpt-4o")), None)
    failed = sum(row.error_status_code == 503 for row in rows.attempts)
    if breaker is None:
        return Check("outage of gpt-4o", False, f"{failed} calls failed, and the breaker did not open")
    spared = sum(row.short_circuited for row in _of(rows, "content-writer"))
    now = "closed again" if breaker.now == "closed" else breaker.now.replace("_", "-")
    detail = f"{failed} calls failed, the breaker spared {spared}; it is {now}"
    return Check("outage of gpt-4o", breaker.opened > 0 and breaker.now == "closed", detail)


def _burst(rows: Rows) -> Check:
    limited = {(row.execution_id, row.number): row for row in rows.attempts if row.error_status_code == 429}
    retries = [row for row in rows.attempts if row.cause == "retry" and (row.execution_id, row.number - 1) in limited]
    early = sum(row.backoff_ms < RETRY_AFTER_S * 1000 for row in retries)
    waits = f"none sooner than {RETRY_AFTER_S} s" if not early else f"{early} sooner than {RETRY_AFTER_S} s"
    detail = f"{len(limited)} calls answered so; {len(retries)} tried again, {waits}"
    return Check("429, Retry-After", len(limited) == BURST and bool(retries) and not early, detail)


def _hang(rows: Rows) -> Check:
    hung = [row for row in _of(rows, "deep-research") if row.error_kind == "timeout"]
    succeeded = {row.execution_id for row in rows.executions if row.status == "succeeded"}
    saved = sum(row.execution_id in succeeded for row in hung)
    detail = f"{len(hung)} calls cut off, {saved} of their jobs done by the fallback"
    return Check("o3 hangs", 0 < saved == len(hung), detail)


def _wrong_key(rows: Rows) -> Check:
    attempts = _of(rows, "wrong-key")
    jobs = sum(row.agent == "wrong-key" for row in rows.executions)
    denied = sum(row.error_status_code == 401 for row in attempts)
    detail = f"{jobs} jobs, {denied} calls answered 401, {len(attempts) - jobs} retries"
    return Check("wrong key", 0 < jobs == denied == len(attempts), detail)


def _small_budget(rows: Rows, cap: int) -> Check:
    refused = sum(row.agent == "small-budget" and row.reason == "budget_exceeded" for row in rows.executions)
    spent = sum(row.cost or 0 for row in _of(rows, "small-budget"))
    detail = f"{refused} jobs refused; spent {money(spent)} of {money(cap)}"
    return Check("small budget", refused > 0 and spent <= cap, detail)


def _alerts(rows: Rows, delivered: Delivered) -> Check:
    # Not each change of an incident is a message: of changes that wait together, only the newest is sent.
    incidents = {alert.incident_id for alert in delivered.alerts}
    missing, unknown = len(rows.incident_ids - incidents), len(incidents - rows.incident_ids)
    problems = [
        f"{number} {words}"
        for number, words in (
            (missing, "incidents were not announced"),
            (unknown, "announced that ClickHouse does not have"),
            (delivered.repeated, "messages came again"),
            (delivered.refused, "with a wrong signature"),
        )
        if number
    ]
    if lacking := sorted(_EVENTS_EXPECTED - {alert.event for alert in delivered.alerts}):
        problems.append(f"none of {', '.join(lacking)}")
    detail = f"{len(incidents)} incidents, each announced; {len(delivered.alerts)} alerts in all, every signature right"
    return Check("alerts", not problems, "; ".join(problems) or detail)


def _of(rows: Rows, agent: str) -> list[AttemptRow]:
    return [row for row in rows.attempts if row.agent == agent]


def _usd(nano: int | None) -> str | None:
    return None if nano is None else usd_from_nano(nano)
