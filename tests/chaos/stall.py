"""Stops a part of a plane under load (SIGSTOP), lets it go on (SIGCONT), and compares what is left with what was paid.

    python -m tests.chaos.stall --stop nats --seconds 28 --jobs 500 --workers 2

Stopped can be `nats`, `redis`, `worker` (the first of them) and `nats+redis`. One line of a table is printed, and the
exit code is 1 where a job has no record, the records disagree, or, unless a worker was stopped, a job was paid twice.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import nats.errors
import nats.js.errors
import redis.asyncio as aioredis

from breakwater.contracts.types import nano_from_usd
from tests.flow.kit import Plane, model, running_plane
from tests.helpers import until
from tests.server_sources import EmbeddedServers, ProcessRunner, RunningServer

CALL_MS = 1_500
PER_S = 50.0
CONCURRENCY = 100
HEADER = (
    "| stopped | for | jobs | records | calls | attempts | jobs called twice | worker_lost | dead letters | "
    "executions | attempts | Redis | reserved | last result after |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is left of a run. Money in nano-dollars."""

    jobs: int
    records: int
    calls: int
    attempts: int
    called_twice: int
    lost: int
    dead_letters: int
    of_executions: int
    of_attempts: int
    of_redis: int
    reserved: int
    flow_s: float
    """From the moment the stopped part goes on to the last result."""

    def is_right(self, *, worker_stopped: bool) -> bool:
        """Whether nothing is lost, all of it agrees, and nobody was called twice who could be known to live."""
        agree = self.of_executions == self.of_attempts == self.of_redis and self.reserved == 0
        once = worker_stopped or self.called_twice == self.lost == self.dead_letters == 0
        return self.jobs == self.records and self.calls == self.attempts and agree and once


async def stall(
    directory: Path, servers: EmbeddedServers, stop: str, seconds: float, jobs: int, workers: int
) -> Outcome:
    """Runs jobs, stops a part of the plane in the middle of them, and waits for the end of all."""
    bus, state = servers.nats(), servers.redis()
    agents = {
        "writer": {
            "model": "sim/m",
            "max_tokens": 40,
            "concurrency": CONCURRENCY,
            "breaker": "off",
            "timeout_s": 60,
            "total_timeout_s": 600,
            "budget": {"daily_usd": 100, "enforcement": "hard"},
        }
    }
    names = ["worker", *(f"worker-{number}" for number in range(2, workers + 1))]
    async with running_plane(
        directory,
        nats_url=bus.url,
        redis_url=state.url,
        script={"models": {"sim/m": model(latency_ms=CALL_MS)}},
        agents=agents,
        services=("breaker", "budget"),
    ) as plane:
        for name in names:
            plane.start("worker", name)
        for name in names:
            await plane.ready(name)
        load = asyncio.create_task(submit(plane, jobs))
        await asyncio.sleep(jobs / PER_S / 3)
        pids = [pid for part in stop.split("+") for pid in pids_of(part, plane, bus, state)]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        went_on = time.monotonic()
        await load
        for number in range(jobs):
            await plane.result(f"j{number}", timeout_s=240)
        flow_s = time.monotonic() - went_on
        return await outcome_of(plane, jobs, flow_s)


def pids_of(part: str, plane: Plane, bus: RunningServer, state: RunningServer) -> list[int]:
    """The processes of a part."""
    if part == "worker":
        return [plane.processes["worker"].pid]
    runner = {"nats": bus, "redis": state}[part]._runner
    assert isinstance(runner, ProcessRunner)
    assert runner.pid is not None
    return [runner.pid]


async def submit(plane: Plane, jobs: int) -> None:
    """Publishes jobs at a steady pace; what is not acknowledged is published again under the same id."""

    async def one(number: int) -> None:
        job_id = f"j{number}"
        while True:
            try:
                await plane.publish(
                    {"agent": "writer", "job_id": job_id, "prompt": "x" * 300}, **{"Nats-Msg-Id": job_id}
                )
            except (TimeoutError, nats.errors.Error, nats.js.errors.Error):
                await asyncio.sleep(0.5)
            else:
                return

    async with asyncio.TaskGroup() as group:
        for number in range(jobs):
            group.create_task(one(number))
            await asyncio.sleep(1 / PER_S)


