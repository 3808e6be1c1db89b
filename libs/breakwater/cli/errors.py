"""Errors that end a command, their exit codes, and how they are shown."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO

from breakwater.cli import output
from breakwater.errors import BreakwaterError
from breakwater.runtime.files import replacing


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
    """A command can't do what it was asked to.

    Attributes:
        code: stable, for programs: `not_running`, `unknown_agent`, …
        message: what happened and where.
        remedy: what to do, a sentence; empty where the message says it.
        exit_code: of the process.
    """

    def __init__(self, code: str, message: str, remedy: str = "", exit_code: ExitCode = ExitCode.FAILED) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.remedy = remedy
        self.exit_code = exit_code


def unreachable(message: str, remedy: str = "") -> CliError:
    """The plane, or the part of it that the command needs, does not answer."""
    return CliError("unreachable", message, remedy, ExitCode.UNREACHABLE)


def wrong_usage(message: str, remedy: str = "") -> CliError:
    """The command was called in a way that makes no sense."""
    return CliError("usage", message, remedy, ExitCode.USAGE)


@contextmanager
def written(file: Path) -> Generator[BinaryIO]:
    """A person's file, to be written whole or left as it is. Raises CliError: it can't be written."""
    try:
        with replacing(file) as open_file:
            yield open_file
    except OSError as error:
        raise CliError("not_written", f"{file} can't be written: {error.strerror or error}") from error


def show(error: CliError, *, as_json: bool) -> None:
    """Writes an error to stderr: one JSON document, or sentences."""
    if as_json:
        body = {"code": error.code, "message": error.message, "remedy": error.remedy or None}
        document = {"error": body, "exit_code": int(error.exit_code)}
        output.write(json.dumps(document, ensure_ascii=False), stderr=True)
        return
    output.write(f"error: {error.message}", stderr=True)
    if error.remedy:
        output.write(f"  {error.remedy}", stderr=True)


def expected(error: BaseException) -> CliError:
    """An error of one of our rooms as what ends a command. Raises the error itself where it is a bug."""
    # Only imported once something failed: none of this may cost a command that works its fast start.
    from breakwater.analytics.errors import AnalyticsError, QueryError
    from breakwater.bus.errors import BusError
    from breakwater.embedded.datadir import DataDirError
    from breakwater.embedded.ports import PortInUseError
    from breakwater.embedded.servers import ServerNotFoundError
    from breakwater.embedded.supervisor import ProcessFailedError
    from breakwater.errors import ConfigError, UnavailableError
    from breakwater.security.api_keys import ApiKeysError
    from breakwater.security.encryption import DecryptionError

    match error:
        case CliError():
            return error
        case ConfigError():
            return CliError("config", str(error))
        case DecryptionError():
            return CliError("undecryptable", str(error), "`breakwater encryption keys` lists the available keys.")
        case DataDirError():
            return CliError("data_dir", str(error))
        case PortInUseError():
            return CliError("port_taken", str(error))
        case ProcessFailedError() | ServerNotFoundError():
            return CliError("not_started", str(error))
        case ApiKeysError():
            return CliError("api_keys", str(error))
        case QueryError():
            return CliError("query_failed", f"ClickHouse refuses it, code {error.code}: {error.message}")
        case UnavailableError():
            return unreachable(str(error), "`breakwater doctor` shows which servers and services respond.")
        case AnalyticsError() | BusError():
            return CliError("failed", str(error))
        case _:
            raise error
