"""What the alerter's tests stand on: a bus, events, and receivers that answer as configured."""

import asyncio
import base64
import inspect
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Self, TypeVar

import nats
from aiohttp import web
from nats.aio.client import Client
from nats.js.api import DeliverPolicy
from pydantic import SecretStr
from standardwebhooks import Webhook

from breakwater.alerts.contract import Alert
from breakwater.breakers.contract import BreakerTransition
from breakwater.config import Config, parse_config
from breakwater.config.servers import bus_plan
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.contract import DeadLetter
from breakwater.kernel.nats.provision import provision
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.process.settings import Settings
from breakwater.kernel.types import Event
from breakwater.limits.contract import BudgetEvent, GuardEvent
from breakwater.local.ports import free_port
from breakwater.services.alerter.app import build
from breakwater.services.alerter.clock import Clock
from tests.helpers import until

SECRET = "whsec_" + base64.b64encode(b"only for the tests of the alerter").decode()
AT = datetime(2026, 11, 21, 10, 0, 0, tzinfo=UTC)

T = TypeVar("T")
E = TypeVar("E", bound=Event)

_CONFIG = """
providers: {local: {base_url: "http://127.0.0.1:1/v1"}}
agents: {writer: {model: gpt-4.1}}
"""


def config_of(**alerts: Any) -> Config:
    return parse_config(f"{_CONFIG}\nalerts: {json.dumps(alerts)}\n")


def opened(version: int = 1, **fields: Any) -> BreakerTransition:
    given: dict[str, Any] = {
        "transition_id": f"writer/gpt-4.1#7.{version}",
        "agent": "writer",
        "model": "gpt-4.1",
        "from_state": "closed",
        "to_state": "open",
        "rule": "consecutive_failures",
        "reason": "3 jobs in a row failed (threshold: 3)",
        "consecutive_failures": 3,
        "errors": 3,
        "within_s": 60.0,
        "cooldown_s": 60.0,
        "version": version,
        "at": AT,
    }
    return BreakerTransition.model_validate(given | fields)


def stopped(task_id: str = "t1", **fields: Any) -> GuardEvent:
    given: dict[str, Any] = {
        "event_id": f"/{task_id}@7",
        "kind": "tripped",
        "agent": "writer",
        "task_id": task_id,
        "task_key": task_id,
        "execution_id": "e11",
        "rule": "max_iterations",
        "reason": "10 iterations (limit: 10)",
        "iterations": 10,
        "tokens": 52_311,
        "cost": "4.2",
        "consecutive_failures": 0,
        "total_failures": 1,
        "unique_errors": 1,
        "at": AT,
    }
    return GuardEvent.model_validate(given | fields)


def crossed(percent: int = 80, **fields: Any) -> BudgetEvent:
    given: dict[str, Any] = {
        "event_id": f"global/daily/2026-11-21/{percent}",
        "kind": "hard_cap" if percent == 100 else "soft_cap",
        "scope": "global",
        "window": "daily",
        "period": "2026-11-21",
        "threshold_percent": percent,
        "limit": "5",
        "total": "4",
        "enforcement": "hard",
        "at": AT,
    }
    return BudgetEvent.model_validate(given | fields)


