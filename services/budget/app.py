"""Wires the budget service: attempts in, spend and threshold events out."""

from __future__ import annotations

from breakwater.config import Config, LiveConfig
from breakwater.jobs.contract.execution import Attempt
from breakwater.jobs.store.workers import Workers
from breakwater.kernel.clickhouse.client import connect
from breakwater.kernel.nats.broker import Batches, ServiceApp, connection_of, make_broker, publisher_of
from breakwater.kernel.nats.delivery import Delivery
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.process.background import run_together
from breakwater.kernel.process.settings import Settings
from breakwater.kernel.redis.connection import Redis
from breakwater.kernel.telemetry.metrics import GaugeCollector
from breakwater.limits.limit_log import LimitLog
from breakwater.limits.metrics import BudgetMetrics
from breakwater.limits.store.budget_counters import BudgetCounters
from breakwater.limits.store.budgets import Budgets
from breakwater.records.channels import ATTEMPTS, BUDGETS, SHADOW_BUDGETS
from breakwater.records.reconciliation import RecordedSpend
from breakwater.replay.store import shadow_limits_in
from breakwater.services.budget.gauges import BudgetGauges
from breakwater.services.budget.handlers import BudgetHandler
from breakwater.services.budget.reconciler import Reconciler
from breakwater.services.budget.shadows import LimitShadows

LINGER_S = {0.0: 0.05, 4.0: 0.5}
"""The time for which attempts are gathered, the delay of spend and thresholds, by how many come in a second.

Hard limits hold in spite of it: the estimate of a call stays reserved.
"""


def build(settings: Settings, config: Config) -> ServiceApp:
    """The budget service."""
    broker = make_broker(settings.nats_url.get_secret_value(), "budget")
    redis = Redis(settings.redis_url.get_secret_value())
    analytics = connect(settings.clickhouse_url)
    connection = connection_of(broker)
    zone = config.budgets.zone
    live = LiveConfig(config)
    limit_log = LimitLog(connection)
    limit_log.feed(live.change_limits)
    counters = BudgetCounters(redis, zone)
    publisher = publisher_of(broker, BUDGETS, SHADOW_BUDGETS)
    lookup = Lookup(connection)
    record = RecordedSpend(connection, analytics, zone)
    metrics = BudgetMetrics()
    reconciler = Reconciler(
        live.limits,
        counters,
        record,
        publisher,
        lookup,
        metrics,
        compare_every_s=lambda: live.now.budgets.compare_every_s,
        have_returned=Workers(redis).have_returned,
    )
    shadows = LimitShadows(lambda: live.now.shadow_limits, shadow_limits_in(redis), publisher, zone)
    handler = BudgetHandler(
        live.limits,
        Budgets(redis, zone),
        counters,
        publisher,
        lookup,
        reconciler.await_source,
        metrics,
        shadows,
    )
    gauges = BudgetGauges(live.limits, counters, analytics)

    @broker.subscriber(ATTEMPTS, durable="budget", pull_sub=Batches(500, LINGER_S))
    async def settle(batch: list[Delivery[Attempt]]) -> None:
        await handler.handle(batch)

    async def reload(changed: Config) -> None:
        live.reload(changed)

    app = ServiceApp(broker)
    app.reload = reload
    app.follow(limit_log)
    app.run_alongside(
        lambda: run_together(reconciler.run(handler.charge_lapsed, handler.settle_ended), shadows.run()),
        GaugeCollector("budget", gauges.read),
    )
    app.on_shutdown(gauges.stop)
    app.after_shutdown(redis.close)
    app.after_shutdown(analytics.close)
    return app
