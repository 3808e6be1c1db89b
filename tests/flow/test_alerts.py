"""One incident, one message: several alerters, stopped and killed, against receivers that misbehave.

The alerters run in this process on a clock that the tests set, but for the one that is killed.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import nats
import pytest
from aiohttp import web
from nats.aio.client import Client
from pydantic import SecretStr
from standardwebhooks import Webhook
from structlog.testing import capture_logs

from breakwater.alerts.contract import Alert
from breakwater.alerts.rules.incidents import IncidentRules
from breakwater.alerts.rules.signals import config_applied
from breakwater.alerts.settings import Reminders
from breakwater.alerts.store.incidents import IncidentLog
from breakwater.breakers.contract import BreakerTransition
from breakwater.config import load_config
from breakwater.config.servers import bus_plan
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.broker import ServiceApp
from breakwater.kernel.nats.core import close
from breakwater.kernel.nats.provision import provision
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.topology import alert_consumer
from breakwater.kernel.process.settings import Settings
from breakwater.redaction.rules.redact import Redactor
from breakwater.redaction.settings import RedactionRules
from breakwater.services.alerter import notifier
from breakwater.services.alerter.app import build
from tests.flow import alert_callable
from tests.helpers import ServiceProcess, all_acknowledged, start_service, until
from tests.servers import RunningServer
from tests.services.alerter.kit import SECRET, SetClock, crossed
from tests.services.alerter.slack_double import CHANNEL, TOKEN, SlackDouble
from tests.shown import Show

LOOPBACK = ["127.0.0.0/8"]
LOOK_S = 0.02
"""How often a notifier looks at the clock that stands still."""

PACE = 4
"""Of the lease of a process that is killed: it lapses after four seconds."""


class Alerters:
    """Alerters on a bus, and their config."""

    def __init__(self, config_file: Path, nats_url: str, client: Client, clock: SetClock) -> None:
        self.client, self.clock = client, clock
        self._config_file, self._nats_url = config_file, nats_url
        self._apps: list[ServiceApp] = []
        self._processes: list[ServiceProcess] = []

    async def start(self, alerters: int = 1) -> None:
        """Starts alerters in this process."""
        config = load_config(self._config_file)
        settings = Settings(nats_url=SecretStr(self._nats_url))
        for _ in range(alerters):
            app = build(settings, config, self.clock.clock)
            self._apps.append(app)
            await app.start()

    async def stop_oldest(self) -> None:
        """Stops an alerter as SIGTERM does."""
        await self._apps.pop(0).stop()

    def start_process(self) -> None:
        """Starts an alerter in a process of its own, on the real clock and with a short lease."""
        environment = {
            "BREAKWATER_CONFIG": str(self._config_file),
            "BREAKWATER_NATS_URL": self._nats_url,
            "BREAKWATER_PACE": str(PACE),
        }
        log = self._config_file.with_name(f"alerter-{len(self._processes)}.log")
        self._processes.append(start_service("alerter", environment, log))

    def kill_oldest(self) -> None:
        """Sends SIGKILL to the process that was started first."""
        process = self._processes.pop(0)
        process.kill()
        process.wait()

    async def end(self) -> None:
        while self._processes:
            self.kill_oldest()
        while self._apps:
            await self.stop_oldest()

    async def publish(self, event: BreakerTransition) -> None:
        await Publisher(lambda: self.client, "test").event(
            subjects.breaker(event.agent, event.model), event, id=event.transition_id, at=event.at
        )

    def breaker(self, to_state: str, version: int = 1, model: str = "openai/gpt-4.1") -> BreakerTransition:
        opens = to_state == "open"
        return BreakerTransition.model_validate(
            {
                "transition_id": f"writer/{model}#{version}",
                "agent": "writer",
                "model": model,
                "from_state": "closed" if opens else "half_open",
                "to_state": to_state,
                "reason": "3 jobs in a row failed (threshold: 3)" if opens else "the half-open probe succeeded",
                "consecutive_failures": 3,
                "errors": 3,
                "cooldown_s": 60.0,
                "version": version,
                "at": self.clock.now(),
            }
        )

    async def open_breakers(self, count: int) -> None:
        """Opens the breakers of so many models."""
        await asyncio.gather(*(self.publish(self.breaker("open", model=f"m{number}")) for number in range(count)))

    async def recorded(self) -> int:
        """Returns how many alerts are in ALERTS."""
        return (await self.client.jetstream().stream_info("ALERTS")).state.last_seq

    async def alerts(self) -> list[Alert]:
        jetstream = self.client.jetstream()
        messages = [await jetstream.get_msg("ALERTS", number + 1) for number in range(await self.recorded())]
        return [Alert.model_validate_json(message.data or b"") for message in messages]

    async def fetched(self, channel: str, alerts: int) -> bool:
        """True once the channel's notifier has so many alerts, sent or not."""
        consumer = await self.client.jetstream().consumer_info("ALERTS", alert_consumer(channel))
        return consumer.delivered is not None and consumer.delivered.stream_seq >= alerts

    async def delivered(self, channel: str, alerts: int) -> bool:
        """True once so many alerts are recorded, and all are sent to the channel or need not be."""
        if await self.recorded() < alerts:
            return False
        return await all_acknowledged(self.client.jetstream(), "ALERTS", alert_consumer(channel))


