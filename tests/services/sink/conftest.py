from collections.abc import AsyncGenerator

import pytest

from breakwater.kernel.clickhouse.client import Analytics
from tests.records.samples import new_database
from tests.server_sources import RunningServer
from tests.services.sink.plane import Plane


@pytest.fixture
async def analytics(clickhouse_server: RunningServer) -> AsyncGenerator[Analytics]:
    async with new_database(clickhouse_server.url) as found:
        yield found


@pytest.fixture
async def plane(
    own_nats_server: RunningServer, clickhouse_server: RunningServer, analytics: Analytics
) -> AsyncGenerator[Plane]:
    """A provisioned bus and an empty database; the sink itself is started by the test."""
    async with Plane.provisioned(own_nats_server, clickhouse_server, analytics) as found:
        yield found
