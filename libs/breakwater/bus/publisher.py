"""Publishing with proof: a message counts as published when JetStream has acknowledged it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import nats.errors
import orjson
import structlog
from nats.aio.client import Client

from breakwater.bus.errors import AlreadyDecided, BusUnavailable, NoRoom, NoStream, PublishRefused, StreamFull, TooLarge
from breakwater.bus.replies import Replies
from breakwater.bus.server_health import RESTART, Unhealthy, unhealthy_servers
from breakwater.contracts.events import DeadLetter
from breakwater.contracts.execution import Execution, Result
from breakwater.contracts.subjects import Header
from breakwater.contracts.types import Event, format_time
from breakwater.encryption import OFF, Cipher

WRONG_LAST_SEQUENCE = 10071
UNDECIDED = frozenset({10164, 10158, 10167})
"""An earlier message on a subject that takes one, or with the same id, on which a cluster has not agreed yet: it may be
stored or not, as where no acknowledgement came. And a server with too much to do."""

FULL = frozenset({10077, 10002, 10047})
"""A stream at its limit, whose API code is 503 all the same, as where JetStream itself is away; an account or a server
at its limit of storage."""

PUBLISH_TIMEOUT_S = 5.0

HEADERS_BYTES = 64 * 1024
"""What of a message's limit is left for its headers, which count: the server closes the connection of who goes beyond
it, with all that is on its way."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a message stands. `duplicate`: a message with this id was there already."""

    stream: str
    sequence: int
    duplicate: bool


