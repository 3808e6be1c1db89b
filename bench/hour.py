"""An hour at a plane's full speed with everything on: memory, disks, latencies and ledgers over time.

    python -m bench.hour [--minutes 60] [--out /tmp/hour.jsonl] [--picture docs/images/hour.svg]
    python -m bench.hour --read /tmp/hour.jsonl --picture docs/images/hour.svg      # judges and draws samples again

Starts a whole local stack with guards, caps, limits of tenants, fallbacks, breakers, shadows, redaction, encryption, a
cache and a webhook, and a provider that fails some calls, and all of them for 45 s every ten minutes. `--in-flight`
clients, each of which sends its next job once it has the result of the one before, publish jobs to NATS and call chat
completions, streamed or not. EVENTS and RESULTS are kept for `--keep-minutes` only, so that retention bites.

Every ten seconds all that may grow is sampled (`--out`, a line each). Every five minutes the clients pause, and the
ledgers are compared: the jobs by the clients, results and ClickHouse; the money by results, Redis' counters,
ClickHouse's executions and attempts, and the provider. The exit code is 1 if they differ, or if a series grows in the
second half by more than what explains it (`bench/growth.py`): messages and rows that are stored, and keys that expire.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import random
import sys
import tempfile
import time
import uuid
from collections import Counter, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import uvloop
from nats.js import JetStreamContext

from bench.growth import drawn, judged
from bench.local_stack import running_stack
from bench.meters import Meters, connected, running_provider, secret_of
from bench.plane import cpu_ms, publish_job
from breakwater.kernel.nats import subjects
from breakwater.kernel.security.encryption import new_key
from breakwater.kernel.types import nano_from_usd
from tests.chaos.history import Receiver
from tests.flow.kit import PRICE

SAMPLE_S = 10.0
SETTLE_S = 90.0
"""The longest time until the ledgers agree; the log is compared with the counters each minute."""
LONGEST_S = 120.0
"""The longest time until a job's result."""
OUTAGE_EVERY_S, OUTAGE_S = 600, 45
STEPS, STEPS_OF_A_LOOP = 4, 8
"""The jobs of a task, and of one in a hundred, which its guard stops."""
CAP_USD_A_MINUTE = "0.004"

OPERATIONS = {
    ("writer", "nats"): 30,
    ("writer", "chat"): 12,
    ("support", "chat"): 15,
    ("support", "stream"): 5,
    ("stepper", "nats"): 6,
    ("private", "nats"): 8,
    ("extractor", "chat"): 5,
    ("capped", "nats"): 4,
}
"""The share of each agent and way of asking. The jobs of a task count as one."""
TENANTS = {"acme": 60, "globex": 30, "initech": 10}


