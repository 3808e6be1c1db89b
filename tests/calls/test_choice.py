"""The order in which a call asks the deployments of a model."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from breakwater.calls.rules.choice import LOW_HEADROOM, Candidate, ChoicePolicy, order
from tests.tables import each_row

WEST, EAST, SPARE = Candidate("west"), Candidate("east"), Candidate("spare", overflow=True)
ORDERED = ChoicePolicy("ordered", sticky=False)
HEADROOM = ChoicePolicy("headroom", sticky=True)
LOOSE = ChoicePolicy("headroom", sticky=False)


def ids(*candidates: Candidate, policy: ChoicePolicy = ORDERED, last: str | None = None) -> list[str]:
    return [one.id for one in order(candidates, policy, name="n", last=last)]


@each_row(
    ("west", "east", "first"),
    [
        ({}, {}, "west"),
        ({"blocked_s": 1}, {}, "east"),
        ({"blocked_s": 2}, {"blocked_s": 1}, "east"),
        ({"failures": 1}, {}, "east"),
        ({"failures": 1}, {"failures": 2}, "west"),
        ({"failures": 1}, {"blocked_s": 1}, "west"),
        ({"fits": False}, {}, "east"),
        ({"fits": False}, {"failures": 1}, "west"),
        ({"overflow": True}, {}, "east"),
        ({"overflow": True}, {"fits": False}, "west"),
        ({"overflow": True}, {"failures": 1}, "west"),
    ],
)
def test_what_may_be_called_comes_first_then_what_has_not_failed_then_what_fits_and_overflow_last(
    west: dict[str, int], east: dict[str, int], first: str
) -> None:
    assert ids(replace(WEST, **west), replace(EAST, **east))[0] == first  # pyright: ignore[reportArgumentType]


@each_row(
    ("policy", "headroom", "last", "first"),
    [
        (HEADROOM, 1.0, "west", "west"),
        (HEADROOM, 1.0, "east", "east"),
        (HEADROOM, LOW_HEADROOM / 2, "west", "east"),
        (replace(HEADROOM, choose="weighted"), LOW_HEADROOM / 2, "west", "west"),
        (replace(HEADROOM, choose="latency"), 1.0, "east", "east"),
        (replace(HEADROOM, choose="ordered"), 1.0, "east", "east"),
        (ORDERED, 1.0, "east", "west"),
    ],
)
def test_a_session_stays_while_there_is_headroom(policy: ChoicePolicy, headroom: float, last: str, first: str) -> None:
    assert ids(replace(WEST, headroom=headroom), EAST, policy=policy, last=last)[0] == first


def test_the_fastest_is_called_and_one_that_was_not_called_lately_is_tried() -> None:
    policy = ChoicePolicy("latency", sticky=False)
    assert ids(replace(WEST, latency_ms=900.0), replace(EAST, latency_ms=300.0), policy=policy) == ["east", "west"]
    assert ids(replace(WEST, latency_ms=900.0), replace(SPARE, latency_ms=1.0), policy=policy)[0] == "west"
    # One that is down has no say in what is fast.
    down = replace(EAST, latency_ms=1.0, blocked_s=3)
    assert ids(replace(WEST, latency_ms=900.0), down, policy=policy)[0] == "west"


def test_calls_are_spread_by_weight_and_by_headroom() -> None:
    heavy = replace(WEST, weight=3.0)
    first = Counter(order([heavy, EAST], LOOSE, name=str(n))[0].id for n in range(4000))
    assert 0.70 < first["west"] / 4000 < 0.80
    used = replace(WEST, headroom=0.25)
    first = Counter(order([used, EAST], LOOSE, name=str(n))[0].id for n in range(4000))
    assert 0.15 < first["west"] / 4000 < 0.25


def test_another_deployment_moves_only_its_own_share_of_sessions() -> None:
    def placed(*candidates: Candidate) -> list[str]:
        return [order(candidates, HEADROOM, name=str(n))[0].id for n in range(1000)]

    before, after = placed(WEST, EAST), placed(WEST, EAST, Candidate("north"))
    moved = {new for old, new in zip(before, after, strict=True) if old != new}
    assert moved == {"north"}
    assert before == placed(EAST, WEST), "whatever the order of the config"


candidates = st.builds(
    Candidate,
    id=st.sampled_from("abcdefgh"),
    weight=st.floats(0.01, 1000),
    overflow=st.booleans(),
    blocked_s=st.one_of(st.just(0.0), st.floats(0.001, 60)),
    headroom=st.floats(0, 1),
    fits=st.booleans(),
    latency_ms=st.none() | st.floats(0, 1e6),
    failures=st.integers(0, 3),
)


@settings(deadline=None)
@given(
    st.lists(candidates, min_size=1, max_size=8, unique_by=lambda one: one.id),
    st.builds(ChoicePolicy, st.sampled_from(["headroom", "weighted", "latency", "ordered"]), sticky=st.booleans()),
    st.text(),
    st.none() | st.sampled_from("abcdefgh"),
)
def test_each_is_asked_once_and_none_before_one_that_is_plainly_better(
    listed: list[Candidate], policy: ChoicePolicy, name: str, last: str | None
) -> None:
    ranked = order(listed, policy, name=name, last=last)
    assert sorted(one.id for one in ranked) == sorted(one.id for one in listed)
    assert ranked == order(listed, policy, name=name, last=last)
    for before, after in itertools.pairwise(ranked):
        # By the rules of the config and the gates; sessions and lots decide between equals alone.
        plain = [(one.blocked_s, one.failures, not one.fits, one.overflow) for one in (before, after)]
        assert plain[0] <= plain[1]
