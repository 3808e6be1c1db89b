"""What a request costs here and in other gateways, on one machine, with one provider, in one run: `make bench-peers`.

    python -m bench.peers [--requests 2000] [--in-flight 32] [--latency-ms 100] [--only NAME ...]

Each gateway is installed from its registry in the version pinned beside this file, started alone with one worker, and
asked by the same client for chat completions of the same model. CPU is user and system time of all its processes for
the requests and five seconds after them, for what lags behind the answers. "directly" is the client and the provider
with nothing in between. TensorZero is a library here, so its figure includes the program that calls it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import aiohttp
import psutil

from breakwater.local.ports import free_port
from tests.environments import ROOT, install_node, install_python

HERE = Path(__file__).parent
INSTALLED = HERE / ".installed"
PROGRAMS = Path(sys.executable).parent
START_S = 180
SETTLE_S = 5
WARM_UP = 200
KEY = "sk-not-a-real-key"


@dataclass(frozen=True, slots=True)
class Target:
    """Where a gateway takes requests."""

    url: str
    """With `/v1`."""
    model: str
    headers: Mapping[str, str]
    process: int | None
    """The parent of all its processes."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured."""

    took_s: list[float]
    cpu_ms: float | None
    wall_s: float

    def row(self, name: str, keeps: str, direct_s: float) -> str:
        """A line of the table. Times are in ms."""
        p50, p99 = statistics.median(self.took_s), sorted(self.took_s)[len(self.took_s) * 99 // 100]
        cpu = "" if self.cpu_ms is None else f"{self.cpu_ms / len(self.took_s):.2f}"
        cells = (f"{len(self.took_s) / self.wall_s:.0f}", f"{p50 * 1000:.0f}", f"{p99 * 1000:.0f}")
        return f"| {name} | {cpu} | {' | '.join(cells)} | {(p50 - direct_s) * 1000:+.0f} | {keeps} |"


@contextmanager
def _running(
    command: Sequence[object], directory: Path, ready: str, env: Mapping[str, str] | None = None
) -> Generator[int]:
    """A process, from the moment at which a URL answers; the number of the process."""
    with (directory / "output.log").open("wb") as log:
        process = subprocess.Popen(
            [str(part) for part in command], cwd=directory, env={**os.environ, **(env or {})}, stdout=log, stderr=log
        )
    try:
        asyncio.run(_answering(ready, process, directory / "output.log"))
        yield process.pid
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


async def _answering(url: str, process: subprocess.Popen[bytes], log: Path | None) -> None:
    deadline = time.monotonic() + START_S
    async with aiohttp.ClientSession() as http:
        while True:
            with suppress(aiohttp.ClientError):
                async with http.get(url):
                    return
            if process.poll() is not None or time.monotonic() > deadline:
                said = "" if log is None else log.read_text(errors="replace")[-4000:]  # noqa: ASYNC240  the end is near
                sys.exit(f"{process.args} does not answer at {url}:\n{said}")
            await asyncio.sleep(0.2)


@contextmanager
def breakwater(upstream: str, directory: Path) -> Generator[Target]:
    """The whole local plane, with a breaker, a guard and two hard caps."""
    data, port = directory / "data", free_port()
    config = {
        "providers": {"upstream": {"base_url": upstream, "api_key": {"env": "OPENAI_API_KEY"}}},
        "models": {"upstream/gpt-4o-mini": {"price": {"input_usd_per_mtok": "0.15", "output_usd_per_mtok": "0.60"}}},
        "budgets": {"global": {"daily_usd": 1000, "enforcement": "hard"}},
        "agents": {
            "peer": {
                "model": "upstream/gpt-4o-mini",
                "max_tokens": 100,
                "concurrency": 256,
                "budget": {"daily_usd": 1000, "enforcement": "hard"},
            }
        },
    }
    (directory / "breakwater.yaml").write_text(json.dumps(config))
    up = [PROGRAMS / "breakwater", "up", "--config", "breakwater.yaml", "--data", data, "--http-port", port]
    with _running(up, directory, f"http://127.0.0.1:{port}/health/ready", {"OPENAI_API_KEY": KEY}) as process:
        while not (data / "endpoints.json").exists():
            time.sleep(0.1)
        key = (data / "secrets" / "api-key").read_text().strip()
        yield Target(f"http://127.0.0.1:{port}/v1", "peer", {"Authorization": f"Bearer {key}"}, process)


@contextmanager
def litellm(upstream: str, directory: Path) -> Generator[Target]:
    """The proxy without a database: no record of spend."""
    port = free_port()
    model = {"model": "openai/gpt-4o-mini", "api_base": upstream, "api_key": KEY}
    config = {"model_list": [{"model_name": "gpt-4o-mini", "litellm_params": model}]}
    (directory / "config.yaml").write_text(json.dumps(config))
    proxy = INSTALLED / "litellm" / "bin" / "litellm"
    command = [proxy, "--config", "config.yaml", "--host", "127.0.0.1", "--port", port, "--telemetry", "False"]
    key = f"sk-{secrets.token_hex(32)}"
    env = {
        "LITELLM_MASTER_KEY": key,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_LOG": "ERROR",
        "LITELLM_MODE": "PRODUCTION",
    }
    with _running(command, directory, f"http://127.0.0.1:{port}/health/liveliness", env) as process:
        yield Target(f"http://127.0.0.1:{port}/v1", "gpt-4o-mini", {"Authorization": f"Bearer {key}"}, process)


@contextmanager
def portkey(upstream: str, directory: Path) -> Generator[Target]:
    """The gateway, told by headers where to go."""
    port = free_port()
    server = HERE / "node" / "node_modules" / "@portkey-ai" / "gateway" / "build" / "start-server.js"
    headers = {
        "Authorization": f"Bearer {KEY}",
        "x-portkey-provider": "openai",
        "x-portkey-custom-host": upstream,
    }
    command = ["node", server, f"--port={port}", "--headless"]
    env = {"TRUSTED_CUSTOM_HOSTS": "127.0.0.1,localhost"}
    with _running(command, directory, f"http://127.0.0.1:{port}/", env) as process:
        yield Target(f"http://127.0.0.1:{port}/v1", "gpt-4o-mini", headers, process)


@contextmanager
def direct(upstream: str, directory: Path) -> Generator[Target]:
    """Nothing in between."""
    yield Target(upstream, "gpt-4o-mini", {}, None)


async def load(target: Target, requests: int, in_flight: int) -> list[float]:
    """Asks so often. Seconds of each."""
    slots = asyncio.Semaphore(in_flight)
    ask = {"model": target.model, "messages": [{"role": "user", "content": "How do I return a parcel?"}]}
    client = aiohttp.ClientSession(headers=dict(target.headers), connector=aiohttp.TCPConnector(limit=0))

    async def one() -> float:
        async with slots:
            began = time.perf_counter()
            async with client.post(f"{target.url}/chat/completions", json=ask) as response:
                answer = await response.json()
                if response.status != HTTPStatus.OK or not answer["choices"][0]["message"]["content"]:
                    sys.exit(f"{target.url} answers {response.status}: {answer}")
            return time.perf_counter() - began

    async with client:
        return await asyncio.gather(*(one() for _ in range(requests)))


def cpu_ms(process: int | None) -> float | None:
    """Of a process and all that it has started, so far."""
    if process is None:
        return None
    parent = psutil.Process(process)
    times = [one.cpu_times() for one in (parent, *parent.children(recursive=True))]
    return sum(of.user + of.system for of in times) * 1000


def measured(target: Target, requests: int, in_flight: int) -> Figures:
    """Runs the load, and reads the clocks around it."""
    asyncio.run(load(target, WARM_UP, in_flight))
    time.sleep(SETTLE_S)
    before, began = cpu_ms(target.process), time.perf_counter()
    took_s = asyncio.run(load(target, requests, in_flight))
    wall_s = time.perf_counter() - began
    time.sleep(SETTLE_S)
    after = cpu_ms(target.process)
    return Figures(took_s, None if before is None or after is None else after - before, wall_s)


def embedded_tensorzero(upstream: str, requests: int, in_flight: int) -> Figures:
    """Runs its program, which measures itself."""
    program = (INSTALLED / "tensorzero" / "bin" / "python", HERE / "with_tensorzero.py")
    command = [*map(str, program), upstream, str(WARM_UP), str(requests), str(in_flight)]
    env = {**os.environ, "OPENAI_API_KEY": KEY}
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        sys.exit(f"TensorZero's program failed:\n{ran.stderr[-4000:]}")
    return Figures(**json.loads(ran.stdout.splitlines()[-1]))


NOTHING, EVERYTHING = "nothing", "the job, each attempt, the answer, spend"
GATEWAYS: Mapping[str, tuple[Callable[[str, Path], AbstractContextManager[Target]], str]] = {
    "directly": (direct, NOTHING),
    "Breakwater": (breakwater, EVERYTHING),
    "LiteLLM's proxy": (litellm, NOTHING),
    "Portkey's gateway": (portkey, NOTHING),
}
TENSORZERO = "TensorZero, embedded"


def version(name: str) -> str:
    """With the version that is pinned."""
    if name == "Portkey's gateway":
        return json.loads((HERE / "node" / "package.json").read_text())["dependencies"]["@portkey-ai/gateway"]
    for package in ("litellm", "tensorzero"):
        if package in name.lower():
            pins = (HERE / f"{package}.txt").read_text()
            return next(line.split("==")[1].split()[0] for line in pins.splitlines() if line.startswith(f"{package}=="))
    return ""


@contextmanager
def provider(latency_ms: float) -> Generator[str]:
    """The upstream's URL, with `/v1`."""
    port = free_port()
    command = [sys.executable, "-m", "bench.peers.upstream", str(port), str(latency_ms)]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        asyncio.run(_answering(f"http://127.0.0.1:{port}/", process, None))
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.kill()
        process.wait()


def main() -> None:
    """Installs, measures, and prints a row for each as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000, help="to each gateway (default 2000)")
    parser.add_argument("--in-flight", type=int, default=32, help="at once (default 32)")
    parser.add_argument("--latency-ms", type=float, default=100.0, help="of the provider (default 100)")
    parser.add_argument("--only", nargs="*", choices=[*GATEWAYS, TENSORZERO], metavar="NAME", help="leave out the rest")
    options = parser.parse_args()
    wanted = {"directly", *(options.only or (*GATEWAYS, TENSORZERO))}
    for package in ("litellm", "tensorzero"):
        if any(package in name.lower() for name in wanted):
            install_python(HERE / f"{package}.txt", INSTALLED / package)
    if "Portkey's gateway" in wanted:
        install_node(HERE / "node")
    print("| | CPU ms a request | requests a second | p50 ms | p99 ms | p50 added ms | what it keeps |")
    print("|---|---|---|---|---|---|---|")
    direct_s = 0.0
    with provider(options.latency_ms) as upstream:
        for name, (start, keeps) in GATEWAYS.items():
            if name not in wanted:
                continue
            with tempfile.TemporaryDirectory() as directory, start(upstream, Path(directory)) as target:
                figures = measured(target, options.requests, options.in_flight)
            direct_s = direct_s or statistics.median(figures.took_s)
            print(figures.row(f"{name} {version(name)}".strip(), keeps, direct_s), flush=True)
        if TENSORZERO in wanted:
            figures = embedded_tensorzero(upstream, options.requests, options.in_flight)
            print(figures.row(f"{TENSORZERO} {version(TENSORZERO)}", NOTHING, direct_s))


if __name__ == "__main__":
    main()
