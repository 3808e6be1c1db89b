"""`docker compose up` without Docker: each container's command, with its environment, in a root of its own.

Only what the image has can be imported, paths of the image lie in a temporary directory, and addresses are of servers
of this machine: the NATS cluster and the Redis of compose.yaml, and the embedded ClickHouse engine. The seven services
and `setup` are forks of one process that has imported them there: importing them takes each a second of CPU.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Generator, Mapping
from contextlib import ExitStack, chdir, suppress
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import psutil
import pytest

from breakwater.local import fork_server
from breakwater.local.ports import free_port
from breakwater.local.servers import clickhouse_spec
from breakwater.services.__main__ import NAMES
from tests.commands import run_command
from tests.compose import GIVEN, OURS, PASSWORD, ROOT, load, nats_cluster, redis_server, size
from tests.forked_commands import start_command
from tests.helpers import ServiceProcess, own_fork_server, start_service, wait_until
from tests.server_sources import ProcessRunner, RunningServer

pytestmark = pytest.mark.long(about_s=40, together=True)

BIN = Path(sys.executable).parent
DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").rpartition("\nFROM ")[2]
IMAGE_ENVIRONMENT = dict(
    pair.split("=", 1) for line in re.findall(r"^ENV (.+)$", DOCKERFILE, re.MULTILINE) for pair in line.split()
)
[IMAGE_HEALTH] = re.findall(r"^HEALTHCHECK .*?CMD (.+)$", DOCKERFILE, re.MULTILINE)

REFUSE = """
import sys


class _Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"{{name}} is not in the image", name=name)


