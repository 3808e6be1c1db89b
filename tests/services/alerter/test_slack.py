"""The incoming webhook against a double of Slack that is as strict as Slack."""

from collections.abc import AsyncGenerator
from ipaddress import ip_network

import pytest

from breakwater.alerts.channels.channel import AlertSender, SendError
from breakwater.alerts.channels.configured_channels import channels_of, console_link_of
from breakwater.alerts.channels.slack import SlackWebhook, slack_message
from breakwater.alerts.channels.wording import Wording
from breakwater.alerts.store.channels import SentMessages
from breakwater.kernel.errors import ConfigError
from tests.services.alerter.kit import AT, Answer, Receiver, config_of
from tests.services.alerter.messages import acknowledged, alert, closed, digest, held
from tests.services.alerter.slack_double import HOOK, SlackDouble

LOOPBACK = (ip_network("127.0.0.0/8"),)


class Linked(SentMessages):
    """Sent messages in memory, with the advice on links that a channel was given."""

    def __init__(self, *given: str) -> None:
        self.records = dict.fromkeys(given or ("advised-links",), "")

    async def get(self, incident_id: str) -> str | None:
        return self.records.get(incident_id)

    async def put(self, incident_id: str, ts: str) -> None:
        self.records[incident_id] = ts


@pytest.fixture
async def double() -> AsyncGenerator[SlackDouble]:
    one = await SlackDouble().start()
    yield one
    await one.stop()
    assert one.violations == []


@pytest.fixture
async def channel(double: SlackDouble) -> AsyncGenerator[SlackWebhook]:
    one = SlackWebhook("ops", double.hook_url, Wording(), Linked(), LOOPBACK, lambda: AT)
    yield one
    await one.close()


async def refused(channel: AlertSender) -> SendError:
    with pytest.raises(SendError) as caught:
        await channel.send(alert())
    return caught.value


async def test_an_alert_is_read_as_it_is_reported(double: SlackDouble, channel: SlackWebhook) -> None:
    await channel.send(alert())
    [call] = double.calls
    assert call.body == slack_message(Wording().alert(alert()))
    [shown] = double.channel_view()
    assert shown.startswith(
        "*[critical] Breaker open: writer on gpt-4.1*\nCritical, firing\nAgent writer, model gpt-4.1"
    )


ADVICE = "For links to the console in these messages, set `console.url` in the config."


async def test_how_messages_get_links_is_said_in_the_first_one_only(double: SlackDouble) -> None:
    double.interval_s = 0
    double.refuse["hook"] = ["http:503"]
    records = Linked("nothing")
    first = SlackWebhook("ops", double.hook_url, Wording(), records, LOOPBACK, lambda: AT)
    await refused(first)
    await first.send(alert())
    await first.send(closed(alert()))
    restarted = SlackWebhook("ops", double.hook_url, Wording(), records, LOOPBACK, lambda: AT)
    await restarted.send(alert())
    linked = Wording(link=console_link_of("https://breakwater.example.com"))
    with_links = SlackWebhook("ops", double.hook_url, linked, Linked("nothing"), LOOPBACK, lambda: AT)
    await with_links.send(alert())
    for channel in (first, restarted, with_links):
        await channel.close()
    assert [ADVICE in view for view in double.channel_view()] == [True, False, False, False]
    assert f"<https://breakwater.example.com/alerts/{alert().incident_id}|Acknowledge or resolve it>" in str(
        double.calls[-1].body
    )


async def test_every_change_is_a_message_of_its_own(double: SlackDouble, channel: SlackWebhook) -> None:
    double.interval_s = 0
    assert (channel.updates, channel.interval_s) == (False, 1.0)
    for message in (alert(), acknowledged(alert()), closed(alert()), digest([held(1), held(2)])):
        await channel.send(message)
    assert [view.split("\n")[0] for view in double.channel_view()] == [
        "*[critical] Breaker open: writer on gpt-4.1*",
        "*[acknowledged] Breaker open: writer on gpt-4.1*",
        "*[resolved] Breaker closed: writer on gpt-4.1*",
        "*2 alerts were delayed between 10:00 and 10:05 UTC (rate limit)*",
    ]


