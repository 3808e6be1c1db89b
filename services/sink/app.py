"""The sink: EVENTS, ALERTS and AUDIT into ClickHouse, in batches."""

from __future__ import annotations

from datetime import UTC, datetime

from breakwater.analytics.client import connect
from breakwater.bus.broker import ServiceApp, connection_of, make_broker, on_batch
from breakwater.bus.publisher import Publisher
from breakwater.config import Config
from breakwater.contracts.subjects import Stream
from breakwater.runtime.settings import Settings
from breakwater.telemetry.metrics import SinkMetrics
from services.sink.comparison import LogComparer
from services.sink.handlers import Sink

BATCH_SIZE = 2000
BUSY = 20
"""Messages of a batch after which more are gathered for the next."""
LINGER_S, BUSY_LINGER_S = 0.5, 1.5
"""ClickHouse prefers few large inserts: at most two a second for each table, and fewer under load."""


def build(settings: Settings, config: Config) -> ServiceApp:  # noqa: ARG001  every service is built alike
    """Wires the service. Connects to nothing yet."""
    broker = make_broker(settings.nats_url.get_secret_value(), "sink")
    analytics = connect(settings.clickhouse_url)
    connection, metrics = connection_of(broker), SinkMetrics()
    sink = Sink(analytics, Publisher(connection, "sink"), lambda: datetime.now(UTC), metrics)
    comparer = LogComparer(analytics, connection, lambda: datetime.now(UTC), metrics)
    app = ServiceApp(broker)
    app.after_startup(comparer.begin)
    app.run_alongside(comparer.run)
    # Before the application waits for the last batches: it ends their waiting for ClickHouse.
    app.on_shutdown(sink.stop)

    def linger_s(last: int) -> float:
        return BUSY_LINGER_S if last >= BUSY else LINGER_S

    for stream in (Stream.EVENTS, Stream.ALERTS, Stream.AUDIT):
        on_batch(app, broker, stream, f"sink-{stream.lower()}", sink.store, size=BATCH_SIZE, linger_s=linger_s)
    app.after_shutdown(analytics.close)
    return app
