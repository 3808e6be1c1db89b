"""What attempts add to their budgets."""

from __future__ import annotations

from dataclasses import astuple
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakwater.limits.rules.ledger import FIGURES, AttemptSums, charged_at, figures_of, is_reached, ledger, places_of
from tests.records.test_messages import attempt
from tests.tables import each_row

BERLIN = ZoneInfo("Europe/Berlin")
BEFORE, AFTER = datetime(2026, 10, 31, 22, 59, 59, 999_000, UTC), datetime(2026, 10, 31, 23, tzinfo=UTC)
SMALL = st.integers(-(2**60), 2**60)
FIGURE_SETS = st.builds(AttemptSums, *([SMALL] * len(FIGURES)))


@each_row(
    ("fields", "expected"),
    [
        pytest.param(
            {"cost": 60, "cost_basis": "billed", "reserved": 100},
            AttemptSums(spent=60, calls=1, gauged=1, foreseen=100, measured=60),
            id="a success that was billed gauges the estimate",
        ),
        pytest.param(
            {"cost": 130, "cost_basis": "billed", "reserved": 100},
            AttemptSums(spent=130, calls=1, gauged=1, foreseen=100, measured=130, exceeded=1),
            id="one that cost more than was held",
        ),
        pytest.param(
            {"cost": 100, "cost_basis": "billed", "reserved": 100},
            AttemptSums(spent=100, calls=1, gauged=1, foreseen=100, measured=100),
            id="one that cost what was held did not cost more",
        ),
        pytest.param(
            {"cost": 0, "cost_basis": "billed", "reserved": 0}, AttemptSums(calls=1, gauged=1), id="one that is free"
        ),
        pytest.param(
            {"cost": 60, "cost_basis": "billed"}, AttemptSums(spent=60, calls=1), id="nothing was held: nothing gauged"
        ),
        pytest.param(
            {"cost": 60, "cost_basis": "estimated", "reserved": 100},
            AttemptSums(spent=60, calls=1),
            id="what is estimated itself gauges nothing",
        ),
        pytest.param({"reserved": 100}, AttemptSums(calls=1, unpriced=1), id="an unknown cost is not zero"),
        pytest.param(
            {"outcome": "error", "cost": 40, "cost_basis": "billed", "reserved": 100},
            AttemptSums(spent=40, calls=1),
            id="a failure is paid for but gauges nothing",
        ),
        pytest.param(
            {"outcome": "worker_lost", "cost": 100, "cost_basis": "estimated", "reserved": 100},
            AttemptSums(spent=100, calls=1),
            id="of a worker that was lost",
        ),
        pytest.param(
            {"outcome": "worker_lost", "reserved": 100},
            AttemptSums(calls=1, unpriced=1),
            id="of a worker that was lost, at no known cost",
        ),
        pytest.param(
            {
                "outcome": "worker_lost",
                "cost": 100,
                "cost_basis": "estimated",
                "reserved": 100,
                "input_tokens": 30,
                "reserved_tokens": 4_126,
            },
            AttemptSums(spent=100, calls=1, tokens=4_126),
            id="of a lost call, all tokens that were reserved count",
        ),
        pytest.param(
            {"cost_basis": "unknown", "outcome": "cancelled", "input_tokens": 30, "reserved_tokens": 4_126},
            AttemptSums(calls=1, unpriced=1, tokens=4_126),
            id="as of one of unknown cost",
        ),
        pytest.param(
            {
                "cost": 100,
                "cost_basis": "estimated",
                "reserved": 100,
                "reserved_tokens": 4_126,
                "input_tokens": 30,
                "output_tokens": 2,
            },
            AttemptSums(spent=100, calls=1, tokens=4_126),
            id="an answer without usage is charged its worst case, also in tokens",
        ),
        pytest.param(
            {
                "outcome": "error",
                "cost": 40,
                "cost_basis": "estimated",
                "reserved": 100,
                "reserved_tokens": 4_126,
                "input_tokens": 30,
                "output_tokens": 2,
            },
            AttemptSums(spent=40, calls=1, tokens=32),
            id="a part of a stream counts what came of it",
        ),
        pytest.param(
            {"outcome": "error", "cost": 0, "cost_basis": "billed", "reserved": 100, "reserved_tokens": 4_126},
            AttemptSums(calls=1),
            id="a call that never left used no tokens",
        ),
        pytest.param(
            {"cost": 9, "cost_basis": "billed"}, AttemptSums(spent=9, calls=1), id="a program that reports no tokens"
        ),
        pytest.param(
            {"outcome": "short_circuited", "short_circuited": True, "cost": 0, "cost_basis": "billed", "reserved": 9},
            AttemptSums(),
            id="no call was made",
        ),
    ],
)
def test_what_an_attempt_adds(fields: dict[str, Any], expected: AttemptSums) -> None:
    assert figures_of(attempt(**fields)) == expected


