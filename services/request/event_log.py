"""What EVENTS and ALERTS hold, as the stream of events has it, read once for all who follow it.

Events are read from the store and not heard by subscription: they have sequences there, so that a reader who comes
back goes on exactly where it was, and nothing is missed while a connection is lost. The newest are kept in memory;
whoever is further behind has the store read for itself, by as much as it takes at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from breakwater import background
from breakwater.bus.errors import BusError
from breakwater.bus.lookup import Connection, Found, Lookup, scan
from breakwater.bus.records import read_record
from breakwater.contracts.alerts import Alert
from breakwater.contracts.events import BreakerTransition, BudgetEvent, GuardEvent
from breakwater.contracts.execution import Attempt, Execution, ExecutionSummary
from breakwater.contracts.subjects import Stream
from breakwater.outage import Outage

POLL_S = 0.5
"""How often it is looked for new events, while anyone follows them."""

AT_ONCE = 100
"""Events that a reader is given at once, and the memory that it takes."""

KEPT = 5_000
"""Of the newest events of each stream, in memory."""

_READ_AT_ONCE = 2
"""Readers that the store is read for at a time: a batch may have megabytes until it is rendered."""

_OTHERS = {"breakers": BreakerTransition, "budgets": BudgetEvent, "guards": GuardEvent, "alerts": Alert}


@dataclass(frozen=True, slots=True)
class LoggedEvent:
    """An event, ready to be sent."""

    sequence: int
    kind: str
    agent: str | None
    data: bytes
    """JSON on one line."""


@dataclass(frozen=True, slots=True)
class Part:
    """What follows a place in a stream."""

    events: tuple[LoggedEvent, ...]
    at: int
    """The place behind it: all up to this sequence is in it, or is nothing that can be sent."""
    gap: bool = False
    """Whether what lies in between was removed."""


class LogTail:
    """One stream of the bus."""

    def __init__(self, name: Literal["EVENTS", "ALERTS"], connection: Connection) -> None:
        self.name: Literal["EVENTS", "ALERTS"] = name
        self._stream = Stream(name)
        self._connection = connection
        self._newest: deque[LoggedEvent] = deque(maxlen=KEPT)
        self._identity = ""
        self._first = self._last = 0
        """What the stream holds, when it was last asked."""
        self._begin = self._end = 0
        """All behind the one and up to the other is among the newest, if it can be sent."""

    async def look(self) -> int:
        """Asks what the stream holds, and returns its last sequence. Raises BusUnavailable."""
        facts = await Lookup(self._connection).facts(self._stream)
        if facts.identity != self._identity:
            self._identity, self._last = facts.identity, facts.last
            self.start()
        # Of two answers the later one may come first.
        self._first, self._last = facts.first, max(self._last, facts.last)
        return self._last

    def start(self) -> None:
        """Forgets what it has, and begins with what is published from now on."""
        self._newest.clear()
        self._begin = self._end = self._last

    async def read_on(self) -> bool:
        """Reads what is new; whether there was anything. Raises BusError."""
        last, before = await self.look(), self._end
        async with aclosing(self._stored(before, last)) as stored:
            async for message in stored:
                if (event := logged(message)) is not None:
                    if len(self._newest) == KEPT:
                        self._begin = self._newest[0].sequence
                    self._newest.append(event)
                self._end = message.sequence
        return self._end > before

    async def after(self, place: int, reading: asyncio.Semaphore) -> Part:
        """What follows a place; nothing where nothing does yet. Raises BusError."""
        if place > self._last:
            return Part((), self._last, gap=True)
        if place + 1 < self._first:
            return Part((), self._first - 1, gap=True)
        if place >= self._begin:
            events = tuple([event for event in self._newest if event.sequence > place][:AT_ONCE])
            return Part(events, events[-1].sequence if len(events) == AT_ONCE else max(place, self._end))
        found: list[LoggedEvent] = []
        async with reading, aclosing(self._stored(place, min(place + AT_ONCE, self._begin))) as stored:
            async for message in stored:
                if (event := logged(message)) is not None:
                    found.append(event)
                place = message.sequence
        return Part(tuple(found), place)

    def _stored(self, after: int, up_to: int) -> AsyncGenerator[Found]:
        return scan(self._connection, self._stream, "bw.>", start=after + 1, up_to=up_to)


class EventLog:
    """Both streams, read on for as long as anyone follows them."""

    def __init__(self, connection: Connection) -> None:
        self.tails = (LogTail("EVENTS", connection), LogTail("ALERTS", connection))
        self.reading = asyncio.Semaphore(_READ_AT_ONCE)
        self._followers = 0
        self._reading_on: asyncio.Task[None] | None = None
        self.news = asyncio.Event()
        """Set when there are new events, and replaced then: taken before what is known is read, it misses none."""
        self._outage = Outage("nats")

    @asynccontextmanager
    async def following(self) -> AsyncGenerator[tuple[int, ...]]:
        """Has new events read while the block runs; gives the last sequence of each stream. Raises BusUnavailable."""
        now = tuple([await tail.look() for tail in self.tails])
        if self._followers == 0:
            for tail in self.tails:
                tail.start()
            self._reading_on = asyncio.create_task(self._read_on())
        self._followers += 1
        try:
            yield now
        finally:
            self._followers -= 1
            if self._followers == 0 and self._reading_on is not None:
                await background.stop(self._reading_on)

    async def _read_on(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            # In an outage who follows is sent comments, and what was missed once NATS answers.
            await self._outage.run_logged(self._look_for_news, expected=BusError)

    async def _look_for_news(self) -> None:
        if any([await tail.read_on() for tail in self.tails]):
            self.news.set()
            self.news = asyncio.Event()


def logged(message: Found) -> LoggedEvent | None:
    """A stored message as it is sent; None, and a line in the log, where it is no event of ours.

    Of an execution only what a list shows: its texts may have megabytes, and be encrypted.
    """
    kind = message.subject.split(".", 2)[1]
    if kind == "attempts":
        event = read_record(message, Attempt)
    elif kind == "executions":
        record = read_record(message, Execution)
        event = None if record is None else ExecutionSummary.of(record)
    else:
        event = message.read(_OTHERS[kind]) if kind in _OTHERS else None
    return None if event is None else LoggedEvent(message.sequence, kind, event.agent, event.json_bytes())
