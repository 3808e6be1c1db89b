from collections.abc import AsyncGenerator
from dataclasses import dataclass

import pytest
from nats.aio.client import Client

from breakwater.kernel.clickhouse.client import Analytics
from breakwater.records.log_comparison import LOG_COMPARISONS
from tests.helpers import nats_client
from tests.records.samples import new_database
from tests.server_pool import ServerPool
from tests.server_sources import RunningServer
from tests.services.sink.plane import Plane


@dataclass(frozen=True)
class EmptyServers:
    """A NATS without streams, and a database without rows."""

    nats_server: RunningServer
    clickhouse_server: RunningServer
    client: Client
    analytics: Analytics

    def plane(self) -> Plane:
        """The same as a plane, once something is restored."""
        jetstream = self.client.jetstream(timeout=30)
        return Plane(self.nats_server, self.clickhouse_server, self.analytics, self.client, jetstream)


@pytest.fixture
async def plane(own_nats_server: RunningServer, clickhouse_server: RunningServer) -> AsyncGenerator[Plane]:
    async with (
        new_database(clickhouse_server.url) as analytics,
        Plane.provisioned(own_nats_server, clickhouse_server, analytics) as provisioned,
    ):
        yield provisioned


@pytest.fixture
async def servers_without_plane(
    nats_pool: ServerPool, clickhouse_server: RunningServer
) -> AsyncGenerator[EmptyServers]:
    with nats_pool.lend() as server:
        async with nats_client(server.url) as client, new_database(clickhouse_server.url) as analytics:
            await analytics.execute(f"TRUNCATE TABLE {LOG_COMPARISONS.name}")  # of an earlier test
            yield EmptyServers(server, clickhouse_server, client, analytics)