@dataclass
class Bus:
    """A test's own connection to its NATS server, and what stands on it."""

    url: str
    client: Client

    async def publish(self, *events: BreakerTransition | GuardEvent | BudgetEvent, suffix: str = "") -> None:
        """Stores events as the services do; with a `suffix` to their message ids, once more."""
        publisher = Publisher(lambda: self.client, "test")
        for event in events:
            match event:
                case BreakerTransition():
                    subject, own = subjects.breaker(event.agent, event.model), event.transition_id
                case GuardEvent():
                    subject, own = subjects.guard(event.agent), event.event_id
                case BudgetEvent():
                    subject, own = subjects.budget(event.scope, event.window), event.event_id
            await publisher.event(subject, event, id=own + suffix, at=event.at)

    async def publish_alert(self, alert: Alert) -> None:
        await Publisher(lambda: self.client, "test").event(
            subjects.alert(alert.event), alert, id=alert.alert_id, at=alert.at
        )

    async def stored(self, stream: str, model: type[E]) -> list[E]:
        jetstream = self.client.jetstream()
        state = (await jetstream.stream_info(stream)).state
        return [
            model.model_validate_json((await jetstream.get_msg(stream, sequence)).data or b"")
            for sequence in range(state.first_seq, state.last_seq + 1)
            if state.messages
        ]

    async def alerts(self) -> list[Alert]:
        return await self.stored("ALERTS", Alert)

    async def delivered_again(self, stream: str, durable: str) -> None:
        """Has a consumer begin again, as if the server had heard of no acknowledgement."""
        jetstream = self.client.jetstream()
        config = (await jetstream.consumer_info(stream, durable)).config
        await jetstream.delete_consumer(stream, durable)
        await jetstream.add_consumer(stream, config.evolve(deliver_policy=DeliverPolicy.ALL))

    async def reported(self, change: str, times: int = 1) -> None:
        """Waits until ALERTS has so many alerts of a change."""

        async def is_reported() -> bool:
            return sum(alert.change == change for alert in await self.alerts()) >= times

        await until(is_reported, f"an alert that is {change}")

    async def dead_letters(self) -> list[DeadLetter]:
        return await self.stored("DLQ", DeadLetter)

    async def delivered(self, stream: str, durable: str, times: int) -> None:
        """Waits until a consumer has handed out messages so many times."""
        await self._wait(stream, durable, lambda info: info.delivered.consumer_seq >= times)

    async def finished(self, stream: str, durable: str, count: int) -> None:
        """Waits until a consumer has acknowledged everything up to message `count` of its stream."""
        await self._wait(stream, durable, lambda info: info.ack_floor.stream_seq >= count and not info.num_ack_pending)

    async def _wait(self, stream: str, durable: str, reached: Callable[[Any], bool]) -> None:
        async def has_reached() -> bool:
            return reached(await self.client.jetstream().consumer_info(stream, durable))

        await until(has_reached, f"what {durable} was to reach")


@asynccontextmanager
async def bus_of(url: str, config: Config) -> AsyncGenerator[Bus]:
    await provision(url, bus_plan(config))
    client = await nats.connect(url)
    try:
        yield Bus(url, client)
    finally:
        await client.close()


@asynccontextmanager
async def alerter(bus: Bus, config: Config, processes: int = 1) -> AsyncGenerator[None]:
    """Runs the service as it is wired, `processes` times."""
    settings = Settings(nats_url=SecretStr(bus.url))
    apps = [build(settings, config) for _ in range(processes)]
    await asyncio.gather(*(app.start() for app in apps))
    try:
        yield
    finally:
        await asyncio.gather(*(app.stop() for app in apps))


class SetClock:
    """A clock that stands still until a test moves it on."""

    def __init__(self) -> None:
        self._started_at, self._passed_s = datetime.now(UTC), 0.0
        self.clock = Clock(self.now, self.monotonic)

    def now(self) -> datetime:
        return self._started_at + timedelta(seconds=self._passed_s)

    def monotonic(self) -> float:
        return self._passed_s

    def advance(self, seconds: float) -> None:
        self._passed_s += seconds

    async def run_until(self, condition: Callable[[], Any], what: str, *, step_s: float = 0.5) -> None:
        """Moves on in steps, each as long as the alerters need to notice one, until a condition holds."""

        async def holds() -> bool:
            met = condition()
            if inspect.isawaitable(met):
                met = await met
            if not met:
                self.advance(step_s)
            return bool(met)

        await until(holds, what, brief=True)


@dataclass(frozen=True)
class Answer:
    status: int = 200
    body: str = "ok"
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Seen:
    """A request that came, and when."""

    headers: dict[str, str]
    body: bytes
    at: float

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.body)

    def verified(self) -> dict[str, Any]:
        """The body, when its signature is right; the receiver's side of Standard Webhooks."""
        return Webhook(SECRET).verify(self.body, self.headers)


class Receiver:
    """An HTTP server that answers as configured, and 200 after that."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/hook"
        self.answers: list[Answer] = []
        self.always: Answer = Answer()
        self.seen: list[Seen] = []
        self._runner: web.AppRunner | None = None

    async def start(self) -> Self:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._receive)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        return self

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _receive(self, request: web.Request) -> web.Response:
        now = asyncio.get_running_loop().time()
        self.seen.append(Seen({k.lower(): v for k, v in request.headers.items()}, await request.read(), now))
        answer = self.answers.pop(0) if self.answers else self.always
        return web.Response(status=answer.status, text=answer.body, headers=answer.headers)
