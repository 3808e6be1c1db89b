"""Memory of every process of a running stack, while many jobs go through it.

    breakwater up --config examples/breakwater.yaml --simulate --data /tmp/bench     # in one terminal
    python -m bench.memory /tmp/bench --jobs 100000 --per-s 50                 # in another

Jobs are published straight to NATS, as in `bench.plane`. A line is printed for each tenth of them: the memory of
each process (PSS: a page that processes share is divided among them) in MB.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
import uuid
from collections import Counter
from pathlib import Path

import nats
import psutil

from bench.plane import publish_job, role_of

IN_FLIGHT = 100


def memory_mb(supervisor: int) -> Counter[str]:
    """Memory of a plane's processes, by role."""
    used: Counter[str] = Counter()
    plane = psutil.Process(supervisor)
    for process in (plane, *plane.children(recursive=True)):
        used[role_of(process)] += round(process.memory_full_info().pss / 1e6)
    return used


async def load(url: str, agent: str, jobs: int, per_s: float, supervisor: int) -> None:
    """Publishes the jobs at that pace, as long as few of them are under way."""
    client = await nats.connect(url)
    jetstream = client.jetstream()
    under_way, free = 0, asyncio.Event()

    async def on_result(_: object) -> None:
        nonlocal under_way
        under_way -= 1
        free.set()

    await client.subscribe("bw.results.*", cb=on_result)
    begun, roles = time.monotonic(), list(memory_mb(supervisor))
    print("| jobs | " + " | ".join(roles) + " |\n|" + "---|" * (len(roles) + 1))
    for number in range(jobs + 1):
        if number % (jobs // 10) == 0:
            used = memory_mb(supervisor)
            print(f"| {number:,} | " + " | ".join(str(used[role]) for role in roles) + " |", flush=True)
        await asyncio.sleep(max(0.0, begun + number / per_s - time.monotonic()))
        while under_way >= IN_FLIGHT:
            free.clear()
            await free.wait()
        under_way += 1
        await publish_job(jetstream, agent, uuid.uuid4().hex)
    await client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--agent", default="support-triage")
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--per-s", type=float, default=50.0)
    options = parser.parse_args()
    endpoints = json.loads((options.data / "endpoints.json").read_text())
    asyncio.run(load(endpoints["nats_url"], options.agent, options.jobs, options.per_s, endpoints["pid"]))


if __name__ == "__main__":
    main()
