"""A model on three deployments, of which one goes down, then two, on a whole local stack: who answers, and who fails.

    python -m bench.deployments [--rate 200] [--seconds 30] [--picture FILE]
    python -m bench.deployments sessions
    python -m bench.deployments cost [--rounds 200] [--jobs 20]

The provider is here. In the first third of the time all three deployments answer, after 50 ms; in the second the first
one answers 500, and in the last third the second one, too. Jobs are published at an even rate. Asserts that no job
fails, and that the breakers of those two open, and no other; prints the share of the calls that each deployment has
answered, second by second. `--picture docs/images/deployments.svg` draws it.

`sessions` measures the share of input tokens that come from the prompt caches of eight deployments, in a worker of
its own: 40 conversations of 8 turns each, with affinity and without. Each deployment has a cache of its own, as each
key and region of a provider has.

`cost` measures the CPU of a worker for a job, as `bench.worker` does, in short alternating rounds, so that other work
disturbs all alike: of a model without `deployments`, with one, and with eight that state what is left of their limits.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import nats
from aiohttp import web

from bench.chart import stacked_shares
from bench.holds import ANSWER, load
from bench.local_stack import running_stack
from bench.trace_job import ProviderInAThread
from bench.trace_job import running_worker as in_process_worker
from bench.worker import round_of
from tests.flow.kit import model
from tests.server_sources import embedded_servers
from tests.services.worker.harness import running_worker

NAMES = ("west", "east", "north")
FAILED = "failed"
COLOURS = {"west": "#2f6fce", "east": "#9a5bd0", "north": "#0b7f83", FAILED: "#c0271b"}
LATENCY_S = 0.05
PRICE = {"input_usd_per_mtok": "0.15", "output_usd_per_mtok": "0.60", "cached_input_usd_per_mtok": "0.015"}
CONVERSATIONS, TURNS, CACHES = 40, 8, 8
LEFT = {
    f"x-ratelimit-{part}-{unit}": value
    for unit in ("requests", "tokens")
    for part, value in (("limit", "1000000"), ("remaining", "900000"), ("reset", "6s"))
}
COST_CONFIG = """
providers: {{sim: {{base_url: "{url}"}}}}
models:
  sim/d0: {{price: {{input_usd_per_mtok: "0.15", output_usd_per_mtok: "0.60"}}}}
  one:
    price: {{input_usd_per_mtok: "0.15", output_usd_per_mtok: "0.60"}}
    deployments: [{{provider: sim, name: d0}}]
  eight:
    price: {{input_usd_per_mtok: "0.15", output_usd_per_mtok: "0.60"}}
    affinity: none
    deployments: [DEPLOYMENTS]
