"""The configs of a worker: the newest, and earlier ones for the jobs that started with them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import structlog

from breakwater.calls.assignment import Checkpoint
from breakwater.calls.providers.base import Provider
from breakwater.config import Config, LiveConfig, parse_config
from breakwater.config.store import Configs
from breakwater.jobs.queued_message import ids_of_unread
from breakwater.kernel.errors import ConfigError
from breakwater.kernel.nats.delivery import Delivery
from breakwater.services.worker.context import WorkerContext
from breakwater.services.worker.handler import JobHandler

RETAINED = 3
"""The number of superseded configs that stay compiled for parked jobs; more only while jobs run under them."""


class ProviderPool:
    """The open providers. Those that a new config leaves unchanged keep their connections and their state."""

    def __init__(self) -> None:
        self._opened: dict[tuple[str, str], Provider] = {}

    def open(self, config: Config) -> dict[str, Provider]:
        """Opens the providers of a config, by name, and once more for each key of a deployment.

        Raises:
            ConfigError: one can't be used.
        """
        redaction = config.redaction
        rules = redaction.model_dump_json()
        connections = config.connections
        keys = {name: (name, settings.model_dump_json() + rules) for name, settings in connections.items()}
        fresh = {key: connections[name].open(redaction) for name, key in keys.items() if key not in self._opened}
        self._opened |= fresh
        return {name: self._opened[key] for name, key in keys.items()}

    async def reread_keys(self) -> None:
        """Reads the sources of the providers' keys again. A key that can't be read stays as it is."""
        await asyncio.gather(*(provider.refresh_credential(None) for provider in self._opened.values()))

    async def close_except(self, used: Iterable[Provider]) -> None:
        """Closes all providers except these."""
        used_ids = {id(provider) for provider in used}
        unused = {key: provider for key, provider in self._opened.items() if id(provider) not in used_ids}
        for key, provider in unused.items():
            del self._opened[key]
            await provider.close()


@dataclass(eq=False, slots=True)
class ConfigVersion:
    """One version of the config, compiled for this worker."""

    worker: WorkerContext
    handlers: Mapping[str, JobHandler]
    running: int = 0
    """The number of jobs that run under this version."""

    @classmethod
    def of(cls, worker: WorkerContext) -> ConfigVersion:
        """Creates the handlers of all agents."""
        return cls(worker, {name: JobHandler(worker, name, agent) for name, agent in worker.config.agents.items()})


class ConfigVersions:
    """Chooses the config for each delivery: a job keeps the config that it started with.

    An agent that was removed is still served under the last config that had it, as some of its jobs may be queued.
    """

    def __init__(self, worker: WorkerContext, pool: ProviderPool, live: LiveConfig) -> None:
        """Starts with the config of a context, whose providers are the pool's. Updates `live` on each reload."""
        self.newest = ConfigVersion.of(worker)
        self._pool = pool
        self._configs = Configs(worker.redis)
        self._compiled = {worker.config_version: self.newest}
        """Compiled configs by version, the oldest first."""
        self._serving = dict.fromkeys(self.newest.handlers, self.newest)
        """The newest config of each agent."""
        self._live = live

    @property
    def agents(self) -> Collection[str]:
        """The names of all agents that are served."""
        return self._serving

    def concurrency(self, agent: str) -> int:
        """Returns the concurrency of an agent."""
        return self._serving[agent].worker.config.agents[agent].concurrency

    async def handle(self, agent: str, delivery: Delivery) -> None:
        """Handles one delivery of an agent's job."""
        version = self._serving[agent]
        if not delivery.is_unstarted:
            deliveries = self.newest.worker.leases.deliveries
            deliveries.add(delivery)
            try:
                version = await self._began_under(agent, delivery) or self._serving[agent]
            except asyncio.CancelledError:
                await delivery.retry_in(0)
                raise
            finally:
                deliveries.discard(delivery)
        version.running += 1
        try:
            await version.handlers[agent].handle(delivery)
        finally:
            version.running -= 1
            if version is not self.newest:
                await self._evict()

    async def reload(self, config: Config) -> None:
        """Uses another config for jobs that start from now on. Raises ConfigError without changing anything."""
        self._add(config)
        self.newest = self._compiled[config.version]
        removed = {name: version for name, version in self._serving.items() if name not in self.newest.handlers}
        self._serving = removed | dict.fromkeys(self.newest.handlers, self.newest)
        self._live.reload(config)
        self.newest.worker.bodies.budget.resize(config.limits.bodies_in_memory_bytes)
        await self.save()
        await self._evict()

    async def look_for_held_jobs(self, kept_since_ms: int) -> None:
        """Notes which jobs other workers held as Redis' data began. Raises BusUnavailableError.

        Args:
            kept_since_ms: that beginning (ms since the epoch).
        """
        handlers = self.newest.handlers.values()
        await asyncio.gather(*(handler.earlier_messages.look(kept_since_ms) for handler in handlers))

    async def save(self) -> None:
        """Saves the configs and the removed agents for workers that start later."""
        outages = self.newest.worker.outages
        configs = {version: compiled.worker.config.text for version, compiled in self._compiled.items()}
        agents = tuple(self.newest.handlers)
        retired = {
            name: compiled.worker.config_version for name, compiled in self._serving.items() if name not in agents
        }
        await outages.retry_while_unavailable(partial(self._configs.save, configs, agents=agents, retired=retired))

    async def restore(self) -> None:
        """Serves agents again that were removed from the config before this worker started."""
        for name, version in (
            await self.newest.worker.outages.retry_while_unavailable(self._configs.removed_agents)
        ).items():
            if name not in self._serving and (compiled := await self._load(version, name)) is not None:
                self._serving[name] = compiled
                self._live.keep(name, compiled.worker.config.agents[name].budget)

    def _add(self, config: Config) -> None:
        """Compiles a config as the newest one."""
        compiled = self._compiled.pop(config.version, None)
        worker = self.newest.worker
        self._compiled[config.version] = compiled or ConfigVersion.of(worker.under(config, self._pool.open(config)))

    async def _began_under(self, agent: str, delivery: Delivery) -> ConfigVersion | None:
        """Returns the config that a job started with; None if it has not started, or that config is lost."""
        worker = self.newest.worker
        saved = partial(worker.executions.saved_checkpoint, ids_of_unread(delivery).execution_id)
        text = await worker.outages.retry_while_unavailable(saved)
        version = None if text is None else Checkpoint.model_validate_json(text).config_version
        return None if version is None else await self._load(version, agent)

    async def _load(self, version: str, agent: str) -> ConfigVersion | None:
        if version not in self._compiled:
            text = await self.newest.worker.outages.retry_while_unavailable(partial(self._configs.load, version))
            if text is None:
                _log_unavailable(version, "nothing is known of it")
                return None
            try:
                config = parse_config(text)
                older = {version: ConfigVersion.of(self.newest.worker.under(config, self._pool.open(config)))}
            except ConfigError as error:
                _log_unavailable(version, str(error))
                return None
            self._compiled = older | self._compiled
        compiled = self._compiled.get(version)
        return compiled if compiled is not None and agent in compiled.handlers else None

    async def _evict(self) -> None:
        """Evicts configs that no job and no agent uses, except the latest few."""
        needed = {id(self.newest), *map(id, self._serving.values())}
        spare = [
            version
            for version, compiled in self._compiled.items()
            if not compiled.running and id(compiled) not in needed
        ]
        if len(spare) <= RETAINED:
            return
        for version in spare[: len(spare) - RETAINED]:
            del self._compiled[version]
        await self._pool.close_except(
            provider for compiled in self._compiled.values() for provider in compiled.worker.providers.values()
        )


def _log_unavailable(version: str, error: str) -> None:
    effect = "jobs that began with it continue with the newest config"
    structlog.get_logger().warning("earlier_config_not_available", version=version, error=error, effect=effect)
