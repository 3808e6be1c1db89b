"""Requests over NATS, as many at once as there are: one subscription for their replies, and one timer for all."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from itertools import count
from typing import cast

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg


class Replies:
    """What one process has asked for and waits for.

    nats-py's own `request` does the same for about twice the CPU: random bytes for each request, and a timer.
    """

    def __init__(self) -> None:
        self._client: Client | None = None
        self._inbox = ""
        self._numbers = count(1)
        self._waiting: dict[str, tuple[asyncio.Future[Msg], float]] = {}
        """By reply subject, each with when it times out, by the loop's clock."""
        self._timer: asyncio.TimerHandle | None = None

    async def ask(
        self,
        client: Client,
        subject: str,
        payload: bytes,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> Msg:
        """Publishes a message and returns the first reply to it.

        Raises:
            NoRespondersError: nobody is subscribed.
            TimeoutError: there is no reply after that time.
            Error: of nats-py, where the client does not take the message.
        """
        loop = asyncio.get_running_loop()
        if client is not self._client:
            await self._subscribe(client)
        reply, answer, until = f"{self._inbox}.{next(self._numbers)}", loop.create_future(), loop.time() + timeout_s
        self._waiting[reply] = answer, until
        try:
            await client.publish(subject, payload, reply, cast(dict[str, str] | None, headers))
            if self._timer is None or until < self._timer.when():
                self._look_at(until)
            return await answer
        finally:
            del self._waiting[reply]

    async def _subscribe(self, client: Client) -> None:
        # Whoever asks meanwhile comes after the subscription in the client's buffer.
        self._client, self._inbox = client, client.new_inbox()
        try:
            await client.subscribe(f"{self._inbox}.*", cb=self._receive)
        except BaseException:
            self._client = None
            raise

    async def _receive(self, message: Msg) -> None:
        answer, _ = self._waiting.get(message.subject, (None, 0.0))
        if answer is None or answer.done():
            return  # whoever asked has given up
        if message.headers is not None and message.headers.get("Status") == "503":
            answer.set_exception(nats.errors.NoRespondersError())
        else:
            answer.set_result(message)

    def _look_at(self, moment: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(moment, self._time_out)

    def _time_out(self) -> None:
        """Ends what has waited for long enough, and looks again when the next will have."""
        self._timer, now = None, asyncio.get_running_loop().time()
        for answer, until in self._waiting.values():
            if until <= now and not answer.done():
                answer.set_exception(TimeoutError())
        left = [until for answer, until in self._waiting.values() if not answer.done()]
        if left:
            self._look_at(min(left))
