"""What more workers, and more of each consumer, give on this machine, and what a job under way takes.

    python -m bench.scale [--jobs 4000] [--in-flight 2000] [--latency-s 2]

For each line a plane is started anew, on servers of its own: so many workers, and so many of breaker, budget, alerter
and sink. The simulated provider, which runs in this process with the client, answers after `--latency-s`. Memory is PSS
of the workers, before the jobs and at its most while they are under way; "calls at once" is the most that the provider
saw. CPU is of all processes but this one, for a job; "busiest" is the process that used most of one core while the jobs
ran, which is the next limit where cores are free.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.plane import load
from breakwater.kernel.clickhouse.client import connect
from breakwater.records.migrations import migrate
from tests.flow.kit import Plane, model, running_plane
from tests.server_sources import RunningServer, embedded_servers

CONSUMERS = ("breaker", "budget", "alerter", "sink")
STEPS = ((1, 1), (2, 1), (4, 1), (4, 2))
LOOK_S = 0.25


@dataclass(slots=True)
class Seen:
    """What was seen while the jobs ran."""

    calls: int = 0
    memory_mb: float = 0.0


@contextmanager
def servers() -> Generator[dict[str, RunningServer]]:
    """Empty ones, with their data."""
    with embedded_servers() as (started, _):
        yield {"nats": started.nats(), "redis": started.redis(), "clickhouse": started.clickhouse()}


def memory_mb(processes: list[psutil.Process]) -> float:
    """Of processes together: a page that they share counts once."""
    return sum(process.memory_full_info().pss for process in processes) / 1e6


def cpu_s(processes: dict[str, psutil.Process]) -> Counter[str]:
    """So far, by process."""
    times = {name: process.cpu_times() for name, process in processes.items()}
    return Counter({name: of.user + of.system for name, of in times.items()})  # pyright: ignore[reportArgumentType]


async def look(plane: Plane, workers: list[psutil.Process], seen: Seen) -> None:
    """Keeps the most that is seen, until it is cancelled."""
    while True:
        seen.calls = max(seen.calls, plane.sim.ledger.totals.in_progress)
        seen.memory_mb = max(seen.memory_mb, memory_mb(workers))
        await asyncio.sleep(LOOK_S)


async def measure(workers: int, consumers: int, options: argparse.Namespace) -> str:
    """Runs the jobs on a new plane. A line of the table."""
    with servers() as of_plane, tempfile.TemporaryDirectory() as directory:
        clickhouse = f"{of_plane['clickhouse'].url.rstrip('/')}/scale"
        analytics = connect(clickhouse)
        await migrate(analytics)
        await analytics.close()
        plane = running_plane(
            Path(directory),
            nats_url=of_plane["nats"].url,
            redis_url=of_plane["redis"].url,
            script={"models": {"sim/m": model(latency_ms=options.latency_s * 1000)}},
            agents={"writer": {"model": "sim/m", "concurrency": options.in_flight, "timeout_s": 60}},
            services=(),
            environment={"BREAKWATER_CLICKHOUSE_URL": clickhouse},
        )
        async with plane as started:
            for service, count in (("worker", workers), *((name, consumers) for name in CONSUMERS)):
                for number in range(count):
                    started.start(service, f"{service}-{number + 1}")
            for name in started.processes:
                await started.ready(name)
            await load(of_plane["nats"].url, "writer", 100, 50)
            processes = {name: psutil.Process(one.pid) for name, one in started.processes.items()}
            processes |= {name: psutil.Process(server.pid) for name, server in of_plane.items()}
            of_workers = [process for name, process in processes.items() if name.startswith("worker")]
            seen, rested_mb, before = Seen(), memory_mb(of_workers), cpu_s(processes)
            looking, began = asyncio.create_task(look(started, of_workers, seen)), time.perf_counter()
            await load(of_plane["nats"].url, "writer", options.jobs, options.in_flight)
            elapsed, used = time.perf_counter() - began, cpu_s(processes)
            looking.cancel()
    used.subtract(before)
    [(busiest, most)] = used.most_common(1)
    kb = (seen.memory_mb - rested_mb) * 1000 / max(1, seen.calls)
    cpu_ms = sum(used.values()) * 1000 / options.jobs
    cells = (
        f"{options.jobs / elapsed:.0f}",
        f"{seen.calls:,}",
        f"{rested_mb:.0f}",
        f"{seen.memory_mb:.0f}",
        f"{kb:.0f}",
    )
    return f"| {workers} | {consumers} | {' | '.join(cells)} | {cpu_ms:.1f} | {busiest} {most / elapsed:.0%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=4000, help="of each line (default 4000)")
    parser.add_argument("--in-flight", type=int, default=2000, help="at once, at most (default 2000)")
    parser.add_argument("--latency-s", type=float, default=2.0, help="of the provider (default 2)")
    options = parser.parse_args()
    titles = (
        "jobs a second",
        "calls at once",
        "MB of the workers",
        "at most",
        "kB a call under way",
        "ms of CPU a job",
    )
    print(f"| workers | of each consumer | {' | '.join(titles)} | busiest |")
    print("|---" * (len(titles) + 3) + "|")
    for workers, consumers in STEPS:
        print(asyncio.run(measure(workers, consumers, options)), flush=True)


if __name__ == "__main__":
    main()
