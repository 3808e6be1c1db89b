"""The checker of limits and keys: a right run passes, and each promise that is broken is named."""

from __future__ import annotations

from dataclasses import replace

from tests.chaos.limit_checker import (
    UNLIMITED,
    AdmittedCall,
    Evidence,
    Place,
    RefusedCall,
    Secret,
    SentRequest,
    Setting,
    amounts,
    violations,
)
from tests.tables import each_row

FOREVER = float("inf")
KEY: Place = (("key",), "daily")
PAIR: Place = (("key", "model"), "monthly")


def call(at_s: float, cost: int = 10, **names: str) -> AdmittedCall:
    return AdmittedCall(f"j{at_s}:1", at_s, at_s, cost, {"key": "bot", "model": "m", **names})


def refusal(at_s: float, cost: int = 10) -> RefusedCall:
    return RefusedCall(f"j{at_s}:1", at_s, KEY, ("bot",), cost)


def request(begun_s: float, *, is_accepted: bool) -> SentRequest:
    secret = Secret("bot", made_s=1.0, end_begun_s=5.0, ended_s=6.0)
    return SentRequest(secret, begun_s, begun_s + 0.1, is_accepted)


RIGHT = Evidence(
    settings={
        (KEY, ("bot",)): [
            Setting(30, 1.0, 1.1),
            Setting(20, 5.0, 5.5),
            Setting(None, 8.0, 8.1),
            Setting(UNLIMITED, 9.5, 9.6),
        ],
        (KEY, ("*",)): [Setting(5, 0.5, 0.6)],
        (PAIR, ("*", "m")): [Setting(100, 0.0, 0.1)],
    },
    calls=[call(2.0), call(3.0), call(5.2), call(9.0, key="other", cost=5)],
    refusals=[refusal(6.0), refusal(5.2, cost=25), refusal(8.05)],
    requests=[
        request(0.5, is_accepted=False),
        request(2.0, is_accepted=True),
        request(5.5, is_accepted=True),
        request(4.95, is_accepted=False),
        request(7.0, is_accepted=False),
    ],
    begun={"change-1", "change-2", "change-3"},
    done={"change-1", "change-2"},
    limit_changes={"change-1", "change-3"},
    logged=["change-1", "change-3"],
    audited=["change-1", "change-2"],
    books={"Redis": 35, "attempts": 35},
)


def test_a_run_in_which_each_call_fits_and_each_change_is_recorded_is_right() -> None:
    assert violations(RIGHT) == []


@each_row(
    ("begin_s", "end_s", "possible"),
    [
        (0.0, 0.9, {None}),
        (9.6, 9.7, {UNLIMITED}),
        (0.0, 1.0, {None, 30}),
        (1.1, 4.9, {30}),
        (5.0, 5.4, {30, 20}),
        (5.5, 7.9, {20}),
        (5.0, 9.0, {30, 20, None}),
        (8.1, 9.0, {None}),
    ],
)
def test_a_limit_has_its_old_or_its_new_amount_until_its_change_is_answered(
    begin_s: float, end_s: float, possible: set[int | None]
) -> None:
    assert amounts(RIGHT.settings[KEY, ("bot",)], begin_s, end_s) == possible


def test_a_change_without_an_answer_may_be_in_force_until_the_next_one_is_answered() -> None:
    settings = [Setting(30, 1.0, 1.1), Setting(20, 2.0, FOREVER), Setting(40, 3.0, 3.1)]
    assert amounts(settings, 2.5, 2.5) == {30, 20}
    assert amounts(settings, 4.0, 4.0) == {40}


def test_a_call_of_a_lost_worker_may_have_been_admitted_at_any_time_before_it_was_recorded() -> None:
    lost = AdmittedCall("lost:1", 0.0, 7.0, 10, {"key": "bot", "model": "m"})
    assert violations(replace(RIGHT, calls=[*RIGHT.calls, lost], refusals=[refusal(4.9)])) == []


@each_row(
    ("broken", "words"),
    [
        (replace(RIGHT, calls=[*RIGHT.calls, call(6.0)]), "j6.0:1 was admitted: key:bot/daily had 40 of 20"),
        (replace(RIGHT, calls=[*RIGHT.calls, call(8.5)]), "j8.5:1 was admitted: key:bot/daily had 40 of 5"),
        (replace(RIGHT, calls=[*RIGHT.calls, call(7.0, key="new", cost=6)]), "key:new/daily had 6 of 5"),
        (replace(RIGHT, calls=[call(0.2, cost=101)]), "key:bot within model:m/monthly had 101 of 100"),
        (
            replace(RIGHT, refusals=[refusal(11.0)]),
            "had 30 nano-dollars admitted, and the least limit was 9223372036854775808",
        ),
        (
            replace(RIGHT, refusals=[refusal(4.0)]),
            "key:bot/daily had 20 nano-dollars admitted, and the least limit was 30",
        ),
        (replace(RIGHT, calls=[], refusals=[refusal(0.3)]), "and there was no limit"),
        (replace(RIGHT, requests=[request(6.5, is_accepted=True)]), "was accepted 0.500 s after its end"),
        (replace(RIGHT, requests=[request(3.0, is_accepted=False)]), "a valid secret of bot was refused"),
        (replace(RIGHT, logged=["change-3"]), "change-1 is not in EVENTS"),
        (replace(RIGHT, audited=["change-1"]), "change-2 is not in AUDIT"),
        (replace(RIGHT, logged=["change-1", "change-9"]), "change-9 is in EVENTS, and nobody made it"),
        (replace(RIGHT, books={"Redis": 34, "attempts": 35}), "books differ"),
        (replace(RIGHT, differences=["key:bot/daily of 2026-11-29: 1"]), "a counter differs from the record"),
        (replace(RIGHT, failures=["j1: failed"]), "a job failed: j1"),
    ],
)
def test_each_broken_promise_is_named(broken: Evidence, words: str) -> None:
    [violation] = violations(broken)
    assert words in violation
