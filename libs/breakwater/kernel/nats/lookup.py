"""Reading streams without a consumer: single messages, and parts of a stream in batches (NATS ADR-31).

In a cluster, any replica responds. A replica that lags lacks the latest messages: those of some moments, or all that
were stored while it was cut off from the others. A reader that may miss none reads with `complete=True`.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Self, TypeVar, cast

import nats.errors
import orjson
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import ConsumerInfo, RawStreamMsg
from nats.js.errors import APIError, NotFoundError
from pydantic import ValidationError

from breakwater.kernel.nats.core import ClientGetter, publish, subscribe, unsubscribe
from breakwater.kernel.nats.errors import BusError, BusUnavailableError, translated_errors
from breakwater.kernel.nats.subjects import Stream, covers
from breakwater.kernel.security.encryption import Cipher
from breakwater.kernel.types import Event

LOOKUP_TIMEOUT_S = 5.0

LEAST_SPAN = 128
"""The number of sequences that `newest` reads first. It doubles them until it has enough messages."""

BATCH_MESSAGES = 1_000
BATCH_BYTES = 4 * 1024 * 1024
"""A batch ends with the message that exceeds it. At most two batches are in memory: one being read, and the next."""

SUBJECTS_AT_ONCE = 256

CONTINUES = "breakwater.created"
"""Metadata of a stream that was restored from a backup: when the stream that it continues was created."""

_OF_THE_BATCH = ("Nats-Num-Pending", "Nats-Last-Sequence")
"""Headers that describe the batch: they differ each time that the same message is read."""

_FIRST = datetime(1970, 1, 1, tzinfo=UTC)
_LAST = datetime(2262, 1, 1, tzinfo=UTC)
"""NATS counts nanoseconds in 64 bits: a time after this one would overflow, and mean a time centuries earlier."""

T = TypeVar("T")
EventT = TypeVar("EventT", bound=Event)


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A stored message."""

    subject: str
    data: bytes
    sequence: int
    headers: Mapping[str, str]
    stored_at: datetime
    """When the server stored it: in UTC, by the server's clock, truncated to microseconds."""

    @classmethod
    def of(cls, data: bytes | None, headers: Mapping[str, str]) -> Self:
        """Makes it from the response to a direct get, whose headers give the message's subject and sequence."""
        return cls(
            subject=headers["Nats-Subject"],
            data=data or b"",
            sequence=int(headers["Nats-Sequence"]),
            headers=headers,
            stored_at=datetime.fromisoformat(headers["Nats-Time-Stamp"]),
        )

    def read(self, model: type[EventT]) -> EventT | None:
        """Parses the message as a model of the contract. If it is not one, logs that and returns None."""
        try:
            return model.model_validate_json(self.data)
        except ValidationError:
            structlog.get_logger().warning("event_unreadable", sequence=self.sequence, subject=self.subject)
            return None


