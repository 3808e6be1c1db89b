"""Fetching from a durable consumer: on demand, for a reader that holds messages back, and in batches without end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import nats.errors
import nats.js.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext

from breakwater import background
from breakwater.bus.delivery import Delivery
from breakwater.bus.errors import BusUnavailable
from breakwater.bus.lookup import Connection
from breakwater.contracts.subjects import Stream
from breakwater.outage import Outage

DRAIN_S = 0.05
"""How long a fetch waits for more messages after the first one."""

WAIT_S = 2.0
"""After a server restart a waiting pull request is gone; this is how long it takes to notice."""

FIRST_WAIT_S = 0.1
"""How long the first fetch of all waits; a consumer that is not there is reported at once."""

RETRY_S = 0.5
STOP_S = 10.0
"""How long the batch that is being handled may still take when its service ends."""


class Pull:
    """A durable consumer, asked for messages. To be closed."""

    def __init__(self, connection: Connection, stream: Stream, durable: str) -> None:
        self._connection = connection
        self._stream = stream
        self.durable = durable
        self._client: Client | None = None
        self._subscription: JetStreamContext.PullSubscription | None = None

    async def fetch(self, most: int, wait_s: float, linger_s: float = DRAIN_S) -> list[Delivery]:
        """A first message, waited for as long as `wait_s`, and what comes in `linger_s` after it; at most `most`.

        Raises:
            BusUnavailable: NATS does not answer, or has no such consumer.
        """
        try:
            subscription = await self._subscribed()
            # One by itself first: a fetch of many waits for all of them until its time is up.
            messages = await subscription.fetch(1, timeout=wait_s)
            if most > 1:
                messages += await self._more(subscription, most - 1, linger_s)
        except (TimeoutError, nats.errors.TimeoutError):
            return []
        except (nats.errors.Error, nats.js.errors.Error, OSError) as error:
            await self.close()
            raise BusUnavailable(f"NATS has nothing of {self.durable}: {str(error) or type(error).__name__}") from error
        return [Delivery(message) for message in messages]

    async def close(self) -> None:
        """Unsubscribes."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            try:
                await subscription.unsubscribe()
            except (nats.errors.Error, nats.js.errors.Error):
                return  # a connection that is closed has no subscriptions left

    async def _more(self, subscription: JetStreamContext.PullSubscription, most: int, linger_s: float) -> list[Msg]:
        try:
            return await subscription.fetch(most, timeout=linger_s)
        except (TimeoutError, nats.errors.TimeoutError):
            return []

    async def _subscribed(self) -> JetStreamContext.PullSubscription:
        client = self._connection()
        if self._subscription is None or self._client is not client:
            self._subscription = await client.jetstream().pull_subscribe_bind(self.durable, self._stream.value)
            self._client = client
        return self._subscription


class Each:
    """The messages of a consumer, handled side by side."""

    def __init__(
        self, pull: Pull, handle: Callable[[Delivery], Awaitable[None]], *, concurrency: Callable[[], int]
    ) -> None:
        """Reads nothing yet. `concurrency`: how many at once, as of now. What `handle` raises is logged."""
        self._pull, self._handle, self._concurrency = pull, handle, concurrency
        self._reading: asyncio.Task[None] | None = None
        self._handling: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begins to read."""
        self._reading = asyncio.create_task(self._read())

    async def stop(self, *, drain_s: float) -> None:
        """Reads no more, and returns when all that was read is handled; it is cancelled after `drain_s`."""
        if self._reading is not None:
            await background.stop(self._reading)
        if self._handling:
            await asyncio.wait(self._handling, timeout=drain_s)
        await background.stop(*self._handling)

    async def _read(self) -> None:
        outage = Outage(self._pull.durable)
        try:
            while True:
                while len(self._handling) >= self._concurrency():
                    await asyncio.wait(self._handling, return_when=asyncio.FIRST_COMPLETED)
                for delivery in await outage.outlast(self._fetch, on=BusUnavailable, retry_s=RETRY_S):
                    task = asyncio.create_task(self._handled(delivery))
                    self._handling.add(task)
                    task.add_done_callback(self._handling.discard)
        finally:
            await self._pull.close()

    async def _fetch(self) -> list[Delivery]:
        return await self._pull.fetch(1, WAIT_S)

    async def _handled(self, delivery: Delivery) -> None:
        try:
            await self._handle(delivery)
        except Exception:  # noqa: BLE001  the next one may go well; this one is delivered again
            structlog.get_logger().exception("handler_failed")


class Batches:
    """The messages of a consumer, handled in batches, one after the other."""

    def __init__(
        self, pull: Pull, handle: Callable[[list[Delivery]], Awaitable[None]], *, size: int, linger_s: float
    ) -> None:
        """Reads nothing yet; the arguments are those of `on_batch`."""
        self._pull, self._handle = pull, handle
        self._size, self._linger_s = size, linger_s
        self._outage = Outage("messages to handle")
        self._reading: asyncio.Task[None] | None = None
        self._handling: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begins to read, beside whatever else the service does; returns when the consumer has answered once."""
        self._reading = asyncio.create_task(self._read(await self._next(FIRST_WAIT_S)))

    async def stop(self) -> None:
        """Reads no more, and returns when the last batch is handled, or has taken too long."""
        if self._reading is not None:
            await background.stop(self._reading)
        if self._handling is not None:
            await asyncio.wait({self._handling}, timeout=STOP_S)
            await background.stop(self._handling)

    async def _read(self, batch: list[Delivery]) -> None:
        try:
            while True:
                if batch:
                    # In a task of its own, which the end of the reading does not interrupt.
                    self._handling = asyncio.create_task(self._handled(batch))
                    await asyncio.shield(self._handling)
                batch = await self._next(WAIT_S)
        finally:
            await self._pull.close()

    async def _next(self, wait_s: float) -> list[Delivery]:
        fetch = partial(self._pull.fetch, self._size, wait_s, self._linger_s)
        return await self._outage.outlast(fetch, on=BusUnavailable, retry_s=RETRY_S)

    async def _handled(self, batch: list[Delivery]) -> None:
        try:
            await self._handle(batch)
        except Exception:  # noqa: BLE001  the next batch may go well; this one is delivered again
            structlog.get_logger().exception("handler_failed")