async def test_a_rate_limit_says_how_long_to_wait(double: SlackDouble, channel: SlackWebhook) -> None:
    await channel.send(alert())
    failure = await refused(channel)  # the double lets a webhook post once a second
    assert (failure.permanent, failure.retry_after_s, failure.disables) == (False, 1.0, False)
    assert double.counted() == {"posts": 1, "updates": 0, "replies": 0, "refused": 1}


@pytest.mark.parametrize(
    ("code", "status", "permanent", "disables"),
    [
        ("no_service", 404, True, True),
        ("channel_is_archived", 410, True, True),
        ("channel_not_found", 404, True, False),
        ("action_prohibited", 403, True, False),
        ("invalid_payload", 400, True, False),
        ("http:503", 503, False, False),
        ("http:410", 410, True, True),
        ("http:302", 302, True, False),
    ],
)
async def test_a_refusal_is_named_as_slack_names_it(
    double: SlackDouble, channel: SlackWebhook, code: str, status: int, permanent: bool, disables: bool
) -> None:
    double.refuse["hook"] = [code]
    failure = await refused(channel)
    assert (failure.permanent, failure.disables) == (permanent, disables)
    assert (code if ":" not in code else str(status)) in str(failure)
    assert "<html>" not in str(failure)
    assert len(double.calls) == 1  # slack-sdk does not retry by itself


async def test_a_redirect_is_no_delivery_and_is_not_followed(channel: SlackWebhook) -> None:
    receiver = Receiver()
    one = SlackWebhook("ops", receiver.url, Wording(), Linked(), LOOPBACK, lambda: AT)
    await receiver.start()
    try:
        for status in (301, 302, 303, 307, 308):
            receiver.answers = [Answer(status, headers={"Location": f"{receiver.url}/elsewhere"})]
            failure = await refused(one)
            assert failure.permanent
            assert f"answered {status}; redirects are not followed" in str(failure)
    finally:
        await one.close()
        await receiver.stop()
    assert len(receiver.seen) == 5


async def test_an_answer_without_end_is_not_read_to_its_end() -> None:
    receiver = Receiver()
    receiver.always = Answer(200, body="x" * 5_000_000)
    one = SlackWebhook("ops", receiver.url, Wording(), Linked(), LOOPBACK, lambda: AT)
    await receiver.start()
    try:
        failure = await refused(one)
    finally:
        await one.close()
        await receiver.stop()
    assert not failure.permanent


async def test_a_channel_that_is_closed_opens_no_session_of_slack_sdks_own(
    double: SlackDouble, channel: SlackWebhook
) -> None:
    await channel.close()
    assert str(await refused(channel)) == "the channel is closed"
    assert double.calls == []


async def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch, double: SlackDouble) -> None:
    proxy = await Receiver().start()
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
    one = SlackWebhook("ops", double.hook_url, Wording(), Linked(), LOOPBACK, lambda: AT)
    try:
        await one.send(alert())
    finally:
        await one.close()
        await proxy.stop()
    assert proxy.seen == []
    assert len(double.posts) == 1


def test_a_url_that_is_missing_or_none_is_named_by_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(channels={"ops": {"slack": {"webhook_url": {"env": "SLACK_HOOK"}}}})
    monkeypatch.delenv("SLACK_HOOK", raising=False)
    with pytest.raises(ConfigError, match=r"alerts\.channels\.ops\.slack\.webhook_url: the environment variable SLACK"):
        channels_of(config.alerts, sent_messages=_none, now=lambda: AT)
    monkeypatch.setenv("SLACK_HOOK", f"hooks.slack.example{HOOK}")
    with pytest.raises(ConfigError, match=r"alerts\.channels\.ops\.slack\.webhook_url: must be a URL") as caught:
        channels_of(config.alerts, sent_messages=_none, now=lambda: AT)
    assert HOOK not in str(caught.value)


def test_a_fingerprint_distinguishes_urls_and_hides_them() -> None:
    one, same, other = (
        SlackWebhook("ops", url, Wording(), Linked(), (), lambda: AT) for url in ("https://a", "https://a", "https://b")
    )
    assert one.fingerprint == same.fingerprint != other.fingerprint
    assert len(one.fingerprint) == 16
    assert int(one.fingerprint, 16)


def _none(name: str) -> None:
    raise AssertionError("an incoming webhook remembers no messages")
