"""Reading what streams hold, without a consumer: single messages, and parts of a stream in batches (NATS ADR-31).

In a cluster any replica answers, and one that is behind ends that much earlier: by some moments, or by all that was
stored while it was cut off from the others. Whoever needs to know that nothing is missing asks for the `whole`.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Self, TypeVar, cast

import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import RawStreamMsg
from nats.js.errors import APIError, NotFoundError
from pydantic import ValidationError

from breakwater.bus.errors import BusError, BusUnavailable
from breakwater.contracts.subjects import Stream, covers
from breakwater.contracts.types import Event
from breakwater.encryption import Cipher

LOOKUP_TIMEOUT_S = 5.0

T = TypeVar("T")
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


def _found(data: bytes | None, headers: Mapping[str, str]) -> Found:
    """What a direct get answered, which says in headers of its own where the message stands."""
    return Found(
        subject=headers["Nats-Subject"],
        data=data or b"",
        sequence=int(headers["Nats-Sequence"]),
        headers=headers,
        stored_at=datetime.fromisoformat(headers["Nats-Time-Stamp"]),
    )


def _no_stream(stream: Stream) -> BusUnavailable:
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
        with answered(stream):
            info = await self._jetstream.stream_info(stream.value)
        identity = format(info.created.timestamp(), ".6f") if info.created else "unknown"
        created = info.created or datetime.fromtimestamp(0, UTC)
        state, limit = info.state, info.config.max_bytes
        return Facts(identity, created, state.first_seq, state.last_seq, state.bytes, limit or -1)

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
        """A stream's identity (`Facts.identity`). Raises as `facts`."""
        return (await self.facts(stream)).identity

    async def _found(self, stream: Stream, asked: Coroutine[Any, Any, RawStreamMsg], what: str) -> Found | None:
        with answered(what):
            try:
                message = await asked
            except NotFoundError:
                return None
            except nats.errors.NoRespondersError as error:
                raise _no_stream(stream) from error
        stored = _found(message.data, cast(Mapping[str, str], message.headers or {}))
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


LEAST_SPAN = 128
"""How many sequences `newest` looks at first. Each time that they hold too little, it is twice as many."""

BATCH_MESSAGES = 1_000
BATCH_BYTES = 4 * 1024 * 1024
"""A batch ends with the message that goes beyond it. Memory holds two at most: one read, the next coming."""

SUBJECTS_AT_ONCE = 256

_OF_THE_BATCH = ("Nats-Num-Pending", "Nats-Last-Sequence")
"""Headers that describe the batch, and so differ each time the same message is read."""

_FIRST, _LAST = datetime(1970, 1, 1, tzinfo=UTC), datetime(2262, 1, 1, tzinfo=UTC)
"""NATS counts nanoseconds in 64 bits: a time beyond these would mean another one, of other centuries."""


class _TooManySubjectsError(BusError):
    """The server names the last messages of at most 1024 subjects."""


