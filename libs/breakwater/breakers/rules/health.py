"""The health of an agent on one model, from its breaker and its latest calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from breakwater.breakers.contract import BreakerState, Health
from breakwater.breakers.rules.breaker import Breaker, is_open_for_one
from breakwater.kernel.types import time_from_ms

NONE_SUCCEEDS = 10
"""The number of consecutive failures that make a model unhealthy."""

LAST_CALLS = 20
"""The number of calls whose outcome is remembered."""
SOME_FAIL = 0.2
"""The share of failures among the remembered calls that the reason mentions."""
NEARLY_ALL_FAIL = 0.8
"""The share of failures among `LAST_CALLS` that makes a model unhealthy."""


class Verdict(NamedTuple):
    """A health, and the reason for it in a few words."""

    health: Health
    health_reason: str


UNCALLED = Verdict("healthy", "no calls yet")


@dataclass(frozen=True, slots=True)
class CallHealth:
    """The latest calls of an agent, to one model or to all.

    Attributes:
        consecutive_failures: the number of failures since the latest success.
        last_failure_ms: the time of the latest failure since then, in milliseconds since the epoch.
        last_success_ms: the time of the latest success, in milliseconds since the epoch.
        last_calls: the number of calls whose outcome is remembered, at most `LAST_CALLS`.
        last_failures: the number of them that failed.
    """

    consecutive_failures: int = 0
    last_failure_ms: int | None = None
    last_success_ms: int | None = None
    last_calls: int = 0
    last_failures: int = 0


def open_for(breaker: Breaker) -> str | None:
    """Returns the only caller whose calls a breaker refuses, in words; None if it refuses all calls, or none."""
    # The caller's name is lost if Redis has been emptied since.
    return (breaker.alone_name or "one caller") if is_open_for_one(breaker) else None


def health_of_model(
    breaker: BreakerState | None, calls: CallHealth, until_ms: int | None = None, only_for: str | None = None
) -> Verdict:
    """Returns an agent's health on one model: `unhealthy` while its breaker refuses calls, or nearly all calls fail.

    Args:
        breaker: the state of the breaker; None without one.
        calls: the latest calls to this model.
        until_ms: the end of the breaker's cool-down or of its probe's lease, in milliseconds since the epoch; None if
            there is none.
        only_for: the only caller that the breaker refuses (see `open_for`).
    """
    if only_for is not None:
        return Verdict("degraded", f"breaker refuses only {only_for}")
    match breaker:
        case None | "closed":
            return health_of_calls(calls)
        case "isolated":
            return Verdict("unhealthy", "breaker isolated until an operator resets it")
        case "open" if until_ms:
            return Verdict("unhealthy", f"breaker open until {time_from_ms(until_ms):%H:%M:%S} UTC")
        case "open":
            return Verdict("unhealthy", "breaker open")
        case "half_open" if until_ms:
            return Verdict("unhealthy", "breaker half-open until a probe succeeds")
        case "half_open":
            return Verdict("unhealthy", "breaker half-open, waits for a call to try it")


def health_of_calls(calls: CallHealth, failed: str = "failed") -> Verdict:
    """Returns the health that an agent's latest calls show; `failed` is the verb of the reason."""
    consecutive = calls.consecutive_failures
    remembered = calls.last_calls
    failures = calls.last_failures
    if consecutive >= NONE_SUCCEEDS:
        return Verdict("unhealthy", f"{consecutive:,} calls {failed} in a row")
    some_fail = failures > max(consecutive, 1) and failures >= remembered * SOME_FAIL
    if consecutive and some_fail:
        is_down = failures >= LAST_CALLS * NEARLY_ALL_FAIL
        return Verdict("unhealthy" if is_down else "degraded", f"{failures} of the last {remembered} calls {failed}")
    if consecutive:
        phrase = f"the last call {failed.replace('were', 'was')}"
        return Verdict("degraded", phrase if consecutive == 1 else f"{consecutive} calls {failed} in a row")
    if calls.last_success_ms is None:
        return UNCALLED
    if remembered <= 1:  # 0 if an earlier version recorded that call
        return Verdict("healthy", "the last call succeeded")
    if some_fail:
        return Verdict("healthy", f"the last call succeeded; {failures} of the last {remembered} did not")
    return Verdict("healthy", f"{remembered - failures} of the last {remembered} calls succeeded")
