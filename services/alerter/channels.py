"""The channels that the config names: building them, and sending each a test message."""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

from breakwater.bus.errors import BusError
from breakwater.callables import load_callable
from breakwater.config import AlertChannel, Alerts, ConfigError, SlackChannel, WebhookChannel
from breakwater.config.alerts import AlertLinks
from breakwater.contracts.alerts import Alert, ChannelTest
from breakwater.contracts.subjects import decode_token
from breakwater.guarded_http import usable_url
from breakwater.policy.links import incident_link
from breakwater.policy.redact import DEFAULT_REDACTION, RedactionRules
from breakwater.providers.local import Shown
from breakwater.secret_refs import SecretRef
from services.alerter.channel import AlertSender, SendError
from services.alerter.notes import DisabledChannels, SentMessages
from services.alerter.python_channel import PythonCallable
from services.alerter.slack import SlackBot, SlackWebhook
from services.alerter.webhook import SignedWebhook
from services.alerter.wording import Link, Wording

T = TypeVar("T")

_CHANNEL_ID = re.compile(r"[CDG][A-Z0-9]+")
_PREFIX = "whsec_"

TEST = "test_"
"""How the ids of tests begin, which are no incidents."""

TEST_TIMEOUT_S = 15.0
"""Seconds. The client of a channel test waits for 20 s."""


def channels_of(
    alerts: Alerts,
    sent_messages: Callable[[str], SentMessages],
    now: Callable[[], datetime],
    redaction: RedactionRules = DEFAULT_REDACTION,
) -> tuple[AlertSender, ...]:
    """Builds every channel, and connects to nothing yet.

    Args:
        alerts: of the config.
        sent_messages: what remembers the messages of a channel, by the channel's name.
        now: the clock.
        redaction: what is hidden in the errors of callables.

    Raises:
        ConfigError: a secret is missing or unusable, a callable can't be loaded, or a URL is none.
    """
    link = None if alerts.links is None else link_of(alerts.links)
    channels = alerts.channels.items()
    return tuple(_built(name, channel, alerts, link, sent_messages, now, redaction) for name, channel in channels)


def _built(
    name: str,
    channel: AlertChannel,
    alerts: Alerts,
    link: Link | None,
    sent_messages: Callable[[str], SentMessages],
    now: Callable[[], datetime],
    redaction: RedactionRules,
) -> AlertSender:
    place, wording, allowed = f"alerts.channels.{name}", Wording(alerts.templates, link), alerts.allow_networks
    match channel:
        case AlertChannel(slack=SlackChannel(webhook_url=SecretRef() as ref)):
            setting = f"{place}.slack.webhook_url"
            return SlackWebhook(name, usable_url(_read(setting, ref.read), setting), wording, allowed, now)
        case AlertChannel(slack=SlackChannel(bot_token=SecretRef() as ref) as slack):
            target = _slack_channel(slack, f"{place}.slack.channel")
            token, api_url = _bot_token(ref, f"{place}.slack.bot_token"), _api_url(slack, f"{place}.slack.api_url")
            return SlackBot(name, token, target, api_url, wording, sent_messages(name), allowed, now)
        case AlertChannel(webhook=WebhookChannel() as webhook):
            secrets = [_signing_secret(webhook.secret, f"{place}.webhook.secret")]
            if webhook.previous_secret is not None:
                secrets.append(_signing_secret(webhook.previous_secret, f"{place}.webhook.previous_secret"))
            url = usable_url(webhook.url, f"{place}.webhook.url")
            return SignedWebhook(name, url, secrets, webhook.timeout_s, allowed, link, now)
        case _:
            assert channel.python is not None, "the config has exactly one kind"
            called = channel.python.callable
            notify = _read(f"{place}.python.callable", lambda: load_callable(called))
            return PythonCallable(name, called, notify, channel.python.timeout_s, Shown(redaction))


def _read(setting: str, read: Callable[[], T]) -> T:
    """Reads what a setting refers to. Raises ConfigError; its text names the setting."""
    try:
        return read()
    except ConfigError as error:
        raise ConfigError(f"{setting}: {error}") from error


