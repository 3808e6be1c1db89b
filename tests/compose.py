"""compose.yaml as Compose reads it, and its servers as processes of this machine."""

import re
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from breakwater.local.ports import free_port, http_ready, redis_ready
from breakwater.local.process import ProcessSpec
from breakwater.local.servers import find_valkey
from tests.nats_node import start_nats
from tests.server_sources import ProcessRunner, RunningServer

ROOT = Path(__file__).parent.parent
NODES = ("nats-1", "nats-2", "nats-3")
# As `make env` may write it: begins with a digit and has an exponent, so unquoted, nats-server would read a number.
PASSWORD = "0e" + "12345678" * 4
GIVEN = {
    line.partition("=")[0]: line.partition("=")[2] or PASSWORD
    for line in (ROOT / ".env.example").read_text().splitlines()
    if re.match(r"\w+=", line)
}


def interpolate(text: str, given: Mapping[str, str]) -> str:
    """Puts in variables as Compose does: `${NAME}`, `${NAME:-default}`, `${NAME:?why}`, and `$$` for a dollar."""

    def value(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        name, kind, rest = found[1], found[2], found[3]
        if given.get(name):
            return given[name]
        if kind == ":-":
            return str(rest)
        raise KeyError(f"{name} {rest or 'is not set'}")

    return re.sub(r"\$\$|\$\{(\w+)(?:(:-|:\?)([^}]*))?\}", value, text)


def load(given: Mapping[str, str]) -> dict[str, Any]:
    return yaml.safe_load(interpolate((ROOT / "compose.yaml").read_text(), given))


def size(text: str) -> int:
    """Bytes, of a size as Compose has it."""
    return int(text[:-1]) * 2 ** {"k": 10, "m": 20, "g": 30}[text[-1]]


COMPOSE = load(GIVEN)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if "build" in service}


@contextmanager
def nats_cluster(tmp_path: Path) -> Generator[dict[str, RunningServer]]:
    """The three nodes of compose.yaml, on this machine: other addresses and folders, otherwise as they are."""
    ports = {node: (free_port(), free_port(), free_port()) for node in NODES}
    servers: dict[str, RunningServer] = {}
    for node in NODES:
        folder = tmp_path / node
        shutil.copytree(ROOT / "deploy/nats", folder)
        config = (folder / "server.conf").read_text()
        for there, here in (
            ("0.0.0.0:4222", f"127.0.0.1:{ports[node][0]}"),
            ("0.0.0.0:6222", f"127.0.0.1:{ports[node][1]}"),
            ("127.0.0.1:8222", f"127.0.0.1:{ports[node][2]}"),
            ('"/data"', f'"{folder}/data"'),
        ):
            assert there in config
            config = config.replace(there, here)
        environment = {
            name: re.sub(r"@(nats-\d):6222", lambda found: f"@127.0.0.1:{ports[found[1]][1]}", value)
            for name, value in SERVICES[node]["environment"].items()
        }
        # As the health check of compose.yaml asks: a node is well when it knows the cluster's leader.
        ready = http_ready("127.0.0.1", ports[node][2], "/healthz")
        servers[node] = start_nats(folder, config, ports[node][0], environment=environment, ready=ready)
    try:
        for server in servers.values():
            server.wait_until_ready()
        yield servers
    finally:
        for server in servers.values():
            server.stop()


@contextmanager
def redis_server(folder: Path) -> Generator[RunningServer]:
    """The Redis of compose.yaml, on this machine."""
    port = free_port()
    shell, option, script = SERVICES["redis"]["command"]
    assert "dir /data\n" in script
    script = script.replace("dir /data\n", f"dir {folder}\nbind 127.0.0.1\nport {port}\n")
    script = script.replace("exec valkey-server", f"exec {find_valkey()}")
    ready = redis_ready("127.0.0.1", port, PASSWORD)
    spec = ProcessSpec("redis", (shell, option, script), folder / "log", ready, env=SERVICES["redis"]["environment"])
    server = RunningServer(f"redis://:{PASSWORD}@127.0.0.1:{port}", ProcessRunner(spec), ready)
    try:
        server.restart()
        yield server
    finally:
        server.stop()
