"""Metrics of the sink, for Prometheus."""

from __future__ import annotations

from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.telemetry.metrics import (
    HTTP_BUCKETS_S,
    REGISTRY,
    CollectorRegistry,
    counter,
    dead_letters_refused,
    gauge,
    histogram,
    plain_counter,
)


class SinkMetrics:
    """Metrics of the sink: stored rows, and the lag behind the event log."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        dead_letters_refused(registry)
        self._rows = counter(registry, "sink_rows_total", "Stored rows, including redelivered ones.", "table")
        help_text = "Duration of successful inserts."
        self._insert_seconds = histogram(registry, HTTP_BUCKETS_S, "sink_insert_duration_seconds", help_text, "table")
        self._batches = counter(registry, "sink_batches_total", "Batches stored and acknowledged.", "stream")
        help_text = "Messages that no table accepts and that became dead letters."
        self._dead_letters = counter(registry, "sink_dead_letters_total", help_text, "stream")
        for stream in (Stream.EVENTS, Stream.ALERTS, Stream.AUDIT):
            # A series that begins at 1 would show no increase.
            self._dead_letters[(stream.value,)].inc(0)
        help_text = "Acknowledged events that were missing in ClickHouse and were stored again."
        self._lost = plain_counter(registry, "sink_lost_events_total", help_text)
        help_text = "Age of the oldest event that is held, or its age when it was stored."
        self._lag = gauge(registry, "sink_lag_seconds", help_text, "stream")
        help_text = "Messages waiting behind the newest batch when it arrived."
        self._waiting = gauge(registry, "sink_waiting_messages", help_text, "stream")
        self._unavailable = gauge(registry, "sink_unavailable", "1 while a required server is unavailable.", "what")

    def begin_batch(self, stream: str, waiting: int) -> None:
        """Sets the number of messages that wait behind a batch of a stream."""
        self._waiting[(stream,)].set(waiting)

    def end_batch(self, stream: str) -> None:
        """Counts a batch that was stored and acknowledged."""
        self._batches[(stream,)].inc()

    def set_lag(self, stream: str, seconds: float) -> None:
        """Sets the age of the oldest event of a batch, or its age when it was stored."""
        # The clocks of two machines may differ: nothing is stored before it happened.
        self._lag[(stream,)].set(max(seconds, 0.0))

    def count_rows(self, table: str, rows: int, seconds: float) -> None:
        """Counts the rows of an insert, and its duration."""
        self._rows[(table,)].inc(rows)
        self._insert_seconds[(table,)].observe(seconds)

    def count_dead_letter(self, stream: str) -> None:
        """Counts a message that became a dead letter, because no table accepts it."""
        self._dead_letters[(stream,)].inc()

    def count_lost_events(self, events: int) -> None:
        """Counts acknowledged events that were missing in ClickHouse."""
        self._lost.inc(events)

    def set_unavailable(self, server: str, *, yes: bool) -> None:
        """Sets whether a server is unavailable, by its name in the log."""
        self._unavailable[(server,)].set(yes)
