"""A span of time cut into equal steps, for figures that are drawn."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Self

from breakwater.kernel.types import ms_from_time, time_from_ms

STEPS_S = (
    *(1, 2, 5, 10, 15, 30),
    *(60, 120, 300, 600, 900, 1_200, 1_800, 2_700, 3_600, 5_400),
    *(7_200, 10_800, 14_400, 21_600, 28_800, 43_200, 86_400),
)
"""Steps of a window. Each divides a day, so that days begin with a step."""

MAX_BUCKETS = 120
_MAX_EXACT = 800
"""The hours of a month, of which one is missing in spring: nothing else divides it."""


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """The time from `start` to just before `end`, both aware, in buckets of `step_s` seconds.

    Raises:
        ValueError: it is empty, a time has no offset from UTC, or its length is no multiple of the step.
    """

    start: datetime
    end: datetime
    step_s: int

    def __post_init__(self) -> None:
        if self.start.tzinfo is None or self.end.tzinfo is None:
            raise ValueError("the times of a time range need an offset from UTC")
        if self.step_s < 1 or self.end <= self.start:
            raise ValueError(
                "the end of the time range must be after its start; got "
                f"{self.start.isoformat()} to {self.end.isoformat()}"
            )
        if (self.end_ms - self.start_ms) % (self.step_s * 1000):
            raise ValueError(f"the length of a time range must be a multiple of its step, {self.step_s} s")

    @classmethod
    def last(cls, span: timedelta, now: datetime) -> Self:
        """The window that holds all of the last `span`, with whole steps at both ends; it ends soon after `now`.

        Args:
            span: its step is the shortest that gives at most 120 buckets: at least 40 for spans of 40 seconds up to 119
                days. Longer ones have more, of a day.
            now: aware.
        """
        step_s = _step_s(span)
        step_ms = step_s * 1000
        now_ms = ms_from_time(now)
        start_ms = (now_ms - span // timedelta(milliseconds=1)) // step_ms * step_ms
        # A moment that is a bucket's beginning is within a window that ends there no more.
        end_ms = (now_ms // step_ms + 1) * step_ms
        return cls(time_from_ms(start_ms), time_from_ms(end_ms), step_s)

    @classmethod
    def since(cls, start: datetime, now: datetime) -> Self:
        """From exactly `start` to soon after `now`, in whole steps; as many as in `last`, or more: of a second."""
        step = timedelta(seconds=_step_s(now - start))
        return cls(start, start + ((now - start) // step + 1) * step, int(step.total_seconds()))

    @classmethod
    def between(cls, start: datetime, end: datetime) -> Self:
        """From exactly `start` to exactly `end`, where any step divides that; else as `since`.

        Args:
            start: aware, a whole second.
            end: the same.
        """
        length_s = int((end - start).total_seconds())
        divides = [step for step in STEPS_S if length_s % step == 0 and length_s // step <= _MAX_EXACT]
        if not divides:
            return cls.since(start, end)
        return cls(start, end, next((step for step in divides if length_s // step <= MAX_BUCKETS), divides[-1]))

    @property
    def preceding(self) -> Self:
        """The window of the same length just before this one, in the same steps."""
        return type(self)(self.start - (self.end - self.start), self.start, self.step_s)

    @property
    def start_ms(self) -> int:
        """The start, in milliseconds since the epoch."""
        return ms_from_time(self.start)

    @property
    def end_ms(self) -> int:
        """The end, in milliseconds since the epoch; it is not part of the window."""
        return ms_from_time(self.end)

    @property
    def buckets(self) -> int:
        """The number of buckets."""
        return (self.end_ms - self.start_ms) // (self.step_s * 1000)

    def at(self, bucket: int) -> datetime:
        """The beginning of a bucket; the first is 0."""
        return time_from_ms(self.start_ms + bucket * self.step_s * 1000)


def _step_s(span: timedelta) -> int:
    """The shortest that leaves room for one more bucket."""
    return next((step for step in STEPS_S if span / timedelta(seconds=step) <= MAX_BUCKETS - 1), STEPS_S[-1])