def config(url: str, directory: Path, receiver_url: str, keep_minutes: float) -> dict[str, Any]:
    """A config with everything on."""
    (directory / "webhook-secret").write_text("whsec_" + base64.b64encode(b"only for the hour of a bench").decode())
    (directory / "texts-key").write_text(new_key())
    hard = {"daily_usd": 10_000, "monthly_usd": 100_000, "enforcement": "hard"}
    retry = {"max_attempts": 3, "base_s": 0.1, "max_delay_s": 1}
    common = {"model": "sim/main", "max_tokens": 200, "concurrency": 128, "timeout_s": 10, "retry": retry}
    breaker = {"consecutive_failures": 20, "failure_rate": 0.6, "minimum_calls": 40, "within_s": 10, "cooldown_s": 5}
    webhook = {"url": receiver_url, "secret": {"file": str(directory / "webhook-secret")}}
    return {
        "providers": {"sim": {"base_url": url}},
        "models": {f"sim/{name}": {"price": PRICE} for name in ("main", "spare", "json")},
        "defaults": {"total_timeout_s": 60, "breaker": breaker, "budget": hard},
        "agents": {
            "writer": {
                **common,
                "fallback_models": ["sim/spare"],
                "shadow": {"breaker": {"consecutive_failures": 5, "cooldown_s": 30}},
            },
            "support": {
                **common,
                "fallback_models": ["sim/spare"],
                "cache": {"ttl_s": 60, "share_concurrent": True},
                "rate_limit": {"requests_per_minute": 1_000_000, "tokens_per_minute": 1_000_000_000},
            },
            "stepper": {**common, "guard": {"max_iterations": 6, "rate_limit": {"requests_per_minute": 10_000}}},
            "private": {**common, "fallback_models": ["sim/spare"], "persist_prompts": False},
            "extractor": {
                **common,
                "model": "sim/json",
                "output": {"schema": {"type": "object", "required": ["order"]}, "native": False},
            },
            "capped": {**common, "fallback_models": ["sim/spare"]},
        },
        "budgets": {
            "global": hard,
            "tenants": {"*": hard},
            "compare_every_s": 60,
            "limits": [
                {"scope": "agent:capped", "usd": CAP_USD_A_MINUTE, "per": "minute", "action": "refuse"},
                {"scope": "tenant:*", "requests": 1_000_000, "per": "minute", "action": "wait"},
                {"scope": "tenant:*", "concurrent": 10_000, "action": "wait"},
                {"scope": "tag:team=*", "usd": "10000", "per": "week", "action": "alert"},
            ],
        },
        "shadow": {"limits": [{"scope": "tenant:acme", "usd": "1", "per": "day"}]},
        "cost_tags": ["team"],
        "redaction": {"fields": ["email"], "patterns": [r"\b\d{3}-\d{2}-\d{4}\b"], "forms": ["iban", "phone"]},
        "encryption": {"keys": [{"file": str(directory / "texts-key")}]},
        "alerts": {"allow_networks": ["127.0.0.0/8"], "channels": {"receiver": {"webhook": webhook}}},
        "limits": {"events_max_age_h": keep_minutes / 60, "results_max_age_h": max(keep_minutes, 10) / 60},
    }


def script(seconds: float) -> dict[str, Any]:
    """Models that fail now and then, the main one also all of a time every ten minutes."""
    outages = [
        {"from_s": begin, "to_s": begin + OUTAGE_S, "status": 503}
        for begin in range(90, int(seconds) + OUTAGE_EVERY_S, OUTAGE_EVERY_S)
    ]
    common = {
        "price": PRICE,
        "latency_ms": {"p50": 60, "p95": 150},
        "usage": {"input_tokens": [60, 180], "output_tokens": [20, 120]},
        "answer": "Send it back to us with the form that came with it; jane.doe@example.com helps. " * 4,
    }
    rare = [{"rate": 0.01, "status": 500}, {"rate": 0.005, "status": 429, "retry_after_s": 1}]
    wrong = {"rate": 0.1, "answer": "The order is 17."}
    models = {
        "main": {**common, "faults": [*outages, *rare, {"rate": 0.001, "status": 400}]},
        "spare": {**common, "faults": rare},
        "json": {**common, "answer": '{"order": 17}', "faults": [wrong, *rare]},
    }
    return {"seed": 1, "models": models}


