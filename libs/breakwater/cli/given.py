"""Text that a person gives: on stdin, in a file, as an argument. It has to be UTF-8, as on the wire."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from breakwater.cli.errors import wrong_usage

_REMEDY = "Convert it first, such as with `iconv -f latin1 -t utf-8`."


def read_stdin() -> str:
    """All of stdin. Raises CliError: there is nothing, or it is not UTF-8."""
    # Its bytes: Python would let those that are no UTF-8 pass, or not, as the locale says.
    given = sys.stdin.buffer.read() if sys.stdin is not None else b""  # pyright: ignore[reportUnnecessaryComparison]  # None when closed
    if not given.strip():
        raise wrong_usage("stdin is empty")
    return _decoded("stdin", given)


def read_file(path: Path, *, option: str = "") -> str:
    """A whole file. Raises CliError: it can't be read, or is not UTF-8."""
    name = f"{option} {path}".strip()
    try:
        given = path.read_bytes()
    except OSError as error:
        raise wrong_usage(f"{name}: can't be read: {error.strerror}") from error
    return _decoded(name, given)


def sendable(name: str, value: Any) -> None:
    """Raises CliError where a value is not valid UTF-8: raw bytes of an argument, or half of a surrogate pair."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise wrong_usage(f"{name} is not UTF-8 text", _REMEDY) from None


def without_spaces(given: Mapping[str, str | Iterable[str] | None]) -> None:
    """Raises CliError where an identifier contains a space: it would have to be quoted in every command."""
    for option, value in given.items():
        for one in (value,) if isinstance(value, str) else value or ():
            if any(map(str.isspace, one)):
                raise wrong_usage(f"{option}: {one!r} contains a space", "Use a hyphen instead.")


def _decoded(name: str, given: bytes) -> str:
    try:
        return given.decode("utf-8")
    except UnicodeDecodeError as error:
        wrong = f"byte 0x{given[error.start]:02x} at position {error.start}"
        raise wrong_usage(f"{name} is not UTF-8 text: {wrong}", _REMEDY) from None
