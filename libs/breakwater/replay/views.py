"""Plans and suggestions in tables, for terminals, Markdown and pages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, get_args

from breakwater.config.edit import flow_text
from breakwater.jobs.contract.execution import Reason
from breakwater.kernel.columns import Column, humanize
from breakwater.kernel.formats import duration, moment, money, percent, quantity, sentence
from breakwater.replay.contract import (
    ConfigPlan,
    PlannedAlert,
    PlannedDay,
    PlannedFigure,
    PlannedJob,
    PlannedLimit,
    PlannedSpend,
    SuggestedExperiment,
    SuggestedSetting,
)

SHOWN_ALERTS = 10
"""The most incidents in a table for people."""

_REASONS: Collection[str] = get_args(Reason)


@dataclass(frozen=True, slots=True)
class PlanLine:
    """A figure of the report, as people read it."""

    name: str
    before: str
    after: str
    likely: str = ""


_LIKELY: Column[PlanLine] = Column("likely (95 %)", lambda line: line.likely, name="likely", align_right=True)
_LINES: Sequence[Column[PlanLine]] = (
    Column("figure", lambda line: line.name),
    Column("recorded", lambda line: line.before, align_right=True),
    Column("planned", lambda line: line.after, align_right=True),
    _LIKELY,
)
LIMITS: Sequence[Column[PlannedLimit]] = (
    Column("limit", lambda limit: limit.budget),
    Column("period", lambda limit: limit.period),
    Column("reached", lambda limit: _time(limit.before)),
    Column("planned", lambda limit: _time(limit.after)),
)
ALERTS: Sequence[Column[PlannedAlert]] = (
    Column("incident", lambda alert: alert.title),
    Column("opened", lambda alert: f"{alert.before:,}", align_right=True),
    Column("planned", lambda alert: f"{alert.after:,}", align_right=True),
)
DAYS: Sequence[Column[PlannedDay]] = (
    Column("day", lambda day: day.day),
    Column("spend", lambda day: day.spend, "usd"),
    Column("planned", lambda day: day.planned_spend, "usd"),
    Column("waste", lambda day: day.wasted, "usd"),
    Column("planned", lambda day: day.planned_wasted, "usd", name="planned_waste"),
)
JOBS: Sequence[Column[PlannedJob]] = (
    Column("job", lambda job: job.execution_id, "execution"),
    Column("agent", lambda job: job.agent, "agent"),
    Column("recorded", lambda job: _end(job.before)),
    Column("planned", lambda job: _end(job.after)),
    Column("cost", lambda job: job.cost, "usd"),
    Column("planned", lambda job: job.planned_cost, "usd", name="planned_cost"),
)
SUGGESTIONS: Sequence[Column[SuggestedSetting]] = (
    Column("setting", lambda suggestion: suggestion.setting),
    Column("now", lambda suggestion: flow_text(suggestion.before)),
    Column("better", lambda suggestion: flow_text(suggestion.after)),
    Column("gain per day (95 %)", lambda suggestion: _gain(suggestion), name="gain"),
    Column("answers per day", lambda suggestion: _from_to(suggestion.answered, _tenths), name="answers"),
    Column("spend per day", lambda suggestion: _from_to(suggestion.spend, _usd), name="spend"),
    Column("95 % of jobs within", lambda suggestion: _from_to(suggestion.duration_p95_ms, duration), name="p95"),
)
EXPERIMENTS: Sequence[Column[SuggestedExperiment]] = (
    Column("setting", lambda experiment: experiment.setting),
    Column("now", lambda experiment: flow_text(experiment.before)),
    Column("try", lambda experiment: flow_text(experiment.value)),
    Column("reason", lambda experiment: experiment.reason, below=True),
)

_LINKED_JOB: Column[PlannedJob] = Column(
    "job", lambda job: job.execution_id if job.url is None else f"[{job.execution_id}]({job.url})"
)


def changed_limits(report: ConfigPlan) -> list[PlannedLimit]:
    """Returns the limits that are reached at another time, only once, or no more."""
    return [limit for limit in report.limits if limit.before != limit.after]


def limits_title(report: ConfigPlan) -> str:
    """Returns what stands above these, with the number of the others."""
    unchanged = len(report.limits) - len(changed_limits(report))
    return "Limits that are reached" + (f": {unchanged:,} as recorded" if unchanged else "")


def headline(report: ConfigPlan) -> str:
    """Returns what would have happened, in one sentence."""
    return sentence("; ".join(report.summary))


def line_columns(lines: Sequence[PlanLine]) -> list[Column[PlanLine]]:
    """Returns the columns of figures; without their intervals if none has one."""
    has_intervals = any(line.likely for line in lines)
    return [column for column in _LINES if has_intervals or column is not _LIKELY]


def lines_of(report: ConfigPlan) -> list[PlanLine]:
    """Returns the figures of the report."""
    counts = (
        ("jobs newly refused", report.newly_refused),
        ("jobs refused no more", report.refused_no_more),
        ("jobs that lose their answer", report.lost),
        ("jobs that win an answer", report.won),
    )
    refused = (sum(step.refused for step in report.over_time), sum(step.planned_refused for step in report.over_time))
    return [
        PlanLine("jobs refused", *map(_number, refused)),
        *(PlanLine(name, "", _number(figure.after), _interval(figure, _number)) for name, figure in counts),
        PlanLine("jobs that another model answers", "", f"{report.changed_model:,}"),
        PlanLine("jobs that end sooner", "", f"{report.sooner:,}"),
        PlanLine(report.calls.name, f"{report.calls.before:,}", f"{report.calls.after:,}"),
        _line("spend", report.spend, _usd),
        _line("of it wasted", report.wasted, _usd),
        _line("duration, half of the jobs", report.duration_p50_ms, duration),
        _line("duration, 95 % of the jobs", report.duration_p95_ms, duration),
        *(PlanLine(change.name, f"{change.before:,}", f"{change.after:,}") for change in report.changes),
    ]


def _line(name: str, figure: PlannedFigure | PlannedSpend, text: Callable[[float], str]) -> PlanLine:
    return PlanLine(name, text(figure.before), text(figure.after), _interval(figure, text))


def _interval(figure: PlannedFigure | PlannedSpend, text: Callable[[float], str]) -> str:
    if figure.low == figure.high == figure.after:
        return ""
    return f"{text(figure.low)} to {text(figure.high)}"


def _usd(nano: float) -> str:
    return money(round(nano))


def _gain(suggestion: SuggestedSetting) -> str:
    """Returns what a suggestion gains on a mean day, with its interval."""
    figures: Mapping[str, tuple[PlannedFigure | PlannedSpend, Callable[[float], str], str]] = {
        "answers": (suggestion.answered, _tenths, "more answers"),
        "spend": (suggestion.spend, _usd, "less"),
        "time": (suggestion.duration_p95_ms, duration, "less"),
    }
    figure, text, words = figures[suggestion.merit]
    gains = sorted(abs(after - figure.before) for after in (figure.low, figure.high))
    interval = " to ".join(text(gain) for gain in gains)
    return f"{text(abs(figure.after - figure.before))} {words}" + (f" ({interval})" if gains[0] < gains[1] else "")


def _from_to(figure: PlannedFigure | PlannedSpend, text: Callable[[float], str]) -> str:
    return f"{text(figure.before)} → {text(figure.after)}"


def _tenths(count: float) -> str:
    return f"{count:,.1f}".removesuffix(".0")


def _number(count: float) -> str:
    return f"{count:,.0f}"


def _end(end: str) -> str:
    return humanize(end) if end in _REASONS else end


def _time(at: datetime | None) -> str:
    return "no" if at is None else moment(at)


def markdown_of(report: ConfigPlan) -> str:
    """Returns the report as Markdown, for a pull request."""
    jobs = quantity(report.jobs, "recorded job")
    lines = lines_of(report)
    parts = [
        f"**{headline(report)}**",
        f"{jobs} from {moment(report.since)} to {moment(report.until)}, replayed under the changed config:",
        _markdown(line_columns(lines), lines),
    ]
    if limits := changed_limits(report):
        parts += [limits_title(report), _markdown(LIMITS, limits)]
    if report.alerts:
        parts.append(_markdown(ALERTS, report.alerts[:SHOWN_ALERTS]))
    if report.most_changed:
        jobs_table = _markdown([_LINKED_JOB, *JOBS[1:]], report.most_changed)
        parts.append(f"<details><summary>Jobs that change most</summary>\n\n{jobs_table}\n\n</details>")
    parts += [f"- {_cell(text)}" for text in report.notes]
    return "\n\n".join(parts)


def _markdown(columns: Sequence[Column[Any]], rows: Sequence[Any]) -> str:
    titles = [column.title for column in columns]
    rules = ["---:" if column.is_right_aligned else "---" for column in columns]
    cells = [[_cell(str(column.cell(row))) for column in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [titles, rules, *cells])


def _cell(text: str) -> str:
    """Returns a text that neither ends a cell of a table nor begins a tag."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def excesses_of(report: ConfigPlan, max_newly_refused: int | None, increase: float | None) -> list[str]:
    """Returns by what a report exceeds the limits of a pipeline, in words.

    If history can't tell the ends of some jobs, the upper ends of the intervals count, which contain them.
    """
    spend = report.spend
    spent = spend.high if report.unknown else spend.after
    newly_refused = round(report.newly_refused.high if report.unknown else report.newly_refused.after)
    at_most = "up to " if report.unknown else ""
    texts: list[str] = []
    if max_newly_refused is not None and newly_refused > max_newly_refused:
        refused = quantity(newly_refused, "job")
        texts.append(f"{at_most}{refused} newly refused, more than --max-newly-refused {max_newly_refused}")
    if increase is not None and spent > spend.before * (1 + increase):
        more = percent(spent / spend.before - 1) if spend.before else "all of it"
        texts.append(f"spend grows by {at_most}{more}, more than --max-spend-increase {percent(increase)}")
    return texts
