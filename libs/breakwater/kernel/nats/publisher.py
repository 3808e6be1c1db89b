"""Publishing with proof: a message counts as published when JetStream has acknowledged it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from typing import Any, cast

import nats.errors
import orjson
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from pydantic import BaseModel

from breakwater.kernel.nats.core import RESTART, UnhealthyServer, unhealthy_servers
from breakwater.kernel.nats.errors import (
    AlreadyDecidedError,
    BusUnavailableError,
    EventStreamFullError,
    MessageTooLargeError,
    NoStreamError,
    PublishRefusedError,
    StreamFullError,
    unavailable,
)
from breakwater.kernel.nats.lookup import ClientGetter
from breakwater.kernel.nats.subjects import Header
from breakwater.kernel.security.encryption import OFF, Cipher
from breakwater.kernel.types import Event, format_time

WRONG_LAST_SEQUENCE = 10071
UNDECIDED = frozenset({10164, 10158, 10167})
"""An earlier message on a subject that takes one, or with the same id, on which a cluster has not agreed yet: it may be
stored or not, as where no acknowledgement came. And a server with too much to do."""

FULL = frozenset({10077, 10002, 10047})
"""A stream at its limit, whose API code is 503 all the same, as where JetStream itself is away; an account or a server
at its limit of storage."""

PUBLISH_TIMEOUT_S = 5.0

HEADERS_BYTES = 64 * 1024
"""Part of a message's limit that is left for its headers, which count: the server closes the connection of a client
that goes beyond it, with all that is on its way."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Place of a message. `duplicate`: a message with this id was there already."""

    stream: str
    sequence: int
    duplicate: bool


