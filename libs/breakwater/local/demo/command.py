"""The command `breakwater demo`."""

from __future__ import annotations

import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from breakwater.kernel.commands import formats, interrupts, output
from breakwater.kernel.commands.connect import run
from breakwater.kernel.commands.errors import ExitCode, usage_error
from breakwater.local.datadir import DataDir
from breakwater.local.demo.report import DemoReport
from breakwater.local.demo.run import run_demo
from breakwater.local.plane import JsonOption


def demo(
    jobs: Annotated[int, typer.Option(min=100, max=2000, help="Number of jobs.")] = 300,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same jobs and the same answers.")] = 1,
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="DIR", help="Keep all data in this new or empty directory. [default: none]"),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the temporary data directory, and print its path.")
    ] = False,
    leave: Annotated[bool, typer.Option("--exit", help="Stop after the report, also on a terminal.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Show the whole plane at work: failing providers, retries, breakers, budgets, alerts, ledgers that agree.

    Starts a fresh stack of its own on free ports, with a simulated provider that goes down, limits its rate and hangs.
    Half of the jobs arrive over HTTP, half over NATS. At the end it compares the provider's ledger, Redis' counters
    and ClickHouse's sums. Exits with 1 if they differ, or if an expected event did not happen. It makes no calls
    outside this machine, and costs nothing.

    On a terminal, the stack keeps running after the report until Ctrl-C, and a link signs in to the console, which
    shows what happened. Without a terminal (in CI or in a pipe), and with --json, the demo ends after the report.
    It leaves nothing behind unless you use --keep or --data; `breakwater up` can then start the stack again.

    For example:

        breakwater demo

        breakwater demo --exit

        breakwater demo --jobs 1000 --seed 7 --json | jq .reconciliation
    """
    if data is not None and data.exists() and (not data.is_dir() or any(data.iterdir())):
        raise usage_error(f"{data} is not empty", "The demo needs a new or empty directory.")
    directory = Path(tempfile.mkdtemp(prefix="breakwater-demo-")) if data is None else data.absolute()
    keeps_data = keep or data is not None
    # Without a terminal, there is no person to open the console and press Ctrl-C: a stack that stays would hang CI.
    stays = sys.stdout.isatty() and not (leave or as_json)
    try:
        code = _run(directory, jobs, seed, as_json=as_json, stays=stays)
        keeps_data = keeps_data or code == ExitCode.FAILED
    except Exception:
        keeps_data = True  # its error names a log there
        raise
    finally:
        if not keeps_data:
            with interrupts.ignore_interrupts():
                shutil.rmtree(directory, ignore_errors=True)
    if not as_json and keeps_data:
        quoted = shlex.quote(str(directory))
        output.note(f"the data is kept in {directory}; to look at it in the console, at the address that this prints:")
        output.print_styled(
            (
                f"  {formats.breakwater_command()} up --simulate --config {quoted}/breakwater.yaml --data {quoted}",
                "bold",
            )
        )
    elif not as_json:
        output.note("the data is deleted; `--keep` keeps it, for the console")
    return code


def _run(directory: Path, jobs: int, seed: int, *, as_json: bool, stays: bool) -> int:
    data = DataDir(directory)
    data.create()
    data.require_room()
    with data.lock() as lock:
        outcome = run(run_demo(data, lock, jobs=jobs, seed=seed, as_json=as_json, stays=stays))
    if not isinstance(outcome, DemoReport):
        return 128 + outcome
    return ExitCode.OK if outcome.ok else ExitCode.FAILED
