"""Webhooks, signed as Standard Webhooks says: any receiver can check them with a library of its language."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from datetime import UTC, datetime

import aiohttp
import orjson
from standardwebhooks import Webhook

from breakwater.config import ConfigError, WebhookChannel
from breakwater.contracts.events import Alert
from breakwater.contracts.types import format_time
from services.alerter.channel import check_answer, no_answer, require_http_url

_PREFIX = "whsec_"


class WebhookSender:
    """Posts alerts to one receiver. `webhook-id` is the alert's id, the same at every try."""

    name = "webhook"
    interval_s = 0.0

    def __init__(self, url: str, secret: str, timeout_s: float, now: Callable[[], datetime]) -> None:
        self._url = url
        self._signer = Webhook(secret)
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._now = now
        self._session: aiohttp.ClientSession | None = None

    @classmethod
    def from_config(cls, channel: WebhookChannel, now: Callable[[], datetime]) -> WebhookSender:
        """Reads the secret.

        Raises:
            ConfigError: the secret is missing or unusable, or the URL is none.
        """
        try:
            secret = channel.secret.read()
        except ConfigError as error:
            raise ConfigError(f"alerts.webhook.secret: {error}") from error
        return cls(require_http_url(channel.url, "alerts.webhook.url"), _usable(secret), channel.timeout_s, now)

    async def open(self) -> None:
        """Opens the session, which keeps no cookies."""
        self._session = aiohttp.ClientSession(timeout=self._timeout, cookie_jar=aiohttp.DummyCookieJar())

    async def close(self) -> None:
        """Closes the session."""
        if self._session is not None:
            await self._session.close()

    async def send(self, alert: Alert) -> None:
        """Posts the alert once. Raises SendError."""
        assert self._session is not None, "open() comes first"
        body = envelope(alert)
        try:
            async with self._session.post(
                self._url, data=body, headers=self._signed(alert.alert_id, body), allow_redirects=False
            ) as answer:
                status, headers = answer.status, answer.headers
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise no_answer(error) from error
        check_answer(status, headers, self._now())

    def _signed(self, message_id: str, body: bytes) -> dict[str, str]:
        now = self._now().astimezone(UTC)
        return {
            "content-type": "application/json",
            "user-agent": "breakwater-alerter",
            "webhook-id": message_id,
            "webhook-timestamp": str(int(now.timestamp())),
            "webhook-signature": self._signer.sign(message_id, now, body.decode()),
        }


def envelope(alert: Alert) -> bytes:
    """The body: the same bytes for the same alert, at every try."""
    return orjson.dumps(
        {"type": alert.event, "timestamp": format_time(alert.at), "data": alert.model_dump(mode="json")}
    )


def _usable(secret: str) -> str:
    problem = f"alerts.webhook.secret: must be {_PREFIX} and a key in base64; `openssl rand -base64 32` makes a key"
    if not secret.startswith(_PREFIX):
        raise ConfigError(problem)
    try:
        # The signing package skips characters that are not base64, and would sign with some other key.
        encoded = secret.removeprefix(_PREFIX).rstrip("=")
        key = base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
    except binascii.Error:
        raise ConfigError(problem) from None
    if not key:
        raise ConfigError(problem)
    return secret
