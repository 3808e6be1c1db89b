"""Wires the worker: one subscription for each agent, bounded by the agent's concurrency."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial

import structlog

from breakwater.alerts.rules.incidents import IncidentRules
from breakwater.alerts.storage_watch import StorageWatch
from breakwater.alerts.store.incidents import IncidentLog, open_log
from breakwater.config import Config, LiveConfig, cipher_of
from breakwater.jobs.contract.job import Job
from breakwater.jobs.rules.workers import LIVENESS
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.broker import Batches, Broker, Each, ServiceApp, connection_of, make_broker, publisher_of
from breakwater.kernel.nats.core import ClientGetter
from breakwater.kernel.nats.delivery import DELAYED_BATCH, DELAYED_LINGER_S, DelayedQueue, Delivery
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.topology import PARKED_CONSUMER, worker_consumer
from breakwater.kernel.process import background
from breakwater.kernel.process.outage import Outage
from breakwater.kernel.process.pace import at_pace
from breakwater.kernel.process.settings import Settings
from breakwater.kernel.redis.connection import Redis, StateUnavailableError
from breakwater.limits.limit_log import LimitLog
from breakwater.records import channels
from breakwater.services.worker.admission import watches_of
from breakwater.services.worker.config_versions import ConfigVersions, ProviderPool
from breakwater.services.worker.consumers import ConsumerWatch
from breakwater.services.worker.context import WorkerContext, context_for
from breakwater.services.worker.dead_workers import DeadWorkers
from breakwater.services.worker.leases import receive_cancel_requests
from breakwater.services.worker.turns import receive_new_callers


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
    connection = connection_of(broker)
    pool = ProviderPool()
    live = LiveConfig(config)
    limit_log = LimitLog(connection)
    limit_log.feed(live.change_limits)
    worker = context_for(
        config,
        live.limits,
        redis=Redis(settings.redis_url.get_secret_value()),
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
        limit_log=limit_log,
    )
    app = ServiceApp(broker)
    config_versions = ConfigVersions(worker, pool, live)
    worker.turns.concurrency = config_versions.concurrency
    subscribers = Subscribers(app, broker, worker, config_versions)
    work = BackgroundWork(worker, connection, config_versions, subscribers)

    async def reload(changed: Config) -> None:
        await config_versions.reload(changed)
        await pool.reread_keys()
        await subscribers.add_missing()
        await work.watch()

    app.reload = reload
    app.follow(limit_log)
    app.before_reading(work.join)
    app.after_startup(work.start)

    @app.on_shutdown
    async def drain() -> None:
        await worker.turns.close()
        await app.end_subscribers(drain_s=config_versions.newest.worker.config.limits.drain_s)

    @app.after_shutdown
    async def close() -> None:
        await work.stop()
        await pool.close_except(())
        await worker.redis.close()

    return app


JOIN_S = 2.0
"""The most time that joining the other workers may take from the start of a worker."""


class Subscribers:
    """The subscribers of one worker: one for the jobs of each agent, and one for all parked jobs."""

    def __init__(self, app: ServiceApp, broker: Broker, worker: WorkerContext, config_versions: ConfigVersions) -> None:
        self._app = app
        self._broker = broker
        self._config_versions = config_versions
        self._agents: set[str] = set()

        @broker.subscriber(channels.PARKED, durable=PARKED_CONSUMER, pull_sub=Batches(DELAYED_BATCH, DELAYED_LINGER_S))
        async def wake(jobs: list[Delivery[Job]]) -> None:
            await DelayedQueue(worker.publisher, config_versions.agents, worker.turns.add).handle_all(jobs)

        self._declare_missing()

    async def add_missing(self) -> None:
        """Adds those of the agents that a changed config has added."""
        self._declare_missing()
        await self._app.start_subscribers()

    def _declare_missing(self) -> None:
        for agent in self._config_versions.agents:
            if agent not in self._agents:
                self._agents.add(agent)
                self._declare(agent)

    def _declare(self, agent: str) -> None:
        concurrency = partial(self._config_versions.concurrency, agent)

        @self._broker.subscriber(
            channels.JOBS, durable=worker_consumer(agent), filters=subjects.jobs_of(agent), pull_sub=Each(concurrency)
        )
        async def run(job: Delivery[Job]) -> None:
            await self._config_versions.handle(agent, job)


class BackgroundWork:
    """The background work of a worker, from its start to its end."""

    def __init__(
        self,
        worker: WorkerContext,
        connection: ClientGetter,
        config_versions: ConfigVersions,
        subscribers: Subscribers,
    ) -> None:
        self._connection = connection
        self._publisher = worker.publisher
        self._outages = worker.outages
        self._config_versions = config_versions
        self._subscribers = subscribers
        self._dead_workers = DeadWorkers(worker, connection, lambda: config_versions.agents)
        self._lasting = (
            worker.leases.run,
            partial(receive_cancel_requests, connection, worker.leases.cancel),
            self._dead_workers.run,
            worker.turns.run,
            partial(receive_new_callers, connection, worker.slots),
            partial(worker.bodies.remove_leftovers, worker.now),
            ConsumerWatch(connection, worker.publisher, config_versions).run,
            StorageWatch("redis", lambda: self._dead_workers.heartbeat, self._open_incidents, worker.now).run,
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._watches: list[asyncio.Task[None]] = []

    async def join(self) -> None:
        """Makes the worker known to the others, and looks for the jobs that they hold, before it has any itself.

        If that takes too long, its first jobs wait for the look without a claim: if the worker dies meanwhile, the next
        one takes them for lost calls.
        """

        async def join_in_time() -> None:
            async with asyncio.timeout(JOIN_S):
                await self._outages.retry_while_unavailable(self._join)

        await Outage("joining the other workers").run_logged(join_in_time, expected=TimeoutError)

    async def _join(self) -> None:
        # Otherwise, Redis might not know yet which limits are in force, and the first calls would be asked for twice.
        worker = self._config_versions.newest.worker
        await worker.read_limits(worker.limits().version, "")
        if (kept_since_ms := await self._dead_workers.join()) is not None:
            await self._config_versions.look_for_held_jobs(kept_since_ms)

    async def start(self) -> None:
        """Starts all of it."""
        self._tasks.append(asyncio.create_task(self._restore()))
        self._tasks.extend(asyncio.create_task(background.keep_doing(work)) for work in self._lasting)
        await self.watch()

    async def watch(self) -> None:
        """Restarts the background work of the gates under the current config."""
        ended = self._watches
        self._watches = list(map(asyncio.create_task, watches_of(self._config_versions.newest.worker)))
        await background.stop(*ended)

    async def stop(self) -> None:
        """Stops all of it. Then other workers need not wait for this one's heartbeat."""
        await background.stop(*self._tasks, *self._watches)
        with suppress(StateUnavailableError):
            await self._dead_workers.leave()

    def _open_incidents(self) -> tuple[IncidentLog, IncidentRules]:
        config = self._config_versions.newest.worker.config
        return open_log(self._connection, self._publisher, config.alerts, config.redaction)

    async def _restore(self) -> None:
        """Serves agents again that were removed from the config before this worker started."""
        await self._config_versions.restore()
        await self._subscribers.add_missing()
        await self._config_versions.save()
