"""The ledger's file: JSON lines that survive the death of the process that wrote them."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

import orjson

LINE_STARTS = (b'{"seq":', b'{"event":')
"""How the lines of a ledger begin."""


class LedgerFileError(RuntimeError):
    """The ledger's file can't be used; the message names it and says what to do."""


class Journal:
    """An append-only file of JSON lines, held by one process at a time.

    A line has left the process when `append` returns: it then survives SIGKILL (not a power cut, there is no fsync).
    """

    def __init__(self, path: Path) -> None:
        """Opens or makes the file, and locks it.

        Raises:
            LedgerFileError: it can't be opened, or another process holds it.
        """
        self._path = path
        try:
            self._file = path.open("a+b")
        except OSError as error:
            raise LedgerFileError(f"can't open the ledger file {path}: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise LedgerFileError(
                f"the ledger file {path} is in use by another provider; give each its own file"
            ) from error

    def read(self) -> list[dict[str, Any]]:
        """All whole lines. A last line that was cut short by the writer's death is removed from the file.

        Raises:
            LedgerFileError: a line is not JSON; the file is left as it is.
        """
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        records: list[dict[str, Any]] = []
        for number, line in enumerate(content[:whole].splitlines(), start=1):
            try:
                records.append(orjson.loads(line))
            except orjson.JSONDecodeError as error:
                raise LedgerFileError(f"{self._path}, line {number}, is not JSON: is this a ledger file?") from error
        torn = content[whole:]
        if torn and not any(start.startswith(torn[: len(start)]) for start in LINE_STARTS):
            # Somebody's text without a last line feed must not be taken for a torn line and lost.
            raise LedgerFileError(f"{self._path} does not end as a ledger file does: is this one?")
        self._file.truncate(whole)
        return records

    def append(self, record: object) -> None:
        """Writes one record; a frozen dataclass or plain values."""
        self._file.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
        self._file.flush()

    def clear(self) -> None:
        """Empties the file."""
        self._file.truncate(0)

    def close(self) -> None:
        """Closes the file and lets go of it."""
        self._file.close()
