"""Shares of slots: nobody alone is held back, and nobody keeps the others from what they need."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from breakwater.jobs.rules.workers import may_take, may_take_beside_higher
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


@each_row(
    ("own", "others", "share", "expected"),
    [
        (11, 9, 0.75, True),  # three quarters of 16 are its own
        (12, 9, 0.75, False),
        (3, 16, 0.25, True),
        (4, 16, 0.25, False),
        (13, 1, 0.75, True),  # beyond its share, while the others need less than theirs
        (14, 1, 0.75, False),
    ],
)
def test_a_caller_of_more_weight_gets_more_slots(own: int, others: int, share: float, expected: bool) -> None:
    assert may_take(16, own, others, share) is expected


@each_row(
    ("slots", "held", "needed_by_higher", "expected"),
    [
        (8, 7, 0, True),  # nothing of higher priority
        (8, 5, 1, True),
        (8, 6, 1, False),  # one that it needed, and one more
        (8, 0, 8, True),  # low priority moves on, whatever the others need
        (8, 1, 8, False),
        (1, 0, 1, True),
    ],
)
def test_jobs_of_low_priority_leave_free_what_higher_ones_need_but_not_all(
    slots: int, held: int, needed_by_higher: int, expected: bool
) -> None:
    assert may_take_beside_higher(slots, held, needed_by_higher) is expected
