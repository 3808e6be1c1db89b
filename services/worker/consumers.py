"""The consumers of the plane: a deleted one is created again and reported as an incident."""

from __future__ import annotations

import asyncio
import random
from datetime import UTC, datetime

import structlog

from breakwater.alerts.rules.signals import consumer_deleted, consumer_restored
from breakwater.alerts.store.incidents import open_log
from breakwater.kernel.nats.core import ClientGetter
from breakwater.kernel.nats.errors import BusError
from breakwater.kernel.nats.provision import ConsumerCheck
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.topology import Plan
from breakwater.kernel.process.outage import Outage
from breakwater.services.worker.config_versions import ConfigVersions

LOOK_EVERY_S = 5.0, 15.0
"""The shortest and the longest wait between checks. It is random, so that one of several workers is first."""


class ConsumerWatch:
    """Checks the consumers of all services. Without its consumer, an agent or a service gets no messages."""

    def __init__(self, connection: ClientGetter, publisher: Publisher, config_versions: ConfigVersions) -> None:
        self._connection = connection
        self._publisher = publisher
        self._config_versions = config_versions
        self._check = ConsumerCheck(connection)

    async def run(self) -> None:
        """Checks until it is cancelled."""
        outage = Outage("looking at the consumers")
        while True:
            await outage.run_logged(self.look, expected=BusError)
            await asyncio.sleep(random.uniform(*LOOK_EVERY_S))  # noqa: S311  no secret

    async def look(self) -> None:
        """Checks once. Raises BusError: check again."""
        config = self._config_versions.newest.worker.config
        agents = {name: agent.concurrency for name, agent in config.agents.items()}
        deleted = await self._check.deleted_consumers(Plan(agents, tuple(config.alerts.channels)))
        if not deleted:
            return
        incidents, rules = open_log(self._connection, self._publisher, config.alerts, config.redaction)
        for stream, consumer in deleted:
            name = consumer.durable_name or ""
            structlog.get_logger().warning("consumer_deleted", stream=stream, consumer=name, next="it is created again")
            await incidents.apply(consumer_deleted(stream, name, datetime.now(UTC)), rules)
            await self._check.create(stream, consumer)
            await incidents.apply(consumer_restored(stream, name, datetime.now(UTC)), rules)
