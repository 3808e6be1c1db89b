"""The waterfall of an execution: what is named, and where it is drawn."""

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakwater.jobs.contract.execution import Attempt, Execution
from breakwater.kernel.pages.charts import WIDTH, AxisSpan
from breakwater.records.pages.waterfall import MOSTLY_WAITED, THINNEST, WAITS_PART, waterfall
from tests.records.samples import NOON, attempt, execution
from tests.tables import each_row


def at(ms: float) -> Any:
    return NOON + timedelta(milliseconds=ms)


def tried(number: int, start_ms: float, duration_ms: int, **fields: Any) -> Attempt:
    return attempt("e1", number, started_at=at(start_ms), duration_ms=duration_ms, **fields)


def ended(total_ms: int, *attempts: Attempt, dispatched_ms: float = 0, **fields: Any) -> Execution:
    times = {"queued_at": NOON, "dispatched_at": at(dispatched_ms), "completed_at": at(total_ms)}
    return execution("e1", **(times | {"duration_ms": total_ms, "attempts": attempts} | fields))


def named(one: Execution) -> "list[str | tuple[str, float, float]]":
    """Its rows: waits with their times, and calls by their numbers."""
    rows = waterfall(one).rows
    return [(row.wait, row.start_ms, row.end_ms) if not row.attempt else f"call {row.attempt.number}" for row in rows]


RETRY = {"cause": "retry"}


@each_row(
    ("one", "rows"),
    [
        pytest.param(ended(1_000, tried(1, 0, 1_000)), ["call 1"], id="nothing was waited for"),
        pytest.param(
            ended(1_000, tried(1, 205, 795), dispatched_ms=200),
            [("queued", 0, 200), "call 1"],
            id="a wait for a worker",
        ),
        pytest.param(
            ended(3_000, tried(1, 500, 2_500), dispatched_ms=100),
            [("queued", 0, 100), ("admission", 100, 500), "call 1"],
            id="the plane took its time before the call",
        ),
        pytest.param(
            ended(3_000, tried(1, 0, 1_000), tried(2, 1_805, 1_195, backoff_ms=800, **RETRY)),
            ["call 1", ("waited: back-off", 1_000, 1_800), "call 2"],
            id="a back-off",
        ),
        pytest.param(
            ended(100_000, tried(1, 0, 1_000), tried(2, 75_000, 25_000, backoff_ms=60_000, **RETRY)),
            ["call 1", ("waited: parked", 1_000, 61_000), ("queued again", 61_000, 75_000), "call 2"],
            id="a parked job waits for a worker once more",
        ),
        pytest.param(
            ended(3_000, tried(1, 600, 2_400, backoff_ms=600)),
            [("waited for capacity", 0, 600), "call 1"],
            id="a rate limit",
        ),
        pytest.param(
            ended(3_000, tried(1, 0, 1_000), tried(2, 1_500, 1_500, cause="fallback")),
            ["call 1", ("between attempts", 1_000, 1_500), "call 2"],
            id="what nothing accounts for",
        ),
        pytest.param(
            ended(3_000, tried(1, 0, 1_000), tried(2, 1_020, 1_980, cause="fallback")),
            ["call 1", "call 2"],
            id="a round trip is no news",
        ),
        pytest.param(
            ended(5_000, tried(1, 0, 1_000, outcome="error"), status="cancelled"),
            ["call 1", ("after the last attempt", 1_000, 5_000)],
            id="cancelled while it waited",
        ),
        pytest.param(
            ended(900, dispatched_ms=100, cache_hit=True),
            [("queued", 0, 100), ("looked up in the cache", 100, 900)],
            id="answered from the cache",
        ),
        pytest.param(
            ended(1_000, tried(1, 0, 900), tried(2, 600, 400, backoff_ms=500, **RETRY)),
            ["call 1", "call 2"],
            id="clocks of two workers differ",
        ),
        pytest.param(
            ended(1_000, tried(1, -500, 900), dispatched_ms=-200),
            ["call 1", ("after the last attempt", 400, 1_000)],
            id="a worker's clock is behind",
        ),
        pytest.param(ended(0), [], id="it took no time at all"),
    ],
)
def test_waits_are_named(one: Execution, rows: "list[Any]") -> None:
    assert named(one) == [row for row in rows if row]


def test_time_is_linear_and_the_answer_begins_with_its_first_token() -> None:
    drawn = waterfall(ended(1_000, tried(1, 200, 800, first_token_ms=300), dispatched_ms=200))
    queued, call = drawn.rows
    assert (queued.bar, call.bar, call.answer) == (AxisSpan(0, 200), AxisSpan(200, 800), AxisSpan(500, 500))
    assert (drawn.total_ms, drawn.waited_ms, drawn.shortened) == (1_000, 200, False)
    assert drawn.ticks == (0, 250, 500, 750, 1_000)


def test_calls_of_seconds_beside_hours_of_waiting_are_seen() -> None:
    hour = 3_600_000
    drawn = waterfall(
        ended(
            3 * hour + 2_000,
            tried(1, 0, 500),
            tried(2, hour + 500, 1_000, backoff_ms=hour, **RETRY),
            tried(3, 3 * hour + 1_500, 500, backoff_ms=2 * hour, **RETRY),
        )
    )
    calls = [row.bar.width for row in drawn.rows if row.attempt]
    waits = [row.bar.width for row in drawn.rows if row.wait]
    assert drawn.shortened
    assert drawn.ticks == (0, 3 * hour + 2_000), "the quarters would be wrong"
    assert calls == pytest.approx([100, 200, 100], abs=0.1)
    assert waits == pytest.approx([200, 400], abs=0.1)
    assert sum(waits) == pytest.approx(WIDTH * WAITS_PART, abs=0.1)


def test_what_took_no_time_is_seen_and_stays_on_the_axis() -> None:
    refused = tried(1, 1_000, 0, outcome="short_circuited", short_circuited=True)
    assert waterfall(ended(1_000, refused)).rows[-1].bar == AxisSpan(WIDTH - THINNEST, THINNEST)


@st.composite
def executions(draw: Any) -> Execution:
    times = sorted(draw(st.lists(st.integers(0, 10**8), min_size=1, max_size=20)))
    attempts = [
        tried(
            number,
            start,
            draw(st.integers(0, 10**7)),
            backoff_ms=draw(st.integers(0, 10**7)),
            first_token_ms=draw(st.none() | st.integers(0, 10**7)),
        )
        for number, start in enumerate(times, 1)
    ]
    return ended(draw(st.integers(0, 10**8)), *attempts, dispatched_ms=draw(st.integers(-1000, 10**7)))


@given(executions())
def test_every_row_is_on_the_axis_and_in_order(one: Execution) -> None:
    drawn = waterfall(one)
    for row in drawn.rows:
        for bar in filter(None, (row.bar, row.answer)):
            assert bar.x >= 0
            assert bar.width > 0
            assert bar.x + bar.width <= WIDTH + 1e-6
    starts = [row.start_ms for row in drawn.rows]
    assert starts == sorted(starts)
    assert [row.attempt for row in drawn.rows if row.attempt] == list(one.attempts)
    assert 0 <= drawn.waited_ms <= drawn.total_ms
    assert not drawn.shortened or drawn.waited_ms > drawn.total_ms * MOSTLY_WAITED
