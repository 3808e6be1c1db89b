"""A clock of its own for a process, which jumps when it is told to: libfaketime, preloaded."""

from __future__ import annotations

from pathlib import Path

_PLACES = ("/usr/lib/*/faketime/libfaketime.so.1", "/usr/lib*/faketime/libfaketime.so.1")

AHEAD_S = 3600


def libfaketime() -> Path | None:
    """Where it is installed, if it is."""
    return next((path for place in _PLACES for path in Path("/").glob(place[1:])), None)


class JumpingClock:
    """The wall clock of one process. Its monotonic clock stays what it is, as when an operator sets the time."""

    def __init__(self, file: Path) -> None:
        """Takes where the offset is written, which the process reads every second."""
        self._file = file
        self.jump(0)

    def jump(self, ahead_s: int) -> None:
        """Sets it ahead of this machine's; negative for behind."""
        self._file.write_text(f"{ahead_s:+d}\n")

    def environment(self) -> dict[str, str]:
        """What the process is to be started with. Raises FileNotFoundError where there is no libfaketime."""
        library = libfaketime()
        if library is None:
            raise FileNotFoundError("a clock jumps by libfaketime, which is not there")
        return {
            "LD_PRELOAD": str(library),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }
