"""A span of time cut into equal steps, for figures that are drawn."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Self

from breakwater.contracts.types import NANO_PER_USD, ms_from_time, time_from_ms

STEPS_S = (
    *(60, 120, 300, 600, 900, 1_200, 1_800, 2_700, 3_600, 5_400),
    *(7_200, 10_800, 14_400, 21_600, 28_800, 43_200, 86_400),
)
"""What a step may be. Each divides a day, so that days begin with one."""

MOST_BUCKETS = 120


@dataclass(frozen=True, slots=True)
class Window:
    """From `start` to just before `end`, both aware, in buckets of `step_s` seconds.

    Raises:
        ValueError: it is empty, a time has no offset from UTC, or its length is no multiple of the step.
    """

    start: datetime
    end: datetime
    step_s: int

    def __post_init__(self) -> None:
        if self.start.tzinfo is None or self.end.tzinfo is None:
            raise ValueError("a window's times need an offset from UTC")
        if self.step_s < 1 or self.end <= self.start:
            raise ValueError(f"nothing is between {self.start.isoformat()} and {self.end.isoformat()}")
        if (self.end_ms - self.start_ms) % (self.step_s * 1000):
            raise ValueError(f"a window's length must be a multiple of its step, {self.step_s} s")

    @classmethod
    def last(cls, span: timedelta, now: datetime) -> Self:
        """The window that holds all of the last `span`, with whole steps at both ends; it ends soon after `now`.

        Args:
            span: its step is the shortest that gives at most 120 buckets: at least 40 for spans of 40 minutes up to 119
                days. Shorter spans have fewer, of a minute; longer ones have more, of a day.
            now: aware.
        """
        step_s = next((step for step in STEPS_S if span / timedelta(seconds=step) <= MOST_BUCKETS - 1), STEPS_S[-1])
        step_ms, now_ms = step_s * 1000, ms_from_time(now)
        start_ms = (now_ms - span // timedelta(milliseconds=1)) // step_ms * step_ms
        # A moment that is a bucket's beginning is within a window that ends there no more.
        end_ms = (now_ms // step_ms + 1) * step_ms
        return cls(time_from_ms(start_ms), time_from_ms(end_ms), step_s)

    @property
    def start_ms(self) -> int:
        """Milliseconds since the epoch."""
        return ms_from_time(self.start)

    @property
    def end_ms(self) -> int:
        """Milliseconds since the epoch, the first that is no part of it."""
        return ms_from_time(self.end)

    @property
    def buckets(self) -> int:
        """How many there are."""
        return (self.end_ms - self.start_ms) // (self.step_s * 1000)

    def at(self, bucket: int) -> datetime:
        """When a bucket begins; the first is 0."""
        return time_from_ms(self.start_ms + bucket * self.step_s * 1000)


ENDED = """
PREWHERE completed_at >= fromUnixTimestamp64Milli({start_ms:Int64})
    AND completed_at < fromUnixTimestamp64Milli({end_ms:Int64})
    AND ({agent:String} = '' OR agent = {agent:String})
WHERE NOT dry_run
"""
"""Which executions count in a window."""
CALLED = """
FROM attempts FINAL
PREWHERE started_at >= fromUnixTimestamp64Milli({start_ms:Int64})
    AND started_at < fromUnixTimestamp64Milli({end_ms:Int64})
    AND ({agent:String} = '' OR agent = {agent:String})
"""
"""Which attempts count in a window."""
SETTINGS = " SETTINGS do_not_merge_across_partitions_select_final = 1"
"""Rows are replaced within their partition only: `schema` says why. Reading with FINAL takes half as long so."""


def known_sum(total: Decimal | None, unknown: int) -> int | None:
    """A sum of amounts in nano-dollars; None where it may hide something.

    Args:
        total: of the amounts that are known.
        unknown: how many are not.

    Returns:
        The sum, a lower bound where some are not known; None where nothing but zero is known, and something is not.
    """
    nano = whole_sum(total)
    return nano if nano or not unknown else None


def whole_sum(total: Decimal | None) -> int:
    """The known part of a sum, in nano-dollars."""
    # A sum is a Decimal(38, 9), and may be more than `nano_from_usd` allows a single amount to be. The product is exact
    # up to the 28 digits that Decimal keeps: below 10^19 dollars.
    return 0 if total is None else int(total * NANO_PER_USD)


def within(window: Window, agent: str | None) -> dict[str, object]:
    """The parameters that all queries over a window have."""
    return {
        "start_ms": window.start_ms,
        "end_ms": window.end_ms,
        "step_ms": window.step_s * 1000,
        "agent": agent or "",
    }
