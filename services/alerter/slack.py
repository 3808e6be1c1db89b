"""Slack, by incoming webhook."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import aiohttp
from slack_sdk.webhook.async_client import AsyncWebhookClient

from breakwater.config import ConfigError, SlackChannel
from breakwater.contracts.events import Alert
from services.alerter.channel import check_answer, no_answer, require_http_url

TIMEOUT_S = 10.0
LONGEST_TEXT = 590
"""Of 3000 characters that a block takes: escaping makes at most five of one."""

_REFUSAL = re.compile(r"[a-z_]{1,64}")


class SlackSender:
    """Posts alerts to one incoming webhook, whose URL is the secret."""

    name = "slack"
    interval_s = 1.0
    """Slack's own limit is one message a second for each webhook."""

    def __init__(self, url: str, now: Callable[[], datetime]) -> None:
        self._url = url
        self._now = now
        self._session: aiohttp.ClientSession | None = None
        self._client: AsyncWebhookClient | None = None

    @classmethod
    def from_config(cls, channel: SlackChannel, now: Callable[[], datetime]) -> SlackSender:
        """Reads the URL.

        Raises:
            ConfigError: it is missing, or not a URL.
        """
        try:
            url = channel.webhook_url.read()
        except ConfigError as error:
            raise ConfigError(f"alerts.slack.webhook_url: {error}") from error
        return cls(require_http_url(url, "alerts.slack.webhook_url"), now)

    async def open(self) -> None:
        """Opens the session and the client on it."""
        tracing = aiohttp.TraceConfig()
        tracing.on_request_redirect.append(_refuse_redirect)
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            trace_configs=[tracing],
        )
        # The client writes the URL to its logger at debug level.
        silent = logging.Logger("slack", level=logging.WARNING)
        self._client = AsyncWebhookClient(self._url, session=self._session, retry_handlers=[], logger=silent)

    async def close(self) -> None:
        """Closes the session."""
        if self._session is not None:
            await self._session.close()

    async def send(self, alert: Alert) -> None:
        """Posts the alert once. Raises SendError."""
        assert self._client is not None, "open() comes first"
        try:
            answer = await self._client.send_dict(message(alert))
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise no_answer(error) from error
        # Slack names its refusals (`no_service`, `invalid_payload`); anything else may be a stranger's page.
        refusal = answer.body if _REFUSAL.fullmatch(answer.body) else ""
        check_answer(answer.status_code, answer.headers, self._now(), refusal)


async def _refuse_redirect(_session: aiohttp.ClientSession, _context: SimpleNamespace, _params: object) -> None:
    # The client can't be told not to follow, and a POST that was followed as a GET would pass for a delivery.
    raise aiohttp.ClientError("redirected")


def message(alert: Alert) -> dict[str, Any]:
    """The message: blocks, and one line of text for notifications and for screen readers."""
    when = f"{alert.at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
    return {
        "text": f"{mrkdwn(alert.title)}: {mrkdwn(alert.text)}",
        "blocks": [
            {"type": "section", "text": _block_text(f"*{mrkdwn(alert.title)}*")},
            {"type": "section", "text": _block_text(mrkdwn(alert.text))},
            {"type": "context", "elements": [_block_text(f"{alert.severity} · {alert.event} · {when}")]},
        ],
        "unfurl_links": False,
        "unfurl_media": False,
    }


def mrkdwn(text: str) -> str:
    """Escapes what Slack would read as a mention, a link or an entity, and cuts what is too long for a block."""
    cut = text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 1]}…"
    return cut.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _block_text(text: str) -> dict[str, Any]:
    return {"type": "mrkdwn", "text": text, "verbatim": True}
