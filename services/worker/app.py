"""Wires the worker: one subscription for each agent, bounded by the agent's concurrency."""

from __future__ import annotations

import asyncio

from breakwater import background
from breakwater.bus.broker import ServiceApp, connection_of, make_broker, on_batch, on_each
from breakwater.bus.delivery import WAKER_BATCH, WAKER_LINGER_S, Waker
from breakwater.bus.lookup import Lookup
from breakwater.bus.publisher import Publisher
from breakwater.bus.topology import PARKED_CONSUMER, worker_consumer
from breakwater.config import Config, LiveCaps
from breakwater.contracts import subjects
from breakwater.contracts.subjects import Stream
from breakwater.settings import Settings
from breakwater.state.connection import Redis
from services.worker.context import context_for
from services.worker.gates import GATES
from services.worker.handler import JobHandler


def build(settings: Settings, config: Config) -> ServiceApp:
    """A worker for every agent of the config. Raises ConfigError where a provider's key is missing."""
    broker = make_broker(settings.nats_url.get_secret_value(), "worker", graceful_timeout_s=config.limits.drain_s)
    redis = Redis(settings.redis_url.get_secret_value())
    connection = connection_of(broker)
    caps = LiveCaps(config, settings.edited_config)
    providers = {name: settings.open() for name, settings in config.providers.items()}
    worker = context_for(
        config,
        caps,
        redis=redis,
        publisher=Publisher(connection, "worker"),
        lookup=Lookup(connection),
        providers=providers,
    )
    for name, agent in config.agents.items():
        handler = JobHandler(worker, name, agent)
        on_each(
            broker,
            Stream.JOBS,
            subjects.job(name),
            worker_consumer(name),
            handler.handle,
            concurrency=agent.concurrency,
        )
    waker = Waker(worker.publisher, config.agents)
    app = ServiceApp(broker)
    on_batch(app, broker, Stream.PARKED, PARKED_CONSUMER, waker.handle_all, size=WAKER_BATCH, linger_s=WAKER_LINGER_S)
    watching: list[asyncio.Task[None]] = []

    @app.after_startup
    async def watch() -> None:
        watching.append(asyncio.create_task(caps.run()))
        watching.append(asyncio.create_task(worker.leases.run()))
        watching.extend(asyncio.create_task(run) for gate in GATES if (run := gate.watch(worker)) is not None)

    @app.after_shutdown
    async def close() -> None:
        await background.stop(*watching)
        for provider in providers.values():
            await provider.close()
        await redis.close()

    return app
