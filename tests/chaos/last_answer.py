"""The kill of everything: `breakwater up`, of which every process gets SIGKILL as soon as the last job is answered.

Who listens on `bw.results.>` hears a result a moment before NATS has stored it. A kill in that moment takes the result
away, though not the attempt, and the job is called again: a row may have more calls than executions, and an attempt for
each.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import nats
import psutil
import yaml
from nats.aio.client import Client
from nats.aio.msg import Msg

from breakwater.kernel.clickhouse.client import connect
from breakwater.kernel.commands.connect import flush_subscriptions
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.permissions import inbox_prefix
from breakwater.kernel.nats.subjects import Stream
from breakwater.local.provider import SimulatedProvider
from tests.flow.kit import config_for, model

IDS = 10
TIMES = 50
"""How often each id is sent at once, half of it over HTTP."""

SETTLED_S = 60.0
KINDS = {"attempts": "attempt_id", "executions": "execution_id"}

HEADER = (
    "| kill | processes | attempts in EVENTS | in ClickHouse | executions in EVENTS | in ClickHouse | calls by Redis | "
    "by the provider | equal after |\n|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is there after a kill: ids in EVENTS and in ClickHouse by kind, and calls by Redis and by the provider."""

    number: int
    killed: int
    logged: Mapping[str, set[str]]
    stored: Mapping[str, set[str]]
    counted: int
    calls: int
    after_s: float
    """Since the plane was up again."""

    def faults_found(self) -> list[str]:
        """What is not as it must be; empty where all is right."""
        found = [
            f"only one of EVENTS and ClickHouse has {', '.join(sorted(ids ^ self.stored[kind]))}"
            for kind, ids in self.logged.items()
            if ids != self.stored[kind]
        ]
        if {self.counted, self.calls} != {len(self.logged["attempts"])}:
            found.append(f"{self.counted} calls by Redis, {self.calls} by the provider")
        return found

    def row(self) -> str:
        """A line of the table."""
        records = [len(of[kind]) for kind in KINDS for of in (self.logged, self.stored)]
        figures = [self.number, self.killed, *records, self.counted, self.calls]
        return f"| {' | '.join(map(str, figures))} | {self.after_s:.1f} s |"


class Up:
    """A `breakwater up` that is there."""

    def __init__(self, process: Process, endpoints: Mapping[str, Any]) -> None:
        self._process, self.endpoints = process, endpoints
        of = psutil.Process(process.pid)
        self._all = [of, *of.children(recursive=True)]
        assert any("worker" in one.name() for one in self._all), "the services are not among them"

    @classmethod
    async def start(cls, config: Path, data: Path) -> Up:
        """Starts it, and returns when it is there."""
        command = [sys.executable, "-m", "breakwater.cli", "up", "--config", str(config), "--data", str(data), "--json"]
        with data.with_suffix(".err").open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                *command, stdout=asyncio.subprocess.PIPE, stderr=errors, start_new_session=True
            )
        assert process.stdout is not None
        async for line in process.stdout:
            if (event := json.loads(line))["event"] == "up":
                return cls(process, event)
        raise AssertionError(data.with_suffix(".err").read_text())

    def kill(self) -> int:
        """SIGKILL for every process; returns for how many."""
        for one in self._all:
            with contextlib.suppress(ProcessLookupError):  # it ended with the one that started it
                os.kill(one.pid, signal.SIGKILL)
        return len(self._all)

    async def ended(self) -> None:
        """Returns when all of them are gone."""
        await self._process.wait()
        await asyncio.to_thread(psutil.wait_procs, self._all[1:], 30)

    def http(self) -> aiohttp.ClientSession:
        """The API, with its key."""
        key = Path(self.endpoints["api_key_file"]).read_text()
        return aiohttp.ClientSession(self.endpoints["request_url"], headers={"Authorization": f"Bearer {key}"})

    async def nats(self, user: str) -> Client:
        """A connection that ends with the server."""
        url = urlsplit(self.endpoints["nats_url"])
        password = (Path(self.endpoints["data_dir"]) / "secrets" / f"nats-{user}").read_text()
        return await nats.connect(
            f"nats://{url.hostname}:{url.port}",
            user=user,
            password=password,
            inbox_prefix=inbox_prefix(user),
            allow_reconnect=False,
        )


