"""Server-sent events, read from a body as it arrives."""

from __future__ import annotations

from collections.abc import Iterator

MAX_EVENT_BYTES = 4 * 1024 * 1024


class EventTooLargeError(Exception):
    """An event has more bytes than any may have."""


class EventReader:
    """Takes a body in pieces, and gives its events. Comments, and fields but for names and data, are passed over."""

    def __init__(self) -> None:
        self._rest = b""
        self._name = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Names and data of the events that are whole now, but those without data. Raises EventTooLargeError."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].strip())
            elif line.startswith(b"event:"):
                self._name = line[6:].strip()
            elif not line:
                name, data = self._name, b"\n".join(self._data)
                self._name, self._data = b"", []
                if data:
                    yield name, data
        if len(self._rest) + sum(map(len, self._data)) > MAX_EVENT_BYTES:
            raise EventTooLargeError(f"an event of the stream is over {MAX_EVENT_BYTES} bytes")
