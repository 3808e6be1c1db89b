"""CPU of the worker for one job, alone in its process.

    python -m bench.worker [--jobs 500] [--in-flight 64] [--rounds 5]

Starts NATS, Redis and the simulated provider, and runs the worker in this thread: an agent with a breaker, budgets, a
rate limit and a retry budget, one model, one call a job, as `trace_job` does. Measured is the CPU of this thread, with
the little that publishing the jobs takes; of several rounds the best, as whatever else runs only adds to it. Unlike
`bench.plane` it gives the same figure on a busy machine, within some percent.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

import nats

from bench.trace_job import ProviderInAThread, running_worker
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.subjects import Header
from tests.server_sources import embedded_servers


async def round_of(client: Any, name: str, jobs: int, in_flight: int, agent: str = "writer") -> float:
    """Milliseconds of CPU a job. The name is the round's alone."""
    jetstream, slots, done = client.jetstream(), asyncio.Semaphore(in_flight), asyncio.Event()
    left = jobs

    async def on_result(_: Any) -> None:
        nonlocal left
        left -= 1
        slots.release()
        if not left:
            done.set()

    subscription = await client.subscribe("bw.results.*", cb=on_result)
    began = time.thread_time()
    for index in range(jobs):
        await slots.acquire()
        job = {"agent": agent, "job_id": f"job-{name}-{index}", "prompt": "How do I return a parcel?"}
        headers = {Header.UNIQUE_ID.value: "1"}
        await jetstream.publish(subjects.job(agent), json.dumps(job).encode(), timeout=30, headers=headers)
    await done.wait()
    elapsed = time.thread_time() - began
    await subscription.unsubscribe()
    return elapsed / jobs * 1000


async def rounds(options: argparse.Namespace, directory: Path, nats_url: str, *urls: str) -> list[float]:
    """One figure for each round, after one that warms up."""
    client = await nats.connect(nats_url)
    async with running_worker(directory, nats_url, *urls):
        figures = [
            await round_of(client, str(number), options.jobs, options.in_flight) for number in range(options.rounds + 1)
        ]
    await client.close()
    return figures[1:]


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with embedded_servers() as (servers, directory), ProviderInAThread() as provider:
        urls = (servers.nats().url, servers.redis().url, provider.url)
        found = sorted(asyncio.run(rounds(options, directory, *urls)))
    every = ", ".join(f"{ms:.2f}" for ms in found)
    print(f"{found[0]:.2f} ms of CPU a job at {options.in_flight} in flight (all rounds: {every})")


if __name__ == "__main__":
    main()