sys.meta_path.insert(0, _Refuse())
"""


@cache
def not_in_the_image() -> set[str]:
    """Top-level modules that this environment has, and the image's packages don't bring."""
    pinned = re.findall(r"^([\w.-]+)==", (ROOT / "requirements/clouds.txt").read_text(), re.MULTILINE)
    there = {_name(one) for one in pinned}
    modules = packages_distributions().items()
    return {module for module, found in modules if not there & {_name(one) for one in found}} - {"breakwater"}


def _name(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def is_port_free(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) != 0


class Containers:
    """The containers of compose.yaml that run our image, as processes."""

    def __init__(self, root: Path, services: Mapping[str, Any], addresses: Mapping[str, str]) -> None:
        self._root = root
        self._services = services
        self._addresses = addresses
        self.ports = {("request", 8080): free_port(), ("console", 8081): free_port(), ("simulator", 8090): free_port()}
        self.running: dict[str, ServiceProcess] = {}
        self._keys = root / "keys"
        self._image = root / "image"
        for folder in (self._keys, self._image):
            folder.mkdir(parents=True, exist_ok=True)
        (self._image / "sitecustomize.py").write_text(REFUSE.format(blocked=not_in_the_image()))

    def here(self, service: str, text: str) -> str:
        """A command, a value or a file of a container, with paths and addresses of this machine."""
        for name, port in self.ports:
            text = text.replace(f"//{name}:{port}", f"//127.0.0.1:{self.ports[name, port]}")
        for there, address in self._addresses.items():
            text = text.replace(there, address)
        for (name, port), here in self.ports.items():
            if name == service:
                text = re.sub(rf"(?<=127\.0\.0\.1:){port}\b|^{port}$", str(here), text)
        for folder in ("/var/lib/breakwater-config", "/tmp", "/etc/breakwater"):
            text = re.sub(rf"{folder}(?![\w-])", str(self._root / service / folder.strip("/")), text)
        return re.sub(r"/var/lib/breakwater(?![\w-])", str(self._keys), text)

    def environment(self, service: str) -> dict[str, str]:
        given = self._services[service].get("environment", {})
        environment = {name: self.here(service, str(value)) for name, value in {**IMAGE_ENVIRONMENT, **given}.items()}
        if "BREAKWATER_METRICS_PORT" in environment:
            environment["BREAKWATER_METRICS_PORT"] = str(free_port())
        for (name, port), variable in zip(self.ports, ("HTTP_PORT", "CONSOLE_PORT"), strict=False):
            if name == service:
                environment[f"BREAKWATER_{variable}"] = str(self.ports[name, port])
        path = f"{BIN}{os.pathsep}/usr/bin{os.pathsep}/bin"
        return environment | {"PATH": path, "PYTHONPATH": str(self._image)}

    def prepare(self, service: str, command: list[str] | None = None) -> list[str]:
        """Makes the files and folders of a container, and returns the words of its command."""
        folder = self._root / service
        for mount in self._services[service]["volumes"]:
            source, _, target = mount.partition(":")
            target = target.removesuffix(":ro")
            if source.startswith("."):
                file = Path(self.here(service, target))
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(self.here(service, (ROOT / source).read_text()))
        for made in (folder / "tmp", folder / "var/lib/breakwater-config"):
            made.mkdir(parents=True, exist_ok=True)
        return [self.here(service, word) for word in command or self._services[service]["command"]]

    def start(self, service: str) -> subprocess.Popen[bytes]:
        """Starts a container as `docker compose up` does."""
        words = self.prepare(service)
        folder = self._root / service
        with (folder / "log").open("ab") as log:
            return subprocess.Popen(
                [shutil.which(words[0], path=str(BIN)) or words[0], *words[1:]],
                cwd=self._keys,
                env=self.environment(service),
                stdout=log,
                stderr=log,
            )

    def fork(self, service: str) -> ServiceProcess:
        """Starts a service as `start` does, as a fork of a process in the image that has imported it."""
        assert self.prepare(service) == ["python", "-m", "breakwater.services", service]
        self._start_fork_server()
        with (self._root / service / "log").open("ab") as log:
            return fork_server.fork(service, log.fileno(), self.environment(service))

    def _start_fork_server(self) -> None:
        """Starts the process that imports the services in the image, unless it runs."""
        with chdir(self._keys), pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(self._image))
            fork_server.start()

    def log(self, service: str) -> str:
        return (self._root / service / "log").read_text()

    def run(self, service: str) -> tuple[int | None, str]:
        """Runs a container of `breakwater` to its end, as a fork. Returns its exit code, and what it printed."""
        program, *arguments = self.prepare(service)
        assert program == "breakwater"
        if fork_server.SUPPORTED:
            self._start_fork_server()
        with (self._root / service / "log").open("ab") as log:
            process = start_command(
                *arguments,
                directory=self._keys,
                environment=self.environment(service),
                stdout=log.fileno(),
                stderr=log.fileno(),
            )
        return process.wait(120), self.log(service)

    def run_here(self, service: str, *command: str) -> tuple[int, str]:
        """Runs `breakwater` as a container does in this process: starting it takes a second of CPU."""
        program, *arguments = self.prepare(service, list(command) or None)
        assert program == "breakwater"
        ran = run_command(*arguments, environment=self.environment(service), directory=self._keys)
        return ran.returncode, ran.stdout + ran.stderr

    def is_healthy(self, service: str) -> bool:
        """What the container's health check finds."""
        assert self.running[service].poll() is None, self.log(service)
        if any(name == service and is_port_free(port) for (name, _), port in self.ports.items()):
            return False  # and no Python is started to ask
        check = self._services[service].get("healthcheck", {}).get("test", ["CMD", "sh", "-c", IMAGE_HEALTH])
        words = [self.here(service, word) for word in check[1:]]
        words[0] = shutil.which(words[0], path=str(BIN)) or words[0]
        return subprocess.run(words, env={"PATH": "/usr/bin:/bin"}, capture_output=True, check=False).returncode == 0

    def up(self, *services: str) -> None:
        for service in services:
            self.running[service] = (
                self.fork(service) if fork_server.SUPPORTED and service in NAMES else self.start(service)
            )
        for service in services:
            wait_until(lambda one=service: self.is_healthy(one), f"{service} to be healthy", timeout_s=90)

    def stop(self) -> dict[str, int | None]:
        """Sends SIGTERM to all, as `docker compose down` does, and returns their exit codes."""
        for process in self.running.values():
            process.terminate()
        codes: dict[str, int | None] = {}
        for service, process in self.running.items():
            grace = int(self._services[service]["stop_grace_period"].removesuffix("s"))
            with suppress(subprocess.TimeoutExpired):
                process.wait(grace)
            if process.poll() is None:
                process.kill()
            codes[service] = process.wait()
        self.running.clear()
        return codes