async def outcome_of(plane: Plane, jobs: int, flow_s: float) -> Outcome:
    """Reads the log and Redis once nothing is held any more."""
    client = aioredis.Redis.from_url(plane.environment["BREAKWATER_REDIS_URL"], decode_responses=True)
    try:

        async def settled() -> dict[str, str] | None:
            [key] = [key async for key in client.scan_iter("bw:{budget}:daily:*")]
            counted = await client.hgetall(key)
            return counted if int(counted["reserved:global"]) == 0 else None

        # The lease of what a lost worker has reserved is its call's timeout, and two minutes.
        counted = await until(settled, "that nothing is reserved", timeout_s=240)
        records = await plane.messages("EVENTS", "bw.executions.writer.*", at_least=jobs)
        attempts = [one for one in await plane.messages("EVENTS", "bw.attempts.>") if not one["short_circuited"]]
        of_attempts = sum(nano_from_usd(one["cost"]) for one in attempts)

        async def counted_all() -> int | None:
            spent = int((await client.hgetall(key))["spent:global"])
            return spent if spent == of_attempts else None

        [key] = [key async for key in client.scan_iter("bw:{budget}:daily:*")]
        try:
            of_redis = await until(counted_all, "that Redis has counted", timeout_s=30)
        except AssertionError:
            of_redis = int(counted["spent:global"])
    finally:
        await client.aclose()
    successes = Counter(one["execution_id"] for one in attempts if one["outcome"] == "success")
    return Outcome(
        jobs=jobs,
        records=len({one["execution_id"] for one in records}),
        calls=plane.sim.ledger.totals.calls,
        attempts=len(attempts),
        called_twice=sum(1 for count in Counter(one["execution_id"] for one in attempts).values() if count > 1),
        lost=sum(one["outcome"] == "worker_lost" for one in attempts),
        dead_letters=jobs - len(successes),
        of_executions=sum(nano_from_usd(one["total_cost"]) for one in records),
        of_attempts=of_attempts,
        of_redis=of_redis,
        reserved=int(counted["reserved:global"]),
        flow_s=flow_s,
    )


def row(stop: str, seconds: float, one: Outcome) -> str:
    """A line of the table."""
    money = [f"${nano / 1e9:.6f}" for nano in (one.of_executions, one.of_attempts, one.of_redis)]
    figures = [one.jobs, one.records, one.calls, one.attempts, one.called_twice, one.lost, one.dead_letters, *money]
    return f"| {stop} | {seconds:g} s | {' | '.join(map(str, figures))} | {one.reserved} | {one.flow_s:.1f} s |"


def main() -> int:
    """Runs one stall, and prints its line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stop", default="nats", choices=("nats", "redis", "worker", "nats+redis"))
    parser.add_argument("--seconds", type=float, default=28.0, help="for how long (default 28)")
    parser.add_argument("--jobs", type=int, default=500, help="how many (default 500)")
    parser.add_argument("--workers", type=int, default=2, help="how many (default 2)")
    parser.add_argument("--no-header", action="store_true", help="the line alone")
    wanted = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="breakwater-stall-"))
    made = iter(range(100))

    def new_directory() -> Path:
        path = directory / f"server-{next(made)}"
        path.mkdir()
        return path

    servers = EmbeddedServers(new_directory)
    try:
        found = asyncio.run(stall(directory, servers, wanted.stop, wanted.seconds, wanted.jobs, wanted.workers))
    finally:
        servers.stop()
        shutil.rmtree(directory, ignore_errors=True)
    if not wanted.no_header:
        print(HEADER)
    print(row(wanted.stop, wanted.seconds, found))
    return 0 if found.is_right(worker_stopped=wanted.stop == "worker") else 1


if __name__ == "__main__":
    sys.exit(main())
