"""Server-sent events, read from a body as it arrives."""

from __future__ import annotations

from collections.abc import Iterator

from breakwater.kernel.errors import BreakwaterError

MAX_EVENT_BYTES = 4 * 1024 * 1024
_MARK = b"\xef\xbb\xbf"
"""A byte-order mark, which may come before the first event."""


class EventTooLargeError(BreakwaterError):
    """An event has more bytes than any may have."""


class EventReader:
    """Takes a body in pieces, and gives its events. Comments, and fields but for names and data, are passed over."""

    def __init__(self) -> None:
        self._first = True
        self._rest = b""
        self._name = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Names and data of the events that are whole now, but those without data. Raises EventTooLargeError."""
        body = self._rest + piece
        if self._first and not _MARK.startswith(body):
            self._first = False
            body = body.removeprefix(_MARK)
        if b"\r" in body:
            # The next piece may begin with the other half of a line's end.
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
