"""Wires the budget service: attempts in, spend and threshold events out."""

from __future__ import annotations

import asyncio

from faststream import FastStream

from breakwater import background
from breakwater.bus.broker import connection_of, make_app, make_broker, on_batch
from breakwater.bus.lookup import Lookup
from breakwater.bus.publisher import Publisher
from breakwater.config import Config
from breakwater.contracts.subjects import Stream
from breakwater.settings import Settings
from breakwater.state.budgets import Budgets
from breakwater.state.connection import Redis
from services.budget.handlers import BudgetHandler

LINGER_S = 0.05


def build(settings: Settings, config: Config) -> FastStream:
    """The budget service."""
    broker = make_broker(settings.nats_url.get_secret_value(), "budget")
    redis = Redis(settings.redis_url.get_secret_value())
    connection = connection_of(broker)
    handler = BudgetHandler(
        config, Budgets(redis, config.budgets.zone), Publisher(connection, "budget"), Lookup(connection)
    )
    on_batch(broker, Stream.EVENTS, "bw.attempts.>", "budget", handler.handle, size=500, linger_s=LINGER_S)
    app = make_app(broker)
    sweeping: list[asyncio.Task[None]] = []

    @app.after_startup
    async def start() -> None:
        sweeping.append(asyncio.create_task(handler.sweep()))

    @app.on_shutdown
    async def stop() -> None:
        await background.stop(*sweeping)

    app.after_shutdown(redis.close)
    return app
