"""The channels of alerts, over HTTP: a test message, and what did not arrive. The test is the alerter."""

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nats
import pytest
import pytest_asyncio
from nats.aio.client import Client
from nats.aio.msg import Msg

from breakwater.alerts.api import alerts
from breakwater.alerts.contract import Alert, AlertDigest, ChannelTest, HeldBack
from breakwater.config import parse_config
from breakwater.config.servers import bus_plan
from breakwater.identity.api_keys import create_key
from breakwater.kernel.commands.connect import flush_subscriptions
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.contract import DeadLetter
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.permissions import GRANTS, inbox_prefix, render
from breakwater.kernel.nats.provision import provision
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.subjects import Header, Stream
from breakwater.kernel.types import Event, format_time
from breakwater.local.ports import free_port
from tests.nats_node import start_nats
from tests.server_sources import RunningServer
from tests.services.request.conftest import ALERTING, LINK_SECRET, HttpApi, publish_alert, running, settings_for

NOW = datetime(2026, 11, 21, 11, 0, 3, tzinfo=UTC)


async def give_up(
    api: HttpApi, channel: str | None, message: Event, *, error: str = "the receiver answered 500"
) -> int:
    """What an alerter does with a message that can't be delivered. Returns the dead letter's sequence."""
    return await put_dead_letter(api, channel, message.json_bytes(), error)


async def put_dead_letter(api: HttpApi, channel: str | None, payload: bytes, error: str) -> int:
    dead_letter = DeadLetter(
        reason="undeliverable",
        error=f"{channel}: {error}",
        stream="ALERTS",
        subject="bw.alerts.guard_tripped",
        sequence=1,
        headers={} if channel is None else {Header.CHANNEL.value: channel, Header.CE_ID.value: "alert"},
        payload_base64=base64.b64encode(payload).decode(),
        at=NOW,
    )
    stored = await Publisher(lambda: api.bus, "alerter").raw(
        subjects.dead_letter("undeliverable", "unknown"), dead_letter.json_bytes(), {}
    )
    return stored.sequence


async def again(api: HttpApi) -> list[tuple[str, str | None, bytes]]:
    """What lies ready to be tried again: where, for which channel, and what."""
    return [
        (found.subject, found.headers.get(Header.CHANNEL.value), found.data)
        async for found in Lookup(lambda: api.bus).scan(Stream.ALERTER, "bw.alerter.replays.>")
    ]


async def undelivered(api: HttpApi, query: str = "") -> Any:
    answer = await api.ask("GET", f"/api/v1/alerts/undelivered{query}")
    assert answer.status == 200, answer.json
    return answer.json["undelivered"]


@pytest_asyncio.fixture(loop_scope="package")
async def alert(alerting: HttpApi) -> Alert:
    return await publish_alert(alerting)


async def listen(bus: Client, answer: Callable[[Msg], Awaitable[None]]) -> None:
    await bus.subscribe("bw.alerter.test.*", queue="alerter", cb=answer)
    await flush_subscriptions(bus)


@pytest.mark.parametrize("channel", ["ops", "second.line"])
async def test_a_test_message_is_sent_by_an_alerter_and_what_came_of_it_is_reported(
    alerting: HttpApi, channel: str
) -> None:
    heard: list[str] = []

    async def refuse(message: Msg) -> None:
        heard.append(message.subject)
        await message.respond(ChannelTest(channel=channel, delivered=False, error="answered 404").json_bytes())

    await listen(alerting.bus, refuse)
    answer = await alerting.act("alerts/test", channel=channel)
    assert (answer.status, answer.json) == (200, {"channel": channel, "delivered": False, "error": "answered 404"})
    assert heard == [subjects.channel_test(channel)]


async def test_without_an_alerter_nobody_waits_for_one(alerting: HttpApi) -> None:
    answer = await alerting.act("alerts/test", channel="ops")
    assert (answer.status, answer.code, answer.headers["Retry-After"]) == (503, "no_alerter", "1")
    assert "no alerter is running" in answer.message


async def test_an_alerter_that_does_not_answer_is_distinguished_from_none(
    alerting: HttpApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerts, "TEST_TIMEOUT_S", 0.1)

    async def silent(_: Msg) -> None: ...

    await listen(alerting.bus, silent)
    answer = await alerting.act("alerts/test", channel="ops")
    assert (answer.status, answer.code) == (503, "unavailable")
    assert "it is unknown whether it was sent: no response on bw.alerter.test.ops within 0.1 s" in answer.message


async def test_a_channel_that_the_config_has_not_is_answered_with_those_that_it_has(alerting: HttpApi) -> None:
    for path in ("test", "replay"):
        for channel, hint in {
            "opss": "did you mean 'ops'? known are ops, second.line",
            "pager": "known are ops, second.line",
        }.items():
            answer = await alerting.act(f"alerts/{path}", channel=channel)
            assert (answer.status, answer.code, answer.paths) == (404, "unknown_channel", ["channel"])
            assert answer.message == f"there is no channel {channel!r}; {hint}"


