"""The command line in the tests' own process: the start of another takes a second of CPU."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main

from breakwater.cli import main as cli


@cache
def commands() -> Any:
    """All commands, which typer would make of their functions again in each call: 30 ms."""
    return typer.main.get_command(cli.app)


def run_command(
    *arguments: str, environment: Mapping[str, str] | None = None, directory: Path | None = None, stdin: bytes = b""
) -> subprocess.CompletedProcess[str]:
    """Runs `breakwater` with arguments, as a process whose output is no terminal. Call it where no event loop runs.

    Args:
        arguments: of the command.
        environment: beside the variables of this process that do not begin with `BREAKWATER_`.
        directory: to run it in.
        stdin: all that it can read.
    """
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    err = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        for name in list(os.environ):
            if name.startswith("BREAKWATER_"):
                patch.delenv(name)
        for name, value in (environment or {}).items():
            patch.setenv(name, value)
        if directory is not None:
            patch.chdir(directory)
        time.tzset()
        patch.setattr(cli, "app", commands())
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = cli.main(arguments)
    time.tzset()
    printed = out.buffer.getvalue().decode()  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(arguments, code, printed, err.getvalue())
