from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from breakwater.jobs.contract.execution import Attempt
from breakwater.jobs.rules.record import spent_by
from breakwater.limits.rules.budget import fits
from tests.tables import each_row

NANO = st.integers(0, 2**60)


@each_row(
    ("amount", "limit", "spent", "expected"),
    [
        (1, None, 10**18, True),
        (10, 10, 0, True),
        (11, 10, 0, False),
        (1, 10, 9, True),
        (1, 10, 10, False),
        (0, 10, 10, True),
        (0, 10, 11, False),
        (0, 0, 0, True),
        (1, 2**53, 2**53, False),
    ],
)
def test_an_amount_fits_up_to_the_cap_and_not_beyond(
    amount: int, limit: int | None, spent: int, expected: bool
) -> None:
    assert fits(amount, limit=limit, spent=spent) is expected


@given(NANO, NANO, NANO, st.integers(0, 2**40))
def test_more_spent_never_makes_room(amount: int, limit: int, spent: int, more: int) -> None:
    if not fits(amount, limit=limit, spent=spent):
        assert not fits(amount, limit=limit, spent=spent + more)
        assert not fits(amount + more, limit=limit, spent=spent)


def attempt(**fields: Any) -> Attempt:
    at = datetime(2026, 11, 21, 10, tzinfo=UTC)
    return Attempt.model_construct(started_at=at, completed_at=at, **{"cost": None, "reserved": None, **fields})


def test_a_call_of_unknown_cost_counts_as_what_was_held_for_it() -> None:
    assert spent_by([]) == 0
    assert (
        spent_by([attempt(cost=7, reserved=100), attempt(cost=0, reserved=100), attempt(reserved=30), attempt()]) == 37
    )
