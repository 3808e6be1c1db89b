from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest_asyncio

from breakwater.state.connection import Redis
from tests.servers import RunningServer


@pytest_asyncio.fixture
async def redis(redis_server: RunningServer) -> AsyncGenerator[Redis]:
    """An empty Redis."""
    connection = Redis(redis_server.url)
    await connection.client.flushall()
    yield connection
    await connection.close()
