"""Metrics of alerts, for Prometheus."""

from __future__ import annotations

from dataclasses import dataclass

from breakwater.kernel.telemetry.metrics import REGISTRY, CollectorRegistry, Counter, Gauge, counter, gauge


class AlerterMetrics:
    """Metrics of the delivery of alerts."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._sent = counter(registry, "alert_messages_total", "Messages delivered to the channel.", "channel")
        self._failed = counter(registry, "alert_failures_total", "Failed tries to send a message.", "channel")
        self._given_up = counter(registry, "alert_dead_letters_total", "Messages that were given up.", "channel")
        self._waiting = gauge(registry, "alerts_held", "Alerts that wait for a channel.", "channel")

    def of(self, channel: str) -> ChannelMetrics:
        """Returns the metrics of a channel, by its name in the config."""
        labels = (channel,)
        return ChannelMetrics(self._sent[labels], self._failed[labels], self._given_up[labels], self._waiting[labels])


@dataclass(frozen=True, slots=True)
class ChannelMetrics:
    """Metrics of a channel's messages."""

    _sent: Counter
    _failed: Counter
    _given_up: Counter
    _waiting: Gauge

    def count_delivery(self) -> None:
        """Counts a delivered message."""
        self._sent.inc()

    def count_failure(self) -> None:
        """Counts a failed try to send a message."""
        self._failed.inc()

    def count_dead_letter(self) -> None:
        """Counts a message that became a dead letter."""
        self._given_up.inc()

    def set_waiting(self, alerts: int) -> None:
        """Sets the number of alerts that wait."""
        self._waiting.set(alerts)
