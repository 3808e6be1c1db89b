"""CPU of every process of a running stack for one job, and how long a job takes.

    breakwater up --config examples/breakwater.yaml --simulate --data /tmp/bench     # in one terminal
    python -m tests.bench.plane /tmp/bench --jobs 3000 --in-flight 64                # in another, on a quiet machine

Jobs are published straight to NATS for one agent and counted when their results come; the simulated provider answers in
about 120 ms. CPU is user and system time from /proc, so this runs on Linux only. The provider's own share is left out
of the sum.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
import uuid
from pathlib import Path
from typing import Any

import nats

from breakwater.contracts import subjects
from breakwater.contracts.subjects import Header

TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")
NAMES = {
    "services request": "request", "services worker": "worker", "services breaker": "breaker",
    "services budget": "budget", "services alerter": "alerter", "services sink": "sink", "nats-server": "nats",
    "redis-server": "redis", "embedded.clickhouse": "clickhouse", "embedded.provider": "simulated provider",
}  # fmt: skip


def cpu_ms(supervisor: int) -> dict[str, float]:
    """CPU of the supervisor's children so far, by role."""
    used: dict[str, float] = {}
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            command = (process / "cmdline").read_text().replace("\0", " ")
            fields = (process / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        role = next((role for part, role in NAMES.items() if part in command), None)
        if role is not None and int(fields[1]) == supervisor:
            used[role] = used.get(role, 0.0) + (int(fields[11]) + int(fields[12])) * TICK_MS
    return used


async def load(url: str, agent: str, jobs: int, in_flight: int) -> list[float]:
    """Runs the jobs; seconds from publishing to result of each."""
    client = await nats.connect(url)
    jetstream = client.jetstream()
    waiting: dict[str, asyncio.Future[None]] = {}

    async def on_result(message: Any) -> None:
        if (future := waiting.pop(message.subject, None)) is not None:
            future.set_result(None)

    await client.subscribe("bw.results.*", cb=on_result)
    slots, took = asyncio.Semaphore(in_flight), list[float]()

    async def run() -> None:
        async with slots:
            job_id = uuid.uuid4().hex
            future = waiting[subjects.result(job_id)] = asyncio.get_running_loop().create_future()
            begun = time.perf_counter()
            job = {"agent": agent, "job_id": job_id, "prompt": "How do I return a parcel?"}
            headers = {Header.UNIQUE_ID.value: "1"}
            await jetstream.publish(subjects.job(agent), json.dumps(job).encode(), timeout=30, headers=headers)
            await future
            took.append(time.perf_counter() - begun)

    await asyncio.gather(*(run() for _ in range(jobs)))
    await client.close()
    return sorted(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--agent", default="support-triage")
    parser.add_argument("--jobs", type=int, default=3000)
    parser.add_argument("--in-flight", type=int, default=64)
    options = parser.parse_args()
    endpoints = json.loads((options.data / "endpoints.json").read_text())
    before, begun = cpu_ms(endpoints["pid"]), time.perf_counter()
    took = asyncio.run(load(endpoints["nats_url"], options.agent, options.jobs, options.in_flight))
    elapsed = time.perf_counter() - begun
    time.sleep(3)  # what lags behind the answers, the sink and the budgets, belongs to the jobs
    after = cpu_ms(endpoints["pid"])
    each = {role: (after[role] - before.get(role, 0.0)) / options.jobs for role in after}
    for role, ms in sorted(each.items(), key=lambda item: -item[1]):
        print(f"{role:20} {ms:7.3f} ms of CPU a job")
    total = sum(ms for role, ms in each.items() if role != "simulated provider")
    print(f"{'sum, but provider':20} {total:7.3f} ms of CPU a job")
    p50, p99 = took[len(took) // 2], took[len(took) * 99 // 100]
    print(f"{options.jobs / elapsed:.0f} jobs/s at {options.in_flight} in flight; p50 {p50:.3f} s, p99 {p99:.3f} s")


if __name__ == "__main__":
    main()
