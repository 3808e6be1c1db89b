"""The plan of a local stack: all its processes, and the servers that run already and are used instead."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from pydantic import SecretStr

from breakwater.config import Config, parse_config, read_config, variables_of
from breakwater.kernel.errors import ConfigError
from breakwater.kernel.nats.permissions import GRANTS, program
from breakwater.kernel.process.files import write_private
from breakwater.kernel.process.settings import Settings
from breakwater.kernel.server_urls import server_urls
from breakwater.local.datadir import DataDir, Endpoints
from breakwater.local.ports import LOOPBACK, Probe, free_port, http_ready, standard_port
from breakwater.local.process import ProcessSpec, for_service
from breakwater.local.servers import clickhouse_spec, nats_spec, redis_spec

HTTP_PORT = 8080
CONSOLE_PORT = 8081
IN_FORCE = "config-in-force.yaml"
"""The config that the services read: a copy of the last one that was checked and that the servers are prepared for."""

PLANE_KEY = "plane-key"
"""The secret that a stack encrypts the texts of private agents with, unless it is given one."""

SERVERS = ("nats", "redis", "clickhouse")
SERVICES = {
    "worker": ("nats_url", "redis_url", "plane_key"),
    "breaker": ("nats_url", "redis_url"),
    "budget": ("nats_url", "redis_url", "clickhouse_url"),
    "alerter": ("nats_url", "clickhouse_url"),
    "sink": ("nats_url", "clickhouse_url"),
    "request": (
        *("nats_url", "redis_url", "clickhouse_url", "clickhouse_analyst_url", "plane_key", "api_keys_file"),
        *("http_host", "http_port"),
    ),
    "console": ("clickhouse_url", "console_host", "console_port", "request_url"),
}
"""Settings of the stack for each service, in addition to those for all."""


@dataclass(frozen=True, slots=True)
class Stack:
    """A stack that is planned and not yet started.

    Attributes:
        servers: processes to start first, in this order; servers that run already are not among them.
        services: processes to start when the servers are prepared.
        setup: settings of the process that prepares the servers.
        endpoints: addresses, for programs.
        external: names of the servers that run already and are used instead.
        nats_port: of the NATS that is started; 0 where a running one is used.
        port_notes: which standard ports were in use, and which ones are taken instead, in words.
    """

    servers: tuple[ProcessSpec, ...]
    services: tuple[ProcessSpec, ...]
    setup: Settings
    endpoints: Endpoints
    external: tuple[str, ...]
    nats_port: int
    port_notes: tuple[str, ...]


def plan_stack(
    data: DataDir,
    config_file: Path,
    *,
    workers: int = 1,
    environment: Mapping[str, str],
    http_port: int | None = None,
    console_port: int | None = None,
) -> Stack:
    """Chooses ports, makes secrets, copies the config, and lists the processes. Starts nothing.

    All services read the copy: one that is started again has the config that the others have and that the servers were
    prepared for, even if the file has changed by then.

    Args:
        data: the data directory; it must be locked by the caller.
        config_file: the config to copy.
        workers: number of worker processes.
        environment: `BREAKWATER_NATS_URL`, `BREAKWATER_REDIS_URL` and `BREAKWATER_CLICKHOUSE_URL` in it may name
            servers that run already. Each service gets the variables that it needs (`for_service`).
        http_port: of the API; the port of the last run, the standard port or a free one when None.
        console_port: of the console, likewise.

    Raises:
        PortInUseError: `http_port` or `console_port` is in use.
        ConfigError: the config can't be read, or is wrong, or the URL of NATS is.
    """
    text = read_config(config_file)
    config = parse_config(text, source=str(config_file))
    write_private(data.path / IN_FORCE, text)
    external_urls = {name: url for name in SERVERS if (url := environment.get(f"BREAKWATER_{name.upper()}_URL"))}
    worker_names = [f"worker-{number}" for number in range(1, workers + 1)] if workers > 1 else ["worker"]
    processes = [(process, name) for name in SERVICES for process in (worker_names if name == "worker" else [name])]
    servers_and_metrics = [*(name for name in SERVERS if name not in external_urls), *(name for name, _ in processes)]
    standard_ports = {
        name: standard
        for name, asked_for, standard in (
            ("http-port", http_port, HTTP_PORT),
            ("console-port", console_port, CONSOLE_PORT),
        )
        if asked_for is None
    }
    ports = _ports(data, {**dict.fromkeys(servers_and_metrics, 0), **standard_ports})
    http_port = ports["http-port"] if http_port is None else free_port(http_port)
    console_port = ports["console-port"] if console_port is None else free_port(console_port)

    def nats_for(user: str) -> str:
        return external_urls.get("nats") or f"nats://{user}:{data.secret(f'nats-{user}')}@{LOOPBACK}:{ports['nats']}"

    def clickhouse_for(user: str, secret: str) -> str:
        address = f"{LOOPBACK}:{ports.get('clickhouse')}/breakwater"
        return external_urls.get("clickhouse") or f"http://{user}:{data.secret(secret)}@{address}"

    redis_url = external_urls.get("redis") or f"redis://:{data.secret('redis')}@{LOOPBACK}:{ports['redis']}/0"
    reader_url = clickhouse_for("reader", "clickhouse-reader")
    settings: dict[str, Any] = {
        "config": data.path / IN_FORCE,
        "redis_url": redis_url,
        "clickhouse_url": clickhouse_for("breakwater", "clickhouse"),
        # The user of a ClickHouse that runs already may write: only its owner knows one that may not.
        "clickhouse_analyst_url": environment.get("BREAKWATER_CLICKHOUSE_ANALYST_URL")
        if "clickhouse" in external_urls
        else clickhouse_for("analyst", "clickhouse-reader"),
        "http_host": LOOPBACK,
        "http_port": http_port,
        "console_host": LOOPBACK,
        "console_port": console_port,
        "request_url": f"http://{LOOPBACK}:{http_port}",
        "api_keys_file": data.path / "api_keys.json",
        "plane_key": environment.get("BREAKWATER_PLANE_KEY") or data.secret(PLANE_KEY),
    }
    answers = {"request": (http_port, "/readyz"), "console": (console_port, "/healthz")}

    def service_spec(process: str, name: str) -> ProcessSpec:
        alive = data.path / "alive" / process
        service_settings = {
            **settings,
            **({} if name == "console" else {"nats_url": nats_for(name)}),
            **({"clickhouse_url": reader_url} if name in {"alerter", "console"} else {}),
            "metrics_host": LOOPBACK,
            "metrics_port": ports[process],
            "alive_file": alive,
        }
        needed = ("config", "metrics_host", "metrics_port", "alive_file", *SERVICES[name])
        return ProcessSpec(
            name=process,
            argv=(sys.executable, "-m", "breakwater.services", name),
            log_file=data.logs / f"{process}.log",
            ready=http_ready(LOOPBACK, *answers[name]) if name in answers else _file_probe(alive, time.time()),
            env=for_service(environment, variables_of(config, name))
            | {
                f"BREAKWATER_{setting.upper()}": str(service_settings[setting])
                for setting in needed
                if service_settings[setting] is not None
            },
            # A worker lets its calls finish; the config bounds for how long.
            stop_timeout_s=9.0 if name in {"worker", "request"} else 5.0,
            ready_timeout_s=60.0,
            service=name,
        )

    servers: list[ProcessSpec] = []
    if "nats" not in external_urls:
        servers.append(nats_server(data, ports["nats"], config))
    if "redis" not in external_urls:
        servers.append(redis_spec(data.path, ports["redis"], data.secret("redis")))
    if "clickhouse" not in external_urls:
        passwords = data.secret_file("clickhouse"), data.secret_file("clickhouse-reader")
        servers.append(clickhouse_spec(data.path, ports["clickhouse"], "breakwater", *passwords))
    nats_url = nats_for("client")
    try:
        nats = [urlsplit(server) for server in server_urls(nats_url)]
    except ValueError as error:
        raise ConfigError(f"BREAKWATER_NATS_URL: {error}") from None
    nats_user, nats_password = nats[0].username, nats[0].password
    endpoints = Endpoints(
        request_url=settings["request_url"],
        console_url=f"http://{LOOPBACK}:{console_port}",
        nats_url=nats_url,
        nats_server=f"{nats[0].scheme}://{','.join(server.netloc.rpartition('@')[2] for server in nats)}",
        nats_user=nats_user and unquote(nats_user),
        nats_password=nats_password and unquote(nats_password),
        redis_url=redis_url,
        clickhouse_url=reader_url,
        api_key_file=data.secret_file("api-key"),
        config_file=config_file.absolute(),
        data_dir=data.path,
        metrics={process: f"http://{LOOPBACK}:{ports[process]}/metrics" for process, _ in processes},
        pid=os.getpid(),
        started_at=datetime.now(UTC),
    )
    return Stack(
        servers=tuple(servers),
        services=tuple(service_spec(process, name) for process, name in processes),
        setup=Settings(**settings, nats_url=SecretStr(nats_for("setup"))),
        endpoints=endpoints,
        external=tuple(external_urls),
        nats_port=ports.get("nats", 0),
        port_notes=tuple(
            f"Port {standard} was in use: {ports[name]} takes its place and stays; `--{name} {standard}` goes back."
            for name, standard in standard_ports.items()
            if ports[name] != standard
        ),
    )


def nats_server(data: DataDir, port: int, config: Config) -> ProcessSpec:
    """Writes the config of NATS, with the users of a config, and returns the server's process."""
    programs = [program(name, settings.agents) for name, settings in config.programs.items()]
    passwords = {grant.user: data.secret(f"nats-{grant.user}") for grant in (*GRANTS, *programs)}
    return nats_spec(data.path, port, passwords, programs)


def _ports(data: DataDir, standard_ports: Mapping[str, int]) -> dict[str, int]:
    """Takes the ports of the last run, which programs may know.

    Args:
        data: the data directory, which keeps them.
        standard_ports: the ports of the first run, by name; 0 for a free one.

    Returns:
        The ports by name; a free one in place of a port that is in use.
    """
    file = data.path / "ports.json"
    last: dict[str, int] = json.loads(file.read_text()) if file.exists() else {}
    ports = {name: standard_port(last.get(name, port)) for name, port in standard_ports.items()}
    write_private(file, json.dumps(last | ports))
    return ports


def _file_probe(file: Path, planned_at: float) -> Probe:
    """Probes a service without a port: it touches its alive file while it is connected and its loop runs.

    Each probe compares the time with that of the last success, so the file of the run before a restart does not count.
    """
    last_touched_at = planned_at

    async def probe() -> bool:
        nonlocal last_touched_at
        try:
            touched_at = file.stat().st_mtime  # noqa: ASYNC240  one look at a local file
        except FileNotFoundError:
            return False
        if touched_at <= last_touched_at:
            return False
        last_touched_at = touched_at
        return True

    return probe
