"""What the generated history reports beside its jobs: breakers, stopped tasks, budgets, incidents, what people do."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import count

from pydantic import JsonValue

from bench.history_fleet import AGENTS, Agent, Model
from bench.history_jobs import Done, Job
from breakwater.alerts.contract import Alert
from breakwater.alerts.rules.incidents import IncidentRules, acknowledge, decide, resolve
from breakwater.alerts.rules.signals import signals_of
from breakwater.alerts.settings import Reminders
from breakwater.breakers.contract import BreakerTransition
from breakwater.identity.contract import AuditEvent
from breakwater.jobs.contract.plans import PlanChange
from breakwater.kernel.clickhouse.table import Table
from breakwater.kernel.nats.subjects import encode_token
from breakwater.kernel.types import time_from_ms
from breakwater.limits.contract import BudgetEvent, GuardEvent, LimitEvent
from breakwater.records import rows, schema
from breakwater.records.rows import StoredRow

DAY_MS = 86_400_000
COOLDOWN_MS = 60_000
THRESHOLDS = (50, 80, 100)
JOBS_A_PLAN = 100
"""Every so many jobs, one is a plan."""
MEAN_OF_FAILURES = 1.45
"""How many times the price of one answer an agent's job costs on average; only as right as budgets need it."""
RULES = IncidentRules(
    on_events=("breaker_open", "budget_soft_cap", "budget_hard_cap", "guard_tripped"),
    quiet_s=600,
    escalate=("guard_tripped",),
    reminders=Reminders(),
)
PEOPLE = ("ops: Zoë", "ops: Jun", "on-call")


