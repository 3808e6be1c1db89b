"""Finds minutes in which an agent's errors, spending, latency or time to first token are far from its own.

A minute is far when its value is more than `deviations` expected deviations above the baseline, and calm within half of
that. Only upwards: fewer errors, less spending and faster answers need no operator. An anomaly begins after a number of
far minutes in a row, and is over

- after as many calm ones;
- when it has lasted for `NEW_NORMAL` minutes: while it lasts its minutes are learned separately, and then
  they become the baseline;
- when there were no figures for `LAPSE` minutes: the agent was stopped.

All but errors also have habits: a batch each night is far from the day's figures, and no anomaly. When `HABIT`
peaks have passed by themselves within a week, the next one is reported only if it is clearly higher, or lasts clearly
longer.

Only minutes with activity count, both in a row and for the baseline: an agent that is idle at night neither learns a
baseline of zero nor raises an alert in the morning. So its spending is that of an active minute; that it works more
minutes of the day is for budgets to see. Minutes with too few calls say nothing of errors and latency, either way, and
those with too few streamed answers nothing of their first tokens.

Nothing here is a clock: a minute is its number since the epoch, and one that is passed again changes nothing.

The baseline of a measure is an exponentially weighted mean, and its spread the mean distance from that.

Both are learned from clipped values, so that an outlier moves them little (an M-estimator, after Huber). With `w` the
weight of a value `x`, and `d` the deviation, which is `spread` with its floors:

    baseline += w * clip(x - baseline, -CENTRE_CLIP * d, CENTRE_CLIP * d)
    spread   += w * (min(|x - baseline|, SPREAD_CLIP * d) - spread)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Annotated, Literal

from pydantic import Field, JsonValue, TypeAdapter, ValidationError

from breakwater.contracts.subjects import encode_token
from breakwater.contracts.types import format_time, time_from_ms, usd_from_nano
from breakwater.policy.alert_rules import AnomalyRules
from breakwater.policy.formats import counted, moment, money
from breakwater.policy.refusals import command
from breakwater.policy.signals import Firing, Resolved, Signal, key_of

Measure = Literal["error_rate", "spend_rate", "latency", "first_token"]
"""A share of calls; nano-dollars per minute; milliseconds, twice."""
MEASURES: tuple[Measure, ...] = ("error_rate", "spend_rate", "latency", "first_token")

HALF_LIFE = 4_320
"""Minutes after which one counts half: three days of an agent that is always active. With one day a quiet
weekend would outweigh the week, and each Monday be an anomaly."""
WEIGHT = 1 - 2 ** (-1 / HALF_LIFE)
"""Weight of one minute, once there are many; the first ones weigh as in a plain mean."""
START = 5
"""Minutes whose median is where learning begins, so that an odd first one is not the baseline. As few as
`minimum_minutes` may be."""
CENTRE_CLIP = 3.0
"""Deviations beyond which a minute moves the baseline no further; of normal noise that is 2 %."""
SPREAD_CLIP = 20.0
"""Deviations beyond which a minute widens the spread no further. Wide, as what has few but high peaks must not be taken
for steady: with a clip of `c` that happens where fewer than 1 of 2c minutes is a peak."""
RELATIVE_FLOOR = 0.1
"""The least deviation, as a share of the baseline, however steady an agent is."""
ABSOLUTE_FLOOR: Mapping[Measure, float] = {
    "error_rate": 0.02,
    "spend_rate": 10_000_000,
    "latency": 50,
    "first_token": 50,
}
"""The least deviation: 2 % of calls, one cent per minute, 50 ms. Less is not worth a person's time."""

Positive = Annotated[float, Field(ge=0, allow_inf_nan=False)]
WholeNumber = Annotated[int, Field(ge=0, le=4_000_000_000)]
"""A count, or a minute since the epoch, as far as times can be written."""


