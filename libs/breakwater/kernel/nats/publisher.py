"""Publishing with proof: a message counts as published when JetStream has acknowledged it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Mapping
from contextlib import suppress
from datetime import datetime
from itertools import count
from typing import Any

import nats.errors
import orjson
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.errors import NotFoundError
from pydantic import BaseModel

from breakwater.kernel.immutable import immutable
from breakwater.kernel.nats.core import RESTART, ClientGetter, UnhealthyServer, publish, subscribe, unhealthy_servers
from breakwater.kernel.nats.errors import (
    AlreadyDecidedError,
    BusUnavailableError,
    EventStreamFullError,
    MessageTooLargeError,
    NoStreamError,
    PublishRefusedError,
    StreamFullError,
    translated_errors,
    unavailable,
)
from breakwater.kernel.nats.subjects import Header, Stream
from breakwater.kernel.security.encryption import OFF, Cipher
from breakwater.kernel.types import Event, format_time

WRONG_LAST_SEQUENCE = 10071
UNDECIDED = frozenset({10164, 10158, 10167})
"""Error codes for an unknown outcome, as without an acknowledgement: the cluster has not agreed yet on an earlier
message with this id or on this subject, or the server is overloaded."""

FULL = frozenset({10077, 10002, 10047})
"""Error codes for a full stream, account or server. For a stream, the API's code is 503, as if JetStream were away."""

PUBLISH_TIMEOUT_S = 5.0

HEADERS_BYTES = 64 * 1024
"""The part of the message limit that is reserved for headers. The server closes the connection of a client that exceeds
the limit, and everything in transit is lost."""


@immutable()
class PublishAck:
    """The place of a stored message. `duplicate` is true if the stream already had a message with its id."""

    stream: str
    sequence: int
    duplicate: bool


class Publisher:
    """Publishes for one service. It gets the connection when it publishes: a broker has none before it starts."""

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
        """Returns True if it can encrypt texts that must not be stored in plain; otherwise it leaves them out."""
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
        removed_in_s: int | None = None,
    ) -> PublishAck:
        """Publishes an event with its CloudEvents attributes.

        Args:
            subject: the event's.
            event: its model.
            id: `ce-id`, unique for the event and the same when it is published again.
            at: `ce-time`.
            once: the subject takes only one message: the first writer wins.
            after: the stream's last sequence that the writer knows; the event is refused if there is a later one.
            traceparent: the job's W3C trace context.
            private: the texts of a result or a dead letter must not be stored in plain.
            removed_in_s: the server removes the message after this time; None to leave that to the stream.

        Raises:
            AlreadyDecidedError: with `once`, the subject has a message; with `after`, there is a later message.
            BusUnavailableError: not acknowledged, or no room (`EventStreamFullError`); publish again with the same id.
            MessageTooLargeError: the server does not take it.
            PublishRefusedError: the stream does not take it.
            TypeError: the service has not declared that it publishes such messages.
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
            # Without a message id: the winning alert must not be dropped as a duplicate of a refused one.
            headers[Header.EXPECTED_LAST_SEQUENCE] = str(after)
        elif once:
            headers[Header.EXPECTED_LAST_SUBJECT_SEQUENCE] = "0"
        else:
            headers[Header.MSG_ID] = id
        if removed_in_s is not None:
            headers[Header.TTL] = str(removed_in_s)
        payload = event.json_bytes()
        if len(payload) > HEADERS_BYTES and event.is_sent_to_programs:
            # It is also sent to the waiting program, uncompressed even if its stream compresses it.
            self._check_size(subject, len(payload))
        if (private or self._cipher.on) and event.holds_texts:
            payload = self._cipher.encrypt_document(payload, private=private)
        try:
            return await self.raw(subject, payload, headers)
        except NoStreamError as error:
            # The plane's own subjects always exist: a cluster is electing the stream's new leader.
            raise BusUnavailableError(str(error)) from error
        except StreamFullError as error:
            raise EventStreamFullError(
                f"{error}: it waits until the oldest messages expire, or limits.*_max_bytes is raised"
            ) from error

    async def job(
        self, subject: str, payload: bytes, headers: Mapping[str, str], *, timeout_s: float = PUBLISH_TIMEOUT_S
    ) -> PublishAck:
        """Publishes a job as `raw` does, with its texts encrypted if encryption is on."""
        if sum(len(name) + len(value.encode()) + 4 for name, value in headers.items()) > HEADERS_BYTES:
            raise MessageTooLargeError(f"{subject}: the headers exceed {HEADERS_BYTES} bytes")
        return await self.raw(subject, self._cipher.encrypt_document(payload), headers, timeout_s=timeout_s)

    async def encrypted_body(self, body: bytes, *, private: bool = False) -> tuple[bytes, bool]:
        """Returns a large body as it may be stored outside its message, and True if its texts are encrypted.

        Args:
            body: a job.
            private: its texts must not be stored in plain, even if the cipher is off.

        Raises ValueError if it must be encrypted and is no JSON object.
        """
        if not (self._cipher.on or (private and self.has_key)):
            return body, False
        # In a thread: it compresses and encrypts for a second, mostly without Python's global lock.
        return await asyncio.to_thread(self._cipher.encrypt_document, body, private=private), True

    async def raw(
        self, subject: str, payload: bytes, headers: Mapping[str, str], *, timeout_s: float = PUBLISH_TIMEOUT_S
    ) -> PublishAck:
        """Publishes bytes, acknowledged. Raises as `event` does, and StreamFullError if there is no room."""
        client = self._connection()
        if not client.is_connected:
            # The client would buffer the message, and send it later without confirmation.
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
        return PublishAck(ack["stream"], ack["seq"], ack.get("duplicate", False))

    def _check_size(self, subject: str, size: int) -> None:
        if size + HEADERS_BYTES > self._connection().max_payload:
            raise MessageTooLargeError(f"{subject}: {size} bytes exceed the server's message limit")

    async def delete_last(self, stream: Stream, subject: str) -> None:
        """Deletes the last message on a subject, if there is one, even if its stream is full.

        Raises BusUnavailableError.
        """
        jetstream = self._connection().jetstream(timeout=PUBLISH_TIMEOUT_S)
        with translated_errors(subject), suppress(NotFoundError):
            message = await jetstream.get_last_msg(stream.value, subject)
            assert message.seq is not None
            await jetstream.delete_msg(stream.value, message.seq)

    async def acknowledge(self, ack_subject: str) -> bool:
        """Acknowledges the delivery with that subject as `Delivery.ack_sync` does, but at less cost."""
        try:
            await self._replies.ask(self._connection(), ack_subject, b"", PUBLISH_TIMEOUT_S)
        except (TimeoutError, nats.errors.Error):
            return False
        return True

    async def give_back(self, ack_subject: str, delay_s: float = 0.0) -> None:
        """Has the delivery with that subject delivered again after `delay_s`, even if it waits for that already.

        Ignores a lost connection: NATS delivers it again, later.
        """
        nak = b"-NAK" if not delay_s else b"-NAK " + orjson.dumps({"delay": int(delay_s * 10**9)})
        with suppress(BusUnavailableError):
            await self.send(ack_subject, nak)

    async def _why(self, client: Client) -> str:
        """The errors of servers that do not respond because they can't write. Callers share one request for them."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(unhealthy_servers(client))
        unhealthy = await asyncio.shield(self._asking)
        return "".join(
            f": {server.server} says: {server.in_short}. {RESTART}" for server in unhealthy if server.cannot_write
        )

    async def transient(self, subject: str, event: Event) -> None:
        """Publishes on core NATS: only current subscribers get it. Without a connection, it is silently dropped.

        Raises:
            BusUnavailableError: there never was a connection, or its buffer is full.
        """
        await self.send(subject, event.json_bytes())

    async def send(self, subject: str, payload: bytes) -> None:
        """Publishes bytes as `transient` does. Raises BusUnavailableError."""
        client = self._connection()
        if client.is_connected:
            try:
                await publish(client, subject, payload)
            except nats.errors.MaxPayloadError:
                # A retry would be as large.
                structlog.get_logger().warning("message_too_large", subject=subject, bytes=len(payload))
            except (nats.errors.Error, OSError) as error:
                raise unavailable(f"NATS did not accept {subject}", error) from error


