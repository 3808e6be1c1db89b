"""A whole plane whose every connection passes a `Link`, under load, and what is left of the load."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import signal
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import nats.errors
import nats.js.errors
import redis.asyncio as aioredis
from nats.js.api import StreamInfo

from breakwater.identity.api_keys import create_key
from breakwater.kernel.clickhouse.client import Analytics, connect
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.process import background
from breakwater.kernel.types import nano_from_usd
from breakwater.local.ports import free_port, http_ready
from breakwater.records.migrations import migrate
from tests.chaos.clock import AHEAD_S, JumpingClock
from tests.chaos.faults import LEADER, SERVERS, SERVICES, Fault, Scenario
from tests.chaos.identity import ReplayedRecord, replayed_record
from tests.chaos.network import Link
from tests.flow.kit import Plane, model, running_plane
from tests.helpers import until
from tests.nats_node import start_nats
from tests.sentinel import Watched
from tests.server_sources import RunningServer, Servers

Found = TypeVar("Found")
Asked = TypeVar("Asked")

CALL_S = 1.5
TIMEOUT_S = 10.0
SETTLED_S = TIMEOUT_S + 180.0
"""What a lost worker has reserved is given back two minutes after its call's timeout."""
STORED_S = 60.0

MIGRATE = """
import asyncio, sys
from breakwater.kernel.clickhouse.client import connect
from breakwater.records.migrations import migrate

async def main():
    analytics = connect(sys.argv[1])
    await migrate(analytics)
    await analytics.close()

asyncio.run(main())
"""

MODELS = {"sim/m": model(latency_ms=CALL_S * 1000)}
AGENTS = {
    "writer": {
        "model": "sim/m",
        "max_tokens": 40,
        "concurrency": 100,
        "breaker": "off",
        "timeout_s": TIMEOUT_S,
        "total_timeout_s": 600,
        "retry": {"max_attempts": 10},
        "budget": {"monthly_usd": 1000, "enforcement": "hard"},
    }
}

STUTTER_S = 0.3
"""The pause of a server that waits for a slow disk; then it works for a tenth of that."""
ELECTED_S = 60.0
"""Time in which the nodes of NATS elect a leader, however busy the machine is."""

STREAMS = (
    "JOBS",
    "EVENTS",
    "DLQ",
    "ALERTS",
    "ALERTER",
    "PARKED",
    "RESULTS",
    "RESPONSES",
    "KEYS",
    "LIMITS",
    "OBJ_bodies",
)


