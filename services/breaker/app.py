"""Wires the breaker service: attempts in, transitions out."""

from __future__ import annotations

from breakwater.breakers.metrics import BreakerMetrics
from breakwater.breakers.store import Breakers, shadows_in
from breakwater.config import Config
from breakwater.health.store import Healths
from breakwater.jobs.contract.execution import Attempt
from breakwater.kernel.nats.broker import Batches, ServiceApp, connection_of, make_broker, publisher_of
from breakwater.kernel.nats.delivery import Delivery
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.process.settings import Settings
from breakwater.kernel.redis.connection import Redis
from breakwater.kernel.telemetry.metrics import GaugeCollector
from breakwater.limits.store.tasks import Tasks
from breakwater.records.channels import ATTEMPTS, BREAKERS, JOBS, SHADOW_BREAKERS
from breakwater.services.breaker.handlers import BreakerHandler
from breakwater.services.breaker.rebuild import Heartbeat, Rebuild

LINGER_S = {0.0: 0.1, 8.0: 0.25}
"""The time for which attempts are gathered, the delay of a breaker, by how many come in a second: a batch takes as much
CPU as ten attempts, however few are in it."""


def build(settings: Settings, config: Config) -> ServiceApp:
    """The breaker service."""
    broker = make_broker(settings.nats_url.get_secret_value(), "breaker")
    redis = Redis(settings.redis_url.get_secret_value())
    connection = connection_of(broker)
    breakers = Breakers(redis)
    healths = Healths(redis)
    publisher = publisher_of(broker, BREAKERS, SHADOW_BREAKERS, JOBS)
    handler = BreakerHandler(config, breakers, shadows_in(redis), healths, publisher, BreakerMetrics())
    rebuild = Rebuild(config, handler, breakers, healths, Tasks(redis), connection)
    heartbeat = Heartbeat(handler, breakers, rebuild, Lookup(connection))

    @broker.subscriber(ATTEMPTS, durable="breaker", pull_sub=Batches(500, LINGER_S))
    async def observe(batch: list[Delivery[Attempt]]) -> None:
        await handler.handle(batch, heartbeat.is_log)

    async def reload(changed: Config) -> None:
        handler.config = rebuild.config = changed

    app = ServiceApp(broker)
    app.reload = reload
    app.run_alongside(heartbeat.run, GaugeCollector("breaker", handler.gauges))
    app.after_shutdown(redis.close)
    return app