class Events:
    """Hears of jobs in the order of time, and makes the rows of the small tables."""

    def __init__(self, rng: random.Random, next_sequence: Callable[[], int], executions_a_day: float) -> None:
        self._rng = rng
        self._next_sequence = next_sequence
        self._versions: dict[tuple[str, str], int] = defaultdict(int)
        self._incidents: dict[str, Alert] = {}
        self._stopped: set[str] = set()
        self._spent: dict[tuple[str, str], int] = defaultdict(int)
        self._caps = {agent.name: cap for agent in AGENTS if (cap := daily_cap(agent, executions_a_day)) is not None}
        self._rows: dict[str, list[StoredRow]] = defaultdict(list)
        self._actions = count(1)
        self._jobs = count(1)

    def take(self) -> Iterator[tuple[Table, list[StoredRow]]]:
        """What was made since the last time, by table."""
        for table in schema.TABLES:
            if self._rows[table.name]:
                yield table, self._rows.pop(table.name)

    def outage(self, provider: str, start_ms: int, end_ms: int) -> None:
        """Every breaker of a provider's models opens, is probed now and then, and closes when it is back."""
        for agent in AGENTS:
            for model in agent.chain:
                if model.provider == provider:
                    self._breaker(agent, model, start_ms + self._rng.randint(2_000, 90_000), end_ms)

    def job(self, job: Job, done: Done) -> None:
        """What a job does to its task and to its agent's budget."""
        if done.reason == "guard_tripped" and job.task_id is not None and job.task_id not in self._stopped:
            self._stopped.add(job.task_id)
            self._guard(job, done, job.task_id)
        if next(self._jobs) % JOBS_A_PLAN == 0:
            self._plan(job, done)
        cap = self._caps.get(job.agent.name)
        if cap is not None and done.cost:
            day = datetime.fromtimestamp(done.completed_ms // 1000, UTC).date().isoformat()
            before = self._spent[job.agent.name, day]
            self._spent[job.agent.name, day] = after = before + done.cost
            for percent in THRESHOLDS:
                if before * 100 < cap * percent <= after * 100:
                    self._crossing(job.agent, day, percent, cap, after, done)

    def _plan(self, job: Job, done: Done) -> None:
        """A plan of this job alone."""
        plan_id, ended = f"plan-{done.execution_id}", "succeeded" if done.reason is None else "failed"
        changes = (
            (None, "pending", "accepted", job.queued_ms),
            ("pending", "running", f"{done.execution_id} began", job.queued_ms + 50),
            ("running", ended, f"{done.execution_id} {ended}", done.completed_ms),
        )
        for version, (before, after, reason, at_ms) in enumerate(changes, 1):
            change = PlanChange.model_validate(
                {
                    "change_id": f"{plan_id}#{version}",
                    "plan_id": plan_id,
                    "plan_key": plan_id,
                    "from_state": before,
                    "to_state": after,
                    "reason": reason,
                    "execution_id": None if before is None else done.execution_id,
                    "tenant": job.tenant,
                    "version": version,
                    "at": time_from_ms(at_ms),
                }
            )
            self._rows["plan_changes"].append(rows.plan_row(change, self._next_sequence()))

    def _breaker(self, agent: Agent, model: Model, at_ms: int, end_ms: int) -> None:
        failures = self._rng.randint(3, 6)
        why = f"{failures} jobs in a row failed (threshold: 3)"
        self._transition(agent, model, "closed", "open", at_ms, why, failures, rule="consecutive_failures")
        while True:
            at_ms += self._rng.randint(8, 16) * COOLDOWN_MS
            self._transition(
                agent, model, "open", "half_open", at_ms, "the cool-down has ended; one probe is admitted", failures
            )
            at_ms += self._rng.randint(200, 4_000)
            if at_ms >= end_ms:
                break
            failures += 1
            self._transition(
                agent, model, "half_open", "open", at_ms, "the probe failed", failures, rule="probe_failed"
            )
        self._transition(agent, model, "half_open", "closed", at_ms, "the probe succeeded", 0)

    def _transition(
        self,
        agent: Agent,
        model: Model,
        before: str,
        after: str,
        at_ms: int,
        reason: str,
        failures: int,
        **published: str,
    ) -> None:
        self._versions[agent.name, model.name] += 1
        version = self._versions[agent.name, model.name]
        at = time_from_ms(at_ms)
        event = BreakerTransition.model_validate(
            {
                "transition_id": f"{encode_token(agent.name)}/{encode_token(model.name)}#{version}@{at_ms}",
                "agent": agent.name,
                "model": model.name,
                "from_state": before,
                "to_state": after,
                "reason": reason,
                "health": "healthy" if after == "closed" else "unhealthy",
                "consecutive_failures": failures,
                "total_failures": failures + 3 * version,
                "unique_errors": min(failures, 3),
                "errors": failures,
                "within_s": 60.0,
                "cooldown_s": COOLDOWN_MS / 1000,
                "open_until": time_from_ms(at_ms + COOLDOWN_MS) if after == "open" else None,
                "last_failure_at": at if failures else None,
                "version": version,
                "at": at,
                **published,
            }
        )
        self._keep(schema.BREAKER_TRANSITIONS, rows.transition_row(event, self._next_sequence()))
        self._hear(event)

    def _guard(self, job: Job, done: Done, task_id: str) -> None:
        rule, reason = self._rng.choice(
            (
                ("max_iterations", "50 iterations (limit: 50)"),
                ("same_error", "the same error 5 times in a row (limit: 5)"),
                ("max_cost", "$1.00 spent (limit: $1.00)"),
            )
        )
        tripped = GuardEvent.model_validate(
            {
                "event_id": f"{job.tenant or ''}/{task_id}@{done.completed_ms}",
                "kind": "tripped",
                "agent": job.agent.name,
                "tenant": job.tenant,
                "task_id": task_id,
                "task_key": task_id,
                "execution_id": done.execution_id,
                "rule": rule,
                "reason": reason,
                "iterations": self._rng.randint(5, 50),
                "tokens": self._rng.randint(5_000, 90_000),
                "cost": self._rng.randint(10_000_000, 1_000_000_000),
                "consecutive_failures": 5 if rule == "same_error" else 0,
                "total_failures": 5,
                "unique_errors": 1,
                "at": time_from_ms(done.completed_ms),
            }
        )
        self._keep(schema.GUARD_EVENTS, rows.guard_row(tripped, self._next_sequence()))
        self._hear(tripped)
        if self._rng.random() < 0.6:
            at = time_from_ms(done.completed_ms + self._rng.randint(60_000, 5_000_000))
            by = self._rng.choice(PEOPLE)
            published = {"kind": "reset", "by": by, "reason": f"reset by {by}: the prompt is mended", "at": at}
            reset = tripped.model_copy(update={**published, "event_id": f"{tripped.event_id}#reset"})
            self._keep(schema.GUARD_EVENTS, rows.guard_row(reset, self._next_sequence()))
            self._acted("reset_task", by, at, "the prompt is mended", {"task_id": task_id, "tenant": job.tenant})
            self._hear(reset)

    def _crossing(self, agent: Agent, day: str, percent: int, cap: int, spent: int, done: Done) -> None:
        hard = agent.hard and percent == 100
        name = f"agent:{agent.name}/daily"
        crossing = BudgetEvent.model_validate(
            {
                "event_id": f"{name}/{day}/{percent}/{cap}",
                "kind": "hard_cap" if hard else "soft_cap",
                "scope": "agent",
                "agent": agent.name,
                "window": "daily",
                "period": day,
                "threshold_percent": percent,
                "limit": cap,
                "total": spent,
                "enforcement": "hard" if agent.hard else "soft",
                "resets_at": time_from_ms((done.completed_ms // DAY_MS + 1) * DAY_MS),
                "at": time_from_ms(done.completed_ms),
            }
        )
        self._keep(schema.BUDGET_EVENTS, rows.budget_row(crossing, self._next_sequence()))
        self._hear(crossing)
        if hard:
            changed = LimitEvent(
                event_id=crossing.event_id,
                kind="changed",
                limit_id=f"{crossing.agent}.usd.day",
                scope=f"agent:{crossing.agent}",
                by=PEOPLE[0],
                reason="it was spent",
                at=crossing.at,
            )
            self._keep(schema.LIMIT_EVENTS, rows.limit_row(changed, self._next_sequence()))
        if hard and self._rng.random() < 0.5:
            at_ms = done.completed_ms + self._rng.randint(300_000, 3_000_000)
            by = self._rng.choice(PEOPLE)
            raised = crossing.model_copy(
                update={
                    "event_id": f"{name}/{day}/raised/{at_ms}/{by}",
                    "kind": "raised",
                    "threshold_percent": None,
                    "limit": cap * 3 // 2,
                    "previous": cap,
                    "configured": cap,
                    "by": by,
                    "reason": "the launch is today",
                    "at": time_from_ms(at_ms),
                }
            )
            self._keep(schema.BUDGET_EVENTS, rows.budget_row(raised, self._next_sequence()))
            self._acted("raise_cap", by, raised.at, raised.reason, {"budget": name})

    def _hear(self, event: BreakerTransition | GuardEvent | BudgetEvent) -> None:
        for signal in signals_of(event):
            published = decide(signal, self._incidents.get(signal.key), RULES)
            if published is None:
                continue
            self._tell(published)
            if published.change == "opened" and self._rng.random() < 0.3:
                at = time_from_ms(int(published.at.timestamp() * 1000) + self._rng.randint(30_000, 400_000))
                seen = acknowledge(published, self._rng.choice(PEOPLE), None, at)
                if seen is not None:
                    self._tell(seen)
                    of: dict[str, JsonValue] = {"incident_id": seen.incident_id}
                    self._acted("acknowledge_incident", seen.acknowledged_by or "", at, None, of)
                    if event.at.minute < 20 and (over := resolve(seen, "ops: Jun", "looked into", at)) is not None:
                        self._tell(over)
                        self._acted("resolve_incident", over.resolved_by or "", at, over.reason, of)

    def _tell(self, alert: Alert) -> None:
        self._incidents[alert.key] = alert
        self._keep(schema.ALERTS, rows.alert_row(alert, self._next_sequence()))

    def _acted(self, action: str, by: str, at: datetime, reason: str | None, details: dict[str, JsonValue]) -> None:
        event = AuditEvent(
            audit_id=f"a{next(self._actions):08}",
            action=action,
            outcome="done",
            by=by,
            actor="person",
            actor_id=by,
            details=details,
            reason=reason,
            at=at,
        )
        self._keep(schema.AUDIT, rows.audit_row(event, self._next_sequence()))

    def _keep(self, table: Table, row: StoredRow) -> None:
        self._rows[table.name].append(row)


def daily_cap(agent: Agent, executions_a_day: float) -> int | None:
    """A budget for a day, about as large as what an agent spends in one."""
    first = agent.chain[0]
    if agent.daily_cap is None or first.input_nano is None or first.output_nano is None:
        return None
    answer = agent.input_tokens * first.input_nano + agent.output_tokens * first.output_nano
    spent = executions_a_day * agent.share * answer * MEAN_OF_FAILURES
    # Whole cents, as people set budgets.
    return max(1, round(spent * agent.daily_cap / 10_000_000)) * 10_000_000
