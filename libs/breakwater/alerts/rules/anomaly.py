"""Judges the figures of agents by their own baselines: the rules of `agent_anomaly`.

Every minute, the leading alerter reads each agent's latest minutes and its baseline, learned from a week, from
ClickHouse (`records.anomalies`). A minute is far if it is more than `deviations` expected deviations above the
baseline, and above the agent's habits. Only upwards: fewer errors, less spending and faster responses need no operator.

| anomaly | the latest `sustained_minutes` minutes | change |
|---|---|---|
| none | all are far | `began` |
| open | none is far, nor above half as many deviations from the baseline that it began with | `recovered` |
| open for `NEW_NORMAL` | none is far | `accepted` |
| open | there is none within `LAPSE` | `lapsed` |

The figures of fallback models are judged by limits of the config instead, and while no incident of a breaker, a
deployment or a quota says why they answer.

Only minutes with enough calls count, so an agent that is idle at night neither learns a baseline of zero nor raises an
alert in the morning. The incidents are the only state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Literal, NamedTuple

from pydantic import JsonValue

from breakwater.alerts.contract import Alert
from breakwater.alerts.rules.alert_rules import agents_of, began_with
from breakwater.alerts.rules.signals import Firing, Resolved, Signal, key_of
from breakwater.alerts.settings import AnomalyRules
from breakwater.calls.rules.refusals import command
from breakwater.kernel.formats import moment, money, quantity, sentence
from breakwater.kernel.nats.subjects import decode_token, encode_token
from breakwater.kernel.types import format_time, ms_from_time, usd_from_nano

LEARNED_FROM = timedelta(days=7)
"""With less, a quiet weekend would make each Monday an anomaly."""
NEW_NORMAL = timedelta(hours=6)
"""Age from which figures count as a habit and an anomaly may be the new baseline: time enough to see it first."""
LAPSE = timedelta(minutes=120)
"""Twice an hour, so that the anomaly of an agent that runs hourly goes on."""
HABIT_MARGIN = 1.5
"""Times its habitual peak: what is no higher is a habit, such as a batch each night."""
RELATIVE_FLOOR = 0.1
"""The least deviation as a share of the baseline, however steady an agent is."""
UNWATCHED = ("", "unwatched")
"""Place of the incident that anomalies are not watched. No agent has it."""


class Figure(NamedTuple):
    """A figure that is watched."""

    name: str
    unit: str
    floor: float
    """The least expected deviation: less is not worth a person's time."""
    words: str
    limit: str | None = None
    """The setting of `AnomalyRules` with the highest normal value; None if the agent's baseline says what is normal."""


FIGURES: Mapping[str, Figure] = {
    "error_rate": Figure("Error rate", "share", 0.02, "{value} of {calls} of {agent} failed"),
    "spend_rate": Figure("Spending", "usd_per_minute", 0.01, "{agent} spent {value} on {calls}"),
    "latency": Figure("Latency", "ms", 50, "{agent} took {value} for the median of {calls}"),
    "first_token": Figure(
        "Time to first token", "ms", 50, "{agent} took {value} to the first token, the median of {calls}"
    ),
    "fallback_share": Figure(
        "Traffic on fallbacks", "share", 0, "fallback models answered {value} of {calls} of {agent}", "fallback_share"
    ),
    "fallback_cost": Figure(
        "Cost of fallbacks",
        "factor",
        0,
        "fallback models answered {calls} of {agent} at {value} the cost of the requested model",
        "fallback_cost_factor",
    ),
}


class Minute(NamedTuple):
    """A figure of an agent in one minute, and the number of its calls or streams."""

    at: datetime
    value: float
    calls: int


class Baseline(NamedTuple):
    """The normal minutes of an agent, by one figure."""

    value: float
    """The median; of an error rate, the mean."""
    spread: float
    """From there to the 80th percentile: of normal noise, 0.8 of the standard deviation."""
    peak: float | None = None
    """The 99th percentile of the minutes before `NEW_NORMAL`; None if the figure has no habits."""

    def deviation(self, measure: str, calls: int) -> float:
        """The expected deviation of a minute with so many calls, never zero.

        Of an error rate, it is at least what chance alone makes: of ten calls at night, one failure is 10 %.
        """
        variance = max(0.0, self.value * (1 - self.value)) if measure == "error_rate" else 0.0
        chance = math.sqrt(variance / max(calls, 1))
        return max(self.spread, RELATIVE_FLOOR * self.value, FIGURES[measure].floor, chance)

    def is_far(self, minute: Minute, measure: str, deviations: float) -> bool:
        """Returns True if a minute is above its limit, or so many deviations above the baseline, and no habit."""
        if FIGURES[measure].limit is not None:
            return minute.value > self.value
        limit = self.value + deviations * self.deviation(measure, minute.calls)
        return minute.value > max(limit, HABIT_MARGIN * (self.peak or 0.0))


