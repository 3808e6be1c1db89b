"""The bot against a double of Slack's Web API: one message for each incident, kept up to date."""

from collections.abc import AsyncGenerator
from datetime import UTC, datetime, timedelta
from ipaddress import ip_network
from typing import Any

import pytest

from breakwater.alerts.channels.channel import SendError
from breakwater.alerts.channels.configured_channels import channels_of
from breakwater.alerts.channels.slack import SlackApp, SlackBot
from breakwater.alerts.channels.wording import Wording
from breakwater.alerts.contract import Alert
from breakwater.alerts.rules.incidents import IncidentRules, decide
from breakwater.alerts.rules.signals import signals_of
from breakwater.alerts.settings import Reminders
from breakwater.alerts.store.channels import SentMessages
from breakwater.kernel.errors import ConfigError
from tests.services.alerter.kit import AT, Answer, Receiver, config_of, crossed
from tests.services.alerter.messages import (
    acknowledged,
    alert,
    closed,
    digest,
    held,
    repeated,
    resolved,
    stopped_task,
)
from tests.services.alerter.slack_double import CHANNEL, TOKEN, SlackDouble

LOOPBACK = (ip_network("127.0.0.0/8"),)


class Remembered(SentMessages):
    """Sent messages in memory, whose recording fails as often as a test says."""

    def __init__(self) -> None:
        self.ts: dict[str, str] = {}
        self.fails = 0

    async def get(self, incident_id: str) -> str | None:
        # Only a test of that advice is about a channel that was not told how to get links.
        return "" if incident_id == "advised-links" else self.ts.get(incident_id)

    async def put(self, incident_id: str, ts: str) -> None:
        if self.fails:
            self.fails -= 1
            raise ConnectionError("the bus is away")
        self.ts[incident_id] = ts


@pytest.fixture
async def double() -> AsyncGenerator[SlackDouble]:
    one = await SlackDouble(interval_s=0).start()
    yield one
    await one.stop()
    assert one.violations == []


@pytest.fixture
def posts() -> Remembered:
    return Remembered()


@pytest.fixture
async def bot(double: SlackDouble, posts: Remembered) -> AsyncGenerator[SlackBot]:
    one = bot_of(double.api_url, posts)
    yield one
    await one.close()


def now() -> datetime:
    return AT


def bot_of(api_url: str, posts: Remembered, **fields: Any) -> SlackBot:
    given: dict[str, Any] = {"token": TOKEN, "channel": CHANNEL} | fields
    return SlackBot("ops", SlackApp(api_url=api_url, **given), Wording(), posts, LOOPBACK, lambda: AT)


async def refused(bot: SlackBot) -> SendError:
    with pytest.raises(SendError) as caught:
        await bot.send(alert())
    return caught.value


async def test_an_incident_is_one_message_from_its_beginning_to_its_end(double: SlackDouble, bot: SlackBot) -> None:
    assert (bot.updates, bot.interval_s) == (True, 1.0)
    await bot.send(alert())
    again = repeated(alert())
    await bot.send(again)
    await bot.send(acknowledged(again))
    await bot.send(closed(acknowledged(again)))
    message, reply = double.channel_view()
    assert message.startswith("*[resolved] Breaker closed: writer on gpt-4.1*\nResolved\n")
    assert "2 times" in message
    assert "Acknowledged by anna" in message
    assert message.endswith(" (edited)")
    assert reply.startswith("> *Breaker open: writer on gpt-4.1*\nIt happened again: 2 times now, last at")
    assert double.counted() == {"posts": 1, "updates": 3, "replies": 1, "refused": 0}


POSTED_AT = datetime.fromtimestamp(1_763_719_200, UTC)
"""The time in the names of the double's messages."""


def threshold(percent: int) -> Alert:
    [signal] = signals_of(crossed(percent))
    found = decide(signal, None, IncidentRules(("budget_soft_cap", "budget_hard_cap"), 600, (), Reminders()))
    assert found is not None
    return found


