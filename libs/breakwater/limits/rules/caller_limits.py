"""The rate limits that a job's caller may know of.

They are those of its own key, user, team, tenant, agent or task, also within another scope, such as a model. Those of
the whole plane, and those of a model, a provider or a tag that others call, too, would show what others do.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Literal

from breakwater.jobs.contract.execution import Allowance, CallerLimits
from breakwater.kernel.immutable import immutable
from breakwater.limits.rules.scopes import parts_of

_OF_CALLERS = frozenset({"key", "user", "team", "tenant", "agent", "task"})


@immutable()
class WindowState:
    """A sliding window of a rate limit, after a call was admitted or refused.

    Attributes:
        scope: the key of the scope whose calls it counts.
        unit: what it counts.
        limit: the most that fits.
        remaining: what still fits; below 0 if the limit was lowered to less than what it counts.
        empty_in_ms: the milliseconds until it counts nothing any more, unless there are further calls.
    """

    scope: str
    unit: Literal["requests", "tokens"]
    limit: int
    remaining: int
    empty_in_ms: int


@lru_cache(maxsize=4096)
def is_shown_to_caller(scope: str) -> bool:
    """Returns True if a caller may know of the limits of a scope that its calls count in."""
    return any(part.kind in _OF_CALLERS for part in parts_of(scope))


def caller_limits(windows: Iterable[WindowState], now: datetime) -> CallerLimits | None:
    """Returns what the tightest windows leave: of requests, of tokens, or of both. None if the caller may see none."""
    tightest: dict[str, WindowState] = {}
    for window in windows:
        if not is_shown_to_caller(window.scope):
            continue
        tightest_yet = tightest.get(window.unit)
        if tightest_yet is None or _tightness(window) < _tightness(tightest_yet):
            tightest[window.unit] = window
    if not tightest:
        return None
    return CallerLimits(**{unit: _allowance(window, now) for unit, window in tightest.items()})


def _tightness(window: WindowState) -> tuple[int, int]:
    """Returns a lower value for a window with less left or, if equal, with the longer wait."""
    return window.remaining, -window.empty_in_ms


def _allowance(window: WindowState, now: datetime) -> Allowance:
    resets_at = now + timedelta(milliseconds=window.empty_in_ms)
    return Allowance(limit=window.limit, remaining=max(0, window.remaining), resets_at=resets_at)
