"""Fetching from a durable consumer on demand, for a reader that holds messages back."""

from __future__ import annotations

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext

from breakwater.bus.delivery import Delivery
from breakwater.bus.errors import BusUnavailable
from breakwater.bus.lookup import Connection
from breakwater.contracts.subjects import Stream

DRAIN_S = 0.05
"""How long a fetch waits for more messages after the first one."""


class Pull:
    """A durable consumer, asked for messages. To be closed."""

    def __init__(self, connection: Connection, stream: Stream, durable: str) -> None:
        self._connection = connection
        self._stream = stream
        self._durable = durable
        self._client: Client | None = None
        self._subscription: JetStreamContext.PullSubscription | None = None

    async def fetch(self, most: int, wait_s: float) -> list[Delivery]:
        """What is there now, at most `most`; what comes within `wait_s`, where nothing is.

        Raises:
            BusUnavailable: NATS does not answer, or has no such consumer.
        """
        try:
            subscription = await self._subscribed()
            # One by itself first: a fetch of many waits for all of them until its time is up.
            messages = await subscription.fetch(1, timeout=wait_s)
            if most > 1:
                messages += await self._more(subscription, most - 1)
        except (TimeoutError, nats.errors.TimeoutError):
            return []
        except (nats.errors.Error, nats.js.errors.Error, OSError) as error:
            await self.close()
            raise BusUnavailable(
                f"NATS has nothing of {self._durable}: {str(error) or type(error).__name__}"
            ) from error
        return [Delivery(message) for message in messages]

    async def close(self) -> None:
        """Unsubscribes."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            try:
                await subscription.unsubscribe()
            except (nats.errors.Error, nats.js.errors.Error):
                return  # a connection that is closed has no subscriptions left

    async def _more(self, subscription: JetStreamContext.PullSubscription, most: int) -> list[Msg]:
        try:
            return await subscription.fetch(most, timeout=DRAIN_S)
        except (TimeoutError, nats.errors.TimeoutError):
            return []

    async def _subscribed(self) -> JetStreamContext.PullSubscription:
        client = self._connection()
        if self._subscription is None or self._client is not client:
            self._subscription = await client.jetstream().pull_subscribe_bind(self._durable, self._stream.value)
            self._client = client
        return self._subscription
