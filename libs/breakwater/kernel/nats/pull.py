"""Fetching from a durable consumer, on demand. `subscriber.py` does so without end."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from contextlib import suppress

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from breakwater.kernel.nats.delivery import Delivery
from breakwater.kernel.nats.errors import unavailable
from breakwater.kernel.nats.lookup import ClientGetter
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.nats.topology import ACK_WAIT_S

DRAIN_S = 0.05
"""Time that messages gather at the server after the first one."""

REST_S = 1.0
"""Time that a fetch waits for those; later ones are part of the next fetch."""

OPEN_S = 10.0
"""Time that the server keeps a request open. One that was lost with a server's leadership is made again after that."""

GRACE_S = 1.0
"""Delay with which the server may report that a request has ended."""

WAIT_S = 2.0
"""About how long a fetch waits; the next one sees whether the connection, and so the request, was lost meanwhile."""

FIRST_WAIT_S = 0.1
"""Wait of the first fetch of all; a consumer that is not there is reported immediately."""

BUSY = 3
"""So many messages of one fetch mean that more are to be expected."""

RETRY_S = 0.5
STOP_S = 10.0
"""Time that the batch in progress may still take when its service ends."""

KEPT_S = ACK_WAIT_S * 0.75
"""A message that has waited here for so long is left to the server, which is about to deliver it again."""

_ENDED = {"404", "408"}
"""The statuses with which a request ends that brought less than it asked for. 409: its server shuts down, or no longer
leads; it is asked again a moment later."""


class Pull:
    """A durable consumer, asked for messages. To be closed.

    A request stays open at the server beyond the fetch that made it: a server that is asked again every moment while
    there is no message has more work with the asking than with the messages. What comes between two fetches waits here,
    at most what was asked for.

    Where messages may gather, the open request is for one. The others wait at the server, and come together when they
    are asked for: each that is sent by itself wakes the server's connection and this process. While they come all the
    time, not even that one is asked for by itself.
    """

    def __init__(self, connection: ClientGetter, stream: Stream, durable: str) -> None:
        self._connection = connection
        self._next = f"$JS.API.CONSUMER.MSG.NEXT.{stream.value}.{durable}"
        self.durable = durable
        self._client: Client | None = None
        self._subscription: Subscription | None = None
        self._inbox = ""
        self._reconnects, self._requests = 0, 0
        self._asked, self._asked_until = 0, 0.0
        self._waiting: deque[tuple[float, Msg]] = deque()
        self._fetched, self._left = 0, 0  # by the last fetch, and what the server had beyond it
        self._error: str | None = None
        self._news = asyncio.Event()

    async def fetch(
        self, most: int, wait_s: float, linger_s: float = DRAIN_S, *, ask: int | None = None
    ) -> list[Delivery]:
        """A first message, waited for as long as `wait_s`, and what is there `linger_s` after it; at most `most`.

        After a fetch of `BUSY` messages or more: what is there after `linger_s`, or where that is nothing, the same.

        `ask`: for how many the server keeps its request open, where messages need not gather. Those beyond `most` wait
        here for the next fetch.

        Raises:
            BusUnavailableError: NATS does not answer, or has no such consumer.
        """
        try:
            expected = linger_s and self._fetched >= BUSY and not (self._waiting or self._asked)
            if expected:
                await self._gather(most, linger_s, self._left)
            if (
                not (expected and self._waiting)
                and await self._came(wait_s, ask or 1)
                and linger_s
                and len(self._waiting) < most
            ):
                await self._gather(most, linger_s, self._waiting[-1][1].metadata.num_pending or 0)
        except (nats.errors.Error, nats.js.errors.Error, OSError) as error:
            await self.close()
            raise unavailable(f"NATS delivers nothing for {self.durable}", error) from error
        found = [Delivery(self._waiting.popleft()[1]) for _ in range(min(most, len(self._waiting)))]
        self._fetched, self._left = len(found), found[-1].waiting if found else 0
        return found

    async def close(self) -> None:
        """Unsubscribes, and returns messages that were not fetched."""
        subscription, self._subscription = self._subscription, None
        self._asked = 0
        if subscription is not None:
            try:
                await subscription.unsubscribe()
                while self._waiting:
                    await self._waiting.popleft()[1].nak()
            except (nats.errors.Error, nats.js.errors.Error):
                self._waiting.clear()  # a connection that is closed has no subscriptions left

    async def _came(self, wait_s: float, ask: int) -> bool:
        """Returns True as soon as a message is here, and False after `wait_s` without one."""
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_s
        while True:
            now = loop.time()
            while self._waiting and self._waiting[0][0] < now - KEPT_S:
                self._waiting.popleft()
            if self._waiting or now >= until:
                return bool(self._waiting)
            await self._connect()
            if not self._asked or now >= self._asked_until:
                await self._ask(ask, OPEN_S)
            await self._news_until(min(until, self._asked_until))

    async def _gather(self, most: int, linger_s: float, pending: int) -> None:
        """Fetches what the server has after `linger_s`, or immediately if it has enough (`pending`)."""
        loop = asyncio.get_running_loop()
        if pending < most - len(self._waiting):
            await asyncio.sleep(linger_s)
        await self._connect()
        if not self._asked:
            await self._ask(most - len(self._waiting), None)
        until = loop.time() + REST_S
        while self._asked and len(self._waiting) < most and loop.time() < until:
            await self._news_until(until)

    async def _news_until(self, until: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await self._news.wait()
        # Not before it waits: a message that came after its caller looked, while it asked, would wake no task.
        self._news.clear()
        if self._error is not None:
            status, self._error = self._error, None
            raise nats.js.errors.Error(f"status {status}")

    async def _connect(self) -> None:
        """Subscribes if necessary, and detects that a request was lost with its connection."""
        client = self._connection()
        if self._subscription is None or self._client is not client:
            self._client, self._inbox = client, client.new_inbox()
            self._waiting.clear()
            self._asked = 0
            self._subscription = await client.subscribe(f"{self._inbox}.*", cb=self._receive)
        if self._reconnects != client.stats["reconnects"]:
            self._reconnects, self._asked = client.stats["reconnects"], 0

    async def _ask(self, ask: int, open_s: float | None) -> None:
        """Asks for messages: those that come within `open_s`, or with None those that are there."""
        request = {"batch": ask, "no_wait": True} if open_s is None else {"batch": ask, "expires": int(open_s * 1e9)}
        self._asked, self._asked_until = ask, asyncio.get_running_loop().time() + (open_s or 0.0) + GRACE_S
        self._requests += 1
        assert self._client is not None
        await self._client.publish(self._next, json.dumps(request).encode(), f"{self._inbox}.{self._requests}")

    async def _receive(self, message: Msg) -> None:
        now, status = asyncio.get_running_loop().time(), (message.headers or {}).get("Status")
        if status is None:
            self._asked = max(0, self._asked - 1)
            self._waiting.append((now, message))
        elif message.subject == f"{self._inbox}.{self._requests}":  # of the last request, not of one given up as lost
            if status in _ENDED:
                self._asked = 0
            elif status == "409":
                self._asked_until = now + RETRY_S
            else:
                self._error = status
        self._news.set()