budgets: {{global: {{daily_usd: 100000}}}}
defaults: {{concurrency: 256, budget: {{daily_usd: 100000}}, rate_limit: {{requests_per_minute: 1000000}}}}
agents: {{single: {{model: sim/d0}}, one: {{model: one}}, eight: {{model: eight}}}}
""".replace("DEPLOYMENTS", ", ".join(f"{{{{provider: sim, name: d{number}}}}}" for number in range(8)))


class Deployments:
    """The three deployments of a provider, some of which are down."""

    def __init__(self) -> None:
        self.down: dict[str, float] = {}
        """When each went down, in seconds since the epoch."""
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
            self.down[name] = time.time()


def config(port: int, concurrency: int) -> dict[str, Any]:
    """One agent with all defaults but its concurrency."""
    deployments = [{"provider": "sim", "name": name} for name in NAMES]
    return {
        "providers": {"sim": {"base_url": f"http://127.0.0.1:{port}/v1"}},
        "models": {"m": {"price": PRICE, "deployments": deployments, "affinity": "none"}},
        "agents": {"writer": {"model": "m", "concurrency": concurrency}},
    }


def calls_in(results: Sequence[dict[str, Any]], began: float, step_s: float) -> list[tuple[float, Counter[str]]]:
    """The calls by the steps since a time in which they began: those that each deployment answered, and failed ones."""
    calls = [attempt for result in results for attempt in result["attempts"]]
    moments = [datetime.fromisoformat(call["started_at"]).timestamp() for call in calls]
    steps: dict[int, Counter[str]] = {}
    for moment, call in zip(moments, calls, strict=True):
        name = call["deployment"].partition("/")[2] if call["outcome"] == "success" else FAILED
        steps.setdefault(int((moment - began) / step_s), Counter())[name] += 1
    return [(step * step_s, steps[step]) for step in sorted(steps)]


async def run(options: argparse.Namespace, data: Path) -> None:
    """Starts the stack, loads it, and prints what came of it."""
    provider = Deployments()
    runner, port = await provider.serve()
    try:
        async with running_stack(config(port, options.concurrency), data) as endpoints:
            began = time.time()
            outage = asyncio.create_task(provider.go_down(options.seconds / 3))
            results, transitions = await load(endpoints, options.rate, options.seconds)
            outage.cancel()
    finally:
        await runner.cleanup()
    ends = Counter(one["reason"] or one["status"] for one in results)
    tries = Counter(one["attempts_count"] for one in results)
    causes = Counter(attempt["cause"] for one in results for attempt in one["attempts"])
    took = sorted(one["duration_ms"] for one in results)
    steps = calls_in(results, began, options.seconds / 60)
    for second, counts in steps[::4]:
        total = counts.total()
        row = "".join(name[0] * round(60 * counts[name] / total) for name in (*NAMES, FAILED))
        print(f"{second:5.1f} s  {total:5} calls  {row}")
    opened = {transition["model"] for transition in transitions if transition["to_state"] == "open"}
    print(f"jobs by end: {dict(ends)}; by attempts: {dict(sorted(tries.items()))}; attempts by cause: {dict(causes)}")
    print(f"calls by deployment and status: {dict(provider.calls)}; breakers that opened: {sorted(opened)}")
    print(f"a job took {took[len(took) // 2]} ms (p50), {took[len(took) * 99 // 100]} ms (p99)")
    refused = {attempt["deployment"] for one in results for attempt in one["attempts"] if attempt["short_circuited"]}
    assert (set(ends), refused) == ({"succeeded"}, set()), "see above"
    assert opened == {f"sim/{name}" for name in NAMES[:2]}, "the breaker of the third one stays closed"
    if options.picture is not None:
        marks = {moment - began: f"{name} goes down" for name, moment in provider.down.items()}
        title = f"Calls by deployment, {options.rate:g} jobs a second"
        options.picture.write_text(stacked_shares(title, COLOURS, steps, options.seconds / 60, marks))


async def cost(directory: Path, options: argparse.Namespace, nats_url: str, *urls: str) -> None:
    """Prints the CPU of a worker for a job, in alternating rounds."""
    took: dict[str, list[float]] = {"single": [], "one": [], "eight": []}
    client = await nats.connect(nats_url)
    async with in_process_worker(directory, nats_url, *urls, COST_CONFIG):
        for number in range(options.rounds + 2):
            for agent, figures in took.items():
                figures.append(await round_of(client, f"{agent}-{number}", options.jobs, 8, agent))
    await client.close()
    for agent, figures in took.items():
        del figures[:2]  # they warm up
        added = statistics.median(more - alone for more, alone in zip(figures, took["single"], strict=True))
        quartile, median, _ = statistics.quantiles(figures, n=4)
        print(
            f"{agent:6} {min(figures):.3f} ms of CPU a job at best, {quartile:.3f} (quartile), {median:.3f} (median); "
            f"{added:+.3f} to `single` in the same round (median)"
        )


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
    parser.add_argument("what", nargs="?", choices=["outage", "sessions", "cost"], default="outage")
    parser.add_argument("--rate", type=float, default=200.0, help="jobs a second (default 200)")
    parser.add_argument("--seconds", type=float, default=30.0, help="for how long (default 30)")
    parser.add_argument("--concurrency", type=int, default=500, help="of the agent (default 500)")
    parser.add_argument("--rounds", type=int, default=200, help="of `cost`, each alternative once (default 200)")
    parser.add_argument("--jobs", type=int, default=20, help="of a round of `cost` (default 20)")
    parser.add_argument("--picture", type=Path, help="an SVG to write, of the outage")
    options = parser.parse_args()
    if options.what == "cost":
        models = {f"d{number}": {**model(), "headers": LEFT} for number in range(8)}
        with embedded_servers() as (servers, directory), ProviderInAThread(models) as provider:
            asyncio.run(cost(directory, options, servers.nats().url, servers.redis().url, provider.url))
        return
    if options.what == "sessions":
        asyncio.run(sessions())
        return
    with tempfile.TemporaryDirectory() as data:
        asyncio.run(run(options, Path(data)))


if __name__ == "__main__":
    main()