class Publisher:
    """Publishes for one service. Takes the connection late, as a broker has none before it starts."""

    def __init__(
        self,
        connection: ClientGetter,
        source: str,
        cipher: Cipher = OFF,
        *,
        publishes: Collection[type[BaseModel]] | None = None,
    ) -> None:
        """Takes the messages that the service declares to publish; None for a program that declares none."""
        self._connection = connection
        self._publishes = publishes if publishes is None else frozenset(publishes)
        self._cipher = cipher
        self._source = f"breakwater/{source}"
        self._replies = Replies()
        self._asking: asyncio.Task[tuple[UnhealthyServer, ...]] | None = None

    @property
    def has_key(self) -> bool:
        """True if it can encrypt texts that must not be stored in plain; else it leaves them out."""
        return bool(self._cipher.key_ids)

    async def event(
        self,
        subject: str,
        event: Event,
        *,
        id: str,  # noqa: A002  CloudEvents' own name
        at: datetime,
        once: bool = False,
        after: int | None = None,
        traceparent: str | None = None,
        private: bool = False,
    ) -> Stored:
        """Publishes an event with its CloudEvents attributes.

        Args:
            subject: the event's.
            event: its model.
            id: `ce-id`, unique for the event and the same when it is published again.
            at: `ce-time`.
            once: the subject takes one message only: the first writer wins.
            after: the stream's last sequence as the writer knows it: refused where there is a later one.
            traceparent: W3C trace context of the job.
            private: the texts of a result or a dead letter must not be stored in plain.

        Raises:
            AlreadyDecidedError: `once`, and there is a message on the subject; or `after`, and there are later ones.
            BusUnavailableError: not acknowledged, or no room (`EventStreamFullError`); publish again with the same id.
            MessageTooLargeError: the server does not take it.
            PublishRefusedError: the stream does not take it.
            TypeError: the service does not declare that it publishes such messages.
        """
        if self._publishes is not None and type(event) not in self._publishes:
            raise TypeError(f"{self._source} does not declare that it publishes {type(event).__name__}: {subject}")
        headers: dict[str, str] = {
            Header.CE_ID: id,
            Header.CE_TYPE: f"breakwater.{type(event).__name__}",
            Header.CE_SOURCE: self._source,
            Header.CE_TIME: format_time(at),
            Header.CE_SPECVERSION: "1.0",
        }
        if traceparent:
            headers[Header.TRACEPARENT] = traceparent
        if after is not None:
            # Without a message id: that of a refused alert must not be taken for the one that wins.
            headers[Header.EXPECTED_LAST_SEQUENCE] = str(after)
        elif once:
            headers[Header.EXPECTED_LAST_SUBJECT_SEQUENCE] = "0"
        else:
            headers[Header.MSG_ID] = id
        payload = event.json_bytes()
        if len(payload) > HEADERS_BYTES and event.is_sent_to_programs:
            # It is also sent to the program that waits for it, uncompressed, also where it is compressed on its stream.
            self._check_size(subject, len(payload))
        if (private or self._cipher.on) and event.holds_texts:
            payload = self._cipher.encrypt_document(payload, private=private)
        try:
            return await self.raw(subject, payload, headers)
        except NoStreamError as error:
            # The plane's own subjects are always there: a cluster is choosing the stream's new leader.
            raise BusUnavailableError(str(error)) from error
        except StreamFullError as error:
            raise EventStreamFullError(
                f"{error}: it waits until the oldest messages expire, or limits.*_max_bytes is raised"
            ) from error

    async def job(
        self, subject: str, payload: bytes, headers: Mapping[str, str], *, timeout_s: float = PUBLISH_TIMEOUT_S
    ) -> Stored:
        """Publishes a job as `raw` does, its texts encrypted where that is on."""
        if sum(len(name) + len(value.encode()) + 4 for name, value in headers.items()) > HEADERS_BYTES:
            raise MessageTooLargeError(f"{subject}: the headers exceed {HEADERS_BYTES} bytes")
        return await self.raw(subject, self._cipher.encrypt_document(payload), headers, timeout_s=timeout_s)

    async def raw(
        self, subject: str, payload: bytes, headers: Mapping[str, str], *, timeout_s: float = PUBLISH_TIMEOUT_S
    ) -> Stored:
        """Publishes bytes, acknowledged. Raises as `event` does, and StreamFullError if there is no room."""
        client = self._connection()
        if not client.is_connected:
            # Otherwise the client would buffer it and send it at some later time, unconfirmed.
            raise BusUnavailableError("NATS is not connected")
        if len(payload) > HEADERS_BYTES:
            self._check_size(subject, len(payload))
        try:
            answer = await self._replies.ask(client, subject, payload, timeout_s, headers)
        except nats.errors.NoRespondersError as error:
            raise NoStreamError(f"{subject}: no stream takes this subject") from error
        except TimeoutError as error:
            raise BusUnavailableError(f"NATS did not acknowledge {subject} in time{await self._why(client)}") from error
        except (nats.errors.Error, OSError) as error:
            raise unavailable(f"NATS did not acknowledge {subject}", error) from error
        ack = orjson.loads(answer.data)
        if "error" in ack:
            raise _refusal(subject, ack["error"])
        return Stored(ack["stream"], ack["seq"], ack.get("duplicate", False))

    def _check_size(self, subject: str, size: int) -> None:
        if size + HEADERS_BYTES > self._connection().max_payload:
            raise MessageTooLargeError(f"{subject}: {size} bytes exceed the server's message limit")

    async def acknowledge(self, ack_subject: str) -> bool:
        """Acknowledges the delivery with that subject as `Delivery.ack_sync` does, at less cost."""
        try:
            await self._replies.ask(self._connection(), ack_subject, b"", PUBLISH_TIMEOUT_S)
        except (TimeoutError, nats.errors.Error):
            return False
        return True

    async def _why(self, client: Client) -> str:
        """Errors of the servers, which do not answer where they can't write: asked once for all who wait."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(unhealthy_servers(client))
        found = await asyncio.shield(self._asking)
        return "".join(f": {one.server} says: {one.in_short}. {RESTART}" for one in found if one.cannot_write)

    async def transient(self, subject: str, event: Event) -> None:
        """Publishes on core NATS: received by current subscribers only, not stored. Dropped silently when disconnected.

        Raises:
            BusUnavailableError: there is no connection at all, or it takes no more.
        """
        await self.send(subject, event.json_bytes())

    async def send(self, subject: str, payload: bytes) -> None:
        """Publishes bytes as `transient` does. Raises BusUnavailableError."""
        client = self._connection()
        if client.is_connected:
            try:
                await client.publish(subject, payload)
            except nats.errors.MaxPayloadError:
                # Sent again it would be as large.
                structlog.get_logger().warning("message_too_large", subject=subject, bytes=len(payload))
            except (nats.errors.Error, OSError) as error:
                raise unavailable(f"NATS did not accept {subject}", error) from error


class Replies:
    """Requests of one process over NATS, any number in parallel: one subscription for their replies, one timer for all.

    nats-py's own `request` does the same for about twice the CPU: random bytes for each request, and a timer.
    """

    def __init__(self) -> None:
        self._client: Client | None = None
        self._inbox = ""
        self._numbers = count(1)
        self._waiting: dict[str, tuple[asyncio.Future[Msg], float]] = {}
        """By reply subject, each with when it times out, by the loop's clock."""
        self._timer: asyncio.Handle | None = None
        self._looks_at = math.inf
        """Time at which the timer fires. The timer can't say it: uvloop makes a plain handle of one that is due now."""

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
            NoRespondersError: no connection is subscribed.
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
            if until < self._looks_at:
                self._look_at(until)
            return await answer
        finally:
            del self._waiting[reply]

    async def _subscribe(self, client: Client) -> None:
        # Requests made meanwhile come after the subscription in the client's buffer.
        self._client, self._inbox = client, client.new_inbox()
        try:
            await client.subscribe(f"{self._inbox}.*", cb=self._receive)
        except BaseException:
            self._client = None
            raise

    async def _receive(self, message: Msg) -> None:
        answer, _ = self._waiting.get(message.subject, (None, 0.0))
        if answer is None or answer.done():
            return  # the asker has given up
        if message.headers is not None and message.headers.get("Status") == "503":
            answer.set_exception(nats.errors.NoRespondersError())
        else:
            answer.set_result(message)

    def _look_at(self, moment: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._looks_at = moment
        self._timer = asyncio.get_running_loop().call_at(moment, self._time_out)

    def _time_out(self) -> None:
        """Ends the requests that have waited for long enough, and looks again when the next will have."""
        self._timer, self._looks_at = None, math.inf
        now = asyncio.get_running_loop().time()
        for answer, until in self._waiting.values():
            if until <= now and not answer.done():
                answer.set_exception(TimeoutError())
        left = [until for answer, until in self._waiting.values() if not answer.done()]
        if left:
            self._look_at(min(left))


def _refusal(subject: str, error: Mapping[str, Any]) -> Exception:
    """The exception for an error of JetStream."""
    code, text = error.get("err_code"), error.get("description")
    if code == WRONG_LAST_SEQUENCE:
        return AlreadyDecidedError(f"{subject} is already recorded")
    if code in UNDECIDED:
        return BusUnavailableError(f"{subject} is not decided yet: {text}")
    if code in FULL:
        return StreamFullError(f"{subject}: {text}")
    if error.get("code") == 503:
        return BusUnavailableError(f"JetStream is not available: {text}")
    return PublishRefusedError(f"{subject}: {text}")
