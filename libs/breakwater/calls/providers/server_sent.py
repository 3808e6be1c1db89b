"""Server-sent events, read from a body as it arrives."""

from __future__ import annotations

from collections.abc import Iterator

from breakwater.kernel.errors import BreakwaterError

MAX_EVENT_BYTES = 4 * 1024 * 1024
_MARK = b"\xef\xbb\xbf"
"""A byte-order mark, which may precede the first event."""


class EventTooLargeError(BreakwaterError):
    """An event of a stream is too large."""


class EventReader:
    """Takes a body in pieces and yields its events. Comments, and fields other than names and data, are skipped."""

    def __init__(self) -> None:
        self._first = True
        self._rest = b""
        self._name = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Takes the next piece. Yields name and data of each event that is complete, and skips events without data.

        Raises:
            EventTooLargeError: the event that is not complete yet is too large.
        """
        body = self._rest + piece
        if self._first and not _MARK.startswith(body):
            self._first = False
            body = body.removeprefix(_MARK)
        if b"\r" in body:
            # A carriage return at the end may be the first half of a line break.
            half = b"\r" if body.endswith(b"\r") else b""
            body = body.removesuffix(half).replace(b"\r\n", b"\n").replace(b"\r", b"\n") + half
        *lines, self._rest = body.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].strip())
            elif line.startswith(b"event:"):
                self._name = line[6:].strip()
            elif not line:
                name = self._name
                data = b"\n".join(self._data)
                self._name = b""
                self._data = []
                if data:
                    yield name, data
        if len(self._rest) + sum(map(len, self._data)) > MAX_EVENT_BYTES:
            raise EventTooLargeError(f"an event of the stream is over {MAX_EVENT_BYTES} bytes")

    def end(self) -> Iterator[tuple[bytes, bytes]]:
        """Yields the last event of a body that lacks the empty line that ends it."""
        yield from self.feed(b"\n\n")
