"""`/api/v1/events`: EVENTS and ALERTS as server-sent events, read once for all readers.

Events are read from the streams, and not received by subscription. Their sequences there let a reader who comes back
continue exactly where it was, and nothing is missed while a connection is lost. The newest events are kept in memory;
for a reader that is further behind, the stream is read in batches.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from breakwater.alerts.contract import Alert
from breakwater.breakers.contract import BreakerTransition
from breakwater.identity.event_stream import Ending, FollowedStream, OpenStreams, Sender, comment, server_sent
from breakwater.identity.operations import operation
from breakwater.jobs.contract.execution import Attempt, Execution, ExecutionSummary
from breakwater.jobs.store.records import read_record
from breakwater.kernel.http.contract import ALL_SENT, EventGap, EventQuery
from breakwater.kernel.http.parsing import read_query
from breakwater.kernel.http.problems import RequestError
from breakwater.kernel.nats.cloud_events import EventAttributes
from breakwater.kernel.nats.core import ClientGetter
from breakwater.kernel.nats.errors import BusError
from breakwater.kernel.nats.lookup import Lookup, StoredMessage
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.process import background
from breakwater.kernel.process.outage import Outage
from breakwater.limits.contract import BudgetEvent, GuardEvent, LimitEvent

_ID = re.compile(r"(\d{1,19})-(\d{1,19})\Z", re.ASCII)

POLL_S = 0.5
"""Interval of looks for new events, while anyone follows them."""

AT_ONCE = 100
"""The most events in one batch for a reader, which limits the memory that it takes."""

MAX_IN_MEMORY = 5_000
"""The number of newest events of each stream in memory."""

_READ_AT_ONCE = 2
"""Readers for whom the streams are read at the same time: a batch may have megabytes until it is rendered."""

_OTHERS = {
    "breakers": BreakerTransition,
    "budgets": BudgetEvent,
    "guards": GuardEvent,
    "limits": LimitEvent,
    "alerts": Alert,
}


@dataclass(frozen=True, slots=True)
class LoggedEvent:
    """An event, ready to be sent."""

    sequence: int
    kind: str
    agent: str | None
    data: bytes
    """JSON on one line."""
    attributes: EventAttributes
    stored_at: datetime


@dataclass(frozen=True, slots=True)
class LogBatch:
    """The events behind a place in a stream."""

    events: tuple[LoggedEvent, ...]
    at: int
    """The place after the batch: everything up to this sequence is in it, or can't be sent."""
    gap: bool = False
    """True if the stream has removed events before the batch."""


class LogTail:
    """The newest events of a stream of the bus."""

    def __init__(self, name: Literal["EVENTS", "ALERTS"], connection: ClientGetter) -> None:
        self.name: Literal["EVENTS", "ALERTS"] = name
        self._stream = Stream(name)
        self._connection = connection
        self._newest: deque[LoggedEvent] = deque(maxlen=MAX_IN_MEMORY)
        self._identity = ""
        self._first = self._last = 0
        """First and last sequence of the stream, as of the last look."""
        self._begin = self._end = 0
        """The newest events are complete after the first and up to the second of these sequences."""

    async def look(self) -> int:
        """Looks up the bounds of the stream, and returns its last sequence. Raises BusUnavailableError."""
        facts = await Lookup(self._connection).facts(self._stream)
        if facts.identity != self._identity:
            self._identity = facts.identity
            self._last = facts.last
            self.start()
        # Two concurrent look-ups may be answered in either order.
        self._first = facts.first
        self._last = max(self._last, facts.last)
        return self._last

    def start(self) -> None:
        """Forgets the events in memory, and begins with those that are published from now on."""
        self._newest.clear()
        self._begin = self._end = self._last

    async def read_on(self) -> bool:
        """Reads new events. Returns True if there were any. Raises BusError."""
        last = await self.look()
        before = self._end
        async with aclosing(self._scan_stored(before, last)) as stored:
            async for message in stored:
                # Another task may have read it meanwhile: the one before this one, which is being stopped.
                if message.sequence <= self._end:
                    continue
                if (event := read_event(message)) is not None:
                    if len(self._newest) == MAX_IN_MEMORY:
                        self._begin = self._newest[0].sequence
                    self._newest.append(event)
                self._end = message.sequence
        return self._end > before

    async def place_before(self, since: datetime) -> int:
        """Returns the place before the first event that was stored at a time or later. Raises BusError."""
        first = await Lookup(self._connection).first_since(self._stream, since)
        return self._last if first is None else first.sequence - 1

    async def after(self, place: int, reading: asyncio.Semaphore) -> LogBatch:
        """Returns the events after a place, perhaps none yet. Raises BusError."""
        if place > self._last:
            return LogBatch((), self._last, gap=True)
        if place + 1 < self._first:
            return LogBatch((), self._first - 1, gap=True)
        if place >= self._begin:
            recent_events = tuple([event for event in self._newest if event.sequence > place][:AT_ONCE])
            return LogBatch(
                recent_events, recent_events[-1].sequence if len(recent_events) == AT_ONCE else max(place, self._end)
            )
        events: list[LoggedEvent] = []
        async with reading, aclosing(self._scan_stored(place, min(place + AT_ONCE, self._begin))) as stored:
            async for message in stored:
                if (event := read_event(message)) is not None:
                    events.append(event)
                place = message.sequence
        return LogBatch(tuple(events), place)

    def _scan_stored(self, after: int, up_to: int) -> AsyncGenerator[StoredMessage]:
        return Lookup(self._connection).scan(self._stream, "bw.>", start=after + 1, up_to=up_to)