@dataclass(frozen=True, slots=True)
class Record:
    """All that a plane has recorded. Money in nano-dollars.

    Attributes:
        executions: on the log.
        attempts: on the log, those that made no call included.
        sums: the money by executions, attempts, ClickHouse's executions and attempts, and the counters in Redis.
        reserved: what the budgets still hold back.
        stuck: consumers with something that they have not acknowledged.
    """

    executions: Sequence[Mapping[str, Any]]
    attempts: Sequence[Mapping[str, Any]]
    sums: Mapping[str, int]
    reserved: int
    stuck: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is left of a run. Money in nano-dollars.

    Attributes:
        jobs: that were accepted.
        records: executions on the log, each of which is the end of a job.
        calls: that the provider has counted.
        unknown_calls: of those, the ones that no attempt on the log is.
        attempts: on the log, without those that made no call.
        called_twice: jobs with more than one call.
        lost: attempts whose worker was lost.
        failed: jobs that did not succeed.
        sums: the money by executions, attempts, ClickHouse's executions and attempts, and the counters in Redis.
        reserved: what the budgets still hold back.
        stuck: consumers with something that they have not acknowledged.
        recovered_s: from the end of the last fault to the last result of what was accepted before it.
        replayed: the agreement of the record with its replay.
    """

    jobs: int
    records: int
    calls: int
    unknown_calls: int
    attempts: int
    called_twice: int
    lost: int
    failed: int
    sums: Mapping[str, int]
    reserved: int
    stuck: tuple[str, ...]
    recovered_s: float
    replayed: ReplayedRecord

    def faults_found(self, scenario: Scenario) -> list[str]:
        """What is not as it must be; empty where all is right."""
        # A worker that is stopped or cut off for longer than its claims live can't be distinguished from a dead one.
        calls_again = any(fault.may_lose_jobs for fault in scenario)
        found = {
            "jobs without a record": self.jobs - self.records,
            "calls without an attempt": self.unknown_calls,
            "jobs called twice": 0 if calls_again else self.called_twice,
            "jobs that failed": self.failed,
            "sums that differ": len(set(self.sums.values())) - 1,
            "nano-dollars reserved": self.reserved,
            "consumers that are stuck": len(self.stuck),
            "decisions that a replay makes otherwise": self.replayed.unexplained,
        }
        return [f"{count} {what}" for what, count in found.items() if count]


class Chaos:
    """A plane, and what can be done to it."""

    def __init__(
        self,
        plane: Plane,
        servers: Mapping[str, RunningServer],
        disks: Mapping[str, Path],
        links: Mapping[tuple[str, str], Link],
        clocks: Mapping[str, JumpingClock],
        analytics: Analytics,
        http: aiohttp.ClientSession,
        url: str,
        headers: Mapping[str, str],
        watched: Watched | None = None,
    ) -> None:
        self.plane = plane
        self.watched = watched
        self.servers = servers
        self.disks = disks
        self.links = links
        self.clocks = clocks
        self.analytics = analytics
        self.http = http
        self.url = url
        """Of the HTTP API."""
        self.headers = headers
        """That a client of it sends."""
        self.accepted: dict[str, float] = {}
        """When, by the job's id."""
        self.enough = asyncio.Event()
        """Set to submit no more jobs."""
        self._starved: dict[str, int] = {}
        """The pids of the services that had too little memory, by name."""

    async def restart_starved(self) -> None:
        """Restarts, until cancelled, each service that ends after it had too little memory, as a supervisor does."""
        while True:
            await asyncio.sleep(0.5)
            for name, pid in list(self._starved.items()):
                if self._ended(name):
                    del self._starved[name]
                    self.plane.start(name.partition("-")[0], name)
                elif self._pid(name) != pid:
                    del self._starved[name]

    async def run(self, scenario: Scenario, jobs: int, per_s: float) -> Outcome:
        """Runs jobs, and does to the plane meanwhile what the scenario says."""
        load = asyncio.create_task(self._submit(jobs, per_s))
        await asyncio.gather(*(self._cause_later(fault) for fault in scenario))
        healed = time.monotonic()
        before = [job for job, at in self.accepted.items() if at < healed]
        for job in before:
            await self.plane.result(job, timeout_s=300)
        recovered_s = time.monotonic() - healed
        await load
        for job in self.accepted:
            await self.plane.result(job, timeout_s=300)
        return await self._outcome(recovered_s)

    async def _cause_later(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at_s)
        await self.cause(fault)

    async def cause(self, fault: Fault) -> None:
        """Lets a fault happen now, and returns when it is over."""
        part = await self._leader() if fault.part == LEADER else fault.part
        match fault.kind:
            case "kill":
                await self._kill(part, fault.for_s)
            case "stop":
                pid = self._pid(part)
                os.killpg(pid, signal.SIGSTOP)
                await asyncio.sleep(fault.for_s)
                os.killpg(pid, signal.SIGCONT)
            case "stutter":
                await self._stutter(self._pid(part), fault.for_s)
            case "full":
                await self._fill(self.disks[part], fault.for_s)
                if part == "nats":  # it takes nothing into a stream that could not be written, until it starts again
                    await self._kill(part, 0)
            case "flush":
                async with aioredis.Redis.from_url(self.servers[part].url) as client:
                    await client.flushall()
            case "limit":
                await self._limit_streams(fault.for_s)
            case "memory":
                await self._starve(part, fault.for_s)
            case "jump":
                self.clocks[part].jump(AHEAD_S)
                await asyncio.sleep(fault.for_s)
                self.clocks[part].jump(0)
            case _:
                links = [link for ends, link in self.links.items() if part in ends]
                for link in links:
                    link.become(fault.kind)
                await asyncio.sleep(fault.for_s)
                for link in links:
                    link.become("open")

    async def _kill(self, part: str, for_s: float) -> None:
        if part in self.servers:
            self.servers[part].kill()
            await asyncio.sleep(for_s)
            await self.servers[part].restart_async()
        else:
            self._starved.pop(part, None)
            self.plane.kill(part)
            await asyncio.sleep(for_s)
            self.plane.start(part.partition("-")[0], part)

    async def _stutter(self, pid: int, for_s: float) -> None:
        ends = time.monotonic() + for_s
        while time.monotonic() < ends:
            os.killpg(pid, signal.SIGSTOP)
            await asyncio.sleep(STUTTER_S)
            os.killpg(pid, signal.SIGCONT)
            await asyncio.sleep(STUTTER_S / 10)

    async def _starve(self, part: str, for_s: float) -> None:
        if part == "redis":  # it would only die; a limit of its own makes it refuse what it is to keep
            async with aioredis.Redis.from_url(self.servers[part].url) as client:
                await client.config_set("maxmemory", "1mb")
                await asyncio.sleep(for_s)
                await client.config_set("maxmemory", 0)
            return
        pid = self._pid(part)
        if part in self.plane.processes:
            self._starved[part] = pid
        before = resource.prlimit(pid, resource.RLIMIT_AS)
        resource.prlimit(pid, resource.RLIMIT_AS, (_size_of(pid), before[1]))
        await asyncio.sleep(for_s)
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_AS, before)
        # A service may take a while to end, above all one that was still starting: see `restart_starved`.
        if part in self.servers and self._ended(part):
            await self._kill(part, 0)

    async def _limit_streams(self, for_s: float) -> None:
        """Leaves EVENTS and RESPONSES no more space than they use."""
        infos = [await self._patiently(self.plane.jetstream.stream_info, stream) for stream in ("EVENTS", "RESPONSES")]
        for info in infos:
            full = replace(info.config, max_bytes=max(info.state.bytes, 1))
            await self._patiently(self.plane.jetstream.update_stream, full)
        await asyncio.sleep(for_s)
        for info in infos:
            await self._patiently(self.plane.jetstream.update_stream, info.config)

    async def streams_answer(self) -> None:
        """Returns when each stream has a leader that answers."""
        for stream in STREAMS:
            await self._patiently(self.plane.jetstream.stream_info, stream)

    async def _patiently(self, ask: Callable[[Asked], Awaitable[StreamInfo]], about: Asked) -> StreamInfo:
        """Asks again while NATS elects a leader, or is away."""
        deadline = time.monotonic() + ELECTED_S
        while True:
            try:
                return await ask(about)
            except (TimeoutError, nats.errors.Error, nats.js.errors.Error):
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.5)

    def _ended(self, part: str) -> bool:
        if part in self.plane.processes:
            return self.plane.processes[part].poll() is not None
        return not self.servers[part].runs

    async def _leader(self) -> str:
        cluster = (await self.plane.jetstream.stream_info("JOBS")).cluster
        assert cluster is not None
        assert cluster.leader is not None
        return cluster.leader

    async def _fill(self, disk: Path, for_s: float) -> None:
        ballast = disk / "ballast"

        def write() -> None:
            with suppress(OSError), ballast.open("ab", buffering=0) as file:
                size = file.tell()
                while free := shutil.disk_usage(disk).free:
                    os.posix_fallocate(file.fileno(), size, free)
                    size += free

        ends = time.monotonic() + for_s
        while time.monotonic() < ends:  # a server that gives up a file frees some
            await asyncio.to_thread(write)
            await asyncio.sleep(0.2)
        ballast.unlink()

    def _pid(self, part: str) -> int:
        if part in self.plane.processes:
            return self.plane.processes[part].pid
        return self.servers[part].pid

    async def _submit(self, jobs: int, per_s: float) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(jobs):
                if self.enough.is_set():
                    break
                group.create_task(self._submit_one(f"j{number}", over_http=number % 4 == 0))
                await asyncio.sleep(1 / per_s)

    async def _submit_one(self, job_id: str, *, over_http: bool) -> None:
        job = {"agent": "writer", "job_id": job_id, "prompt": "x" * 300}
        while not await (self._post(job) if over_http else self.publish(job)):
            await asyncio.sleep(0.5)
        self.accepted[job_id] = time.monotonic()

    async def publish(self, job: Mapping[str, str]) -> bool:
        """Publishes a job over NATS. Returns True if it was stored."""
        try:
            await self.plane.publish(job, **{"Nats-Msg-Id": job["job_id"]})
        except (TimeoutError, nats.errors.Error, nats.js.errors.Error):
            return False
        return True

    async def _post(self, job: Mapping[str, str]) -> bool:
        try:
            async with self.http.post("/api/v1/jobs", json=dict(job)) as response:
                if 400 <= response.status < 500 and response.status != 429:
                    raise AssertionError(f"{response.status}: {await response.text()}")
                return response.status < 300
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def _outcome(self, recovered_s: float) -> Outcome:
        jobs = len(self.accepted)
        record = await self.settled_record("bw.executions.writer.*", at_least=jobs)
        made = [attempt for attempt in record.attempts if not attempt["short_circuited"]]
        calls = self.plane.sim.ledger.calls
        attempt_ids = {attempt["attempt_id"] for attempt in made}
        return Outcome(
            jobs=jobs,
            records=len({execution["execution_id"] for execution in record.executions}),
            calls=len(calls),
            unknown_calls=sum(call.client_request_id not in attempt_ids for call in calls),
            attempts=len(made),
            called_twice=sum(count > 1 for count in Counter(attempt["execution_id"] for attempt in made).values()),
            lost=sum(attempt["outcome"] == "worker_lost" for attempt in made),
            failed=sum(execution["status"] != "succeeded" for execution in record.executions),
            sums=record.sums,
            reserved=record.reserved,
            stuck=record.stuck,
            recovered_s=recovered_s,
            replayed=await replayed_record(Lookup(lambda: self.plane.client), self.plane.directory / "breakwater.yaml"),
        )

    async def settled_record(self, executions_on: str = "bw.executions.>", at_least: int = 0) -> Record:
        """Waits until the plane is settled, and reads what it has recorded.

        Each wait is for the end of a lease, a batch or a redelivery. What is still wrong after it is returned as it is.
        """
        executions = await self.plane.messages("EVENTS", executions_on, at_least=at_least)
        attempts = await self.plane.messages("EVENTS", "bw.attempts.>")
        spent = sum(nano_from_usd(attempt["cost"]) for attempt in attempts if not attempt["short_circuited"])
        counted, reserved = await self.last(self.counters, lambda counters: counters == (spent, 0), SETTLED_S)
        stuck = await self.last(self.stuck, lambda consumers: not consumers, SETTLED_S)
        stored = await self.last(self.stored, lambda sums: sums == (spent, spent), STORED_S)
        sums = {
            "executions": sum(nano_from_usd(execution["total_cost"]) for execution in executions),
            "attempts": spent,
            "ClickHouse executions": stored[0],
            "ClickHouse attempts": stored[1],
            "Redis": counted,
        }
        return Record(executions, attempts, sums, reserved, stuck)

    async def last(
        self, read: Callable[[], Awaitable[Found]], right: Callable[[Found], bool], timeout_s: float
    ) -> Found:
        """What is read, once it is right, or after the timeout."""
        deadline = time.monotonic() + timeout_s
        while not right(found := await read()) and time.monotonic() < deadline:
            await asyncio.sleep(1)
        return found

    async def counters(self) -> tuple[int, int]:
        """Spent and reserved, by Redis."""
        port = None if self.watched is None else await self.watched.primary()
        url = self.servers["redis"].url if self.watched is None or port is None else self.watched.servers[port].url
        client = aioredis.Redis.from_url(url, decode_responses=True)
        try:
            sums = {"spent:global": 0, "reserved:global": 0}
            async for key in client.scan_iter("bw:limits:monthly:*"):
                for field in sums:
                    sums[field] += int(str(await client.hget(str(key), field) or 0))  # pyright: ignore[reportUnknownArgumentType]
        finally:
            await client.aclose()
        return sums["spent:global"], sums["reserved:global"]

    async def stored(self) -> tuple[int, int]:
        """The costs of executions and of attempts, by ClickHouse."""
        sums = [
            await self.analytics.query(f"SELECT toInt64(sum({column}) * 1000000000) FROM {table} FINAL")
            for table, column in (("executions", "total_cost"), ("attempts", "cost"))
        ]
        return int(sums[0].rows[0][0] or 0), int(sums[1].rows[0][0] or 0)

    async def stuck(self) -> tuple[str, ...]:
        """The consumers that have something to acknowledge, or to read."""
        found: list[str] = []
        for stream in STREAMS:
            for consumer in await self.plane.jetstream.consumers_info(stream):
                if consumer.num_ack_pending or (consumer.num_pending and consumer.name != "parked"):
                    left = f"{consumer.num_pending} to read, {consumer.num_ack_pending} to acknowledge"
                    found.append(f"{stream}/{consumer.name} ({left})")
        return tuple(found)


