"""Random clients on a whole plane that a nemesis disturbs, and what a checker says of all that was seen and recorded.

Clients send jobs over HTTP and NATS, chats, Responses, Messages and embeddings, streamed or not, in the background or
not; they repeat what they could not see the end of with the same idempotency key, and cancel some of it. The nemesis
kills, stops, cuts off and starves every process and server, empties Redis, fills streams and disks, and steps clocks.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import nats.errors
import nats.js.errors
from aiohttp import web

from breakwater.kernel.nats import subjects
from tests.chaos.checker import Breaker, Evidence, Operation, Outcome, ProviderCall, violations
from tests.chaos.clock import JumpingClock
from tests.chaos.faults import LEADER, SERVERS, SERVICES, SHORT_STOP_S, Fault, Kind
from tests.chaos.plane import SETTLED_S, Chaos, chaos_plane
from tests.flow.kit import COST_NANO, model
from tests.server_sources import Servers

CLIENTS = 12
PAUSE_S = 1.0
"""The longest pause of a client between two operations."""
RETRY_S = 0.5
PATIENCE_S = 60.0
"""Time for which a client repeats an operation whose end it could not see; it begins anew after the last fault."""
REQUEST_S = 90.0
WORDS = 24
SHARE_REPEATED = 0.15
SHARE_CANCELLED = 0.05

STREAM = {"tokens_per_s": 40.0}
AGENT = {
    "breaker": "off",
    "concurrency": 100,
    "timeout_s": 10,
    "total_timeout_s": 300,
    "retry": {"max_attempts": 12, "backoff": "constant", "base_s": 0.2},
}
ECHO = model(answer="{prompt}", stream=STREAM, latency_ms=200)
COUNT = "".join(f"{number:04d} " for number in range(40))
COUNTING = model(answer=COUNT, stream=STREAM, latency_ms=200)
"""The same text for each prompt: a model that is asked to continue a broken answer sees another prompt."""
CONTINUED = {"on_stream_break": "continue"}
MODELS = {
    "sim/m": ECHO,
    "own-m": COUNTING,
    "claude": COUNTING,
    "sim/capped": ECHO,
    "sim/flaky": model({"rate": 0.6, "status": 500}, answer="{prompt}", stream=STREAM, latency_ms=50),
    "sim/e": model(dimensions=16, usage={"input_tokens": 20, "output_tokens": 0}, latency_ms=100),
}
CAPPED = "sim/capped"
KINDS = (
    "nats job",
    "http job",
    "http job and wait",
    "chat",
    "chat stream",
    "responses",
    "responses stream",
    "responses background",
    "messages",
    "messages stream",
    "embeddings",
)
TEXT_AGENTS = ("chat", "native", "claude", "capped", "flaky")
COUNTING_AGENTS = ("native", "claude")
"""Agents whose models answer the same to each prompt. Background responses are always continued."""

CLOCKS = ("worker", "budget", "redis")
"""The parts whose clocks are stepped."""
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
HEADER = (
    "| seed | nodes | operations | accepted | executions | calls | lost | faults | violations | seconds |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def cap_nano(seconds: float) -> int:
    """The hard cap of the capped agent, which is reached in about half of the time."""
    return max(20, int(seconds / 4)) * COST_NANO


def agents_of(seconds: float) -> dict[str, Any]:
    """The agents of a history of so many seconds."""
    cap_usd = f"{cap_nano(seconds) / 1e9:.9f}"
    return {
        "chat": {**AGENT, "model": "sim/m"},
        "native": {**AGENT, "model": "own/own-m", **CONTINUED},
        "claude": {**AGENT, "model": "anthropic/claude", **CONTINUED},
        "capped": {**AGENT, "model": CAPPED, "budget": {"monthly_usd": cap_usd, "enforcement": "hard"}},
        "flaky": {
            **AGENT,
            "model": "sim/flaky",
            "breaker": {"consecutive_failures": 3, "cooldown_s": 3},
            "fallback_models": ["sim/m"],
            "retry": {"max_attempts": 2, "backoff": "constant", "base_s": 0.1},
        },
        "index": {**AGENT, "model": "sim/e"},
    }


@dataclass(slots=True)
class Receiver:
    """A receiver of webhooks: the id of each message that it took, and its incident."""

    deliveries: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    url: str = ""

    @asynccontextmanager
    async def listening(self) -> AsyncGenerator[Receiver]:
        """Takes messages on a free port of loopback."""
        runner = web.ServerRunner(web.Server(self._take), access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _take(self, request: web.BaseRequest) -> web.Response:
        data = (await request.json())["data"]
        for alert in data.get("alerts", [data]):
            self.deliveries.append((request.headers["webhook-id"], alert["incident_id"]))
        return web.Response()


class Client:
    """One of the random clients."""

    def __init__(self, chaos: Chaos, http: aiohttp.ClientSession, chance: random.Random, history: History) -> None:
        self._chaos, self._http, self._chance, self._history = chaos, http, chance, history

    async def run(self) -> None:
        """Sends one operation after the other, until the history is over."""
        while not self._history.over:
            await self._perform(self._history.begin(self._chance))
            await asyncio.sleep(self._chance.uniform(0, PAUSE_S))

    async def _perform(self, operation: Operation) -> None:
        """Sends an operation until its end is seen, or patience ends."""
        send = self._sender(operation)
        until = time.monotonic() + PATIENCE_S
        while True:
            operation.tries += 1
            try:
                operation.outcome = await send(operation)
            except (aiohttp.ClientError, nats.errors.Error, nats.js.errors.Error, TimeoutError, OSError):
                operation.outcome = "unknown"
            is_seen = operation.outcome in {"accepted", "answered", "refused"}
            if is_seen and (operation.tries > 1 or self._chance.random() > SHARE_REPEATED):
                break
            if time.monotonic() > max(until, self._history.healed_s + PATIENCE_S):
                break
            if not is_seen:
                await asyncio.sleep(RETRY_S)
        operation.ended_s = self._history.now()

    def _sender(self, operation: Operation) -> Callable[[Operation], Awaitable[Outcome]]:
        match operation.kind:
            case "nats job":
                return self._publish
            case "http job" | "http job and wait":
                return self._submit
            case "responses background":
                return self._follow_background
            case "embeddings":
                return self._embed
            case _:
                return self._ask

    async def _publish(self, operation: Operation) -> Outcome:
        job = self._job(operation)
        await self._chaos.plane.publish(job, **{"Nats-Msg-Id": job["job_id"]})
        operation.execution_ids.add(job["job_id"])
        return "accepted"

    async def _submit(self, operation: Operation) -> Outcome:
        job, waits = self._job(operation), operation.kind.endswith("wait")
        query = {"wait_s": "20"} if waits else {}
        async with self._http.post("/api/v1/jobs", json=job, params=query) as response:
            operation.status = response.status
            if response.status >= 300:
                return self._failure(operation, response)
            body = await response.json()
        operation.execution_ids.add(body["execution_id"])
        if body["status"] == "succeeded":
            operation.texts.append(body["output"])
        if not waits and self._chance.random() < SHARE_CANCELLED:
            async with self._http.post(f"/api/v1/jobs/{body['execution_id']}/cancel", json={}) as cancelled:
                await cancelled.read()
        return "answered" if response.status == 200 else "accepted"

    async def _ask(self, operation: Operation) -> Outcome:
        """A call of an API, streamed or not."""
        api, _, streamed = operation.kind.partition(" ")
        body = self._body(operation, api) | {"stream": bool(streamed)}
        async with self._http.post(PATHS[api], json=body, headers=self._key(operation)) as response:
            operation.status = response.status
            if response.status >= 300:
                return self._failure(operation, response)
            execution_id = response.headers["x-breakwater-execution-id"]
            operation.execution_ids.add(execution_id)
            text = await _streamed_text(response) if streamed else _text_of(api, await response.json())
        if text is None:
            return "failed"
        operation.texts.append(text)
        return "answered"

    async def _embed(self, operation: Operation) -> Outcome:
        body = {"model": operation.agent, "input": [operation.prompt, "another"]}
        async with self._http.post("/v1/embeddings", json=body, headers=self._key(operation)) as response:
            operation.status = response.status
            if response.status >= 300:
                return self._failure(operation, response)
            operation.execution_ids.add(response.headers["x-breakwater-execution-id"])
            await response.read()
        return "answered"

    async def _follow_background(self, operation: Operation) -> Outcome:
        """Creates a response in the background, and asks for it until it has ended."""
        body = self._body(operation, "responses") | {"background": True}
        async with self._http.post("/v1/responses", json=body, headers=self._key(operation)) as created:
            operation.status = created.status
            if created.status >= 300:
                return self._failure(operation, created)
            response = await created.json()
        operation.execution_ids.add(response["id"].removeprefix("resp_"))
        until = time.monotonic() + PATIENCE_S
        while response["status"] in {"queued", "in_progress"} and time.monotonic() < until:
            await asyncio.sleep(RETRY_S)
            async with self._http.get(f"/v1/responses/{response['id']}") as found:
                operation.status = found.status
                if found.status == 200:
                    response = await found.json()
                elif found.status == 404:
                    return "failed"
        if response["status"] == "completed":
            operation.texts.append(_text_of("responses", response))
            return "answered"
        return "accepted"

    def _failure(self, operation: Operation, response: aiohttp.ClientResponse) -> Outcome:
        """What an error says: of a job that has ended, of a request that none could serve, or of a plane in trouble."""
        if "x-breakwater-attempts" in response.headers:
            operation.execution_ids.add(response.headers["x-breakwater-execution-id"])
            return "answered"
        return "refused" if response.status < 500 and response.status not in {408, 409, 429} else "failed"

    def _job(self, operation: Operation) -> dict[str, Any]:
        return {"agent": operation.agent, "job_id": f"op-{operation.number}", "prompt": operation.prompt}

    def _key(self, operation: Operation) -> dict[str, str]:
        return {"Idempotency-Key": f"op-{operation.number}"}

    def _body(self, operation: Operation, api: str) -> dict[str, Any]:
        messages = [{"role": "user", "content": operation.prompt}]
        match api:
            case "responses":
                return {"model": operation.agent, "input": operation.prompt}
            case "messages":
                return {"model": operation.agent, "messages": messages, "max_tokens": 400}
            case _:
                return {"model": operation.agent, "messages": messages}


def _text_of(api: str, body: Mapping[str, Any]) -> str:
    """The text of a whole answer."""
    match api:
        case "responses":
            items = [item for item in body["output"] if item["type"] == "message"]
            return "".join(part["text"] for item in items for part in item["content"])
        case "messages":
            return "".join(block["text"] for block in body["content"] if block["type"] == "text")
        case _:
            return body["choices"][0]["message"]["content"]


async def _streamed_text(response: aiohttp.ClientResponse) -> str | None:
    """The text of a stream of any API; None where it did not come to its proper end."""
    pieces: list[str] = []
    async for line in response.content:
        if not line.startswith(b"data: "):
            continue
        data = line[6:].strip()
        if data == b"[DONE]":
            return "".join(pieces)
        event = json.loads(data)
        match event:
            case {"choices": choices}:
                pieces += [choice["delta"].get("content") or "" for choice in choices]
            case {"type": "response.output_text.delta", "delta": piece}:
                pieces.append(piece)
            case {"type": "content_block_delta", "delta": {"text": piece}}:
                pieces.append(piece)
            case {"type": "message_stop" | "response.completed"}:
                return "".join(pieces)
            case _:
                pass
    return None


class History:
    """The operations of all clients, and what was done to the plane meanwhile."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._began_s = time.monotonic()
        self.operations: list[Operation] = []
        self.faults: list[Fault] = []
        self.disturbed: set[str] = set()
        """The parts that have a fault now."""
        self.healed_s = float("inf")
        """When the last fault was over, by the monotonic clock."""

    def now(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._began_s

    @property
    def over(self) -> bool:
        """True when no further operation and no further fault may begin."""
        return self.now() >= self.seconds

    def begin(self, chance: random.Random) -> Operation:
        """Begins a random operation."""
        number, kind = len(self.operations), chance.choice(KINDS)
        agents = {"embeddings": ("index",), "responses background": COUNTING_AGENTS}.get(kind, TEXT_AGENTS)
        agent = chance.choice(agents)
        words = " ".join(f"{chance.randrange(10**5):05d}" for _ in range(WORDS))
        prompt = f"op-{number}: {words}"
        expected = None if kind == "embeddings" else COUNT if agent in COUNTING_AGENTS else prompt
        operation = Operation(number, kind, agent, prompt, expected, self.now())
        self.operations.append(operation)
        return operation


class Nemesis:
    """Lets faults happen one after the other; one part has one fault at a time."""

    def __init__(self, chaos: Chaos, history: History, chance: random.Random, *, nodes: int, may_fill: bool) -> None:
        self._chaos, self._history, self._chance = chaos, history, chance
        servers = ("redis", "clickhouse", LEADER) if nodes > 1 else SERVERS
        anywhere: tuple[Kind, ...] = ("kill", "kill", "stop", "slow", "silent", "reset", "memory")
        of_leader: tuple[Kind, ...] = ("kill", "kill", "stop", "silent", "reset")
        choices = [(kind, part) for part in SERVICES for kind in anywhere]
        choices += [(kind, part) for part in servers for kind in (of_leader if part == LEADER else anywhere)]
        choices += [("jump", part) for part in chaos.clocks]
        choices += 3 * [("flush", "redis"), ("limit", "nats")]
        if may_fill:
            choices += [("full", part) for part in SERVERS]
        self._choices: list[tuple[Kind, str]] = choices

    async def run(self) -> None:
        """Disturbs the plane until the history is over; all faults have ended when it returns."""
        while not self._history.over:
            await asyncio.sleep(self._chance.uniform(0.5, 5.0))
            kind, part = self._chance.choice(self._choices)
            place = "nats" if part == LEADER else part
            if place in self._history.disturbed:
                continue
            longest_s = SHORT_STOP_S if kind == "stop" else 15.0
            fault = Fault(kind, part, self._chance.choice((0.5, 1.0, 3.0, 8.0, longest_s)), self._history.now())
            self._history.faults.append(fault)
            self._history.disturbed.add(place)
            try:
                await self._chaos.cause(fault)
            finally:
                self._history.disturbed.discard(place)


@dataclass(frozen=True, slots=True)
class HistoryOutcome:
    """A history, and what the checker said."""

    seed: int
    nodes: int
    history: History
    evidence: Evidence
    took_s: float

    def faults_found(self) -> list[str]:
        """The promises that were broken."""
        return violations(self.evidence)

    def row(self) -> str:
        """A line of the table."""
        operations = self.history.operations
        lost = sum(attempt["outcome"] == "worker_lost" for attempt in self.evidence.attempts)
        figures = [
            self.seed,
            self.nodes,
            len(operations),
            sum(bool(operation.execution_ids) for operation in operations),
            len(self.evidence.executions),
            len(self.evidence.calls),
            lost,
            len(self.history.faults),
            len(self.faults_found()),
            f"{self.took_s:.0f}",
        ]
        return f"| {' | '.join(map(str, figures))} |"

    def account(self) -> str:
        """What was done, in the order in which it began, and how the operations of each kind ended."""
        lines = [f"  {fault.at_s:6.1f} s  {fault}" for fault in self.history.faults]
        ends: dict[str, Counter[str]] = {}
        for operation in self.history.operations:
            ends.setdefault(operation.kind, Counter())[operation.outcome] += 1
        lines += [
            f"  {kind}: {', '.join(f'{count} {outcome}' for outcome, count in sorted(outcomes.items()))}"
            for kind, outcomes in sorted(ends.items())
        ]
        return "\n".join(lines)


async def run_history(
    directory: Path,
    servers: Servers,
    seed: int,
    seconds: float,
    *,
    disks: Mapping[str, Path],
    clocks: Mapping[str, JumpingClock],
) -> HistoryOutcome:
    """Runs a history of so many seconds, waits until all is quiet, and gathers the evidence.

    Args:
        directory: for files.
        servers: the source of servers, whose Redis has its clock where it has one.
        seed: of all that is random; an even one runs on one NATS node, an odd one on a cluster of three.
        seconds: for which clients begin operations, and faults happen.
        disks: the small ones of the servers; without any, none is filled.
        clocks: those that may jump, by part.
    """
    chance, began_s, nodes = random.Random(seed), time.monotonic(), 3 if seed % 2 else 1
    receiver = Receiver()
    async with receiver.listening():
        secret = directory / "webhook-secret"
        secret.write_text("whsec_" + base64.b64encode(b"only for a history of chaos").decode())
        channel = {"url": receiver.url, "secret": {"file": str(secret)}}
        started = chaos_plane(
            directory,
            servers,
            nodes=nodes,
            disks=disks if nodes == 1 else {},
            clocks=clocks,
            models=MODELS,
            agents=agents_of(seconds),
            more_providers={
                "own": {"kind": "openai", "api": "responses", "base_url": "http://127.0.0.1:{sim_port}/v1"},
                "anthropic": {"kind": "anthropic", "base_url": "http://127.0.0.1:{sim_port}/v1"},
            },
            more_models={
                "sim/e": {"price": {"input_usd_per_mtok": "0.15", "output_usd_per_mtok": "0"}, "dimensions": 16}
            },
            alerts={
                "allow_networks": ["127.0.0.0/8"],
                "channels": {"receiver": {"webhook": channel, "rate_limit": "off"}},
                "quiet_s": 5,
            },
        )
        async with started as chaos:
            history = History(seconds)
            nemeses = [
                Nemesis(
                    chaos, history, random.Random(chance.random()), nodes=nodes, may_fill=bool(disks) and nodes == 1
                )
                for _ in range(2)
            ]
            timeout = aiohttp.ClientTimeout(total=REQUEST_S, sock_connect=5)
            async with aiohttp.ClientSession(chaos.url, headers=chaos.headers, timeout=timeout) as http:
                clients = [Client(chaos, http, random.Random(chance.random()), history) for _ in range(CLIENTS)]
                running = [asyncio.create_task(client.run()) for client in clients]
                await asyncio.gather(*(nemesis.run() for nemesis in nemeses))
                history.healed_s = time.monotonic()
                await asyncio.gather(*running)
                evidence = await _gather(chaos, http, history, receiver)
    return HistoryOutcome(seed, nodes, history, evidence, time.monotonic() - began_s)


async def _gather(chaos: Chaos, http: aiohttp.ClientSession, history: History, receiver: Receiver) -> Evidence:
    """Waits until the plane is quiet, as long as leases and redeliveries may take, and reads all that is left."""
    plane = chaos.plane
    await chaos.streams_answer()
    ended = [name for name, process in plane.processes.items() if process.poll() is not None]

    async def jobs_left() -> int:
        return sum([(await plane.jetstream.stream_info(stream)).state.messages for stream in ("JOBS", "PARKED")])

    left = await chaos.last(jobs_left, lambda count: count == 0, SETTLED_S)
    record = await chaos.settled_record()
    stored_ids = {
        table: [str(row[0]) for row in (await chaos.analytics.query(f"SELECT {key} FROM {table} FINAL")).rows]
        for table, key in (("executions", "execution_id"), ("attempts", "attempt_id"))
    }
    accepted = {execution_id for operation in history.operations for execution_id in operation.execution_ids}
    found = {execution_id: await plane.last("RESULTS", subjects.result(execution_id)) for execution_id in accepted}
    transitions = await plane.messages("EVENTS", "bw.breakers.>")
    return Evidence(
        operations=history.operations,
        executions=record.executions,
        attempts=record.attempts,
        results={execution_id: result for execution_id, result in found.items() if result is not None},
        stored_executions=stored_ids["executions"],
        stored_attempts=stored_ids["attempts"],
        calls=[
            ProviderCall(call.client_request_id, call.model, call.cost_nano, call.received_at)
            for call in plane.sim.ledger.calls
        ],
        sums=record.sums,
        reserved_nano=record.reserved,
        caps_nano={CAPPED: cap_nano(history.seconds)},
        breakers=await _breakers(http),
        transitions=transitions,
        alerts=await plane.messages("ALERTS", "bw.alerts.>"),
        deliveries=receiver.deliveries,
        waiting=[*record.stuck, *([f"{left} messages in JOBS and PARKED"] if left else [])],
        ended_processes=ended,
    )


async def _breakers(http: aiohttp.ClientSession) -> dict[tuple[str, str], Breaker]:
    async with http.get("/api/v1/breakers") as response:
        body = await response.json()
    return {
        (breaker["agent"], breaker["model"]): Breaker(breaker["state"], breaker["version"])
        for breaker in body["breakers"]
    }
