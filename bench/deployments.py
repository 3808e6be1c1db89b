"""A model on three deployments, of which one goes down, then two, on a whole local stack: who answers, and who fails.

    python -m bench.deployments [--rate 200] [--seconds 30]
    python -m bench.deployments sessions

The provider is here. In the first third of the time all three deployments answer, after 50 ms; in the second the first
one answers 500, and in the last third the second one, too. Jobs are published at an even rate. Asserts that no job
fails, and that the breaker of the deployment that never fails stays closed; prints the share of the calls that each
deployment has answered, second by second.

`sessions` measures the share of input tokens that come from the prompt caches of eight deployments, in a worker of
its own: 40 conversations of 8 turns each, with affinity and without. Each deployment has a cache of its own, as each
key and region of a provider has.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from aiohttp import web

from bench.holds import ANSWER, load
from bench.local_stack import running_stack
from tests.server_sources import embedded_servers
from tests.services.worker.harness import running_worker

NAMES = ("west", "east", "north")
LATENCY_S = 0.05
PRICE = {"input_usd_per_mtok": "0.15", "output_usd_per_mtok": "0.60", "cached_input_usd_per_mtok": "0.015"}
CONVERSATIONS, TURNS, CACHES = 40, 8, 8


class Deployments:
    """The three deployments of a provider, some of which are down."""

    def __init__(self) -> None:
        self.down: set[str] = set()
        self.calls: Counter[tuple[str, int]] = Counter()

    async def answer(self, request: web.Request) -> web.Response:
        name = str((await request.json())["model"])
        is_down = name in self.down
        self.calls[name, 500 if is_down else 200] += 1
        await asyncio.sleep(LATENCY_S)
        if is_down:
            return web.json_response({"error": {"message": "The server had an error."}}, status=500)
        return web.json_response({**ANSWER, "model": name})

    async def serve(self) -> tuple[web.AppRunner, int]:
        """Listens on a free port."""
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner, runner.addresses[0][1]

    async def go_down(self, after_s: float) -> None:
        """Takes one down after some time, and a second one after as much again."""
        for name in NAMES[:2]:
            await asyncio.sleep(after_s)
            self.down.add(name)


def config(port: int, concurrency: int) -> dict[str, Any]:
    """One agent with all defaults but its concurrency."""
    deployments = [{"provider": "sim", "name": name} for name in NAMES]
    return {
        "providers": {"sim": {"base_url": f"http://127.0.0.1:{port}/v1"}},
        "models": {"m": {"price": PRICE, "deployments": deployments, "affinity": "none"}},
        "agents": {"writer": {"model": "m", "concurrency": concurrency}},
    }


def shares(results: Sequence[dict[str, Any]], step_s: float) -> list[tuple[float, Counter[str]]]:
    """The answers of each deployment, by the steps in which their calls began."""
    calls = [attempt for result in results for attempt in result["attempts"] if attempt["outcome"] == "success"]
    moments = [datetime.fromisoformat(call["started_at"]).timestamp() for call in calls]
    steps: dict[int, Counter[str]] = {}
    for moment, call in zip(moments, calls, strict=True):
        steps.setdefault(int((moment - min(moments)) / step_s), Counter())[call["deployment"].partition("/")[2]] += 1
    return [(step * step_s, steps[step]) for step in sorted(steps)]


async def run(options: argparse.Namespace, data: Path) -> None:
    """Starts the stack, loads it, and prints what came of it."""
    provider = Deployments()
    runner, port = await provider.serve()
    try:
        async with running_stack(config(port, options.concurrency), data) as endpoints:
            outage = asyncio.create_task(provider.go_down(options.seconds / 3))
            results, breakers = await load(endpoints, options.rate, options.seconds)
            outage.cancel()
    finally:
        await runner.cleanup()
    ends = Counter(one["reason"] or one["status"] for one in results)
    tries = Counter(one["attempts_count"] for one in results)
    causes = Counter(attempt["cause"] for one in results for attempt in one["attempts"])
    took = sorted(one["duration_ms"] for one in results)
    for second, answered in shares(results, options.seconds / 15):
        total = answered.total()
        row = "".join(name[0] * round(60 * answered[name] / total) for name in NAMES)
        print(f"{second:5.0f} s  {total:5} answers  {row}")
    print(f"jobs by end: {dict(ends)}; by attempts: {dict(sorted(tries.items()))}; attempts by cause: {dict(causes)}")
    print(f"calls by deployment and status: {dict(provider.calls)}; breakers, by state: {dict(breakers)}")
    print(f"a job took {took[len(took) // 2]} ms (p50), {took[len(took) * 99 // 100]} ms (p99)")
    refused = {attempt["deployment"] for one in results for attempt in one["attempts"] if attempt["short_circuited"]}
    assert (set(ends), refused) == ({"succeeded"}, set()), "see above"


async def cached_share(directory: Path, nats_url: str, redis_url: str, affinity: str) -> float:
    """The share of input tokens that came from a prompt cache."""
    names = [f"d{number}" for number in range(CACHES)]
    cached = {"price": PRICE, "prompt_cache": {"min_tokens": 100}}
    deployments = [{"provider": "sim", "name": name} for name in names]
    model = {"price": PRICE, "deployments": deployments, "affinity": affinity}
    async with running_worker(
        directory,
        nats_url=nats_url,
        redis_url=redis_url,
        script={"models": dict.fromkeys(names, cached)},
        agents={"writer": {"model": "m", "guard": "off", "concurrency": 50}},
        more_models={"m": model},
    ) as plane:

        async def converse(number: int) -> tuple[int, int]:
            messages = [{"role": "system", "content": "You are helpful. " * 100}]
            read = cached_tokens = 0
            for turn in range(TURNS):
                messages.append({"role": "user", "content": f"question {number}.{turn} " * 20})
                job = {"agent": "writer", "job_id": f"{affinity}-{number}-{turn}", "messages": messages}
                result = await plane.run(job)
                messages.append({"role": "assistant", "content": result["output"]})
                [attempt] = result["attempts"]
                read += attempt["input_tokens"]
                cached_tokens += attempt["cached_tokens"]
            return read, cached_tokens

        usages = await asyncio.gather(*(converse(number) for number in range(CONVERSATIONS)))
    return sum(cached for _, cached in usages) / sum(read for read, _ in usages)


async def sessions() -> None:
    """Prints the shares."""
    with embedded_servers() as (servers, _):
        nats_url, redis_url = servers.nats().url, servers.redis().url
        for affinity in ("none", "session"):
            with tempfile.TemporaryDirectory() as directory:
                began = time.perf_counter()
                share = await cached_share(Path(directory), nats_url, redis_url, affinity)
                print(f"affinity {affinity:8} {share:6.1%} of input from caches, {time.perf_counter() - began:.0f} s")


def main() -> None:
    """Reads the options, and runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["outage", "sessions"], default="outage")
    parser.add_argument("--rate", type=float, default=200.0, help="jobs a second (default 200)")
    parser.add_argument("--seconds", type=float, default=30.0, help="for how long (default 30)")
    parser.add_argument("--concurrency", type=int, default=500, help="of the agent (default 500)")
    options = parser.parse_args()
    if options.what == "sessions":
        asyncio.run(sessions())
        return
    with tempfile.TemporaryDirectory() as data:
        asyncio.run(run(options, Path(data)))


if __name__ == "__main__":
    main()
