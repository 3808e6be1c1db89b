"""Webhooks, signed as Standard Webhooks says: any receiver can check them with a library of its language."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import aiohttp
import orjson
from pydantic import JsonValue
from standardwebhooks import Webhook

from breakwater.config import ConfigError, WebhookChannel
from breakwater.contracts.alerts import Alert, AlertDigest
from breakwater.contracts.types import format_time
from breakwater.policy.addresses import Network
from breakwater.secret_refs import SecretRef
from services.alerter.channel import HttpChannel, check_answer, fingerprint, no_answer, secret_of
from services.alerter.guarded import usable_url
from services.alerter.wording import Link

_PREFIX = "whsec_"


class SignedWebhook(HttpChannel):
    """Posts to one receiver. `webhook-id` is the message's id, the same at every try, as is the body."""

    def __init__(
        self,
        name: str,
        url: str,
        secrets: Sequence[str],
        timeout_s: float,
        allowed: Sequence[Network],
        link: Link | None,
        now: Callable[[], datetime],
    ) -> None:
        """Makes the channel.

        Args:
            name: as in the config.
            url: of the receiver.
            secrets: each signs; the receiver takes any signature that it can check.
            timeout_s: for one request.
            allowed: networks that are not refused.
            link: to incidents, where links are set up.
            now: the clock.
        """
        super().__init__(name, fingerprint("webhook", url), allowed, timeout_s, now)
        self._url = url
        self._signers = tuple(Webhook(secret) for secret in secrets)
        self._link = link

    @classmethod
    def from_config(
        cls,
        name: str,
        channel: WebhookChannel,
        allowed: Sequence[Network],
        link: Link | None,
        now: Callable[[], datetime],
    ) -> SignedWebhook:
        """Reads the secrets.

        Raises:
            ConfigError: a secret is missing or unusable, or the URL is none.
        """
        place = f"alerts.channels.{name}.webhook"
        secrets = [_secret(channel.secret, f"{place}.secret")]
        if channel.previous_secret is not None:
            secrets.append(_secret(channel.previous_secret, f"{place}.previous_secret"))
        url = usable_url(channel.url, f"{place}.url")
        return cls(name, url, secrets, channel.timeout_s, allowed, link, now)

    async def send(self, message: Alert | AlertDigest) -> None:
        """Posts the message once. Raises SendError."""
        message_id = message.digest_id if isinstance(message, AlertDigest) else message.alert_id
        body = envelope(message, self._link)
        try:
            # The body of the answer says nothing that we need, and is not read.
            async with self._session.post(
                self._url, data=body, headers=self._signed(message_id, body), allow_redirects=False
            ) as answer:
                status, headers = answer.status, answer.headers
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise no_answer(error) from None
        check_answer(status, headers, self._now())

    def _signed(self, message_id: str, body: bytes) -> dict[str, str]:
        now = self._now().astimezone(UTC)
        return {
            "content-type": "application/json",
            "user-agent": "breakwater-alerter",
            "webhook-id": message_id,
            "webhook-timestamp": str(int(now.timestamp())),
            "webhook-signature": " ".join(signer.sign(message_id, now, body.decode()) for signer in self._signers),
        }


def envelope(message: Alert | AlertDigest, link: Link | None) -> bytes:
    """The body: the same bytes for the same message, at every try. A digest has no `link`, as it has many incidents."""
    filled: dict[str, JsonValue] = {
        "type": message.event if isinstance(message, Alert) else "digest",
        "timestamp": format_time(message.at),
        "data": message.model_dump(mode="json"),
    }
    if link is not None and isinstance(message, Alert) and (url := link(message.incident_id, message.at)):
        filled["link"] = url
    return orjson.dumps(filled)


def _secret(ref: SecretRef, place: str) -> str:
    secret = secret_of(ref, place)
    problem = f"{place}: must be {_PREFIX} and a key in base64; `echo whsec_$(openssl rand -base64 32)` makes one"
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
