"""What a check has found, and how it is judged."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

from breakwater.cli import formats

Verdict = Literal["ok", "warn", "fail"]
T = TypeVar("T")

SLOW_MS = 250.0
LAG_WARN = 1_000
"""So many messages that wait are worth a word."""

CLOCK_WARN_S, CLOCK_FAIL_S = 1.0, 30.0

SETUP = "Run `breakwater setup` (or `breakwater up`, which does it)."
_CLOCK = "Let both machines keep their time with NTP: budgets and cool-downs are counted by these clocks."


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    area: str
    verdict: Verdict
    text: str
    remedy: str = ""


async def timed(work: Awaitable[T]) -> tuple[T, float]:
    """A result, and the milliseconds that it took."""
    begun = time.perf_counter()
    result = await work
    return result, (time.perf_counter() - begun) * 1000


def slow(ms: float) -> Verdict:
    """How an answer's time is judged."""
    return "warn" if ms > SLOW_MS else "ok"


def clock(area: str, ahead_s: float) -> Finding:
    """How a server's clock is judged that is so far ahead of this machine's, or behind it where negative."""
    off_s = abs(ahead_s)
    if off_s < CLOCK_WARN_S:
        return Finding(area, "ok", f"its clock is ours (within {max(off_s, 0.001):.3f} s)")
    text = f"its clock is {formats.duration(off_s * 1000)} {'ahead of' if ahead_s > 0 else 'behind'} this machine's"
    return Finding(area, "fail" if off_s > CLOCK_FAIL_S else "warn", text, _CLOCK)


def worst(findings: Iterable[Finding]) -> Verdict:
    """The verdict over all."""
    verdicts = {finding.verdict for finding in findings}
    return "fail" if "fail" in verdicts else "warn" if "warn" in verdicts else "ok"
