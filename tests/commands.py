"""The command line in the tests' own process: the start of another takes a second of CPU."""

from __future__ import annotations

import gc
import io
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
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
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
    stdin: bytes | io.BytesIO = b"",
) -> subprocess.CompletedProcess[str]:
    """Runs `breakwater` with arguments, as a process whose output is no terminal. Call it where no event loop runs.

    Args:
        arguments: of the command.
        environment: beside the variables of this process that do not begin with `BREAKWATER_`.
        directory: to run it in.
        stdin: all that it can read.
    """

    def run() -> int:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cli, "app", commands())
            return cli.main(arguments)

    return _captured(arguments, run, environment, directory, stdin)


def run_program(
    text: str, *, environment: Mapping[str, str] | None = None, directory: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a program in Python as `python -` does, in this process: most of a short one's CPU is what it imports.

    Args:
        text: of the program.
        environment: all variables that begin with `BREAKWATER_`, and others to change.
        directory: to run it in.
    """

    def run() -> int:
        main = {"__name__": "__main__"}
        try:
            exec(compile(text, "<stdin>", "exec"), main)
        except SystemExit as ended:
            return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except BaseException:  # noqa: BLE001  as the interpreter does
            traceback.print_exc()
            return 1
        finally:
            main.clear()
            gc.collect()  # what complains that it was not closed does so here
        return 0

    return _captured(("-",), run, environment, directory, b"")


def _captured(
    arguments: Sequence[str],
    run: Callable[[], int],
    environment: Mapping[str, str] | None,
    directory: Path | None,
    stdin: bytes | io.BytesIO,
) -> subprocess.CompletedProcess[str]:
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    err = io.StringIO()
    read_from = io.TextIOWrapper(io.BytesIO(stdin) if isinstance(stdin, bytes) else stdin)
    variables = dict(os.environ)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        for name in variables:
            if name.startswith("BREAKWATER_"):
                del os.environ[name]
        os.environ.update(environment or {})
        if directory is not None:
            patch.chdir(directory)
        patch.setattr(sys, "stdin", read_from)
        time.tzset()
        try:
            code = run()
        finally:
            for name in os.environ.keys() - variables.keys():
                del os.environ[name]
            os.environ.update(variables)
    time.tzset()
    read_from.detach()  # the caller may look at what is left
    printed = out.buffer.getvalue().decode()  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(arguments, code, printed, err.getvalue())
