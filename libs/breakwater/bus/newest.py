"""Reading a stream from its end: the newest messages, without reading all that came before them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import aclosing
from datetime import datetime
from typing import TypeVar

from breakwater.bus.lookup import Connection, Found, Lookup
from breakwater.bus.scan import first_since, scan
from breakwater.contracts.subjects import Stream

LEAST_SPAN = 128
"""How many sequences are looked at first. Each time that they hold too little, it is twice as many."""

T = TypeVar("T")


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
