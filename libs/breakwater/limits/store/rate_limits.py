"""The limits of agents and models on requests, tokens and concurrent calls: over the whole fleet, by Redis' clock.

Requests and tokens are counted in slices of 1 % of the window with running sums, in one hash for each name and window
(a minute, an hour, a day): at most 206 small fields, however much is called. A call counts for at least the whole
window and at most a slice longer, so no window, wherever it is laid, ever holds more than the limit. Calls under way
are a sorted set of leases: those of a worker that died end by themselves. What a call has counted is remembered in a
small hash for each attempt, as long as its lease lasts or it counts, but no longer than an hour after its lease.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from breakwater.kernel.nats.subjects import encode_token
from breakwater.kernel.redis.connection import ScriptCommand, scripts_of
from breakwater.limits.rules.rate_limit import MINUTES, WINDOW_MS
from breakwater.limits.settings import LimitPeriod, RateLimit

SLICES = 100
"""The slices of a window."""

_LUA = scripts_of(__file__)


@dataclass(frozen=True, slots=True)
class LimitedSubject:
    """The subject of a limit: `agent:<agent>` or `model:<model>`. Calls count by name; requests bring the rule."""

    name: str
    rule: RateLimit
    period: LimitPeriod = "minute"
    maxima: tuple[int | None, int | None, int | None] = field(init=False)
    """The limits on requests, tokens and concurrent calls."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "maxima", self.rule.most(self.period))

    @classmethod
    def all_of(cls, name: str, rule: RateLimit) -> tuple[LimitedSubject, ...]:
        """One limit for each period of a rule."""
        return tuple(cls(name, rule, period) for period in rule.periods)


@dataclass(frozen=True, slots=True)
class OverLimit:
    """A refusal of a call by a limit."""

    name: str
    quantity: str
    """`requests_per_minute`, `tokens_per_hour` and so on; or `concurrent_calls`."""
    wait_ms: int | None
    """Requests and tokens: when enough of what counts now will be over; sooner only if calls use less than their worst
    case. Concurrent calls: when enough leases will have ended, which is the latest; calls mostly end sooner. None: it
    can never fit, as the call alone is more than a window's tokens.
    """
    under_way: int = 0
    """The calls that count towards the limit and have not ended."""


class RateLimits:
    """The rate limits of the fleet. Rules are arguments, so a changed rule applies from the next request on."""

    def __init__(self, window_ms: int = WINDOW_MS) -> None:
        """Takes the length of a minute: a multiple of `SLICES`, and the same for all that share a Redis."""
        self._slice_ms = {period: minutes * window_ms // SLICES for period, minutes in MINUTES.items()}

    def admit_command(
        self, attempt_id: str, limits: Sequence[LimitedSubject], tokens: int, lease_ms: int | None
    ) -> ScriptCommand:
        """Counts a call if it fits all its limits; read its answer with `read_admission`.

        While its lease lasts, the same attempt gets the same answer. After that it asks for another call.

        Args:
            attempt_id: whose call it is.
            limits: of the agent and of the model, each name and period once.
            tokens: the call's worst case, input and output; at least 0.
            lease_ms: how long it counts as under way, unless it is settled or released before.
        """
        rules = [
            "" if value is None else value
            for limited in limits
            for value in (self._slice_ms[limited.period], *limited.maxima)
        ]
        return ScriptCommand(
            _LUA["admit"],
            _keys(attempt_id, limits),
            [attempt_id, tokens, "" if lease_ms is None else lease_ms, SLICES, *rules],
        )

    @staticmethod
    def read_admission(answer: Sequence[Any], limits: Sequence[LimitedSubject]) -> OverLimit | None:
        """Reads the answer to `admit_command`: None when the call may be made.

        Of several limits that refuse, it names the one that does so the longest, and concurrent calls last.
        """
        if answer[0] == 1:
            return None
        _, index, quantity, wait_ms, under_way = answer
        limited = limits[int(index) - 1]
        if quantity != "concurrent_calls":
            quantity = f"{quantity}_per_{limited.period}"
        return OverLimit(limited.name, quantity, None if wait_ms < 0 else int(wait_ms), int(under_way))

    @staticmethod
    def settle_command(
        attempt_id: str, limits: Sequence[LimitedSubject], tokens: Sequence[int | None]
    ) -> ScriptCommand:
        """Ends a call: it is under way no more, and counts towards each limit with the tokens it used.

        Unknown tokens (None) change nothing, nor does a limit that the call was not admitted to; limits that are left
        out go on counting it until their windows end. Answers nothing.

        Args:
            attempt_id: of the call.
            limits: that the call was admitted to.
            tokens: for each of `limits`, in the same order.
        """
        used = ["" if count is None else count for count in tokens]
        return ScriptCommand(_LUA["settle"], _keys(attempt_id, limits), [attempt_id, *used])

    @staticmethod
    def release_command(attempt_id: str, limits: Sequence[LimitedSubject]) -> ScriptCommand:
        """The script that takes back a call that was never made: none of it counts. It returns nothing."""
        return ScriptCommand(_LUA["settle"], _keys(attempt_id, limits), [attempt_id, *("unmade" for _ in limits)])


def _keys(attempt_id: str, limits: Sequence[LimitedSubject]) -> list[str]:
    by_name = [key for limited in limits for key in _counts_and_calls(limited.name, limited.period)]
    return [f"bw:rate:attempt:{attempt_id}", *by_name]


@lru_cache(maxsize=4096)
def _counts_and_calls(name: str, period: LimitPeriod) -> tuple[str, str]:
    token = encode_token(name)
    window = "" if period == "minute" else f":{period}"
    return f"bw:rate:counts:{token}{window}", f"bw:rate:calls:{token}"
