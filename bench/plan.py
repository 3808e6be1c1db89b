"""What a replay of recorded jobs costs: time, CPU and memory, by the number of jobs.

    python -m bench.plan [executions ...] [--harsh] [--clickhouse-url URL]

Each size is a history of 30 days (`bench.history`) in an embedded ClickHouse, planned in a process of its own under
breakers, retries, guards and daily limits: one in which 5 % of calls fail, or a harsh one in which half do. A million
must take less than two minutes on two cores, and less than 600 MB.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import resource
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path

import yaml

from bench.history import History, load
from bench.history_events import daily_cap
from bench.history_fleet import AGENTS, MODELS, PROVIDERS
from breakwater.config import Config, parse_config
from breakwater.kernel.clickhouse.client import connect
from breakwater.replay.plan import plan_config
from tests.server_sources import EmbeddedServers

DAYS = 30
FAILING = 0.05
"""The share of calls that fail in an ordinary history."""
MOST_S = 120.0
MOST_MB = 600.0


def config_of_history(executions: int) -> Config:
    """The config that a made-up history is of, as far as it has one: its budgets are about what is spent in a day."""
    agents: dict[str, dict[str, object]] = {
        agent.name: {
            "provider": agent.chain[0].provider,
            "model": agent.chain[0].name,
            "fallback_models": [model.name for model in agent.chain[1:]],
            "retry": {"max_attempts": agent.max_attempts},
            "guard": {"preset": "agent-run"},  # tasks of that history have some twenty jobs
        }
        for agent in AGENTS
    }
    for agent in AGENTS:
        cap = daily_cap(agent, executions / DAYS)
        if cap is not None:
            enforcement = "hard" if agent.hard else "soft"
            agents[agent.name]["budget"] = {"daily_usd": cap / 1e9, "enforcement": enforcement}
    models = {
        model.name: {
            "provider": model.provider,
            "price": {
                "input_usd_per_mtok": (model.input_nano or 0) / 1000,
                "output_usd_per_mtok": (model.output_nano or 0) / 1000,
            },
        }
        for model in MODELS
    }
    providers = {name: {"base_url": "http://127.0.0.1:9/v1"} for name in PROVIDERS}
    return parse_config(yaml.safe_dump({"providers": providers, "models": models, "agents": agents}))


async def replay(url: str) -> int:
    """Replays all jobs of a database. Returns how many there were."""
    until = datetime.now(UTC) + timedelta(minutes=1)
    analytics = connect(url)
    jobs = 0

    def ended(_: object) -> None:
        nonlocal jobs
        jobs += 1

    try:
        executions = (await analytics.query("SELECT count() FROM executions")).rows[0][0]
        config = config_of_history(executions)
        await plan_config(analytics, config, config, until - timedelta(days=DAYS + 1), until, on_end=ended)
    finally:
        await analytics.close()
    return jobs


def _measure(url: str) -> None:
    began = time.monotonic()
    jobs = asyncio.run(replay(url))
    seconds = time.monotonic() - began
    own = resource.getrusage(resource.RUSAGE_SELF)
    megabytes = own.ru_maxrss / 1024
    cpu_s = own.ru_utime + own.ru_stime
    within = "yes" if seconds < MOST_S and megabytes < MOST_MB else "NO"
    print(
        f"{jobs:>10,} jobs  {seconds:>7.1f} s  {cpu_s:>7.1f} CPU-s  {megabytes:>6.0f} MB  within {within}", flush=True
    )


def _in_process(url: str) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_measure, args=(url,))
    process.start()
    process.join()


async def _load(url: str, executions: int, failing: float | None) -> None:
    analytics = connect(url)
    try:
        await analytics.create_database()
        await load(analytics, History(executions, DAYS, datetime.now(UTC), failing=failing))
    finally:
        await analytics.close()


def main(sizes: list[int], url: str | None, *, is_harsh: bool) -> None:
    if url is not None:
        _in_process(url)
        return
    with tempfile.TemporaryDirectory() as directory:
        numbers = count()

        def new_directory() -> Path:
            path = Path(directory) / str(next(numbers))
            path.mkdir()
            return path

        servers = EmbeddedServers(new_directory)
        try:
            base = servers.clickhouse().url
            for size in sizes:
                asyncio.run(_load(f"{base}/plan_{size}", size, None if is_harsh else FAILING))
                _in_process(f"{base}/plan_{size}")
        finally:
            servers.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.plan", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("executions", type=int, nargs="*", default=[10_000, 100_000, 300_000, 1_000_000])
    parser.add_argument("--harsh", action="store_true", help="a history in which half of all calls fail")
    parser.add_argument("--clickhouse-url", help="of a database that holds a history already")
    given = parser.parse_args()
    sys.exit(main(given.executions, given.clickhouse_url, is_harsh=given.harsh))