Place = tuple[str, str]
"""An agent and the name of one of its `FIGURES`."""
Change = Literal["began", "recovered", "accepted", "lapsed"]
TURNED_OFF = "the config turns them off"
_TITLES: Mapping[Change, str] = {
    "began": "{} unusual: {}",
    "recovered": "{} back to normal: {}",
    "accepted": "{} accepted as the new baseline: {}",
    "lapsed": "{} unknown, no calls: {}",
}


def signals(
    latest: Mapping[Place, Sequence[Minute]],
    baselines: Mapping[Place, Baseline],
    incidents: Iterable[Alert],
    rules: AnomalyRules,
    now: datetime,
) -> list[Signal]:
    """Returns the incidents that begin and end by the latest figures.

    Args:
        latest: the last minutes of each figure within `LAPSE`, the newest first, at most `sustained_minutes`.
        baselines: of the figures that have been seen for long enough, but for those with limits.
        incidents: the newest alert of each, in the order in which they were opened.
        rules: of the config.
        now: the time of the question.
    """
    all_incidents = list(incidents)
    is_open = open_anomalies(all_incidents)
    changes: list[Signal] = []
    if is_open.pop(UNWATCHED, None) is not None:
        changes.append(_watching("ClickHouse answers again. Nothing to do.", now, ended=True))
    for place in sorted({*latest, *is_open}):
        agent, measure = place
        minutes = latest.get(place, ())
        incident = is_open.get(place)
        if not is_watched(measure, rules):
            if incident is not None:
                changes.append(_turned_off(incident, TURNED_OFF, now))
            continue
        has_limit = FIGURES[measure].limit is not None
        present = _limit_of(measure, rules) if has_limit else baselines.get(place)
        change = judge(measure, minutes, present, incident, rules, now)
        if change is None or (has_limit and change == "began" and _is_explained(agent, minutes[-1].at, all_incidents)):
            continue
        baseline = present if incident is None or has_limit or change == "accepted" else _baseline_of(incident)
        assert baseline is not None
        since = minutes[-1].at if incident is None else datetime.fromisoformat(str(incident.payload["since"]))
        changes.append(_signal(place, change, minutes, baseline, since, now))
    return changes


def judge(
    measure: str,
    minutes: Sequence[Minute],
    baseline: Baseline | None,
    incident: Alert | None,
    rules: AnomalyRules,
    now: datetime,
) -> Change | None:
    """Returns what changes of one figure; see the table above."""
    deviations = rules.deviations or math.inf
    enough = len(minutes) >= rules.sustained_minutes
    far = [baseline is not None and baseline.is_far(minute, measure, deviations) for minute in minutes]
    if incident is None:
        return "began" if enough and all(far) else None
    if not minutes:
        return "lapsed"
    if not enough or any(far):
        return None
    before = baseline if FIGURES[measure].limit is not None and baseline is not None else _baseline_of(incident)
    if not any(before.is_far(minute, measure, deviations / 2) for minute in minutes):
        return "recovered"
    return "accepted" if baseline is not None and now - incident.opened_at >= NEW_NORMAL else None


def is_watched(measure: str, rules: AnomalyRules) -> bool:
    """Returns True if the config has the rule that judges a figure."""
    limit = FIGURES[measure].limit
    return (rules.deviations if limit is None else getattr(rules, limit)) is not None


def _limit_of(measure: str, rules: AnomalyRules) -> Baseline:
    return Baseline(getattr(rules, str(FIGURES[measure].limit)), 0.0)


def _is_explained(agent: str, since: datetime, incidents: Iterable[Alert]) -> bool:
    """Returns True if an incident since a time says why fallbacks answer an agent's jobs: two would be one problem."""
    return any(
        began_with(alert) in {"breaker_open", "deployment_failing", "quota_exhausted"}
        and (alert.resolved_at is None or alert.resolved_at > since)
        and (agent in agents_of(alert) or alert.agent == agent or (alert.agent == "*" and not agents_of(alert)))
        for alert in incidents
    )


def unwatched_signals(error: str, incidents: Iterable[Alert], now: datetime) -> list[Signal]:
    """Returns the signal that anomalies can't be watched, unless its incident is open. `error` is ClickHouse's."""
    if UNWATCHED in open_anomalies(incidents):
        return []
    text = f"{sentence(error)} Until it answers, no anomaly of an agent is reported, and none ends."
    return [_watching(f"{text} To do: `{command('doctor', None)}` says what is wrong.", now, ended=False)]


def turned_off_signals(reason: str, incidents: Iterable[Alert], now: datetime) -> list[Signal]:
    """Returns the signals that end all open incidents once anomalies are no longer watched."""
    return [_turned_off(alert, reason, now) for alert in open_anomalies(incidents).values()]


