"""Webhooks, signed as Standard Webhooks says: any receiver can check them with a library of its language."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import aiohttp
import orjson
from pydantic import JsonValue
from standardwebhooks import Webhook

from breakwater.contracts.alerts import Alert, AlertDigest
from breakwater.contracts.types import format_time
from breakwater.policy.addresses import Network
from services.alerter.channel import HttpChannel, check_answer, fingerprint, no_answer
from services.alerter.wording import Link


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
        """Makes the channel. Each of `secrets` signs: the receiver takes any signature that it can check."""
        super().__init__(name, fingerprint("webhook", url), allowed, timeout_s, now)
        self._url = url
        self._signers = tuple(Webhook(secret) for secret in secrets)
        self._link = link

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
