"""What the doctor finds, and what its checks share."""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from breakwater.cli import formats
from breakwater.cli.plane import PlaneLocation

if TYPE_CHECKING:
    from breakwater.config import Config

P = ParamSpec("P")
T = TypeVar("T")
Verdict = Literal["ok", "warn", "fail"]

CONNECT_TIMEOUT_S = 3.0
SLOW_MS = 250.0
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


Findings = AsyncGenerator[Finding]
Check = Callable[[PlaneLocation, "Config | None"], Coroutine[Any, Any, list[Finding]]]


def check(find: Callable[P, Findings]) -> Callable[P, Coroutine[Any, Any, list[Finding]]]:
    """Makes a check of a function that yields findings. A check only reads, and says what to do."""

    @functools.wraps(find)
    async def found(*args: P.args, **kwargs: P.kwargs) -> list[Finding]:
        return [finding async for finding in find(*args, **kwargs)]

    return found


async def timed(work: Awaitable[T]) -> tuple[T, float]:
    """A result, and the milliseconds that it took."""
    begun = time.perf_counter()
    result = await work
    return result, (time.perf_counter() - begun) * 1000


def judged(area: str, ok: bool, good: str, bad: str, remedy: str, *, verdict: Verdict = "fail") -> Finding:
    """A finding of what is either right, or wrong with a remedy."""
    return Finding(area, "ok", good) if ok else Finding(area, verdict, bad, remedy)


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
