from collections.abc import AsyncGenerator

import pytest

from breakwater.kernel.clickhouse.client import Analytics
from tests.records.samples import new_database
from tests.server_sources import RunningServer


@pytest.fixture
async def analytics(clickhouse_server: RunningServer) -> AsyncGenerator[Analytics]:
    async with new_database(clickhouse_server.url) as found:
        yield found


@pytest.fixture
async def brand_new_analytics(clickhouse_server: RunningServer) -> AsyncGenerator[Analytics]:
    async with new_database(clickhouse_server.url, brand_new=True) as found:
        yield found
