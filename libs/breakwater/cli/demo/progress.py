"""One run of the demo, and what a person sees of it meanwhile: one line, redrawn on a terminal, repeated in a pipe."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

from breakwater import background
from breakwater.cli import output
from breakwater.cli.demo.receiver import Delivered
from breakwater.cli.demo.scenario import trouble_at
from breakwater.cli.formats import counted
from breakwater.contracts.job import Job

LINE_EVERY_S = 2.0
REDRAWN_EVERY_S = 0.125


@dataclass(slots=True)
class DemoRun:
    """One run of the demo so far."""

    planned: Sequence[tuple[float, Job]]
    """All jobs, each with when it is submitted: seconds since the load began."""
    delivered: Delivered = field(default_factory=Delivered)
    phase: Literal["starting", "running", "settling"] = "starting"
    began_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    load_began_at: datetime | None = None
    ready: list[str] = field(default_factory=list[str])
    """Processes that are up."""
    results: int = 0
    """How many jobs have one."""
    failed: dict[str, str] = field(default_factory=dict[str, str])
    """What went wrong when jobs were submitted, by job id. How a job ended is no part of it."""

    @property
    def elapsed_s(self) -> float:
        """Since the demo began."""
        return (datetime.now(UTC) - self.began_at).total_seconds()

    def words(self) -> str:
        """What there is to say now, in a line."""
        if self.phase == "starting":
            return f"starting: {', '.join(self.ready) or 'servers'}"
        parts = [f"{self.phase}: {self.results}/{len(self.planned)} jobs have their results"]
        if self.phase == "running" and self.load_began_at is not None:
            parts += trouble_at((datetime.now(UTC) - self.load_began_at).total_seconds())
        if alerts := self.delivered.alerts:
            parts.append(f"{counted(len(alerts), 'alert')}, the last: {alerts[-1].title}")
        return " | ".join(parts)


@asynccontextmanager
async def shown(run: DemoRun) -> AsyncGenerator[None]:
    """Shows it for as long as the block lasts: on a terminal always as it is now, in a pipe a line now and then."""
    showing = asyncio.create_task(_print_lines(run) if output.terminal_width() is None else _redraw(run))
    try:
        yield
    finally:
        await background.stop(showing)


async def _print_lines(run: DemoRun) -> None:
    before = ""
    while True:
        if (words := run.words()) != before:
            output.write(f"{run.elapsed_s:4.0f} s  {words}")
            before = words
        await asyncio.sleep(LINE_EVERY_S)


async def _redraw(run: DemoRun) -> None:
    with output.console().status("") as status:
        while True:
            status.update(output.text(f"{run.elapsed_s:.0f} s  {run.words()}"))
            await asyncio.sleep(REDRAWN_EVERY_S)
