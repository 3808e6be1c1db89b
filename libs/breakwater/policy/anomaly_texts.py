"""The texts of anomaly alerts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pydantic import JsonValue

from breakwater.contracts.subjects import encode_token
from breakwater.contracts.types import format_time, time_from_ms, usd_from_nano
from breakwater.policy.alert_texts import moment, money_text
from breakwater.policy.anomaly import LAPSE, Measure, Verdict
from breakwater.policy.signals import Firing, Resolved, Signal, command, key_of

_NAMES: Mapping[Measure, str] = {
    "error_rate": "Error rate",
    "spend_rate": "Spending",
    "latency": "Latency",
    "first_token": "Time to first token",
}
_UNITS: Mapping[Measure, str] = {
    "error_rate": "share",
    "spend_rate": "usd_per_minute",
    "latency": "ms",
    "first_token": "ms",
}
_ADVICE: Mapping[Measure, str] = {
    "error_rate": "lists what failed, and why",
    "spend_rate": "lists what it spent money on",
    "latency": "lists its calls, and how long each took",
    "first_token": "lists its calls; each one's page shows when its answer began",
}


def signals(agent: str, verdicts: Iterable[Verdict]) -> tuple[Signal, ...]:
    """The incidents that begin or end with these verdicts. The same verdicts give the same incidents."""
    return tuple(_signal(agent, verdict) for verdict in verdicts)


def _signal(agent: str, verdict: Verdict) -> Signal:
    key, name = key_of("agent_anomaly", agent, verdict.measure), _NAMES[verdict.measure]
    source_id = f"{encode_token(agent)}/{verdict.measure}/{verdict.minute}"
    origin = (source_id, time_from_ms((verdict.minute + 1) * 60_000), _figures(agent, verdict))
    if verdict.change == "began":
        title = f"{name} unusual: {agent}"
        return Firing(key, "agent_anomaly", title, _began(agent, verdict), *origin, agent=agent)
    words = {"recovered": "back to normal", "accepted": "accepted as the new baseline", "lapsed": "unknown, no calls"}
    title = f"{name} {words[verdict.change]}: {agent}"
    return Resolved(key, "agent_anomaly", title, _over(agent, verdict), *origin)


def _began(agent: str, verdict: Verdict) -> str:
    failed = "dead_lettered" if verdict.measure == "error_rate" else None
    since = time_from_ms(verdict.since * 60_000)
    listed = command("executions", None, agent=agent, status=failed, since=format_time(since))
    return (
        f"{_now(agent, verdict)}; the baseline is {_baseline(verdict)}. It has been unusual since {moment(since)}. "
        f"To do: `{listed}` {_ADVICE[verdict.measure]}."
    )


def _over(agent: str, verdict: Verdict) -> str:
    since = moment(time_from_ms(verdict.since * 60_000))
    match verdict.change:
        case "accepted":
            text = (
                f"{_now(agent, verdict)}. It has lasted since {since}, so about {_shown(verdict, verdict.baseline)} is"
            )
            return f"{text} the baseline from now on. To do: nothing, if this is intended."
        case "lapsed":
            none = f"For {LAPSE} minutes {agent} made too few calls to judge. They had been unusual since {since}"
            return f"{none}; the baseline is {_baseline(verdict)}. To do: nothing, if it is meant to be idle."
        case _:
            now = f"{_now(agent, verdict)}; the baseline is {_baseline(verdict)}"
            return f"{now}. It had been unusual since {since}. Nothing to do."


def _now(agent: str, verdict: Verdict) -> str:
    value, when = verdict.value or 0.0, moment(time_from_ms(verdict.minute * 60_000))
    shown = _shown(verdict, value)
    match verdict.measure:
        case "error_rate":
            return f"In the minute from {when} {shown} of {_calls(verdict.calls)} of {agent} failed"
        case "spend_rate":
            return f"In the minute from {when} {agent} spent {shown} on {_calls(verdict.calls)}"
        case "latency":
            return f"In the minute from {when} {agent} took {shown} for the median of {_calls(verdict.calls)}"
        case "first_token":
            streams = f"{verdict.calls:,} stream{'' if verdict.calls == 1 else 's'}"
            return f"In the minute from {when} {agent} took {shown} to the first token, the median of {streams}"


def _calls(count: int) -> str:
    return f"{count:,} call{'' if count == 1 else 's'}"


def _baseline(verdict: Verdict) -> str:
    return f"{_shown(verdict, verdict.baseline)}, give or take {_shown(verdict, verdict.deviation)}"


def _shown(verdict: Verdict, value: float) -> str:
    match verdict.measure:
        case "error_rate":
            return f"{value * 100:.3g} %"
        case "spend_rate":
            return money_text(round(value))
        case "latency" | "first_token":
            return f"{value:,.0f} ms" if value < 1000 else f"{value / 1000:,.1f} s"


def _figures(agent: str, verdict: Verdict) -> dict[str, JsonValue]:
    value = verdict.value
    return {
        "agent": agent,
        "measure": verdict.measure,
        "change": verdict.change,
        "unit": _UNITS[verdict.measure],
        "value": None if value is None else _stored(verdict.measure, value),
        "baseline": _stored(verdict.measure, verdict.baseline),
        "deviation": _stored(verdict.measure, verdict.deviation),
        "deviations": None if value is None else round((value - verdict.baseline) / verdict.deviation, 1),
        "calls": verdict.calls,
        "since": format_time(time_from_ms(verdict.since * 60_000)),
        "timestamp": format_time(time_from_ms((verdict.minute + 1) * 60_000)),
    }


def _stored(measure: Measure, value: float) -> JsonValue:
    match measure:
        case "error_rate":
            return round(value, 4)
        case "spend_rate":
            return usd_from_nano(round(value))
        case "latency" | "first_token":
            return round(value)