@dataclass(frozen=True, slots=True)
class Facts:
    """State of a stream."""

    identity: str
    """Its time of creation, which distinguishes it from a deleted stream of the same name."""
    created: datetime
    """Of one that was restored from a backup: when that of the backup was created."""
    first: int
    """The oldest sequence that is stored; 0 or 1 if nothing was ever removed."""
    last: int
    bytes: int
    max_bytes: int
    """-1 for no limit."""
    deleted: int = 0
    """The number of messages between the first and the last that were deleted."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """State of a durable consumer."""

    waiting: int
    """Messages that were not delivered yet."""
    in_progress: int
    """Messages that were delivered but not acknowledged yet."""
    acknowledged: int
    """The sequence up to which all its messages are acknowledged; 0 for none yet."""
    delivered: int
    """The sequence up to which its messages were delivered; 0 for none yet."""
    deliveries: int
    """Deliveries so far, repeated ones included."""


def created_at(info: Mapping[str, Any]) -> str:
    """Returns when a stream, or the one that it continues after a restore, was created, as the server tells it."""
    metadata: Mapping[str, str] = info["config"].get("metadata") or {}
    return str(metadata.get(CONTINUES) or info["created"])


class Lookup:
    """A reader of streams. Any replica responds to direct gets.

    All methods raise BusUnavailableError if NATS does not respond, or has no such stream or consumer. A caller that may
    leave the loop over `scan` or `last_on` early wraps it in `contextlib.aclosing`, which then unsubscribes.
    """

    def __init__(self, connection: ClientGetter, cipher: Cipher | None = None) -> None:
        """Makes a reader. With a `cipher`, `last` and `next` decrypt messages; the other methods never do."""
        self.connection = connection
        self._cipher = cipher

    def as_stored(self) -> Lookup:
        """Returns a reader that does not decrypt, for callers that need no texts."""
        return Lookup(self.connection)

    async def last(self, stream: Stream, subject: str) -> StoredMessage | None:
        """The last message on a subject, or None. Raises DecryptionError: with a cipher that lacks its key."""
        return await self._find(stream, self._jetstream.get_last_msg(stream.value, subject, direct=True), subject)

    async def newest_on(self, stream: Stream, subject: str) -> StoredMessage | None:
        """The last message on a subject as the stream's leader knows it, and as it is stored; None if there is none."""
        with translated_errors(subject):
            try:
                message = await self._jetstream.get_last_msg(stream.value, subject)
            except NotFoundError:
                return None
        assert message.seq is not None
        assert message.time is not None
        headers = cast(Mapping[str, str], message.headers or {})
        return StoredMessage(subject, message.data or b"", message.seq, headers, message.time.astimezone(UTC))

    async def winner(self, stream: Stream, subject: str) -> StoredMessage:
        """The message that was first on a subject, for a writer whose own publish was refused. Raises as `last`.

        Raises:
            BusUnavailableError: the replica that was asked lags, and does not have it yet.
        """
        if (winner := await self.last(stream, subject)) is None:
            raise BusUnavailableError(f"{subject} is decided, but the replica that was asked lags")
        return winner

    async def next(self, stream: Stream, subject_filter: str, sequence: int) -> StoredMessage | None:
        """The first stored message that matches, at or after a sequence; None if there is none. Raises as `last`."""
        request = self._jetstream.get_msg(stream.value, sequence, subject_filter, direct=True, next=True)
        return await self._find(stream, request, stream)

    async def page(
        self, stream: Stream, subject_filter: str, start: int, limit: int
    ) -> tuple[list[StoredMessage], int]:
        """The first messages that match at or after a sequence, in one request, and the number that follow them.

        Args:
            stream: the stream to read; it must allow direct gets.
            subject_filter: one subject, wildcards allowed.
            start: the first sequence to read.
            limit: the most messages. They are fewer if they are long: `BATCH_BYTES`, and the message that exceeds it.
        """
        async with _Inbox(self.connection(), stream) as inbox:
            messages, following = await inbox.batch({"seq": max(start, 1), "next_by_subj": subject_filter}, limit)
        return [StoredMessage.of(message.data, message.headers or {}) for message in messages], following

    async def facts(self, stream: Stream) -> Facts:
        """The state of a stream now."""
        with translated_errors(stream):
            # nats-py would take three times as long for all the fields that nobody asks for.
            answer = await self.connection().request(f"$JS.API.STREAM.INFO.{stream}", timeout=LOOKUP_TIMEOUT_S)
            info = orjson.loads(answer.data)
            if "error" in info:
                try:
                    APIError.from_error(info["error"])
                except NotFoundError as error:
                    raise _no_stream(stream) from error
        created = datetime.fromisoformat(created_at(info))
        state = info["state"]
        limit = info["config"].get("max_bytes") or -1
        identity = format(created.timestamp(), ".6f")
        deleted = state.get("num_deleted", 0)
        ends = (state["first_seq"], state["last_seq"])
        return Facts(identity, created, *ends, state["bytes"], limit, deleted)

    async def require_current_replicas(self, stream: Stream) -> None:
        """Raises BusUnavailableError if the stream's leader knows of a replica that lags, or can't be reached."""
        with translated_errors(stream):
            info = await self._jetstream.stream_info(stream.value)
        replicas = None if info.cluster is None else info.cluster.replicas
        if late := [replica.name or "unknown" for replica in replicas or () if not replica.current]:
            raise BusUnavailableError(f"replicas of {stream} lag: {', '.join(late)}")

    async def counts(self, stream: Stream, subject_filter: str) -> dict[str, int]:
        """The number of messages on each subject that matches, as the server counts them.

        Only for streams of at most 100,000 subjects: a response names no more.
        """
        with translated_errors(stream):
            info = await self._jetstream.stream_info(stream.value, subjects_filter=subject_filter)
        return dict(info.state.subjects or {})

    async def backlog(self, stream: Stream, durable: str) -> Backlog | None:
        """The state of a durable consumer; None if it does not exist."""
        with translated_errors(durable):
            try:
                return _backlog(await self._jetstream.consumer_info(stream.value, durable))
            except NotFoundError:
                return None

    async def progress(self, stream: Stream, durable: str) -> Backlog:
        """The state of a durable consumer that must exist."""
        if (backlog := await self.backlog(stream, durable)) is None:
            raise BusUnavailableError(f"NATS did not respond about {durable}: consumer not found")
        return backlog

    async def scan(
        self,
        stream: Stream,
        subject_filter: str,
        *,
        start: datetime | int = 1,
        up_to: int | None = None,
        complete: bool = False,
    ) -> AsyncGenerator[StoredMessage]:
        """Yields the stored messages that match, in order, up to the last one when the scan began.

        Args:
            stream: the stream to read; it must allow direct gets.
            subject_filter: one subject, wildcards allowed.
            start: the first sequence to read, or the earliest time (with its zone) of storing.
            up_to: the last sequence to read, if the caller knows it.
            complete: ask the stream's leader for the last message, in order to notice a replica that lags. If `up_to`
                is set, it must come from the leader. Its message need not match: the scan then reads all messages after
                the last match, too.

        Raises:
            BusUnavailableError: also if the scan must be `complete`, and the replica lags.
            BusError: NATS refuses the request.
            ValueError: the time has no zone.
        """
        first = _begin(start)
        to_match = up_to is None
        last = start - 1 if isinstance(start, int) else 0
        if up_to is None:
            end = await self._end(stream, subject_filter, complete=complete)
            if end is None or (end[1] < start if isinstance(start, datetime) else end[0] < start):
                return
            up_to = end[0]
        async with aclosing(self._walk(stream, {**first, "next_by_subj": subject_filter}, up_to=up_to)) as stored:
            async for message in stored:
                if (last := message.sequence) <= up_to:
                    yield message
                if last >= up_to:
                    return
        if not complete:
            return
        if not to_match:
            remaining = {**({"seq": last + 1} if last else first), "next_by_subj": ">"}
            async with aclosing(self._walk(stream, remaining, up_to=up_to)) as stored:
                async for message in stored:
                    last = message.sequence
                    if covers(subject_filter, message.subject):
                        yield message
        if last < up_to and (to_match or not await self._ends_before(stream, last, up_to)):
            _check_end(stream, last, up_to)

    async def _ends_before(self, stream: Stream, last: int, up_to: int) -> bool:
        """Returns True if the messages between two sequences, the second one included, were deleted.

        False if the leader does not answer, which alone knows.
        """
        try:
            end = await self._end(stream, everything_in(stream), complete=True)
        except BusUnavailableError:
            return False
        if end is None or end[0] <= last:
            return True
        # A replica that has a later message has all before it.
        async with aclosing(self._walk(stream, {"seq": last + 1, "next_by_subj": ">"}, batch=1)) as stored:
            following = await anext(stored, None)
        return following is not None and following.sequence > up_to

    async def first_since(self, stream: Stream, since: datetime) -> StoredMessage | None:
        """The first message that was stored at a time (with its zone) or later. Raises as `scan` does."""
        async with aclosing(self._walk(stream, {**_begin(since), "next_by_subj": ">"}, batch=1)) as stored:
            return await anext(stored, None)

    async def last_on(self, stream: Stream, subjects: Sequence[str]) -> AsyncGenerator[StoredMessage]:
        """Yields the newest message of each subject that has one. Raises as `scan` does."""
        for start in range(0, len(subjects), SUBJECTS_AT_ONCE):
            wanted = {"multi_last": list(subjects[start : start + SUBJECTS_AT_ONCE]), "seq": 1}
            async with aclosing(self._walk(stream, wanted)) as stored:
                async for message in stored:
                    yield message

    async def last_of_each(
        self, stream: Stream, subject_filter: str, *, complete: bool = False
    ) -> tuple[StoredMessage, ...]:
        """The newest message of every subject that matches, in the stream's order. Raises as `scan` does.

        For up to 1024 subjects, the server selects them. For more, all messages that match are read, which takes as
        long as `scan`; memory then holds one message per subject.
        """
        end = await self._end(stream, subject_filter, complete=complete)
        if end is None:
            return ()
        wanted = {"multi_last": [subject_filter], "seq": 1, "up_to_seq": end[0]}
        try:
            latest = [message async for message in self._walk(stream, wanted)]
        except _TooManySubjectsError:
            newest = {
                message.subject: message async for message in self.scan(stream, subject_filter, complete=complete)
            }
            return tuple(sorted(newest.values(), key=lambda message: message.sequence))
        if complete:
            _check_end(stream, latest[-1].sequence if latest else 0, end[0])
        return tuple(latest)

    async def newest(
        self,
        stream: Stream,
        subject_filter: str,
        *,
        limit: int,
        since: datetime,
        read: Callable[[StoredMessage], T | None],
    ) -> list[T]:
        """The contents of the newest messages that match, the latest first. Reads only as much as that takes.

        Raises as `scan` does.

        Args:
            stream: the stream to read; it must allow direct gets.
            subject_filter: one subject, wildcards allowed.
            limit: the most contents to return.
            since: the earliest time (with its zone) of storing.
            read: extracts the content to keep from a message, which is then dropped; None to skip the message.
        """
        wanted = {**_begin(since), "next_by_subj": subject_filter}
        async with aclosing(self._walk(stream, wanted, batch=1)) as stored:
            first = await anext(stored, None)
        end = await self._end(stream, subject_filter, complete=False)
        if first is None or end is None:
            return []
        newest: list[T] = []
        above = end[0] + 1
        span = LEAST_SPAN
        while first.sequence < above and len(newest) < limit:
            start = max(first.sequence, above - span)
            part: deque[T] = deque(maxlen=limit - len(newest))
            async with aclosing(self.scan(stream, subject_filter, start=start, up_to=above - 1)) as stored:
                async for message in stored:
                    if (content := read(message)) is not None:
                        part.append(content)
            newest += reversed(part)
            above = start
            span = span * 2
        return newest

    async def _end(self, stream: Stream, subject_filter: str, *, complete: bool) -> tuple[int, datetime] | None:
        """The sequence and time of the last message that matches; if `complete`, as the stream's leader knows it."""
        if not complete:
            request = self._jetstream.get_last_msg(stream.value, subject_filter, direct=True)
            last = await self._find(stream, request, subject_filter, decrypt=False)
            return None if last is None else (last.sequence, last.stored_at)
        with translated_errors(subject_filter):
            try:
                message = await self._jetstream.get_last_msg(stream.value, subject_filter)
            except NotFoundError:
                return None
        assert message.seq is not None
        assert message.time is not None
        return message.seq, message.time.astimezone(UTC)

    async def _find(
        self, stream: Stream, request: Coroutine[Any, Any, RawStreamMsg], about: str, *, decrypt: bool = True
    ) -> StoredMessage | None:
        with translated_errors(about):
            try:
                message = await request
            except NotFoundError:
                return None
            except nats.errors.NoRespondersError as error:
                raise _no_stream(stream) from error
        stored = StoredMessage.of(message.data, cast(Mapping[str, str], message.headers or {}))
        if self._cipher is None or not decrypt:
            return stored
        return replace(stored, data=self._cipher.decrypt_document(stored.data))

    async def _walk(
        self, stream: Stream, wanted: Mapping[str, object], *, up_to: int | None = None, batch: int = BATCH_MESSAGES
    ) -> AsyncGenerator[StoredMessage]:
        """Requests batches until no message is pending, and none after the sequence `up_to`."""
        async with _Inbox(self.connection(), stream) as inbox:
            while True:
                first = wanted.get("seq")
                remaining = up_to - first + 1 if up_to is not None and isinstance(first, int) else batch
                if remaining < 1:
                    return
                messages, pending = await inbox.batch(wanted, min(remaining, batch))
                sequence = 0
                for message in messages:
                    headers = message.headers or {}
                    for name in _OF_THE_BATCH:
                        headers.pop(name, None)
                    stored = StoredMessage.of(message.data, headers)
                    sequence = stored.sequence
                    yield stored
                if not (messages and pending):
                    return
                wanted = {name: value for name, value in wanted.items() if name != "start_time"} | {"seq": sequence + 1}

    @property
    def _jetstream(self) -> JetStreamContext:
        return self.connection().jetstream(timeout=LOOKUP_TIMEOUT_S)


