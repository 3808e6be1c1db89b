"""One incident, one message: alerters as processes, killed and many, against receivers that misbehave."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import socket
import subprocess
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nats
import pytest
from aiohttp import web
from nats.aio.client import Client
from standardwebhooks import Webhook

from breakwater.bus.core import close
from breakwater.bus.provision import provision
from breakwater.bus.publisher import Publisher
from breakwater.bus.topology import alert_consumer
from breakwater.cli.setup import bus_plan
from breakwater.config import load_config
from breakwater.contracts import subjects
from breakwater.contracts.alerts import Alert
from breakwater.contracts.events import BreakerTransition
from tests.helpers import ServiceProcess, all_acknowledged, start_service, until
from tests.servers import RunningServer
from tests.services.alerter.slack_double import CHANNEL, TOKEN, SlackDouble
from tests.shown import Show

SECRET = "whsec_" + base64.b64encode(b"only for the tests of alerts, in the flow").decode()
LOOPBACK = ["127.0.0.0/8"]


class Alerters:
    """Alerter processes on a bus, and a config."""

    def __init__(self, directory: Path, nats_url: str, client: Client) -> None:
        self.client = client
        self._directory, self._nats_url = directory, nats_url
        self._processes: list[ServiceProcess] = []
        self.kills = 0

    def start(self) -> None:
        environment = {
            "BREAKWATER_CONFIG": str(self._directory / "breakwater.yaml"),
            "BREAKWATER_NATS_URL": self._nats_url,
        }
        self._processes.append(start_service("alerter", environment, self._directory / "alerter.log"))

    def kill(self) -> None:
        """SIGKILL to all of them."""
        for process in self._processes:
            process.kill()
            process.wait()
        self.kills += len(self._processes)
        self._processes.clear()

    async def publish(self, event: BreakerTransition) -> None:
        await Publisher(lambda: self.client, "test").event(
            subjects.breaker(event.agent, event.model), event, id=event.transition_id, at=event.at
        )

    async def alerts(self) -> list[Alert]:
        subscription = await self.client.jetstream().subscribe("bw.alerts.>", ordered_consumer=True)
        last = (await self.client.jetstream().stream_info("ALERTS")).state.last_seq
        found: list[Alert] = []
        while len(found) < last:
            message = await subscription.next_msg(timeout=30)
            found.append(Alert.model_validate_json(message.data))
        await subscription.unsubscribe()
        return found

    async def done(self, *channels: str, alerts: int) -> None:
        """Waits until all alerts are sent to the channels, or need not be."""

        async def there() -> bool:
            jetstream = self.client.jetstream()
            if (await jetstream.stream_info("ALERTS")).state.last_seq < alerts:
                return False
            return all([await all_acknowledged(jetstream, "ALERTS", alert_consumer(name)) for name in channels])

        await until(there, "all alerts to be sent")


@asynccontextmanager
async def alerters(
    directory: Path, server: RunningServer, channels: dict[str, Any], **alerts: Any
) -> AsyncGenerator[Alerters]:
    document = {
        "providers": {"local": {"base_url": "http://127.0.0.1:1/v1"}},
        "agents": {"writer": {"model": "gpt-4.1"}},
        "alerts": {"allow_networks": LOOPBACK, "channels": channels, **alerts},
    }
    (directory / "breakwater.yaml").write_text(json.dumps(document))
    await provision(server.url, bus_plan(load_config(directory / "breakwater.yaml")))
    client = await nats.connect(server.url, max_reconnect_attempts=-1)
    running = Alerters(directory, server.url, client)
    try:
        yield running
    finally:
        running.kill()
        await close(client)


def breaker(to_state: str, version: int, model: str = "openai/gpt-4.1") -> BreakerTransition:
    given = {
        "transition_id": f"writer/{model}#{version}",
        "agent": "writer",
        "model": model,
        "from_state": "closed" if to_state == "open" else "half_open",
        "to_state": to_state,
        "reason": "3 consecutive failures (threshold: 3)" if to_state == "open" else "the half-open probe succeeded",
        "consecutive_failures": 3,
        "errors": 3,
        "cooldown_s": 60.0,
        "version": version,
        "at": datetime.now(UTC),
    }
    return BreakerTransition.model_validate(given)


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
        self.requests: list[tuple[float, str, int]] = []
        self.accepted: list[dict[str, Any]] = []
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

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
        event = Webhook(SECRET).verify(await request.read(), dict(request.headers))
        takes_s, status = self.behave(len(self.requests) + 1)
        self.requests.append((asyncio.get_running_loop().time(), request.headers["webhook-id"], status))
        await asyncio.sleep(takes_s)
        if status == 200:
            self.accepted.append({"id": request.headers["webhook-id"], **event})
        return web.Response(status=status, headers={"Retry-After": "1"} if status == 429 else None)


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK_SECRET", SECRET)
    monkeypatch.setenv("SLACK_TOKEN", TOKEN)


@pytest.fixture
async def slack(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[SlackDouble]:
    double = await SlackDouble().start()
    monkeypatch.setenv("SLACK_HOOK", double.hook_url)
    yield double
    await double.stop()


@pytest.fixture
async def hook() -> AsyncGenerator[Hook]:
    one = Hook()
    await one.start()
    yield one
    await one.stop()
    one.close()


def webhook(hook: Hook, **more: Any) -> dict[str, Any]:
    return {"webhook": {"url": hook.url, "secret": {"env": "HOOK_SECRET"}, **more}}


@pytest.mark.timeout(600)
@pytest.mark.long(about_s=35)
async def test_a_breaker_that_flaps_fifty_times_before_three_alerters_is_one_message_that_is_kept_up_to_date(
    tmp_path: Path, own_nats_server: RunningServer, slack: SlackDouble, hook: Hook, show: Show
) -> None:
    # An hour in half a minute: it opens every half a second, and has recovered when it stays closed for five.
    channels = {
        "bot": {
            "slack": {"bot_token": {"env": "SLACK_TOKEN"}, "channel": CHANNEL, "api_url": slack.api_url},
            "rate_limit": "off",
        },
        "pager": webhook(hook),
    }
    async with alerters(tmp_path, own_nats_server, channels, quiet_s=5) as running:
        for _ in range(3):
            running.start()
        for version in range(1, 101, 2):
            await running.publish(breaker("open", version))
            await asyncio.sleep(0.3)
            await running.publish(breaker("closed", version + 1))
            await asyncio.sleep(0.2)
        await running.done("bot", "pager", alerts=100)
        alerts = await running.alerts()
    started = alerts[0].at.timestamp()
    rows = [
        (f"{call.at - slack.calls[0].at:5.1f} s", "Slack", call.method, call.body.get("text", "")[:60])
        for call in slack.calls
    ]
    rows += [(f"{_at(one) - started:5.1f} s", "webhook", one["type"], one["data"]["title"]) for one in hook.accepted]
    counted = slack.counted()
    show(
        "A breaker that flaps 50 times, with 3 alerters",
        ["", "messages", "updates", "replies in its thread"],
        [
            ("published on ALERTS", "1 incident", f"{len(alerts)} changes", ""),
            ("Slack, bot", counted["posts"], counted["updates"], counted["replies"]),
            ("webhook", len(hook.accepted), "", ""),
        ],
    )
    print(*rows, sep="\n")
    assert len({alert.incident_id for alert in alerts}) == 1
    assert (alerts[-1].count, alerts[-1].status, len(alerts)) == (50, "resolved", 100)
    [message] = slack.messages()
    assert message.edited
    assert "[resolved]" in message.shown
    assert (counted["posts"], slack.violations) == (1, [])
    # Who can't be updated hears that it began, and that it is over.
    assert [(one["type"], one["data"]["change"]) for one in hook.accepted] == [
        ("breaker_open", hook.accepted[0]["data"]["change"]),
        ("breaker_closed", "resolved"),
    ]
    assert hook.accepted[-1]["data"]["count"] == 50


def _at(event: dict[str, Any]) -> float:
    return datetime.fromisoformat(event["timestamp"]).timestamp()


@pytest.mark.timeout(900)
@pytest.mark.long(about_s=115)
async def test_five_hundred_incidents_at_once_reach_a_slack_that_refuses_and_an_alerter_that_is_killed(
    tmp_path: Path, own_nats_server: RunningServer, slack: SlackDouble, show: Show
) -> None:
    channels = {
        "ops": {"slack": {"webhook_url": {"env": "SLACK_HOOK"}}, "rate_limit": {"messages": 12, "within_s": 3600}}
    }
    async with alerters(tmp_path, own_nats_server, channels) as running:
        # Every fourth request is refused, whatever its pace.
        slack.refuse["hook"] = ["", "", "", "ratelimited:1"] * 100
        running.start()
        await asyncio.gather(*(running.publish(breaker("open", 1, f"m{number}")) for number in range(500)))
        for kills in range(1, 6):
            await until(lambda kills=kills: len(slack.messages()) >= 3 * kills, f"{3 * kills} messages", timeout_s=300)
            running.kill()
            running.start()
        await running.done("ops", alerts=500)
        kills = running.kills
        alerts = await running.alerts()
    assert len({alert.incident_id for alert in alerts}) == len(alerts) == 500
    digests = [post for post in slack.messages() if "delayed" in post.shown]
    singles = Counter(
        found[1]
        for post in slack.messages()
        if post not in digests and (found := re.search(r"on (m\d+)\b", post.shown))
    )
    [held_back] = [int(re.search(r"([\d,]+) alerts were delayed", post.shown)[1]) for post in digests]  # type: ignore[index]
    duplicates = sum(singles.values()) - len(singles)
    gaps = [later.at - earlier.at for earlier, later in zip(slack.calls, slack.calls[1:], strict=False)]
    show(
        "500 incidents at once, a Slack that refuses every fourth request, an alerter killed 5 times",
        ["sent singly", "sent twice", "in the digest", "missing", "refused", "least between two requests"],
        [
            (
                len(singles),
                duplicates,
                held_back,
                500 - len(singles) - held_back,
                slack.counted()["refused"],
                f"{min(gaps):.2f} s",
            )
        ],
    )
    assert len(singles) + held_back == 500
    assert duplicates <= kills == 5
    # The times are the receiver's: what two requests took on their way may differ by some milliseconds.
    assert min(gaps) > 0.9
    figures = re.search(r"breaker_open ([\d,]+)", digests[0].shown)
    assert figures is not None
    assert int(figures[1]) == held_back
    assert slack.violations == []


@pytest.mark.timeout(600)
@pytest.mark.long(about_s=130)
async def test_a_receiver_that_is_down_then_slow_then_failing_gets_every_alert_once(
    tmp_path: Path, own_nats_server: RunningServer, hook: Hook, show: Show
) -> None:
    # Two minutes, as an outage may last: `BW_DOWN_S=120 pytest …`; a quarter of that where nobody asks for more.
    down_s = float(os.environ.get("BW_DOWN_S", "15"))
    channels = {"pager": webhook(hook, timeout_s=1) | {"rate_limit": "off"}}
    async with alerters(tmp_path, own_nats_server, channels) as running:
        await hook.stop()
        running.start()
        for number in range(30):
            await running.publish(breaker("open", 1, f"m{number}"))
        await until(lambda: '"unavailable"' in (tmp_path / "alerter.log").read_text(), "an outage that is noticed")
        await asyncio.sleep(down_s)

        def behave(request: int) -> tuple[float, int]:
            if request <= 3:
                return 3.0, 504  # longer than anybody waits
            return (0.5, 200) if request <= 8 else (0.0, 500 if request <= 14 else 200)

        hook.behave = behave
        await hook.start()
        await running.done("pager", alerts=30)
    statuses = Counter(status for _, _, status in hook.requests)
    ids = [one["id"] for one in hook.accepted]
    show(
        f"A receiver that is down for {down_s:g} s, then slow, then answers 500, then 200",
        ["alerts", "arrived", "arrived twice", "requests while slow", "answered 500", "signatures right"],
        [(30, len(set(ids)), len(ids) - len(set(ids)), statuses[504], statuses[500], len(hook.requests))],
    )
    assert len(ids) == len(set(ids)) == 30
    assert {one["data"]["alert_id"] for one in hook.accepted} == set(ids)
    # A message has the same id at every try.
    assert {identity for _, identity, _ in hook.requests} == set(ids)


async def test_one_channel_that_fails_holds_up_no_other(
    tmp_path: Path, own_nats_server: RunningServer, hook: Hook, slack: SlackDouble
) -> None:
    slack.revoked = "no_service"
    channels = {
        "pager": webhook(hook) | {"rate_limit": "off"},
        "dead": {"webhook": {"url": "http://127.0.0.1:9/", "secret": {"env": "HOOK_SECRET"}}},
        "gone": {"slack": {"webhook_url": {"env": "SLACK_HOOK"}}},
        "ours": {"python": {"callable": "tests.flow.alert_callable:hangs", "timeout_s": 300}},
    }
    async with alerters(tmp_path, own_nats_server, channels) as running:
        running.start()
        for number in range(20):
            await running.publish(breaker("open", 1, f"m{number}"))
        await until(lambda: len(hook.accepted) >= 20, "all alerts on the channel that works")
        # What a receiver does not want that is gone is kept, and that is an incident that the others hear of.
        await until(lambda: any(one["type"] == "job_dead_lettered" for one in hook.accepted), "the dead letters")
    kinds = Counter(one["type"] for one in hook.accepted)
    assert kinds["breaker_open"] == 20
    assert kinds["job_dead_lettered"] >= 1


@pytest.mark.long
async def test_another_alerter_goes_on_when_the_one_that_delivers_is_stopped_and_no_alert_is_reported_twice(
    tmp_path: Path, own_nats_server: RunningServer, hook: Hook
) -> None:
    channels = {"pager": webhook(hook) | {"rate_limit": "off"}}
    async with alerters(tmp_path, own_nats_server, channels) as running:
        for _ in range(3):
            running.start()
        for number in range(60):
            await running.publish(breaker("open", 1, f"m{number}"))
            if number % 20 == 10:
                await until(lambda number=number: len(hook.accepted) >= number // 2, "some alerts")
                stopping, running._processes = running._processes[0], running._processes[1:]
                stopping.terminate()
                with suppress(subprocess.TimeoutExpired):
                    await asyncio.to_thread(stopping.wait, 30)
                running.start()
        await running.done("pager", alerts=60)
    ids = [one["id"] for one in hook.accepted]
    assert len(ids) == len(set(ids)) == 60
