"""What the local stack consists of: which servers are started and which are given, and every process of it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from breakwater.bus.permissions import GRANTS, program
from breakwater.config import Config, parse_config, read_config, variables_of
from breakwater.embedded.datadir import DataDir
from breakwater.embedded.endpoints import Endpoints
from breakwater.embedded.environment import for_service, settings_of
from breakwater.embedded.ports import PortInUseError, choose_port, is_free
from breakwater.embedded.probes import Probe, http_ready
from breakwater.embedded.process import ProcessSpec
from breakwater.embedded.servers import (
    CLICKHOUSE_PORT,
    NATS_PORT,
    REDIS_PORT,
    clickhouse_spec,
    nats_spec,
    redis_spec,
)
from breakwater.files import write_private
from breakwater.settings import Settings

LOOPBACK = "127.0.0.1"
HTTP_PORT = 8080
CONSOLE_PORT = 8081
IN_FORCE = "config-in-force.yaml"
"""The config that the services read: a copy of the last one that was checked and that the servers are prepared for."""

METRICS_PORT = 9464
"""The first of them; OpenTelemetry's for Prometheus, as in compose.yaml."""

PLANE_KEY = "plane-key"
"""The secret that a stack encrypts the texts of private agents with, unless it is given one."""

CLICKHOUSE_USER, CLICKHOUSE_READER = "breakwater", "reader"
DATABASE = "breakwater"
SERVICES = ("worker", "breaker", "budget", "alerter", "sink", "request", "console")


@dataclass(frozen=True, slots=True)
class Stack:
    """A stack that is decided and not yet started.

    Attributes:
        servers: Processes to start first, in this order. A server that was given by its URL is not among them.
        services: Processes to start when the servers are prepared.
        setup_env: The `BREAKWATER_*` variables of the process that prepares the servers.
        endpoints: Where programs find everything.
        given: The servers that were given, by name.
    """

    servers: tuple[ProcessSpec, ...]
    services: tuple[ProcessSpec, ...]
    setup_env: Mapping[str, str] = field(repr=False)
    endpoints: Endpoints
    given: tuple[str, ...]
    nats_port: int = 0
    """Of the NATS that is started; 0 where one is given."""

    @property
    def setup_settings(self) -> Settings:
        """The settings of the process that prepares the servers."""
        values: dict[str, Any] = {
            name.removeprefix("BREAKWATER_").lower(): value for name, value in self.setup_env.items()
        }
        return Settings(**values)


