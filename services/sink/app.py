"""The sink: EVENTS, ALERTS and AUDIT into ClickHouse, in batches."""

from __future__ import annotations

from datetime import UTC, datetime

from breakwater.alerts.contract import Alert
from breakwater.alerts.rules.incidents import IncidentRules
from breakwater.alerts.storage_watch import StorageWatch
from breakwater.alerts.store.incidents import IncidentLog, open_log
from breakwater.breakers.contract import BreakerTransition
from breakwater.config import Config
from breakwater.identity.contract import AuditEvent
from breakwater.jobs.contract.execution import Attempt, Execution
from breakwater.jobs.contract.plans import PlanChange
from breakwater.kernel.clickhouse.client import connect
from breakwater.kernel.nats.broker import Batches, ServiceApp, connection_of, make_broker, publisher_of
from breakwater.kernel.nats.delivery import Delivery
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.process.settings import Settings
from breakwater.limits.contract import BudgetEvent, GuardEvent, LimitEvent
from breakwater.records.channels import (
    ALERTS,
    ATTEMPTS,
    AUDIT,
    BREAKERS,
    BUDGETS,
    DEAD_LETTERS,
    EXECUTIONS,
    GUARDS,
    LIMIT_EVENTS,
    PLANS,
    SHADOW_BREAKERS,
    SHADOW_BUDGETS,
)
from breakwater.records.metrics import SinkMetrics
from breakwater.services.sink.closing import SpendCloser
from breakwater.services.sink.comparison import LogComparer
from breakwater.services.sink.expiry import TextExpiry
from breakwater.services.sink.handlers import Sink

BATCH_SIZE = 2000
LINGER_S = {0.0: 0.5, 6.0: 1.5, 20.0: 3.0}
"""The time for which messages are gathered, by how many come in a second. An insert takes ClickHouse 20 ms of CPU,
however few its rows are: single rows are stored soon, and those of constant load together."""


def now() -> datetime:
    """Returns the time of this machine."""
    return datetime.now(UTC)


def build(settings: Settings, config: Config) -> ServiceApp:
    """Wires the service. Connects to nothing yet."""
    broker = make_broker(settings.nats_url.get_secret_value(), "sink")
    analytics = connect(settings.clickhouse_url)
    connection = connection_of(broker)
    publisher = publisher_of(broker, DEAD_LETTERS, ALERTS)
    metrics = SinkMetrics()
    sink = Sink(analytics, publisher, now, metrics)
    comparer = LogComparer(analytics, connection, now, metrics)

    def open_incidents() -> tuple[IncidentLog, IncidentRules]:
        return open_log(connection, publisher, applied.alerts, applied.redaction)

    async def reload(changed: Config) -> None:
        nonlocal applied
        applied = changed

    applied = config
    app = ServiceApp(broker)
    app.reload = reload
    # Before the application waits for the last batches: it ends their waiting for ClickHouse.
    app.on_shutdown(sink.stop)
    app.run_alongside(comparer.run)
    app.run_alongside(SpendCloser(analytics, Lookup(connection), config.budgets.zone, now).run)
    app.run_alongside(TextExpiry(analytics, lambda: applied.clickhouse, now, metrics).run)
    app.run_alongside(StorageWatch("clickhouse", lambda: sink.clickhouse_outage, open_incidents, now).run)
    app.before_reading(comparer.begin)

    @broker.subscriber(
        *(ATTEMPTS, EXECUTIONS, BREAKERS, SHADOW_BREAKERS, BUDGETS, SHADOW_BUDGETS, GUARDS, PLANS, LIMIT_EVENTS),
        durable="sink-events",
        filters=["bw.>"],
        pull_sub=Batches(BATCH_SIZE, LINGER_S),
    )
    async def events(
        batch: list[
            Delivery[Attempt | Execution | BreakerTransition | BudgetEvent | GuardEvent | PlanChange | LimitEvent]
        ],
    ) -> None:
        await sink.store(batch)

    @broker.subscriber(ALERTS, durable="sink-alerts", pull_sub=Batches(BATCH_SIZE, LINGER_S))
    async def alerts(batch: list[Delivery[Alert]]) -> None:
        await sink.store(batch)

    @broker.subscriber(AUDIT, durable="sink-audit", pull_sub=Batches(BATCH_SIZE, LINGER_S))
    async def actions(batch: list[Delivery[AuditEvent]]) -> None:
        await sink.store(batch)

    app.after_shutdown(analytics.close)
    return app
