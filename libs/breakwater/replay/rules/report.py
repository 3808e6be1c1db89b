"""The report of a replay: its figures for programs, and what matters most in words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from urllib.parse import quote

from breakwater.kernel.formats import duration, money, moneys, percent, quantity
from breakwater.kernel.types import time_from_ms
from breakwater.replay.contract import (
    ConfigPlan,
    PlannedAlert,
    PlannedChange,
    PlannedDay,
    PlannedFigure,
    PlannedJob,
    PlannedLimit,
    PlannedSpend,
    PlannedStep,
)
from breakwater.replay.rules.effects import (
    CountedChange,
    Effects,
    Estimate,
    EventCounts,
    StepFigures,
    alerts_of,
    cap_times,
    changes_of,
    step_ms_of,
)
from breakwater.replay.rules.engine import ReplayFindings
from breakwater.replay.rules.history import Changes

SHOWN_STEPS = 60
"""The most steps of time that are shown, unless it is longer than so many days."""

MAX_ALERTS = 50
"""The most incidents that are listed."""

NARROW = 0.005
"""The share of a figure up to which its interval is not worth its words."""

OPENINGS = "breaker openings"
"""The name of the change that counts them."""


def report_of(
    effects: Effects,
    findings: ReplayFindings,
    changes: Changes,
    since: datetime,
    until: datetime,
    *,
    gaps: Iterable[str] = (),
    console_url: str | None = None,
) -> ConfigPlan:
    """Returns the report of a replay.

    Args:
        effects: the effects on the jobs, and the events of the replay.
        findings: what else the replay found.
        changes: what the services decided then.
        since: the beginning of the time in which the jobs were started.
        until: its end.
        gaps: what the record lacks, in words.
        console_url: the console in people's browsers; None if it is not known.
    """
    events = EventCounts.of(changes, effects.agent), effects.events
    counted = changes_of(*events)
    step_ms = _step_ms(effects)
    return ConfigPlan(
        since=since,
        until=until,
        agent=effects.agent,
        jobs=effects.jobs,
        summary=tuple(_summary(effects, counted)),
        newly_refused=figure_of(effects.of_jobs(effects.newly_refused, "refused")),
        refused_no_more=figure_of(effects.of_jobs(effects.refused_no_more, "answered")),
        lost=figure_of(effects.of_jobs(effects.lost, "refused", "failed")),
        won=figure_of(effects.of_jobs(effects.won, "answered")),
        changed_model=effects.changed_model,
        sooner=effects.sooner,
        calls=PlannedChange(name="calls of models", before=effects.calls[0], after=effects.calls[1]),
        spend=spend_of(effects.spend),
        wasted=spend_of(effects.waste),
        duration_p50_ms=figure_of(effects.duration_ms(0.5)),
        duration_p95_ms=figure_of(effects.duration_ms(0.95)),
        changes=tuple(PlannedChange(name=change.name, before=change.before, after=change.after) for change in counted),
        limits=tuple(
            PlannedLimit(budget=cap.budget, period=cap.period, before=cap.before, after=cap.after)
            for cap in cap_times(*events)
        ),
        alerts=tuple(
            PlannedAlert(key=alert.key, title=alert.title, before=alert.before, after=alert.after)
            for alert in alerts_of(*events)[:MAX_ALERTS]
        ),
        days=tuple(
            PlannedDay(
                day=name,
                spend=day.before,
                planned_spend=day.after,
                wasted=day.wasted_before,
                planned_wasted=day.wasted_after,
            )
            for name, day in sorted(effects.days.items())
        ),
        step_s=step_ms // 1_000,
        over_time=tuple(_over_time(effects, step_ms)),
        most_changed=tuple(
            PlannedJob(
                execution_id=job.execution_id,
                agent=job.agent,
                before=job.before,
                after=job.after,
                cost=job.cost_before,
                planned_cost=job.cost_after,
                url=None if console_url is None else f"{console_url}/executions/{quote(job.execution_id, safe='')}",
            )
            for job in effects.most_changed
        ),
        unknown=effects.unknown,
        left_out=effects.left_out,
        drawn=effects.drawn,
        taken_from_record=dict(findings.followed),
        races=findings.races.total(),
        notes=(*gaps, *_notes(effects, findings)),
    )


def _step_ms(effects: Effects) -> int:
    """Returns the length of the steps in which the time with jobs is shown, in milliseconds."""
    length_ms = max(effects.steps) - min(effects.steps) if effects.steps else 0
    return max(effects.step_ms, step_ms_of(length_ms, SHOWN_STEPS))


def _over_time(effects: Effects, step_ms: int) -> Iterator[PlannedStep]:
    steps: dict[int, StepFigures] = {}
    for start_ms, figures in sorted(effects.steps.items()):
        steps.setdefault(start_ms - start_ms % step_ms, StepFigures()).add(figures)
    for start_ms, figures in steps.items():
        yield PlannedStep(
            at=time_from_ms(start_ms),
            spend=figures.before,
            planned_spend=figures.after,
            refused=figures.refused_before,
            planned_refused=figures.refused_after,
        )


def figure_of(estimate: Estimate) -> PlannedFigure:
    """Returns an estimate for programs."""
    return PlannedFigure(before=estimate.before, after=estimate.after, low=estimate.low, high=estimate.high)


def spend_of(estimate: Estimate) -> PlannedSpend:
    """Returns an estimate of nano-dollars for programs."""
    return PlannedSpend(
        before=round(estimate.before),
        after=round(estimate.after),
        low=round(estimate.low),
        high=round(estimate.high),
    )


def _summary(effects: Effects, changes: list[CountedChange]) -> Iterator[str]:
    """Yields what matters most: the ends of jobs, spend, and breakers that open or else how long jobs take."""
    yield _ends_text(effects)
    yield _spend_text(effects.spend)
    openings = next(change for change in changes if change.name == OPENINGS)
    if openings.before != openings.after:
        yield f"{quantity(openings.after, 'breaker opening')} instead of {openings.before:,}"
        return
    p95 = effects.duration_ms(0.95)
    before, after = duration(p95.before), duration(p95.after)
    if before == after:
        yield f"95 % of jobs still end within {after}"
    else:
        yield f"95 % of jobs would have ended within {after}{_likely(p95, duration)} instead of {before}"


def _ends_text(effects: Effects) -> str:
    """Returns how many jobs would have been refused, or have ended otherwise."""
    jobs = quantity(effects.jobs, "job")
    more = effects.of_jobs(effects.newly_refused, "refused")
    fewer = effects.of_jobs(effects.refused_no_more, "answered")
    if effects.newly_refused:
        texts = [f"{_jobs_text(more)} more of {jobs} would have been refused"]
        if effects.refused_no_more:
            texts.append(f"{_jobs_text(fewer)} no longer")
    elif effects.refused_no_more:
        texts = [f"{_jobs_text(fewer)} fewer of {jobs} would have been refused"]
    else:
        refused = sum(step.refused_after for step in effects.steps.values())
        perhaps = f" (likely at most {more.high:,.0f} more)" if more.high else ""
        texts = [f"{refused:,} of {jobs} would have been refused, as recorded{perhaps}"]
    # Those that are refused have no answer; others are to be named.
    if effects.lost > effects.newly_refused:
        texts.append(f"{_jobs_text(effects.of_jobs(effects.lost, 'refused', 'failed'))} would have lost their answer")
    if effects.won > effects.refused_no_more:
        texts.append(f"{_jobs_text(effects.of_jobs(effects.won, 'answered'))} would have got one")
    if effects.unknown:
        texts.append(f"{effects.unknown:,} {'has' if effects.unknown == 1 else 'have'} an unknown end")
    return ", ".join(texts)


def _jobs_text(estimate: Estimate) -> str:
    return f"{estimate.after:,.0f}{_likely(estimate, lambda count: f'{count:,.0f}')}"


def _likely(estimate: Estimate, text: Callable[[float], str]) -> str:
    """Returns the interval of a figure in brackets; empty if it is so narrow that it says nothing."""
    interval = _interval(estimate, text)
    return interval and f" ({interval})"


def _interval(estimate: Estimate, text: Callable[[float], str]) -> str:
    if estimate.high - estimate.low <= NARROW * estimate.after:
        return ""
    return f"likely {text(estimate.low)} to {text(estimate.high)}"


def _spend_text(spend: Estimate) -> str:
    before, after = round(spend.before), round(spend.after)
    likely = _interval(spend, lambda nano: money(round(nano)))
    if before == after:
        return f"spend would have stayed at {money(before)}{likely and f' ({likely})'}"
    before_text, after_text = moneys(before, after)
    step = ", ".join(filter(None, (f"{before_text} → {after_text}", likely)))
    if not before:
        return f"spend grows ({step})"
    change = after / before - 1
    sign = "+" if change > 0 else "−"
    return f"spend {sign}{percent(abs(change))} ({step})"


def _notes(effects: Effects, findings: ReplayFindings) -> Iterator[str]:
    """Yields what history can't tell, in words."""
    if effects.drawn:
        yield (
            f"{quantity(effects.drawn, 'job')} would have made calls that were never made: their outcomes are drawn "
            "from calls of the same model at about that time, hence the intervals"
        )
    if effects.unknown:
        are = "is" if effects.unknown == 1 else "are"
        yield (
            f"{quantity(effects.unknown, 'job')} would have called a model without any record, or {are} of an agent "
            "that the changed config lacks: the end is unknown"
        )
    if effects.left_out:
        yield f"{quantity(effects.left_out, 'job')} left out, whose end history can't tell"
    if effects.unpriced:
        models = ", ".join(f"{model} {calls:,}" for model, calls in effects.unpriced.most_common(8))
        yield f"calls of unknown cost are not in the spend, as the model has no price or its usage is unknown: {models}"
    if effects.sizeless:
        yield (
            f"{quantity(effects.sizeless, 'refused call')} of an earlier version without what it would have reserved: "
            "whether it fits is not known, and it counts as fitting"
        )
    if effects.own_rules:
        yield (
            f"{quantity(effects.own_rules, 'job')} with breaker, guard or retry rules of their own, which the record "
            "does not have: what those decided is kept as recorded"
        )
    if findings.followed:
        reasons = ", ".join(f"{_in_words(name)} {count:,}" for name, count in findings.followed.most_common(8))
        total = quantity(findings.followed.total(), "decision")
        yield f"{total} kept as recorded, because a plan makes none of that kind: {reasons}"
    if races := findings.races.total():
        yield f"{quantity(races, 'decision')} kept as recorded, because the order of two events is not known"


def _in_words(name: str) -> str:
    """Returns the name of a class of errors, or of the wire contract, as people read it."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name.removesuffix("Error")).replace("_", " ").lower()
