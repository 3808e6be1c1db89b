"""What a request costs in each API: CPU of every process, and the time to the first token.

    python -m bench.apis [--requests 200] [--rounds 5] [--in-flight 16] [--first 100] [--only NAME ...]
    python -m bench.apis --inputs 10000 [--batch 100] [--dimensions 1536]

Starts NATS, Redis and a worker, request, breaker and budget as processes; the simulated provider runs in this one, with
the client. CPU is user and system time of those processes. The APIs take turns, `--requests` each in every round, so
that what slows the machine down slows all of them. An API is measured as it is (`native`: the provider speaks it) and
translated. `--streamed` asks for streams of 40 tokens instead of whole answers, `--long` with the conversation and the
tools of an agent's loop. Responses are stored by default, which chat completions are not: see `--not-stored`.

`--inputs` embeds so many texts in batches, as floats and as base64, and prints the memory of the processes as it goes.
The provider's answer is the same for each batch there, and made beforehand.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import math
import secrets
import statistics
import time
from array import array
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from bench.plane import print_shares
from bench.streams import SERVICES, MeasuredPlane
from breakwater.identity.api_keys import create_key
from breakwater.local.ports import free_port
from tests.calls.providers.kit import answering
from tests.flow.kit import Plane, model, running_plane
from tests.server_sources import RunningServer, embedded_servers

LATENCY_MS = 20
TOKENS = 40
ASK = "How do I return a parcel that came two days late, and whose box was open?"
CHAT = {"messages": [{"role": "user", "content": ASK}]}

INSTRUCTIONS = "Answer politely, and name the order. " * 200
TURNS = [{"role": role, "content": f"{ASK} " * 5} for _ in range(20) for role in ("user", "assistant")] + CHAT[
    "messages"
]
SCHEMA = {
    "type": "object",
    "properties": {f"field_{number}": {"type": "string", "description": ASK} for number in range(6)},
    "required": ["field_0"],
}
FUNCTIONS = [{"name": f"tool_{number}", "description": ASK * 3, "parameters": SCHEMA} for number in range(15)]
LONG: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "messages": [{"role": "system", "content": INSTRUCTIONS}, *TURNS],
        "tools": [{"type": "function", "function": one} for one in FUNCTIONS],
    },
    "responses": {
        "instructions": INSTRUCTIONS,
        "input": TURNS,
        "tools": [{"type": "function", "strict": False, **one} for one in FUNCTIONS],
    },
    "messages": {
        "system": INSTRUCTIONS,
        "messages": TURNS,
        "tools": [
            {"name": one["name"], "description": one["description"], "input_schema": SCHEMA} for one in FUNCTIONS
        ],
    },
}
"""Requests as an agent's loop makes them, by the path: 41 messages and 15 tools, some 60 KB."""


@dataclass(frozen=True, slots=True)
class Api:
    """A way to ask: the path below `/v1`, the body, the agent, and the beginning of the event with the first token."""

    name: str
    path: str
    agent: str
    body: dict[str, Any]
    first: bytes | None


APIS = (
    Api("chat", "chat/completions", "chat", {**CHAT, "max_tokens": 100}, b'"content":"'),
    Api("responses, native", "responses", "responses", {"input": ASK}, b"response.output_text.delta"),
    Api("responses, translated", "responses", "chat", {"input": ASK}, b"response.output_text.delta"),
    Api("messages, native", "messages", "messages", {**CHAT, "max_tokens": 100}, b"text_delta"),
    Api("messages, translated", "messages", "chat", {**CHAT, "max_tokens": 100}, b"text_delta"),
    Api("embeddings", "embeddings", "embeddings", {"input": ASK, "encoding_format": "base64"}, None),
)


