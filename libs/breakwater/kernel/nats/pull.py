"""Fetching from a durable consumer on demand. `subscriber.py` reads one continuously."""

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

from breakwater.kernel.nats.core import ClientGetter, publish, subscribe
from breakwater.kernel.nats.delivery import Delivery
from breakwater.kernel.nats.errors import BusUnavailableError, unavailable
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.nats.topology import ACK_WAIT_S
from breakwater.kernel.process import background

DRAIN_S = 0.05
"""The time for which messages gather at the server after the first one."""

REST_S = 1.0
"""The time for which a fetch waits for the gathered messages; later ones are part of the next fetch."""

OPEN_S = 10.0
"""About how long the server keeps a request open. After it, a request that was lost with a leader is repeated. All
requests of all processes of a machine end at the same moments, as each end wakes the server and the process."""

GRACE_S = 1.0
"""The delay with which the server may report the end of a request."""

WAIT_S = 2.0
"""About how long a fetch waits. The next one checks whether the connection, and with it the request, was lost."""

BUSY = 3
"""A fetch of this many messages means that more are to be expected."""

RETRY_S = 0.5
"""The wait before a request that its server ended with status 409 is repeated."""

STOP_S = 10.0
"""The time that the batch in progress may still take when its service ends."""

KEPT_S = ACK_WAIT_S * 0.75
"""A message that has waited here for this long is dropped: the server is about to deliver it again."""

_ENDED = {"404", "408"}
"""The statuses that end a request before it has delivered its whole batch. Status 409 means that the server is shutting
down or no longer leads the stream: the request is repeated a moment later."""


