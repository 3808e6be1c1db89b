from __future__ import annotations

import json
import math
import random
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakwater.contracts.types import format_time, ms_from_time, time_from_ms
from breakwater.policy.alert_rules import AnomalyRules
from breakwater.policy.anomaly import (
    ABSOLUTE_FLOOR,
    HABIT,
    HALF_LIFE,
    LAPSE,
    NEW_NORMAL,
    START,
    AnomalyChange,
    Baseline,
    Level,
    Measure,
    Minute,
    judge,
    lapse,
    learned,
    signals,
)
from breakwater.policy.signals import Firing, Resolved

DAY = 24 * 60
FIRST = 29_900_000
"""A minute in 2026."""
CENT = 10_000_000
RULES = AnomalyRules()


def minute(number: int, measure: Measure, value: float, calls: int = 100) -> Minute:
    """One that says something of one measure only."""
    match measure:
        case "error_rate":
            return Minute(FIRST + number, calls, round(value * calls), None, None)
        case "spend_rate":
            return Minute(FIRST + number, 1, 0, round(value), None)
        case "latency":
            return Minute(FIRST + number, calls, 0, None, value)
        case "first_token":
            return Minute(FIRST + number, calls, 0, None, None, calls, value)


def played(
    values: Iterable[float | None],
    measure: Measure = "latency",
    baseline: Baseline | None = None,
    start: int = 0,
    rules: AnomalyRules = RULES,
) -> tuple[Baseline, list[AnomalyChange]]:
    """Judges one value a minute; None is a minute in which the agent did nothing."""
    baseline, found = baseline or Baseline(), list[AnomalyChange]()
    for number, value in enumerate(values, start):
        if value is not None:
            baseline, verdicts = judge(baseline, minute(number, measure, value), rules)
            found += verdicts
    return baseline, [verdict for verdict in found if verdict.measure == measure]


def changes(verdicts: Iterable[AnomalyChange]) -> list[tuple[str, int]]:
    return [(verdict.change, verdict.minute - FIRST) for verdict in verdicts]


def noisy(normal: float, deviation: float, seed: int) -> Iterator[float]:
    numbers = random.Random(seed)
    while True:
        yield max(0.0, numbers.gauss(normal, deviation))


def first(count: int, values: Iterator[float]) -> list[float]:
    return [next(values) for _ in range(count)]


# --- What is normal ---------------------------------------------------------------------------------------------------


def test_of_normal_noise_the_mean_and_four_fifths_of_the_standard_deviation_are_learned() -> None:
    level = Level()
    for value in first(5 * DAY, noisy(1000, 100, seed=1)):
        level = learned(level, "latency", value, 100)
    assert level.baseline == pytest.approx(1000, rel=0.01)
    assert level.spread == pytest.approx(math.sqrt(2 / math.pi) * 100, rel=0.05)


def test_half_of_a_step_within_its_clip_is_learned_in_three_days() -> None:
    level = Level(baseline=1000, spread=100, learned=10 * DAY)
    for _ in range(HALF_LIFE):
        level = learned(level, "latency", 1200, 100)
    assert level.baseline == pytest.approx(1100, abs=1)


def test_odd_first_minutes_are_not_the_baseline() -> None:
    level = Level()
    for value in (60_000, 45_000, 1000, 1001, 999):
        level = learned(level, "latency", value, 100)
    assert level.baseline == 1001
    assert level.first == ()


def test_an_outlier_moves_the_baseline_by_little_however_far_out_it_is() -> None:
    before = Level(baseline=1000, spread=100, learned=5 * DAY)
    far, farther = (learned(before, "latency", value, 100) for value in (10_000, 10_000_000_000))
    assert far.baseline == farther.baseline < 1000.1
    assert farther.spread < 100.5


# --- Known series ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("measure", ["spend_rate", "latency", "first_token"])
def test_steady_figures_with_noise_alarm_nobody_in_30_days(measure: Measure) -> None:
    scale = {"spend_rate": 10 * CENT, "latency": 1000, "first_token": 1000}[measure]
    values = noisy(scale, scale / 4, seed=2)
    assert played(first(30 * DAY, values), measure)[1] == []


