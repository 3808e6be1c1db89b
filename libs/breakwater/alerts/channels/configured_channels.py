"""The channels that the config names: building them, and sending each a test message."""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import TypeVar
from urllib.parse import quote, urlsplit
from uuid import uuid4

from breakwater.alerts.channels.channel import AlertSender, Link, PythonCallable, SendError, SignedWebhook
from breakwater.alerts.channels.slack import SlackApp, SlackBot, SlackWebhook
from breakwater.alerts.channels.wording import Wording
from breakwater.alerts.contract import Alert, ChannelTest
from breakwater.alerts.rules.links import incident_link
from breakwater.alerts.settings import AlertChannel, AlertLinks, Alerts, SlackChannel, WebhookChannel
from breakwater.alerts.store.channels import AlerterBus, SentMessages
from breakwater.calls.providers.local import ErrorTexts
from breakwater.kernel.errors import ConfigError
from breakwater.kernel.nats.errors import BusError
from breakwater.kernel.nats.subjects import decode_token
from breakwater.kernel.process.callables import load_callable
from breakwater.kernel.security.guarded_http import usable_url
from breakwater.kernel.security.secret_refs import SecretRef
from breakwater.redaction.settings import DEFAULT_REDACTION, RedactionRules

T = TypeVar("T")

_CHANNEL_ID = re.compile(r"[CDG][A-Z0-9]+")
_PREFIX = "whsec_"

TEST = "test_"
"""Prefix of the ids of test messages, which are no incidents."""

TEST_TIMEOUT_S = 15.0
"""Seconds. The client of a channel test waits for 20 s."""


def channels_of(
    alerts: Alerts,
    sent_messages: Callable[[str], SentMessages],
    now: Callable[[], datetime],
    redaction: RedactionRules = DEFAULT_REDACTION,
    console_url: str | None = None,
) -> tuple[AlertSender, ...]:
    """Builds every channel, and connects to nothing yet.

    Args:
        alerts: of the config.
        sent_messages: gives the memory of a channel's messages, by the channel's name.
        now: the clock.
        redaction: applied to the errors of callables.
        console_url: the console in people's browsers, which messages link to without links that act without a key.

    Raises:
        ConfigError: a secret is missing or unusable, a callable can't be loaded, or a URL is invalid.
    """
    link = None if alerts.links is None else link_of(alerts.links)
    wording = Wording(alerts.templates, link or (None if console_url is None else console_link_of(console_url)))
    allowed = alerts.allow_networks

    def built(name: str, channel: AlertChannel) -> AlertSender:
        setting = f"alerts.channels.{name}"
        match channel:
            case AlertChannel(slack=SlackChannel(webhook_url=SecretRef() as ref)):
                setting += ".slack.webhook_url"
                url = usable_url(_read(setting, ref.read), setting)
                return SlackWebhook(name, url, wording, sent_messages(name), allowed, now)
            case AlertChannel(slack=SlackChannel(bot_token=SecretRef() as ref) as slack):
                app = _slack_app(slack, _read(f"{setting}.slack.bot_token", ref.read), f"{setting}.slack")
                return SlackBot(name, app, wording, sent_messages(name), allowed, now)
            case AlertChannel(webhook=WebhookChannel() as webhook):
                secrets = [
                    _signing_secret(ref, f"{setting}.webhook.{field}")
                    for field, ref in (("secret", webhook.secret), ("previous_secret", webhook.previous_secret))
                    if ref is not None
                ]
                url = usable_url(webhook.url, f"{setting}.webhook.url")
                return SignedWebhook(name, url, secrets, webhook.timeout_s, allowed, link, now)
            case _:
                assert channel.python is not None, "the config has exactly one kind"
                called = channel.python.callable
                notify = _read(f"{setting}.python.callable", lambda: load_callable(called))
                return PythonCallable(name, called, notify, channel.python.timeout_s, ErrorTexts(redaction))

    return tuple(built(name, channel) for name, channel in alerts.channels.items())


def _read(setting: str, read: Callable[[], T]) -> T:
    """Reads what a setting refers to. Raises ConfigError; its text names the setting."""
    try:
        return read()
    except ConfigError as error:
        raise ConfigError(f"{setting}: {error}") from error


def _slack_app(slack: SlackChannel, token: str, setting: str) -> SlackApp:
    if slack.channel is None or not _CHANNEL_ID.fullmatch(slack.channel):
        raise ConfigError(
            f"{setting}.channel: use the channel's id, such as C0123456 (at the end of its `About`), "
            "not its name: Slack can't update messages by channel name"
        )
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(f"{setting}.bot_token: is not a bot token; they begin with xoxb-")
    if urlsplit(usable_url(slack.api_url, f"{setting}.api_url")).username is not None:
        raise ConfigError(f"{setting}.api_url: must not contain user and password; the bot token is sent to it")
    return SlackApp(token, slack.channel, slack.api_url)


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
        ConfigError: the secret is missing or too short, or the URL is invalid.
    """
    base_url = usable_url(links.base_url, "alerts.links.base_url")
    secret = links.signing_secret()
    valid = timedelta(hours=links.valid_h)

    def link(incident_id: str, at: datetime) -> str:
        # A test is no incident that has a page.
        return "" if incident_id.startswith(TEST) else incident_link(base_url, secret, incident_id, valid, at)

    return link


def console_link_of(console_url: str) -> Link:
    """Makes links to the pages of incidents in the console, where people sign in."""

    def link(incident_id: str, _: datetime) -> str:
        return "" if incident_id.startswith(TEST) else f"{console_url}/alerts/{quote(incident_id, safe='')}"

    return link


class ChannelTester:
    """Sends test messages to channels: immediately, and by whichever alerter is asked."""

    def __init__(self, channels: Sequence[AlertSender], bus: AlerterBus, now: Callable[[], datetime]) -> None:
        self._channels = {channel.name: channel for channel in channels}
        self._bus = bus
        self._now = now

    async def answer(self, subject: str) -> bytes:
        """Sends the test message that a subject asks for, and answers with a ChannelTest."""
        name = decode_token(subject.rpartition(".")[2])
        error = await self._problem(name)
        return ChannelTest(channel=name, delivered=error is None, error=error).json_bytes()

    async def _problem(self, name: str) -> str | None:
        channel = self._channels.get(name)
        if channel is None:
            return "the alerter's config has no such channel; restart the alerter if the channel is new"
        try:
            async with asyncio.timeout(TEST_TIMEOUT_S):
                await channel.send(test_alert(name, self._now()))
            if await self._bus.is_disabled(channel):
                await self._bus.enable(channel)  # the receiver is back
        except TimeoutError:
            return f"no response within {TEST_TIMEOUT_S:g} s; it may still arrive"
        except (SendError, BusError) as error:
            return str(error)
        return None


def test_alert(channel: str, at: datetime) -> Alert:
    """A test message: an alert that says that nothing is wrong."""
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