async def scan(
    connection: Connection,
    stream: Stream,
    subject_filter: str,
    *,
    start: datetime | int = 1,
    up_to: int | None = None,
    whole: bool = False,
) -> AsyncGenerator[Found]:
    """The stored messages that match, in the stream's order, up to the last one that was there when it began.

    A caller that may leave the loop early wraps it in `contextlib.aclosing`, which unsubscribes at once.

    Args:
        connection: gives the connection, once there is one.
        stream: where to read; it must allow direct gets.
        subject_filter: one subject, wildcards allowed.
        start: the first sequence, or the time (with its zone) of storing from which on to read.
        up_to: the last sequence, where it is known; no more is read than that.
        whole: the stream's leader says what the last one is, so that a replica that is behind is noticed. With `up_to`,
            that is what the leader has said, of a message that need not match: what follows the last one that does is
            read, too.

    Raises:
        BusUnavailable: NATS does not answer in time, or has no such stream; `whole`, and a replica is behind.
        BusError: NATS refuses the request.
        ValueError: the time has no zone.
    """
    first, to_match, last = _begin(start), up_to is None, 0
    if up_to is None:
        end = await _end(connection, stream, subject_filter, whole=whole)
        if end is None or (end[1] < start if isinstance(start, datetime) else end[0] < start):
            return
        up_to = end[0]
    async with aclosing(_walk(connection(), stream, {**first, "next_by_subj": subject_filter}, up_to=up_to)) as stored:
        async for message in stored:
            if (last := message.sequence) <= up_to:
                yield message
            if last >= up_to:
                return
    if not whole:
        return
    if not to_match:
        rest = {**({"seq": last + 1} if last else first), "next_by_subj": ">"}
        async with aclosing(_walk(connection(), stream, rest, up_to=up_to)) as stored:
            async for message in stored:
                last = message.sequence
                if covers(subject_filter, message.subject):
                    yield message
    if last < up_to:
        raise _behind(stream, last, up_to)


async def last_on(connection: Connection, stream: Stream, subjects: Sequence[str]) -> AsyncGenerator[Found]:
    """The newest message of each of some subjects, where it has one. Raises as `scan` does.

    A caller that may leave the loop early wraps it in `contextlib.aclosing`, which unsubscribes at once.
    """
    for start in range(0, len(subjects), SUBJECTS_AT_ONCE):
        wanted = {"multi_last": list(subjects[start : start + SUBJECTS_AT_ONCE]), "seq": 1}
        async with aclosing(_walk(connection(), stream, wanted)) as stored:
            async for message in stored:
                yield message


async def last_of_each(
    connection: Connection, stream: Stream, subject_filter: str, *, whole: bool = False
) -> tuple[Found, ...]:
    """The newest message of every subject that matches, in the stream's order. Memory holds one of each.

    Up to 1024 subjects the server picks them out. Beyond, all that matches is read, which takes as long as `scan`,
    as which it raises.
    """
    end = await _end(connection, stream, subject_filter, whole=whole)
    if end is None:
        return ()
    wanted = {"multi_last": [subject_filter], "seq": 1, "up_to_seq": end[0]}
    try:
        latest = [message async for message in _walk(connection(), stream, wanted)]
    except _TooManySubjectsError:
        stored = scan(connection, stream, subject_filter, whole=whole)
        newest = {message.subject: message async for message in stored}
        return tuple(sorted(newest.values(), key=lambda message: message.sequence))
    last = latest[-1].sequence if latest else 0
    if whole and last < end[0]:
        raise _behind(stream, last, end[0])
    return tuple(latest)


async def newest(
    connection: Connection,
    stream: Stream,
    subject_filter: str,
    *,
    most: int,
    since: datetime,
    read: Callable[[Found], T | None],
) -> list[T]:
    """What the newest messages that match hold, the latest first. No more of the stream is read than it takes.

    Args:
        connection: gives the connection, once there is one.
        stream: where to read; it must allow direct gets.
        subject_filter: one subject, wildcards allowed.
        most: at most so many.
        since: only what was stored from this time (with its zone) on.
        read: what is kept of a message, which memory holds no longer than this takes; None where it is passed over.

    Raises:
        as `scan` does.
    """
    wanted = {**_begin(since), "next_by_subj": subject_filter}
    async with aclosing(_walk(connection(), stream, wanted, batch=1)) as stored:
        first = await anext(stored, None)
    end = await _end(connection, stream, subject_filter, whole=False)
    if first is None or end is None:
        return []
    found: list[T] = []
    above, span = end[0] + 1, LEAST_SPAN
    while first.sequence < above and len(found) < most:
        start = max(first.sequence, above - span)
        part: deque[T] = deque(maxlen=most - len(found))
        async with aclosing(scan(connection, stream, subject_filter, start=start, up_to=above - 1)) as stored:
            async for message in stored:
                if (kept := read(message)) is not None:
                    part.append(kept)
        found += reversed(part)
        above, span = start, span * 2
    return found


