from __future__ import annotations

import random
import shlex
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from statistics import fmean, median, quantiles
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakwater.alerts.contract import Alert
from breakwater.alerts.rules.anomaly import (
    FIGURES,
    HABIT_MARGIN,
    LAPSE,
    NEW_NORMAL,
    Baseline,
    Minute,
    Place,
    judge,
    signals,
    turned_off_signals,
    unwatched_signals,
)
from breakwater.alerts.rules.incidents import IncidentRules, decide
from breakwater.alerts.rules.signals import Firing, Resolved, Signal
from breakwater.alerts.settings import AnomalyRules, Reminders
from breakwater.kernel.types import format_time
from tests.alerts.test_incidents import AT
from tests.tables import each_row

MINUTE = timedelta(minutes=1)
RULES = AnomalyRules()
INCIDENT_RULES = IncidentRules(("agent_anomaly",), 600, (), Reminders())
USUAL = Baseline(1000, 100)
LATENCY: Place = ("writer", "latency")


def minutes_of(*values: float, calls: int = 100, until: datetime = AT) -> list[Minute]:
    """Minutes with these values, the newest first."""
    return [Minute(until - (number + 1) * MINUTE, value, calls) for number, value in enumerate(values)]


def recorded(incidents: dict[str, Alert], changes: Sequence[Signal]) -> list[str]:
    """Records signals as the log of incidents does, and gives the changes of incidents that follow."""
    recorded_changes: list[str] = []
    for signal in changes:
        alert = decide(signal, incidents.get(signal.key), INCIDENT_RULES)
        if alert is not None:
            incidents[signal.key] = alert
            recorded_changes.append(alert.change)
    return recorded_changes


def incident_of(place: Place = LATENCY, baseline: Baseline = USUAL, value: float = 4000, at: datetime = AT) -> Alert:
    """The incident of an anomaly that has begun."""
    incidents: dict[str, Alert] = {}
    latest = {place: minutes_of(*[value] * 3, until=at)}
    assert recorded(incidents, signals(latest, {place: baseline}, (), RULES, at)) == ["opened"]
    [alert] = incidents.values()
    return alert


# --- The rules -------------------------------------------------------------------------------------------------------


def test_what_changes_of_a_figure(subtests: pytest.Subtests) -> None:
    begun, old = incident_of(), incident_of(at=AT - NEW_NORMAL)
    cases: dict[str, tuple[Alert | None, Sequence[float], Baseline | None, str | None]] = {
        "three far minutes": (None, [4000, 4000, 1601], USUAL, "began"),
        "two far minutes": (None, [4000, 4000, 1600], USUAL, None),
        "too few minutes": (None, [4000, 4000], USUAL, None),
        "a young agent": (None, [4000, 4000, 4000], None, None),
        "no habit": (None, [4000, 4000, 4000], Baseline(1000, 100, 2600), "began"),
        "a habit": (None, [4000, 4000, 4000], Baseline(1000, 100, 4000 / HABIT_MARGIN), None),
        "low minutes": (None, [0, 0, 0], USUAL, None),
        "it lasts": (begun, [4000, 4000, 4000], USUAL, None),
        "one calm minute": (begun, [1000, 1000, 4000], USUAL, None),
        "calm minutes": (begun, [1300, 1000, 0], USUAL, "recovered"),
        "neither far nor calm": (begun, [1301, 1301, 1301], USUAL, None),
        "what it has taught": (begun, [4000, 4000, 4000], Baseline(3900, 100), None),
        "a new normal": (old, [4000, 4000, 4000], Baseline(1000, 100, 3900), "accepted"),
        "old, and far": (old, [4000, 4000, 4000], USUAL, None),
        "old, and calm": (old, [1000, 1000, 1000], USUAL, "recovered"),
        "calm where it would begin again": (begun, [1200, 1200, 1200], Baseline(400, 50), None),
        "no minutes": (begun, [], USUAL, "lapsed"),
        "few minutes": (begun, [1000, 1000], USUAL, None),
        "calm, without a baseline": (begun, [1000, 1000, 1000], None, "recovered"),
    }
    for name, (incident, values, baseline, expected) in cases.items():
        with subtests.test(name):
            assert judge("latency", minutes_of(*values), baseline, incident, RULES, AT) == expected


