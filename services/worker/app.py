"""Wires the worker: one subscription for each agent, bounded by the agent's concurrency."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial

import structlog

from breakwater.config import Config, LiveConfig, cipher_of
from breakwater.jobs.contract.job import Job
from breakwater.jobs.rules.workers import LIVENESS
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.broker import Batches, Each, ServiceApp, connection_of, make_broker, publisher_of
from breakwater.kernel.nats.delivery import DELAYED_BATCH, DELAYED_LINGER_S, DelayedQueue, Delivery
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.topology import PARKED_CONSUMER, worker_consumer
from breakwater.kernel.process import background
from breakwater.kernel.process.pace import at_pace
from breakwater.kernel.process.settings import Settings
from breakwater.kernel.redis.connection import Redis, StateUnavailableError
from breakwater.records import channels
from services.worker.admission import watches_of
from services.worker.config_versions import ConfigVersions, ProviderPool
from services.worker.consumers import ConsumerWatch
from services.worker.context import context_for
from services.worker.dead_workers import DeadWorkers
from services.worker.leases import receive_cancel_requests


def build(settings: Settings, config: Config) -> ServiceApp:
    """Builds the worker, with a subscriber for each agent. Raises ConfigError if a provider's key is missing."""
    broker = make_broker(settings.nats_url.get_secret_value(), "worker", graceful_timeout_s=config.limits.drain_s)
    cipher = cipher_of(config, settings.plane_key)
    if not cipher.key_ids and config.private_agents:
        structlog.get_logger().warning(
            "no_plane_key",
            agents=config.private_agents,
            effect="their results and dead letters are stored without texts",
            remedy="set BREAKWATER_PLANE_KEY",
        )
    redis = Redis(settings.redis_url.get_secret_value())
    connection = connection_of(broker)
    pool = ProviderPool()
    live = LiveConfig(config)
    worker = context_for(
        config,
        live.caps,
        redis=redis,
        publisher=publisher_of(
            broker,
            *(channels.ATTEMPTS, channels.EXECUTIONS, channels.RESULTS, channels.PROGRESS, channels.CHUNKS),
            *(channels.BREAKERS, channels.GUARDS, channels.PLANS, channels.DEAD_LETTERS, channels.ALERTS),
            *(channels.JOBS, channels.PARKED),
            cipher=cipher,
        ),
        lookup=Lookup(connection, cipher),
        providers=pool.open(config),
        cipher=cipher,
        liveness=at_pace(LIVENESS, settings.pace),
    )
    config_versions = ConfigVersions(worker, pool, live)
    dead_workers = DeadWorkers(worker, connection, lambda: config_versions.agents)
    declared: set[str] = set()
    watches: list[asyncio.Task[None]] = []
    app = ServiceApp(broker)

    def serve(agent: str) -> None:
        """Declares the subscriber of an agent's jobs."""
        concurrency = partial(config_versions.concurrency, agent)

        @broker.subscriber(
            channels.JOBS, durable=worker_consumer(agent), filters=subjects.jobs_of(agent), pull_sub=Each(concurrency)
        )
        async def run(job: Delivery[Job]) -> None:
            await config_versions.handle(agent, job)

    def serve_new() -> None:
        for agent in config_versions.agents:
            if agent not in declared:
                declared.add(agent)
                serve(agent)

    @broker.subscriber(channels.PARKED, durable=PARKED_CONSUMER, pull_sub=Batches(DELAYED_BATCH, DELAYED_LINGER_S))
    async def wake(jobs: list[Delivery[Job]]) -> None:
        await DelayedQueue(worker.publisher, config_versions.agents).handle_all(jobs)

    serve_new()

    async def restore() -> None:
        await config_versions.restore()
        serve_new()
        await app.start_subscribers()
        await config_versions.save()

    async def watch() -> None:
        """Restarts the background work of the gates under the current config."""
        ended = list(watches)
        watches[:] = map(asyncio.create_task, watches_of(config_versions.newest.worker))
        await background.stop(*ended)

    async def reload(changed: Config) -> None:
        await config_versions.reload(changed)
        serve_new()
        await app.start_subscribers()
        await watch()

    app.reload = reload
    background_tasks: list[asyncio.Task[None]] = []

    @app.after_startup
    async def start() -> None:
        lasting = (
            worker.leases.run,
            partial(receive_cancel_requests, connection, worker.leases.cancel),
            dead_workers.run,
            ConsumerWatch(connection, worker.publisher, config_versions).run,
        )
        background_tasks.append(asyncio.create_task(restore()))
        background_tasks.extend(asyncio.create_task(background.keep_doing(work)) for work in lasting)
        await watch()

    @app.on_shutdown
    async def drain() -> None:
        await app.end_subscribers(drain_s=config_versions.newest.worker.config.limits.drain_s)

    @app.after_shutdown
    async def close() -> None:
        await background.stop(*background_tasks, *watches)
        with suppress(StateUnavailableError):
            await dead_workers.leave()
        await pool.close_except(())
        await redis.close()

    return app