def _turned_off(alert: Alert, reason: str, now: datetime) -> Resolved:
    return Resolved(
        key=alert.key,
        event="agent_anomaly",
        title=f"No longer watched: {alert.title}",
        text=f"Such anomalies are not watched any more: {reason}. Nothing to do.",
        source_id=f"{alert.alert_id}/off",
        at=now,
        payload=alert.payload,
        reason=reason,
    )


def open_anomalies(incidents: Iterable[Alert]) -> dict[Place, Alert]:
    """Returns the open incidents of the watched figures, and the one that they can't be watched, by place."""
    anomalies = [alert for alert in incidents if alert.key.startswith("agent_anomaly/") and alert.status != "resolved"]
    places = {(decode_token(alert.key.split("/")[1]), alert.key.split("/")[2]): alert for alert in anomalies}
    return {place: alert for place, alert in places.items() if place == UNWATCHED or place[1] in FIGURES}


def _baseline_of(incident: Alert) -> Baseline:
    """Returns the baseline that an anomaly began with: what the baseline learned since does not end it."""
    return Baseline(float(str(incident.payload["baseline"])), float(str(incident.payload["deviation"])))


def _watching(text: str, now: datetime, *, ended: bool) -> Signal:
    key = key_of("agent_anomaly", None, UNWATCHED[1])
    source_id = f"unwatched/{ended}/{format_time(now)}"
    payload: dict[str, JsonValue] = {"measure": "unwatched"}
    if ended:
        title = "Anomalies are watched again: ClickHouse answers"
        return Resolved(key, "agent_anomaly", title, text, source_id, now, payload)
    title = "Anomalies are not watched: ClickHouse does not answer"
    return Firing(key, "agent_anomaly", title, text, source_id, now, payload, agent="*")


def _signal(
    place: Place, change: Change, minutes: Sequence[Minute], baseline: Baseline, since: datetime, now: datetime
) -> Signal:
    agent, measure = place
    figure = FIGURES[measure]
    newest = minutes[0] if minutes else None
    at = now if newest is None else newest.at + timedelta(minutes=1)
    payload: dict[str, JsonValue] = {
        "agent": agent,
        "measure": measure,
        "change": change,
        "unit": figure.unit,
        "value": None if newest is None else _rounded_figure(newest.value, figure.unit),
        "calls": 0 if newest is None else newest.calls,
        "since": format_time(since),
        "timestamp": format_time(at),
    }
    if figure.limit is None:
        deviation = baseline.deviation(measure, 0 if newest is None else newest.calls)
        deviations = None if newest is None else round((newest.value - baseline.value) / deviation, 1)
        payload["baseline"] = _rounded_figure(baseline.value, figure.unit)
        payload |= {"deviation": _rounded_figure(deviation, figure.unit), "deviations": deviations}
        spread = _amount(deviation, figure.unit)
        normal = f"the baseline is {_amount(baseline.value, figure.unit)}, give or take {spread}"
    else:
        payload["limit"] = _rounded_figure(baseline.value, figure.unit)
        normal = f"the limit is {_amount(baseline.value, figure.unit)} (`alerts.anomalies.{figure.limit}`)"
    if newest is None:
        text = f"For {LAPSE // timedelta(minutes=1)} minutes {agent} made too few calls for a judgement; {normal}. "
    else:
        calls = quantity(newest.calls, "stream" if measure == "first_token" else "call")
        measured = figure.words.format(agent=agent, value=_amount(newest.value, figure.unit), calls=calls)
        text = f"In the minute from {moment(newest.at)} {measured}; {normal}. "
    if change == "began":
        status = "dead_lettered" if measure == "error_rate" else None
        listed = command("executions", None, agent=agent, status=status, since=format_time(since))
        text += f"It has been unusual since {moment(since)}. To do: `{listed}` lists its executions."
    else:
        text += f"It had been unusual since {moment(since)}. Nothing to do"
        text += "." if change == "recovered" else ", if this is intended."
    key = key_of("agent_anomaly", agent, measure)
    source_id = f"{encode_token(agent)}/{measure}/{ms_from_time(at)}"
    title = _TITLES[change].format(figure.name, agent)
    if change == "began":
        return Firing(key, "agent_anomaly", title, text, source_id, at, payload, agent=agent)
    return Resolved(key, "agent_anomaly", title, text, source_id, at, payload)


def _amount(value: float, unit: str) -> str:
    if unit == "share":
        return f"{value * 100:.3g} %"
    if unit == "factor":
        return f"{value:.3g} times"
    if unit == "usd_per_minute":
        return money(round(value * 1e9))
    return f"{value:,.0f} ms" if value < 1000 else f"{value / 1000:,.1f} s"


def _rounded_figure(value: float, unit: str) -> JsonValue:
    if unit in {"share", "factor"}:
        return round(value, 4)
    return usd_from_nano(round(value * 1e9)) if unit == "usd_per_minute" else round(value)
