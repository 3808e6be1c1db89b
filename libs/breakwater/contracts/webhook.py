"""What a receiver of webhooks gets."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from breakwater.contracts.alerts import Alert, AlertDigest, AlertEvent
from breakwater.contracts.types import Event, Timestamp


class WebhookEnvelope(Event):
    """The body of a webhook, as Standard Webhooks recommends it. Its `webhook-id` is that of `data`."""

    type: AlertEvent | Literal["digest"] = Field(description="`digest`: `data` is an AlertDigest; else an Alert.")
    timestamp: Timestamp = Field(description="When it happened: `at` of `data`.")
    data: Alert | AlertDigest
    link: str | None = Field(
        default=None,
        description="A page to acknowledge or resolve the incident, for anyone with the link; absent if not set up.",
    )