def everything_in(stream: Stream) -> str:
    """The filter of all messages of a stream.

    Not `>`, of which the server looks only at the last sequence: if that message was deleted, it has none.
    """
    return {Stream.BODIES: "$O.>", Stream.ADVISORIES: "$JS.>"}.get(stream, "bw.>")


def _backlog(info: ConsumerInfo) -> Backlog:
    floor = info.ack_floor
    delivered = info.delivered
    return Backlog(
        waiting=info.num_pending or 0,
        in_progress=info.num_ack_pending or 0,
        acknowledged=floor.stream_seq if floor else 0,
        delivered=delivered.stream_seq if delivered else 0,
        deliveries=delivered.consumer_seq if delivered else 0,
    )


def _check_end(stream: Stream, last: int, up_to: int) -> None:
    if last < up_to:
        raise BusUnavailableError(f"a replica of {stream} lags: it has {last} of {up_to} messages")


def _begin(start: datetime | int) -> dict[str, object]:
    if isinstance(start, int):
        return {"seq": max(start, 1)}
    if start.tzinfo is None:
        raise ValueError(f"the time to start from needs a zone: {start.isoformat()}")
    return {"start_time": min(max(start, _FIRST), _LAST).astimezone(UTC).isoformat()}


def _no_stream(stream: Stream) -> BusUnavailableError:
    """Makes the error for direct gets without a responder: the stream does not exist, or its servers are down."""
    return BusUnavailableError(
        f"no server holds the stream {stream}: `breakwater setup` creates it; if it was created, wait for its servers"
    )


