"""`/api/v1/events`: all that happens, as server-sent events."""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import suppress

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from breakwater.bus.errors import BusError
from breakwater.contracts.http import EventGap, EventQuery
from services.request.event_log import EventLog, LoggedEvent, LogTail
from services.request.event_stream import EventStream, OpenStreams, Sender, comment, send_part, server_sent, supervise
from services.request.parsing import read_query
from services.request.problems import Problem, not_read

_ID = re.compile(r"(\d{1,19})-(\d{1,19})\Z", re.ASCII)


class EventStreams:
    """The streams of events of this process."""

    def __init__(self, streams: OpenStreams, log: EventLog) -> None:
        self._streams = streams
        self._log = log

    async def follow(self, request: Request) -> Response:
        """GET: the stream."""
        query = read_query(request, EventQuery)
        return _Following(self._streams, self._log, query, request, _places(request))


def _places(request: Request) -> tuple[int, ...] | None:
    """Where a reader was who comes back: a sequence of each stream."""
    given = request.headers.get("last-event-id")
    if not given:
        return None
    if (found := _ID.match(given)) is None:
        message = f"Last-Event-ID: must be the id of an event of this stream, such as 1042-17, and not {given[:50]!r}"
        raise Problem(422, "invalid_last_event_id", message)
    return tuple(map(int, found.groups()))


class _Following(EventStream):
    """One stream. Problems that are found before it has begun are answered as any other."""

    def __init__(
        self, streams: OpenStreams, log: EventLog, query: EventQuery, request: Request, places: tuple[int, ...] | None
    ) -> None:
        super().__init__()
        self._streams = streams
        self._log = log
        self._query = query
        self._request = request
        self._places = None if places is None else list(places)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends events until the reader goes away or takes nothing, its key is revoked, or the process stops."""
        with self._streams.open(self._request) as ending:
            try:
                async with self._log.following() as now:
                    self._places = self._places or list(now)
                    await self.begin(send)
                    if scope["method"] == "HEAD":
                        await send_part(send, b"", more=False)
                        return
                    await supervise(self._request, ending, receive, send, self._write)
            except BusError as error:
                raise not_read(error) from error

    async def _write(self, sender: Sender) -> None:
        # Said before the first event: who loses the connection before that misses nothing either.
        await self._say(sender, "events follow")
        while True:
            news = self._log.news
            moved = False
            for number, tail in enumerate(self._log.tails):
                # An outage is no reason to end: what is missed now is read later.
                with suppress(BusError):
                    moved = await self._write_part(sender, number, tail) or moved
            if time.monotonic() >= sender.silent_until:
                await self._say(sender, "still here")
            if not moved:
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(sender.silent_until - time.monotonic(), 0.0)):
                        await news.wait()

    async def _say(self, sender: Sender, text: str) -> None:
        """A comment, and the place up to which all was sent or passed over."""
        await sender.send(f"id: {self._place}\n".encode() + comment(text))

    async def _write_part(self, sender: Sender, number: int, tail: LogTail) -> bool:
        """Sends what there is next of one stream; whether there was anything, to be sent or passed over."""
        assert self._places is not None
        before = self._places[number]
        part = await tail.after(before, self._log.reading)
        written = list[bytes]()
        if part.gap:
            self._places[number] = part.at
            gap = EventGap(stream=tail.name, after=before, next=part.at + 1)
            written.append(server_sent("gap", gap.json_bytes(), self._place))
        for event in filter(self._wanted, part.events):
            self._places[number] = event.sequence
            written.append(server_sent(event.kind, event.data, self._place))
        self._places[number] = part.at
        if written:
            await sender.send(b"".join(written))
        return part.at != before

    def _wanted(self, event: LoggedEvent) -> bool:
        return event.kind in self._query.kinds and self._query.agent in (None, event.agent)

    @property
    def _place(self) -> str:
        return "-".join(map(str, self._places or ()))
