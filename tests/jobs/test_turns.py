"""Whose turn it is: weighted fair queueing by key, then by tenant, then by age."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from breakwater.identity.contract import PRIORITIES, Priority
from breakwater.jobs.rules.turns import (
    MAX_TENANTS,
    WEIGHT_OF,
    CallerTurn,
    FairQueue,
    allowed_priority,
    priority_problem,
)
from tests.tables import each_row

KEYS = st.builds(
    CallerTurn,
    st.sampled_from(["", "a", "b", "käse.bot 1"]),
    st.sampled_from(["", "t1", "t 2"]),
    st.sampled_from(PRIORITIES),
    st.integers(1, 100),
)


def anybody(_: CallerTurn) -> bool:
    return True


def order_of(queue: FairQueue[str]) -> list[str]:
    """Takes all items."""
    return [item for _ in range(len(queue)) if (item := queue.take(anybody)) is not None]


@given(st.integers(0, 300), st.integers(0, 300))
def test_a_flood_of_one_key_delays_anothers_single_item_by_at_most_one(flood: int, taken_before: int) -> None:
    queue = FairQueue[str]()
    for number in range(flood):
        queue.add(CallerTurn("flooding"), number, "flood")
    for _ in range(min(flood, taken_before)):
        queue.take(anybody)
    queue.add(CallerTurn("other"), 0, "single")
    assert "single" in order_of(queue)[:2]


def test_a_caller_that_sends_one_after_the_other_gets_no_more_than_a_flood() -> None:
    queue = FairQueue[str]()
    for number in range(50):
        queue.add(CallerTurn("flooding"), number, "flood")
    queue.add(CallerTurn("other"), 0, "other")
    taken = Counter[str]()
    for number in range(40):
        item = queue.take(anybody)
        assert item is not None
        taken[item] += 1
        if item == "other":
            queue.add(CallerTurn("other"), number, "other")
    assert taken == {"flood": 20, "other": 20}


@given(st.dictionaries(st.sampled_from("abcde"), st.tuples(st.sampled_from(PRIORITIES), st.integers(1, 9)), min_size=2))
def test_callers_that_wait_all_the_time_are_served_by_their_shares_and_none_starves(
    callers: dict[str, tuple[Priority, int]],
) -> None:
    queue = FairQueue[str]()
    turns = {key: CallerTurn(key, "", priority, weight) for key, (priority, weight) in callers.items()}
    total = sum(turn.share for turn in turns.values())
    for key, turn in turns.items():
        for number in range(total + 1):
            queue.add(turn, number, key)
    taken = Counter(queue.take(anybody) for _ in range(total))
    for key, turn in turns.items():
        assert abs(taken[key] - turn.share) <= 1


def test_a_key_gets_no_more_by_many_tenants_and_its_tenants_share_what_it_gets() -> None:
    queue = FairQueue[str]()
    for number in range(30):
        queue.add(CallerTurn("a", f"t{number % 3}"), number, f"a{number % 3}")
        queue.add(CallerTurn("b", "t0"), number, "b")
    assert Counter(order_of(queue)[:18]) == {"b": 9, "a0": 3, "a1": 3, "a2": 3}


def test_of_one_caller_the_oldest_is_first_even_if_it_was_added_last() -> None:
    queue = FairQueue[str]()
    for age in (3, 1, 2):
        queue.add(CallerTurn("a"), age, str(age))
    assert order_of(queue) == ["1", "2", "3"]


def test_who_may_have_no_turn_now_is_passed_over_and_keeps_his_place() -> None:
    queue = FairQueue[str]()
    queue.add(CallerTurn("a"), 0, "a")
    queue.add(CallerTurn("b"), 0, "b")
    assert queue.take(lambda turn: turn.key == "b") == "b"
    assert queue.take(lambda turn: turn.key == "b") is None
    assert queue.has(CallerTurn("a"))
    assert queue.turns() == {CallerTurn("a")}
    assert order_of(queue) == ["a"]
    assert not queue.has(CallerTurn("a"))


@given(KEYS)
def test_a_turn_is_read_from_a_header_as_it_was_written(turn: CallerTurn) -> None:
    assert turn.text.isascii()
    assert CallerTurn.parse(turn.text) == turn


@each_row(
    ("of_agent", "of_key", "asked", "expected"),
    [
        (None, None, None, "normal"),
        (None, None, "low", "low"),
        (None, None, "high", None),
        ("high", None, None, "high"),
        ("high", None, "high", "high"),
        ("high", "normal", None, "normal"),
        ("high", "normal", "high", None),
        ("low", "high", None, "low"),
        ("low", "high", "normal", None),
        (None, "high", "high", "high"),
        ("high", "high", "low", "low"),
    ],
)
def test_a_job_may_ask_for_less_but_not_for_more_than_its_key_and_its_agent_allow(
    of_agent: Priority | None, of_key: Priority | None, asked: Priority | None, expected: Priority | None
) -> None:
    problem = priority_problem(asked, of_agent, of_key)
    assert (problem is None) is (expected is not None)
    if expected is not None:
        assert (asked or allowed_priority(of_agent, of_key)) == expected


def test_sixteen_of_high_and_four_of_normal_priority_are_served_for_one_of_low() -> None:
    queue = FairQueue[str]()
    for priority in PRIORITIES:
        for number in range(40):
            queue.add(CallerTurn("a", "", priority), number, priority)
    assert Counter(order_of(queue)[:42]) == {priority: 2 * WEIGHT_OF[priority] for priority in PRIORITIES}


def test_what_has_waited_for_long_with_low_priority_counts_as_normal() -> None:
    queue = FairQueue[str]()
    low = CallerTurn("a", "", "low")
    for number in range(40):
        queue.add(CallerTurn("b"), 100, "normal")
        queue.add(low, number, "low")
    asked: list[CallerTurn] = []

    def may_key(turn: CallerTurn) -> bool:
        asked.append(turn)
        return True

    assert Counter(queue.take(may_key, aged_before=20) for _ in range(40)) == {"normal": 20, "low": 20}
    assert {turn.priority for turn in asked} == {"normal"}
    assert Counter(queue.take(may_key, aged_before=20) for _ in range(20)) == {"normal": 16, "low": 4}
    assert queue.turns() == {CallerTurn("b"), low}


def test_the_time_of_a_turn_does_not_grow_with_the_tenants_that_a_key_makes_up() -> None:
    queue = FairQueue[int]()
    for number in range(2_000):
        queue.add(CallerTurn("a", f"made-up-{number}"), number, number)
    asked = Counter[str]()

    def may_key(turn: CallerTurn) -> bool:
        asked["key"] += 1
        return asked["key"] > 1

    def may_tenant(turn: CallerTurn) -> bool:
        asked["tenant"] += 1
        return True

    assert queue.take(may_key, may_tenant) is None
    assert asked == {"key": 1}
    assert [queue.take(may_key, may_tenant) for _ in range(2_000)] == list(range(2_000))
    assert asked["tenant"] == 2_000
    assert len(queue) == 0


def test_a_key_with_many_tenants_that_wait_is_named_as_a_whole() -> None:
    queue = FairQueue[int]()
    for number in range(MAX_TENANTS):
        queue.add(CallerTurn("a", f"t{number}", "low"), number, number)
    assert queue.turns() == {CallerTurn("a", f"t{number}", "low") for number in range(MAX_TENANTS)}
    queue.add(CallerTurn("a", "one more", "low"), 0, 0)
    queue.add(CallerTurn("b"), 0, 0)
    assert queue.turns() == {CallerTurn("a", "any", "low").of_key, CallerTurn("b")}


@given(st.lists(st.tuples(KEYS, st.booleans()), max_size=30))
def test_what_waits_no_more_takes_no_turn_of_its_caller(waiting: list[tuple[CallerTurn, bool]]) -> None:
    queue = FairQueue[tuple[int, bool]]()
    expected = FairQueue[tuple[int, bool]]()
    for number, (turn, is_over) in enumerate(waiting):
        unweighted = turn._replace(weight=1)
        queue.add(unweighted, number, (number, is_over))
        if not is_over:
            expected.add(unweighted, number, (number, is_over))
    removed = queue.prune(lambda item: item[1])
    assert sorted(removed) == [(number, True) for number, (_, is_over) in enumerate(waiting) if is_over]
    assert len(queue) == len(expected)
    assert queue.turns() == expected.turns()
    left = [queue.take(anybody) for _ in range(len(queue))]
    assert Counter(left) == Counter(expected.take(anybody) for _ in range(len(expected)))
