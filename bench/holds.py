"""A model that answers a tenth of its calls with a rate limit, on a whole local stack: who is held, and who fails.

    python -m bench.holds [--rate 200] [--seconds 60]

The provider is here: it answers after a second, one call in ten at random with 429 and `Retry-After: 1`. Jobs are
published at an even rate. Redis tells when each hold ends, and the attempts by the same clock when their calls were
admitted: calls that were admitted before a hold was written, and reach the provider later, are not made during it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
import uuid
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import nats
import redis.asyncio as aioredis
from aiohttp import web

from bench.local_stack import running_stack
from bench.plane import publish_job
from breakwater.kernel.nats import subjects

RETRY_AFTER_S, GATES_MS = 1, 10
ANSWER = {
    "id": "x",
    "object": "chat.completion",
    "created": 0,
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
}


class BusyProvider:
    """Answers, but for a share of the calls."""

    def __init__(self, share: float, latency_s: float) -> None:
        self.called = self.refused = 0
        self._share, self._latency_s, self._random = share, latency_s, random.Random(1)

    async def answer(self, request: web.Request) -> web.Response:
        self.called += 1
        await request.read()
        await asyncio.sleep(self._latency_s)
        if self._random.random() >= self._share:
            return web.json_response(ANSWER)
        self.refused += 1
        error = {"error": {"message": "Rate limit reached", "type": "requests", "code": "rate_limit_exceeded"}}
        return web.json_response(error, status=429, headers={"Retry-After": str(RETRY_AFTER_S)})

    async def serve(self) -> tuple[web.AppRunner, int]:
        """Listens on a free port."""
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return runner, runner.addresses[0][1]


def config(port: int, concurrency: int) -> dict[str, Any]:
    """One agent with all defaults but its concurrency."""
    return {
        "providers": {"busy": {"base_url": f"http://127.0.0.1:{port}/v1"}},
        "models": {"busy/m": {"price": {"input_usd_per_mtok": "0.15", "output_usd_per_mtok": "0.60"}}},
        "agents": {"writer": {"model": "busy/m", "concurrency": concurrency}},
    }


def admissions(results: Sequence[dict[str, Any]]) -> list[int]:
    """When each call was admitted, in ms by Redis' clock."""
    calls = [one for result in results for one in result["attempts"] if not one["short_circuited"]]
    return [round(datetime.fromisoformat(call["reserved_at"]).timestamp() * 1000) for call in calls]


def under_holds(admitted: Sequence[int], ends: Sequence[int]) -> int:
    """How many calls were admitted while a hold was there; in the very ms in which it was written, they came before.

    The gate of holds may be asked a moment after the one that tells the time.
    """
    first = ((at, bisect_right(ends, at + GATES_MS)) for at in admitted)
    return sum(index < len(ends) and at > ends[index] - RETRY_AFTER_S * 1000 for at, index in first)


async def load(
    endpoints: dict[str, Any], rate: float, seconds: float
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Publishes jobs for so long, and waits for their results. Returns them, and the transitions of breakers."""
    client = await nats.connect(endpoints["nats_url"])
    jetstream, results = client.jetstream(), dict[str, dict[str, Any]]()
    breakers: list[dict[str, Any]] = []

    async def on_result(message: Any) -> None:
        results[message.subject] = json.loads(message.data)

    async def on_breaker(message: Any) -> None:
        breakers.append(json.loads(message.data))

    await client.subscribe("bw.results.*", cb=on_result)
    await client.subscribe("bw.breakers.>", cb=on_breaker)
    jobs, begun = [uuid.uuid4().hex for _ in range(round(rate * seconds))], time.perf_counter()
    async with asyncio.TaskGroup() as publishing:
        for number, job_id in enumerate(jobs):
            await asyncio.sleep(max(0.0, begun + number / rate - time.perf_counter()))
            publishing.create_task(publish_job(jetstream, "writer", job_id))
    print(f"{len(jobs) / (time.perf_counter() - begun):.0f} jobs a second published for {seconds:g} s")
    async with asyncio.timeout(600):
        while len(results) < len(jobs):
            await asyncio.sleep(0.1)
    print(f"{len(jobs) / (time.perf_counter() - begun):.0f} jobs a second answered")
    await client.close()
    return [results[subjects.result(job_id)] for job_id in jobs], breakers


async def hear_holds(url: str, ends: list[int], listening: asyncio.Event) -> None:
    """Notes when each hold that is written ends, in ms by Redis' clock, until cancelled."""
    async with aioredis.Redis.from_url(url) as client, client.pubsub() as heard:
        await client.config_set("notify-keyspace-events", "Kh")
        await heard.psubscribe("__keyspace@0__:bw:held:*")
        async for message in heard.listen():
            listening.set()
            if message["type"] == "pmessage":
                key = message["channel"].decode().removeprefix("__keyspace@0__:")
                ends.append(await client.pexpiretime(key))


async def run(options: argparse.Namespace, data: Path) -> None:
    """Starts the stack, loads it, and prints what came of it."""
    provider, ends_of_holds = BusyProvider(options.share, options.latency_s), list[int]()
    runner, port = await provider.serve()
    try:
        async with running_stack(config(port, options.concurrency), data) as endpoints:
            hearing = asyncio.create_task(hear_holds(endpoints["redis_url"], ends_of_holds, asyncio.Event()))
            results, transitions = await load(endpoints, options.rate, options.seconds)
            hearing.cancel()
    finally:
        await runner.cleanup()
    ends = Counter(one["reason"] or one["status"] for one in results)
    tries = Counter(one["attempts_count"] for one in results)
    waits = sorted(one["duration_ms"] / 1000 for one in results)
    in_spite = under_holds(admissions(results), ends_of_holds)
    print(f"jobs by end: {dict(ends)}; by attempts: {dict(sorted(tries.items()))}")
    breakers = Counter(transition["to_state"] for transition in transitions)
    print(f"breakers, by state: {dict(breakers)}")
    print(f"{provider.called} calls, {provider.refused} refused; {len(ends_of_holds)} holds written")
    print(f"calls admitted during holds: {in_spite}")
    print(f"a job took {waits[len(waits) // 2]:.1f} s (p50), {waits[len(waits) * 99 // 100]:.1f} s (p99)")
    assert min(ends_of_holds) > 0, "a hold was over before it was read"
    assert (set(ends), breakers["open"], in_spite) == ({"succeeded"}, 0, 0), "see above"


def main() -> None:
    """Reads the options, and runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=200.0, help="jobs a second (default 200)")
    parser.add_argument("--seconds", type=float, default=60.0, help="for how long (default 60)")
    parser.add_argument("--share", type=float, default=0.1, help="of the calls that are refused (default 0.1)")
    parser.add_argument("--latency-s", type=float, default=1.0, help="of an answer (default 1)")
    parser.add_argument("--concurrency", type=int, default=2000, help="of the agent (default 2000)")
    with tempfile.TemporaryDirectory() as data:
        asyncio.run(run(parser.parse_args(), Path(data)))


if __name__ == "__main__":
    main()