class Requests(MeasuredPlane):
    """A running plane, and a client of it."""

    def __init__(self, plane: Plane, servers: dict[str, RunningServer], http: aiohttp.ClientSession, url: str) -> None:
        super().__init__(plane, servers)
        self._http = http
        self._url = url

    async def ask(self, api: Api, *, streamed: bool = False, **more: Any) -> float:
        """One answer: seconds until its first token, or all of it."""
        body = {"model": api.agent, **api.body, **({"stream": True} if streamed else {}), **more}
        began, first = time.perf_counter(), 0.0
        async with self._http.post(f"{self._url}/{api.path}", json=body) as response:
            assert response.status == 200, await response.text()
            if not streamed:
                await response.read()
            async for line in response.content:
                if not first and api.first is not None and api.first in line and b'":""' not in line:
                    first = time.perf_counter() - began
        return first or time.perf_counter() - began

    async def load(self, api: Api, requests: int, in_flight: int, *, streamed: bool) -> Counter[str]:
        """The CPU of so many answers, in ms."""
        slots, before = asyncio.Semaphore(in_flight), self.cpu_ms()

        async def one() -> None:
            async with slots:
                await self.ask(api, streamed=streamed)

        await asyncio.gather(*(one() for _ in range(requests)))
        await asyncio.sleep(0.5)  # what lags behind the answers
        used = self.cpu_ms()
        used.subtract(before)
        return used


@asynccontextmanager
async def running(
    directory: Path, servers: dict[str, RunningServer], origin: str | None = None, dimensions: int = 1536
) -> AsyncGenerator[Requests]:
    """The plane, with an agent for each API that a provider speaks. `origin`: of another provider of embeddings."""
    keys, port = directory / "keys.json", free_port()
    key = create_key(keys, "bench")
    sim = "http://127.0.0.1:{sim_port}/v1"
    secret = {"api_key": {"env": "BENCH_PROVIDER_KEY"}}  # which no answer may repeat
    agent = {"max_tokens": 100, "concurrency": 256, "guard": {"max_tokens": "off"}}
    names = {"chat": "sim/m", "responses": "resp/m", "messages": "claude/m", "embeddings": "own/m"}
    usage = {"input_tokens": 20, "output_tokens": TOKENS}
    scripted = model(latency_ms=LATENCY_MS, answer="word " * TOKENS, usage=usage, stream={"tokens_per_s": 1e6})
    plane = running_plane(
        directory,
        nats_url=servers["nats"].url,
        redis_url=servers["redis"].url,
        script={"models": dict.fromkeys(("sim/m", "m"), scripted)},
        agents={name: {"model": model_id, **agent} for name, model_id in names.items()},
        more_providers={
            "sim": {"base_url": sim, **secret},
            "resp": {"base_url": sim, "api": "responses", **secret},
            "claude": {"kind": "anthropic", "base_url": sim, **secret},
            "own": {"base_url": sim if origin is None else f"{origin}/v1", **secret},
        },
        more_models={"own/m": {"dimensions": dimensions, "price": {"input_usd_per_mtok": 1, "output_usd_per_mtok": 0}}},
        services=SERVICES,
        environment={
            "BREAKWATER_HTTP_PORT": str(port),
            "BREAKWATER_API_KEYS_FILE": str(keys),
            "BENCH_PROVIDER_KEY": f"sk-{secrets.token_hex(24)}",
        },
    )
    http = aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {key}"},
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
        read_bufsize=2**20,
    )
    async with plane as started, http:
        for name in SERVICES:
            await started.ready(name)
        yield Requests(started, servers, http, f"http://127.0.0.1:{port}/v1")


