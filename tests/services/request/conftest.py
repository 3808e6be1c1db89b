"""The HTTP API on real servers, and its callers.

All tests of this folder run in one event loop. Those that use the same config share one HTTP API and one NATS server,
whose streams are made again between tests. A test that stops or loses one of them asks for `own_nats_server`, and gets
an HTTP API of its own.
"""

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import aiohttp
import pytest
import pytest_asyncio
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import StreamConfig
from yarl import URL

from breakwater.alerts.contract import Alert, AlertEvent
from breakwater.alerts.rules.incidents import IncidentRules, decide
from breakwater.alerts.rules.signals import Firing
from breakwater.alerts.settings import Reminders
from breakwater.breakers.rules.breaker import Breaker, BreakerKey
from breakwater.breakers.store import Breakers, Saving
from breakwater.config import Config, parse_config
from breakwater.config.servers import bus_plan
from breakwater.identity.api_keys import create_key
from breakwater.jobs.contract.execution import Result
from breakwater.jobs.contract.job import Job
from breakwater.jobs.rules.ownership import job_digest
from breakwater.kernel.nats import subjects, topology
from breakwater.kernel.nats.delivery import name_in
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.provision import provision
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.subjects import Header, Stream
from breakwater.kernel.nats.topology import Plan
from breakwater.kernel.process.settings import Settings
from breakwater.kernel.redis.connection import Redis
from breakwater.local.ports import free_port
from breakwater.services.request.app import RequestService, build
from tests.helpers import FIRST, nats_client, share_event_loop, until
from tests.server_pool import ServerPool
from tests.server_sources import RunningServer

ODD_AGENT = "écrivain.v2>all/*"
CONFIG = f"""
providers: {{local: {{base_url: "http://127.0.0.1:9/v1"}}}}
defaults: {{model: m, allowed_models: ["*"]}}
agents: {{writer: {{}}, reader: {{}}, "{ODD_AGENT}": {{}}}}
limits: {{max_body_bytes: 1000000, drain_s: 1}}
"""

GOVERNED = """
providers: {local: {base_url: "http://127.0.0.1:9/v1"}, other: {base_url: "http://127.0.0.1:9/v1"}}
defaults: {provider: local, model: m, allowed_models: [allowed], refuse_when_open: true}
agents:
  writer: {fallback_models: [other/n], budget: {daily_usd: 10, enforcement: hard}}
  reader: {shadow: {breaker: {consecutive_failures: 1}}}
  patient: {refuse_when_open: false}
  unguarded: {breaker: off}
  by-model: {model: shared, breaker: {scope: model}}
  by-provider: {model: any, breaker: {scope: provider, cooldown_s: 7}}
  never: {model: without-a-price, budget: {daily_usd: 10, enforcement: hard}}
models: {m: {price: {input_usd_per_mtok: 1, output_usd_per_mtok: 1}}}
alerts: {channels: {ops: {python: {callable: "ours:notify"}}}}
shadow: {limits: [{scope: "agent:reader", usd: 3, per: month}]}
"""

LINK_SECRET = "a secret of thirty-two characters"
ALERTING = """
providers: {local: {base_url: "http://127.0.0.1:9/v1"}}
defaults: {model: m}
agents: {writer: {}, reader: {}}
alerts:
  links: {base_url: "https://plane.example/breakwater", secret: {env: LINK_SECRET}}
  channels:
    ops: {python: {callable: "ours:notify"}}
    "second.line": {python: {callable: "ours:notify"}}
"""


