"""Metrics of budgets, for Prometheus."""

from __future__ import annotations

from datetime import datetime

from breakwater.kernel.telemetry.metrics import REGISTRY, CollectorRegistry, counter, plain_counter, plain_gauge
from breakwater.limits.contract import BudgetEvent


class BudgetMetrics:
    """Metrics of the budget service: settled calls, and the state of the budgets' counters."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        help_text = "Calls whose cost was counted, including redelivered ones."
        self._settled = plain_counter(registry, "budget_calls_settled_total", help_text)
        help_text = "Thresholds of limits that were reached and published."
        self._thresholds = counter(registry, "budget_thresholds_total", help_text, "scope", "window", "kind")
        self._filled = plain_gauge(registry, "budgets_filled", "1 while the budgets' counters are complete.")
        help_text = "Counters that differed from the record and were repaired."
        self._repairs = plain_counter(registry, "budget_repairs_total", help_text)
        help_text = "Time of the last comparison of the counters with the record."
        self._compared = plain_gauge(registry, "budgets_compared_timestamp_seconds", help_text)

    def count_settled(self, calls: int) -> None:
        """Counts calls whose cost was settled."""
        self._settled.inc(calls)

    def count_threshold(self, reached: BudgetEvent) -> None:
        """Counts a threshold that was announced."""
        self._thresholds[reached.scope, reached.window, reached.kind].inc()

    def set_complete(self, *, yes: bool) -> None:
        """Sets whether the counters are complete."""
        self._filled.set(yes)

    def count_repair(self) -> None:
        """Counts a counter that differed from the record."""
        self._repairs.inc()

    def set_compared_at(self, at: datetime) -> None:
        """Sets the time at which all counters were compared with the record."""
        self._compared.set(at.timestamp())
