"""Metrics of jobs and their attempts, for Prometheus."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from breakwater.jobs.contract.execution import Attempt, Execution
from breakwater.kernel.telemetry.metrics import (
    NONE,
    OTHER,
    REGISTRY,
    CollectorRegistry,
    counter,
    dead_letters_refused,
    gauge,
    histogram,
    plain_gauge,
)
from breakwater.kernel.types import NANO_PER_USD

LLM_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
TOKENS_PER_S_BUCKETS = (1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 75.0, 100.0, 150.0, 250.0, 500.0, 1000.0)


class WorkerMetrics:
    """Metrics of a worker. They cost a few microseconds for each attempt."""

    def __init__(self, models: Collection[str], registry: CollectorRegistry = REGISTRY) -> None:
        """Creates the metrics in a registry; several workers of one process share its series.

        Args:
            models: the ids that the config names; any other model is counted as `other`.
            registry: the registry that is scraped.
        """
        self._models = frozenset(models)
        self._registry = registry
        dead_letters_refused(registry)
        seconds = partial(histogram, registry, LLM_BUCKETS_S)
        by_call = ("agent", "model", "kind")
        self._jobs = counter(registry, "jobs_total", "Jobs that have ended.", "agent", "status", "reason")
        self._job_seconds = seconds("job_duration_seconds", "Time from a job's acceptance to its end.", "agent")
        help_text = "Recorded attempts, including refused ones."
        self._attempts = counter(registry, "attempts_total", help_text, "agent", "model", "outcome", "kind")
        self._attempt_seconds = seconds("attempt_duration_seconds", "Duration of calls.", "agent", "model")
        help_text = "Time from the start of a call to the first content of its streamed answer."
        self._first_token_seconds = seconds("first_token_seconds", help_text, "agent", "model")
        rates = partial(histogram, registry, TOKENS_PER_S_BUCKETS)
        help_text = "Speed of streamed answers: output tokens after the first one, per second."
        self._tokens_per_s = rates("output_tokens_per_second", help_text, "agent", "model")
        self._tokens = counter(
            registry, "tokens_total", "Tokens that providers reported.", "agent", "model", "direction"
        )
        help_text = "Known costs of calls, including estimates."
        self._cost = counter(registry, "cost_usd_total", help_text, "agent", "model")
        help_text = "Calls whose reported usage is implausible, has no price, or belongs to another model."
        self._usage_problems = counter(registry, "usage_problems_total", help_text, "provider")
        help_text = "Cost of calls that did not produce the answer."
        self._wasted_cost = counter(registry, "wasted_cost_usd_total", help_text, "agent", "cause")
        self._retries = counter(registry, "retries_total", "Retries, by the error of the failed attempt.", *by_call)
        help_text = "Jobs that a fallback model answered, by that model."
        self._fallback_answers = counter(registry, "fallback_answers_total", help_text, "agent", "model")
        help_text = "Cost of answers of fallback models; of those whose cost on the requested model is known."
        self._fallback_cost = counter(registry, "fallback_cost_usd_total", help_text, "agent")
        help_text = "Cost that the same answers would have had on the requested model."
        self._requested_model_cost = counter(registry, "requested_model_cost_usd_total", help_text, "agent")
        help_text = "Jobs in progress in this process."
        self._in_progress = gauge(registry, "jobs_in_progress", help_text, "agent")
        self._parked = counter(
            registry, "jobs_parked_total", "Number of times that jobs were parked until their next attempt.", "agent"
        )
        self._cache_hits = counter(registry, "cache_hits_total", "Jobs answered from the cache.", "agent")
        self._short_circuits = counter(
            registry, "short_circuits_total", "Refused calls, which were not made.", *by_call
        )

    def count_attempt(self, attempt: Attempt, trace_id: str | None = None) -> None:
        """Counts a recorded attempt. A sampled trace becomes the exemplar of the attempt's buckets."""
        agent = attempt.agent
        exemplar = _exemplar(trace_id)
        model = attempt.model if attempt.model in self._models else OTHER
        kind = NONE if attempt.error is None else attempt.error.kind
        self._attempts[agent, model, attempt.outcome, kind].inc()
        if attempt.short_circuited:
            self._short_circuits[agent, model, kind].inc()
            return
        if attempt.outcome != "worker_lost":  # the call's duration is unknown
            self._attempt_seconds[agent, model].observe(attempt.duration_ms / 1000, exemplar)
        if attempt.first_token_ms is not None:
            self._first_token_seconds[agent, model].observe(attempt.first_token_ms / 1000, exemplar)
            if (rate := attempt.tokens_per_s) is not None:
                self._tokens_per_s[agent, model].observe(rate, exemplar)
        if attempt.input_tokens is not None:
            self._tokens[agent, model, "input"].inc(attempt.input_tokens)
        if attempt.output_tokens is not None:
            self._tokens[agent, model, "output"].inc(attempt.output_tokens)
        if attempt.usage_problem is not None or attempt.response_model is not None:
            self._usage_problems[(attempt.provider,)].inc()
        if attempt.cost is not None:
            self._cost[agent, model].inc(attempt.cost / NANO_PER_USD)

    def count_job(self, result: Execution, trace_id: str | None = None) -> None:
        """Counts a decided job, with its trace as `count_attempt` does. Dry runs are not counted."""
        if result.dry_run:
            return
        agent = result.agent
        self._jobs[agent, result.status, result.reason or NONE].inc()
        self._job_seconds[(agent,)].observe(result.duration_ms / 1000, _exemplar(trace_id))
        if result.cache_hit:
            self._cache_hits[(agent,)].inc()
        if result.fell_back:
            model = result.chosen_model if result.chosen_model in self._models else OTHER
            self._fallback_answers[agent, model].inc()
            if (costs := result.fallback_costs) is not None:
                self._fallback_cost[(agent,)].inc(costs[0] / NANO_PER_USD)
                self._requested_model_cost[(agent,)].inc(costs[1] / NANO_PER_USD)
        for cause, nano in result.wasted_by_cause.items():
            self._wasted_cost[agent, cause].inc(nano / NANO_PER_USD)
        # The error that caused a retry is that of the attempt before it, which only the whole job has.
        for before, attempt in zip(result.attempts, result.attempts[1:], strict=False):
            if attempt.cause == "retry":
                model = attempt.model if attempt.model in self._models else OTHER
                kind = NONE if before.error is None else before.error.kind
                self._retries[agent, model, kind].inc()

    def set_breaker_service_alive(self, alive: bool) -> None:
        """Sets whether a breaker service is running; there is no series before the first call."""
        help_text = "1 while a breaker service is running. Without one, failures open no breaker."
        plain_gauge(self._registry, "breaker_service_alive", help_text).set(alive)

    def begin_job(self, agent: str) -> None:
        """Counts a job in progress."""
        self._in_progress[(agent,)].inc()

    def end_job(self, agent: str) -> None:
        """Counts a job that is no longer in progress: decided, parked, or lost to another worker."""
        self._in_progress[(agent,)].dec()

    def count_parked_job(self, agent: str) -> None:
        """Counts a job that was parked until its next attempt."""
        self._parked[(agent,)].inc()


def _exemplar(trace_id: str | None) -> dict[str, str] | None:
    return None if trace_id is None else {"trace_id": trace_id}
