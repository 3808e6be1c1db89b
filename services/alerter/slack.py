"""Slack, by incoming webhook: it posts, and can't change what it posted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import datetime

import aiohttp
from slack_sdk.webhook.async_client import AsyncWebhookClient

from breakwater.config import SlackChannel
from breakwater.contracts.alerts import Alert, AlertDigest
from breakwater.policy.addresses import Network
from services.alerter.blocks import slack_message
from services.alerter.channel import SendError, fingerprint, no_answer, secret_of
from services.alerter.guarded import guarded_session, usable_url
from services.alerter.slack_refusals import check_hook_answer
from services.alerter.wording import Wording

TIMEOUT_S = 10.0
INTERVAL_S = 1.0
"""Slack's own limit is one message a second for each webhook, and for each channel."""


class SlackWebhook:
    """Posts to one incoming webhook, whose URL is the secret."""

    interval_s = INTERVAL_S
    updates = False

    def __init__(
        self, name: str, url: str, wording: Wording, allowed: Sequence[Network], now: Callable[[], datetime]
    ) -> None:
        """Makes the channel.

        Args:
            name: as in the config.
            url: of the incoming webhook; the secret.
            wording: what people read.
            allowed: networks that are not refused.
            now: the clock.
        """
        self.name = name
        self.fingerprint = fingerprint("slack.webhook_url", url)
        self._url = url
        self._wording = wording
        self._allowed = allowed
        self._now = now
        self._session: aiohttp.ClientSession | None = None
        self._client: AsyncWebhookClient | None = None

    @classmethod
    def from_config(
        cls,
        name: str,
        slack: SlackChannel,
        wording: Wording,
        allowed: Sequence[Network],
        now: Callable[[], datetime],
    ) -> SlackWebhook:
        """Reads the URL.

        Raises:
            ConfigError: it is missing, or not a URL.
        """
        assert slack.webhook_url is not None, "a channel with a bot is none with a webhook"
        setting = f"alerts.channels.{name}.slack.webhook_url"
        return cls(name, usable_url(secret_of(slack.webhook_url, setting), setting), wording, allowed, now)

    async def open(self) -> None:
        """Opens the session and the client on it."""
        self._session = guarded_session(self._allowed, TIMEOUT_S)
        self._client = AsyncWebhookClient(self._url, session=self._session, retry_handlers=[], logger=silent_logger())
        # It reads HTTPS_PROXY and the like; a proxy would connect to addresses that we can't check.
        self._client.proxy = None

    async def close(self) -> None:
        """Closes the session."""
        if self._session is not None:
            await self._session.close()

    async def send(self, message: Alert | AlertDigest) -> None:
        """Posts the message once. Raises SendError."""
        assert self._client is not None, "open() comes first"
        told = self._wording.alert(message) if isinstance(message, Alert) else self._wording.digest(message)
        check_open(self._session)
        try:
            answer = await self._client.send_dict(slack_message(told))
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise no_answer(error) from None
        check_hook_answer(answer.status_code, answer.headers, answer.body, self._now())


def silent_logger() -> logging.Logger:
    """A logger for slack-sdk, which writes URLs and messages to its own at debug level."""
    return logging.Logger("slack", level=logging.WARNING)


def check_open(session: aiohttp.ClientSession | None) -> None:
    """Makes sure that slack-sdk uses our session. On a closed one it opens a session of its own, which has no guard.

    Raises:
        SendError: it is closed.
    """
    if session is None or session.closed:
        raise SendError("the channel is closed")
