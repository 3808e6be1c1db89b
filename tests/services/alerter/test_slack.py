"""The Slack channel against a double of an incoming webhook."""

from itertools import pairwise
from typing import Any
from uuid import uuid4

import pytest

from breakwater.config import ConfigError
from breakwater.contracts.events import Alert
from breakwater.policy.alerts import alert_for
from breakwater.settings import Settings
from services.alerter.app import build
from services.alerter.slack import message
from tests.server_sources import RunningServer
from tests.services.alerter.kit import Answer, Receiver, alerter, bus_of, config_of, opened, stopped

SLACK = {"webhook_url": {"env": "SLACK_HOOK"}}


def alert(**fields: Any) -> Alert:
    found = alert_for(opened(**fields), {"breaker_open"})
    assert found is not None
    return found


def test_a_stopped_task_with_long_ids_is_told_whole_with_the_command_that_lets_it_go_on() -> None:
    task_id, tenant = f"task-{uuid4()}", f"tenant-{uuid4()}"
    drift = "confidence fell through 12 answers: ..., " + ", ".join(f"0.{digits}" for digits in range(9123, 9023, -10))
    found = alert_for(stopped(task_id, tenant=tenant, agent="a" * 40, reason=drift), {"guard_tripped"})
    assert found is not None
    shown = message(found)["blocks"][1]["text"]["text"]
    assert shown.endswith(f"`breakwater guards reset --tenant={tenant} {task_id}` lets it go on.")


async def test_alerts_reach_slack_once_each_and_a_second_apart(own_nats_server: RunningServer, slack: Receiver) -> None:
    config = config_of(slack=SLACK)
    async with bus_of(own_nats_server.url, config) as bus, alerter(bus, config):
        await bus.publish(opened(1), opened(2), opened(3))
        await bus.finished("ALERTS", "alerter-slack", 3)
    assert len(slack.seen) == 3
    assert min(later.at - earlier.at for earlier, later in pairwise(slack.seen)) >= 0.95
    assert slack.seen[0].json == message(alert())


async def test_a_rate_limit_silences_the_whole_channel_for_as_long_as_it_says(
    own_nats_server: RunningServer, slack: Receiver
) -> None:
    config = config_of(slack=SLACK)
    slack.answers = [Answer(429, body="rate_limited", headers={"Retry-After": "3"})]
    async with bus_of(own_nats_server.url, config) as bus, alerter(bus, config):
        await bus.publish(opened(1), opened(2))
        await bus.finished("ALERTS", "alerter-slack", 2)
        assert await bus.letters() == []
    assert len(slack.seen) == 3
    assert slack.seen[1].at - slack.seen[0].at >= 2.95


async def test_a_revoked_hook_ends_in_a_dead_letter_that_names_slacks_reason_and_not_the_hook(
    own_nats_server: RunningServer, slack: Receiver, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(slack=SLACK)
    slack.always = Answer(404, body="no_service")
    async with bus_of(own_nats_server.url, config) as bus, alerter(bus, config):
        await bus.publish(opened())
        await bus.finished("ALERTS", "alerter-slack", 1)
        [letter] = await bus.letters()
    assert len(slack.seen) == 3
    assert letter.error == "slack: the receiver answered 404 no_service (delivery 3)"
    logged = "".join(capsys.readouterr())
    assert logged.count("alert_undeliverable") == 1
    assert "/hook" not in logged


async def test_a_redirect_is_no_delivery(own_nats_server: RunningServer, slack: Receiver) -> None:
    config = config_of(slack=SLACK)
    slack.answers = [Answer(302, headers={"Location": f"{slack.url}/elsewhere"})]
    async with bus_of(own_nats_server.url, config) as bus, alerter(bus, config):
        await bus.publish(opened())
        await bus.finished("ALERTS", "alerter-slack", 1)
    assert [seen.json for seen in slack.seen] == [message(alert())] * 2


async def test_each_channel_gives_up_on_its_own_and_neither_holds_up_the_other(
    own_nats_server: RunningServer, slack: Receiver, receiver: Receiver
) -> None:
    config = config_of(slack=SLACK, webhook={"url": receiver.url, "secret": {"env": "HOOK_SECRET"}})
    await receiver.start()
    receiver.always = Answer(410)
    slack.always = Answer(403, body="action_prohibited")
    async with bus_of(own_nats_server.url, config) as bus, alerter(bus, config):
        await bus.publish(opened())
        await bus.finished("ALERTS", "alerter-slack", 1)
        await bus.finished("ALERTS", "alerter-webhook", 1)
        letters = await bus.letters()
        slack.always = Answer()
        await bus.publish(opened(2))
        await bus.finished("ALERTS", "alerter-slack", 2)
    assert sorted(letter.error.partition(":")[0] for letter in letters) == ["slack", "webhook"]


def test_names_can_neither_mention_people_nor_make_links() -> None:
    shown = message(alert(agent="<!channel> & <https://evil|ok>"))
    texts = [shown["text"], *(block["text"]["text"] for block in shown["blocks"] if "text" in block)]
    assert not any("<" in text or ">" in text for text in texts)
    assert "&lt;!channel&gt; &amp; &lt;https://evil|ok&gt;" in shown["text"]


def test_the_longest_names_fit_into_a_block() -> None:
    shown = message(alert(agent="&" * 128, model="&" * 256))
    assert max(len(block["text"]["text"]) for block in shown["blocks"] if "text" in block) <= 3000


def test_an_url_that_is_missing_or_none_is_named_by_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLACK_HOOK", raising=False)
    with pytest.raises(ConfigError, match=r"alerts\.slack\.webhook_url: the environment variable SLACK_HOOK"):
        build(Settings(), config_of(slack=SLACK))
    monkeypatch.setenv("SLACK_HOOK", "hooks.example/T1/B2/s3cret")
    with pytest.raises(ConfigError, match=r"alerts\.slack\.webhook_url: must be a URL") as caught:
        build(Settings(), config_of(slack=SLACK))
    assert "s3cret" not in str(caught.value)
