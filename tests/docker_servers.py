"""The source of test servers that needs a Docker engine; servers.py says when it is used.

Apart from the other source, because its libraries take a second to import.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import docker
from docker.errors import DockerException
from requests.exceptions import RequestException
from testcontainers.core.container import DockerContainer

from breakwater.local.ports import Probe, free_port, http_ready, nats_ready, redis_ready
from tests.server_sources import PASSWORD, USER, RunningServer

NATS_IMAGE = "nats:2.15-alpine"
REDIS_IMAGE = "valkey/valkey:9.1"
CLICKHOUSE_IMAGE = "clickhouse/clickhouse-server:26.9"

_MAX_PAYLOAD = 8 * 1024 * 1024


class DockerServers:
    """Servers that are containers of the official images."""

    def __init__(self, new_directory: Callable[[], Path]) -> None:
        self._new_directory = new_directory
        self._running: list[RunningServer] = []

    def nats(self) -> RunningServer:
        config = self._new_directory() / "nats.conf"
        config.write_text(f'jetstream {{ store_dir: "/data" }}\nmax_payload: {_MAX_PAYLOAD}\n')
        container = DockerContainer(NATS_IMAGE, volumes=[(str(config), "/etc/nats/test.conf", "ro")])
        container.with_command("-js -c /etc/nats/test.conf")
        return self._run(container, 4222, nats_ready, "nats://{address}")

    def redis(self) -> RunningServer:
        container = DockerContainer(REDIS_IMAGE)
        container.with_command("valkey-server --appendonly yes --maxmemory-policy noeviction")
        return self._run(container, 6379, lambda host, port: redis_ready(host, port, None), "redis://{address}/0")

    def clickhouse(self) -> RunningServer:
        container = DockerContainer(CLICKHOUSE_IMAGE)
        container.with_envs(CLICKHOUSE_USER=USER, CLICKHOUSE_PASSWORD=PASSWORD)
        return self._run(
            container,
            8123,
            lambda host, port: http_ready(host, port, "/ping", body_prefix=b"Ok"),
            f"http://{USER}:{PASSWORD}@{{address}}",
        )

    def stop(self) -> None:
        for server in self._running:
            server.stop()

    def _run(
        self, container: DockerContainer, inner_port: int, make_probe: Callable[[str, int], Probe], url: str
    ) -> RunningServer:
        # A port that Docker picks changes with every restart; one that we name stays.
        port = free_port()
        container.with_bind_ports(inner_port, port)
        container.start()
        host = container.get_container_host_ip()
        server = RunningServer(url.format(address=f"{host}:{port}"), ContainerRunner(container), make_probe(host, port))
        self._running.append(server)
        server.wait_until_ready()
        return server


class ContainerRunner:
    """Keeps one container."""

    def __init__(self, container: DockerContainer) -> None:
        self._container = container
        self._removed = False

    def start(self) -> None:
        self._container.get_wrapped_container().restart(timeout=5)

    def kill(self) -> None:
        container = self._container.get_wrapped_container()
        container.kill()
        container.wait()

    def stop(self) -> None:
        if not self._removed:
            self._container.stop()
            self._removed = True

    def check(self) -> str | None:
        container = self._container.get_wrapped_container()
        container.reload()
        if container.status == "running":
            return None
        return f"container {container.name} is {container.status}:\n{container.logs(tail=20).decode(errors='replace')}"

    def connections(self) -> int | None:
        return None


@cache
def engine_problem() -> str | None:
    """Say why no Docker engine can be used, or None if one answers."""
    try:
        client = docker.from_env(timeout=2)
        try:
            client.ping()
        finally:
            client.close()
    except (DockerException, RequestException, OSError) as error:
        return f"no Docker engine answers: {error}"
    return None


def has_images() -> bool:
    """Tell whether the engine has all the images already."""
    client = docker.from_env(timeout=2)
    try:
        known = {tag for image in client.images.list() for tag in image.tags}
    finally:
        client.close()
    return {NATS_IMAGE, REDIS_IMAGE, CLICKHOUSE_IMAGE} <= known