async def test_what_did_not_arrive_is_listed_the_latest_first(alerting: HttpApi, alert: Alert) -> None:
    assert await undelivered(alerting) == []
    held = [HeldBack.model_validate(alert.model_dump())]
    digest = AlertDigest(
        digest_id="digest_1",
        why="rate_limit",
        severity="critical",
        held_from=NOW,
        held_until=NOW,
        counts={"guard_tripped": 2, "breaker_open": 1},
        alerts=tuple(held),
        at=NOW,
    )
    first = await give_up(alerting, "ops", alert)
    second = await give_up(alerting, "second.line", digest)
    third = await put_dead_letter(alerting, "ops", b"no alert", "why")
    await put_dead_letter(alerting, None, alert.json_bytes(), "of no channel")
    listed = await undelivered(alerting)
    assert listed[2] == {
        "dead_letter_id": first,
        "channel": "ops",
        "alert_id": alert.alert_id,
        "title": alert.title,
        "error": "ops: the receiver answered 500",
        "at": format_time(NOW),
        "replayed": False,
    }
    assert [(one["dead_letter_id"], one["alert_id"], one["title"]) for one in listed[:2]] == [
        (third, None, None),
        (second, "digest_1", "a digest of 3 incidents"),
    ]
    assert [one["dead_letter_id"] for one in await undelivered(alerting, "?channel=ops")] == [third, first]
    answer = await alerting.ask("GET", "/api/v1/alerts/undelivered?limit=2")
    assert ([one["dead_letter_id"] for one in answer.json["undelivered"]], answer.json["more"]) == (
        [third, second],
        True,
    )
    wrong = await alerting.ask("GET", "/api/v1/alerts/undelivered?limit=0")
    assert (wrong.status, wrong.code, wrong.paths) == (422, "invalid_query", ["limit"])


async def test_a_dismissed_alert_is_no_longer_listed_as_undelivered_nor_sent_again_with_all(
    alerting: HttpApi, alert: Alert
) -> None:
    dismissed, kept = [await give_up(alerting, "ops", alert), await give_up(alerting, "second.line", alert)]
    assert (await alerting.act("dlq/dismiss", dead_letters=[dismissed])).json["dismissed"] == [dismissed]
    assert [one["dead_letter_id"] for one in await undelivered(alerting)] == [kept]
    assert (await alerting.act("alerts/replay")).json["channels"] == {"second.line": 1}
    assert (await alerting.act("alerts/replay", dead_letter_id=dismissed)).json["channels"] == {"ops": 1}


async def test_each_is_tried_again_once_with_the_bytes_that_were_kept(alerting: HttpApi, alert: Alert) -> None:
    payload = json.dumps({"of": "a later version"}).encode()
    dead_letters = [
        await give_up(alerting, "ops", alert),
        await put_dead_letter(alerting, "second.line", payload, "why"),
        await give_up(alerting, "gone", alert),
        await give_up(alerting, None, alert),
    ]
    answer = await alerting.act("alerts/replay")
    assert (answer.status, answer.json) == (
        200,
        {
            "replayed": 2,
            "already": 0,
            "skipped": 1,
            "channels": {"ops": 1, "second.line": 1},
            "continue_after": None,
        },
    )
    wanted = [
        (subjects.alert_replay("ops", dead_letters[0]), "ops", alert.json_bytes()),
        (subjects.alert_replay("second.line", dead_letters[1]), "second.line", payload),
    ]
    assert await again(alerting) == wanted
    assert [(one["channel"], one["replayed"]) for one in await undelivered(alerting)] == [
        ("gone", False),
        ("second.line", True),
        ("ops", True),
    ]
    answer = await alerting.act("alerts/replay")
    assert (answer.json["replayed"], answer.json["already"], answer.json["channels"]) == (0, 2, {})
    assert await again(alerting) == wanted


async def test_only_those_of_a_channel_are_tried_again_where_it_is_named(alerting: HttpApi, alert: Alert) -> None:
    await give_up(alerting, "ops", alert)
    dead_letter = await give_up(alerting, "second.line", alert)
    answer = await alerting.act("alerts/replay", channel="second.line")
    assert (answer.json["replayed"], answer.json["already"], answer.json["skipped"]) == (1, 0, 0)
    assert [where for where, _, _ in await again(alerting)] == [subjects.alert_replay("second.line", dead_letter)]


