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
        self._held = b""
        """The end of a piece that may be the first half of a mark or of a line break."""
        self._rest = bytearray()
        """The line that is not complete yet: it may come in very many pieces."""
        self._name = b""
        self._data: list[bytes] = []
        self._data_bytes = 0

    def feed(self, piece: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Takes the next piece. Yields name and data of each event that is complete, and skips events without data.

        Raises:
            EventTooLargeError: the event that is not complete yet is too large.
        """
        if self._held:
            piece = self._held + piece
            self._held = b""
        if self._first and _MARK.startswith(piece):
            self._held = piece
            return
        if self._first:
            self._first = False
            piece = piece.removeprefix(_MARK)
        if b"\r" in piece:
            self._held = b"\r" if piece.endswith(b"\r") else b""
            piece = piece.removesuffix(self._held).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines: list[bytes] = []
        if b"\n" in piece:
            *lines, piece = (bytes(self._rest) + piece if self._rest else piece).split(b"\n")
            self._rest.clear()
        if piece:
            self._rest += piece
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].strip())
                self._data_bytes += len(self._data[-1])
            elif line.startswith(b"event:"):
                self._name = line[6:].strip()
            elif not line:
                name = self._name
                data = b"\n".join(self._data)
                self._name = b""
                self._data = []
                self._data_bytes = 0
                if data:
                    yield name, data
        if len(self._rest) + self._data_bytes > MAX_EVENT_BYTES:
            raise EventTooLargeError(f"an event of the stream is over {MAX_EVENT_BYTES} bytes")

    def end(self) -> Iterator[tuple[bytes, bytes]]:
        """Yields the last event of a body that lacks the empty line that ends it."""
        yield from self.feed(b"\n\n")
