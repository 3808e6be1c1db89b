"""What streaming costs: CPU of every process for a chunk, time to first token beside a direct call, and memory.

    python -m bench.streams [--streams 40] [--in-flight 20] [--tokens 500] [--per-s 50] [--memory]

Starts NATS, Redis and a worker, request, breaker and budget as processes; the simulated provider runs in this one, with
the client. CPU is user and system time of those processes, of many answers of `--tokens` chunks less that of as many
answers of one: what remains is that of the chunks. The time to first token is measured one call at a time, through the
plane and directly in turn. `--memory` runs 200 streams at once, three times over, and prints what the processes have.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import psutil

from bench.plane import print_shares
from breakwater.identity.api_keys import create_key
from breakwater.local.ports import free_port
from tests.flow.kit import Plane, model, running_plane
from tests.server_sources import RunningServer, embedded_servers

SERVICES = ("worker", "request", "breaker", "budget")
LATENCY_MS = 20
AT_ONCE = 200


class MeasuredPlane:
    """The processes of a running plane, and of its servers."""

    def __init__(self, plane: Plane, servers: dict[str, RunningServer]) -> None:
        pids = {name: process.pid for name, process in plane.processes.items()}
        pids |= {name: server.pid for name, server in servers.items()}
        self._processes = {name: psutil.Process(pid) for name, pid in pids.items()}

    def cpu_ms(self) -> Counter[str]:
        """So far, by process."""
        times = {name: process.cpu_times() for name, process in self._processes.items()}
        return Counter({name: round((of.user + of.system) * 1000) for name, of in times.items()})

    def memory_mb(self) -> dict[str, float]:
        """Resident, by process."""
        return {name: process.memory_info().rss / 1e6 for name, process in self._processes.items()}


class Streams(MeasuredPlane):
    """A running plane, and a client of it."""

    def __init__(self, plane: Plane, servers: dict[str, RunningServer], http: aiohttp.ClientSession, url: str) -> None:
        super().__init__(plane, servers)
        self._http = http
        self._url = url
        self._provider_url = plane.sim.url

    async def stream(self, agent: str, *, direct: bool = False) -> tuple[float, int]:
        """One answer: seconds until its first content, and how many chunks it has."""
        base, name = (self._provider_url, f"sim/{agent}") if direct else (self._url, agent)
        ask = {"model": name, "messages": [{"role": "user", "content": "Count."}], "stream": True}
        began, first, chunks = time.perf_counter(), 0.0, 0
        async with self._http.post(f"{base}/chat/completions", json=ask) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if b'"content":"' in line and b'"content":""' not in line:  # the first one only says who speaks
                    chunks += 1
                    first = first or time.perf_counter() - began
        return first, chunks

    async def load(self, agent: str, streams: int, in_flight: int) -> int:
        """So many answers. Returns how many chunks they had."""
        slots = asyncio.Semaphore(in_flight)

        async def one() -> int:
            async with slots:
                return (await self.stream(agent))[1]

        return sum(await asyncio.gather(*(one() for _ in range(streams))))


@asynccontextmanager
async def running(
    directory: Path, servers: dict[str, RunningServer], tokens: int, per_s: float
) -> AsyncGenerator[Streams]:
    """The plane, with an agent whose answers are long, and one whose answers have one token."""
    keys, port = directory / "keys.json", free_port()
    key = create_key(keys, "bench")
    agent = {"max_tokens": 2 * tokens, "concurrency": 2 * AT_ONCE, "timeout_s": 60, "total_timeout_s": 600}
    pace = {"tokens_per_s": per_s}
    models = {
        f"sim/{name}": model(latency_ms=LATENCY_MS, answer="word " * count, stream=pace)
        for name, count in (("long", tokens), ("short", 1))
    }
    plane = running_plane(
        directory,
        nats_url=servers["nats"].url,
        redis_url=servers["redis"].url,
        script={"models": models},
        agents={name.removeprefix("sim/"): {"model": name, **agent} for name in models},
        services=SERVICES,
        environment={"BREAKWATER_HTTP_PORT": str(port), "BREAKWATER_API_KEYS_FILE": str(keys)},
    )
    http = aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {key}"},
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
    )
    async with plane as started, http:
        for name in SERVICES:
            await started.ready(name)
        yield Streams(started, servers, http, f"http://127.0.0.1:{port}/v1")


async def measure(options: argparse.Namespace, directory: Path, servers: dict[str, RunningServer]) -> None:
    """Prints the figures."""
    async with running(directory, servers, options.tokens, options.per_s) as plane:
        await plane.load("short", 10, 5)
        await plane.load("long", options.in_flight, options.in_flight)
        if options.memory:
            for _ in range(3):
                await plane.load("long", AT_ONCE, AT_ONCE)
                print(", ".join(f"{name} {mb:.0f} MB" for name, mb in plane.memory_mb().items()))
            return
        before = plane.cpu_ms()
        few = await plane.load("short", options.streams, options.in_flight)
        between = plane.cpu_ms()
        many = await plane.load("long", options.streams, options.in_flight)
        used = plane.cpu_ms()
        used.subtract(between)
        print_shares(used, options.streams, f"ms of CPU for an answer of {many / options.streams:.0f} chunks")
        between.subtract(before)
        used.subtract(between)
        print_shares(Counter({name: ms * 1000 for name, ms in used.items()}), many - few, "us of CPU a chunk")
        times: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(options.calls):
            for direct, took in times.items():
                took.append((await plane.stream("short", direct=direct))[0] * 1000)
        for direct, took in times.items():
            p99 = sorted(took)[len(took) * 99 // 100]
            where = "directly" if direct else "through the plane"
            print(f"first token {where}: median {statistics.median(took):.1f} ms, p99 {p99:.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=40)
    parser.add_argument("--in-flight", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--per-s", type=float, default=50.0)
    parser.add_argument("--calls", type=int, default=200, help="for the time to first token, each way (default 200)")
    parser.add_argument("--memory", action="store_true")
    options = parser.parse_args()
    with embedded_servers() as (servers, directory):
        started = {"nats": servers.nats(), "redis": servers.redis()}
        asyncio.run(measure(options, directory, started))


if __name__ == "__main__":
    main()
