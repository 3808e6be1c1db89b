"""Wires the breaker service: attempts in, transitions out."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from faststream import FastStream

from breakwater.bus.broker import connection_of, make_app, make_broker, on_batch
from breakwater.bus.delivery import Delivery
from breakwater.bus.publisher import Publisher
from breakwater.config import Config
from breakwater.contracts.subjects import Stream
from breakwater.settings import Settings
from breakwater.state.breakers import Breakers
from breakwater.state.connection import Redis
from breakwater.state.health import Healths
from breakwater.state.tasks import Tasks
from services.breaker.handlers import BreakerHandler
from services.breaker.rebuild import Attendance

LINGER_S = 0.05
"""How long attempts are gathered; what a breaker may be late by."""


def build(settings: Settings, config: Config) -> FastStream:
    """The breaker service."""
    broker = make_broker(settings.nats_url.get_secret_value(), "breaker")
    redis = Redis(settings.redis_url.get_secret_value())
    connection = connection_of(broker)
    breakers, healths = Breakers(redis), Healths(redis)
    handler = BreakerHandler(config, breakers, healths, Publisher(connection, "breaker"))
    attendance = Attendance(config, handler, breakers, healths, Tasks(redis), connection)

    async def handle(batch: list[Delivery]) -> None:
        await handler.handle(batch, once=attendance.filled)

    on_batch(broker, Stream.EVENTS, "bw.attempts.>", "breaker", handle, size=500, linger_s=LINGER_S)
    app = make_app(broker)
    attending: list[asyncio.Task[None]] = []

    @app.after_startup
    async def start() -> None:
        attending.append(asyncio.create_task(attendance.run()))

    @app.on_shutdown
    async def stop() -> None:
        for task in attending:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    app.after_shutdown(redis.close)
    return app
