"""Builds the channels that the config names."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

from breakwater.config import AlertChannel, Alerts, SlackChannel, WebhookChannel
from breakwater.config.alerts import AlertLinks
from breakwater.policy.links import incident_link
from breakwater.secret_refs import SecretRef
from services.alerter.channel import Channel
from services.alerter.guarded import usable_url
from services.alerter.python_channel import PythonCallable
from services.alerter.slack import SlackWebhook
from services.alerter.slack_bot import Posts, SlackBot
from services.alerter.webhook import SignedWebhook
from services.alerter.wording import Link, Wording

TEST = "test_"
"""How the ids of tests begin, which are no incidents."""


def channels_of(alerts: Alerts, posts: Callable[[str], Posts], now: Callable[[], datetime]) -> tuple[Channel, ...]:
    """Builds every channel, and connects to nothing yet.

    Args:
        alerts: of the config.
        posts: what remembers the messages of a channel, by the channel's name.
        now: the clock.

    Raises:
        ConfigError: a secret is missing or unusable, a callable can't be loaded, or a URL is none.
    """
    link = None if alerts.links is None else link_of(alerts.links)
    return tuple(_built(name, channel, alerts, link, posts, now) for name, channel in alerts.channels.items())


def _built(
    name: str,
    channel: AlertChannel,
    alerts: Alerts,
    link: Link | None,
    posts: Callable[[str], Posts],
    now: Callable[[], datetime],
) -> Channel:
    match channel:
        case AlertChannel(slack=SlackChannel(webhook_url=SecretRef()) as slack):
            return SlackWebhook.from_config(name, slack, Wording(alerts.templates, link), alerts.allow_networks, now)
        case AlertChannel(slack=SlackChannel() as slack):
            wording = Wording(alerts.templates, link)
            return SlackBot.from_config(name, slack, wording, posts(name), alerts.allow_networks, now)
        case AlertChannel(webhook=WebhookChannel() as webhook):
            return SignedWebhook.from_config(name, webhook, alerts.allow_networks, link, now)
        case _:
            assert channel.python is not None, "the config has exactly one kind"
            return PythonCallable.from_config(name, channel.python)


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