async def _end(
    connection: Connection, stream: Stream, subject_filter: str, *, whole: bool
) -> tuple[int, datetime] | None:
    """The last message that matches: its sequence, and when it was stored. `whole`: as the stream's leader knows."""
    lookup = Lookup(connection)
    if whole:
        return await lookup.end(stream, subject_filter)
    last = await lookup.last(stream, subject_filter)
    return None if last is None else (last.sequence, last.stored_at)


def _behind(stream: Stream, last: int, up_to: int) -> BusUnavailable:
    return BusUnavailable(f"a replica of {stream} is behind: it ends at message {last} of {up_to}")


def _begin(start: datetime | int) -> dict[str, object]:
    if isinstance(start, int):
        return {"seq": max(start, 1)}
    if start.tzinfo is None:
        raise ValueError(f"the time to start from needs a zone: {start.isoformat()}")
    return {"start_time": min(max(start, _FIRST), _LAST).astimezone(UTC).isoformat()}


async def _walk(
    client: Client,
    stream: Stream,
    wanted: Mapping[str, object],
    *,
    up_to: int | None = None,
    batch: int = BATCH_MESSAGES,
) -> AsyncGenerator[Found]:
    """Asks for batch after batch until nothing is pending. `up_to`: what is behind it is not wanted."""
    async with _Inbox(client, stream) as inbox:
        while True:
            first = wanted.get("seq")
            left = up_to - first + 1 if up_to is not None and isinstance(first, int) else batch
            if left < 1:
                return
            messages, pending = await inbox.batch(wanted, min(left, batch))
            sequence = 0
            for message in messages:
                headers = message.headers or {}
                for name in _OF_THE_BATCH:
                    headers.pop(name, None)
                stored = _found(message.data, headers)
                sequence = stored.sequence
                yield stored
            if not (messages and pending):
                return
            wanted = {name: value for name, value in wanted.items() if name != "start_time"} | {"seq": sequence + 1}


class _Inbox:
    """A subscription, and one batch at a time that comes to it. Waiting for each message by itself would cost more."""

    def __init__(self, client: Client, stream: Stream) -> None:
        self._client, self._stream = client, stream
        self._name = client.new_inbox()
        self._messages: list[Msg] = []
        self._end: asyncio.Future[Mapping[str, str]] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Self:
        with answered(self._stream):
            self._subscription = await self._client.subscribe(self._name, cb=self._hear)
        return self

    async def __aexit__(self, *_: object) -> None:
        # A connection that is closed has no subscriptions left.
        with suppress(nats.errors.Error):
            await self._subscription.unsubscribe()

    async def batch(self, wanted: Mapping[str, object], most: int = BATCH_MESSAGES) -> tuple[list[Msg], int]:
        """The messages, and how many more match that come after them."""
        self._messages, self._end = [], asyncio.get_running_loop().create_future()
        request = {**wanted, "batch": most, "max_bytes": BATCH_BYTES}
        with answered(self._stream):
            async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                await self._client.publish(
                    f"$JS.API.DIRECT.GET.{self._stream}", json.dumps(request).encode(), reply=self._name
                )
                end = await self._end
        match end.get("Status"):
            case "204":
                return self._messages, int(end["Nats-Num-Pending"])
            case "404":
                return [], 0
            case "413":
                raise _TooManySubjectsError(f"too many subjects of {self._stream} match for one answer")
            case "503":
                raise _no_stream(self._stream)
            case status:
                raise BusError(f"NATS refuses to read {self._stream}: {status} {end.get('Description', '')}")

    async def _hear(self, message: Msg) -> None:
        headers = message.headers or {}
        if "Nats-Sequence" in headers:
            self._messages.append(message)
        elif not self._end.done():
            self._end.set_result(headers)