@dataclass(frozen=True, slots=True)
class Level:
    """The learned baseline of one measure."""

    baseline: Positive = 0.0
    spread: Positive = 0.0
    """Mean distance from the baseline, without floors. Of normal noise it is 0.8 of the standard deviation."""
    learned: WholeNumber = 0
    """Number of minutes it was learned from."""
    first: Annotated[tuple[Positive, ...], Field(max_length=START)] = ()
    """The first minutes, while there are fewer than START."""


UNKNOWN = Level()


def learned(level: Level, measure: Measure, value: float, calls: int) -> Level:
    """The level after a minute with this value, of so many calls."""
    count = level.learned + 1
    if count <= START:
        first = (*level.first, value)
        baseline = median(first)
        return Level(baseline, fmean(abs(one - baseline) for one in first), count, first if count < START else ())
    weight = max(WEIGHT, 1 / count)
    deviation = deviation_of(level, measure, calls)
    off, most = value - level.baseline, CENTRE_CLIP * deviation
    baseline = level.baseline + weight * max(-most, min(off, most))
    spread = level.spread + weight * (min(abs(off), SPREAD_CLIP * deviation) - level.spread)
    return Level(baseline, spread, count)


def deviation_of(level: Level, measure: Measure, calls: int) -> float:
    """The expected deviation of a minute with so many calls: never less than its floors, so never zero.

    Of an error rate it is also never less than chance alone makes it: of the ten calls of a minute at night one that
    fails is 10 %, while the thousands by day, from which most is learned, are steady.
    """
    chance = 0.0
    if measure == "error_rate" and calls:
        chance = math.sqrt(max(0.0, level.baseline * (1 - level.baseline)) / calls)
    return max(level.spread, RELATIVE_FLOOR * level.baseline, ABSOLUTE_FLOOR[measure], chance)


NEW_NORMAL = 360
"""Minutes after which an anomaly becomes the baseline: six hours, time enough for an operator to see it."""
LAPSE = 120
"""Minutes without a figure after which an anomaly is over. Twice an hour, so that it goes on for what runs hourly."""
HABIT = 3
"""Number of peaks that are a habit: a batch each night is an anomaly for three nights."""
HABIT_WITHIN = 7 * 24 * 60
"""Minutes of the clock, in which they must have been."""
HIGHER = 1.5
"""Times its highest peak: what is beyond that is no habit."""
LONGER = 2
"""Times its longest peak: likewise."""


@dataclass(frozen=True, slots=True)
class Minute:
    """Figures of an agent in one minute."""

    number: int
    """Minutes since the epoch."""
    calls: int
    """Jobs that were answered or failed."""
    failures: int
    cost: int | None
    """Nano-dollars; None where nothing is known of it."""
    latency_ms: float | None
    """Median of its calls: one slow call is not a slow minute."""
    streams: int = 0
    """Attempts whose answer began to be streamed."""
    first_token_ms: float | None = None
    """Median of these, too."""


@dataclass(frozen=True, slots=True)
class Peak:
    """Minutes that were far, one after the other, until they passed."""

    since: WholeNumber = 0
    minutes: WholeNumber = 0
    """Length in minutes of the clock."""
    height: Positive = 0.0
    """The highest value."""


