"""Background responses whose worker and whose `request` are killed while they stream, read again at another replica."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from breakwater.identity.api_keys import create_key
from breakwater.local.ports import free_port
from tests.flow.kit import Plane, model, running_plane
from tests.helpers import until
from tests.server_sources import Servers

ANSWER = "".join(f"{number:04d} " for number in range(80))
PER_S = 40.0
"""Tokens: two seconds of streaming."""
AT_ONCE = 5
"""Responses that stream while the same processes are killed."""
REPLICAS = ("request", "request-2")
WORKERS = ("worker", "worker-2")
AGENTS = ("chat", "responses")
LONGEST_S = 120.0
HEADER = (
    "| response | provider | events | connections | calls | worker killed | `request` killed | text | seconds |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


@dataclass(slots=True)
class BackgroundOutcome:
    """What one client has of its response.

    Attributes:
        number: of the response.
        agent: whose provider speaks chat completions or Responses.
        killed: the processes that were killed while it streamed.
        events: in the order in which they came, over all connections.
        connections: over which they came.
        again: all events, as another replica sends them after the end.
        response: as it is read after the end.
        calls: of models.
        took_s: from the creation to the last event.
    """

    number: int
    agent: str
    killed: list[str] = field(default_factory=list[str])
    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    connections: int = 0
    again: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    response: dict[str, Any] = field(default_factory=dict[str, Any])
    calls: int = 0
    took_s: float = 0.0

    @property
    def text(self) -> str:
        """All that the client was told."""
        return "".join(event["delta"] for event in self.events if event["type"] == "response.output_text.delta")

    def faults_found(self) -> list[str]:
        """What is not as it must be."""
        found: list[str] = []
        numbers = [event["sequence_number"] for event in self.events]
        if numbers != list(range(len(numbers))):
            found.append(f"the numbers of the events are {numbers}")
        if self.text != ANSWER:
            found.append(f"the text is {self.text!r}")
        if not self.events or self.events[-1]["type"] != "response.completed":
            found.append(f"it ended with {self.events[-1] if self.events else None}")
        elif text_of(self.events[-1]["response"]) != ANSWER:
            found.append("the last event has another text")
        if self.again != self.events:
            found.append("another replica sends other events")
        if self.response.get("status") != "completed" or text_of(self.response) != ANSWER:
            found.append(f"read, it is {self.response}")
        return [f"response {self.number}: {one}" for one in found]

    def row(self) -> str:
        """A line of the table."""
        killed = Counter(name.partition("-")[0] for name in self.killed)
        exact = "exact" if not self.faults_found() else "WRONG"
        figures = [
            self.number,
            self.agent,
            len(self.events),
            self.connections,
            self.calls,
            killed["worker"],
            killed["request"],
        ]
        return f"| {' | '.join(map(str, figures))} | {exact} | {self.took_s:.1f} |"


def text_of(response: dict[str, Any]) -> str:
    """The text of a response."""
    parts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
    return "".join(part["text"] for part in parts)


async def background_outcomes(
    directory: Path, source: Servers, times: int, seed: int
) -> AsyncGenerator[BackgroundOutcome]:
    """Kills all workers and all replicas, each at a random moment, while so many responses stream."""
    chance = random.Random(seed)
    ports = {name: free_port() for name in REPLICAS}
    keys = directory / "keys.json"
    key = create_key(keys, "chaos")
    agent = {
        "breaker": "off",
        "concurrency": 100,
        "timeout_s": 30,
        "retry": {"max_attempts": 20, "backoff": "constant", "base_s": 0.1},
    }
    answers = model(answer=ANSWER, stream={"tokens_per_s": PER_S})
    async with running_plane(
        directory,
        nats_url=source.nats().url,
        redis_url=source.redis().url,
        script={"models": {"sim/m": answers, "own-m": answers}},
        agents={"chat": {**agent, "model": "sim/m"}, "responses": {**agent, "model": "own/own-m"}},
        more_providers={"own": {"kind": "openai", "api": "responses", "base_url": "http://127.0.0.1:{sim_port}/v1"}},
        retry_budget="off",
        services=(),
        environment={"BREAKWATER_API_KEYS_FILE": str(keys)},
    ) as plane:
        plane.own_environments = {name: {"BREAKWATER_HTTP_PORT": str(port)} for name, port in ports.items()}
        for name in (*REPLICAS, *WORKERS):
            plane.start(name.partition("-")[0], name)
        headers = {"Authorization": f"Bearer {key}"}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=60)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as http:
            round_ = _Round(plane, http, {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}, chance)
            for name in REPLICAS:
                await until(lambda name=name: round_.serves(name), f"{name} to serve")
            for first in range(0, times, AT_ONCE):
                for outcome in await round_.run(range(first, min(first + AT_ONCE, times))):
                    yield outcome


class _Round:
    """Responses that stream at the same time."""

    def __init__(self, plane: Plane, http: aiohttp.ClientSession, urls: dict[str, str], chance: random.Random) -> None:
        self._plane, self._http, self._urls, self._chance = plane, http, urls, chance

    async def serves(self, name: str) -> bool:
        """Whether a replica answers."""
        try:
            async with self._http.get(f"{self._urls[name]}/readyz") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    async def run(self, numbers: range) -> list[BackgroundOutcome]:
        """Creates them, kills both kinds of process while they stream, and reads them to their ends."""
        outcomes = [BackgroundOutcome(number, AGENTS[number % 3 % 2]) for number in numbers]
        streaming = [asyncio.create_task(self._client(outcome)) for outcome in outcomes]
        killing = [asyncio.create_task(self._kill(names, outcomes, streaming)) for names in (WORKERS, REPLICAS)]
        async with asyncio.timeout(LONGEST_S):
            await asyncio.gather(*streaming, *killing)
        for name in REPLICAS:
            await until(lambda name=name: self.serves(name), f"{name} to serve")
        return outcomes

    async def _kill(
        self, names: tuple[str, ...], outcomes: list[BackgroundOutcome], streaming: list[asyncio.Task[None]]
    ) -> None:
        """Kills both processes of a kind, each at some moment of the stream, and starts them again."""
        restarts: list[asyncio.Task[None]] = []
        for name in self._chance.sample(names, len(names)):
            await asyncio.sleep(self._chance.uniform(0.05, len(ANSWER) / 5 / PER_S / 2))
            self._plane.kill(name)
            for outcome, task in zip(outcomes, streaming, strict=True):
                outcome.killed += [] if task.done() else [name]
            restarts.append(asyncio.create_task(self._restart(name, self._chance.uniform(0.0, 1.5))))
        await asyncio.gather(*restarts)

    async def _restart(self, name: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        self._plane.start(name.partition("-")[0], name)

    async def _client(self, outcome: BackgroundOutcome) -> None:
        """A client that follows its response to the end, at another replica whenever its connection breaks."""
        began = asyncio.get_running_loop().time()
        replica = self._chance.choice(REPLICAS)
        streams = outcome.number % 2 == 0
        body = {"model": outcome.agent, "input": f"Count, {outcome.number}.", "background": True, "stream": streams}
        key = {"Idempotency-Key": f"r{outcome.number}-{self._chance.randrange(10**9)}"}
        response_id = ""
        while not response_id or not outcome.events or outcome.events[-1]["type"] != "response.completed":
            url = f"{self._urls[replica]}/v1/responses"
            try:
                if not response_id and not streams:
                    async with self._http.post(url, json=body, headers=key) as created:
                        if created.status == 200:
                            response_id = (await created.json())["id"]
                    continue
                if not response_id:
                    asked = self._http.post(url, json=body, headers=key)
                else:
                    after = {"starting_after": outcome.events[-1]["sequence_number"]} if outcome.events else {}
                    asked = self._http.get(f"{url}/{response_id}", params={"stream": "true", **after})
                async with asked as stream:
                    if stream.status == 200:
                        outcome.connections += 1
                        async for line in stream.content:
                            if line.startswith(b"data: "):
                                outcome.events.append(json.loads(line[6:]))
                                response_id = response_id or outcome.events[0]["response"]["id"]
            except (aiohttp.ClientError, TimeoutError, OSError):
                await asyncio.sleep(0.05)
            replica = REPLICAS[(REPLICAS.index(replica) + 1) % len(REPLICAS)]
        outcome.took_s = asyncio.get_running_loop().time() - began
        await self._read_again(outcome, response_id)

    async def _read_again(self, outcome: BackgroundOutcome, response_id: str) -> None:
        name = self._chance.choice(REPLICAS)
        await until(lambda: self.serves(name), f"{name} to serve")
        for _ in range(20):
            try:
                url = f"{self._urls[name]}/v1/responses/{response_id}"
                async with self._http.get(url) as read:
                    outcome.response = await read.json()
                outcome.again = []
                async with self._http.get(url, params={"stream": "true"}) as stream:
                    async for line in stream.content:
                        if line.startswith(b"data: "):
                            outcome.again.append(json.loads(line[6:]))
                break
            except (aiohttp.ClientError, OSError):
                await asyncio.sleep(0.5)
        result = await self._plane.result(response_id.removeprefix("resp_"))
        outcome.calls = sum(not one["short_circuited"] for one in result["attempts"])
