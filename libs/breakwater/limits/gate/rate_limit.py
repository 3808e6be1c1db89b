"""Rate limits: requests and tokens in a minute, an hour or a day, and concurrent calls.

They are of the agent and the model, and of the job's task.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from breakwater.calls.gate import POLL_S, Gate, Refused, WaitForCapacity
from breakwater.config import Agent
from breakwater.jobs.contract.execution import Attempt
from breakwater.kernel.nats.subjects import encode_token
from breakwater.kernel.redis.connection import ScriptCall
from breakwater.limits.rules.refusals import over_rate_limit
from breakwater.limits.store.rate_limits import Limited, OverLimit
from services.worker.context import WorkerContext


@dataclass(slots=True)
class RateLimitGate(Gate):
    """Counts the call with its worst-case tokens towards all its limits, or towards none."""

    _limits: tuple[Limited, ...] = field(init=False)
    _admitted: bool = False
    must_settle = True

    def __post_init__(self) -> None:
        job = self.request.job
        self._limits = self.request.target.limits
        rule = None if job.agent.guard is None else job.agent.guard.rate_limit
        if rule is not None:
            tenant = "" if job.job.tenant is None else encode_token(job.job.tenant)
            task = f"task:{tenant}/{job.job.task_id or job.execution_id}"
            self._limits = *self._limits, *Limited.all_of(task, rule)

    @classmethod
    def applies(cls, worker: WorkerContext, agent: Agent) -> bool:
        """Returns False if neither the agent, its tasks nor any model has a limit: a job may name any model."""
        of_models = (settings.rate_limit for settings in worker.config.models.values())
        of_task = None if agent.guard is None else agent.guard.rate_limit
        return any(rule is not None for rule in (agent.rate_limit, of_task, *of_models))

    def ask(self) -> ScriptCall | None:
        """Returns None if neither the agent, the task nor the model has a limit."""
        if not self._limits:
            return None
        request = self.request
        return self.worker.rate_limits.admit_call(
            request.attempt_id, self._limits, request.worst_tokens, request.lease_ms
        )

    def read(self, answer: Any) -> Refused | WaitForCapacity | None:
        """Refuses if the limit says so or the call alone exceeds it; otherwise the call waits for room."""
        over = self.worker.rate_limits.admitted(answer, self._limits)
        self._admitted = over is None
        return None if over is None else self._over_limit(over)

    def release(self) -> ScriptCall | None:
        """Removes the call from the counts."""
        if not self._admitted:
            return None
        return self.worker.rate_limits.release_call(self.request.attempt_id, self._limits)

    def settle(self, attempt: Attempt) -> ScriptCall | None:
        """Replaces the worst-case tokens of the call by the tokens it used."""
        if not self._limits:
            return None
        tokens = _tokens_used(attempt)
        cached_tokens = attempt.cached_tokens or 0
        counted = [
            tokens if tokens is None or limited.rule.count_cached else max(0, tokens - cached_tokens)
            for limited in self._limits
        ]
        return self.worker.rate_limits.settle_call(attempt.attempt_id, self._limits, counted)

    def _over_limit(self, over: OverLimit) -> Refused | WaitForCapacity:
        wait_s = None if over.wait_ms is None else over.wait_ms / 1000
        limited = next(limited for limited in self._limits if limited.name == over.name)
        error = over_rate_limit(over.name, over.quantity, limited.rule, wait_s, self.request.job.agent_name)
        refused = Refused("rate_limited", error, refused_by=over.name)
        if limited.rule.on_exceeded == "fail" or wait_s is None:
            return refused
        # A call under way usually ends long before its lease, and with fewer tokens than its worst case.
        soon = over.quantity == "concurrent_calls" or (over.quantity.startswith("tokens") and over.under_way > 0)
        # Jitter: not all at the same moment.
        return WaitForCapacity((min(wait_s, POLL_S) if soon else wait_s) + POLL_S * self.worker.jitter(), refused)


def _tokens_used(attempt: Attempt) -> int | None:
    """Returns the tokens of a call; None if they are unknown."""
    counts = attempt.input_tokens, attempt.output_tokens
    reported = counts != (None, None) or not attempt.cost
    is_known = reported if attempt.cost_basis == "billed" else None not in counts
    return (attempt.input_tokens or 0) + (attempt.output_tokens or 0) if is_known else None
