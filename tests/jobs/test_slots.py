"""Shares of slots: nobody alone is held back, and nobody keeps the others from what they need."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from breakwater.jobs.rules.workers import may_take
from tests.tables import each_row


@each_row(
    ("slots", "own", "others", "expected"),
    [
        (8, 7, 0, True),  # nobody else calls
        (8, 3, 8, True),  # the half is everybody's
        (8, 4, 8, False),
        (8, 4, 1, True),  # two are left free for one that needed one
        (8, 5, 1, True),
        (8, 6, 1, False),
        (1, 0, 5, True),  # one slot can't be shared
        (2, 1, 1, False),
        (3, 1, 1, True),
        (3, 2, 1, False),
    ],
)
def test_a_caller_leaves_free_what_the_others_need(slots: int, own: int, others: int, expected: bool) -> None:
    assert may_take(slots, own, others) is expected


@given(slots=st.integers(2, 100), others=st.integers(1, 100))
def test_a_caller_gets_half_of_the_slots_and_leaves_one(slots: int, others: int) -> None:
    own = 0
    while own < slots and may_take(slots, own, others):
        own += 1
    assert slots // 2 <= own < slots