@asynccontextmanager
async def alerters(
    directory: Path, server: RunningServer, channels: dict[str, Any], clock: SetClock | None = None, **alerts: Any
) -> AsyncGenerator[Alerters]:
    document = {
        "providers": {"local": {"base_url": "http://127.0.0.1:1/v1"}},
        "agents": {"writer": {"model": "gpt-4.1"}},
        "alerts": {"allow_networks": LOOPBACK, "channels": channels, **alerts},
    }
    config_file = directory / "breakwater.yaml"
    config_file.write_text(json.dumps(document))
    await provision(server.url, bus_plan(load_config(config_file)))
    client = await nats.connect(server.url, max_reconnect_attempts=-1)
    running = Alerters(config_file, server.url, client, clock or SetClock())
    try:
        yield running
    finally:
        await running.end()
        await close(client)


class Hook:
    """A receiver of webhooks that checks signatures, and behaves as configured."""

    def __init__(self) -> None:
        # Bound and never listening: while the receiver is down, no other program on this machine gets its port, and its
        # alerts.
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._reserved.bind(("127.0.0.1", 0))
        self.port: int = self._reserved.getsockname()[1]
        self.behave: Callable[[int], tuple[float, int]] = lambda _: (0.0, 200)
        """By the number of the request, from 1: how long it takes, and what it is answered."""
        self.requests: list[tuple[str, int]] = []
        """The message's id and the status of each."""
        self.accepted: list[dict[str, Any]] = []
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    @property
    def accepted_ids(self) -> list[str]:
        return [message["id"] for message in self.accepted]

    async def start(self) -> None:
        app = web.Application()
        app.router.add_post("/hook", self._receive)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_port=True).start()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def close(self) -> None:
        self._reserved.close()

    async def _receive(self, request: web.Request) -> web.Response:
        message_id, body = request.headers["webhook-id"], await request.text()
        # `verify` would compare the time with the real one.
        signed_at = datetime.fromtimestamp(int(request.headers["webhook-timestamp"])).astimezone()
        assert Webhook(SECRET).sign(message_id, signed_at, body) == request.headers["webhook-signature"]
        takes_s, status = self.behave(len(self.requests) + 1)
        self.requests.append((message_id, status))
        await asyncio.sleep(takes_s)
        if status == 200:
            self.accepted.append({"id": message_id, **json.loads(body)})
        return web.Response(status=status, headers={"Retry-After": "1"} if status == 429 else None)


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK_SECRET", SECRET)
    monkeypatch.setenv("SLACK_TOKEN", TOKEN)
    monkeypatch.setattr(notifier, "IDLE_S", LOOK_S)


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
async def slack(clock: SetClock, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[SlackDouble]:
    double = await SlackDouble(monotonic=clock.monotonic).start()
    monkeypatch.setenv("SLACK_HOOK", double.hook_url)
    yield double
    await double.stop()


@pytest.fixture
async def hook() -> AsyncGenerator[Hook]:
    receiver = Hook()
    await receiver.start()
    yield receiver
    await receiver.stop()
    receiver.close()


def webhook(hook: Hook, **more: Any) -> dict[str, Any]:
    return {"webhook": {"url": hook.url, "secret": {"env": "HOOK_SECRET"}, **more}, "rate_limit": "off"}


async def test_a_breaker_that_flaps_twenty_times_before_three_alerters_is_one_message_that_is_kept_up_to_date(
    tmp_path: Path, own_nats_server: RunningServer, slack: SlackDouble, hook: Hook, clock: SetClock, show: Show
) -> None:
    channels = {
        "bot": {
            "slack": {"bot_token": {"env": "SLACK_TOKEN"}, "channel": CHANNEL, "api_url": slack.api_url},
            "rate_limit": "off",
        },
        "pager": webhook(hook),
    }
    async with alerters(tmp_path, own_nats_server, channels, clock) as running:
        await running.start(3)
        # For 24 minutes: it has recovered when it stays closed for ten minutes, and never does before.
        for version in range(1, 41, 2):
            await running.publish(running.breaker("open", version))
            await until(lambda: hook.accepted, "the first message")
            clock.advance(40)
            await running.publish(running.breaker("closed", version + 1))
            clock.advance(32)
            for channel in channels:
                await until(lambda channel=channel, last=version + 1: running.fetched(channel, last), "the fetch")
        for channel in channels:
            await clock.run_until(lambda channel=channel: running.delivered(channel, alerts=40), channel, step_s=5)
        alerts = await running.alerts()
    counted = slack.counted()
    show(
        "A breaker that flaps 20 times, with 3 alerters",
        ["", "messages", "updates", "replies in its thread"],
        [
            ("published on ALERTS", "1 incident", f"{len(alerts)} changes", ""),
            ("Slack, bot", counted["posts"], counted["updates"], counted["replies"]),
            ("webhook", len(hook.accepted), "", ""),
        ],
    )
    assert len({alert.incident_id for alert in alerts}) == 1
    assert (alerts[-1].count, alerts[-1].status, len(alerts)) == (20, "resolved", 40)
    [message] = slack.messages()
    assert message.edited
    assert "[resolved]" in message.shown
    assert (counted["posts"], slack.violations) == (1, [])
    # Who can't be updated hears that it began, and that it is over.
    began, ended = hook.accepted
    assert (began["type"], ended["type"]) == ("breaker_open", "breaker_closed")
    assert (ended["data"]["change"], ended["data"]["count"]) == ("resolved", 20)


async def test_a_config_and_three_thresholds_within_a_minute_are_one_message_in_slack_and_four_for_a_program(
    tmp_path: Path, own_nats_server: RunningServer, slack: SlackDouble, hook: Hook, clock: SetClock
) -> None:
    channels = {"ops": {"slack": {"webhook_url": {"env": "SLACK_HOOK"}}}, "pager": webhook(hook)}
    async with alerters(tmp_path, own_nats_server, channels, clock) as running:
        await running.start()
        recorder = IncidentLog(
            lambda: running.client, Publisher(lambda: running.client, "test"), Redactor.compile(RedactionRules())
        )
        rules = IncidentRules(("config_applied",), 600, (), Reminders())
        await recorder.apply(config_applied("2", "1", "ann", ("agents.writer.model",), clock.now()), rules)
        for recorded, percent in enumerate((50, 80, 100), 2):
            event = crossed(percent, at=clock.now())
            subject = subjects.budget(event.scope, event.window)
            await Publisher(lambda: running.client, "test").event(subject, event, id=event.event_id, at=event.at)
            await until(lambda alerts=recorded: running.fetched("ops", alerts), "the alert to be fetched")
            clock.advance(15)
        await clock.run_until(lambda: running.delivered("pager", alerts=4), "the program to be told")
        await clock.run_until(slack.messages, "Slack to be told")
        clock.advance(3600)
        await running.publish(running.breaker("open"))
        await clock.run_until(lambda: len(slack.messages()) > 1, "Slack to be told of something else")
        message, other = slack.messages()
    assert other.shown.startswith("*[critical] Breaker open")
    assert message.shown.startswith("*[critical] Limit refuses calls: the plane, daily*")
    assert message.shown.endswith("For links to the console in these messages, set `console.url` in the config.")
    assert len(hook.accepted) >= 4


async def test_eighty_incidents_at_once_reach_a_slack_that_refuses_as_messages_and_one_digest(
    tmp_path: Path, own_nats_server: RunningServer, slack: SlackDouble, clock: SetClock, show: Show
) -> None:
    channels = {
        "ops": {"slack": {"webhook_url": {"env": "SLACK_HOOK"}}, "rate_limit": {"messages": 12, "within_s": 3600}}
    }
    # Every fourth request is refused, whatever its pace.
    slack.refuse["hook"] = ["", "", "", "ratelimited:1"] * 100
    async with alerters(tmp_path, own_nats_server, channels, clock) as running:
        await running.start()
        await running.open_breakers(80)

        async def all_recorded() -> bool:
            return await running.recorded() == 80

        await until(all_recorded, "80 incidents")
        await clock.run_until(lambda: running.delivered("ops", alerts=80), "all alerts to be sent", step_s=0.25)
        alerts = await running.alerts()
    assert len({alert.incident_id for alert in alerts}) == len(alerts) == 80
    *messages, digest = slack.messages()
    models = [re.search(r"on (m\d+)\b", message.shown) for message in messages]
    held_back = re.search(r"([\d,]+) alerts were delayed", digest.shown)
    figures = re.search(r"breaker_open ([\d,]+)", digest.shown)
    assert held_back is not None
    assert figures is not None
    refused = [call for call in slack.calls if call.answer != "ok"]
    gaps = [later.at - earlier.at for earlier, later in zip(slack.calls, slack.calls[1:], strict=False)]
    show(
        "80 incidents at once, a Slack that refuses every fourth request",
        ["sent singly", "in the digest", "refused", "least between two requests"],
        [(len(models), held_back[1], len(refused), f"{min(gaps):.2f} s")],
    )
    assert len({found[1] for found in models if found is not None}) == len(messages) == 11
    assert held_back[1] == figures[1] == str(80 - 11)
    assert len(refused) == 3
    assert min(gaps) >= 1.0
    assert slack.violations == []


async def test_a_killed_alerter_is_replaced_and_what_it_was_sending_is_sent_again_under_the_same_id(
    tmp_path: Path, own_nats_server: RunningServer, hook: Hook
) -> None:
    hook.behave = lambda request: (600.0 if request == 5 else 0.0, 200)
    async with alerters(tmp_path, own_nats_server, {"pager": webhook(hook, timeout_s=60)}) as running:
        jetstream = running.client.jetstream()
        consumer = (await jetstream.consumer_info("ALERTS", alert_consumer("pager"))).config
        # As short as the lease, so that what was delivered to the killed process comes back within the test.
        await jetstream.add_consumer("ALERTS", consumer.evolve(ack_wait=5.0))
        running.start_process()
        await running.open_breakers(12)
        await until(lambda: len(hook.requests) == 5, "a message on its way")
        running.start_process()
        running.kill_oldest()
        await until(lambda: running.delivered("pager", alerts=12), "all alerts to be sent")
    assert len(hook.accepted_ids) == len(set(hook.accepted_ids)) == 12
    tries = Counter(message_id for message_id, _ in hook.requests)
    on_its_way = hook.requests[4][0]
    assert tries == dict.fromkeys(hook.accepted_ids, 1) | {on_its_way: 2}


async def test_a_receiver_that_is_down_then_slow_then_failing_gets_every_alert_once(
    tmp_path: Path, own_nats_server: RunningServer, hook: Hook, clock: SetClock, show: Show
) -> None:
    timeout_s = 1.0
    async with alerters(tmp_path, own_nats_server, {"pager": webhook(hook, timeout_s=timeout_s)}, clock) as running:
        await hook.stop()
        with capture_logs() as logs:
            await running.start()
            await running.open_breakers(30)
            await until(lambda: any(line["event"] == "unavailable" for line in logs), "an outage that is noticed")
            back_at = clock.monotonic() + 120
            await clock.run_until(lambda: clock.monotonic() >= back_at, "two minutes", step_s=2)
            still_down = [line for line in logs if line["event"] == "unavailable"]

            def behave(request: int) -> tuple[float, int]:
                if request <= 2:
                    return 3 * timeout_s, 504
                return (0.1, 200) if request <= 7 else (0.0, 500 if request <= 13 else 200)

            hook.behave = behave
            await hook.start()
            await clock.run_until(lambda: running.delivered("pager", alerts=30), "all alerts to be sent", step_s=1)
    statuses = Counter(status for _, status in hook.requests)
    show(
        "A receiver that is down for two minutes, then slow, then answers 500, then 200",
        ["alerts", "arrived", "requests while slow", "answered 500"],
        [(30, len(hook.accepted), statuses[504], statuses[500])],
    )
    assert len(still_down) == 1
    assert len(hook.accepted_ids) == len(set(hook.accepted_ids)) == 30
    assert {message["data"]["alert_id"] for message in hook.accepted} == set(hook.accepted_ids)
    # A message has the same id at every try.
    assert {message_id for message_id, _ in hook.requests} == set(hook.accepted_ids)
    assert (statuses[504], statuses[500]) == (2, 6)


async def test_one_channel_that_fails_holds_up_no_other(
    tmp_path: Path, own_nats_server: RunningServer, hook: Hook, slack: SlackDouble, clock: SetClock
) -> None:
    slack.revoked = "no_service"
    channels = {
        "pager": webhook(hook),
        "dead": {"webhook": {"url": "http://127.0.0.1:9/", "secret": {"env": "HOOK_SECRET"}}},
        "gone": {"slack": {"webhook_url": {"env": "SLACK_HOOK"}}},
        "ours": {"python": {"callable": "tests.flow.alert_callable:hangs", "timeout_s": 300}},
    }
    try:
        async with alerters(tmp_path, own_nats_server, channels, clock) as running:
            await running.start()
            await running.open_breakers(20)
            await until(lambda: len(hook.accepted) >= 20, "all alerts on the channel that works")
            # What a receiver does not want that is gone is kept, and that is an incident that the others hear of.
            await clock.run_until(
                lambda: any(message["type"] == "job_dead_lettered" for message in hook.accepted), "the dead letters"
            )
    finally:
        alert_callable.RELEASED.set()
    assert Counter(message["type"] for message in hook.accepted)["breaker_open"] == 20


async def test_another_alerter_goes_on_when_the_one_that_delivers_is_stopped_and_no_alert_is_reported_twice(
    tmp_path: Path, own_nats_server: RunningServer, hook: Hook
) -> None:
    async with alerters(tmp_path, own_nats_server, {"pager": webhook(hook)}) as running:
        await running.start(3)
        for number in range(30):
            await running.publish(running.breaker("open", model=f"m{number}"))
            if number % 10 == 5:
                await until(lambda number=number: len(hook.accepted) >= number // 2, "some alerts")
                await running.stop_oldest()
                await running.start()
        await until(lambda: running.delivered("pager", alerts=30), "all alerts to be sent")
    assert len(hook.accepted_ids) == len(set(hook.accepted_ids)) == 30
