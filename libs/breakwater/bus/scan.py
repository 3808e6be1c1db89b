"""Reading a part of a stream from its store, without a consumer: batches of direct gets (nats-server 2.11, ADR-31).

In a cluster any replica answers, and one that is behind ends that much earlier: by some moments, or by all that was
stored while it was cut off from the others. Whoever needs to know that nothing is missing asks for the `whole`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import TypeVar

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from breakwater.bus.errors import BusError, BusUnavailable
from breakwater.bus.lookup import LOOKUP_TIMEOUT_S, Connection, Found, Lookup, found, no_stream
from breakwater.contracts.subjects import Stream

LEAST_SPAN = 128
"""How many sequences `newest` looks at first. Each time that they hold too little, it is twice as many."""

T = TypeVar("T")

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
    first = _begin(start)
    to_match = whole and up_to is None
    if to_match:
        last_one = await Lookup(connection).end(stream, subject_filter)
        if last_one is None or (last_one[1] < start if isinstance(start, datetime) else last_one[0] < start):
            return
        up_to = last_one[0]
    if up_to is None:
        end = await Lookup(connection).last(stream, subject_filter)
        if end is None:
            return
        up_to = end.sequence
    wanted, last = {**first, "next_by_subj": subject_filter}, 0
    async with aclosing(_walk(connection(), stream, wanted, up_to=up_to)) as stored:
        async for message in stored:
            if (last := message.sequence) <= up_to:
                yield message
            if last >= up_to:
                return
    if to_match:
        raise _behind(stream, last, up_to)
    if not whole:
        return
    rest = {"seq": last + 1} if last else first
    async with aclosing(_walk(connection(), stream, {**rest, "next_by_subj": ">"}, up_to=up_to)) as stored:
        async for message in stored:
            last = message.sequence
            if _matches(message.subject, subject_filter):
                yield message
    if last < up_to:
        raise _behind(stream, last, up_to)


def _behind(stream: Stream, last: int, up_to: int) -> BusUnavailable:
    return BusUnavailable(f"a replica of {stream} is behind: it ends at message {last} of {up_to}")


async def first_since(connection: Connection, stream: Stream, subject_filter: str, since: datetime) -> int | None:
    """The sequence of the first message that matches and was stored from a time on. Raises as `scan` does."""
    inbox = _Inbox(connection(), stream)
    await inbox.open()
    try:
        messages, _ = await inbox.batch({**_begin(since), "next_by_subj": subject_filter}, 1)
    finally:
        await inbox.close()
    return found(messages[0].data, messages[0].headers or {}).sequence if messages else None


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

    Up to 1024 subjects the server picks them out. Beyond, all that matches is read, which takes as long as `scan`.

    Raises:
        BusUnavailable: NATS does not answer in time, or has no such stream; `whole`, and a replica is behind.
        BusError: NATS refuses the request.
    """
    if whole:
        of_leader = await Lookup(connection).end(stream, subject_filter)
        up_to = None if of_leader is None else of_leader[0]
    else:
        end = await Lookup(connection).last(stream, subject_filter)
        up_to = None if end is None else end.sequence
    if up_to is None:
        return ()
    wanted = {"multi_last": [subject_filter], "seq": 1, "up_to_seq": up_to}
    try:
        latest = [message async for message in _walk(connection(), stream, wanted)]
    except _TooManySubjectsError:
        stored = scan(connection, stream, subject_filter, whole=whole)
        newest = {message.subject: message async for message in stored}
        return tuple(sorted(newest.values(), key=lambda message: message.sequence))
    if whole and (not latest or latest[-1].sequence < up_to):
        raise _behind(stream, latest[-1].sequence if latest else 0, up_to)
    return tuple(latest)


def _matches(subject: str, subject_filter: str) -> bool:
    tokens, wanted = subject.split("."), subject_filter.split(".")
    if wanted[-1] == ">":
        tokens, wanted = tokens[: len(wanted) - 1], wanted[:-1]
    return len(tokens) == len(wanted) and all(one in ("*", other) for one, other in zip(wanted, tokens, strict=True))