class Clients:
    """Clients of the plane, and all that they have seen.

    Attributes:
        sent: jobs that were sent.
        ends: results by their reasons, or `succeeded`.
        cost_nano: the money of all results.
        took_s: how long the jobs took that have ended since it was last emptied.
        lost: jobs without a result after a long time.
    """

    def __init__(self, jetstream: JetStreamContext, http: aiohttp.ClientSession) -> None:
        self.sent = self.cost_nano = 0
        self.ends: Counter[str] = Counter()
        self.took_s: list[float] = []
        self.lost: list[str] = []
        self._jetstream = jetstream
        self._http = http
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._going = asyncio.Event()
        self._quiet = asyncio.Event()
        self._in_flight = 0

    async def on_result(self, message: Any) -> None:
        """Counts a result, however its job was sent."""
        result = orjson.loads(message.data)
        self.ends[result["reason"] or result["status"]] += 1
        self.cost_nano += nano_from_usd(result["total_cost"] or "0")
        if (future := self._waiting.pop(message.subject, None)) is not None:
            future.set_result(None)

    def go(self) -> None:
        """Lets them send."""
        self._going.set()

    async def pause(self) -> None:
        """Returns when all that was sent is answered; they send no more until they may go."""
        self._going.clear()
        while self._in_flight:
            self._quiet.clear()
            await self._quiet.wait()

    async def run(self, chance: random.Random) -> None:
        """Sends one job after the other."""
        while True:
            [(agent, way)] = chance.choices(list(OPERATIONS), list(OPERATIONS.values()))
            [tenant] = chance.choices(list(TENANTS), list(TENANTS.values()))
            if agent != "stepper":
                await self._timed(agent, way, tenant, chance)
                continue
            task_id = uuid.uuid4().hex
            for _ in range(STEPS_OF_A_LOOP if chance.random() < 0.01 else STEPS):
                await self._timed(agent, way, tenant, chance, task_id=task_id)

    async def _timed(self, agent: str, way: str, tenant: str, chance: random.Random, **more: str) -> None:
        await self._going.wait()
        self._in_flight += 1
        begun = time.perf_counter()
        number = chance.randrange(100) if agent == "support" else chance.randrange(10**9)
        prompt = f"How do I return parcel {number}? Call me at +1 202 555 0143, or write to j{number}@example.com. " * 4
        try:
            async with asyncio.timeout(LONGEST_S):
                if way == "nats":
                    await self._publish(agent, prompt, tenant, **more)
                else:
                    await self._ask(agent, prompt, tenant, stream=way == "stream")
            self.took_s.append(time.perf_counter() - begun)
        except TimeoutError:
            self.lost.append(f"{agent} over {way}")
        finally:
            self._in_flight -= 1
            self._quiet.set()

    async def _publish(self, agent: str, prompt: str, tenant: str, **more: str) -> None:
        job_id = uuid.uuid4().hex
        future = self._waiting[subjects.result(job_id)] = asyncio.get_running_loop().create_future()
        fields = {"prompt": prompt, "tenant": tenant, "metadata": {"team": f"team-{len(prompt) % 5}"}}
        await publish_job(self._jetstream, agent, job_id, **fields, **more)
        self.sent += 1
        await future

    async def _ask(self, agent: str, prompt: str, tenant: str, *, stream: bool) -> None:
        body = {"model": agent, "messages": [{"role": "user", "content": prompt}], "stream": stream}
        headers = {"x-breakwater-tenant": tenant}
        async with self._http.post("/v1/chat/completions", json=body, headers=headers) as response:
            await response.read()
            # What is refused at the door becomes no job.
            self.sent += "x-breakwater-execution-id" in response.headers


