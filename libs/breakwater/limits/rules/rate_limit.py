"""Limits on calls in the last minute, hour or day, and on calls at the same time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, cast, get_args

from breakwater.limits.contract import LimitWindow
from breakwater.limits.rules.limit import Limit
from breakwater.limits.rules.scopes import may_be_made_up, parts_of

if TYPE_CHECKING:
    from breakwater.limits.rules.caller_limits import WindowState

SlidingWindow = Literal["minute", "hour", "rolling day"]
"""The windows that slide."""

WindowUnit = Literal["requests", "tokens", "usd"]
WINDOW_UNITS: tuple[WindowUnit, ...] = get_args(WindowUnit)

WINDOW_MS = 60_000
"""The window of limits per minute; those per hour and day are multiples of it (`MINUTES`)."""
MINUTES: Mapping[SlidingWindow, int] = {"minute": 1, "hour": 60, "rolling day": 1440}

HELD = "ModelHeldError"
"""The error class of a call that is refused because its model is held."""


@dataclass(frozen=True, slots=True)
class RateWindow:
    """A scope's last minute, hour or day, and the limits on it.

    Attributes:
        key: the scope's key, such as `agent:writer`.
        window: its length.
        limits: at most one for each unit.
        maxima: the amounts of `limits`, in the order of `WINDOW_UNITS`.
        flags: for the script that reserves: `n` where input that a provider read from its cache does not count, `p`
            where the scope is a model, a deployment or a provider alone, whose own limit it may be, and `m` where the
            senders of jobs may make up the scope, as no limit on it is of one scope.
        refuses: the first letters of the units whose limits refuse calls, and have none wait.
    """

    key: str
    window: SlidingWindow
    limits: Mapping[WindowUnit, Limit]
    maxima: tuple[int | None, ...] = field(init=False)
    flags: str = field(init=False)
    refuses: str = field(init=False)

    def __post_init__(self) -> None:
        by_unit = [self.limits.get(unit) for unit in WINDOW_UNITS]
        object.__setattr__(self, "maxima", tuple(None if limit is None else limit.amount for limit in by_unit))
        on_tokens = self.limits.get("tokens")
        parts = parts_of(self.key)
        is_named = any(limit.is_named for limit in self.limits.values())
        flags = "" if on_tokens is None or on_tokens.counts_cached else "n"
        flags += "p" if {part.kind for part in parts} <= {"model", "provider", "deployment"} else ""
        flags += "m" if not is_named and may_be_made_up(parts) else ""
        object.__setattr__(self, "flags", flags)
        refusing = (unit for unit, limit in self.limits.items() if limit.action != "wait")
        object.__setattr__(self, "refuses", "".join(unit[0] for unit in refusing))


@dataclass(frozen=True, slots=True)
class RateSlots:
    """The calls of a scope at the same time, and the limit on them."""

    key: str
    limit: Limit


@dataclass(frozen=True, slots=True)
class RateLimits:
    """The windows and slots that a call counts in."""

    windows: tuple[RateWindow, ...] = ()
    slots: tuple[RateSlots, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.windows or self.slots)

    def __add__(self, added: RateLimits) -> RateLimits:
        if not (self and added):
            return self or added
        return RateLimits(self.windows + added.windows, self.slots + added.slots)


NO_RATE_LIMITS = RateLimits()


@dataclass(frozen=True, slots=True)
class OverRate:
    """A call that a window or slots have no room for.

    Attributes:
        key: the scope's key.
        limit: the limit that has no room.
        wait_ms: of a window, when enough of what counts, and of what waits before it, will be over; sooner only if
            calls use less than their worst case. Of slots, when enough leases will have ended, which is the latest.
            None: it can never fit, as the call alone exceeds the limit.
        ask_again_ms: when the call should ask again; earlier where calls under way may free some of the amount.
        ahead: the calls that wait before it.
        windows: all windows of the call, in which it does not count.
    """

    key: str
    limit: Limit
    wait_ms: int | None
    ask_again_ms: int = 0
    ahead: int = 0
    windows: tuple[WindowState, ...] = ()


def rate_limits_of(key: str, limits: Iterable[Limit]) -> RateLimits:
    """Returns the windows and slots of one scope. Of two limits on one unit in one window, the first one counts."""
    windows: dict[SlidingWindow, dict[WindowUnit, Limit]] = {}
    slots: Sequence[RateSlots] = ()
    for limit in limits:
        if limit.unit == "concurrent":
            slots = slots or (RateSlots(key, limit),)
        elif (window := _sliding(limit.window)) is not None:
            windows.setdefault(window, {}).setdefault(limit.unit, limit)
    return RateLimits(tuple(RateWindow(key, window, by_unit) for window, by_unit in windows.items()), tuple(slots))


def _sliding(window: LimitWindow | None) -> SlidingWindow | None:
    return cast(SlidingWindow, window) if window in MINUTES else None