def test_figures_that_are_often_much_higher_alarm_nobody_in_10_days() -> None:
    numbers = random.Random(3)
    assert played([100 * CENT * numbers.lognormvariate(0, 1) for _ in range(10 * DAY)], "spend_rate")[1] == []


@pytest.mark.parametrize("share", [0.005, 0.05, 0.2])
def test_failures_at_their_normal_rate_alarm_nobody_in_10_days_though_nights_have_few_calls(share: float) -> None:
    numbers, baseline = random.Random(4), Baseline()
    for number in range(10 * DAY):
        calls = 10 if number % DAY < DAY / 3 else 60
        failures = sum(numbers.random() < share for _ in range(calls))
        baseline, verdicts = judge(baseline, Minute(FIRST + number, calls, failures, None, None), RULES)
        assert verdicts == ()


def test_a_few_failures_among_few_calls_are_chance_where_among_many_they_are_not() -> None:
    steady, _ = played([0.05] * DAY, "error_rate")
    for calls, failures, reported in ((10, 2, False), (10, 5, True), (1000, 200, True)):
        baseline, found = steady, list[AnomalyChange]()
        for number in range(DAY, DAY + 3):
            baseline, verdicts = judge(baseline, Minute(FIRST + number, calls, failures, None, None), RULES)
            found += verdicts
        assert bool(found) is reported, (calls, failures)


def test_a_step_is_reported_in_its_third_minute_with_its_figures() -> None:
    steady = first(2 * DAY, noisy(1000, 50, seed=5))
    _, (began,) = played([*steady, 4000, 4100, 4200])
    assert (began.change, began.measure, began.value) == ("began", "latency", 4200)
    assert (began.since, began.minute) == (FIRST + 2 * DAY, FIRST + 2 * DAY + 2)
    assert began.baseline == pytest.approx(1000, abs=10)
    assert began.deviation == pytest.approx(100, abs=2), "the floor, a tenth of what is usual"


def test_what_recovers_is_reported_in_the_third_calm_minute() -> None:
    steady = noisy(1000, 50, seed=6)
    values = [*first(DAY, steady), *[4000.0] * 10, *first(30, steady)]
    _, verdicts = played(values)
    assert changes(verdicts) == [("began", DAY + 2), ("recovered", DAY + 12)]
    assert verdicts[1].since == verdicts[0].since


def test_between_far_and_calm_an_anomaly_goes_on() -> None:
    _, verdicts = played([*[1000.0] * DAY, *[4000.0] * 3, *[1450.0] * 20, 1000, 1000, 1450, *[1290.0] * 3])
    assert changes(verdicts) == [("began", DAY + 2), ("recovered", DAY + 28)]


def test_two_minutes_that_are_far_are_reported_to_nobody() -> None:
    values = [*[1000.0] * DAY, 90_000, 90_000, *[1000.0] * DAY, 90_000, 90_000, 1000, 90_000, 90_000, 1000]
    assert played(values)[1] == []


def test_a_slow_drift_is_learned() -> None:
    noise = noisy(1, 0.05, seed=7)
    values = [1000 * (1 + number / DAY * 0.1) * next(noise) for number in range(20 * DAY)]
    baseline, verdicts = played(values)
    assert verdicts == []
    assert baseline.latency.level.baseline > 2000


def test_a_daily_cycle_is_learned_and_what_is_far_above_its_top_is_reported() -> None:
    noise = noisy(1, 0.1, seed=8)
    cycle = [100 * CENT * (1.2 + math.sin(number / DAY * 2 * math.pi)) * next(noise) for number in range(14 * DAY)]
    baseline, verdicts = played(cycle, "spend_rate")
    assert verdicts == []
    _, verdicts = played([800 * CENT] * 3, "spend_rate", baseline, start=14 * DAY)
    assert changes(verdicts) == [("began", 14 * DAY + 2)]


