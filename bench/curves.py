"""The curves of docs/scaling.md, measured on this machine: speed and latency, and what messages and rows take.

    python -m bench.curves [--seconds 6] [--picture docs/images/scaling.svg]

Starts local stacks, and a provider that answers after 100 ms. For one worker and for two, jobs are published to NATS
with 1 to 256 in flight, for `--seconds` each; for one worker, prompts of 1 to 1,024 KB follow, 64 in flight. Then
`--jobs` more of 2 KB go through a new stack, and after each eighth of them memory and disks are read. It takes about
six minutes on quiet cores. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import uvloop

from bench.chart import Panel, small_multiples
from bench.local_stack import running_stack
from bench.meters import Meters, connected, running_provider
from bench.plane import load, url_of_request
from tests.flow.kit import config_for, model

IN_FLIGHT = [2**power for power in range(9)]
PROMPT_KB = [4**power for power in range(6)]
WORKERS = (1, 2)
LATENCY_MS = 100
SETTLE_S = 4.0
STEPS = 8
Curve = list[tuple[float, float]]


@asynccontextmanager
async def stack(workers: int = 1) -> AsyncGenerator[dict[str, Any]]:
    """Runs a stack with one agent, warmed up. Yields its endpoints."""
    async with running_provider({"models": {"sim/m": model(latency_ms=LATENCY_MS, answer="word " * 100)}}) as provider:
        agent = {"model": "sim/m", "concurrency": 512, "max_tokens": 200}
        # A prompt of a megabyte has more tokens than a task may use by default.
        config = config_for(f"{provider}/v1", {"writer": {**agent, "guard": {"max_tokens": "off"}}})
        with tempfile.TemporaryDirectory(prefix="bench-curves-") as directory:
            async with running_stack(config, Path(directory), workers) as endpoints:
                await load(url_of_request(Path(endpoints["data_dir"])), "writer", 200, 50)
                yield endpoints


async def measured(endpoints: dict[str, Any], in_flight: int, seconds: float, prompt_kb: int = 1) -> dict[str, float]:
    """Jobs a second with so many in flight, and quantiles of their durations in ms."""
    url, fields = url_of_request(Path(endpoints["data_dir"])), {"prompt": text_of(prompt_kb)}
    jobs, took, elapsed = 2 * in_flight, list[float](), 1.0
    for _ in range(2):  # the first few tell how many take about so long
        begun = time.perf_counter()
        took = await load(url, "writer", jobs, in_flight, lambda _: fields)
        elapsed = time.perf_counter() - begun
        jobs = max(4 * in_flight, round(seconds * jobs / elapsed))
    return {
        "per_s": len(took) / elapsed,
        "p50": 1000 * took[len(took) // 2],
        "p95": 1000 * took[len(took) * 95 // 100],
    }


def text_of(kb: int) -> str:
    """A text of words that compress as prose does."""
    chance = random.Random(kb)
    letters = "etaoinshrdlucm"
    words = ["".join(chance.choices(letters, k=chance.randint(2, 9))) for _ in range(2_000)]
    return " ".join(chance.choices(words, k=200 * kb))[: 1_000 * kb]


async def speeds(seconds: float) -> tuple[dict[str, Curve], dict[str, Curve], dict[str, Curve], dict[str, Curve]]:
    """Speed and latency by jobs in flight, and by the size of prompts."""
    speed: dict[str, Curve] = {}
    latency: dict[str, Curve] = {}
    speed_by_size: dict[str, Curve] = {"1 worker": []}
    latency_by_size: dict[str, Curve] = {"p50": [], "p95": []}
    for workers in WORKERS:
        label = f"{workers} worker{'s' if workers > 1 else ''}"
        async with stack(workers) as endpoints:
            for in_flight in IN_FLIGHT:
                figures = await measured(endpoints, in_flight, seconds)
                print(label, in_flight, json.dumps(figures), flush=True)
                speed.setdefault(label, []).append((in_flight, figures["per_s"]))
                for name in ("p50", "p95"):
                    latency.setdefault(f"{name} ({workers})", []).append((in_flight, figures[name]))
            for kb in PROMPT_KB if workers == 1 else ():
                figures = await measured(endpoints, 64, seconds, kb)
                print(f"prompts of {kb} KB", json.dumps(figures), flush=True)
                speed_by_size["1 worker"].append((kb, figures["per_s"]))
                for name, curve in latency_by_size.items():
                    curve.append((kb, figures[name]))
    return speed, latency, speed_by_size, latency_by_size


async def sizes(jobs: int) -> list[tuple[float, dict[str, float]]]:
    """The meters after each eighth of so many jobs."""
    readings: list[tuple[float, dict[str, float]]] = []
    async with stack() as endpoints, connected(Path(endpoints["data_dir"]), "setup") as client:
        meters = Meters(endpoints, client.jetstream(timeout=30))
        texts = [{"prompt": text_of(2) + f" {number}"} for number in range(200)]
        for number in range(STEPS + 1):
            if number:
                url = url_of_request(Path(endpoints["data_dir"]))
                await load(url, "writer", jobs // STEPS, 128, lambda number: texts[number % 200])
                await asyncio.sleep(SETTLE_S)
            readings.append((number * jobs / STEPS, await meters.read()))
            print(number, json.dumps(readings[-1]), flush=True)
        await meters.close()
    return readings


def drawn(by_speed: Sequence[dict[str, Curve]], readings: Sequence[tuple[float, dict[str, float]]]) -> str:
    """Returns the picture as SVG."""
    speed, latency, speed_by_size, latency_by_size = by_speed

    def of_readings(**names: str) -> dict[str, Curve]:
        return {label: [(done, values[name]) for done, values in readings] for label, name in names.items()}

    panels = (
        Panel("jobs a second, by jobs in flight", speed, "job", logarithmic=True),
        Panel("latency, ms, by jobs in flight (and workers)", latency, "job", logarithmic=True),
        Panel("jobs a second, by KB of the prompt", speed_by_size, "KB", logarithmic=True),
        Panel("latency of a job, ms, by KB of the prompt", latency_by_size, "KB", logarithmic=True),
        Panel(
            "memory of servers, MB, by jobs", of_readings(NATS="memory.nats", ClickHouse="memory.clickhouse"), "jobs"
        ),
        Panel("disk, MB, by jobs", of_readings(NATS="disk.nats", ClickHouse="disk.clickhouse"), "jobs"),
    )
    return small_multiples(f"A provider that answers after {LATENCY_MS} ms, on two cores", panels)


def per_unit(readings: Sequence[tuple[float, dict[str, float]]]) -> str:
    """A line of what each message and each row has taken, from the second step on."""
    first, last = readings[1][1], readings[-1][1]
    grown = {name: last[name] - first[name] for name in first.keys() & last.keys()}
    steps = [later[1]["memory.nats"] - earlier[1]["memory.nats"] for earlier, later in pairwise(readings[1:])]
    return (
        f"NATS: {grown['memory.nats'] * 1e6 / grown['messages.all']:.0f} bytes of memory a message "
        f"(steps of {min(steps):.1f} to {max(steps):.1f} MB), {grown['disk.nats'] * 1e6 / grown['messages.all']:.0f} "
        f"of disk; ClickHouse: {grown['parts.mb'] * 1e6 / grown['rows.executions']:.0f} bytes a job"
    )


async def run(options: argparse.Namespace) -> None:
    """Measures, prints, and draws."""
    by_speed, readings = await speeds(options.seconds), await sizes(options.jobs)
    print(per_unit(readings))
    if options.picture is not None:
        options.picture.write_text(drawn(by_speed, readings))


def main() -> None:
    """Reads the options, and runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each point (default 6)")
    parser.add_argument("--jobs", type=int, default=40_000, help="of the curves of memory and disks (default 40000)")
    parser.add_argument("--picture", type=Path, help="SVG to draw")
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