def _slack_channel(slack: SlackChannel, setting: str) -> str:
    if slack.channel is None or not _CHANNEL_ID.fullmatch(slack.channel):
        raise ConfigError(
            f"{setting}: give the channel's id, such as C0123456 (at the end of its `About`), not its name: "
            "Slack updates no message of a channel that is only named"
        )
    return slack.channel


def _bot_token(ref: SecretRef, setting: str) -> str:
    token = _read(setting, ref.read)
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(f"{setting}: is no token; one begins with xoxb-")
    return token


def _api_url(slack: SlackChannel, setting: str) -> str:
    if urlsplit(usable_url(slack.api_url, setting)).username is not None:
        raise ConfigError(f"{setting}: must hold no user and no password; the bot token is sent to it")
    return slack.api_url


def _signing_secret(ref: SecretRef, setting: str) -> str:
    secret = _read(setting, ref.read)
    problem = f"{setting}: must be {_PREFIX} and a key in base64; `echo whsec_$(openssl rand -base64 32)` makes one"
    if not secret.startswith(_PREFIX):
        raise ConfigError(problem)
    try:
        # The signing package skips characters that are not base64, and would sign with some other key.
        encoded = secret.removeprefix(_PREFIX).rstrip("=")
        key = base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise ConfigError(problem) from None
    if not key:
        raise ConfigError(problem)
    return secret


def link_of(links: AlertLinks) -> Link:
    """Makes links to incidents.

    Raises:
        ConfigError: the secret is missing or too short, or the URL is none.
    """
    base_url = usable_url(links.base_url, "alerts.links.base_url")
    secret = links.signing_secret()
    valid = timedelta(hours=links.valid_h)

    def link(incident_id: str, at: datetime) -> str:
        # A test is no incident that has a page.
        return "" if incident_id.startswith(TEST) else incident_link(base_url, secret, incident_id, valid, at)

    return link


class ChannelTester:
    """Sends test messages to channels: at once, whatever waits, and by whichever alerter is asked."""

    def __init__(
        self, channels: Sequence[AlertSender], disabled: DisabledChannels, now: Callable[[], datetime]
    ) -> None:
        self._channels = {channel.name: channel for channel in channels}
        self._disabled, self._now = disabled, now

    async def answer(self, subject: str) -> bytes:
        """Sends the test message that a subject asks for, and answers with a ChannelTest."""
        name = decode_token(subject.rpartition(".")[2])
        channel = self._channels.get(name)
        if channel is None:
            error = "the alerter's config has no such channel; it may have to be restarted"
            return ChannelTest(channel=name, delivered=False, error=error).json_bytes()
        try:
            async with asyncio.timeout(TEST_TIMEOUT_S):
                await channel.send(test_alert(name, self._now()))
            if await self._disabled.contains(channel):
                await self._disabled.remove(channel)  # the receiver is back
        except TimeoutError:
            error = f"no answer within {TEST_TIMEOUT_S:g} s; perhaps it arrives all the same"
            return ChannelTest(channel=name, delivered=False, error=error).json_bytes()
        except (SendError, BusError) as error:
            return ChannelTest(channel=name, delivered=False, error=str(error)).json_bytes()
        return ChannelTest(channel=name, delivered=True).json_bytes()


def test_alert(channel: str, at: datetime) -> Alert:
    """What a test looks like: an alert that says that nothing is wrong."""
    identity = f"{TEST}{uuid4().hex}"
    return Alert(
        alert_id=identity,
        incident_id=identity,
        key=f"agent_anomaly/{identity}",
        change="opened",
        status="firing",
        event="agent_anomaly",
        severity="info",
        title=f"Test of channel {channel}",
        text="This is a test: alerts reach this channel. Nothing is wrong, and there is nothing to do.",
        payload={"test": True},
        count=1,
        version=1,
        opened_at=at,
        last_at=at,
        source_id=identity,
        at=at,
    )
