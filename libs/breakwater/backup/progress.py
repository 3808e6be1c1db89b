"""The progress of a backup or a restore, in one line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class BackupProgress:
    """Counts bytes, and the part of the work that is done: rows and messages of a copy, bytes of a restore."""

    verb: str
    bytes: int = 0
    step: str = ""
    _expected: int = 0
    _completed: int = 0

    def expect(self, units: int) -> None:
        """Adds to the work that is to be done."""
        self._expected += units

    def begin(self, step: str) -> None:
        """Names what is being done."""
        self.step = step

    def finish(self, units: int) -> None:
        """Adds to the work that is done."""
        self._completed += units

    def add_bytes(self, count: int) -> None:
        """Counts bytes that were written or read."""
        self.bytes += count

    def read(self, count: int) -> None:
        """Counts bytes that were read, which are the work of a check or a restore."""
        self.bytes += count
        self._completed += count

    def describe(self) -> str:
        """Describes the progress: `copied 41 %, 12.3 MB, table attempts`."""
        percent = min(100 * self._completed // self._expected, 100) if self._expected else 0
        size = f"{self.bytes / 1e6:,.1f} MB"
        return f"{self.verb} {percent} %, {size}" + (f", {self.step}" if self.step else "")