def test_the_least_deviation_of_each_figure(subtests: pytest.Subtests) -> None:
    for measure, baseline, small, large in (
        ("error_rate", 0.0, 0.12, 0.13),
        ("spend_rate", 0.0, 0.06, 0.061),
        ("latency", 10.0, 310, 311),
        ("first_token", 0.0, 300, 301),
        ("latency", 10_000.0, 16_000, 16_001),
    ):
        with subtests.test(measure, baseline=baseline):
            steady = Baseline(baseline, 0.0)
            assert not steady.is_far(Minute(AT, small, 1000), measure, 6)
            assert steady.is_far(Minute(AT, large, 1000), measure, 6)


def test_a_few_failures_among_few_calls_are_chance_where_among_many_they_are_not() -> None:
    baseline = Baseline(0.05, 0.0)
    far = {calls: baseline.is_far(Minute(AT, 0.3, calls), "error_rate", 6) for calls in (10, 30, 100)}
    assert far == {10: False, 30: True, 100: True}
    assert not Baseline(1.0, 0.0).is_far(Minute(AT, 1.0, 1), "error_rate", 3)


# --- Ordinary weeks alarm nobody -------------------------------------------------------------------------------------


def learned(values: Sequence[float], measure: str) -> Baseline:
    """As `anomalies.sql` learns it."""
    cuts = quantiles(values, n=100)
    baseline = fmean(values) if measure == "error_rate" else median(values)
    return Baseline(baseline, max(0.0, cuts[79] - baseline), None if measure == "error_rate" else cuts[98])


def noisy(numbers: random.Random, measure: str) -> Iterator[tuple[float, int]]:
    """Values of an ordinary figure, with the number of calls."""
    while True:
        calls = numbers.choice((10, 60, 60))
        failures = sum(numbers.random() < 0.05 for _ in range(calls))
        yield (
            {
                "error_rate": failures / calls,
                "latency": numbers.gauss(1000, 250),
                "spend_rate": numbers.lognormvariate(0, 1),  # often much higher
                "first_token": numbers.gauss(200, 20) * numbers.choice((1, 1, 3)),  # two models
            }[measure],
            calls,
        )


def test_a_week_of_noise_alarms_nobody(subtests: pytest.Subtests) -> None:
    for measure in (name for name, figure in FIGURES.items() if figure.limit is None):
        with subtests.test(measure):
            series = noisy(random.Random(1), measure)
            week = [next(series) for _ in range(7 * 24 * 60)]
            baseline = learned([value for value, _ in week], measure)
            far = [baseline.is_far(Minute(AT, *minute), measure, 6) for minute in week]
            assert not any(all(far[at : at + 3]) for at in range(len(far)))


def test_an_agents_days_and_nights_are_its_habits(subtests: pytest.Subtests) -> None:
    day = 24 * 60
    shapes: dict[str, Callable[[int], float]] = {
        "a busy day and a quiet night": lambda minute: 1.0 if minute % day < day / 2 else 20.0,
        "a quiet weekend": lambda minute: 1.0 if minute // day % 7 < 2 else 20.0,
        "a batch each night": lambda minute: 20.0 if minute % day < 30 else 1.0,
    }
    for name, shape in shapes.items():
        with subtests.test(name):
            numbers = random.Random(2)
            baseline = learned([shape(minute) * numbers.gauss(1, 0.1) for minute in range(7 * day)], "spend_rate")
            assert not baseline.is_far(Minute(AT, 22, 100), "spend_rate", 6)
            assert baseline.is_far(Minute(AT, 150, 100), "spend_rate", 6)


# --- Incidents -------------------------------------------------------------------------------------------------------


def test_an_anomaly_is_one_incident_from_its_beginning_to_its_end() -> None:
    incidents: dict[str, Alert] = {}
    begins, ends = (
        {LATENCY: minutes_of(4000, 4000, 4000)},
        {LATENCY: minutes_of(1000, 1000, 1000, until=AT + 9 * MINUTE)},
    )
    for latest, expected in ((begins, ["opened"]), (begins, []), (ends, ["resolved"]), (ends, [])):
        changes = signals(latest, {LATENCY: USUAL}, incidents.values(), RULES, AT + 9 * MINUTE)
        assert recorded(incidents, changes) == expected
    [alert] = incidents.values()
    assert (alert.key, alert.count, alert.resolved_at) == ("agent_anomaly/writer/latency", 1, AT + 9 * MINUTE)


def test_each_figure_of_each_agent_is_an_incident_of_its_own() -> None:
    places = [("a b", "latency"), ("a b", "error_rate"), ("c", "spend_rate")]
    latest = {place: minutes_of(*[1e6] * 3) for place in places}
    changes = signals(latest, {place: Baseline(0.0, 0.0) for place in places}, (), RULES, AT)
    assert [signal.key for signal in changes] == [
        "agent_anomaly/a%20b/error_rate",
        "agent_anomaly/a%20b/latency",
        "agent_anomaly/c/spend_rate",
    ]


@given(
    st.lists(st.lists(st.floats(0, 1e5), max_size=3), max_size=8),
    st.lists(st.none() | st.builds(Baseline, st.floats(0, 1e5), st.floats(0, 1e4)), min_size=8, max_size=8),
    st.sampled_from(sorted(FIGURES)),
)
def test_property_asked_twice_nothing_changes_the_second_time(
    series: list[list[float]], baselines: list[Baseline | None], measure: str
) -> None:
    incidents: dict[str, Alert] = {}
    for number, (values, baseline) in enumerate(zip(series, baselines, strict=False)):
        now = AT + number * timedelta(hours=4)
        latest: dict[Place, Sequence[Minute]] = {("writer", measure): minutes_of(*values, until=now)}
        known = {} if baseline is None else {("writer", measure): baseline}
        first, second = (recorded(incidents, signals(latest, known, incidents.values(), RULES, now)) for _ in range(2))
        assert (len(first) <= 1, second) == (True, [])


def test_other_incidents_of_an_agent_are_not_touched() -> None:
    cost = incident_of().model_copy(update={"key": "agent_anomaly/writer/execution_cost"})
    breaker = incident_of().model_copy(update={"key": "breaker_open/writer/latency"})
    assert signals({}, {}, [cost, breaker], RULES, AT) == turned_off_signals("off", [cost, breaker], AT) == []


def test_without_clickhouse_an_incident_says_so_and_nothing_else_ends() -> None:
    incidents: dict[str, Alert] = {"anomaly": incident_of()}
    for _ in range(2):
        changes = unwatched_signals("ClickHouse does not answer: refused", incidents.values(), AT)
        recorded(incidents, changes)
    blind = incidents["agent_anomaly//unwatched"]
    assert (blind.count, blind.status, blind.agent, blind.severity) == (1, "firing", "*", "warning")
    assert blind.title == "Anomalies are not watched: ClickHouse does not answer"
    assert blind.text == (
        "ClickHouse does not answer: refused. Until it answers, no anomaly of an agent is reported, and none ends. "
        "To do: `breakwater doctor` says what is wrong."
    )
    lasting = {LATENCY: minutes_of(4000, 4000, 4000)}
    for expected in (["resolved"], []):
        assert recorded(incidents, signals(lasting, {LATENCY: USUAL}, incidents.values(), RULES, AT)) == expected
    assert incidents["agent_anomaly//unwatched"].status == "resolved"


def test_what_is_turned_off_leaves_no_incident_open() -> None:
    [over] = turned_off_signals("the config turns them off", [incident_of()], AT)
    assert isinstance(over, Resolved)
    assert over.text == "Such anomalies are not watched any more: the config turns them off. Nothing to do."


# --- Fallbacks, which have limits -------------------------------------------------------------------------------------

SHARE: Place = ("writer", "fallback_share")
COST: Place = ("writer", "fallback_cost")


