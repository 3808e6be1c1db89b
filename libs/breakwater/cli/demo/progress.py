"""What a person sees while the demo runs: a bar on a terminal, a line now and then in a pipe."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

from breakwater import background
from breakwater.cli import output
from breakwater.cli.demo.scenario import trouble_at
from breakwater.cli.formats import counted
from breakwater.contracts.alerts import Alert

LINE_EVERY_S = 2.0
REDRAWN_EVERY_S = 0.125


@dataclass(slots=True)
class DemoProgress:
    """How far the demo is."""

    jobs: int
    phase: Literal["starting", "running", "settling"] = "starting"
    begun: float = field(default_factory=time.monotonic)
    load_begun: float = 0.0
    """On the same clock."""
    ready: list[str] = field(default_factory=list[str])
    """Processes that are up."""
    results: int = 0
    """How many jobs have one."""
    alerts: list[Alert] = field(default_factory=list[Alert])
    """Those that were delivered."""

    @property
    def elapsed_s(self) -> float:
        """Since the demo began."""
        return time.monotonic() - self.begun

    def words(self) -> str:
        """What there is to say now, in a line."""
        if self.phase == "starting":
            return f"starting: {', '.join(self.ready) or 'servers'}"
        parts = [f"{self.phase}: {self.results}/{self.jobs} jobs have their results"]
        if self.phase == "running":
            parts += trouble_at(time.monotonic() - self.load_begun)
        if self.alerts:
            parts.append(f"{counted(len(self.alerts), 'alert')}, the last: {self.alerts[-1].title}")
        return " | ".join(parts)


@asynccontextmanager
async def shown(progress: DemoProgress) -> AsyncGenerator[None]:
    """Shows it for as long as the block lasts: on a terminal always as it is now, in a pipe a line now and then."""
    showing = asyncio.create_task(_print_lines(progress) if output.terminal_width() is None else _redraw(progress))
    try:
        yield
    finally:
        await background.stop(showing)


async def _print_lines(progress: DemoProgress) -> None:
    before = ""
    while True:
        if (words := progress.words()) != before:
            output.write(f"{progress.elapsed_s:4.0f} s  {words}")
            before = words
        await asyncio.sleep(LINE_EVERY_S)


async def _redraw(progress: DemoProgress) -> None:
    with output.console().status("") as status:
        while True:
            status.update(output.text(f"{progress.elapsed_s:.0f} s  {progress.words()}"))
            await asyncio.sleep(REDRAWN_EVERY_S)
