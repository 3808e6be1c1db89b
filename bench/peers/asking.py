"""The loop of each program that asks a system: it reads how often to ask from stdin, and prints what it took.

A line of input is `REQUESTS IN_FLIGHT SECONDS`; the line of output that answers it is JSON: the seconds that each
request took and those that all of them took. It imports the standard library alone, as it also runs in the peers'
environments.
"""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable

QUESTION = "How do I return a parcel?"
CHAT = json.dumps({"model": "gpt-4o-mini", "messages": [{"role": "user", "content": QUESTION}]})
JSON_BODY = {"Content-Type": "application/json"}
EXPECTED = "within 30 days"
"""In the provider's answer."""


async def answer_lines(ask: Callable[[], Awaitable[str]]) -> None:
    """Serves stdin until its end. `ask` makes one request and returns the text of its answer."""
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        requests, in_flight, seconds = line.split()
        print(json.dumps(await _ask_many(ask, int(requests), int(in_flight), float(seconds))), flush=True)


async def _ask_many(
    ask: Callable[[], Awaitable[str]], requests: int, in_flight: int, seconds: float
) -> dict[str, object]:
    """Asks so often, or for so long if that is over first."""
    took_s: list[float] = []
    began = time.perf_counter()
    numbers = iter(range(requests))

    async def keep_asking() -> None:
        for _ in numbers:
            sent = time.perf_counter()
            if sent > began + seconds:
                return
            text = await ask()
            if EXPECTED not in text:
                sys.exit(f"not the provider's answer: {text[:2000]}")
            took_s.append(time.perf_counter() - sent)

    await asyncio.gather(*(keep_asking() for _ in range(in_flight)))
    return {"took_s": took_s, "wall_s": time.perf_counter() - began}
