"""The waterfall of an execution: its calls in order, with their durations, and the waits in between. Pure.

Time is linear on the axis. But if a job waited for nearly all of its time, its waits together get a fixed part of the
axis, so that calls of a second stay visible among hours of waiting.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

from breakwater.calls.rules.retry import LONG_WAIT_S
from breakwater.jobs.contract.execution import Attempt, Execution
from breakwater.kernel.pages.charts import WIDTH, AxisSpan

THINNEST = 3.0
"""The least width of a bar, so that calls and waits that took no time are visible."""
MOSTLY_WAITED = 0.9
WAITS_PART = 0.6
"""The part of the axis for waits, if their share of the time exceeds `MOSTLY_WAITED`."""
NEGLIGIBLE_SHARE = 0.02
NEGLIGIBLE_MS = 10
"""A gap that is shorter, or a smaller share of the time, is not shown, because it is a round trip of the plane."""
PARKED = "waited: parked"

_NOWHERE = AxisSpan(0, 0)


@dataclass(slots=True)
class WaterfallRow:
    """A call, or a wait in which no model was called. Times are milliseconds since the job was queued.

    Attributes:
        wait: reason of a wait; empty for a call.
        attempt: the attempt of a call; None for a wait.
        bar: span of the row.
        answer: the part of the bar in which the answer arrived; None if it was not streamed.
    """

    start_ms: float
    end_ms: float
    wait: str = ""
    attempt: Attempt | None = None
    first_token_ms: float | None = None
    bar: AxisSpan = _NOWHERE
    answer: AxisSpan | None = None

    @property
    def duration_ms(self) -> float:
        """The duration in milliseconds."""
        return self.end_ms - self.start_ms


@dataclass(frozen=True, slots=True)
class Waterfall:
    """The calls and waits of an execution.

    Attributes:
        rows: waits and calls, in order.
        total_ms: milliseconds from the job's queueing to its end.
        waited_ms: milliseconds in which no model was called.
        shortened: True if waits are drawn shorter than calls of the same length.
        ticks: times at the quarters of the axis in milliseconds; only at its ends if waits are shortened.
    """

    rows: tuple[WaterfallRow, ...]
    total_ms: float
    waited_ms: float
    shortened: bool
    ticks: tuple[float, ...]


def waterfall(execution: Execution) -> Waterfall:
    """Builds the waterfall of a record."""
    calls = [_call(attempt, execution.queued_at) for attempt in execution.attempts]
    end = max([_since(execution.queued_at, execution.completed_at), *(call.end_ms for call in calls)])
    rows = tuple(_with_waits(execution, calls, end))
    axis = _Axis.of(calls, end)
    for row in rows:
        row.bar = axis.span(row.start_ms, row.end_ms)
        if row.first_token_ms is not None:
            row.answer = axis.span(row.first_token_ms, row.end_ms)
    ticks = (0.0, end) if axis.shortened else tuple(end * quarter / 4 for quarter in range(5))
    return Waterfall(rows, end, axis.waited_ms, axis.shortened, ticks)


def _call(attempt: Attempt, queued_at: datetime) -> WaterfallRow:
    start = _since(queued_at, attempt.started_at)
    end = max(_since(queued_at, attempt.completed_at), start)
    first = None if attempt.first_token_ms is None else min(start + attempt.first_token_ms, end)
    return WaterfallRow(start, end, attempt=attempt, first_token_ms=first)


def _since(beginning: datetime, moment: datetime) -> float:
    # Never negative, although the clocks of two machines may differ.
    return max((moment - beginning).total_seconds() * 1000, 0.0)


def _with_waits(execution: Execution, calls: Iterable[WaterfallRow], end: float) -> Iterator[WaterfallRow]:
    dispatched = min(_since(execution.queued_at, execution.dispatched_at), end)
    if dispatched:
        yield WaterfallRow(0.0, dispatched, "queued")
    previous_end = dispatched
    gap_reason = "admission"
    for attempt, call in zip(execution.attempts, calls, strict=True):
        yield from _waits_before(attempt, previous_end, call.start_ms, gap_reason, end)
        yield call
        previous_end = max(previous_end, call.end_ms)
        gap_reason = "between attempts"
    if execution.cache_hit:
        gap_reason = "looked up in the cache"
    elif execution.attempts:
        gap_reason = "after the last attempt"
    yield from _gap(gap_reason, previous_end, end, end)


def _waits_before(attempt: Attempt, start: float, end: float, gap_reason: str, total: float) -> Iterator[WaterfallRow]:
    """Yields the waits before an attempt: its recorded wait, and the remaining gap, for `gap_reason`."""
    waited_until = min(start + attempt.backoff_ms, end)
    if attempt.backoff_ms and waited_until > start:
        if attempt.backoff_ms >= LONG_WAIT_S * 1000:
            wait_reason = PARKED
            gap_reason = "queued again"
        else:
            # Only retries have a back-off; other attempts wait for a rate limit, a budget or a probe.
            wait_reason = "waited: back-off" if attempt.cause == "retry" else "waited for capacity"
        yield WaterfallRow(start, waited_until, wait_reason)
        start = waited_until
    yield from _gap(gap_reason, start, end, total)


def _gap(reason: str, start: float, end: float, total: float) -> Iterator[WaterfallRow]:
    if end - start >= max(NEGLIGIBLE_MS, total * NEGLIGIBLE_SHARE):
        yield WaterfallRow(start, end, reason)


@dataclass(frozen=True, slots=True)
class _Axis:
    """The positions of times on the axis, linear between its points; there are as many positions as times."""

    times: tuple[float, ...]
    positions: tuple[float, ...]
    waited_ms: float
    shortened: bool

    @classmethod
    def of(cls, calls: Iterable[WaterfallRow], end: float) -> _Axis:
        busy = _merge(sorted((call.start_ms, call.end_ms) for call in calls))
        called = sum(until - since for since, until in busy)
        waited = end - called
        shortened = called > 0 and waited > end * MOSTLY_WAITED
        if not shortened:
            return cls((0.0, end or 1.0), (0.0, WIDTH), waited, shortened=False)
        times = sorted({0.0, end, *(edge for span in busy for edge in span)})
        starts = {since for since, _ in busy}
        scales = {True: WIDTH * (1 - WAITS_PART) / called, False: WIDTH * WAITS_PART / waited}
        positions = [0.0]
        for since, until in pairwise(times):
            positions.append(positions[-1] + (until - since) * scales[since in starts])
        return cls(tuple(times), tuple(positions), waited, shortened=True)

    def span(self, start: float, end: float) -> AxisSpan:
        x = self._position(start)
        width = max(self._position(end) - x, THINNEST)
        return AxisSpan(min(x, WIDTH - THINNEST), min(width, WIDTH - min(x, WIDTH - THINNEST)))

    def _position(self, time: float) -> float:
        index = min(max(bisect_right(self.times, time) - 1, 0), len(self.times) - 2)
        fraction = (time - self.times[index]) / (self.times[index + 1] - self.times[index])
        return self.positions[index] + fraction * (self.positions[index + 1] - self.positions[index])


def _merge(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Merges sorted spans that overlap or touch, and drops empty ones."""
    merged: list[tuple[float, float]] = []
    for start, end in spans:
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged
