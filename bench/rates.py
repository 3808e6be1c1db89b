"""How much of a provider's rate limit a fleet uses, and how often the provider refuses it.

    python -m bench.rates [--minutes 5] [--tokens 100000] [--workers 1]

A provider allows so many tokens in any minute, by what its answers used, and refuses calls beyond that with 429. The
model has the same limit in the config, and there are always more jobs than fit, of three keys: each call may use 1,000
tokens and uses 300 to 900. Printed are the tokens of each minute as parts of the limit, the answers by status, and
the calls of each key.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

import nats
from aiohttp import web

from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.subjects import Header
from tests.flow.kit import PRICE, model, running_plane
from tests.server_sources import embedded_servers

AGENT, MODEL = "writer", "own/m"
MINUTE_S = 60.0
INPUT = 60
JOBS_AT_ONCE = 60


class LimitedProvider:
    """Answers after a second or two, and refuses what exceeds its limit in any minute."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used: deque[tuple[float, int]] = deque()
        self.answers: list[tuple[float, int]] = []
        self.statuses: Counter[int] = Counter()

    async def answer(self, request: web.Request) -> web.Response:
        """Handles a chat completion."""
        await request.read()
        now = time.monotonic()
        while self._used and self._used[0][0] <= now - MINUTE_S:
            self._used.popleft()
        tokens = random.randint(300, 900)
        if sum(used for _, used in self._used) + tokens > self._limit:
            self.statuses[429] += 1
            return web.json_response({"error": {"message": "too many tokens", "type": "tokens"}}, status=429)
        self._used.append((now, tokens))
        self.answers.append((now, tokens))
        self.statuses[200] += 1
        await asyncio.sleep(random.uniform(1, 2))
        usage = {"prompt_tokens": INPUT, "completion_tokens": tokens - INPUT, "total_tokens": tokens}
        choices = [{"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}]
        return web.json_response({"id": "x", "model": "m", "choices": choices, "usage": usage})

    async def serve(self) -> tuple[web.AppRunner, str]:
        """Listens on a free port."""
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner, f"http://127.0.0.1:{runner.addresses[0][1]}/v1"


async def keep_busy(url: str, done: Counter[str]) -> None:
    """Keeps jobs of three keys waiting until it is cancelled. The first key sends ten times as many."""
    client = await nats.connect(url)
    jetstream = client.jetstream()
    free = asyncio.Semaphore(JOBS_AT_ONCE)
    keys: dict[str, str] = {}

    async def on_result(message: Any) -> None:
        if (key := keys.pop(message.subject, None)) is not None:
            done[key] += json.loads(message.data)["status"] == "succeeded"
            free.release()

    await client.subscribe("bw.results.*", cb=on_result)
    number = 0
    while True:
        await free.acquire()
        number += 1
        key = "bc"[number // 6 % 2] if number % 6 == 0 else "a"
        job = {"agent": AGENT, "job_id": f"j{number}", "prompt": "write", "params": {"max_tokens": 900}}
        keys[subjects.result(f"j{number}")] = key
        headers = {Header.OWNER.value: key, Header.SUBMITTED_BY.value: key, Header.EXECUTION_ID.value: f"j{number}"}
        await jetstream.publish(subjects.job(AGENT), json.dumps(job).encode(), headers=headers)


async def measure(options: argparse.Namespace) -> None:
    """Runs the minutes, and prints the figures."""
    provider = LimitedProvider(options.tokens)
    runner, provider_url = await provider.serve()
    with embedded_servers() as (servers, _), tempfile.TemporaryDirectory() as directory:
        nats_server = servers.nats()
        plane = running_plane(
            Path(directory),
            nats_url=nats_server.url,
            redis_url=servers.redis().url,
            script={"models": {"sim/unused": model()}},
            agents={AGENT: {"model": MODEL, "concurrency": 64, "total_timeout_s": 3600}},
            services=(),
            more_providers={"own": {"base_url": provider_url}},
            more_models={MODEL: {"price": PRICE, "rate_limit": {"tokens_per_minute": options.tokens}}},
        )
        async with plane as started:
            for number in range(options.workers):
                started.start("worker", f"worker-{number + 1}")
            for name in started.processes:
                await started.ready(name)
            done: Counter[str] = Counter()
            busy = asyncio.create_task(keep_busy(nats_server.url, done))
            while not provider.answers:
                await asyncio.sleep(0.05)
            await asyncio.sleep(options.minutes * MINUTE_S)
            busy.cancel()
    await runner.cleanup()
    began = provider.answers[0][0]
    minutes = Counter(int((at - began) // MINUTE_S) for at, tokens in provider.answers for _ in range(tokens))
    parts = [minutes[minute] / options.tokens for minute in range(options.minutes)]
    print("used of the limit, by minute: " + ", ".join(f"{part:.1%}" for part in parts))
    print(f"over all minutes: {sum(parts) / len(parts):.1%}; answers by status: {dict(provider.statuses)}")
    print(f"calls by key: {dict(done)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=1)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