class Hour:
    """The samples and ledgers of a plane under load."""

    def __init__(self, meters: Meters, clients: Clients, plane: int, provider: str, keep_s: float) -> None:
        self._meters, self._clients, self._plane, self._provider = meters, clients, plane, provider
        self._keep_s = keep_s
        self._recent: deque[tuple[float, int, int, float]] = deque()
        """Since the retention began: times in seconds, jobs that had ended by then, failed ones, and ms of CPU."""
        self.go_on()

    def go_on(self) -> None:
        """Begins a sample, after a pause that belongs to none."""
        done, used = self._clients.ends.total(), cpu_ms(self._plane)
        self._recent.append((time.monotonic(), done, done - self._clients.ends["succeeded"], sum(used.values())))

    async def sample(self) -> dict[str, float]:
        """Returns all series by name; times in ms."""
        took, self._clients.took_s = sorted(self._clients.took_s), []
        begun_s, done_before, failed_before, cpu_before = self._recent[-1]
        self.go_on()
        now, done, failed, cpu = self._recent[-1]
        while self._recent[0][0] < now - self._keep_s:
            self._recent.popleft()
        quantiles = {f"p{percent}": 1000 * took[len(took) * percent // 100] for percent in (50, 95, 99) if took}
        return {
            "done": done,
            "done.kept": done - self._recent[0][1],
            "failed": failed,
            "jobs_per_s": (done - done_before) / (now - begun_s),
            "failed_per_s": (failed - failed_before) / (now - begun_s),
            "cpu_ms": (cpu - cpu_before) / max(1, done - done_before),
            "cost_usd": self._clients.cost_nano / 1e9,
            **quantiles,
            **await self._meters.read(),
        }

    async def ledgers(self) -> dict[str, Any]:
        """Returns the ledgers once they agree, or after a long time. Money in nano-dollars."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            books = await self._books()
            is_settled = not books["reserved"] and all(
                len(set(books[kind].values())) == 1 for kind in ("jobs", "calls", "nano_usd")
            )
            if is_settled or time.monotonic() > deadline:
                return {**books, "agree": is_settled and not books["lost"]}
            await asyncio.sleep(1)

    async def _books(self) -> dict[str, Any]:
        executions, attempts = [
            next((await self._meters.analytics.query(statement)).named_rows())
            for statement in (
                "SELECT count() AS jobs, toInt64(sum(total_cost) * 1000000000) AS nano FROM executions FINAL",
                """SELECT countIf(NOT short_circuited) AS calls, toInt64(sum(cost) * 1000000000) AS nano
                   FROM attempts FINAL""",
            )
        ]
        counters: Counter[str] = Counter()
        async for key in self._meters.redis.scan_iter("bw:limits:monthly:*"):
            for name in ("spent:global", "reserved:global"):
                counters[name] += int(await self._meters.redis.hget(str(key), name) or 0)  # pyright: ignore[reportGeneralTypeIssues]
        async with aiohttp.ClientSession() as http, http.get(f"{self._provider}/_sim/ledger") as response:
            totals = (await response.json())["totals"]
        clients = self._clients
        return {
            "jobs": {"clients": clients.sent, "results": clients.ends.total(), "ClickHouse": executions["jobs"]},
            "calls": {"provider": totals["calls"], "ClickHouse": attempts["calls"]},
            "nano_usd": {
                "results": clients.cost_nano,
                "Redis": counters["spent:global"],
                "executions": executions["nano"] or 0,
                "attempts": attempts["nano"] or 0,
                "provider": totals["cost_nano"],
            },
            "reserved": counters["reserved:global"],
            "ends": dict(clients.ends),
            "lost": clients.lost,
        }

    async def keys(self) -> dict[str, Any]:
        """Returns counts of Redis' keys by the second word of their names: their bytes, and those that never expire."""
        kinds: dict[str, Counter[str]] = {}
        cursor = None
        while cursor != 0:
            cursor, keys = await self._meters.redis.scan(cursor or 0, count=1_000)
            async with self._meters.redis.pipeline(transaction=False) as pipe:
                for key in keys:
                    pipe.pttl(key).memory_usage(key)
                answers = await pipe.execute()
            for key, ttl_ms, size in zip(keys, answers[::2], answers[1::2], strict=True):
                counts = kinds.setdefault(str(key).split(":")[1], Counter())
                counts.update(keys=1, bytes=int(size or 0), staying=ttl_ms == -1)
                counts["longest_ttl_s"] = max(counts["longest_ttl_s"], ttl_ms // 1000)
        return {kind: dict(counts) for kind, counts in kinds.items()}

    async def most_in_a_minute(self) -> str:
        """Returns the most that the capped agent has spent within any minute, in USD."""
        statement = """
            SELECT toString(max(spent)) FROM (
                SELECT sum(cost) OVER (
                    ORDER BY toUnixTimestamp64Milli(reserved_at) RANGE BETWEEN 59000 PRECEDING AND CURRENT ROW) AS spent
                FROM attempts FINAL WHERE agent = 'capped' AND reserved_at IS NOT NULL)"""
        return str((await self._meters.analytics.query(statement)).rows[0][0])


async def run(options: argparse.Namespace, directory: Path) -> bool:
    """Runs the load, and writes the samples. Returns True if all ledgers agreed, and no cap was passed."""
    seconds, receiver = options.minutes * 60, Receiver()
    async with receiver.listening(), running_provider(script(seconds)) as provider:
        settings = config(f"{provider}/v1", directory, receiver.url, options.keep_minutes)
        async with running_stack(settings, directory) as endpoints:
            return await measured(options, provider, endpoints, receiver)


async def measured(options: argparse.Namespace, provider: str, endpoints: dict[str, Any], receiver: Receiver) -> bool:
    """Runs the load on a stack, and writes the samples."""
    data, ends = Path(endpoints["data_dir"]), time.monotonic() + options.minutes * 60
    http = aiohttp.ClientSession(
        endpoints["request_url"],
        headers={"Authorization": f"Bearer {secret_of(Path(endpoints['api_key_file']))}"},
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
    )
    async with http, connected(data, "request") as client, connected(data, "setup") as setup:
        clients = Clients(client.jetstream(), http)
        await client.subscribe("bw.results.*", cb=clients.on_result)
        meters = Meters(endpoints, setup.jetstream(timeout=30))
        hour = Hour(meters, clients, endpoints["pid"], provider, options.keep_minutes * 60)
        tasks = [asyncio.create_task(clients.run(random.Random(number))) for number in range(options.in_flight)]
        try:
            with options.out.open("w") as out:
                began, all_agreed = time.monotonic(), True
                next_ledgers = began + options.ledger_minutes * 60

                def note(kind: str, values: Mapping[str, Any]) -> None:
                    at_s = round(time.monotonic() - began, 1)
                    out.write(json.dumps({"kind": kind, "at_s": at_s, **values}) + "\n")
                    out.flush()

                note("run", {"in_flight": options.in_flight, "keep_minutes": options.keep_minutes})
                clients.go()
                while (now := time.monotonic()) < ends:
                    await asyncio.sleep(SAMPLE_S - (now - began) % SAMPLE_S)
                    note("sample", await hour.sample())
                    for ended in filter(asyncio.Task.done, tasks):
                        ended.result()  # raises what has ended it
                    if time.monotonic() < min(next_ledgers, ends):
                        continue
                    next_ledgers += options.ledger_minutes * 60
                    await clients.pause()
                    books = await hour.ledgers()
                    all_agreed &= books["agree"]
                    note("ledgers", books)
                    note("keys", await hour.keys())
                    print(f"{(time.monotonic() - began) / 60:.1f} min: {json.dumps(books)}", flush=True)
                    hour.go_on()
                    clients.go()
                spent = await hour.most_in_a_minute()
                note("end", {"capped_usd": spent, "webhooks": len(receiver.deliveries)})
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await meters.close()
    print(f"capped: at most {spent} of {CAP_USD_A_MINUTE} USD within a minute; webhooks: {len(receiver.deliveries)}")
    return all_agreed and float(spent) <= float(CAP_USD_A_MINUTE)


def main() -> int:
    """Runs it, or reads what a run has left, and judges and draws it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--in-flight", type=int, default=128)
    parser.add_argument("--keep-minutes", type=float, default=10.0, help="of EVENTS; RESULTS at least 10 (default 10)")
    parser.add_argument("--ledger-minutes", type=float, default=5.0, help="between comparisons (default 5)")
    parser.add_argument("--out", type=Path, default=Path("/tmp/hour.jsonl"))
    parser.add_argument("--read", type=Path, help="samples of a run, which is not run again")
    parser.add_argument("--picture", type=Path, help="SVG to draw")
    options = parser.parse_args()
    is_right = True
    if options.read is None:
        with tempfile.TemporaryDirectory(prefix="bench-hour-") as directory:
            is_right = uvloop.run(run(options, Path(directory)))
    lines = [json.loads(line) for line in (options.read or options.out).read_text().splitlines()]
    if options.picture is not None:
        options.picture.write_text(drawn(lines))
    table, unexplained = judged(lines)
    print(table)
    is_right &= all(line["agree"] for line in lines if line["kind"] == "ledgers")
    for growth in unexplained:
        print(f"grows, and is not explained: {growth}")
    return 0 if is_right and not unexplained else 1


if __name__ == "__main__":
    sys.exit(main())