@pytest.fixture
def addresses(tmp_path: Path) -> Generator[dict[str, str]]:
    """The addresses of compose.yaml's servers, and of those that stand in for them here."""
    with ExitStack() as stack:
        nats = stack.enter_context(nats_cluster(tmp_path))
        (tmp_path / "redis").mkdir()
        redis = stack.enter_context(redis_server(tmp_path / "redis"))
        password, data, port = tmp_path / "password", tmp_path / "clickhouse", free_port()
        password.write_text(PASSWORD)
        spec = clickhouse_spec(data, port, "breakwater", password, password)
        clickhouse = RunningServer(f"http://127.0.0.1:{port}", ProcessRunner(spec), spec.ready)
        stack.callback(clickhouse.stop)
        clickhouse.restart()
        yield {
            "@nats:4222": f"@{nats['nats-1'].url.removeprefix('nats://')}",
            "@redis:6379": f"@{redis.url.rpartition('@')[2]}",
            "@clickhouse:8123": f"@127.0.0.1:{port}",
        }


@pytest.fixture
def containers(tmp_path: Path, addresses: dict[str, str]) -> Generator[Containers]:
    with own_fork_server():
        yield Containers(tmp_path / "containers", OURS, addresses)


def test_what_is_printed_starts_on_the_simulator_and_answers(containers: Containers) -> None:
    try:
        for run, once in ((containers.run_here, "check"), (containers.run, "setup")):
            code, shown = run(once)
            assert code == 0, shown
        containers.up("simulator", *NAMES)
        code, shown = containers.run_here("request", "breakwater", "keys", "create", "program")
        assert code == 0, shown
        [key] = re.findall(r"^bw_\S+$", shown, re.MULTILINE)
        body = {"model": "content-writer", "messages": [{"role": "user", "content": "Write a haiku."}]}
        asked = urllib.request.Request(
            f"http://127.0.0.1:{containers.ports['request', 8080]}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(asked, timeout=60) as answer:
            assert json.load(answer)["choices"][0]["message"]["content"]
        taken = {name: psutil.Process(one.pid).memory_info().rss for name, one in containers.running.items()}
        limits = {name: size(OURS[name]["mem_limit"]) for name in taken}
        assert {name: taken[name] for name in taken if taken[name] > limits[name] / 2} == {}
    finally:
        codes = containers.stop()
    assert codes == dict.fromkeys(("simulator", *NAMES), 0)


def test_a_missing_key_ends_the_start_and_is_named(tmp_path: Path) -> None:
    services = load({**GIVEN, "BW_CONFIG": "./examples/breakwater.yaml"})["services"]
    containers = Containers(tmp_path, services, {})
    code, shown = containers.run_here("check")
    assert code == 1
    assert "OPENAI_API_KEY is not set" in shown
    # Nothing else starts: all services wait for `setup`, and that for `check`.
    assert "check" in services["setup"]["depends_on"]
    assert all("setup" in services[name]["depends_on"] for name in NAMES)
    services["check"]["environment"] = {"OPENAI_API_KEY": "sk-test"}
    assert containers.run_here("check")[0] == 0


def test_settings_that_are_wrong_are_named_by_their_variables(tmp_path: Path) -> None:
    services = load({**GIVEN, "BW_PLANE_KEY": "too-short"})["services"]
    containers = Containers(tmp_path, services, {})
    containers.prepare("worker")
    worker = start_service("worker", containers.environment("worker"), tmp_path / "worker" / "log")
    assert worker.wait(60) == os.EX_CONFIG
    assert containers.log("worker").startswith("BREAKWATER_PLANE_KEY: ")
    assert "too-short" not in containers.log("worker")
