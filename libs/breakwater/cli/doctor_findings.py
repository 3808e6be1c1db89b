"""The findings of `breakwater doctor`, and helpers that make them."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from breakwater.config import Config
from breakwater.kernel.commands import formats
from breakwater.local.plane import PlaneLocation

T = TypeVar("T")
FindingVerdict = Literal["ok", "skip", "warn", "fail"]

CONNECT_TIMEOUT_S = 3.0
SLOW_MS = 250.0
CLOCK_WARN_S = 1.0
CLOCK_FAIL_S = 30.0
SETUP = "Run `breakwater setup` (or `breakwater up`, which does it)."


@dataclass(frozen=True, slots=True)
class Finding:
    """A line of the report."""

    area: str
    verdict: FindingVerdict
    text: str
    remedy: str = ""


Findings = AsyncGenerator[Finding]
Check = Callable[[PlaneLocation, Config | None], Findings]
"""A check yields findings with remedies. It changes nothing."""


def assess(area: str, good: str, bad: str, remedy: str, *, ok: object, verdict: FindingVerdict = "warn") -> Finding:
    """Makes a finding: `good` if `ok` is true; otherwise `bad`, with the verdict and the remedy."""
    return Finding(area, "ok", good) if ok else Finding(area, verdict, bad, remedy)


def answers(area: str, text: str, ms: float, remedy: str = "") -> Finding:
    """Makes a finding for a server that has answered; a warning if it took long."""
    return Finding(area, "warn" if ms > SLOW_MS else "ok", text, remedy)


async def measure(work: Awaitable[T]) -> tuple[T, float]:
    """Awaits work. Returns its result, and the milliseconds that it took."""
    started_at = time.perf_counter()
    return await work, (time.perf_counter() - started_at) * 1000


def clock(area: str, ahead_s: float) -> Finding:
    """Makes a finding for a server's clock, which is `ahead_s` seconds ahead of this machine's."""
    off_s = abs(ahead_s)
    if off_s < CLOCK_WARN_S:
        return Finding(area, "ok", f"its clock agrees with this machine's (within {max(off_s, 0.001):.3f} s)")
    text = f"its clock is {formats.duration(off_s * 1000)} {'ahead of' if ahead_s > 0 else 'behind'} this machine's"
    remedy = "Synchronize both machines with NTP: budgets and cool-downs use these clocks."
    return Finding(area, "fail" if off_s > CLOCK_FAIL_S else "warn", text, remedy)