async def test_one_that_is_named_is_tried_once_more(alerting: HttpApi, alert: Alert) -> None:
    dead_letter = await give_up(alerting, "ops", alert)
    other = await give_up(alerting, "ops", alert)
    stored = set[int]()
    for _ in range(2):
        answer = await alerting.act("alerts/replay", dead_letter_id=dead_letter)
        assert (answer.json["replayed"], answer.json["channels"]) == (1, {"ops": 1})
        [found] = [one async for one in Lookup(lambda: alerting.bus).scan(Stream.ALERTER, "bw.alerter.replays.>")]
        assert found.subject == subjects.alert_replay("ops", dead_letter)
        stored.add(found.sequence)
    assert len(stored) == 2  # for the consumer, another message
    assert (await alerting.act("alerts/replay")).json["channels"] == {"ops": 1}
    assert len(await again(alerting)) == 2
    assert other > dead_letter


async def test_a_dead_letter_that_is_not_there_is_said_so(alerting: HttpApi, alert: Alert) -> None:
    other = await Publisher(lambda: alerting.bus, "worker").raw("bw.dlq.invalid.writer", b"{}", {})
    mine = await give_up(alerting, "ops", alert)
    gone = await give_up(alerting, "gone", alert)
    for body in (
        {"dead_letter_id": 99},
        {"dead_letter_id": other.sequence},
        {"dead_letter_id": mine, "channel": "second.line"},
    ):
        answer = await alerting.act("alerts/replay", **body)
        assert (answer.status, answer.code, answer.paths) == (404, "unknown_dead_letter", ["dead_letter_id"]), body
    answer = await alerting.act("alerts/replay", dead_letter_id=gone)
    assert (answer.status, answer.code) == (404, "unknown_channel")
    assert (await alerting.act("alerts/replay", dead_letter_id=0)).code == "invalid_request"
    assert await again(alerting) == []


async def test_many_who_replay_at_once_replay_each_once(alerting: HttpApi, alert: Alert) -> None:
    for _ in range(10):
        await give_up(alerting, "ops", alert)
    answers = await asyncio.gather(*(alerting.act("alerts/replay") for _ in range(4)))
    assert sum(answer.json["replayed"] for answer in answers) == 10
    assert all(answer.json["replayed"] + answer.json["already"] == 10 for answer in answers)
    assert len(await again(alerting)) == 10


async def test_one_request_looks_at_a_part_of_them_and_says_where_to_go_on(
    alerting: HttpApi, alert: Alert, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerts, "MAX_DEAD_LETTERS", 3)
    for _ in range(4):
        await give_up(alerting, "ops", alert)
        await give_up(alerting, "second.line", alert)
    replayed, after = list[int](), 0
    while after is not None:
        answer = (await alerting.act("alerts/replay", channel="ops", after=after)).json
        replayed.append(answer["replayed"])
        after = answer["continue_after"]
    assert replayed == [3, 1]
    assert len(await again(alerting)) == 4


@pytest_asyncio.fixture(loop_scope="package")
async def guarded_bus(
    redis_server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[tuple[HttpApi, Client]]:
    """An API that may do on the bus what `request` may, and an alerter that may do what `alerter` may."""
    monkeypatch.setenv("LINK_SECRET", LINK_SECRET)
    folder, port = tmp_path / "nats", free_port()
    folder.mkdir()
    settings = f'listen: "127.0.0.1:{port}"\njetstream {{ store_dir: "{folder}" }}\n'
    server = start_nats(folder, settings + render(GRANTS, lambda user: f'"secret-of-{user}"'), port)
    server.wait_until_ready()

    def url_of(user: str) -> str:
        return f"nats://{user}:secret-of-{user}@127.0.0.1:{port}"

    config = parse_config(ALERTING)
    await provision(url_of("setup"), bus_plan(config))
    alerter = await nats.connect(url_of("alerter"), inbox_prefix=inbox_prefix("alerter"))
    surroundings = settings_for(url_of("request"), redis_server.url, tmp_path)
    key = create_key(surroundings.api_keys_file, "tests")
    async with running(surroundings, config, key) as api:
        yield api, alerter
    await alerter.close()
    server.stop()


async def test_what_the_users_of_the_bus_may_do_is_enough_for_all_of_it(guarded_bus: tuple[HttpApi, Client]) -> None:
    api, alerter = guarded_bus

    async def arrive(message: Msg) -> None:
        await message.respond(ChannelTest(channel="ops", delivered=True).json_bytes())

    await listen(alerter, arrive)
    as_alerter = HttpApi(api.url, api.http, alerter, api.settings, api.stop)
    alert = await publish_alert(as_alerter)
    await give_up(as_alerter, "ops", alert)
    assert (await api.act("alerts/test", channel="ops")).json["delivered"] is True
    assert (await api.act("alerts/ack", incident_id=alert.incident_id)).json["acknowledged_by"] == "tests"
    assert (await api.act("alerts/replay")).json["replayed"] == 1
    assert [one["replayed"] for one in await undelivered(api)] == [True]
