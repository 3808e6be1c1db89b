"""Starting and steering the other process, `nats_submitter`."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from breakwater.cli.demo.load import Handed
from breakwater.cli.errors import CliError

START_S = 30.0
END_S = 0.5
LINE_LIMIT = 2**24
"""Its last line names every job that was not accepted."""


class NatsProgram:
    """The running program, connected and waiting for its start."""

    def __init__(self, process: asyncio.subprocess.Process, log_file: Path) -> None:
        self._process = process
        self._log_file = log_file

    async def run(self) -> Handed:
        """Lets it hand its jobs in, and waits for the outcome. Raises CliError."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")
        outcome = json.loads(await self.line())
        return Handed(outcome["accepted"], outcome["failed"])

    async def line(self) -> str:
        """The next line of its output. Raises CliError when it has ended."""
        assert self._process.stdout is not None
        said = await self._process.stdout.readline()
        if not said:
            raise CliError("demo", f"the program that hands in jobs over NATS has ended; its log is {self._log_file}")
        return said.decode()


@asynccontextmanager
async def nats_program(data_dir: Path, jobs_file: Path, log_file: Path) -> AsyncGenerator[NatsProgram]:
    """Runs it for as long as the block lasts.

    Raises:
        CliError: it did not come up.
    """
    with log_file.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "breakwater.cli.demo.nats_submitter",
            str(data_dir),
            str(jobs_file),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            limit=LINE_LIMIT,
            start_new_session=True,  # Ctrl-C is for the demo, which ends it
        )
    try:
        program = NatsProgram(process, log_file)
        try:
            await asyncio.wait_for(program.line(), START_S)
        except TimeoutError:
            problem = f"the program that hands in jobs over NATS does not connect; its log is {log_file}"
            raise CliError("demo", problem) from None
        yield program
    finally:
        # It ends by itself when it has no more orders to wait for.
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), END_S)
        except TimeoutError:
            process.kill()
            await process.wait()