async def test_thresholds_that_a_budget_crosses_within_a_minute_are_one_message_that_rises(
    double: SlackDouble, posts: Remembered
) -> None:
    passed_s = 0.0
    app = SlackApp(TOKEN, CHANNEL, double.api_url)
    bot = SlackBot("ops", app, Wording(), posts, LOOPBACK, lambda: POSTED_AT + timedelta(seconds=passed_s))
    half, most, cap = map(threshold, (50, 80, 100))
    await bot.send(half)
    passed_s = 20
    await bot.send(cap)
    passed_s = 50
    await bot.send(most)  # it is late, and says less
    [message] = double.channel_view()
    assert message.startswith("*[critical] Limit refuses calls: the plane, daily*")
    assert double.counted() == {"posts": 1, "updates": 1, "replies": 0, "refused": 0}
    await bot.send(acknowledged(half))
    assert double.channel_view() == [message], "the message is about the limit by now"
    await bot.send(resolved(cap))
    [message] = double.channel_view()
    assert message.startswith("*[resolved] Limit refuses calls")
    await bot.close()


async def test_a_threshold_that_is_crossed_after_a_minute_is_a_message_that_people_notice(
    double: SlackDouble, posts: Remembered
) -> None:
    passed_s = 0.0
    app = SlackApp(TOKEN, CHANNEL, double.api_url)
    bot = SlackBot("ops", app, Wording(), posts, LOOPBACK, lambda: POSTED_AT + timedelta(seconds=passed_s))
    await bot.send(threshold(50))
    passed_s = 61
    await bot.send(threshold(80))
    assert [view.split(":")[0] for view in double.channel_view()] == [
        "*[warning] Limit at 50 %",
        "*[warning] Limit at 80 %",
    ]
    await bot.close()


async def test_each_incident_has_a_message_of_its_own(double: SlackDouble, bot: SlackBot) -> None:
    await bot.send(alert())
    await bot.send(stopped_task())
    await bot.send(resolved(stopped_task()))
    one, other = double.channel_view()
    assert one.startswith("*[critical] Breaker open")
    assert other.startswith("*[resolved] Task stopped")


@pytest.mark.parametrize("change", ["repeated", "reopened", "reminded"])
async def test_what_is_heard_of_again_is_reported_in_the_thread(
    double: SlackDouble, bot: SlackBot, change: str
) -> None:
    await bot.send(stopped_task())
    await bot.send(stopped_task().model_copy(update={"change": change, "count": 2, "reminders": 1}))
    assert double.counted() == {"posts": 1, "updates": 1, "replies": 1, "refused": 0}


async def test_a_rise_is_a_reply_that_the_whole_channel_sees(double: SlackDouble, bot: SlackBot) -> None:
    await bot.send(alert().model_copy(update={"severity": "warning"}))
    await bot.send(repeated(alert()).model_copy(update={"change": "worsened"}))
    assert double.counted() == {"posts": 1, "updates": 1, "replies": 1, "refused": 0}
    [reply] = [call for call in double.calls if "thread_ts" in call.body]
    assert reply.body["reply_broadcast"] is True
    assert "It has become critical" in reply.body["text"]


@pytest.mark.parametrize("change", ["acknowledged", "resolved"])
async def test_what_a_person_did_makes_no_noise(double: SlackDouble, bot: SlackBot, change: str) -> None:
    await bot.send(alert())
    await bot.send(acknowledged(alert()) if change == "acknowledged" else resolved(alert()))
    assert double.counted() == {"posts": 1, "updates": 1, "replies": 0, "refused": 0}


async def test_a_digest_is_a_message_that_belongs_to_no_incident(
    double: SlackDouble, bot: SlackBot, posts: Remembered
) -> None:
    await bot.send(digest([held(1), held(2)]))
    assert double.channel_view()[0].startswith("*2 alerts were delayed")
    assert posts.ts == {}


async def test_an_incident_whose_message_is_not_known_is_posted_as_it_is_now(
    double: SlackDouble, bot: SlackBot, posts: Remembered
) -> None:
    await bot.send(repeated(alert()))
    assert double.counted() == {"posts": 1, "updates": 0, "replies": 0, "refused": 0}
    assert list(posts.ts) == [alert().incident_id]