class EventLog:
    """The events of both streams. New ones are read for as long as anyone follows them."""

    def __init__(self, connection: ClientGetter) -> None:
        self.tails = (LogTail("EVENTS", connection), LogTail("ALERTS", connection))
        self.reading = asyncio.Semaphore(_READ_AT_ONCE)
        self._followers = 0
        self._reading_on: asyncio.Task[None] | None = None
        self.news = asyncio.Event()
        """Set and replaced when there are new events. A reader that takes it before reading misses no event."""
        self._outage = Outage("nats")

    @asynccontextmanager
    async def following(self) -> AsyncGenerator[tuple[int, ...]]:
        """Reads new events while the block runs, and yields the last sequence of each stream.

        Raises:
            BusUnavailableError: NATS can't be read.
        """
        last_sequences = tuple([await tail.look() for tail in self.tails])
        if self._followers == 0:
            for tail in self.tails:
                tail.start()
            self._reading_on = asyncio.create_task(self._read_on())
        self._followers += 1
        try:
            yield last_sequences
        finally:
            self._followers -= 1
            if self._followers == 0 and self._reading_on is not None:
                await background.stop(self._reading_on)

    async def _read_on(self) -> None:
        async def look() -> None:
            if any([await tail.read_on() for tail in self.tails]):
                self.news.set()
                self.news = asyncio.Event()

        while True:
            await asyncio.sleep(POLL_S)
            # During an outage, readers get comments; they get the missed events once NATS answers.
            await self._outage.run_logged(look, expected=BusError)


def read_event(message: StoredMessage) -> LoggedEvent | None:
    """Renders a stored message as an event; logs and returns None if it is not one of Breakwater's.

    Of an execution, only the summary is sent: its texts may have megabytes, and may be encrypted.
    """
    kind = message.subject.split(".", 2)[1]
    if kind == "attempts":
        event = read_record(message, Attempt)
    elif kind == "executions":
        record = read_record(message, Execution)
        event = None if record is None else ExecutionSummary.of(record)
    else:
        event = message.read(_OTHERS[kind]) if kind in _OTHERS else None
    if event is None:
        return None
    attributes = EventAttributes.of(message.subject, message.headers)
    agent = None if isinstance(event, LimitEvent) else event.agent
    return LoggedEvent(message.sequence, kind, agent, event.json_bytes(), attributes, message.stored_at)


@dataclass(frozen=True, slots=True)
class EventRoutes:
    """The streams of events of this process."""

    streams: OpenStreams
    log: EventLog

    @operation(
        "GET",
        "/api/v1/events",
        tag="events",
        summary="Follow all events live",
        description="Server-sent events. The name of each is its kind, and its data an `Attempt` (`attempts`), "
        "`ExecutionSummary` (`executions`), `BreakerTransition` (`breakers`), `BudgetEvent` (`budgets`), `GuardEvent` "
        "(`guards`) or `Alert` (`alerts`). Events of one stream of the bus come in its order and each once; alerts are "
        "in a stream of their own. The stream begins now, at `since`, or after the event of `Last-Event-ID`, if "
        "that is stored: for 72 hours by default, and alerts for thirty days. Stored events come in the order of their "
        "storage. What is not stored any more is reported by an event `gap`, with an `EventGap`. Comments keep an idle "
        "stream open; they carry an id, too. A reader that takes nothing for a minute is cut off, and misses nothing "
        "if it connects again with its last id.",
        query=EventQuery,
        headers={"Last-Event-ID": "The id of the last event that was received, such as `1042-17`."},
        results={200: ("The stream.", str)},
        content_type="text/event-stream",
        errors={
            422: "A parameter is wrong (`invalid_query`), or the id (`invalid_last_event_id`).",
            429: "The API key already has 50 streams open in this process (`too_many_streams`).",
            503: "NATS is unavailable (`unavailable`), or this process already has 200 streams open, the maximum "
            "(`too_many_streams`).",
        },
    )
    async def follow_events(self, request: Request) -> Response:
        """Streams the events."""
        query = read_query(request, EventQuery)
        return _EventFollower(self.streams, self.log, query, request, _places(request))