def _begin(start: datetime | int) -> dict[str, object]:
    if isinstance(start, int):
        return {"seq": max(start, 1)}
    if start.tzinfo is None:
        raise ValueError(f"the time to start from needs a zone: {start.isoformat()}")
    return {"start_time": min(max(start, _FIRST), _LAST).astimezone(UTC).isoformat()}


async def _walk(
    client: Client, stream: Stream, wanted: Mapping[str, object], *, up_to: int | None = None
) -> AsyncGenerator[Found]:
    """Asks for batch after batch until nothing is pending. `up_to`: what is behind it is not wanted."""
    inbox = _Inbox(client, stream)
    await inbox.open()
    try:
        while True:
            first = wanted.get("seq")
            left = up_to - first + 1 if up_to is not None and isinstance(first, int) else BATCH_MESSAGES
            if left < 1:
                return
            messages, pending = await inbox.batch(wanted, min(left, BATCH_MESSAGES))
            sequence = 0
            for message in messages:
                headers = message.headers or {}
                for name in _OF_THE_BATCH:
                    headers.pop(name, None)
                stored = found(message.data, headers)
                sequence = stored.sequence
                yield stored
            if not (messages and pending):
                return
            wanted = {name: value for name, value in wanted.items() if name != "start_time"} | {"seq": sequence + 1}
    finally:
        await inbox.close()


class _Inbox:
    """A subscription, and one batch at a time that comes to it. Waiting for each message by itself would cost more."""

    def __init__(self, client: Client, stream: Stream) -> None:
        self._client, self._stream = client, stream
        self._name = client.new_inbox()
        self._messages: list[Msg] = []
        self._end: asyncio.Future[Mapping[str, str]] = asyncio.get_running_loop().create_future()

    async def open(self) -> None:
        try:
            self._subscription = await self._client.subscribe(self._name, cb=self._hear)
        except (nats.errors.Error, OSError) as error:
            raise BusUnavailable(f"NATS is not connected: {error}") from error

    async def close(self) -> None:
        # A connection that is closed has no subscriptions left.
        with contextlib.suppress(nats.errors.Error):
            await self._subscription.unsubscribe()

    async def batch(self, wanted: Mapping[str, object], most: int = BATCH_MESSAGES) -> tuple[list[Msg], int]:
        """The messages, and how many more match that come after them."""
        self._messages, self._end = [], asyncio.get_running_loop().create_future()
        request = {**wanted, "batch": most, "max_bytes": BATCH_BYTES}
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                await self._client.publish(
                    f"$JS.API.DIRECT.GET.{self._stream}", json.dumps(request).encode(), reply=self._name
                )
                end = await self._end
        except (TimeoutError, nats.errors.Error, OSError) as error:
            reason = str(error) or f"no whole batch in {LOOKUP_TIMEOUT_S:g} s"
            raise BusUnavailable(f"NATS did not answer for {self._stream}: {reason}") from error
        match end.get("Status"):
            case "204":
                return self._messages, int(end["Nats-Num-Pending"])
            case "404":
                return [], 0
            case "413":
                raise _TooManySubjectsError(f"too many subjects of {self._stream} match for one answer")
            case "503":
                raise no_stream(self._stream)
            case status:
                raise BusError(f"NATS refuses to read {self._stream}: {status} {end.get('Description', '')}")

    async def _hear(self, message: Msg) -> None:
        headers = message.headers or {}
        if "Nats-Sequence" in headers:
            self._messages.append(message)
        elif not self._end.done():
            self._end.set_result(headers)


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
        BusUnavailable: NATS does not answer in time, or has no such stream.
        BusError: NATS refuses the request.
        ValueError: the time has no zone.
    """
    first = await first_since(connection, stream, subject_filter, since)
    last = await Lookup(connection).last(stream, subject_filter)
    if first is None or last is None:
        return []
    found: list[T] = []
    above, span = last.sequence + 1, LEAST_SPAN
    while first < above and len(found) < most:
        start = max(first, above - span)
        part: deque[T] = deque(maxlen=most - len(found))
        async with aclosing(scan(connection, stream, subject_filter, start=start, up_to=above - 1)) as stored:
            async for message in stored:
                if (kept := read(message)) is not None:
                    part.append(kept)
        found += reversed(part)
        above, span = start, span * 2
    return found
