"""What a flood by one API key costs another key, and one of low priority those of high priority.

    python -m bench.fairness [--workers 1] [--flood 10000] [--seconds 60] [--rounds 2] [--case key]

One agent, one model that takes a tenth of a second. A job is sent each second, first alone and then beside the flood,
in turn: `key` is a flood by another API key; `late` one that began before the first of these jobs; `priority` one of
low priority, against jobs of high priority by the same key. All jobs are published by the code of `request`. Printed
are the times from publishing to result, and what became of the flood. Compare only figures of the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import tempfile
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nats
import psutil
from nats.aio.client import Client

from breakwater.identity.contract import Priority
from breakwater.jobs.api.job_queue import JobQueue, QueueQuota
from breakwater.jobs.api.submission import Submission
from breakwater.jobs.api.waiting_callers import WaitingCallers
from breakwater.jobs.contract.job import Job
from breakwater.jobs.rules.turns import CallerTurn
from breakwater.jobs.store.accepted import AcceptedJobs
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.process import background
from breakwater.kernel.redis.connection import Redis
from breakwater.kernel.security.encryption import OFF
from tests.flow.kit import Plane, model, running_plane
from tests.server_sources import embedded_servers

AGENT = "writer"
DRAIN_S = 300.0
TOGETHER, PER_SECOND = 20, 1_000
"""The jobs of a flood that are published at once, and in a second: as many as one process of `request` accepts."""
COMES_S = 20
"""The workers take about so long to learn of a flood of 10,000."""


@dataclass(slots=True)
class Sender:
    """Sends jobs of one key and receives their results."""

    client: Client
    queue: JobQueue
    key: str
    priority: Priority
    took: list[float] = field(default_factory=list[float])
    _sent_at: dict[str, float] = field(default_factory=dict[str, float])

    async def listen(self) -> None:
        """Receives the results from now on."""

        async def on_result(message: Any) -> None:
            if (sent_at := self._sent_at.pop(message.subject, None)) is not None:
                self.took.append(time.perf_counter() - sent_at)

        await self.client.subscribe("bw.results.*", cb=on_result)

    @property
    def unanswered(self) -> int:
        """The number of jobs without a result."""
        return len(self._sent_at)

    async def send(self) -> None:
        """Publishes one job."""
        job_id = uuid.uuid4().hex
        job = Job(agent=AGENT, prompt="How do I return a parcel?")
        body = job.model_dump_json(exclude_unset=True).encode()
        turn = CallerTurn(self.key, "", self.priority)
        self._sent_at[subjects.result(job_id)] = time.perf_counter()
        await self.queue.put(Submission(job, job_id, job_id, True, body, self.key, self.key, turn=turn), None)

    async def flood(self, jobs: int) -> None:
        """Publishes many jobs, in parts, so that this process has time for the results."""
        begun = time.perf_counter()
        for first in range(0, jobs, TOGETHER):
            await asyncio.gather(*(self.send() for _ in range(min(TOGETHER, jobs - first))))
            await asyncio.sleep(max(0.0, begun + (first + TOGETHER) / PER_SECOND - time.perf_counter()))

    async def send_evenly(self, per_second: float, seconds: float) -> list[float]:
        """Sends jobs at an even rate. Returns the sorted times until their results."""
        self.took.clear()
        begun = time.perf_counter()
        for number in range(round(per_second * seconds)):
            await asyncio.sleep(max(0.0, begun + number / per_second - time.perf_counter()))
            await self.send()
        await wait_for(lambda: not self.unanswered, "the results of the even jobs")
        return sorted(self.took)


async def wait_for(condition: Any, what: str) -> None:
    """Waits until a condition holds."""
    async with asyncio.timeout(DRAIN_S):
        while not condition():
            await asyncio.sleep(0.05)
    del what


@asynccontextmanager
async def plane_with(options: argparse.Namespace) -> AsyncGenerator[tuple[Plane, str, str]]:
    """Runs workers on servers of their own."""
    with embedded_servers() as (servers, _), tempfile.TemporaryDirectory() as directory:
        nats_server = servers.nats()
        redis_server = servers.redis()
        plane = running_plane(
            Path(directory),
            nats_url=nats_server.url,
            redis_url=redis_server.url,
            script={"models": {"sim/m": model(latency_ms=options.latency_ms)}},
            agents={AGENT: {"model": "sim/m", "concurrency": options.concurrency, "total_timeout_s": 3600}},
            services=(),
        )
        async with plane as started:
            for number in range(options.workers):
                started.start("worker", f"worker-{number + 1}")
            for name in started.processes:
                await started.ready(name)
            yield started, nats_server.url, redis_server.url


def line(name: str, took: list[float]) -> str:
    """A line with the median, p95 and the longest."""
    p95 = took[min(len(took) - 1, len(took) * 95 // 100)]
    return f"{name:24} n {len(took):4}  p50 {took[len(took) // 2]:7.3f} s  p95 {p95:7.3f} s  max {took[-1]:7.3f} s"


async def measure(options: argparse.Namespace) -> None:
    """Runs the rounds and prints their figures."""
    # This process is also the provider: a collection would hold all answers up for a tenth of a second and more.
    gc.disable()
    async with plane_with(options) as (plane, url, redis_url):
        client = await nats.connect(url, pending_size=64 * 1024**2)
        publisher = Publisher(lambda: client, "request", OFF)
        quota = QueueQuota(None, Lookup(lambda: client))
        waiting = WaitingCallers(publisher)
        following = asyncio.create_task(waiting.follow(lambda: client))
        queue = JobQueue(publisher, quota, AcceptedJobs(Redis(redis_url)), waiting)
        by_priority = options.case == "priority"
        flooding = Sender(client, queue, "even" if by_priority else "flooding", "low" if by_priority else "normal")
        even = Sender(client, queue, "even", "high" if by_priority else "normal")
        await flooding.listen()
        await even.listen()
        await even.send_evenly(5, 2)
        for number in range(options.rounds):
            if options.case != "late" or number == 0:
                print(line(f"round {number + 1}, alone", await even.send_evenly(1, options.seconds)), flush=True)
            if options.case == "late":
                await asyncio.sleep(125)
            processes = [psutil.Process(process.pid) for process in plane.processes.values()]
            before = sum(sum(process.cpu_times()[:2]) for process in processes)
            begun = time.perf_counter()
            flood = asyncio.create_task(flooding.flood(options.flood))
            if options.case == "late":
                await flood
            as_it_comes = await even.send_evenly(1, COMES_S)
            beside = await even.send_evenly(1, options.seconds)
            print(line(f"round {number + 1}, as it comes", as_it_comes))
            print(line(f"round {number + 1}, beside it", beside))
            print(line(f"round {number + 1}, both", sorted(as_it_comes + beside)), flush=True)
            seconds = time.perf_counter() - begun
            cpu = sum(sum(process.cpu_times()[:2]) for process in processes) - before
            await flood
            done = len(flooding.took)
            print(
                f"  the flood: {done} of {options.flood} done in {seconds:.0f} s, {done / seconds:.0f}/s;"
                f" workers {cpu:.0f} s of CPU, {1000 * cpu / max(done, 1):.1f} ms a job",
                flush=True,
            )
            if number + 1 < options.rounds:
                await wait_for(lambda: not flooding.unanswered, "the flood")
                flooding.took.clear()
        await background.stop(following)
        await client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=("key", "late", "priority"), default="key")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--latency-ms", type=int, default=100)
    parser.add_argument("--flood", type=int, default=10_000)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=2)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
