"""Errors that end a command: their exit codes, and how they are printed."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO

from breakwater.kernel.commands import output
from breakwater.kernel.errors import BreakwaterError
from breakwater.kernel.process.files import atomic_write


class ExitCode(IntEnum):
    """Exit codes, which scripts may rely on."""

    OK = 0
    FAILED = 1
    USAGE = 2
    JOB_FAILED = 3
    UNREACHABLE = 4
    UNDECIDED = 5
    INTERRUPTED = 130


EXIT_CODES = (
    "Exit codes: 0 ok · 1 failed · 2 wrong usage · 3 the job was dead-lettered or "
    "cancelled · 4 the plane is unreachable · 5 the job was accepted, and has not ended "
    "in time"
)


class CliError(BreakwaterError):
    """An error that ends a command.

    Attributes:
        code: a stable code for programs: `not_running`, `unknown_agent`, …
        message: what happened and where.
        remedy: a sentence that says what to do; empty if the message already does.
        exit_code: exit code of the process.
    """

    def __init__(self, code: str, message: str, remedy: str = "", exit_code: ExitCode = ExitCode.FAILED) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.remedy = remedy
        self.exit_code = exit_code


def unreachable(message: str, remedy: str = "") -> CliError:
    """An error for a plane, or a part of it, that does not answer."""
    return CliError("unreachable", message, remedy, ExitCode.UNREACHABLE)


def usage_error(message: str, remedy: str = "") -> CliError:
    """An error for options and arguments that make no sense."""
    return CliError("usage", message, remedy, ExitCode.USAGE)


@contextmanager
def replacing_file(file: Path) -> Generator[BinaryIO]:
    """Opens a file for replacement: it is written whole or left as it is. Raises CliError if it can't be written."""
    try:
        with atomic_write(file) as open_file:
            yield open_file
    except OSError as error:
        raise CliError("not_written", f"{file} can't be written: {error.strerror or error}") from error


def show(error: CliError, *, as_json: bool) -> None:
    """Prints an error on stderr, as one JSON document or as sentences."""
    if as_json:
        body = {"code": error.code, "message": error.message, "remedy": error.remedy or None}
        document = {"error": body, "exit_code": int(error.exit_code)}
        output.write(json.dumps(document, ensure_ascii=False), stderr=True)
        return
    output.write(f"error: {error.message}", stderr=True)
    if error.remedy:
        output.write(f"  {error.remedy}", stderr=True)


_OF_ANOTHER_VERSION = frozenset({16, 47, 60})
"""The codes of ClickHouse for a column, a name or a table that is not there."""


def as_cli_error(error: BaseException) -> CliError:
    """Turns an error into one that ends a command. Raises an unexpected error again."""
    # Imported only after a failure, so that commands start fast.
    from breakwater.kernel.clickhouse.errors import AnalyticsError, QueryError
    from breakwater.kernel.errors import UnavailableError
    from breakwater.kernel.nats.errors import BusError
    from breakwater.kernel.security.encryption import DecryptionError

    match error:
        case CliError():
            return error
        case DecryptionError():
            return CliError("undecryptable", str(error), "`breakwater encryption keys` lists the available keys.")
        case QueryError():
            remedy = "The tables may be of another version: `breakwater setup` brings them up to date."
            message = f"ClickHouse refuses it, code {error.code}: {error.message}"
            return CliError("query_failed", message, remedy if error.code in _OF_ANOTHER_VERSION else "")
        case UnavailableError():
            return unreachable(
                str(error), error.remedy or "`breakwater doctor` shows which servers and services respond."
            )
        case AnalyticsError() | BusError():
            return CliError("failed", str(error))
        case BreakwaterError(command_code=str() as code):
            return CliError(code, str(error))
        case _:
            raise error
