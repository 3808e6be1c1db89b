"""A service says that it is ready, in its log and to whoever supervises it, once it has subscribed; not before."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

import pytest

from breakwater.config import load_config
from breakwater.config.servers import bus_plan
from breakwater.kernel.nats.provision import provision
from breakwater.local.ports import free_port
from breakwater.services.__main__ import run_service
from tests.helpers import ServiceProcess, start_service, until
from tests.servers import RunningServer

CONFIG = "providers: {local: {base_url: http://127.0.0.1:1/v1}}\nagents: {writer: {model: gpt-4.1}}\n"


class Started:
    """Services without streams to read from, each started again when it ends, as a supervisor does."""

    def __init__(self, directory: Path, nats_url: str) -> None:
        self.directory = directory
        self.nats_url = nats_url
        self.processes: dict[str, ServiceProcess] = {}
        self.config = directory / "breakwater.yaml"
        self.config.write_text(CONFIG)

    def start(self, service: str) -> None:
        environment = {
            "BREAKWATER_CONFIG": str(self.config),
            "BREAKWATER_NATS_URL": self.nats_url,
            "BREAKWATER_REDIS_URL": f"redis://127.0.0.1:{free_port()}/0",
            "BREAKWATER_CLICKHOUSE_URL": "http://127.0.0.1:9/none",
            "BREAKWATER_HTTP_PORT": str(free_port()),
            "BREAKWATER_CONSOLE_PORT": str(free_port()),
            "BREAKWATER_ALIVE_FILE": str(self.alive(service)),
        }
        self.processes[service] = start_service(service, environment, self.directory / f"{service}.log")

    def alive(self, service: str) -> Path:
        return self.directory / f"{service}.alive"

    def log(self, service: str) -> str:
        return (self.directory / f"{service}.log").read_text()

    def is_ready(self, service: str) -> bool:
        if self.processes[service].poll() is not None:
            self.start(service)
        return '"service_ready"' in self.log(service) and self.alive(service).exists()


@pytest.fixture
def started(tmp_path: Path, own_nats_server: RunningServer) -> Generator[Started]:
    services = Started(tmp_path, own_nats_server.url)
    yield services
    for process in services.processes.values():
        process.kill()
        process.wait()


async def test_a_service_without_its_streams_is_not_ready_and_with_them_it_is(started: Started) -> None:
    services = ("worker", "breaker", "budget", "alerter", "sink")
    for service in (*services, "request", "console"):
        started.start(service)
    for service in services:
        # It says what it misses, or ends because of it.
        await until(
            lambda service=service: (
                '"unavailable"' in started.log(service) or started.processes[service].poll() is not None
            ),
            f"{service} to find no stream",
        )
    assert [service for service in services if '"service_ready"' in started.log(service)] == []
    assert [service for service in services if started.alive(service).exists()] == []
    await provision(started.nats_url, bus_plan(load_config(started.config)))
    # Those that answer HTTP read no stream.
    for service in (*services, "request", "console"):
        await until(lambda service=service: started.is_ready(service), f"{service} to be ready")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="it runs a service in a fork of this process")
def test_a_service_that_was_started_without_collections_runs_with_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config, seen = tmp_path / "breakwater.yaml", tmp_path / "seen"
    config.write_text(CONFIG)
    monkeypatch.setenv("BREAKWATER_CONFIG", str(config))
    monkeypatch.setattr("uvloop.run", lambda service: (seen.write_text(str(gc.isenabled())), service.close()))
    if (pid := os.fork()) == 0:
        with suppress(BaseException):
            gc.disable()
            run_service("sink")
        os._exit(0)
    os.waitpid(pid, 0)
    assert seen.read_text() == "True"