class _TooManySubjectsError(BusError):
    """More subjects match than the 1024 of which the server returns the last messages."""


class _Inbox:
    """A subscription that receives one batch at a time. Waiting for each message separately would cost more."""

    def __init__(self, client: Client, stream: Stream) -> None:
        self._client = client
        self._stream = stream
        self._name = client.new_inbox()
        self._messages: list[Msg] = []
        self._end: asyncio.Future[Mapping[str, str]] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Self:
        with translated_errors(self._stream):
            self._subscription = subscribe(self._client, self._name, self._hear)
        return self

    async def __aexit__(self, *_: object) -> None:
        unsubscribe(self._client, self._subscription)

    async def batch(self, wanted: Mapping[str, object], limit: int = BATCH_MESSAGES) -> tuple[list[Msg], int]:
        """Requests a batch. Returns its messages, and the number of messages that match after them."""
        self._messages = []
        self._end = asyncio.get_running_loop().create_future()
        request = {**wanted, "batch": limit, "max_bytes": BATCH_BYTES}
        with translated_errors(self._stream):
            async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                await publish(
                    self._client, f"$JS.API.DIRECT.GET.{self._stream}", json.dumps(request).encode(), self._name
                )
                end = await self._end
        match end.get("Status"):
            case "204":
                return self._messages, int(end["Nats-Num-Pending"])
            case "404":
                return [], 0
            case "413":
                raise _TooManySubjectsError(f"too many subjects of {self._stream} match for one response")
            case "503":
                raise _no_stream(self._stream)
            case status:
                raise BusError(f"NATS refuses to read {self._stream}: {status} {end.get('Description', '')}")

    def _hear(self, message: Msg) -> None:
        headers = message.headers or {}
        if "Nats-Sequence" in headers:
            self._messages.append(message)
        elif not self._end.done():
            self._end.set_result(headers)