@dataclass(frozen=True, slots=True)
class HttpApi:
    """A running request service."""

    url: str
    http: aiohttp.ClientSession
    bus: Client
    settings: Settings
    stop: Callable[[], Awaitable[None]]

    async def post(self, body: Any, *, query: str = "", **headers: str) -> "Answer":
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.ask("POST", f"/api/v1/jobs{query}", data=data, headers=headers)

    async def ask(self, method: str, path: str, **more: Any) -> "Answer":
        async with self.http.request(method, URL(self.url + path, encoded=True), **more) as response:
            return Answer(response.status, dict(response.headers), await response.read())

    async def act(self, path: str, **body: Any) -> "Answer":
        return await self.ask("POST", f"/api/v1/{path}", data=json.dumps(body).encode())

    async def events(self, subject: str) -> list[Any]:
        """What EVENTS holds on a subject, in its order."""
        return [json.loads(found.data) async for found in Lookup(lambda: self.bus).scan(Stream.EVENTS, subject)]

    async def alerts(self) -> list[Any]:
        """What ALERTS holds, in its order."""
        return [json.loads(found.data) async for found in Lookup(lambda: self.bus).scan(Stream.ALERTS, "bw.alerts.>")]

    async def audit(self) -> list[Any]:
        """What AUDIT holds, in its order."""
        return [json.loads(found.data) async for found in Lookup(lambda: self.bus).scan(Stream.AUDIT, "bw.audit.>")]

    async def queued(self) -> int:
        return (await self.bus.jetstream().stream_info("JOBS")).state.messages

    async def last_job(self, agent: str = "writer") -> Msg:
        return await self.bus.jetstream().get_last_msg("JOBS", subjects.job(agent))


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """Of Anthropic's API, whose errors have none, the type."""
        error = self.json["error"]
        return error["type"] if self.json.get("type") == "error" else error["code"]

    @property
    def message(self) -> str:
        return self.json["error"]["message"]

    @property
    def paths(self) -> list[str]:
        return [detail["path"] for detail in self.json["error"]["details"]]


def new_id() -> str:
    return uuid.uuid4().hex


def settings_for(nats_url: str, redis_url: str, directory: Path) -> Settings:
    return Settings(
        nats_url=nats_url,
        redis_url=redis_url,
        http_port=free_port(),
        api_keys_file=directory / "api_keys.json",
    )


@asynccontextmanager
async def calling(settings: Settings, key: str, stop: Callable[[], Awaitable[None]]) -> AsyncGenerator[HttpApi]:
    """Whoever calls a running HTTP API, with connections of its own to it and to the bus."""
    connector, headers = aiohttp.TCPConnector(limit=0), {"Authorization": f"Bearer {key}"}
    async with (
        nats_client(settings.nats_url.get_secret_value()) as bus,
        aiohttp.ClientSession(headers=headers, connector=connector) as http,
    ):
        yield HttpApi(f"http://127.0.0.1:{settings.http_port}", http, bus, settings, stop)


@asynccontextmanager
async def running(
    settings: Settings, config: Config, key: str, service: RequestService | None = None
) -> AsyncGenerator[HttpApi]:
    service = service or build(settings, config)
    serving = asyncio.create_task(service.run())

    async def stop() -> None:
        service.stop()
        await serving

    try:
        async with calling(settings, key, stop) as api:
            await until_ready(api)
            yield api
    finally:
        await stop()


@asynccontextmanager
async def new_api(nats_url: str, redis_url: str, directory: Path, config: str) -> AsyncGenerator[HttpApi]:
    """An HTTP API of its own, on a bus that is set up for its config."""
    parsed = parse_config(config)
    await provision(nats_url, bus_plan(parsed))
    settings = settings_for(nats_url, redis_url, directory)
    async with running(settings, parsed, create_key(settings.api_keys_file, "tests")) as api:
        yield api


async def until_ready(api: HttpApi, status: int = 200) -> None:
    async def ready() -> bool:
        try:
            return (await api.ask("GET", "/readyz")).status == status
        except aiohttp.ClientError:
            return False

    await until(ready)


async def lose_nats(api: HttpApi, server: RunningServer) -> None:
    """Kills NATS, and waits until the HTTP API has noticed."""
    server.kill()
    await until_ready(api, 503)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    share_event_loop(items, Path(__file__).parent)


StartApi = Callable[[str], AbstractAsyncContextManager[HttpApi]]
"""Opens the HTTP API of a plane with this config."""


@dataclass(frozen=True, slots=True)
class SharedApi:
    """What tests share, and what of it is put back before each of them."""

    service: RequestService
    api: HttpApi
    plan: Plan
    keys: str
    """The file of API keys."""

    @asynccontextmanager
    async def visit(self) -> AsyncGenerator[HttpApi]:
        key = self.api.http.headers["Authorization"].removeprefix("Bearer ")
        async with calling(self.api.settings, key, self.api.stop) as api:
            if await renew_streams(api.bus, self.plan):
                # By itself it would notice within seconds that keys and limits of the test before are gone.
                await asyncio.gather(self.service._key_log.catch_up(), self.service._limit_log.catch_up())
            self.api.settings.api_keys_file.write_text(self.keys)
            yield api


