"""What a job costs where calls fail, where answers are streamed, and where limits hold: CPU of a whole local plane.

    python -m bench.variants [--jobs 1500] [--in-flight 64] [--rounds 3] [--only NAME ...]

Starts a simulated provider that answers in 120 ms, and a plane of its own (`breakwater up`, ports that are free). Each
variant is an agent; its jobs are published straight to NATS and counted when their results come, as in
`bench.plane`. In every round each variant has its turn; the table has medians. CPU is user and system time of all
processes but the provider, for the jobs and three seconds after them. With one job in flight, calls that succeed are
made to the provider without the plane, too, after each round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import nats

from bench.plane import PROVIDER, cpu_ms, load, redis_commands, url_of_request
from breakwater.kernel.nats.subjects import Stream
from breakwater.local.ports import free_port
from tests.flow.kit import PRICE, USAGE, config_for

SETTLE_S = 3.0
LATENCY_MS = 120
ROLES = ("worker", "nats", "redis", "breaker", "budget", "sink", "alerter", "clickhouse", "request")
UNLIMITED = {"daily_usd": 100_000, "monthly_usd": 1_000_000}
WIDE_BREAKER = {"consecutive_failures": 50, "same_error": "off"}
QUICK_RETRY = {"max_attempts": 5, "base_s": 0.05, "max_delay_s": 0.2}
STORED = (Stream.EVENTS, Stream.RESULTS)


@dataclass(frozen=True)
class Variant:
    """An agent, what its model does, and its jobs."""

    agent: Mapping[str, Any] = field(default_factory=dict[str, Any])
    model: Mapping[str, Any] = field(default_factory=dict[str, Any])
    job: Callable[[int], dict[str, Any]] = lambda _: {}
    """Fields of a job, by a number that no other job has."""


def failing(rate: float) -> Variant:
    """Calls fail at a rate, and are made again at once."""
    faults = [{"rate": rate, "status": 500}]
    return Variant({"breaker": WIDE_BREAKER, "retry": QUICK_RETRY}, {"faults": faults})


PLAIN = "all calls succeed"
VARIANTS = {
    PLAIN: Variant(),
    "10 % fail": failing(0.1),
    "30 % fail": failing(0.3),
    "streamed, 60 tokens": Variant(
        model={"answer": "word " * 60, "stream": {"tokens_per_s": 200}}, job=lambda _: {"stream": True}
    ),
    "hard limits, a day's and a month's": Variant({"budget": {**UNLIMITED, "enforcement": "hard"}}),
    "tasks of five jobs, with a guard": Variant(job=lambda number: {"task_id": f"task-{number // 5}"}),
}


def name_of(variant: str) -> str:
    """Of its agent."""
    return re.sub(r"\W+", "-", variant).strip("-")


async def run_jobs(url: str, name: str, jobs: int, in_flight: int) -> list[float]:
    """Jobs of a variant, and how long they took."""
    first = time.time_ns()
    return await load(url, name_of(name), jobs, in_flight, lambda number: VARIANTS[name].job(first + number))


@contextmanager
def started(command: Sequence[object], directory: Path, log: str) -> Generator[subprocess.Popen[bytes]]:
    """A process that is ended by Ctrl-C."""
    with (directory / log).open("wb") as out:
        process = subprocess.Popen([str(part) for part in command], cwd=directory, stdout=out, stderr=out)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


@contextmanager
def running_plane(directory: Path) -> Generator[dict[str, Any]]:
    """A plane with all variants; its endpoints."""
    port, data = free_port(), directory / "data"
    models = {
        f"sim/{name_of(name)}": {"price": PRICE, "usage": USAGE, "latency_ms": LATENCY_MS, **one.model}
        for name, one in VARIANTS.items()
    }
    agents = {
        name_of(name): {"model": f"sim/{name_of(name)}", "concurrency": 256, "max_tokens": 400, **one.agent}
        for name, one in VARIANTS.items()
    }
    (directory / "script.json").write_text(json.dumps({"models": models}))
    (directory / "breakwater.yaml").write_text(json.dumps(config_for(f"http://127.0.0.1:{port}/v1", agents)))
    provider = [sys.executable, "-m", "breakwater.local.provider", "--port", port, "--script", "script.json"]
    up = [sys.executable, "-m", "breakwater.cli", "up", "--config", "breakwater.yaml", "--data", data]
    with started(provider, directory, "provider.log"), started(up, directory, "up.log") as process:
        while not (data / "endpoints.json").exists():
            if process.poll() is not None:
                sys.exit((directory / "up.log").read_text())
            time.sleep(0.1)
        yield {
            **json.loads((data / "endpoints.json").read_text()),
            "base_url": f"http://127.0.0.1:{port}/v1",
            "request_nats_url": url_of_request(data),
        }


async def stored(url: str) -> Counter[str]:
    """Messages on the streams of events and results, by the kind of their subject."""
    client, found = await nats.connect(url), Counter[str]()
    for stream in STORED:
        info = await client.jetstream().stream_info(stream.value, subjects_filter=">")
        for subject, count in (info.state.subjects or {}).items():
            found[".".join(subject.split(".")[:2])] += count
    await client.close()
    return found


async def direct_ms(base_url: str, name: str, calls: int) -> list[float]:
    """How long calls take that are made one after the other without the plane, on a connection that is kept."""
    body = {"model": name_of(name), "messages": [{"role": "user", "content": "How do I return a parcel?"}]}
    took: list[float] = []
    async with aiohttp.ClientSession() as session:
        for _ in range(calls):
            began = time.perf_counter()
            async with session.post(f"{base_url}/chat/completions", json=body) as response:
                response.raise_for_status()
                await response.read()
            took.append((time.perf_counter() - began) * 1000)
    return took


@dataclass(slots=True)
class Figures:
    """Of one variant, a value for each round."""

    cpu: list[Counter[str]] = field(default_factory=list[Counter[str]])
    commands: list[float] = field(default_factory=list[float])
    messages: list[Counter[str]] = field(default_factory=list[Counter[str]])
    per_s: list[float] = field(default_factory=list[float])
    p50_ms: list[float] = field(default_factory=list[float])

    def row(self, name: str) -> str:
        """A line of the table."""
        shares = {role: statistics.median(one[role] for one in self.cpu) for role in ROLES}
        everything = statistics.median(sum(one.values()) - one[PROVIDER] for one in self.cpu)
        cells = [f"{everything:.1f}", *(f"{shares[role]:.2f}" for role in ROLES)]
        cells += [f"{statistics.median(self.commands):.0f}", f"{statistics.median(self.per_s):.0f}"]
        return f"| {name} | {' | '.join(cells)} | {statistics.median(self.p50_ms):.1f} |"

    def subjects(self) -> str:
        """Messages a job, by the kind of their subject."""
        return ", ".join(f"{name} {count:.2f}" for name, count in sorted(self.messages[-1].items()))


def measure(endpoints: Mapping[str, Any], name: str, options: argparse.Namespace, figures: Figures) -> None:
    """Runs the jobs of a variant once."""
    plane, nats_url, jobs = endpoints["pid"], endpoints["nats_url"], options.jobs
    before, commands = cpu_ms(plane), redis_commands(endpoints["redis_url"])
    messages, began = asyncio.run(stored(nats_url)), time.perf_counter()
    took = asyncio.run(run_jobs(endpoints["request_nats_url"], name, jobs, options.in_flight))
    elapsed = time.perf_counter() - began
    time.sleep(SETTLE_S)
    used = cpu_ms(plane) - before
    figures.cpu.append(Counter({role: ms / jobs for role, ms in used.items()}))
    figures.commands.append((redis_commands(endpoints["redis_url"]) - commands) / jobs)
    more = asyncio.run(stored(nats_url)) - messages
    figures.messages.append(Counter({subject: count / jobs for subject, count in more.items()}))
    figures.per_s.append(jobs / elapsed)
    figures.p50_ms.append(took[len(took) // 2] * 1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1500, help="of each variant in each round (default 1500)")
    parser.add_argument("--in-flight", type=int, default=64, help="at once (default 64)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured (default 3)")
    parser.add_argument("--only", nargs="*", choices=[*VARIANTS], metavar="NAME", help="leave out the rest")
    options = parser.parse_args()
    found = {name: Figures() for name in options.only or VARIANTS}
    direct: list[float] = []
    with tempfile.TemporaryDirectory() as directory, running_plane(Path(directory)) as endpoints:
        for name in found:  # what is imported and cached at the first job belongs to none
            asyncio.run(run_jobs(endpoints["request_nats_url"], name, 50, options.in_flight))
        for number in range(options.rounds):
            for name, figures in found.items():
                print(f"\rround {number + 1}: {name:40}", end="", file=sys.stderr, flush=True)
                measure(endpoints, name, options, figures)
            if options.in_flight == 1 and PLAIN in found:
                direct += asyncio.run(direct_ms(endpoints["base_url"], PLAIN, options.jobs))
    print("\r", end="", file=sys.stderr)
    print(f"| | ms of CPU a job | {' | '.join(ROLES)} | Redis commands a job | jobs a second | p50 ms |")
    print("|---" * (len(ROLES) + 5) + "|")
    for name, figures in found.items():
        print(figures.row(name))
    if direct:
        print(f"\nWithout the plane: p50 {statistics.median(direct):.1f} ms")
    for name, figures in found.items():
        print(f"\nStored messages a job, {name}: {figures.subjects()}")


if __name__ == "__main__":
    main()
