"""Plans in a process of their own, which takes the CPU that others leave, and ends with whoever asked for it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from datetime import datetime

import structlog
from pydantic import Field

from breakwater.kernel.process.programs import for_program
from breakwater.kernel.types import Message
from breakwater.replay.contract import ConfigPlanError, ConfigPlanLine

LONGEST_S = 600.0
"""The longest time in seconds that a plan may take."""

MAX_LINE_BYTES = 16 << 20


class PlanTask(Message):
    """The task of a process: the configs, the record, and the jobs.

    Attributes:
        clickhouse_url: the URL of the record, with user and password.
        config: the text of the changed config.
        before: the text of the config that the jobs ran under.
        since: the beginning of the time in which the jobs were started.
        until: its end.
        agent: the only agent whose jobs are reported on; None for all.
        renames: the names of agents in the changed config, by those in the record.
        leaves_out_unknown: True if jobs do not count whose end history can't tell.
    """

    clickhouse_url: str
    config: str
    before: str
    since: datetime
    until: datetime
    agent: str | None = None
    renames: dict[str, str] = Field(default_factory=dict)
    leaves_out_unknown: bool = False


async def plan_in_process(task: PlanTask) -> AsyncGenerator[ConfigPlanLine]:
    """Yields the progress of a plan, and at last its report or an error. Closing it ends the process."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        "breakwater.replay.child",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
        env={**for_program(os.environ), **_of_tls(os.environ)},
        limit=MAX_LINE_BYTES,
    )
    # The rest of what the process knows comes by its stdin, as others can read the environment of a process.
    assert process.stdin is not None
    assert process.stdout is not None
    is_complete = False
    try:
        with suppress(ConnectionError):
            process.stdin.write(task.model_dump_json().encode() + b"\n")
            await process.stdin.drain()
        async for text in process.stdout:
            line = ConfigPlanLine.model_validate_json(text)
            is_complete = line.report is not None or line.error is not None
            yield line
        if not is_complete:
            code = await process.wait()
            structlog.get_logger().error("plan_ended", code=code)
            message = "the process of the plan ended without a report; the log says why"
            yield ConfigPlanLine(error=ConfigPlanError(code="plan_failed", message=message))
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


def _of_tls(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith("BREAKWATER_TLS_")}
