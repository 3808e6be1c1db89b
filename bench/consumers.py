"""What the consumers of events cost: CPU of sink, breaker, budget and alerter, and of the servers that they use.

    python -m bench.consumers [--jobs 3000] [--per-s 300] [--rounds 3] [--idle-s 20]

Starts the embedded servers and the four services, and publishes an attempt and an execution of each job at a steady
rate, as workers do. CPU is user and system time, of the jobs and three seconds after them; the servers' is also that of
storing what is published. Before it, the plane is idle.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import randrange

import psutil
import uvloop

from bench.plane import role_of
from breakwater.config import load_config
from breakwater.config.servers import bus_plan
from breakwater.jobs.contract.execution import Attempt, Execution
from breakwater.kernel.ids import new_id
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.provision import provision
from breakwater.kernel.nats.publisher import Publisher
from tests.flow.kit import config_for
from tests.helpers import ServiceProcess, all_acknowledged, nats_client, start_service, until
from tests.records.samples import attempt, execution, new_database, url_of
from tests.server_sources import EmbeddedServers, embedded_servers

CONSUMERS = ("sink", "breaker", "budget", "alerter")
DURABLES = ("sink-events", "breaker", "budget", "alerter-executions")
SETTLE_S = 3.0
STEP_S = 0.01
CAP = {"daily_usd": 100_000, "monthly_usd": 1_000_000}


def records_of_a_job() -> tuple[Attempt, Execution]:
    """An attempt that has just succeeded, and its job's record."""
    execution_id, now = new_id(), datetime.now(UTC)
    cost = randrange(1_000_000)
    ids = {"job_id": execution_id, "model": "sim/m", "provider": "sim", "counts_for_breaker": True, "cost": cost}
    tried = attempt(execution_id, started_at=now - timedelta(milliseconds=800), **ids)
    prompt = [{"role": "user", "content": "How do I return a parcel?"}]
    return tried, execution(execution_id, attempts=(tried,), messages=prompt, output="word " * 40, total_cost=cost)


async def publish_jobs(publisher: Publisher, jobs: int, per_s: float) -> None:
    """Publishes the records of jobs at a rate."""
    began, waiting = time.monotonic(), list[asyncio.Task[None]]()

    async def publish(tried: Attempt, record: Execution) -> None:
        subject = subjects.attempt(tried.agent, tried.execution_id, tried.number)
        await publisher.event(subject, tried, id=tried.attempt_id, at=tried.completed_at, once=True)
        subject = subjects.execution(record.agent, record.execution_id)
        await publisher.event(subject, record, id=record.execution_id, at=record.completed_at, once=True)

    while len(waiting) < jobs:
        due = min(jobs, int((time.monotonic() - began) * per_s) + 1)
        waiting += [asyncio.create_task(publish(*records_of_a_job())) for _ in range(due - len(waiting))]
        await asyncio.sleep(STEP_S)
    await asyncio.gather(*waiting)


def cpu_ms() -> Counter[str]:
    """CPU of this process' children so far, by role."""
    used: Counter[str] = Counter()
    for process in psutil.Process().children(recursive=True):
        times = process.cpu_times()
        used[role_of(process)] += (times.user + times.system) * 1000
    return used


def line(used: Counter[str], by: float) -> str:
    shares = {role: used[role] / by for role in (*CONSUMERS, "nats", "redis", "clickhouse")}
    consumers = sum(shares[role] for role in CONSUMERS)
    return f"consumers {consumers:.4f}: " + ", ".join(f"{role} {share:.4f}" for role, share in shares.items())


async def measure(options: argparse.Namespace, servers: EmbeddedServers, directory: Path) -> None:
    nats_server, redis_server, clickhouse_server = servers.nats(), servers.redis(), servers.clickhouse()
    path = directory / "breakwater.yaml"
    agents = {"writer": {"model": "sim/m", "budget": CAP}}
    path.write_text(json.dumps(config_for("http://127.0.0.1:9/v1", agents, budgets={"global": CAP})))
    await provision(nats_server.url, bus_plan(load_config(path)))
    started: list[ServiceProcess] = []
    async with new_database(clickhouse_server.url) as analytics, nats_client(nats_server.url) as client:
        environment = {
            "BREAKWATER_CONFIG": str(path),
            "BREAKWATER_NATS_URL": nats_server.url,
            "BREAKWATER_REDIS_URL": redis_server.url,
            "BREAKWATER_CLICKHOUSE_URL": url_of(analytics, clickhouse_server),
        }
        publisher, jetstream = Publisher(lambda: client, "worker"), client.jetstream(timeout=30)
        try:
            started += [start_service(name, environment, directory / f"{name}.log") for name in CONSUMERS]
            for name in CONSUMERS:
                await until(lambda name=name: "service_ready" in (directory / f"{name}.log").read_text(), name)

            async def run(jobs: int) -> None:
                await publish_jobs(publisher, jobs, options.per_s)
                await asyncio.sleep(SETTLE_S)
                for durable in DURABLES:
                    await until(lambda durable=durable: all_acknowledged(jetstream, "EVENTS", durable), durable)

            await run(200)  # what is imported and cached at the first batch belongs to none
            if options.idle_s:
                before = cpu_ms()
                await asyncio.sleep(options.idle_s)
                print(f"idle, ms a second: {line(cpu_ms() - before, options.idle_s)}", flush=True)
            found: list[Counter[str]] = []
            for _ in range(options.rounds):
                before = cpu_ms()
                await run(options.jobs)
                found.append(cpu_ms() - before)
                print(f"ms a job:          {line(found[-1], options.jobs)}", flush=True)
            medians = Counter({role: statistics.median(used[role] for used in found) for role in found[0]})
            print(f"median:            {line(medians, options.jobs)}")
        finally:
            for process in started:
                process.terminate()
            for process in started:
                await asyncio.to_thread(process.wait, 60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=3000, help="in each round (default 3000)")
    parser.add_argument("--per-s", type=float, default=300, help="jobs a second (default 300)")
    parser.add_argument("--rounds", type=int, default=3, help="how often it is measured (default 3)")
    parser.add_argument("--idle-s", type=float, default=20, help="how long it is idle before the first (default 20)")
    options = parser.parse_args()
    with embedded_servers() as (servers, directory):
        uvloop.run(measure(options, servers, directory))


if __name__ == "__main__":
    main()