def test_a_fallback_that_costs_more_than_its_model_by_a_factor_is_an_anomaly(subtests: pytest.Subtests) -> None:
    cases: dict[str, tuple[Place, Sequence[float], dict[str, Any], list[str]]] = {
        "three minutes above the limit": (COST, [2.1, 2.1, 2.1], {}, ["opened"]),
        "at the limit": (COST, [2, 2.1, 2.1], {}, []),
        "another limit": (COST, [2.1, 2.1, 2.1], {"fallback_cost_factor": 3}, []),
        "off": (COST, [9, 9, 9], {"fallback_cost_factor": None}, []),
        "baselines off": (COST, [2.1, 2.1, 2.1], {"deviations": None}, ["opened"]),
        "most of the traffic": (SHARE, [0.6, 1, 1], {}, ["opened"]),
        "half of the traffic": (SHARE, [0.5, 1, 1], {}, []),
        "traffic off": (SHARE, [1, 1, 1], {"fallback_share": None}, []),
    }
    for name, (place, values, settings, changes) in cases.items():
        with subtests.test(name):
            rules = AnomalyRules(**settings)
            assert recorded({}, signals({place: minutes_of(*values)}, {}, (), rules, AT)) == changes


def test_an_anomaly_of_fallbacks_ends_at_its_limit_and_when_it_is_turned_off() -> None:
    incidents: dict[str, Alert] = {}
    recorded(incidents, signals({COST: minutes_of(3, 3, 3)}, {}, (), RULES, AT))
    later = AT + 5 * MINUTE

    def then(*values: float, **settings: Any) -> list[str]:
        latest = {COST: minutes_of(*values, until=later)}
        return recorded(dict(incidents), signals(latest, {}, incidents.values(), AnomalyRules(**settings), later))

    assert then(2, 2, 2.1) == []
    assert then(2, 2, 2) == ["resolved"]
    assert then(3, 3, 3, fallback_cost_factor=4) == ["resolved"]
    [off] = signals({COST: minutes_of(3, 3, 3)}, {}, incidents.values(), AnomalyRules(fallback_cost_factor=None), AT)
    assert (off.title, isinstance(off, Resolved)) == ("No longer watched: Cost of fallbacks unusual: writer", True)
    assert recorded(incidents, signals({}, {}, incidents.values(), RULES, later)) == ["resolved"], "no more such calls"


@each_row(
    ("event", "agent", "payload", "resolved_min_ago", "told"),
    [
        ("breaker_open", "writer", {}, None, False),
        ("breaker_open", "other", {}, None, True),
        ("breaker_open", "*", {}, None, False),
        ("deployment_failing", "*", {"agents": ["other", "writer"]}, None, False),
        ("deployment_failing", "*", {"agents": ["other"]}, None, True),
        ("quota_exhausted", "*", {}, None, False),
        ("quota_exhausted", "*", {}, 2, False),  # within the minutes that are judged
        ("quota_exhausted", "*", {}, 4, True),
        ("retries_exhausted", "writer", {}, None, True),
    ],
)
def test_no_anomaly_says_again_what_the_incident_of_a_breaker_a_deployment_or_a_quota_says(
    event: str, agent: str, payload: dict[str, Any], resolved_min_ago: int | None, told: bool
) -> None:
    over = {} if resolved_min_ago is None else {"status": "resolved", "resolved_at": AT - resolved_min_ago * MINUTE}
    cause = incident_of().model_copy(
        update={"key": f"{event}/x", "first_event": event, "agent": agent, "payload": payload, **over}
    )
    assert bool(signals({SHARE: minutes_of(1, 1, 1)}, {}, [cause], RULES, AT)) is told


def test_an_anomaly_of_fallbacks_is_told_with_its_limit_and_the_setting() -> None:
    def told(place: Place, value: float) -> Signal:
        [signal] = signals({place: minutes_of(value, value, value, calls=12)}, {}, (), RULES, AT)
        return signal

    dear = told(COST, 2.14)
    assert dear.title == "Cost of fallbacks unusual: writer"
    assert (
        "fallback models answered 12 calls of writer at 2.14 times the cost of the requested model; "
        "the limit is 2 times (`alerts.anomalies.fallback_cost_factor`)." in dear.text
    )
    assert {name: dear.payload[name] for name in ("unit", "value", "limit", "calls")} == {
        "unit": "factor",
        "value": 2.14,
        "limit": 2.0,
        "calls": 12,
    }
    assert "fallback models answered 80 % of 12 calls of writer; the limit is 50 %" in told(SHARE, 0.8).text


# --- Words -----------------------------------------------------------------------------------------------------------


