"""Wires the breaker service: attempts in, transitions out."""

from __future__ import annotations

from faststream import FastStream

from breakwater.bus.broker import connection_of, make_app, make_broker, on_batch
from breakwater.bus.publisher import Publisher
from breakwater.config import Config
from breakwater.contracts.subjects import Stream
from breakwater.settings import Settings
from breakwater.state.breakers import Breakers
from breakwater.state.connection import Redis
from services.breaker.handlers import BreakerHandler

LINGER_S = 0.05
"""How long attempts are gathered; what a breaker may be late by."""


def build(settings: Settings, config: Config) -> FastStream:
    """The breaker service."""
    broker = make_broker(settings.nats_url.get_secret_value(), "breaker")
    redis = Redis(settings.redis_url.get_secret_value())
    handler = BreakerHandler(config, Breakers(redis), Publisher(connection_of(broker), "breaker"))
    on_batch(broker, Stream.EVENTS, "bw.attempts.>", "breaker", handler.handle, size=500, linger_s=LINGER_S)
    app = make_app(broker)
    app.after_shutdown(redis.close)
    return app
