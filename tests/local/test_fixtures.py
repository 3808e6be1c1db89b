"""The servers that other tests stand on, from both sources."""

import socket
import urllib.request
from collections.abc import Generator
from urllib.parse import urlsplit

import nats
import pytest
import redis.asyncio as redis

from tests.server_sources import RunningServer, Servers, missing_backend
from tests.servers import choose_source, docker_problem, docker_servers


async def check_nats_survives_a_kill(server: RunningServer) -> None:
    client = await nats.connect(server.url)
    await client.jetstream().add_stream(name="KEPT", subjects=["kept.>"])
    await client.jetstream().publish("kept.one", b"1")
    assert client.max_payload == 8 * 1024 * 1024
    await client.close()
    server.kill()
    assert not answers(server)
    await server.restart_async()
    client = await nats.connect(server.url)
    assert (await client.jetstream().get_last_msg("KEPT", "kept.one")).data == b"1"
    await client.close()


async def check_redis_survives_a_restart(server: RunningServer) -> None:
    async with redis.Redis.from_url(server.url) as client:
        await client.set("kept", "1")
    server.restart()
    async with redis.Redis.from_url(server.url) as client:
        assert await client.get("kept") == b"1"
    server.kill()
    assert not answers(server)
    server.restart()
    assert answers(server)


def answers(server: RunningServer) -> bool:
    address = urlsplit(server.url)
    with socket.socket() as client:
        return client.connect_ex((address.hostname, address.port)) == 0


def check_clickhouse_answers(server: RunningServer) -> None:
    credentials, _, address = server.url.removeprefix("http://").partition("@")
    user, _, password = credentials.partition(":")
    request = urllib.request.Request(
        f"http://{address}/?query=SELECT%206*7", headers={"X-ClickHouse-User": user, "X-ClickHouse-Key": password}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.read().strip() == b"42"


async def test_nats_keeps_its_port_and_its_streams_over_a_kill(own_nats_server: RunningServer) -> None:
    await check_nats_survives_a_kill(own_nats_server)


async def test_redis_keeps_its_port_and_its_keys_over_a_restart(own_redis_server: RunningServer) -> None:
    await check_redis_survives_a_restart(own_redis_server)


def test_clickhouse_answers_a_query(clickhouse_server: RunningServer) -> None:
    check_clickhouse_answers(clickhouse_server)


def test_two_servers_of_one_source_share_nothing(nats_server: RunningServer, own_nats_server: RunningServer) -> None:
    assert nats_server.url != own_nats_server.url


def test_an_unknown_source_is_refused_by_name() -> None:
    with pytest.raises(pytest.fail.Exception, match="podman"):
        choose_source("podman")


def test_docker_that_is_asked_for_and_does_not_answer_is_a_failure() -> None:
    if docker_problem() is None:
        assert choose_source("docker") == "docker"
    else:
        with pytest.raises(pytest.fail.Exception, match="BREAKWATER_TEST_SERVERS=docker"):
            choose_source("docker")


def test_a_missing_server_skips_a_test_here_and_fails_it_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no redis-server"):
        missing_backend("no redis-server")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no redis-server"):
        missing_backend("no redis-server")


@pytest.fixture
def containers(tmp_path_factory: pytest.TempPathFactory) -> Generator[Servers]:
    if (problem := docker_problem()) is not None:
        pytest.skip(problem)
    found: Servers = docker_servers().DockerServers(lambda: tmp_path_factory.mktemp("container"))
    yield found
    found.stop()


@pytest.mark.docker
async def test_containers_behave_as_the_embedded_servers_do(containers: Servers) -> None:
    await check_nats_survives_a_kill(containers.nats())
    await check_redis_survives_a_restart(containers.redis())
    check_clickhouse_answers(containers.clickhouse())
