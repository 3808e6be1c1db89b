"""Wires the budget service: attempts in, spend and threshold events out."""

from __future__ import annotations

import asyncio

from faststream import FastStream

from breakwater import background
from breakwater.analytics.client import connect
from breakwater.books import Record
from breakwater.bus.broker import connection_of, make_app, make_broker, on_batch
from breakwater.bus.lookup import Lookup
from breakwater.bus.publisher import Publisher
from breakwater.config import Config, LiveCaps
from breakwater.contracts.subjects import Stream
from breakwater.metrics import BudgetMetrics
from breakwater.settings import Settings
from breakwater.state.budget_books import BudgetBooks
from breakwater.state.budgets import Budgets
from breakwater.state.connection import Redis
from services.budget.bookkeeper import Bookkeeper
from services.budget.handlers import BudgetHandler

LINGER_S = 0.05


def build(settings: Settings, config: Config) -> FastStream:
    """The budget service."""
    broker = make_broker(settings.nats_url.get_secret_value(), "budget")
    redis, analytics = Redis(settings.redis_url.get_secret_value()), connect(settings.clickhouse_url)
    connection, zone = connection_of(broker), config.budgets.zone
    caps, counters = LiveCaps(config, settings.config), BudgetBooks(redis, zone)
    publisher, lookup = Publisher(connection, "budget"), Lookup(connection)
    record = Record(connection, analytics, zone)
    every_s = config.budgets.compare_every_s
    bookkeeper = Bookkeeper(caps, counters, record, publisher, lookup, BudgetMetrics(), compare_every_s=every_s)
    handler = BudgetHandler(caps, Budgets(redis, zone), counters, publisher, lookup, bookkeeper.filled)
    on_batch(broker, Stream.EVENTS, "bw.attempts.>", "budget", handler.handle, size=500, linger_s=LINGER_S)
    app = make_app(broker)
    beside: list[asyncio.Task[None]] = []

    @app.after_startup
    async def start() -> None:
        beside.append(asyncio.create_task(caps.run()))
        beside.append(asyncio.create_task(bookkeeper.run(handler.charge_lapsed)))

    @app.on_shutdown
    async def stop() -> None:
        await background.stop(*beside)

    app.after_shutdown(redis.close)
    app.after_shutdown(analytics.close)
    return app