def _size_of(pid: int) -> int:
    """Of a process in virtual memory, in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()


@asynccontextmanager
async def chaos_plane(
    directory: Path,
    source: Servers,
    *,
    nodes: int,
    disks: Mapping[str, Path],
    clocks: Mapping[str, JumpingClock],
    python: Path | None = None,
    models: Mapping[str, Any] = MODELS,
    agents: Mapping[str, Any] = AGENTS,
    watched: Watched | None = None,
    **config: Any,
) -> AsyncGenerator[Chaos]:
    """A plane of two workers and one of each other service, on servers of its own.

    Args:
        directory: for its files.
        source: of its servers.
        nodes: of NATS; connections to several are direct.
        disks: the small ones that the servers have their data on; empty if they have none.
        clocks: that are to jump, by part; a server's has to be known to its source.
        python: of another version of Breakwater, which runs the services and makes the tables; None for this one.
        models: of the simulated provider.
        agents: of the config.
        watched: the servers of Redis in place of a single one, to which connections are direct.
        config: further sections of the config.
    """
    links: dict[tuple[str, str], Link] = {}
    bus = {"nats": source.nats()} if nodes == 1 else await start_cluster(directory, nodes, links)
    state = {} if watched is not None else {"redis": source.redis()}
    servers = {**bus, **state, "clickhouse": source.clickhouse()}
    database = f"bw_{uuid.uuid4().hex}"
    urls = {name: server.url for name, server in servers.items()}
    urls.setdefault("nats", next(iter(bus.values())).url)
    if watched is not None:
        urls["redis"] = watched.url
    urls["clickhouse"] += f"/{database}"
    analytics = connect(urls["clickhouse"])
    if python is None:
        await migrate(analytics)
    else:
        await asyncio.to_thread(subprocess.run, [python, "-c", MIGRATE, urls["clickhouse"]], check=True)
    keys, port = directory / "keys.json", free_port()
    api_url = f"http://127.0.0.1:{port}"
    headers = {"Authorization": f"Bearer {create_key(keys, 'chaos')}"}
    async with AsyncExitStack() as closing:
        closing.push_async_callback(analytics.close)
        for node in bus.values():
            closing.callback(node.stop)
        for link in links.values():
            closing.push_async_callback(link.close)
        environments: dict[str, dict[str, str]] = {}
        for service in SERVICES:
            environments[service] = clocks[service].environment() if service in clocks else {}
            direct = {"nats"} if nodes > 1 else set[str]()
            for server in [name for name in SERVERS if name not in direct and name in servers]:
                parts = urlsplit(urls[server])
                links[service, server] = link = Link(parts.hostname or "", parts.port or 0)
                closing.push_async_callback(link.close)
                address = f"127.0.0.1:{await link.listen()}"
                netloc = parts.netloc.rpartition("@")[0]
                url = parts._replace(netloc=f"{netloc}@{address}" if netloc else address).geturl()
                environments[service][f"BREAKWATER_{server.upper()}_URL"] = url
        http = await closing.enter_async_context(
            aiohttp.ClientSession(
                api_url,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=15),
            )
        )
        plane = await closing.enter_async_context(
            running_plane(
                directory,
                nats_url=urls["nats"],
                replicas=nodes,
                redis_url=urls["redis"],
                script={"models": models},
                agents=agents,
                retry_budget="off",
                services=(),
                environment={
                    "BREAKWATER_CLICKHOUSE_URL": urls["clickhouse"],
                    "BREAKWATER_HTTP_PORT": str(port),
                    "BREAKWATER_API_KEYS_FILE": str(keys),
                },
                **config,
            )
        )
        plane.own_environments = environments
        plane.python = python
        for name in SERVICES:
            plane.start(name.partition("-")[0], name)
        for name in SERVICES:
            await plane.ready(name) if name != "request" else await serving(http)
        chaos = Chaos(plane, servers, disks, links, clocks, analytics, http, api_url, headers, watched)
        supervisor = asyncio.create_task(chaos.restart_starved())
        try:
            yield chaos
        finally:
            await background.stop(supervisor)


async def start_cluster(directory: Path, size: int, links: dict[tuple[str, str], Link]) -> dict[str, RunningServer]:
    """Nodes that anybody may use, and the links between them."""
    ports = {f"nats-{number}": (free_port(), free_port(), free_port()) for number in range(1, size + 1)}
    nodes: dict[str, RunningServer] = {}
    for name, (port, route, monitor) in ports.items():
        folder = directory / name
        folder.mkdir()
        others: list[str] = []
        for other in ports.keys() - {name}:
            links[name, other] = Link("127.0.0.1", ports[other][1])
            others.append(f'"nats://127.0.0.1:{await links[name, other].listen()}"')
        routes = ", ".join(others)
        config = f"""
            server_name: {name}, listen: "127.0.0.1:{port}", http: "127.0.0.1:{monitor}", max_payload: 8MB
            jetstream {{ store_dir: "{folder}/data", sync_interval: always }}
            # Nodes otherwise tell each other where they listen, and connect past the links.
            cluster {{ name: chaos, listen: "127.0.0.1:{route}", advertise: "127.0.0.1:1", routes: [{routes}] }}
            """
        nodes[name] = start_nats(folder, config, port, ready=http_ready("127.0.0.1", monitor, "/healthz"))
    for node in nodes.values():
        await asyncio.to_thread(node.wait_until_ready)
    return nodes


async def serving(http: aiohttp.ClientSession) -> None:
    """Waits until the HTTP API answers."""

    async def serves() -> bool:
        try:
            async with http.get("/readyz") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    await until(serves, "that the HTTP API serves")