def plan_stack(
    data: DataDir,
    config_file: Path,
    *,
    workers: int = 1,
    environment: Mapping[str, str],
    http_port: int | None = None,
    console_port: int | None = None,
    port: Callable[[int], int] = choose_port,
) -> Stack:
    """Chooses ports, makes secrets, copies the config, and lists the processes. Starts nothing.

    All services read the copy: one that is started again has the config that the others have and that the servers were
    prepared for, whatever stands in the file by then.

    Args:
        data: The data directory; it must be locked by the caller.
        config_file: What the services read a copy of.
        workers: How many worker processes to run.
        environment: Where `BREAKWATER_NATS_URL`, `BREAKWATER_REDIS_URL` and `BREAKWATER_CLICKHOUSE_URL` may name
            servers that are already there. The services get of it what each needs (see environment.py).
        http_port: Where the API listens; the standard port or the next free one when None.
        console_port: Where the console listens, likewise.
        port: Returns the port of a server, given its standard one.

    Raises:
        PortInUseError: `http_port` or `console_port` is in use, or so are all ports after a standard one.
        ConfigError: The config can't be read, or is wrong.
    """
    text = read_config(config_file)
    config = parse_config(text, source=str(config_file))
    in_force = data.path / IN_FORCE
    write_private(in_force, text)
    for chosen in (http_port, console_port):
        if chosen is not None and not is_free(chosen):
            raise PortInUseError(chosen, LOOPBACK)
    servers: list[ProcessSpec] = []
    nats_url = environment.get("BREAKWATER_NATS_URL")
    redis_url = environment.get("BREAKWATER_REDIS_URL")
    clickhouse_url = environment.get("BREAKWATER_CLICKHOUSE_URL")
    given = [name for name, url in (("nats", nats_url), ("redis", redis_url), ("clickhouse", clickhouse_url)) if url]

    def nats_for(user: str) -> str:
        return nats_url or f"nats://{user}:{data.secret(f'nats-{user}')}@{LOOPBACK}:{nats_port}"

    nats_port = 0
    if not nats_url:
        nats_port = port(NATS_PORT)
        servers.append(nats_server(data, nats_port, config))
    if not redis_url:
        redis_port, password = port(REDIS_PORT), data.secret("redis")
        servers.append(redis_spec(data.path, redis_port, password))
        redis_url = f"redis://:{password}@{LOOPBACK}:{redis_port}/0"
    reader_url = clickhouse_url
    if not clickhouse_url:
        clickhouse_port = port(CLICKHOUSE_PORT)
        clickhouse_url, reader_url = (
            f"http://{user}:{data.secret(secret)}@{LOOPBACK}:{clickhouse_port}/{DATABASE}"
            for user, secret in ((CLICKHOUSE_USER, "clickhouse"), (CLICKHOUSE_READER, "clickhouse-reader"))
        )
        files = data.secret_file("clickhouse"), data.secret_file("clickhouse-reader")
        servers.append(clickhouse_spec(data.path, clickhouse_port, CLICKHOUSE_USER, *files))

    http_port = port(HTTP_PORT) if http_port is None else http_port
    console_port = (
        port(CONSOLE_PORT if http_port < CONSOLE_PORT else http_port + 1) if console_port is None else console_port
    )
    common = {
        "BREAKWATER_CONFIG": str(in_force),
        "BREAKWATER_REDIS_URL": redis_url,
        "BREAKWATER_CLICKHOUSE_URL": clickhouse_url,
        "BREAKWATER_HTTP_HOST": LOOPBACK,
        "BREAKWATER_HTTP_PORT": str(http_port),
        "BREAKWATER_CONSOLE_HOST": LOOPBACK,
        "BREAKWATER_CONSOLE_PORT": str(console_port),
        "BREAKWATER_REQUEST_URL": f"http://{LOOPBACK}:{http_port}",
        "BREAKWATER_API_KEYS_FILE": str(data.path / "api_keys.json"),
        "BREAKWATER_PLANE_KEY": environment.get("BREAKWATER_PLANE_KEY") or data.secret(PLANE_KEY),
    }
    processes = _processes(workers)
    metrics_ports = _metrics_ports([process for _, process in processes], port)
    endpoints = Endpoints(
        request_url=f"http://{LOOPBACK}:{http_port}",
        console_url=f"http://{LOOPBACK}:{console_port}",
        nats_url=nats_for("client"),
        redis_url=redis_url,
        clickhouse_url=reader_url or clickhouse_url,
        api_key_file=data.secret_file("api-key"),
        config_file=config_file.absolute(),
        data_dir=data.path,
        metrics={process: f"http://{LOOPBACK}:{number}/metrics" for process, number in metrics_ports.items()},
        pid=os.getpid(),
        started_at=datetime.now(UTC),
    )
    return Stack(
        servers=tuple(servers),
        services=tuple(
            _service_spec(
                data,
                name,
                process,
                for_service(environment, variables_of(config, name))
                | settings_of(name, common)
                | (
                    {"BREAKWATER_CLICKHOUSE_URL": reader_url or clickhouse_url}
                    if name == "console"
                    else {"BREAKWATER_NATS_URL": nats_for(name)}
                )
                | {
                    "BREAKWATER_METRICS_HOST": LOOPBACK,
                    "BREAKWATER_METRICS_PORT": str(metrics_ports[process]),
                },
                {"request": (http_port, "/readyz"), "console": (console_port, "/healthz")}.get(name),
            )
            for name, process in processes
        ),
        setup_env=common | {"BREAKWATER_NATS_URL": nats_for("setup")},
        endpoints=endpoints,
        given=tuple(given),
        nats_port=nats_port,
    )


def nats_server(data: DataDir, port: int, config: Config) -> ProcessSpec:
    """Writes the config of NATS, with the users that a config has, and says how it is run."""
    programs = [program(name, one.agents) for name, one in config.programs.items()]
    passwords = {grant.user: data.secret(f"nats-{grant.user}") for grant in (*GRANTS, *programs)}
    return nats_spec(data.path, port, passwords, programs)


def _processes(workers: int) -> Sequence[tuple[str, str]]:
    several = [("worker", f"worker-{number}") for number in range(1, workers + 1)] if workers > 1 else []
    return [*(several or [("worker", "worker")]), *((name, name) for name in SERVICES if name != "worker")]


def _metrics_ports(processes: Sequence[str], port: Callable[[int], int]) -> dict[str, int]:
    given: dict[str, int] = {}
    following = METRICS_PORT
    for process in processes:
        given[process] = port(following)
        following = given[process] + 1  # nothing listens yet on those already given
    return given


def _service_spec(
    data: DataDir, service: str, process: str, environment: Mapping[str, str], answers: tuple[int, str] | None
) -> ProcessSpec:
    alive = data.path / "alive" / process
    ready: Probe = _touched_since(alive, time.time()) if answers is None else http_ready(LOOPBACK, *answers)
    return ProcessSpec(
        name=process,
        argv=(sys.executable, "-m", "services", service),
        log_file=data.logs / f"{process}.log",
        ready=ready,
        env={**environment, "BREAKWATER_ALIVE_FILE": str(alive)},
        # A worker lets its calls finish; the config bounds for how long.
        stop_timeout_s=9.0 if service in {"worker", "request"} else 5.0,
        ready_timeout_s=60.0,
        service=service,
    )


def _touched_since(file: Path, planned_at: float) -> Probe:
    """Probe a service without a port: it touches its alive file while it is connected and turns.

    The time is compared with the last answer, so that after a restart the file of the run before does not count.
    """
    seen = planned_at

    async def probe() -> bool:
        nonlocal seen
        try:
            touched = file.stat().st_mtime  # noqa: ASYNC240  one look at a local file
        except FileNotFoundError:
            return False
        if touched <= seen:
            return False
        seen = touched
        return True

    return probe
