"""Metrics of breakers, for Prometheus."""

from __future__ import annotations

from breakwater.breakers.contract import BreakerState
from breakwater.kernel.telemetry.metrics import REGISTRY, CollectorRegistry, counter


class BreakerMetrics:
    """Metrics of the breaker service."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        help_text = "Transitions published by the breaker service."
        self._transitions = counter(registry, "breaker_transitions_total", help_text, "agent", "model", "to")

    def count_transition(self, agent: str, model: str, to: BreakerState) -> None:
        """Counts a breaker's transition; its labels are those of `BREAKER_STATE`."""
        self._transitions[agent, model, to].inc()
