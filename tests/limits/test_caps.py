from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from breakwater.jobs.contract.execution import Attempt
from breakwater.limits.rules.budget import fits, spent_by
from tests.tables import each_row

NANO = st.integers(0, 2**60)


@each_row(
    ("amount", "limit", "spent", "reserved", "expected"),
    [
        (1, None, 10**18, 10**18, True),
        (10, 10, 0, 0, True),
        (11, 10, 0, 0, False),
        (1, 10, 9, 0, True),
        (1, 10, 5, 4, True),
        (1, 10, 5, 5, False),
        (1, 10, 10, 0, False),
        (0, 10, 10, 0, True),
        (0, 10, 11, 0, False),
        (0, 0, 0, 0, True),
        (1, 2**53, 2**53, 0, False),
    ],
)
def test_an_amount_fits_up_to_the_cap_and_not_beyond(
    amount: int, limit: int | None, spent: int, reserved: int, expected: bool
) -> None:
    assert fits(amount, limit=limit, spent=spent, reserved=reserved) is expected


@given(NANO, st.lists(st.tuples(NANO, st.fractions(0, 1))))
def test_what_is_held_before_and_settled_after_never_passes_a_cap(limit: int, calls: list[tuple[int, Any]]) -> None:
    spent = reserved = 0
    under_way: list[tuple[int, int]] = []
    for worst_case, share in calls:
        if fits(worst_case, limit=limit, spent=spent, reserved=reserved):
            reserved += worst_case
            under_way.append((worst_case, int(worst_case * share)))
        elif under_way:
            held, cost = under_way.pop(0)
            reserved, spent = reserved - held, spent + cost
        assert spent + reserved <= limit


@given(NANO, NANO, NANO, NANO, st.integers(0, 2**40))
def test_more_spent_or_held_never_makes_room(amount: int, limit: int, spent: int, reserved: int, more: int) -> None:
    if not fits(amount, limit=limit, spent=spent, reserved=reserved):
        assert not fits(amount, limit=limit, spent=spent + more, reserved=reserved)
        assert not fits(amount, limit=limit, spent=spent, reserved=reserved + more)
        assert not fits(amount + more, limit=limit, spent=spent, reserved=reserved)


def attempt(**fields: Any) -> Attempt:
    at = datetime(2026, 11, 21, 10, tzinfo=UTC)
    return Attempt.model_construct(started_at=at, completed_at=at, **{"cost": None, "reserved": None, **fields})


def test_a_call_of_unknown_cost_counts_as_what_was_held_for_it() -> None:
    assert spent_by([]) == 0
    assert (
        spent_by([attempt(cost=7, reserved=100), attempt(cost=0, reserved=100), attempt(reserved=30), attempt()]) == 37
    )