@dataclass(frozen=True, slots=True)
class Track:
    """One measure of an agent."""

    level: Level = UNKNOWN
    candidate: Level = UNKNOWN
    """The baseline of far minutes. It is kept when activity ends, as it may be far again in the morning."""
    peak: Peak = Peak()
    """The one that it is in, from its first far minute on."""
    peaks: Annotated[tuple[Peak, ...], Field(max_length=HABIT)] = ()
    """The latest that passed, the oldest first."""
    anomalous: bool = False
    announced: bool = False
    """True if the anomaly was announced, and its end has to be."""
    in_a_row: WholeNumber = 0
    """Minutes that were far; while it is anomalous, those that were calm."""
    minute: Annotated[int, Field(ge=-1, le=4_000_000_000)] = -1
    """The latest that was judged."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """The learned baseline of an agent, with the anomalies that last."""

    version: Literal[1] = 1
    error_rate: Track = Track()
    spend_rate: Track = Track()
    latency: Track = Track()
    first_token: Track = Track()

    def of(self, measure: Measure) -> Track:
        """One measure of it."""
        return getattr(self, measure)

    def anomalies(self) -> frozenset[Measure]:
        """Those that began, by a verdict, and are not over."""
        return frozenset(measure for measure in MEASURES if self.of(measure).announced)

    def to_json(self) -> bytes:
        """The stored form: about 1 kB, and never more than 4."""
        return _STORED.dump_json(self)

    @staticmethod
    def from_json(data: bytes) -> Baseline | None:
        """The inverse. None for what another version wrote, or is damaged: learning restarts."""
        try:
            return _STORED.validate_json(data)
        except ValidationError:
            return None


_STORED = TypeAdapter(Baseline)


@dataclass(frozen=True, slots=True)
class AnomalyChange:
    """An anomaly began; or it is over: it recovered, is accepted as the new baseline, or there are no more figures."""

    measure: Measure
    change: Literal["began", "recovered", "accepted", "lapsed"]
    minute: int
    """The minute that decided it."""
    since: int
    """The first minute that was far."""
    value: float | None
    """Value of the minute that decided it; None where it lapsed."""
    baseline: float
    """The baseline before; of an accepted anomaly, the new one."""
    deviation: float
    """The expected one, with its floors. Never zero."""
    calls: int
    """Number of calls; of streams, for time to first token."""


def judge(baseline: Baseline, minute: Minute, rules: AnomalyRules) -> tuple[Baseline, tuple[AnomalyChange, ...]]:
    """Takes a minute into account, and says what changed with it.

    Args:
        baseline: as it was.
        minute: later than the ones before; of one that was judged already nothing changes, and the baseline returned
            is the one given.
        rules: with `deviations` None nothing begins, and what has begun ends; figures are learned all the same.
    """
    baseline, lapsed = lapse(baseline, minute.number)
    verdicts = list(lapsed)
    tracks: dict[Measure, Track] = {}
    changed = False
    for measure in MEASURES:
        track, value = baseline.of(measure), _value(minute, measure, rules)
        if value is not None and minute.number > track.minute:
            changed = True
            track, verdict = _observe(track, measure, value, minute, rules)
            if verdict is not None:
                verdicts.append(verdict)
        tracks[measure] = track
    return Baseline(baseline.version, **tracks) if changed else baseline, tuple(verdicts)


def lapse(baseline: Baseline, number: int) -> tuple[Baseline, tuple[AnomalyChange, ...]]:
    """Ends the anomalies of which there have been no figures for long, as of the minute with this number."""
    verdicts: list[AnomalyChange] = []
    changed: dict[Measure, Track] = {}
    for measure in MEASURES:
        track = baseline.of(measure)
        over = track.minute + LAPSE
        if not track.anomalous or number <= over:
            continue
        if track.announced:
            # As of when it lapsed, and not of when that was seen: so every reader gets the same.
            level, deviation = track.level, deviation_of(track.level, measure, 0)
            verdicts.append(
                AnomalyChange(measure, "lapsed", over, track.peak.since, None, level.baseline, deviation, 0)
            )
        changed[measure] = replace(_passed(track, track.minute), candidate=track.candidate)
    return replace(baseline, **changed) if changed else baseline, tuple(verdicts)


def _value(minute: Minute, measure: Measure, rules: AnomalyRules) -> float | None:
    if measure == "spend_rate":
        return None if minute.cost is None else float(minute.cost)
    if _calls(minute, measure) < rules.minimum_calls:
        return None
    if measure == "first_token":
        return minute.first_token_ms
    return minute.failures / minute.calls if measure == "error_rate" else minute.latency_ms


def _calls(minute: Minute, measure: Measure) -> int:
    return minute.streams if measure == "first_token" else minute.calls


def _observe(
    track: Track, measure: Measure, value: float, minute: Minute, rules: AnomalyRules
) -> tuple[Track, AnomalyChange | None]:
    limit = math.inf if rules.deviations is None else rules.deviations
    deviation = deviation_of(track.level, measure, minute.calls)
    above = (value - track.level.baseline) / deviation
    if track.anomalous:
        after, change = _during(track, measure, value, minute, above <= limit / 2, rules)
    else:
        far = above > limit and track.level.learned >= rules.minimum_minutes
        after, change = _before(track, measure, value, minute, far, rules)
    if change is None:
        return after, None
    # An anomaly that ended is reported as it was; an accepted one with its new baseline.
    baseline = after.level.baseline if change == "accepted" else track.level.baseline
    since = after.peak.since if change == "began" else track.peak.since
    return after, AnomalyChange(
        measure, change, minute.number, since, value, baseline, deviation, _calls(minute, measure)
    )


_ChangeKind = Literal["began", "recovered", "accepted"]


def _before(
    track: Track, measure: Measure, value: float, minute: Minute, far: bool, rules: AnomalyRules
) -> tuple[Track, _ChangeKind | None]:
    level = learned(track.level, measure, value, minute.calls)
    if not far:
        return Track(level, UNKNOWN, track.peak, track.peaks, minute=minute.number), None
    in_a_row = track.in_a_row + 1
    peak = _grown(track.peak if track.in_a_row else Peak(minute.number), value, minute.number)
    after = replace(track, level=level, peak=peak, in_a_row=in_a_row, minute=minute.number)
    if in_a_row < rules.sustained_minutes:
        return after, None
    announced = not _is_habit(peak, track, measure)
    return replace(after, anomalous=True, announced=announced, in_a_row=0), "began" if announced else None


def _during(
    track: Track, measure: Measure, value: float, minute: Minute, calm: bool, rules: AnomalyRules
) -> tuple[Track, _ChangeKind | None]:
    in_a_row = track.in_a_row + 1 if calm else 0
    if in_a_row >= rules.sustained_minutes:
        return _passed(track, minute.number), "recovered" if track.announced else None
    candidate = learned(track.candidate, measure, value, minute.calls)
    if candidate.learned >= NEW_NORMAL:
        return Track(level=candidate, minute=minute.number), "accepted" if track.announced else None
    peak = track.peak if calm else _grown(track.peak, value, minute.number)
    begins = not track.announced and not calm and not _is_habit(peak, track, measure)
    after = replace(
        track,
        candidate=candidate,
        peak=peak,
        announced=track.announced or begins,
        in_a_row=in_a_row,
        minute=minute.number,
    )
    return after, "began" if begins else None


def _grown(peak: Peak, value: float, number: int) -> Peak:
    return Peak(peak.since, number + 1 - peak.since, max(peak.height, value))


def _passed(track: Track, number: int) -> Track:
    return Track(level=track.level, peaks=(*track.peaks, track.peak)[-HABIT:], minute=number)


def _is_habit(peak: Peak, track: Track, measure: Measure) -> bool:
    known = track.peaks
    return (
        measure != "error_rate"
        and len(known) == HABIT
        and peak.since - known[0].since <= HABIT_WITHIN
        and peak.height <= HIGHER * max(one.height for one in known)
        and peak.minutes <= LONGER * max(one.minutes for one in known)
    )


@dataclass(frozen=True, slots=True)
class _Words:
    """Words for one measure in texts and figures.

    Attributes:
        name: of the measure.
        unit: of its figures.
        now: what was measured; `{shown}` is the value, `{calls}` and `{streams}` are how many there were.
        advice: what the list of executions that the text names is good for.
        shown: a value as people read it.
        stored: a value as programs read it.
    """

    name: str
    unit: str
    now: str
    advice: str
    shown: Callable[[float], str]
    stored: Callable[[float], JsonValue] = round


def _milliseconds(value: float) -> str:
    return f"{value:,.0f} ms" if value < 1000 else f"{value / 1000:,.1f} s"


_WORDS: Mapping[Measure, _Words] = {
    "error_rate": _Words(
        "Error rate",
        "share",
        "{shown} of {calls} of {agent} failed",
        "lists the failures and their reasons",
        lambda value: f"{value * 100:.3g} %",
        lambda value: round(value, 4),
    ),
    "spend_rate": _Words(
        "Spending",
        "usd_per_minute",
        "{agent} spent {shown} on {calls}",
        "lists its most expensive executions",
        lambda value: money(round(value)),
        lambda value: usd_from_nano(round(value)),
    ),
    "latency": _Words(
        "Latency",
        "ms",
        "{agent} took {shown} for the median of {calls}",
        "lists its calls and their durations",
        _milliseconds,
    ),
    "first_token": _Words(
        "Time to first token",
        "ms",
        "{agent} took {shown} to the first token, the median of {streams}",
        "lists its calls; the page of each shows when its answer began",
        _milliseconds,
    ),
}
_OVER = {"recovered": "back to normal", "accepted": "accepted as the new baseline", "lapsed": "unknown, no calls"}


def signals(agent: str, verdicts: Iterable[AnomalyChange]) -> tuple[Signal, ...]:
    """The incidents that begin or end with these verdicts. The same verdicts give the same incidents."""
    return tuple(_signal(agent, verdict) for verdict in verdicts)


def _signal(agent: str, verdict: AnomalyChange) -> Signal:
    key, words = key_of("agent_anomaly", agent, verdict.measure), _WORDS[verdict.measure]
    source_id = f"{encode_token(agent)}/{verdict.measure}/{verdict.minute}"
    at, since = time_from_ms((verdict.minute + 1) * 60_000), time_from_ms(verdict.since * 60_000)
    value, change = verdict.value, verdict.change
    figures: dict[str, JsonValue] = {
        "agent": agent,
        "measure": verdict.measure,
        "change": change,
        "unit": words.unit,
        "value": None if value is None else words.stored(value),
        "baseline": words.stored(verdict.baseline),
        "deviation": words.stored(verdict.deviation),
        "deviations": None if value is None else round((value - verdict.baseline) / verdict.deviation, 1),
        "calls": verdict.calls,
        "since": format_time(since),
        "timestamp": format_time(at),
    }
    text = _text(agent, verdict, words)
    if change == "began":
        title = f"{words.name} unusual: {agent}"
        return Firing(key, "agent_anomaly", title, text, source_id, at, figures, agent=agent)
    return Resolved(key, "agent_anomaly", f"{words.name} {_OVER[change]}: {agent}", text, source_id, at, figures)


def _text(agent: str, verdict: AnomalyChange, words: _Words) -> str:
    when, since = (time_from_ms(minute * 60_000) for minute in (verdict.minute, verdict.since))
    baseline, deviation = words.shown(verdict.baseline), words.shown(verdict.deviation)
    now = words.now.format(
        agent=agent,
        shown=words.shown(verdict.value or 0.0),
        calls=counted(verdict.calls, "call"),
        streams=counted(verdict.calls, "stream"),
    )
    now = f"In the minute from {moment(when)} {now}"
    normal = f"the baseline is {baseline}, give or take {deviation}"
    match verdict.change:
        case "began":
            failed = "dead_lettered" if verdict.measure == "error_rate" else None
            listed = command("executions", None, agent=agent, status=failed, since=format_time(since))
            to_do = f"To do: `{listed}` {words.advice}."
            return f"{now}; {normal}. It has been unusual since {moment(since)}. {to_do}"
        case "recovered":
            return f"{now}; {normal}. It had been unusual since {moment(since)}. Nothing to do."
        case "accepted":
            lasted = f"It has lasted since {moment(since)}, so about {baseline} is the baseline from now on"
            return f"{now}. {lasted}. To do: nothing, if this is intended."
        case "lapsed":
            none = f"For {LAPSE} minutes {agent} made too few calls for a judgement"
            return (
                f"{none}. They had been unusual since {moment(since)}; {normal}. "
                "To do: nothing, if it is meant to be idle."
            )