def _places(request: Request) -> tuple[int, ...] | None:
    """Returns the place of a reader who comes back, as a sequence of each stream; None for a new reader."""
    last_id = request.headers.get("last-event-id")
    if not last_id:
        return None
    if (id_match := _ID.match(last_id)) is None:
        message = f"Last-Event-ID: must be the id of an event of this stream, such as 1042-17, and not {last_id[:50]!r}"
        raise RequestError(422, "invalid_last_event_id", message)
    return tuple(map(int, id_match.groups()))


class _EventFollower(FollowedStream):
    def __init__(
        self, streams: OpenStreams, log: EventLog, query: EventQuery, request: Request, places: tuple[int, ...] | None
    ) -> None:
        super().__init__(streams, request)
        self._log = log
        self._query = query
        self._places = None if places is None else list(places)

    @asynccontextmanager
    async def open_source(self, ending: Ending) -> AsyncGenerator[Callable[[Sender], Coroutine[Any, Any, None]]]:
        """Has the log read new events."""
        del ending
        async with self._log.following() as last_sequences:
            if self._places is None and (since := self._query.since) is not None:
                self._places = [await tail.place_before(since) for tail in self._log.tails]
            self._places = self._places or list(last_sequences)
            yield partial(self._write, last_sequences)

    async def _write(self, last_sequences: Sequence[int], sender: Sender) -> None:
        # The comment has an id, so that a reader that loses its connection before the first event misses nothing.
        await self._say(sender, "events follow")
        await self._write_stored(last_sequences, sender)
        if not self._query.follow:
            await sender.send(f"id: {self._place}\n".encode() + comment(ALL_SENT), more=False)
            return
        while True:
            news = self._log.news
            moved = False
            for number, tail in enumerate(self._log.tails):
                # An outage does not end the stream: missed events are read later.
                with suppress(BusError):
                    moved = await self._write_part(sender, number, tail) or moved
            if not sender.silence.comment_due_s():
                await self._say(sender, "still here")
            if not moved:
                with suppress(TimeoutError):
                    async with asyncio.timeout(sender.silence.comment_due_s()):
                        await news.wait()

    async def _write_stored(self, last_sequences: Sequence[int], sender: Sender) -> None:
        """Sends what was stored when the stream began, of all streams in the order in which it was stored."""
        assert self._places is not None
        read_up_to = list(self._places)
        unsent = [deque[LoggedEvent]() for _ in self._log.tails]
        while True:
            for number, tail in enumerate(self._log.tails):
                while not unsent[number] and read_up_to[number] < last_sequences[number]:
                    try:
                        batch = await tail.after(read_up_to[number], self._log.reading)
                    except BusError:
                        await sender.send_due_comment()
                        await asyncio.sleep(POLL_S)
                        continue
                    if batch.gap:
                        await sender.send(self._gap(number, read_up_to[number], batch))
                    if batch.at == read_up_to[number]:
                        await asyncio.sleep(POLL_S)  # they are about to be read
                    unsent[number] += batch.events
                    read_up_to[number] = batch.at
            numbers = [number for number, events in enumerate(unsent) if events]
            if not numbers:
                self._places = read_up_to
                return
            written = list[bytes]()
            while all(unsent[number] for number in numbers):
                number = min(numbers, key=lambda number: unsent[number][0].stored_at)
                event = unsent[number].popleft()
                self._places[number] = event.sequence
                if self._matches(event):
                    written.append(self._written(event))
            if written:
                await sender.send(b"".join(written))

    def _written(self, event: LoggedEvent) -> bytes:
        data = event.attributes.envelope(event.data) if self._query.cloudevents else event.data
        return server_sent(event.kind, data, self._place)

    def _gap(self, number: int, before: int, batch: LogBatch) -> bytes:
        assert self._places is not None
        self._places[number] = batch.at
        gap = EventGap(stream=self._log.tails[number].name, after=before, next=batch.at + 1)
        return server_sent("gap", gap.json_bytes(), self._place)

    async def _say(self, sender: Sender, text: str) -> None:
        """Sends a comment with the reader's place, up to which all events were sent or filtered out."""
        await sender.send(f"id: {self._place}\n".encode() + comment(text))

    async def _write_part(self, sender: Sender, number: int, tail: LogTail) -> bool:
        """Sends the next batch of one stream. Returns True if there were events, even if all were filtered out."""
        assert self._places is not None
        before = self._places[number]
        batch = await tail.after(before, self._log.reading)
        written = list[bytes]()
        if batch.gap:
            written.append(self._gap(number, before, batch))
        for event in filter(self._matches, batch.events):
            self._places[number] = event.sequence
            written.append(self._written(event))
        self._places[number] = batch.at
        if written:
            await sender.send(b"".join(written))
        return batch.at != before

    def _matches(self, event: LoggedEvent) -> bool:
        return event.kind in self._query.kinds and self._query.agent in (None, event.agent)

    @property
    def _place(self) -> str:
        return "-".join(map(str, self._places or ()))
