"""Databases of their own for tests that share an event loop, and in it the connections."""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio

from breakwater.kernel.clickhouse.client import Analytics
from tests.helpers import share_event_loop
from tests.records.made import connected, filled_database
from tests.records.samples import new_database
from tests.server_sources import RunningServer


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    share_event_loop(items, Path(__file__).parent)


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def connections() -> AsyncGenerator[dict[str, Analytics]]:
    """Connections that no test uses now, by the URLs of their databases."""
    idle: dict[str, Analytics] = {}
    yield idle
    for connection in idle.values():
        await connection.close()


@pytest_asyncio.fixture(loop_scope="package")
async def analytics(clickhouse_server: RunningServer, connections: dict[str, Analytics]) -> AsyncGenerator[Analytics]:
    async with new_database(clickhouse_server.url, connections=connections) as database:
        yield database


@pytest_asyncio.fixture(loop_scope="package")
async def brand_new_analytics(clickhouse_server: RunningServer) -> AsyncGenerator[Analytics]:
    async with new_database(clickhouse_server.url, brand_new=True) as database:
        yield database


@pytest.fixture(scope="package")
def filled_url(clickhouse_server: RunningServer) -> str:
    """The URL of a database with the small history, which tests only read."""
    return filled_database(clickhouse_server.url)


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def filled(filled_url: str) -> AsyncGenerator[Analytics]:
    async with connected(filled_url) as connection:
        yield connection