def test_unusual_errors_are_reported_with_figures_and_a_command_that_lists_them() -> None:
    place: Place = ("wri ter", "error_rate")
    latest = {place: [Minute(minute.at, 0.425, 40) for minute in minutes_of(0, 0, 0)]}
    (raised,) = signals(latest, {place: Baseline(0.01, 0.005)}, (), RULES, AT)
    assert isinstance(raised, Firing)
    assert (raised.title, raised.agent, raised.fades) == ("Error rate unusual: wri ter", "wri ter", False)
    assert (raised.key, raised.at) == ("agent_anomaly/wri%20ter/error_rate", AT)
    assert "42.5 % of 40 calls of wri ter failed; the baseline is 1 %, give or take 2 %." in raised.text
    since = format_time(AT - 3 * MINUTE)
    words = raised.text.split("`")[1]
    assert shlex.split(words) == [
        "breakwater",
        "executions",
        "--agent=wri ter",
        "--status=dead_lettered",
        f"--since={since}",
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
        "since": since,
        "timestamp": format_time(AT),
    }


@pytest.mark.parametrize(
    ("measure", "baseline", "value", "calls", "words", "payload"),
    [
        (
            "spend_rate",
            Baseline(0.3, 0.1),
            4.2,
            1,
            "writer spent $4.20 on 1 call; the baseline is $0.30, give or take $0.10.",
            {"value": "4.200000000", "baseline": "0.300000000"},
        ),
        (
            "latency",
            Baseline(1000, 100),
            9500,
            1200,
            "writer took 9.5 s for the median of 1,200 calls; the baseline is 1.0 s, give or take 100 ms.",
            {"value": 9500, "unit": "ms"},
        ),
        (
            "first_token",
            Baseline(200, 10),
            2600,
            10,
            "writer took 2.6 s to the first token, the median of 10 streams; the baseline is 200 ms, give or take "
            "50 ms.",
            {"calls": 10},
        ),
    ],
)
def test_figures_are_reported_as_people_read_them(
    measure: str, baseline: Baseline, value: float, calls: int, words: str, payload: dict[str, Any]
) -> None:
    place = ("writer", measure)
    (raised,) = signals({place: minutes_of(value, value, value, calls=calls)}, {place: baseline}, (), RULES, AT)
    assert f"{words} It has been unusual since {AT - 3 * MINUTE:%Y-%m-%d %H:%M:%S} UTC." in raised.text
    assert raised.payload.items() >= payload.items()
    assert "dead_lettered" not in raised.text


def test_the_end_of_an_anomaly_says_how_it_ended() -> None:
    begun, old = incident_of(at=AT - timedelta(hours=1)), incident_of(at=AT - NEW_NORMAL)
    present = {LATENCY: Baseline(2000, 100, 9000)}
    calm, high = {LATENCY: minutes_of(950, 950, 950)}, {LATENCY: minutes_of(9500, 9500, 9500)}
    (recovered,) = signals(calm, present, [begun], RULES, AT)
    (accepted,) = signals(high, present, [old], RULES, AT)
    (lapsed,) = signals({}, present, [begun], RULES, AT)
    for over in (recovered, accepted, lapsed):
        assert isinstance(over, Resolved)
        assert (over.key, over.event) == ("agent_anomaly/writer/latency", "agent_anomaly")
    since = f"It had been unusual since {AT - timedelta(hours=1) - 3 * MINUTE:%Y-%m-%d %H:%M:%S} UTC. Nothing to do"
    assert recovered.title == "Latency back to normal: writer"
    assert "took 950 ms for the median of 100 calls; the baseline is 1.0 s, give or take 100 ms." in recovered.text
    assert recovered.text.endswith(f"{since}.")
    assert accepted.title == "Latency accepted as the new baseline: writer"
    assert "the baseline is 2.0 s, give or take 200 ms" in accepted.text
    assert accepted.text.endswith("Nothing to do, if this is intended.")
    assert lapsed.title == "Latency unknown, no calls: writer"
    assert lapsed.text.startswith(f"For {int(LAPSE / MINUTE)} minutes writer made too few calls for a judgement; ")
    assert (lapsed.payload["value"], lapsed.payload["deviations"], lapsed.at) == (None, None, AT)