class Pull:
    """Fetches the messages of a durable consumer. The caller closes it.

    A request stays open at the server after the fetch that made it has returned: repeating requests on an idle consumer
    would cost the server more than its messages do. Messages that arrive between two fetches wait here, at most as many
    as were requested.

    If messages may gather, the open request is for a single message. The others gather at the server, and one further
    request fetches them together: every message that is sent on its own wakes the server's connection and this process.
    Under constant load, a fetch gathers messages without waiting for a first one.
    """

    def __init__(self, connection: ClientGetter, stream: Stream, durable: str) -> None:
        self._connection = connection
        self._request_subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream.value}.{durable}"
        self.durable = durable
        self._client: Client | None = None
        self._subscription: Subscription | None = None
        self._inbox = ""
        self._reconnects = 0
        self._requests = 0
        self._requested = 0  # messages that the open request still may deliver
        self._request_ends_at = 0.0
        self._waiting: deque[tuple[float, Msg]] = deque()
        self._last_fetched = 0  # messages of the last fetch
        self._server_backlog = 0  # messages that the server still had then
        self._error: str | None = None
        self._changed = asyncio.Event()

    async def answers(self) -> bool:
        """Returns True once the server has answered for the consumer, and False if it has not within `GRACE_S`.

        A request that stays open is not answered before there is a message; this one asks for what the server has now.

        Raises:
            BusUnavailableError: as `fetch`.
        """
        loop = asyncio.get_running_loop()
        try:
            await self._connect()
            await self._request(1, None)
            while self._requested and loop.time() < self._request_ends_at:
                await self._wait_for_change(self._request_ends_at)
        except (nats.errors.Error, nats.js.errors.Error, OSError) as error:
            raise await self._failure(error) from error
        return not self._requested

    async def fetch(
        self, limit: int, wait_s: float, linger_s: float = DRAIN_S, *, batch: int | None = None
    ) -> list[Delivery]:
        """Waits up to `wait_s` for a message. Returns it with those that follow within `linger_s`, `limit` at most.

        After a fetch of `BUSY` messages or more, it does not wait for a first message: it returns what has come after
        `linger_s`, and only if that is nothing, waits as above.

        Args:
            limit: the most messages to return.
            wait_s: how long to wait for the first message.
            linger_s: how long to gather more after it; 0 for not at all.
            batch: how many messages the open request is for, if messages need not gather. Those beyond `limit` wait
                here for the next fetch.

        Raises:
            BusUnavailableError: NATS does not answer, or has no such consumer.
        """
        try:
            expected = linger_s and self._last_fetched >= BUSY and not (self._waiting or self._requested)
            if expected:
                await self._gather(limit, linger_s, self._server_backlog)
            if (
                not (expected and self._waiting)
                and await self._has_message(wait_s, batch or 1)
                and linger_s
                and len(self._waiting) < limit
            ):
                await self._gather(limit, linger_s, self._waiting[-1][1].metadata.num_pending or 0)
        except (nats.errors.Error, nats.js.errors.Error, OSError) as error:
            raise await self._failure(error) from error
        deliveries = [Delivery(self._waiting.popleft()[1]) for _ in range(min(limit, len(self._waiting)))]
        self._last_fetched = len(deliveries)
        self._server_backlog = deliveries[-1].waiting if deliveries else 0
        return deliveries

    async def close(self) -> None:
        """Unsubscribes, and returns to the server the messages that were not fetched."""
        subscription = self._subscription
        self._subscription = None
        self._requested = 0
        if subscription is not None:
            try:
                await subscription.unsubscribe()
                while self._waiting:
                    await self._waiting.popleft()[1].nak()
            except (nats.errors.Error, nats.js.errors.Error):
                self._waiting.clear()  # a closed connection has no subscriptions left

    async def _failure(self, error: Exception) -> BusUnavailableError:
        await self.close()
        return unavailable(f"NATS delivers nothing for {self.durable}", error)

    async def _has_message(self, wait_s: float, batch: int) -> bool:
        """Returns True as soon as a message waits here, and False after `wait_s` without one."""
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_s
        while True:
            now = loop.time()
            while self._waiting and self._waiting[0][0] < now - KEPT_S:
                self._waiting.popleft()
            if self._waiting or now >= until:
                return bool(self._waiting)
            await self._connect()
            if not self._requested or now >= self._request_ends_at:
                await self._request(batch, background.aligned_delay(OPEN_S))
            await self._wait_for_change(min(until, self._request_ends_at))

    async def _gather(self, limit: int, linger_s: float, pending: int) -> None:
        """Fetches the messages that the server has after `linger_s`; immediately if `pending` are enough."""
        loop = asyncio.get_running_loop()
        if pending < limit - len(self._waiting):
            await asyncio.sleep(linger_s)
        await self._connect()
        if not self._requested:
            await self._request(limit - len(self._waiting), None)
        until = loop.time() + REST_S
        while self._requested and len(self._waiting) < limit and loop.time() < until:
            await self._wait_for_change(until)

    async def _wait_for_change(self, until: float) -> None:
        """Waits for a message, or for the end of the request. Raises nats.js.errors.Error: the request has failed."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await self._changed.wait()
        # Clear the event only after waiting for it. Clearing it before would lose a message that arrived between the
        # caller's check and the wait, during its request: nothing would wake this task.
        self._changed.clear()
        if self._error is not None:
            status = self._error
            self._error = None
            raise nats.js.errors.Error(f"status {status}")

    async def _connect(self) -> None:
        """Subscribes if necessary, and detects that a request was lost with its connection."""
        client = self._connection()
        if self._subscription is None or self._client is not client:
            self._client = client
            self._inbox = client.new_inbox()
            self._waiting.clear()
            self._requested = 0
            self._subscription = subscribe(client, f"{self._inbox}.*", self._receive)
        if self._reconnects != client.stats["reconnects"]:
            self._reconnects = client.stats["reconnects"]
            self._requested = 0

    async def _request(self, batch: int, open_s: float | None) -> None:
        """Requests the messages that come within `open_s`; None for those that the server has now."""
        expiry = {"no_wait": True} if open_s is None else {"expires": int(open_s * 1e9)}
        self._requested = batch
        self._request_ends_at = asyncio.get_running_loop().time() + (open_s or 0.0) + GRACE_S
        self._requests += 1
        assert self._client is not None
        request = json.dumps({"batch": batch, **expiry}).encode()
        await publish(self._client, self._request_subject, request, f"{self._inbox}.{self._requests}")

    def _receive(self, message: Msg) -> None:
        now = asyncio.get_running_loop().time()
        status = (message.headers or {}).get("Status")
        if status is None:
            self._requested = max(0, self._requested - 1)
            self._waiting.append((now, message))
        elif message.subject == f"{self._inbox}.{self._requests}":  # of the latest request, not of one that was lost
            if status in _ENDED:
                self._requested = 0
            elif status == "409":
                self._request_ends_at = now + RETRY_S
            else:
                self._error = status
        self._changed.set()