async def renew_streams(bus: Client, plan: Plan) -> bool:
    """Makes those streams again that a test has written to or deleted, with their consumers: empty, from sequence 1.

    Returns:
        False if there are none.
    """
    jetstream = bus.jetstream()
    last_sequences = {info.config.name: info.state.last_seq for info in await jetstream.streams_info()}
    consumers = topology.consumers(plan)

    async def renew(stream: StreamConfig) -> None:
        if stream.name in last_sequences:
            await jetstream.delete_stream(stream.name or "")
        await jetstream.add_stream(stream)
        of_stream = [consumer for name, consumer in consumers if name == stream.name]
        await asyncio.gather(*(jetstream.add_consumer(stream.name or "", consumer) for consumer in of_stream))

    used = [stream for stream in topology.streams(plan) if last_sequences.get(stream.name) != 0]
    await asyncio.gather(*(renew(stream) for stream in used))
    return bool(used)


class SharedApis:
    """An HTTP API for each config, with a NATS server, of those that were last asked for.

    Each costs half a percent of a core while nothing asks it, and a tenth of a second to start. More than one test
    of a file may have some at once.
    """

    MOST = 4

    def __init__(self, nats_pool: ServerPool, new_directory: Callable[[], Path]) -> None:
        self._nats_pool = nats_pool
        self._new_directory = new_directory
        self._running: dict[tuple[str, str], tuple[SharedApi, AsyncExitStack]] = {}

    async def get(self, config: str, redis_url: str) -> SharedApi:
        """Returns that of a config and the URL of a Redis; starts it where it does not run."""
        key = config, redis_url
        shared_api, stack = self._running.pop(key, None) or await self._start(config, redis_url)
        self._running[key] = shared_api, stack
        if len(self._running) > self.MOST:
            _, longest_unused = self._running.pop(next(iter(self._running)))
            await longest_unused.aclose()
        return shared_api

    async def close(self) -> None:
        for _, stack in self._running.values():
            await stack.aclose()

    async def _start(self, config: str, redis_url: str) -> tuple[SharedApi, AsyncExitStack]:
        stack = AsyncExitStack()
        server = stack.enter_context(self._nats_pool.lend())
        parsed = parse_config(config)
        plan = bus_plan(parsed)
        await provision(server.url, plan)
        settings = settings_for(server.url, redis_url, self._new_directory())
        key = create_key(settings.api_keys_file, "tests")
        service = build(settings, parsed)
        api = await stack.enter_async_context(running(settings, parsed, key, service))
        return SharedApi(service, api, plan, settings.api_keys_file.read_text()), stack


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def shared_apis(nats_pool: ServerPool, tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[SharedApis]:
    apis = SharedApis(nats_pool, lambda: tmp_path_factory.mktemp("api"))
    yield apis
    await apis.close()


@pytest.fixture
def start_api(
    request: pytest.FixtureRequest,
    shared_apis: SharedApis,
    redis_server: RunningServer,
    tmp_path: Path,
) -> StartApi:
    @asynccontextmanager
    async def opened(config: str) -> AsyncGenerator[HttpApi]:
        if "own_nats_server" in request.fixturenames:
            server: RunningServer = request.getfixturevalue("own_nats_server")
            opening = new_api(server.url, redis_server.url, tmp_path, config)
        else:
            opening = (await shared_apis.get(config, redis_server.url)).visit()
        async with opening as api:
            yield api

    return opened


@pytest.fixture
def drain_s() -> float:
    """For how long an HTTP API that stops lets others wait; a test that waits for that itself overrides it."""
    return 60


@pytest_asyncio.fixture(loop_scope="package")
async def api(start_api: StartApi, drain_s: float) -> AsyncGenerator[HttpApi]:
    async with start_api(CONFIG.replace("drain_s: 1", f"drain_s: {drain_s}")) as api:
        yield api


@pytest_asyncio.fixture(loop_scope="package")
async def redis(redis_server: RunningServer) -> AsyncGenerator[Redis]:
    """An empty Redis."""
    connection = Redis(redis_server.url)
    await connection.client.flushall()
    yield connection
    await connection.close()


@pytest_asyncio.fixture(loop_scope="package")
async def governed(start_api: StartApi, redis: Redis) -> AsyncGenerator[HttpApi]:
    """A plane with a target for each action of operators and breakers of every kind, whose Redis was empty before."""
    async with start_api(GOVERNED) as api:
        yield api


@pytest_asyncio.fixture(loop_scope="package")
async def redis_away(
    own_nats_server: RunningServer, own_redis_server: RunningServer, tmp_path: Path
) -> AsyncGenerator[HttpApi]:
    """The same plane, whose Redis has died."""
    async with new_api(own_nats_server.url, own_redis_server.url, tmp_path, GOVERNED) as api:
        own_redis_server.kill()
        yield api


@pytest_asyncio.fixture(loop_scope="package")
async def alerting(start_api: StartApi, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[HttpApi]:
    """A plane with two channels, and links in its messages."""
    monkeypatch.setenv("LINK_SECRET", LINK_SECRET)
    async with start_api(ALERTING) as api:
        yield api


async def publish_alert(api: HttpApi, key: str = "guard_tripped/acme/t1", *, times: int = 1, **fields: Any) -> Alert:
    """An incident that has just begun, as an alerter reports it. `fields`: of the alert, or of what raised it."""
    said = {name: fields.pop(name) for name in ("agent", "model", "tenant", "title", "text") if name in fields}
    event: AlertEvent = fields.pop("event", key.partition("/")[0])
    at: datetime = fields.pop("at", datetime(2026, 11, 21, 10, 0, tzinfo=UTC))
    what = {"title": f"Something of {key}", "text": "It happened. To do: look.", **said}
    signal = Firing(key=key, event=event, source_id=uuid.uuid4().hex, at=at, times=times, **what)
    alert = decide(signal, None, IncidentRules(get_args(AlertEvent), 600, ("guard_tripped",), Reminders()))
    assert alert is not None
    return await publish_change(api, alert, **fields)


async def publish_change(api: HttpApi, alert: Alert, **changed: Any) -> Alert:
    """Publishes an alert, with other fields."""
    alert = alert.model_copy(update=changed)
    publisher = Publisher(lambda: api.bus, "tests")
    await publisher.event(subjects.alert(alert.event), alert, id=alert.alert_id, at=alert.at)
    return alert


async def put_breaker(redis: Redis, agent: str, model: str, breaker: Breaker) -> None:
    key = BreakerKey(agent, model)
    [before] = await Breakers(redis).load([key])
    assert await Breakers(redis).save([Saving(key, before, breaker, before.unpublished)]) == [True]


async def redis_ms(redis: Redis) -> int:
    """The time on Redis' clock, which is the one of breakers."""
    seconds, microseconds = await redis.client.time()
    return seconds * 1000 + microseconds // 1000


def result_of(job_id: str, agent: str, output: str = "done") -> Result:
    now = datetime.now(UTC)
    return Result(
        job_id=job_id,
        execution_id=job_id,
        agent=agent,
        status="succeeded",
        output=output,
        queued_at=now,
        dispatched_at=now,
        completed_at=now,
        duration_ms=1,
    )


async def answer_jobs(bus: Client, *, delay_s: float = 0.0, agents: str = ">") -> None:
    """A worker that decides every job of these agents, the first of an id for good."""

    decided: set[str] = set()

    async def work(message: Msg) -> None:
        job = json.loads(message.data)
        headers = message.headers or {}
        execution_id, header_id, name = (
            name_in(headers, header) for header in (Header.EXECUTION_ID, Header.JOB_ID, Header.OWNER)
        )
        job_id = header_id or job.get("job_id") or execution_id
        execution_id = execution_id or job_id
        if execution_id in decided:
            return  # who listens would hear a second result, although the stream refuses it
        decided.add(execution_id)
        await asyncio.sleep(delay_s)
        whose = {"tenant": job.get("tenant"), "owner": name, "job_digest": job_digest(Job.model_validate(job), name)}
        result = result_of(execution_id, job["agent"], f"answer to {job.get('prompt')}")
        await publish_result(bus, result.model_copy(update={"job_id": job_id, **whose}))

    await bus.subscribe(f"bw.jobs.{agents}", cb=work)
    # nats-py sends the ping of `flush` ahead of a subscription that waits to be sent: only a question comes after it.
    await bus.jetstream().account_info()


async def publish_result(bus: Client, result: Result) -> None:
    await bus.jetstream(timeout=60).publish(subjects.result(result.execution_id), result.json_bytes(), headers=FIRST)