async def compare(options: argparse.Namespace, directory: Path, servers: dict[str, RunningServer]) -> None:
    """Prints a row for each API."""
    apis = [api for api in APIS if not options.only or api.name in options.only]
    if options.long:
        apis = [replace(api, body={**api.body, **LONG[api.path]}) for api in apis if api.path in LONG]
    if options.not_stored:
        stored = {"responses": {"store": False}}
        apis = [replace(api, body={**api.body, **stored.get(api.path, {})}) for api in apis]
    if options.streamed:
        apis = [api for api in apis if api.first is not None]
    used = {api.name: list[Counter[str]]() for api in apis}
    first = {api.name: list[float]() for api in apis}
    async with running(directory, servers) as plane:
        for api in apis:
            await plane.load(api, 50, 16, streamed=options.streamed)
        for _ in range(options.rounds):
            for api in apis:
                used[api.name].append(
                    await plane.load(api, options.requests, options.in_flight, streamed=options.streamed)
                )
        for _ in range(options.first):
            for api in apis:
                first[api.name].append(await plane.ask(api, streamed=api.first is not None) * 1000)
    print("| | CPU ms a request | worker | request | others | times the first | first token, ms at the median |")
    count, base = options.requests * options.rounds, sum(sum(one.values()) for one in used[apis[0].name])
    for api in apis:
        of = sum(used[api.name], Counter[str]())
        others = of.total() - of["worker"] - of["request"]
        cells = [f"{ms / count:.2f}" for ms in (of.total(), of["worker"], of["request"], others)]
        took = f"{statistics.median(first[api.name]):.1f}" if api.first is not None and first[api.name] else ""
        print(f"| {api.name} | {' | '.join(cells)} | {of.total() / base:.2f} | {took} |")


async def embed(options: argparse.Namespace, directory: Path, servers: dict[str, RunningServer]) -> None:
    """Prints the throughput of batches, and the memory as they pass."""
    vectors = [
        [math.sin(place * options.dimensions + number) / 40 for number in range(options.dimensions)]
        for place in range(options.batch)
    ]

    def body(found: list[Any]) -> bytes:
        data = [{"object": "embedding", "index": index, "embedding": one} for index, one in enumerate(found)]
        usage = {"prompt_tokens": 1000, "total_tokens": 1000}
        return json.dumps({"object": "list", "data": data, "model": "m", "usage": usage}).encode()

    made = {
        "float": body(vectors),
        "base64": body([base64.b64encode(array("f", one)).decode() for one in vectors]),
    }

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        asked = json.loads(await request.read())
        return web.Response(body=made[asked["encoding_format"]], content_type="application/json")

    api, batches = APIS[-1], options.inputs // options.batch
    async with answering(answer) as origin, running(directory, servers, origin, options.dimensions) as plane:
        for form in ("base64", "float"):
            before, began, slots = plane.cpu_ms(), time.perf_counter(), asyncio.Semaphore(options.in_flight)

            async def one(number: int, form: str = form, slots: asyncio.Semaphore = slots) -> None:
                async with slots:
                    texts = [f"{ASK} {number} {index}" for index in range(options.batch)]
                    await plane.ask(api, input=texts, encoding_format=form)
                    if (number + 1) % (batches // 4 or 1) == 0:
                        print(", ".join(f"{name} {mb:.0f} MB" for name, mb in plane.memory_mb().items()))

            await asyncio.gather(*(one(number) for number in range(batches)))
            took, used = time.perf_counter() - began, plane.cpu_ms()
            used.subtract(before)
            print(f"{form}: {options.inputs} inputs of {options.dimensions} dimensions in {took:.1f} s", end=", ")
            print(f"{options.inputs / took:.0f} a second, {len(made[form]) / 1e6:.1f} MB a batch")
            print_shares(used, batches, f"ms of CPU a batch of {options.batch}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200, help="of each API in a round (default 200)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--in-flight", type=int, default=16)
    parser.add_argument("--first", type=int, default=100, help="streams for the time to the first token (default 100)")
    parser.add_argument("--only", nargs="*", default=(), help="names of APIs, the first to compare with")
    parser.add_argument("--streamed", action="store_true")
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--not-stored", action="store_true", help="ask Responses with `store: false`")
    parser.add_argument("--inputs", type=int, default=0, help="texts to embed instead")
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--dimensions", type=int, default=1536)
    options = parser.parse_args()
    with embedded_servers() as (servers, directory):
        started = {"nats": servers.nats(), "redis": servers.redis()}
        work = embed if options.inputs else compare
        asyncio.run(work(options, directory, started))


if __name__ == "__main__":
    main()
