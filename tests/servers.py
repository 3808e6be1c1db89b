"""Real servers for tests: NATS with JetStream, Redis, ClickHouse. One suite, two sources of servers.

Fixtures, each giving a `RunningServer` with `.url`, `.kill()` (SIGKILL) and `.restart()` (same port, same data):

- `nats_server`, `redis_server`, `clickhouse_server`: one for the whole session, that is one for each xdist worker. A
  test leaves no data behind that another could stumble over, and one that kills a server starts it again.
- `own_nats_server`, `own_redis_server`: empty, and for this test alone. For tests that kill servers, or that need fixed
  stream names or an empty Redis. `module_nats_server`: the same for all tests of a module. They come from a pool
  (`tests/server_pool.py`) and return to it empty; a test that changes the settings of such a server puts them back.

Where they come from is reported by `BREAKWATER_TEST_SERVERS`:

- `embedded`: the programs that `breakwater up` runs: nats-server, valkey-server and the ClickHouse engine behind its
  own HTTP protocol, on free ports of loopback, with their data in the test's temporary directory.
- `docker`: containers of the official images, through testcontainers. Images are pulled, and an engine that does not
  answer is a failure.
- not set: `docker` where an engine answers within two seconds and has all the images already; `embedded` elsewhere. So
  a test run never starts to download something that nobody asked for.

A server whose program is not installed skips the tests that need it, with the reason. With `CI=true` it fails them:
there a skipped test must not look like a passed one.
"""

import importlib
import os
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from types import ModuleType

import pytest
import pytest_asyncio

from breakwater.kernel.redis.connection import Redis
from tests.forked_commands import spawn_program
from tests.server_pool import ServerPool, empty_nats, empty_redis
from tests.server_sources import EmbeddedServers, RunningServer, Servers

_DOCKER_SOCKET = Path("/var/run/docker.sock")


def choose_source(wanted: str | None) -> str:
    """Decide by the value of BREAKWATER_TEST_SERVERS where the servers come from: `docker` or `embedded`."""
    match wanted:
        case "embedded":
            return "embedded"
        case "docker":
            if (problem := docker_problem()) is not None:
                pytest.fail(f"BREAKWATER_TEST_SERVERS=docker, but {problem}", pytrace=False)
            return "docker"
        case None | "":
            return "docker" if docker_problem() is None and docker_servers().has_images() else "embedded"
        case _:
            pytest.fail(f"BREAKWATER_TEST_SERVERS={wanted!r}: it is `docker`, `embedded` or not set", pytrace=False)


def docker_problem() -> str | None:
    """Say why no Docker engine can be used, or None if one answers."""
    if "DOCKER_HOST" not in os.environ and not _DOCKER_SOCKET.exists():
        return f"no Docker engine is here: DOCKER_HOST is not set and there is no {_DOCKER_SOCKET}"
    return docker_servers().engine_problem()


def docker_servers() -> ModuleType:
    """Import the other source when it is wanted, and not with every test run."""
    return importlib.import_module("tests.docker_servers")


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Generator[Servers]:
    def new_directory() -> Path:
        return tmp_path_factory.mktemp("server")

    if choose_source(os.environ.get("BREAKWATER_TEST_SERVERS")) == "docker":
        found: Servers = docker_servers().DockerServers(new_directory)
    else:
        found = EmbeddedServers(new_directory, spawn=spawn_program)
    yield found
    found.stop()


@pytest.fixture(scope="session")
def nats_server(servers: Servers) -> RunningServer:
    return servers.nats()


@pytest.fixture(scope="session")
def redis_server(servers: Servers) -> RunningServer:
    return servers.redis()


@pytest.fixture(scope="session")
def clickhouse_server(servers: Servers) -> RunningServer:
    return servers.clickhouse()


@pytest.fixture(scope="session")
def nats_pool(servers: Servers) -> ServerPool:
    return ServerPool(servers.nats, empty_nats)


@pytest.fixture(scope="session")
def redis_pool(servers: Servers) -> ServerPool:
    return ServerPool(servers.redis, empty_redis)


@pytest.fixture
def own_nats_server(nats_pool: ServerPool) -> Generator[RunningServer]:
    with nats_pool.lend() as server:
        yield server


@pytest.fixture(scope="module")
def module_nats_server(nats_pool: ServerPool) -> Generator[RunningServer]:
    with nats_pool.lend() as server:
        yield server


@pytest.fixture
def own_redis_server(redis_pool: ServerPool) -> Generator[RunningServer]:
    with redis_pool.lend() as server:
        yield server


@pytest_asyncio.fixture
async def redis(redis_server: RunningServer) -> AsyncGenerator[Redis]:
    """A connection to a Redis that is empty."""
    connection = Redis(redis_server.url)
    await connection.client.flushall()
    yield connection
    await connection.close()
