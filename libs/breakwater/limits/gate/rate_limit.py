"""Rate limits: requests and tokens in a minute, an hour or a day, and concurrent calls.

They are of the agent and the model, and of the job's task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from breakwater.calls.gate import POLL_S, Gate, Refused, WaitForCapacity
from breakwater.jobs.contract.execution import Attempt
from breakwater.kernel.nats.subjects import encode_token
from breakwater.kernel.redis.connection import ScriptCommand
from breakwater.limits.rules.refusals import over_rate_limit
from breakwater.limits.settings import RateLimit
from breakwater.limits.store.rate_limits import LimitedSubject, OverLimit, RateLimits

LimitsOf = Callable[[str, str], tuple[LimitedSubject, ...]]
"""Returns the limits of an agent and a model, by their names."""

MAX_REMEMBERED = 4096


def configured_limits(
    agent_limits: Mapping[str, RateLimit | None], model_limits: Mapping[str, RateLimit | None]
) -> LimitsOf:
    """Returns a function that returns the limits of an agent and a model by those of all, each computed once."""

    # Programs may name models that the config does not: the cache has an end.
    @lru_cache(MAX_REMEMBERED)
    def limits_of(agent: str, model: str) -> tuple[LimitedSubject, ...]:
        rules = (f"agent:{agent}", agent_limits[agent]), (f"model:{model}", model_limits.get(model))
        return tuple(
            limited for name, rule in rules if rule is not None for limited in LimitedSubject.all_of(name, rule)
        )

    return limits_of


@dataclass(slots=True, kw_only=True)
class RateLimitGate(Gate):
    """Counts the call with its worst-case tokens towards all its limits, or towards none."""

    rate_limits: RateLimits
    limits_of: LimitsOf
    jitter: Callable[[], float]
    _limits: tuple[LimitedSubject, ...] = field(init=False)
    _admitted: bool = False
    must_settle = True

    def __post_init__(self) -> None:
        job = self.admission.job
        self._limits = self.limits_of(job.agent_name, self.admission.target.model)
        rule = None if job.agent.guard is None else job.agent.guard.rate_limit
        if rule is not None:
            tenant = "" if job.job.tenant is None else encode_token(job.job.tenant)
            task = f"task:{tenant}/{job.ids.own_task_key}"
            self._limits = *self._limits, *LimitedSubject.all_of(task, rule)

    def ask(self) -> ScriptCommand | None:
        """Returns None if neither the agent, the task nor the model has a limit."""
        if not self._limits:
            return None
        admission = self.admission
        return self.rate_limits.admit_command(
            admission.attempt_id, self._limits, admission.worst_tokens, admission.lease_ms
        )

    def read(self, answer: Any) -> Refused | WaitForCapacity | None:
        """Refuses if the limit says so or the call alone exceeds it; otherwise the call waits for room."""
        over = self.rate_limits.read_admission(answer, self._limits)
        self._admitted = over is None
        return None if over is None else self._over_limit(over)

    def release(self) -> ScriptCommand | None:
        """Removes the call from the counts."""
        if not self._admitted:
            return None
        return self.rate_limits.release_command(self.admission.attempt_id, self._limits)

    def settle(self, attempt: Attempt) -> ScriptCommand | None:
        """Replaces the worst-case tokens of the call by the tokens it used."""
        if not self._limits:
            return None
        tokens = _tokens_used(attempt)
        cached_tokens = attempt.cached_tokens or 0
        counted = [
            tokens if tokens is None or limited.rule.count_cached else max(0, tokens - cached_tokens)
            for limited in self._limits
        ]
        return self.rate_limits.settle_command(attempt.attempt_id, self._limits, counted)

    def _over_limit(self, over: OverLimit) -> Refused | WaitForCapacity:
        wait_s = None if over.wait_ms is None else over.wait_ms / 1000
        limited = next(limited for limited in self._limits if limited.name == over.name)
        job = self.admission.job
        error = over_rate_limit(over.name, over.quantity, limited.rule, wait_s, job.agent_name, job.ids.own_task_id)
        refused = Refused("rate_limited", error, refused_by=over.name)
        if limited.rule.on_exceeded == "fail" or wait_s is None:
            return refused
        # A call under way usually ends long before its lease, and with fewer tokens than its worst case.
        soon = over.quantity == "concurrent_calls" or (over.quantity.startswith("tokens") and over.under_way > 0)
        # Jitter: not all at the same moment.
        return WaitForCapacity((min(wait_s, POLL_S) if soon else wait_s) + POLL_S * self.jitter(), refused)


def _tokens_used(attempt: Attempt) -> int | None:
    """Returns the tokens of a call; None if they are unknown."""
    counts = attempt.input_tokens, attempt.output_tokens
    reported = counts != (None, None) or not attempt.cost
    is_known = reported if attempt.cost_basis == "billed" else None not in counts
    return (attempt.input_tokens or 0) + (attempt.output_tokens or 0) if is_known else None