async def test_a_message_that_somebody_deleted_is_posted_again_and_kept_up_to_date(
    double: SlackDouble, bot: SlackBot
) -> None:
    await bot.send(alert())
    double.delete(double.messages()[0].ts)
    await bot.send(repeated(alert()))
    await bot.send(resolved(repeated(alert())))
    [message] = double.channel_view()
    assert message.startswith("*[resolved]")
    assert double.counted() == {"posts": 2, "updates": 1, "replies": 0, "refused": 1}


@pytest.mark.parametrize("code", ["message_not_found", "cant_update_message", "edit_window_closed"])
async def test_a_message_that_can_not_be_updated_any_more_is_posted_again(
    double: SlackDouble, bot: SlackBot, code: str
) -> None:
    await bot.send(alert())
    double.refuse["chat.update"] = [code]
    await bot.send(acknowledged(alert()))
    assert [view.split("]")[0] for view in double.channel_view()] == ["*[critical", "*[acknowledged"]
    await bot.send(resolved(alert()))
    assert [view.split("]")[0] for view in double.channel_view()] == ["*[critical", "*[resolved"]


async def test_a_message_of_somebody_else_is_not_touched(double: SlackDouble, bot: SlackBot, posts: Remembered) -> None:
    await bot.send(alert())
    double.posts[0].by = "a person"
    await bot.send(acknowledged(alert()))
    assert not double.posts[0].edited
    assert posts.ts[alert().incident_id] == double.posts[1].ts


async def test_a_reply_that_failed_is_reported_at_the_next_try(double: SlackDouble, bot: SlackBot) -> None:
    await bot.send(alert())
    double.refuse["chat.postMessage"] = ["ratelimited:7"]
    with pytest.raises(SendError) as caught:
        await bot.send(repeated(alert()))
    assert (caught.value.permanent, caught.value.retry_after_s) == (False, 7.0)
    await bot.send(repeated(alert()))
    assert len(double.replies(double.messages()[0].ts)) == 1
    assert len(double.messages()) == 1


async def test_a_post_that_could_not_be_remembered_is_updated_at_the_next_try(
    double: SlackDouble, bot: SlackBot, posts: Remembered
) -> None:
    posts.fails = 1
    with pytest.raises(ConnectionError):
        await bot.send(alert())
    await bot.send(alert())
    assert len(double.messages()) == 1
    assert posts.ts == {alert().incident_id: double.messages()[0].ts}


async def test_a_connection_that_breaks_is_no_refusal(double: SlackDouble, bot: SlackBot) -> None:
    double.refuse["chat.postMessage"] = ["lost"]
    failure = await refused(bot)
    assert (failure.permanent, failure.disables) == (False, False)
    assert TOKEN not in str(failure)


@pytest.mark.parametrize(
    ("code", "permanent", "disables", "advice"),
    [
        ("invalid_auth", True, False, "set the bot token"),
        ("token_revoked", True, True, "install the app again"),
        ("account_inactive", True, True, "install the app again"),
        ("channel_not_found", True, False, "set the channel's id, such as C0123456"),
        ("not_in_channel", True, False, "invite the bot: write `/invite"),
        ("is_archived", True, True, "choose another one"),
        ("missing_scope", True, False, "`chat:write`"),
        ("restricted_action", True, False, "ask its administrator"),
        ("msg_too_long", True, False, "Slack refuses: msg_too_long"),
        ("internal_error", False, False, "Slack refuses: internal_error"),
        ("http:500", False, False, "the receiver answered 500"),
        ("http:404", True, False, "the receiver answered 404"),
        ("http:200", False, False, "the response is not from Slack"),
    ],
)
async def test_a_refusal_says_what_to_do(
    double: SlackDouble, bot: SlackBot, code: str, permanent: bool, disables: bool, advice: str
) -> None:
    double.refuse["chat.postMessage"] = [code]
    failure = await refused(bot)
    assert (failure.permanent, failure.disables) == (permanent, disables)
    assert advice in str(failure)
    assert len(double.calls) == 1  # slack-sdk does not retry by itself


async def test_a_wrong_token_and_an_unknown_channel_are_reported_by_slack_itself(
    double: SlackDouble, posts: Remembered
) -> None:
    for fields, code in (({"token": "xoxb-wrong"}, "invalid_auth"), ({"channel": "C999"}, "channel_not_found")):
        one = bot_of(double.api_url, posts, **fields)
        failure = await refused(one)
        await one.close()
        assert failure.permanent
        assert code in str(failure)