def test_a_cost_counts_when_it_was_reserved_or_else_when_the_attempt_began() -> None:
    assert charged_at(attempt(started_at=AFTER, reserved_at=BEFORE)) == BEFORE
    assert charged_at(attempt(started_at=AFTER)) == AFTER


def test_an_attempt_counts_in_its_day_and_month_for_all_its_agent_and_its_tenant() -> None:
    keys = ("global", "agent:a", "tenant:t")
    for moment, day, month in ((BEFORE, "2026-10-31", "2026-10"), (AFTER, "2026-11-01", "2026-11")):
        found = places_of(attempt(tenant="t", reserved_at=moment), BERLIN)
        assert found == tuple((name, key) for key in keys for name in (day, month))


def test_a_ledger_has_the_sums_of_each_period_and_scope() -> None:
    sums = ledger(
        [
            attempt(agent="a", tenant="t", cost=5, started_at=BEFORE),
            attempt(agent="b", tenant="t", cost=7, started_at=AFTER, reserved_at=BEFORE),
            attempt(agent="b", cost=None, started_at=AFTER),
            attempt(agent="c", short_circuited=True, outcome="short_circuited", cost=0, started_at=AFTER),
        ],
        BERLIN,
    )
    before = {
        "global": AttemptSums(spent=12, calls=2),
        "agent:a": AttemptSums(spent=5, calls=1),
        "agent:b": AttemptSums(spent=7, calls=1),
        "tenant:t": AttemptSums(spent=12, calls=2),
    }
    after = dict.fromkeys(("global", "agent:b"), AttemptSums(calls=1, unpriced=1))
    assert sums == {
        **{(name, key): one for name in ("2026-10-31", "2026-10") for key, one in before.items()},
        **{(name, key): one for name in ("2026-11-01", "2026-11") for key, one in after.items()},
    }


@given(FIGURE_SETS, FIGURE_SETS)
def test_figures_are_added_and_taken_away_one_by_one(one: AttemptSums, other: AttemptSums) -> None:
    assert astuple(one + other) == tuple(a + b for a, b in zip(astuple(one), astuple(other), strict=True))
    assert one + other - other == one
    assert one + AttemptSums() == one
    assert dict(one.items()) == dict(zip(FIGURES, astuple(one), strict=True))


@each_row(
    ("spent", "reserved", "refused", "usual", "expected"),
    [
        pytest.param(100, 0, False, 10, True, id="all is spent"),
        pytest.param(80, 20, False, 10, True, id="the rest is held by calls in flight"),
        pytest.param(95, 0, False, 10, False, id="a call may not fit, and none has been refused"),
        pytest.param(95, 0, True, 10, True, id="a usual call does not fit, and was refused"),
        pytest.param(90, 0, True, 10, False, id="a usual call fits by now"),
        pytest.param(10, 30, True, 10, False, id="it was refused because others held the rest"),
        pytest.param(10, 0, True, None, True, id="nothing says that a call fits"),
    ],
)
def test_a_cap_is_reached(spent: int, reserved: int, refused: bool, usual: int | None, expected: bool) -> None:
    figures = (
        AttemptSums(spent=spent, calls=4) if usual is None else AttemptSums(spent, 4, gauged=2, foreseen=2 * usual)
    )
    assert is_reached(100, figures, reserved, refused=refused) is expected