class Replies:
    """Makes any number of requests in parallel, with one subscription for all replies and one timer.

    nats-py's own `request` uses about twice the CPU: it takes random bytes and a timer for each request.
    """

    def __init__(self) -> None:
        self._client: Client | None = None
        self._inbox = ""
        self._numbers = count(1)
        self._waiting: dict[str, tuple[asyncio.Future[Msg], float]] = {}
        """Each reply that is awaited and its deadline by the loop's clock, by reply subject."""
        self._timer: asyncio.Handle | None = None
        self._looks_at = math.inf
        """When the timer fires. The timer has no such time in uvloop if it is due immediately."""

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
            TimeoutError: no reply came in that time.
            nats.errors.Error: the client does not accept the message.
        """
        loop = asyncio.get_running_loop()
        if client is not self._client:
            self._subscribe(client)
        reply = f"{self._inbox}.{next(self._numbers)}"
        answer = loop.create_future()
        until = loop.time() + timeout_s
        self._waiting[reply] = answer, until
        try:
            await publish(client, subject, payload, reply, headers)
            if until < self._looks_at:
                self._look_at(until)
            return await answer
        finally:
            del self._waiting[reply]

    def _subscribe(self, client: Client) -> None:
        inbox = client.new_inbox()
        subscribe(client, f"{inbox}.*", self._receive)
        self._client = client
        self._inbox = inbox

    def _receive(self, message: Msg) -> None:
        answer, _ = self._waiting.get(message.subject, (None, 0.0))
        if answer is None or answer.done():
            return  # the caller has given up
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
        """Ends the requests that have timed out, and sets the timer for the next deadline."""
        self._timer = None
        self._looks_at = math.inf
        now = asyncio.get_running_loop().time()
        for answer, until in self._waiting.values():
            if until <= now and not answer.done():
                answer.set_exception(TimeoutError())
        deadlines = [until for answer, until in self._waiting.values() if not answer.done()]
        if deadlines:
            self._look_at(min(deadlines))


def _refusal(subject: str, error: Mapping[str, Any]) -> Exception:
    """The exception for an error of JetStream."""
    code = error.get("err_code")
    text = error.get("description")
    if code == WRONG_LAST_SEQUENCE:
        return AlreadyDecidedError(f"{subject} is already recorded")
    if code in UNDECIDED:
        return BusUnavailableError(f"{subject} is not decided yet: {text}")
    if code in FULL:
        return StreamFullError(f"{subject}: {text}")
    if error.get("code") == 503:
        return BusUnavailableError(f"JetStream is not available: {text}")
    return PublishRefusedError(f"{subject}: {text}")
