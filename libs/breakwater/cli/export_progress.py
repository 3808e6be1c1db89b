"""How far an export is, told on stderr."""

from __future__ import annotations

import sys
import time

from breakwater.cli import output

_AGAIN = "\r\x1b[K"
"""Begins the terminal's line again."""

_TOLD_EVERY_S = {True: 0.2, False: 10.0}
"""Progress, on a terminal and elsewhere."""


class Progress:
    """Counts what came, and tells of it on stderr."""

    def __init__(self, of: str, *, counts: bool) -> None:
        """Begins.

        Args:
            of: what is written in all, such as `7 attempts`.
            counts: whether each line is a row, so that rows can be counted as they come.
        """
        self.rows = 0
        self.bytes = 0
        self._of = of
        self._counts = counts
        self._last = b""
        self._drawn = output.is_terminal(sys.stderr)
        self._every_s = _TOLD_EVERY_S[self._drawn]
        self._next = time.monotonic()

    @property
    def whole_rows(self) -> int | None:
        """The lines of JSON; None where the last one is not whole."""
        return self.rows if self._last == b"}\n" else None

    def on(self, chunk: bytes) -> None:
        """Bytes were written."""
        self.bytes += len(chunk)
        if self._counts:
            self.rows += chunk.count(b"\n")
            self._last = (self._last + chunk[-2:])[-2:]
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self._every_s
            text = f"{self.rows:,} of {self._of}" if self._counts else f"exporting {self._of}"
            sys.stderr.write(f"{_AGAIN}{text}, {size(self.bytes)}" if self._drawn else f"{text}, {size(self.bytes)}\n")
            sys.stderr.flush()

    def over(self) -> None:
        """No more will come."""
        if self._drawn:
            sys.stderr.write(_AGAIN)


def size(count: int) -> str:
    """Bytes as people read them."""
    return f"{count:,} bytes" if count < 10_000 else f"{count / 1e6:,.1f} MB"
