"""Reading and checking of texts on stdin, in files and in arguments, which must be UTF-8 as on the wire."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from breakwater.kernel.commands.errors import usage_error

_REMEDY = "Convert it first, such as with `iconv -f latin1 -t utf-8`."


def read_stdin() -> str:
    """Reads all of stdin. Raises CliError if it is empty or not UTF-8."""
    # Reads bytes, because the locale decides whether Python's text stream accepts invalid UTF-8.
    data = sys.stdin.buffer.read() if sys.stdin is not None else b""  # pyright: ignore[reportUnnecessaryComparison]  # None when closed
    if not data.strip():
        raise usage_error("stdin is empty")
    return _decode("stdin", data)


def read_file(path: Path, *, option: str = "") -> str:
    """Reads a file. Raises CliError if it can't be read, or is not UTF-8."""
    name = f"{option} {path}".strip()
    try:
        data = path.read_bytes()
    except OSError as error:
        raise usage_error(f"{name}: can't be read: {error.strerror}") from error
    return _decode(name, data)


def check_sendable(name: str, value: Any) -> None:
    """Raises CliError if a value contains invalid UTF-8: raw bytes of an argument, or half of a surrogate pair."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise usage_error(f"{name} is not UTF-8 text", _REMEDY) from None


def check_no_spaces(options: Mapping[str, str | Iterable[str] | None]) -> None:
    """Raises CliError if an identifier contains a space, because it would have to be quoted in every command."""
    for option, value in options.items():
        for identifier in (value,) if isinstance(value, str) else value or ():
            if any(map(str.isspace, identifier)):
                raise usage_error(f"{option}: {identifier!r} contains a space", "Use a hyphen instead.")


def _decode(name: str, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        invalid_byte = f"byte 0x{data[error.start]:02x} at position {error.start}"
        raise usage_error(f"{name} is not UTF-8 text: {invalid_byte}", _REMEDY) from None