async def outcomes(directory: Path, kills: int) -> AsyncGenerator[Outcome]:
    """Kills the plane of one data directory so many times."""
    async with SimulatedProvider({"models": {"sim/m": model(latency_ms=150)}}) as sim:
        config = directory / "breakwater.yaml"
        agents = {"writer": {"model": "sim/m", "budget": {"monthly_usd": 10}}}
        config.write_text(yaml.safe_dump(config_for(sim.url, agents)))
        up = await Up.start(config, directory / "data")
        try:
            for number in range(1, kills + 1):
                killed = await _kill_when_answered(up, {f"j{number}-{one}" for one in range(IDS)})
                await up.ended()
                up = await Up.start(config, directory / "data")
                yield await _outcome(up, sim, number, killed)
        finally:
            up.kill()
            await up.ended()


async def _kill_when_answered(up: Up, ids: set[str]) -> int:
    """Sends each id many times at once, and kills when the last is answered. Returns how many processes that were."""
    client, unanswered, killed = await up.nats("client"), set(ids), asyncio.get_running_loop().create_future()

    async def hear(message: Msg) -> None:
        unanswered.discard(message.subject.rpartition(".")[2])
        if not unanswered and not killed.done():
            killed.set_result(up.kill())

    await client.subscribe("bw.results.>", cb=hear)
    await flush_subscriptions(client)
    async with up.http() as http:

        async def post(job: Mapping[str, str]) -> None:
            async with http.post("/api/v1/jobs", params={"wait_s": 60}, json=job) as response:
                await response.read()

        async def publish(job: Mapping[str, str]) -> None:
            await client.jetstream(timeout=30).publish(subjects.job("writer"), json.dumps(job).encode())

        jobs = [{"agent": "writer", "job_id": job_id, "prompt": "x"} for job_id in ids]
        sending = [asyncio.create_task(send(job)) for job in jobs for send in [post, publish] * (TIMES // 2)]
        async with asyncio.timeout(120):
            count: int = await killed
        for task in sending:
            task.cancel()
        await asyncio.gather(*sending, return_exceptions=True)
    await client.close()
    return count


async def _outcome(up: Up, sim: SimulatedProvider, number: int, killed: int) -> Outcome:
    """What is there, once all of it is equal, or after a while."""
    began, client, analytics = time.monotonic(), await up.nats("budget"), connect(up.endpoints["clickhouse_url"])
    try:
        async with up.http() as http:
            while True:
                logged: dict[str, set[str]] = {kind: set() for kind in KINDS}
                async with aclosing(Lookup(lambda: client).scan(Stream.EVENTS, "bw.>")) as found:
                    async for message in found:
                        if (kind := message.subject.split(".")[1]) in KINDS:
                            logged[kind].add(json.loads(message.data)[KINDS[kind]])
                stored = {
                    kind: {str(row[0]) for row in (await analytics.query(f"SELECT {key} FROM {kind} FINAL")).rows}
                    for kind, key in KINDS.items()
                }
                async with http.get("/api/v1/budgets/reconciliation") as response:
                    budgets = (await response.json()).get("budgets", ())
                counted = [one["counted_calls"] for one in budgets if one["budget"] == "global/monthly"]
                after_s = time.monotonic() - began
                one = Outcome(number, killed, logged, stored, sum(counted), len(sim.ledger.calls), after_s)
                if after_s > SETTLED_S or (len(logged["executions"]) == number * IDS and not one.faults_found()):
                    return one
                await asyncio.sleep(0.5)
    finally:
        await client.close()
        await analytics.close()
