"""Two tenants on one plane: one works, the other does all the harm that its key and its NATS user allow.

    python -m bench.neighbours [--seconds 600] [--rate 10] [--alone 30]

The honest tenant sends jobs at an even rate, in turn over HTTP and over NATS: first alone, then beside the hostile
one, which shares its agent, its model and the plane's hard cap. Nothing of the honest tenant may be lost, refused or
stopped, its record must be exact, no breaker may open and no alert concern it, and its p95 may be 1.5 times as long.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import secrets
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import aiohttp
import nats
import nats.errors
import nats.js.errors
from aiohttp import web
from nats.aio.client import Client

from bench.local_stack import UP, running_stack
from breakwater.kernel.nats.permissions import inbox_prefix

ANSWER_S, SLOW_S = 0.1, 20.0
PRICE = {"input_usd_per_mtok": "1", "output_usd_per_mtok": "2"}
USAGE = {"prompt_tokens": 100, "completion_tokens": 50, "total_tokens": 150}
COST = Decimal("0.0002")
POISON, SLOW = "poison", "slow"


class Provider:
    """Answers after a moment; a poison prompt fails, and a slow one takes long."""

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        text = json.dumps(body["messages"])
        if POISON in text:
            return web.json_response(
                {"error": {"message": "The server had an error", "type": "server_error"}}, status=500
            )
        await asyncio.sleep(SLOW_S if SLOW in text else ANSWER_S)
        message = {"role": "assistant", "content": "yes"}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        return web.json_response({"id": "x", "model": body["model"], "choices": choices, "usage": USAGE})

    async def serve(self) -> tuple[web.AppRunner, int]:
        """Listens on a free port."""
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner, runner.addresses[0][1]


def config(port: int) -> dict[str, Any]:
    """One agent, one model and one cap for both tenants."""
    programs = {name: {"agents": ["writer"], "tenants": [name]} for name in ("honest", "hostile")}
    return {
        "providers": {"sim": {"base_url": f"http://127.0.0.1:{port}/v1"}},
        "models": {"sim/m": {"price": PRICE}},
        "agents": {"writer": {"model": "sim/m", "concurrency": 16}},
        "budgets": {"global": {"daily_usd": 20, "enforcement": "hard"}},
        "programs": programs,
    }


class Honest:
    """Sends jobs with predictable ids, and measures each."""

    def __init__(self, api: Api, bus: Client) -> None:
        self._api, self._bus = api, bus
        self._answers: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self.took: list[float] = []
        self.ends: Counter[str] = Counter()
        self.sent = 0

    async def listen(self) -> None:
        async def on_answer(message: Any) -> None:
            answer = json.loads(message.data)
            waiting = self._answers.get(message.subject)
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)

        await self._bus.subscribe("bw.replies.program-honest.>", cb=on_answer)

    async def work(self, rate: float, seconds: float) -> None:
        self.took, self.ends, begun = [], Counter(), time.perf_counter()
        async with asyncio.TaskGroup() as jobs:
            for number in range(round(rate * seconds)):
                await asyncio.sleep(max(0.0, begun + number / rate - time.perf_counter()))
                self.sent += 1
                jobs.create_task(self._job(f"order-{self.sent}", self._over_http if number % 2 else self._over_nats))

    async def _job(self, job_id: str, send: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]) -> None:
        begun = time.perf_counter()
        task_id = f"run-{self.sent // 5}"
        job = {"agent": "writer", "job_id": job_id, "prompt": f"write {job_id}", "task_id": task_id, "tenant": "honest"}
        try:
            async with asyncio.timeout(60):
                answer = await send(job)
            right = answer.get("job_id") == job_id
            self.ends[answer.get("status", "?") if right else "another's answer"] += 1
        except Exception as error:  # noqa: BLE001  each way to fail is counted
            self.ends[f"{type(error).__name__}: {error}"[:120]] += 1
        self.took.append(time.perf_counter() - begun)

    async def _over_http(self, job: dict[str, Any]) -> dict[str, Any]:
        status, answer = await self._api.call("POST", "/api/v1/jobs?wait_s=50", job)
        return answer if status == 200 else {"status": f"HTTP {status}: {answer}"[:120], "execution_id": job["job_id"]}

    async def _over_nats(self, job: dict[str, Any]) -> dict[str, Any]:
        reply = f"bw.replies.program-honest.{job['job_id']}"
        answered = self._answers[reply] = asyncio.get_running_loop().create_future()
        headers = {"Nats-Msg-Id": job["job_id"]}
        payload = json.dumps(job | {"reply_to": reply}).encode()
        ack = await self._bus.jetstream(timeout=10).publish("bw.jobs.writer", payload, headers=headers)
        assert not ack.duplicate, "JetStream took it for another's"
        try:
            return await answered
        finally:
            del self._answers[reply]


class Api:
    """The HTTP API with one key."""

    def __init__(self, session: aiohttp.ClientSession, base: str, key: str) -> None:
        self._session, self.base, self._key = session, base, key

    async def call(self, method: str, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self._key}"}
        async with self._session.request(method, self.base + path, data=data, headers=headers) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if text[:1] == "{" else {"text": text}


class Hostile:
    """Does harm, at rates that leave the machine to the plane."""

    def __init__(self, api: Api, bus: Client, connect: Callable[[], Awaitable[Client]], other: Honest) -> None:
        self._api, self._bus, self._connect, self._other = api, bus, connect, other
        self.did: Counter[str] = Counter()

    async def harm(self) -> None:
        """Goes on until cancelled."""
        deep = b'{"agent":"writer","prompt":"x","metadata":{"d":' + b"[" * 3000 + b"]" * 3000 + b"}}"
        huge = json.dumps({"agent": "writer", "prompt": "x" * 6_600_000}).encode()
        attacks: list[tuple[float, Callable[[], Awaitable[Any]]]] = [
            (3, lambda: self._post({"prompt": POISON})),
            (1, lambda: self._post({"prompt": SLOW, "params": {"max_tokens": 9_000_000}})),
            (1, lambda: self._post({"prompt": SLOW})),
            (5, lambda: self._post({"prompt": "mine", "job_id": self._next_id()})),
            (2, lambda: self._post({"prompt": POISON, "task_id": f"run-{self._other.sent // 5}"})),
            (5, lambda: self._post({"prompt": "x", "dry_run": True, "job_id": self._next_id()})),
            (5, lambda: self._api.call("POST", f"/api/v1/jobs/{self._next_id()}/cancel")),
            (1, lambda: self._api.call("GET", f"/api/v1/jobs/{self._next_id()}?wait_s=300")),
            (1, lambda: self._api.call("POST", "/api/v1/jobs", deep)),
            (1, lambda: self._post({"prompt": "x", "params": {"models": ["other"], "best_of": 9}})),
            (1, lambda: self._post({"prompt": "x", "tenant": "honest"})),
            (1, lambda: self._post({"prompt": "x", "reply_to": f"bw.replies.program-honest.{self._next_id()}"})),
            (5, lambda: self._publish({"prompt": "mine"}, self._next_id())),
            (1, lambda: self._publish({"prompt": POISON}, secrets.token_hex(8))),
            (1, lambda: self._publish({"prompt": "x", "tenant": "honest"}, secrets.token_hex(8))),
            (1, lambda: self._publish({"prompt": "x", "reply_to": f"bw.replies.program-honest.{self._next_id()}"}, "")),
            (2, lambda: self._bus.publish(f"bw.replies.program-honest.{self._next_id()}", b'{"status":"succeeded"}')),
            (2, lambda: self._bus.request(f"bw.cancel.{self._next_id()}", b"", timeout=5)),
            (0.1, lambda: self._bus.jetstream(timeout=5).publish("bw.jobs.writer", huge)),
            (0.2, self._subscribe),
            (50, self._stall),
        ]
        async with asyncio.TaskGroup() as group:
            for rate, attack in attacks:
                group.create_task(self._again(rate, attack))

    async def _again(self, rate: float, attack: Callable[[], Awaitable[Any]]) -> None:
        under_way: set[asyncio.Task[None]] = set()

        async def once() -> None:
            try:
                async with asyncio.timeout(60):
                    done = await attack()
                self.did[f"HTTP {done[0]}" if isinstance(done, tuple) else "done"] += 1
            except (aiohttp.ClientError, nats.errors.Error, nats.js.errors.Error, OSError, ValueError) as error:
                self.did[type(error).__name__] += 1

        while True:
            await asyncio.sleep(random.expovariate(rate))
            task = asyncio.create_task(once())
            under_way.add(task)
            task.add_done_callback(under_way.discard)

    def _next_id(self) -> str:
        """An id that the other is about to use, or is using."""
        return f"order-{self._other.sent + random.randint(-3, 20)}"

    async def _post(self, job: dict[str, Any]) -> Any:
        return await self._api.call("POST", "/api/v1/jobs", {"agent": "writer", **job})

    async def _publish(self, job: dict[str, Any], message_id: str) -> Any:
        headers = {
            "Nats-Msg-Id": message_id or secrets.token_hex(8),
            "Breakwater-Owner": "honest",
            "Breakwater-Submitted-By": "honest",
            "Breakwater-Unique-Id": "1",
            "Breakwater-Queued-At": "9999-12-31T23:59:59.999Z",
        }
        payload = json.dumps({"agent": "writer", **job}).encode()
        await self._bus.jetstream(timeout=5).publish("bw.jobs.writer", payload, headers=headers)

    async def _subscribe(self) -> None:
        """A connection more, with more subscriptions than the server lets it have, which ends it."""
        bus = await self._connect()
        try:
            for _ in range(600):
                await bus.subscribe(f"_INBOX.program-hostile.{secrets.token_hex(8)}")
            await bus.flush()
        finally:
            await bus.close()

    async def _stall(self) -> None:
        """A request without a key, whose body never comes."""
        host, _, port = self._api.base.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(b"POST /api/v1/openid/complete HTTP/1.1\r\nHost: x\r\nContent-Length: 9000\r\n\r\n{")
            await reader.read()
        finally:
            writer.close()


def percentiles(took: list[float]) -> list[float]:
    """Of p50, p95 and p99, in ms."""
    ordered = sorted(took)
    return [1000 * ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] for percent in (50, 95, 99)]


async def run(options: argparse.Namespace, data: Path) -> bool:
    """Starts the stack, measures, and prints what came of it. Returns whether the honest tenant noticed nothing."""
    runner, port = await Provider().serve()
    try:
        async with running_stack(config(port), data) as endpoints:
            return await measure(options, data / "plane", endpoints)
    finally:
        await runner.cleanup()


def key_for(name: str, plane: Path) -> str:
    """An API key that is bound to the tenant of that name."""
    made = [sys.executable, "-c", UP, "keys", "create", name, "--scope", "submit", "--tenant", name, "--json"]
    return json.loads(subprocess.check_output([*made, "--data", str(plane)], text=True))["key"]


async def measure(options: argparse.Namespace, plane: Path, endpoints: dict[str, Any]) -> bool:
    """Has both of them go, and prints a table."""
    keys = {name: key_for(name, plane) for name in ("honest", "hostile")}
    address = endpoints["nats_url"].rpartition("@")[2]
    heard: Counter[str] = Counter()

    async def bus(user: str) -> Client:
        password = (plane / "secrets" / f"nats-{user}").read_text().strip()
        return await nats.connect(
            f"nats://{user}:{password}@{address}", inbox_prefix=inbox_prefix(user), error_cb=ignore
        )

    async def on_event(message: Any) -> None:
        event = json.loads(message.data)
        if message.subject.startswith("bw.breakers."):
            # One that is open for the hostile tenant alone is as it should be.
            heard["breaker open"] += event.get("to_state") == "open" and event.get("open_for") is None
        elif "honest" in json.dumps(event):
            heard[f"alert {message.subject}"] += 1

    watcher = await nats.connect(endpoints["nats_url"])
    for subject in ("bw.breakers.>", "bw.alerts.>"):
        await watcher.subscribe(subject, cb=on_event)
    buses = {name: await bus(f"program-{name}") for name in keys}
    setup = await bus("setup")
    before = await streams_of(setup)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session, aiohttp.ClientSession() as others:
        honest = Honest(Api(session, endpoints["request_url"], keys["honest"]), buses["honest"])
        await honest.listen()
        await honest.work(options.rate, 5)
        await honest.work(options.rate, options.alone)
        alone, ends_alone = percentiles(honest.took), honest.ends
        hostile = Hostile(
            Api(others, endpoints["request_url"], keys["hostile"]),
            buses["hostile"],
            lambda: bus("program-hostile"),
            honest,
        )
        harm = asyncio.create_task(hostile.harm())
        await honest.work(options.rate, options.seconds)
        harm.cancel()
        await asyncio.wait([harm])
    spent = await spent_by("honest", honest.sent, endpoints)
    unchanged = await streams_of(setup) == before
    for client in (watcher, setup, *buses.values()):
        await client.close()
    beside = percentiles(honest.took)
    print(f"{'':8} {'jobs':>6} {'p50':>8} {'p95':>8} {'p99':>8}   ends")
    for what, (p50, p95, p99), ends in (("alone", alone, ends_alone), ("beside", beside, honest.ends)):
        print(f"{what:8} {ends.total():6} {p50:6.0f}ms {p95:6.0f}ms {p99:6.0f}ms   {dict(ends)}")
    print(f"record: {honest.sent} jobs cost {spent}, and should {COST * honest.sent}")
    print(f"breakers opened, alerts of the honest tenant: {dict(heard)}")
    print(f"the hostile tenant did: {dict(hostile.did)}")
    checks = {
        "all jobs succeeded": set(honest.ends) == {"succeeded"},
        "p95 within 1.5 times": beside[1] <= 1.5 * alone[1],
        "the record is exact": spent == COST * honest.sent,
        "no breaker opened, no alert": not heard.total(),
        "streams and consumers as before": unchanged,
    }
    for what, holds in checks.items():
        print(f"{'ok  ' if holds else 'NOT '} {what}")
    return all(checks.values())


async def streams_of(setup: Client) -> dict[str, Any]:
    """The settings of each stream, and of its consumers."""
    jetstream = setup.jetstream(timeout=10)
    return {
        str(stream.config.name): (
            stream.config,
            {one.name: one.config for one in await jetstream.consumers_info(str(stream.config.name))},
        )
        for stream in await jetstream.streams_info()
    }


async def ignore(_: Exception) -> None:
    """What NATS refuses to the hostile tenant is no news."""


async def spent_by(tenant: str, jobs: int, endpoints: dict[str, Any]) -> Decimal:
    """What a tenant's jobs cost by the record, once all of them are in ClickHouse."""
    url, _, database = endpoints["clickhouse_url"].rpartition("/")
    statement = f"SELECT count(), sum(total_cost) FROM {database}.executions FINAL WHERE tenant = '{tenant}' FORMAT TSV"
    async with aiohttp.ClientSession() as session:
        for _ in range(60):
            async with session.post(url, data=statement) as answer:
                text = await answer.text()
                assert answer.status == 200, text
                count, cost = text.split()
            if int(count) >= jobs:
                break
            await asyncio.sleep(1)
    return Decimal(cost)


def main() -> None:
    """Reads the options, and runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="beside the hostile tenant (default 600)")
    parser.add_argument("--alone", type=float, default=30.0, help="seconds alone, before (default 30)")
    parser.add_argument("--rate", type=float, default=10.0, help="jobs a second of the honest tenant (default 10)")
    with tempfile.TemporaryDirectory() as data:
        sys.exit(0 if asyncio.run(run(parser.parse_args(), Path(data))) else 1)


if __name__ == "__main__":
    main()