def test_monday_is_no_news_after_a_quiet_weekend() -> None:
    noise = noisy(1, 0.1, seed=9)
    week = [(1.2 + math.sin(number / DAY * 2 * math.pi)) for number in range(DAY)]
    values = [
        100 * CENT * week[number % DAY] * next(noise) * (0.1 if number // DAY % 7 >= 5 else 1)
        for number in range(29 * DAY)
    ]
    assert played(values, "spend_rate")[1] == []


def test_nights_without_calls_neither_change_the_baseline_nor_alarm_in_the_morning() -> None:
    noise = noisy(10 * CENT, CENT, seed=10)
    values = [next(noise) if 8 * 60 <= number % DAY < 18 * 60 else None for number in range(14 * DAY)]
    baseline, verdicts = played(values, "spend_rate")
    assert verdicts == []
    assert baseline.spend_rate.level.baseline == pytest.approx(10 * CENT, rel=0.02)


def test_figures_without_any_variance_alarm_at_nothing_small() -> None:
    cases: tuple[tuple[Measure, float, float], ...] = (
        ("error_rate", 0.0, 0.1),
        ("spend_rate", 0.0, 6 * CENT),
        ("latency", 10.0, 310.0),
    )
    for measure, normal, small in cases:
        steady, _ = played([normal] * DAY, measure)
        assert played([small] * 10, measure, steady, start=DAY)[1] == []
        assert played([small * 1.3] * 3, measure, steady, start=DAY)[1] != []


def test_fewer_errors_less_spending_and_faster_answers_are_no_news() -> None:
    cases: tuple[tuple[Measure, float], ...] = (
        ("error_rate", 0.5),
        ("spend_rate", 1000 * CENT),
        ("latency", 100_000.0),
    )
    for measure, normal in cases:
        steady, _ = played([normal] * DAY, measure)
        assert played([0.0] * 100, measure, steady, start=DAY)[1] == []


def test_what_stays_is_the_baseline_after_six_hours() -> None:
    steady, high = noisy(1000, 50, seed=11), noisy(4000, 200, seed=12)
    baseline, verdicts = played([*first(2 * DAY, steady), *first(2 * DAY, high)])
    assert changes(verdicts) == [("began", 2 * DAY + 2), ("accepted", 2 * DAY + 2 + NEW_NORMAL)]
    assert verdicts[1].baseline == pytest.approx(4000, rel=0.02)
    _, verdicts = played([16_000.0] * 3, baseline=baseline, start=4 * DAY)
    assert changes(verdicts) == [("began", 4 * DAY + 2)]


def test_nothing_is_learned_of_an_anomaly_that_recovers() -> None:
    before, _ = played([*[1000.0] * DAY, *[9000.0] * 3])
    after, verdicts = played([*[9000.0] * 300, *[1000.0] * 3], baseline=before, start=DAY + 3)
    assert [verdict.change for verdict in verdicts] == ["recovered"]
    assert after.latency.level == before.latency.level
    assert after.latency.candidate == Level()


# --- Habits ----------------------------------------------------------------------------------------------------------


def nightly(nights: int, height: float = 2000 * CENT, length: int = 30) -> list[float]:
    noise, values = noisy(1, 0.1, seed=13), list[float]()
    for _ in range(nights):
        values += [100 * CENT * next(noise) for _ in range(DAY - length)] + [
            height * next(noise) for _ in range(length)
        ]
    return values


def test_a_batch_each_night_is_reported_three_times_and_then_only_if_it_is_higher_or_longer() -> None:
    habit, verdicts = played(nightly(14), "spend_rate")
    assert [verdict.change for verdict in verdicts] == ["began", "recovered"] * HABIT
    assert verdicts[-1].minute - FIRST < 4 * DAY
    for height, length in ((2000 * CENT, 90), (4000 * CENT, 30)):
        _, verdicts = played(nightly(1, height, length), "spend_rate", habit, start=14 * DAY)
        assert [verdict.change for verdict in verdicts] == ["began"], (height, length)
    assert played(nightly(1, 2200 * CENT, 45), "spend_rate", habit, start=14 * DAY)[1] == []


def test_a_habit_that_ends_as_the_agent_stops_is_reported_to_nobody() -> None:
    habit, _ = played(nightly(4), "spend_rate")
    silent, verdicts = played([2000.0 * CENT] * 10, "spend_rate", habit, start=4 * DAY)
    assert (verdicts, silent.spend_rate.anomalous, silent.anomalies()) == ([], True, frozenset())
    lapsed, verdicts = lapse(silent, FIRST + 5 * DAY)
    assert (verdicts, lapsed.spend_rate.anomalous) == ((), False)


def test_a_habit_is_forgotten_in_a_week() -> None:
    habit, _ = played(nightly(4), "spend_rate")
    steady = [100.0 * CENT] * (8 * DAY)
    _, verdicts = played([*steady, *[2000.0 * CENT] * 3], "spend_rate", habit, start=4 * DAY)
    assert [verdict.change for verdict in verdicts] == ["began"]


def test_failing_every_night_is_never_a_habit() -> None:
    nights = [*[0.01] * (DAY - 30), *[0.5] * 30] * 8
    _, verdicts = played(nights, "error_rate")
    assert [verdict.change for verdict in verdicts].count("began") == 8


# --- Pauses, few samples, rules --------------------------------------------------------------------------------------


def test_an_anomaly_is_over_when_no_figures_come_and_it_makes_no_difference_who_sees_that() -> None:
    anomalous, _ = played([*[1000.0] * DAY, *[9000.0] * 3])
    last = FIRST + DAY + 2
    assert lapse(anomalous, last + LAPSE) == (anomalous, ())
    lapsed, (verdict,) = lapse(anomalous, last + LAPSE + 1)
    assert (verdict.change, verdict.minute, verdict.value) == ("lapsed", last + LAPSE, None)
    assert lapse(lapsed, last + 10 * LAPSE) == (lapsed, ())
    _, late = judge(anomalous, minute(DAY + 900, "latency", 1000.0), RULES)
    assert late == (verdict,)


def test_far_minutes_of_several_days_make_a_new_normal_though_nights_are_between() -> None:
    baseline, _ = played([1000.0] * (2 * DAY))
    found = list[AnomalyChange]()
    for day in range(2, 5):
        baseline, verdicts = played([9000.0] * 150, baseline=baseline, start=day * DAY)
        found += verdicts
    assert [verdict.change for verdict in found] == ["began", "lapsed", "began", "lapsed", "began", "accepted"]


def test_an_anomaly_that_comes_back_after_normal_minutes_has_its_six_hours_again() -> None:
    baseline, _ = played([*[1000.0] * DAY, *[9000.0] * 300])
    baseline, (lapsed, *_) = played([1000.0] * 10, baseline=baseline, start=2 * DAY)
    baseline, verdicts = played([9000.0] * DAY, baseline=baseline, start=2 * DAY + 10)
    assert lapsed.change == "lapsed"
    assert changes(verdicts) == [("began", 2 * DAY + 12), ("accepted", 2 * DAY + 12 + NEW_NORMAL)]


def test_minutes_in_a_row_are_those_with_enough_calls() -> None:
    baseline, _ = played([1000.0] * DAY)
    found = list[AnomalyChange]()
    for number in range(DAY, DAY + 6):
        calls = 100 if number % 2 else RULES.minimum_calls - 1
        baseline, verdicts = judge(baseline, minute(number, "latency", 9000.0, calls), RULES)
        found += verdicts
    assert changes(found) == [("began", DAY + 5)]


def test_too_few_calls_say_nothing_of_errors_and_latency_but_all_of_spending() -> None:
    baseline, _ = judge(Baseline(), Minute(FIRST, RULES.minimum_calls - 1, 9, 5, 1000.0), RULES)
    assert (baseline.error_rate.level.learned, baseline.latency.level.learned) == (0, 0)
    assert baseline.spend_rate.level.learned == 1


def test_what_is_not_streamed_says_nothing_of_first_tokens() -> None:
    for streams, learned_minutes in ((0, 0), (RULES.minimum_calls - 1, 0), (RULES.minimum_calls, 1)):
        baseline, _ = judge(Baseline(), Minute(FIRST, 100, 0, None, 1000.0, streams, 200.0), RULES)
        assert (baseline.latency.level.learned, baseline.first_token.level.learned) == (1, learned_minutes)


def test_what_was_stored_before_first_tokens_were_judged_is_kept() -> None:
    baseline, _ = played([1000.0] * 40)
    stored = json.loads(baseline.to_json())
    del stored["first_token"]
    assert Baseline.from_json(json.dumps(stored).encode()) == baseline


def test_unknown_costs_are_not_zero() -> None:
    baseline, _ = judge(Baseline(), Minute(FIRST, 100, 0, None, 1000.0), RULES)
    assert baseline.spend_rate.level == Level()


def test_a_minute_that_is_reported_again_or_late_changes_nothing() -> None:
    baseline, _ = played([1000.0] * DAY)
    assert judge(baseline, minute(DAY - 1, "latency", 9000.0), RULES) == (baseline, ())
    assert judge(baseline, minute(5, "latency", 9000.0), RULES) == (baseline, ())


def test_switched_off_nothing_begins_and_what_has_begun_ends_and_figures_are_learned() -> None:
    off = AnomalyRules.model_validate({"deviations": "off"})
    baseline, verdicts = played([*[1000.0] * DAY, *[90_000.0] * 100], rules=off)
    assert (verdicts, baseline.latency.level.learned) == ([], DAY + 100)
    anomalous, _ = played([*[1000.0] * DAY, *[9000.0] * 3])
    _, verdicts = played([9000.0] * 3, baseline=anomalous, start=DAY + 3, rules=off)
    assert [verdict.change for verdict in verdicts] == ["recovered"]


# --- Properties ------------------------------------------------------------------------------------------------------

LATENCIES = st.lists(st.one_of(st.floats(1000, 1500), st.floats(1000, 1e6)), max_size=80)
FAST = AnomalyRules(minimum_minutes=5, minimum_calls=1, sustained_minutes=2)
MINUTES = st.lists(
    st.tuples(
        st.integers(1, 200),
        st.integers(0, 50),
        st.floats(0, 1),
        st.none() | st.integers(0, 10**17),
        st.none() | st.floats(0, 1e9),
        st.none() | st.floats(0, 1e9),
    ),
    max_size=80,
)
Given = list[tuple[int, int, float, int | None, float | None, float | None]]


def minutes(given_: Given) -> Iterator[Minute]:
    number = FIRST
    for gap, calls, failing, cost, latency, first_token in given_:
        number += gap
        yield Minute(number, calls, round(calls * failing), cost, latency, calls, first_token)


@given(LATENCIES, st.integers(1, 20))
def test_property_the_scale_of_figures_makes_no_difference_above_the_floors(values: list[float], power: int) -> None:
    as_they_are = played(values, rules=FAST)[1]
    scaled = played([value * 2**power for value in values], rules=FAST)[1]
    assert changes(scaled) == changes(as_they_are)
    for one, other in zip(scaled, as_they_are, strict=True):
        assert (one.baseline, one.deviation) == (other.baseline * 2**power, other.deviation * 2**power)


@given(MINUTES, st.integers(5, 60))
def test_property_nothing_begins_before_enough_minutes_are_known(given_: Given, minimum: int) -> None:
    rules = AnomalyRules(minimum_minutes=minimum, minimum_calls=1, sustained_minutes=1, deviations=3)
    for measure in ABSOLUTE_FLOOR:
        baseline, known = Baseline(), 0
        for one in minutes(given_):
            before = known
            baseline, verdicts = judge(baseline, one, rules)
            known = baseline.of(measure).level.learned
            if any(verdict.change == "began" and verdict.measure == measure for verdict in verdicts):
                assert before >= minimum


@given(MINUTES)
def test_property_each_anomaly_begins_and_then_ends(given_: Given) -> None:
    baseline, open_ = Baseline(), set[Measure]()
    for one in minutes(given_):
        baseline, verdicts = judge(baseline, one, FAST)
        for verdict in verdicts:
            assert (verdict.measure in open_) == (verdict.change != "began")
            open_ ^= {verdict.measure}
        assert baseline.anomalies() == open_


@given(MINUTES)
def test_property_what_is_stored_is_small_and_goes_on_where_it_was(given_: Given) -> None:
    kept = stored = Baseline()
    for one in minutes(given_):
        kept, reported = judge(kept, one, FAST)
        stored, again = judge(stored, one, FAST)
        assert reported == again
        data = stored.to_json()
        assert len(data) < 4000
        restored = Baseline.from_json(data)
        assert restored is not None
        assert restored == stored == kept
        stored = restored
    assert len(kept.latency.level.first) < START


@pytest.mark.parametrize(
    "wrong",
    [
        {"version": 2},
        {"latency": None},
        {"latency": {"level": {"baseline": -1}}},
        {"latency": {"level": {"baseline": "NaN"}}},
        {"latency": {"level": {"first": [1.0] * 6}}},
        {"latency": {"minute": 10**12}},
    ],
)
def test_what_another_version_wrote_or_is_damaged_is_nothing(wrong: dict[str, object]) -> None:
    data = Baseline().to_json()
    assert Baseline.from_json(data) == Baseline()
    assert Baseline.from_json(json.dumps(json.loads(data) | wrong).encode()) is None


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff", b'{"version": 1'])
def test_garbage_is_nothing(data: bytes) -> None:
    assert Baseline.from_json(data) is None


# --- Words -----------------------------------------------------------------------------------------------------------

BEGAN = AnomalyChange("error_rate", "began", FIRST + 2, FIRST, 0.425, 0.01, 0.02, 40)
SINCE = time_from_ms(FIRST * 60_000)


def test_unusual_errors_are_reported_with_figures_and_a_command_that_lists_them() -> None:
    (raised,) = signals("wri ter", [BEGAN])
    assert isinstance(raised, Firing)
    assert (raised.key, raised.source_id) == ("agent_anomaly/wri%20ter/error_rate", f"wri%20ter/error_rate/{FIRST + 2}")
    assert (raised.title, raised.agent, raised.fades) == ("Error rate unusual: wri ter", "wri ter", False)
    assert ms_from_time(raised.at) == (FIRST + 3) * 60_000
    assert "42.5 % of 40 calls of wri ter failed; the baseline is 1 %, give or take 2 %." in raised.text
    words = raised.text.split("`")[1]
    assert shlex.split(words) == [
        "breakwater",
        "executions",
        "--agent=wri ter",
        "--status=dead_lettered",
        f"--since={format_time(SINCE)}",
    ]
    assert raised.payload == {
        "agent": "wri ter",
        "measure": "error_rate",
        "change": "began",
        "unit": "share",
        "value": 0.425,
        "baseline": 0.01,
        "deviation": 0.02,
        "deviations": 20.8,
        "calls": 40,
        "since": format_time(SINCE),
        "timestamp": format_time(raised.at),
    }


def test_money_is_reported_in_dollars_and_stored_as_decimal_text() -> None:
    verdict = AnomalyChange("spend_rate", "began", FIRST, FIRST, 4.2e9, 3e8 + 0.4, 1e8, 1)
    (raised,) = signals("writer", [verdict])
    assert "writer spent $4.20 on 1 call; the baseline is $0.30, give or take $0.10." in raised.text
    assert (raised.payload["value"], raised.payload["baseline"]) == ("4.200000000", "0.300000000")
    assert "dead_lettered" not in raised.text


def test_the_end_of_an_anomaly_says_how_it_ended() -> None:
    slow = AnomalyChange("latency", "recovered", FIRST + 9, FIRST, 950.0, 1000.0, 100.0, 1200)
    ends = (slow, replace(slow, change="accepted", value=9500.0, baseline=9000.0))
    lapsed = replace(slow, change="lapsed", value=None, calls=0)
    recovered, accepted, gone = signals("writer", [*ends, lapsed])
    for over in (recovered, accepted, gone):
        assert isinstance(over, Resolved)
        assert (over.key, over.event) == ("agent_anomaly/writer/latency", "agent_anomaly")
    assert recovered.title == "Latency back to normal: writer"
    assert "took 950 ms for the median of 1,200 calls; the baseline is 1.0 s, give or take 100 ms." in recovered.text
    assert accepted.title == "Latency accepted as the new baseline: writer"
    assert "about 9.0 s is the baseline from now on" in accepted.text
    assert gone.title == "Latency unknown, no calls: writer"
    assert (gone.payload["value"], gone.payload["deviations"]) == (None, None)
