"""Wires the breaker service: attempts in, transitions out."""

from __future__ import annotations

import asyncio

from breakwater import background
from breakwater.bus.broker import ServiceApp, connection_of, make_broker, on_batch
from breakwater.bus.delivery import Delivery
from breakwater.bus.lookup import Lookup
from breakwater.bus.publisher import Publisher
from breakwater.bus.pull import BUSY
from breakwater.config import Config
from breakwater.contracts.subjects import Stream
from breakwater.metrics import BreakerMetrics, GaugeCollector
from breakwater.settings import Settings
from breakwater.state.breakers import Breakers
from breakwater.state.connection import Redis
from breakwater.state.health import Healths
from breakwater.state.tasks import Tasks
from services.breaker.gauges import BreakerGauges
from services.breaker.handlers import BreakerHandler
from services.breaker.rebuild import Heartbeat, Rebuild

LINGER_S = 0.1
BUSY_LINGER_S = 0.25
"""How long attempts are gathered, and where they come all the time; what a breaker may be late by."""


def linger_s(last: int) -> float:
    """How long attempts are gathered, by how many the last batch had."""
    return BUSY_LINGER_S if last >= BUSY else LINGER_S


def build(settings: Settings, config: Config) -> ServiceApp:
    """The breaker service."""
    broker = make_broker(settings.nats_url.get_secret_value(), "breaker")
    redis = Redis(settings.redis_url.get_secret_value())
    connection = connection_of(broker)
    breakers, healths = Breakers(redis), Healths(redis)
    handler = BreakerHandler(config, breakers, healths, Publisher(connection, "breaker"), BreakerMetrics())
    shown = GaugeCollector("breaker", BreakerGauges(lambda: handler.config, breakers).read)
    rebuild = Rebuild(config, handler, breakers, healths, Tasks(redis), connection)
    heartbeat = Heartbeat(handler, breakers, rebuild, Lookup(connection))

    async def handle(batch: list[Delivery]) -> None:
        await handler.handle(batch, heartbeat.is_log)

    app = ServiceApp(broker)
    on_batch(app, broker, Stream.EVENTS, "breaker", handle, size=500, linger_s=linger_s)
    running: list[asyncio.Task[None]] = []

    @app.after_startup
    async def start() -> None:
        running.append(asyncio.create_task(heartbeat.run()))
        shown.start()

    @app.on_shutdown
    async def stop() -> None:
        shown.stop()
        await background.stop(*running)

    async def reload(changed: Config) -> None:
        handler.config = rebuild.config = changed

    app.reload = reload
    app.after_shutdown(redis.close)
    return app
