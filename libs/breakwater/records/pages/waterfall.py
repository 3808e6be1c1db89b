"""The waterfall of an execution: its calls in order, with their durations, and the waits in between.

Pure: from a record to rows with their places on one axis. Time on it is linear, but where a job waited for nearly all
of its time, all its waits together get a fixed part of the axis: calls of a second stay visible among hours of waiting.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

from breakwater.calls.rules.retry import LONG_WAIT_S
from breakwater.jobs.contract.execution import Attempt, Execution

WIDTH = 1000
"""Width of the axis."""
THINNEST = 3.0
"""The least width of a bar, so that calls and waits that took no time are visible."""
MOSTLY_WAITED = 0.9
WAITS_PART = 0.6
"""The part of the axis for waits, if they take more of the time than `MOSTLY_WAITED`."""
NEGLIGIBLE_PART, NEGLIGIBLE_MS = 0.02, 10
"""A gap without a known reason is named from this size on: a round trip of the plane is no news."""
PARKED = "waited: parked"


@dataclass(frozen=True, slots=True)
class Drawn:
    """A place on the axis."""

    x: float
    width: float


@dataclass(slots=True)
class WaterfallRow:
    """A call, or a wait in which no model was called. Times are milliseconds since the job was queued.

    Attributes:
        wait: the reason of a wait; empty for a call.
        attempt: None for a wait.
        bar: its place.
        answer: the part of the bar in which the answer came; None if it did not stream.
    """

    start_ms: float
    end_ms: float
    wait: str = ""
    attempt: Attempt | None = None
    first_token_ms: float | None = None
    bar: Drawn = Drawn(0, 0)
    answer: Drawn | None = None

    @property
    def duration_ms(self) -> float:
        """Its length."""
        return self.end_ms - self.start_ms


@dataclass(frozen=True, slots=True)
class Waterfall:
    """All of an execution, in order.

    Attributes:
        rows: waits and calls.
        total_ms: from when the job was queued to its end.
        waited_ms: the part of it in which no model was called.
        shortened: True if waits are drawn shorter than calls of the same length.
        ticks: the times at the quarters of the axis, in milliseconds; only at its ends if waits are shortened.
    """

    rows: tuple[WaterfallRow, ...]
    total_ms: float
    waited_ms: float
    shortened: bool
    ticks: tuple[float, ...]


def waterfall(execution: Execution) -> Waterfall:
    """The waterfall of a record."""
    calls = [_call(attempt, execution.queued_at) for attempt in execution.attempts]
    end = max([_since(execution.queued_at, execution.completed_at), *(call.end_ms for call in calls)])
    rows, axis = tuple(_with_waits(execution, calls, end)), _Axis.of(calls, end)
    for row in rows:
        row.bar = axis.drawn(row.start_ms, row.end_ms)
        if row.first_token_ms is not None:
            row.answer = axis.drawn(row.first_token_ms, row.end_ms)
    ticks = (0.0, end) if axis.shortened else tuple(end * quarter / 4 for quarter in range(5))
    return Waterfall(rows, end, axis.waited_ms, axis.shortened, ticks)


def _call(attempt: Attempt, queued_at: datetime) -> WaterfallRow:
    start = _since(queued_at, attempt.started_at)
    end = max(_since(queued_at, attempt.completed_at), start)
    first = None if attempt.first_token_ms is None else min(start + attempt.first_token_ms, end)
    return WaterfallRow(start, end, attempt=attempt, first_token_ms=first)


def _since(beginning: datetime, moment: datetime) -> float:
    # Not before the beginning: clocks of two machines differ.
    return max((moment - beginning).total_seconds() * 1000, 0.0)


def _with_waits(execution: Execution, calls: Iterable[WaterfallRow], end: float) -> Iterator[WaterfallRow]:
    dispatched = min(_since(execution.queued_at, execution.dispatched_at), end)
    if dispatched:
        yield WaterfallRow(0.0, dispatched, "queued")
    at, rest = dispatched, "admission"
    for attempt, call in zip(execution.attempts, calls, strict=True):
        yield from _gap(attempt, at, call.start_ms, rest, end)
        yield call
        at, rest = max(at, call.end_ms), "between attempts"
    if execution.cache_hit:
        rest = "looked up in the cache"
    elif execution.attempts:
        rest = "after the last attempt"
    yield from _named(rest, at, end, end)


def _gap(following: Attempt, start: float, end: float, rest: str, whole: float) -> Iterator[WaterfallRow]:
    """The time between two attempts: the wait on record of the next one, and the rest."""
    waited = min(start + following.backoff_ms, end)
    if following.backoff_ms and waited > start:
        if following.backoff_ms >= LONG_WAIT_S * 1000:
            reason, rest = PARKED, "queued again"
        else:
            # Only retries are delayed by their policy; other attempts wait for a rate limit, a budget or a probe.
            reason = "waited: back-off" if following.cause == "retry" else "waited for capacity"
        yield WaterfallRow(start, waited, reason)
        start = waited
    yield from _named(rest, start, end, whole)


def _named(what: str, start: float, end: float, whole: float) -> Iterator[WaterfallRow]:
    if end - start >= max(NEGLIGIBLE_MS, whole * NEGLIGIBLE_PART):
        yield WaterfallRow(start, end, what)


@dataclass(frozen=True, slots=True)
class _Axis:
    """Places of times: linear between its points, with as many places as times."""

    times: tuple[float, ...]
    places: tuple[float, ...]
    waited_ms: float
    shortened: bool

    @classmethod
    def of(cls, calls: Iterable[WaterfallRow], end: float) -> _Axis:
        busy = _merged(sorted((call.start_ms, call.end_ms) for call in calls))
        called = sum(until - since for since, until in busy)
        waited = end - called
        shortened = called > 0 and waited > end * MOSTLY_WAITED
        if not shortened:
            return cls((0.0, end or 1.0), (0.0, WIDTH), waited, shortened=False)
        times = sorted({0.0, end, *(edge for span in busy for edge in span)})
        starts = {since for since, _ in busy}
        scales = {True: WIDTH * (1 - WAITS_PART) / called, False: WIDTH * WAITS_PART / waited}
        places = [0.0]
        for since, until in pairwise(times):
            places.append(places[-1] + (until - since) * scales[since in starts])
        return cls(tuple(times), tuple(places), waited, shortened=True)

    def drawn(self, start: float, end: float) -> Drawn:
        x = self._place(start)
        width = max(self._place(end) - x, THINNEST)
        return Drawn(min(x, WIDTH - THINNEST), min(width, WIDTH - min(x, WIDTH - THINNEST)))

    def _place(self, time: float) -> float:
        at = min(max(bisect_right(self.times, time) - 1, 0), len(self.times) - 2)
        part = (time - self.times[at]) / (self.times[at + 1] - self.times[at])
        return self.places[at] + part * (self.places[at + 1] - self.places[at])


def _merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans of some length, in order, none of which overlaps or touches another."""
    merged: list[tuple[float, float]] = []
    for start, end in spans:
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged
