"""Server-sent events, read from a body as it arrives."""

from __future__ import annotations

from collections.abc import Iterator

MAX_EVENT_BYTES = 4 * 1024 * 1024


class EventTooLargeError(Exception):
    """An event has more bytes than any may have."""


class EventReader:
    """Takes a body in pieces, and gives the data of its events. Names, ids and comments are passed over."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The data of the events that are whole now. Raises EventTooLargeError."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                data, self._data = b"\n".join(self._data), []
                yield data
        if len(self._rest) + sum(map(len, self._data)) > MAX_EVENT_BYTES:
            raise EventTooLargeError(f"an event of the stream is over {MAX_EVENT_BYTES} bytes")