async def test_two_posts_within_a_second_are_one_too_many(double: SlackDouble, bot: SlackBot) -> None:
    double.interval_s = 1.0
    await bot.send(alert())
    with pytest.raises(SendError) as caught:
        await bot.send(stopped_task())
    assert caught.value.retry_after_s == 1.0
    await bot.send(acknowledged(alert()))  # an update is no post


@pytest.mark.parametrize(
    "body", ['"text"', "[]", "null", "7", "not json", "{}", '{"ok": true}', '{"ok": true, "ts": 7}']
)
async def test_an_answer_that_is_none_of_slacks_is_no_delivery(posts: Remembered, body: str) -> None:
    receiver = Receiver()
    receiver.always = Answer(200, body=body, headers={"Content-Type": "application/json"})
    await receiver.start()
    one = bot_of(f"http://127.0.0.1:{receiver.port}/api/", posts)
    try:
        failure = await refused(one)
    finally:
        await one.close()
        await receiver.stop()
    assert not failure.permanent
    assert "Slack" in str(failure)
    assert posts.ts == {}


async def test_neither_a_redirect_nor_a_proxy_is_followed(monkeypatch: pytest.MonkeyPatch, posts: Remembered) -> None:
    receiver, proxy = await Receiver().start(), await Receiver().start()
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
    receiver.always = Answer(307, headers={"Location": proxy.url})
    one = bot_of(f"http://127.0.0.1:{receiver.port}/api/", posts)
    try:
        failure = await refused(one)
    finally:
        await one.close()
        await receiver.stop()
        await proxy.stop()
    assert failure.permanent
    assert (len(receiver.seen), len(proxy.seen)) == (1, 0)


async def test_a_channel_that_is_closed_opens_no_session_of_slack_sdks_own(double: SlackDouble, bot: SlackBot) -> None:
    await bot.close()
    assert str(await refused(bot)) == "the channel is closed"
    assert double.calls == []


@pytest.mark.parametrize("channel", ["#alerts", "alerts", "@anna", "c0123456"])
def test_a_channel_that_is_named_instead_of_identified_is_refused(
    monkeypatch: pytest.MonkeyPatch, posts: Remembered, channel: str
) -> None:
    monkeypatch.setenv("SLACK_TOKEN", TOKEN)
    config = config_of(channels={"ops": {"slack": {"bot_token": {"env": "SLACK_TOKEN"}, "channel": channel}}})
    with pytest.raises(ConfigError, match=r"alerts\.channels\.ops\.slack\.channel: use the channel's id"):
        channels_of(config.alerts, sent_messages=lambda _: posts, now=lambda: AT)


def test_a_token_that_is_missing_or_none_is_named_by_its_setting(
    monkeypatch: pytest.MonkeyPatch, posts: Remembered
) -> None:
    config = config_of(channels={"ops": {"slack": {"bot_token": {"env": "SLACK_TOKEN"}, "channel": CHANNEL}}})
    monkeypatch.delenv("SLACK_TOKEN", raising=False)
    with pytest.raises(
        ConfigError, match=r"alerts\.channels\.ops\.slack\.bot_token: the environment variable SLACK_TOKEN"
    ):
        channels_of(config.alerts, sent_messages=lambda _: posts, now=lambda: AT)
    monkeypatch.setenv("SLACK_TOKEN", "xoxb-1\r\nx-evil: 1")
    with pytest.raises(ConfigError, match=r"alerts\.channels\.ops\.slack\.bot_token: is not a bot token") as caught:
        channels_of(config.alerts, sent_messages=lambda _: posts, now=lambda: AT)
    assert "evil" not in str(caught.value)


def test_a_fingerprint_distinguishes_tokens_and_channels_and_hides_them(posts: Remembered) -> None:
    bots = [
        bot_of("https://slack.com/api/", posts, **fields) for fields in ({}, {"token": "xoxb-2"}, {"channel": "C9"})
    ]
    assert len({bot.fingerprint for bot in bots}) == 3
    assert bots[0].fingerprint == bot_of("https://slack.com/api/", posts).fingerprint
    assert all(len(bot.fingerprint) == 16 for bot in bots)
