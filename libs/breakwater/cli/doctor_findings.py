"""The findings of the doctor, which all its checks make."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from breakwater.config import Config
from breakwater.kernel.commands import formats
from breakwater.local.plane import PlaneLocation

T = TypeVar("T")
FindingVerdict = Literal["ok", "warn", "fail"]

CONNECT_TIMEOUT_S = 3.0
SLOW_MS = 250.0
CLOCK_WARN_S, CLOCK_FAIL_S = 1.0, 30.0
SETUP = "Run `breakwater setup` (or `breakwater up`, which does it)."


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    area: str
    verdict: FindingVerdict
    text: str
    remedy: str = ""


Findings = AsyncGenerator[Finding]
Check = Callable[[PlaneLocation, Config | None], Findings]
"""A check yields what it finds. It only reads, and says what to do."""


def judged(area: str, good: str, bad: str, remedy: str, *, ok: object, verdict: FindingVerdict = "warn") -> Finding:
    """A finding of what is either right, or wrong with a remedy."""
    return Finding(area, "ok", good) if ok else Finding(area, verdict, bad, remedy)


def answers(area: str, what: str, ms: float, remedy: str = "") -> Finding:
    """A finding of what has answered, which is a warning where that took long."""
    return Finding(area, "warn" if ms > SLOW_MS else "ok", what, remedy)


async def timed(work: Awaitable[T]) -> tuple[T, float]:
    """A result, and the milliseconds that it took."""
    begun = time.perf_counter()
    return await work, (time.perf_counter() - begun) * 1000


def clock(area: str, ahead_s: float) -> Finding:
    """A finding of a server's clock, `ahead_s` ahead of this machine's."""
    off_s = abs(ahead_s)
    if off_s < CLOCK_WARN_S:
        return Finding(area, "ok", f"its clock agrees with this machine's (within {max(off_s, 0.001):.3f} s)")
    text = f"its clock is {formats.duration(off_s * 1000)} {'ahead of' if ahead_s > 0 else 'behind'} this machine's"
    remedy = "Synchronize both machines with NTP: budgets and cool-downs use these clocks."
    return Finding(area, "fail" if off_s > CLOCK_FAIL_S else "warn", text, remedy)