class Publisher:
    """Publishes for one service. Takes the connection late, as a broker has none before it starts."""

    def __init__(self, connection: Callable[[], Client], source: str, cipher: Cipher = OFF) -> None:
        self._connection = connection
        self._cipher = cipher
        self._source = f"breakwater/{source}"
        self._replies = Replies()
        self._asking: asyncio.Task[tuple[Unhealthy, ...]] | None = None

    @property
    def has_key(self) -> bool:
        """Whether it can encrypt texts that must not be stored in plain; else it leaves them out."""
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
            subject: where.
            event: what.
            id: `ce-id`, unique for the event and the same when it is published again.
            at: `ce-time`.
            once: the subject takes one message only: the first writer wins.
            after: the stream's last sequence as the writer knows it: refused where there is a later one.
            traceparent: W3C trace context of the job.
            private: the texts of a result or a dead letter must not be stored in plain.

        Raises:
            AlreadyDecided: `once`, and there is a message on the subject; or `after`, and there are later ones.
            BusUnavailable: no acknowledgement came, or there is no room (`NoRoom`); publish again with the same id.
            TooLarge: the server does not take it.
            PublishRefused: the stream does not take it.
        """
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
            # Without a message id: that of an alert that was refused must not stand for the one that wins.
            headers[Header.EXPECTED_LAST_SEQUENCE] = str(after)
        elif once:
            headers[Header.EXPECTED_LAST_SUBJECT_SEQUENCE] = "0"
        else:
            headers[Header.MSG_ID] = id
        payload = event.json_bytes()
        if len(payload) > HEADERS_BYTES and isinstance(event, Result):
            # It is also sent to who waits for it, as it is: also where it is compressed on its stream.
            self._check_size(subject, len(payload))
        if (private or self._cipher.on) and isinstance(event, Execution | DeadLetter):
            payload = self._cipher.encrypt_document(payload, private=private)
        try:
            return await self.raw(subject, payload, headers)
        except NoStream as error:
            # The plane's own subjects are always there: a cluster is choosing the stream's new leader.
            raise BusUnavailable(str(error)) from error
        except StreamFull as error:
            raise NoRoom(f"{error}: it waits until the oldest go, or limits.*_max_bytes is raised") from error

    async def job(
        self, subject: str, payload: bytes, headers: Mapping[str, str], *, timeout_s: float = PUBLISH_TIMEOUT_S
    ) -> Stored:
        """Publishes a job as `raw` does, its texts encrypted where that is on."""
        if sum(len(name) + len(value.encode()) + 4 for name, value in headers.items()) > HEADERS_BYTES:
            raise TooLarge(f"{subject}: the headers have over {HEADERS_BYTES} bytes")
        return await self.raw(subject, self._cipher.encrypt_document(payload), headers, timeout_s=timeout_s)

    async def raw(
        self, subject: str, payload: bytes, headers: Mapping[str, str], *, timeout_s: float = PUBLISH_TIMEOUT_S
    ) -> Stored:
        """Publishes bytes and waits for the acknowledgement. Raises as `event` does, but StreamFull for NoRoom."""
        client = self._connection()
        if not client.is_connected:
            # Otherwise the client would buffer it and send it at some later time, unconfirmed.
            raise BusUnavailable("NATS is not connected")
        if len(payload) > HEADERS_BYTES:
            self._check_size(subject, len(payload))
        try:
            answer = await self._replies.ask(client, subject, payload, timeout_s, headers)
        except nats.errors.NoRespondersError as error:
            raise NoStream(f"{subject}: no stream takes this subject") from error
        except TimeoutError as error:
            raise BusUnavailable(f"NATS did not acknowledge {subject} in time{await self._why(client)}") from error
        except (nats.errors.Error, OSError) as error:
            raise BusUnavailable(f"NATS did not acknowledge {subject}: {str(error) or type(error).__name__}") from error
        ack = orjson.loads(answer.data)
        if "error" in ack:
            raise _refusal(subject, ack["error"])
        return Stored(ack["stream"], ack["seq"], ack.get("duplicate", False))

    def _check_size(self, subject: str, size: int) -> None:
        if size + HEADERS_BYTES > self._connection().max_payload:
            raise TooLarge(f"{subject}: {size} bytes are over the server's message limit")

    async def acknowledge(self, ack_subject: str) -> bool:
        """Acknowledges the delivery with that subject as `Delivery.ack_sync` does, at less cost."""
        try:
            await self._replies.ask(self._connection(), ack_subject, b"", PUBLISH_TIMEOUT_S)
        except (TimeoutError, nats.errors.Error):
            return False
        return True

    async def _why(self, client: Client) -> str:
        """What the servers say, which do not answer where they can't write: asked once for all who wait."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(unhealthy_servers(client))
        found = await asyncio.shield(self._asking)
        return "".join(f": {one.server} says: {one.in_short}. {RESTART}" for one in found if one.cannot_write)

    async def transient(self, subject: str, event: Event) -> None:
        """Publishes on core NATS: received by current subscribers only, not stored. Dropped silently when disconnected.

        Raises:
            BusUnavailable: there is no connection at all, or it takes no more.
        """
        await self.send(subject, event.json_bytes())

    async def send(self, subject: str, payload: bytes) -> None:
        """Publishes bytes as `transient` does. Raises BusUnavailable."""
        client = self._connection()
        if client.is_connected:
            try:
                await client.publish(subject, payload)
            except nats.errors.MaxPayloadError:
                # Sent again it would be as large.
                structlog.get_logger().warning("message_too_large", subject=subject, bytes=len(payload))
            except (nats.errors.Error, OSError) as error:
                raise BusUnavailable(f"NATS did not take {subject}: {str(error) or type(error).__name__}") from error


def _refusal(subject: str, error: Mapping[str, Any]) -> Exception:
    """What JetStream's error means."""
    code, text = error.get("err_code"), error.get("description")
    if code == WRONG_LAST_SEQUENCE:
        return AlreadyDecided(f"{subject} is already recorded")
    if code in UNDECIDED:
        return BusUnavailable(f"{subject} is not decided yet: {text}")
    if code in FULL:
        return StreamFull(f"{subject}: {text}")
    if error.get("code") == 503:
        return BusUnavailable(f"JetStream is not available: {text}")
    return PublishRefused(f"{subject}: {text}")
