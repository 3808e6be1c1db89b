"""Reading back what was decided: the last message on a subject."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, TypeVar, cast

import nats.errors
import structlog
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import RawStreamMsg, StreamInfo
from nats.js.errors import APIError, NotFoundError
from pydantic import ValidationError

from breakwater.bus.errors import BusUnavailable
from breakwater.contracts.subjects import Stream
from breakwater.contracts.types import Event
from breakwater.encryption import Cipher

LOOKUP_TIMEOUT_S = 5.0

EventT = TypeVar("EventT", bound=Event)

Connection = Callable[[], Client]
"""Gives the connection, once there is one: for services, which do not name NATS' own types."""


@dataclass(frozen=True, slots=True)
class Found:
    """A stored message."""

    subject: str
    data: bytes
    sequence: int
    headers: Mapping[str, str]
    stored_at: datetime
    """When the server took it: UTC, by the server's clock, cut to microseconds."""

    def read(self, model: type[EventT]) -> EventT | None:
        """The message as one of the contract's; None, and a line in the log, where it is none."""
        try:
            return model.model_validate_json(self.data)
        except ValidationError:
            structlog.get_logger().warning("event_unreadable", sequence=self.sequence, subject=self.subject)
            return None


@dataclass(frozen=True, slots=True)
class Facts:
    """What a stream is, and holds."""

    identity: str
    """When it was created: distinguishes it from a deleted stream of the same name."""
    created: datetime
    first: int
    """The oldest sequence that is stored; 0 or 1 where nothing was ever removed."""
    last: int
    bytes: int
    max_bytes: int
    """-1 where there is no limit."""


def found(data: bytes | None, headers: Mapping[str, str]) -> Found:
    """What a direct get answered, which says in headers of its own where the message stands."""
    return Found(
        subject=headers["Nats-Subject"],
        data=data or b"",
        sequence=int(headers["Nats-Sequence"]),
        headers=headers,
        stored_at=datetime.fromisoformat(headers["Nats-Time-Stamp"]),
    )


def no_stream(stream: Stream) -> BusUnavailable:
    """No responder for direct gets: a stream that was never created looks the same as one that is down."""
    return BusUnavailable(
        f"no server holds the stream {stream}: `breakwater setup` creates it; if it was created, wait for its servers"
    )


class Lookup:
    """Looks messages up by subject, served by any replica (direct get)."""

    def __init__(self, connection: Connection, cipher: Cipher | None = None) -> None:
        """`cipher`: decrypts what is encrypted; else it stays as it is stored."""
        self._connection = connection
        self._cipher = cipher

    def as_stored(self) -> Lookup:
        """The same without decrypting, for those who need no texts."""
        return Lookup(self._connection)

    async def last(self, stream: Stream, subject: str) -> Found | None:
        """The last message on a subject, or None.

        Raises:
            BusUnavailable: NATS does not answer, or has no such stream.
            Undecryptable: with a cipher that lacks its key.
        """
        return await self._found(stream, self._jetstream.get_last_msg(stream.value, subject, direct=True), subject)

    async def end(self, stream: Stream, subject_filter: str) -> tuple[int, datetime] | None:
        """The sequence of the last message that matches, and when it was stored, as the stream's leader knows; or None.

        Raises:
            BusUnavailable: NATS does not answer, or the stream has no leader.
        """
        with answered(subject_filter):
            try:
                message = await self._jetstream.get_last_msg(stream.value, subject_filter)
            except NotFoundError:
                return None
        assert message.seq is not None
        assert message.time is not None
        return message.seq, message.time.astimezone(UTC)

    async def next(self, stream: Stream, subject_filter: str, sequence: int) -> Found | None:
        """The first stored message from a sequence on that matches, or None. Raises as `last`."""
        asked = self._jetstream.get_msg(stream.value, sequence, subject_filter, direct=True, next=True)
        return await self._found(stream, asked, stream)

    async def facts(self, stream: Stream) -> Facts:
        """What a stream is and holds now. Raises BusUnavailable: NATS does not answer."""
        info = await self._info(stream)
        created = info.created or datetime.fromtimestamp(0, UTC)
        state, limit = info.state, info.config.max_bytes
        return Facts(_identity(info), created, state.first_seq, state.last_seq, state.bytes, limit or -1)

    async def counts(self, stream: Stream, subject_filter: str) -> dict[str, int]:
        """How many messages each subject holds that matches, as the server counts them. Raises as `facts`.

        One answer names 100,000 subjects at most; this is for streams that have fewer.
        """
        with answered(stream):
            info = await self._jetstream.stream_info(stream.value, subjects_filter=subject_filter)
        return dict(info.state.subjects or {})

    async def acknowledged(self, stream: Stream, durable: str) -> int:
        """Up to which sequence a durable consumer has acknowledged all that it was to get. Raises as `progress`."""
        return (await self.progress(stream, durable))[0]

    async def progress(self, stream: Stream, durable: str) -> tuple[int, int]:
        """Up to which sequence a durable consumer has acknowledged all, and was given something; 0 for nothing yet.

        Raises:
            BusUnavailable: NATS does not answer, or has no such consumer.
        """
        with answered(durable):
            info = await self._jetstream.consumer_info(stream.value, durable)
        acknowledged, delivered = (0 if one is None else one.stream_seq for one in (info.ack_floor, info.delivered))
        return acknowledged, delivered

    async def identity(self, stream: Stream) -> str:
        """A stream's identity, which distinguishes it from a deleted one of the same name: when it was created.

        Raises:
            BusUnavailable: NATS does not answer.
        """
        return _identity(await self._info(stream))

    async def _info(self, stream: Stream) -> StreamInfo:
        with answered(stream):
            return await self._jetstream.stream_info(stream.value)

    async def _found(self, stream: Stream, asked: Coroutine[Any, Any, RawStreamMsg], what: str) -> Found | None:
        with answered(what):
            try:
                message = await asked
            except NotFoundError:
                return None
            except nats.errors.NoRespondersError as error:
                raise no_stream(stream) from error
        stored = found(message.data, cast(Mapping[str, str], message.headers or {}))
        if self._cipher is None:
            return stored
        return replace(stored, data=self._cipher.decrypt_document(stored.data))

    @property
    def _jetstream(self) -> JetStreamContext:
        return self._connection().jetstream(timeout=LOOKUP_TIMEOUT_S)


@contextmanager
def answered(what: str) -> Generator[None]:
    """Turns what a request of JetStream raises into BusUnavailable."""
    try:
        yield
    except (TimeoutError, APIError, nats.errors.Error, OSError) as error:
        raise BusUnavailable(f"NATS did not answer for {what}: {str(error) or type(error).__name__}") from error


def _identity(info: StreamInfo) -> str:
    return format(info.created.timestamp(), ".6f") if info.created else "unknown"


@dataclass(frozen=True, slots=True)
class Backlog:
    """The backlog of a durable consumer, in messages."""

    waiting: int
    """Messages that were not delivered yet."""
    in_progress: int
    """Messages that were delivered and not acknowledged yet."""


async def backlog(connection: Connection, stream: Stream, durable: str) -> Backlog | None:
    """The backlog of a durable consumer; None where it was never created.

    Raises:
        BusUnavailable: NATS does not answer, or not to this user.
    """
    with answered(durable):
        try:
            info = await connection().jetstream(timeout=LOOKUP_TIMEOUT_S).consumer_info(stream.value, durable)
        except NotFoundError:
            return None
    return Backlog(info.num_pending or 0, info.num_ack_pending or 0)
