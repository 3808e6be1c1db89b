"""`breakwater plan`: shows what a changed config would have done with recorded jobs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from breakwater.client.commands import Api, api_command
from breakwater.config import Config, load_config
from breakwater.kernel.commands import connect, formats, output
from breakwater.kernel.commands.errors import ExitCode, usage_error
from breakwater.kernel.commands.output import Column
from breakwater.kernel.formats import duration, moment, money, percent, quantity
from breakwater.local.plane import config_to_edit
from breakwater.records.commands.record_source import CLICKHOUSE_VARIABLE
from breakwater.replay.policy import policy_of
from breakwater.replay.records import replay_records
from breakwater.replay.rules.effects import CapReached, ChangedJob, Effects, Estimate, cap_times, changes_of
from breakwater.replay.rules.engine import ReplayFindings
from breakwater.replay.rules.history import Changes

MAX_SILENCE_S = 120.0
"""The longest wait in seconds for the next rows of ClickHouse."""

_INCREASE = re.compile(r"(\d+(?:\.\d+)?)\s*%?")


@dataclass(frozen=True, slots=True)
class _Line:
    """A figure of the report, as people read it."""

    name: str
    before: str
    after: str
    likely: str = ""


_LINES: Sequence[Column[_Line]] = (
    Column("", lambda line: line.name),
    Column("recorded", lambda line: line.before),
    Column("planned", lambda line: line.after),
    Column("95 %", lambda line: line.likely),
)
_CAPS: Sequence[Column[CapReached]] = (
    Column("limit", lambda cap: cap.budget),
    Column("period", lambda cap: cap.period),
    Column("reached", lambda cap: _time(cap.before)),
    Column("planned", lambda cap: _time(cap.after)),
)
_DAYS: Sequence[Column[tuple[str, str, str, str, str]]] = (
    Column("day", lambda day: day[0]),
    Column("spend", lambda day: day[1]),
    Column("planned", lambda day: day[2]),
    Column("waste", lambda day: day[3]),
    Column("planned", lambda day: day[4], name="planned_waste"),
)
_JOBS: Sequence[Column[ChangedJob]] = (
    Column("job", lambda job: job.execution_id),
    Column("agent", lambda job: job.agent),
    Column("recorded", lambda job: job.before),
    Column("planned", lambda job: job.after),
    Column("cost", lambda job: money(job.cost_before)),
    Column("planned", lambda job: money(job.cost_after), name="planned_cost"),
)


@dataclass(frozen=True, slots=True)
class PlanReport:
    """All that a replay says of a config.

    Attributes:
        effects: the effects on the jobs.
        findings: what the replay found.
        changes: what happened.
    """

    effects: Effects
    findings: ReplayFindings
    changes: Changes


@api_command
def plan(
    api: Api,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The changed config.")],
    since: Annotated[str, typer.Option("--since", metavar="AGO", help="Jobs since: 12h, 30d, or a time.")] = "30d",
    until: Annotated[
        str | None, typer.Option("--until", metavar="AGO", help="And before: 1d, or a time.", show_default="now")
    ] = None,
    agent: Annotated[str | None, typer.Option("--agent", help="Report on the jobs of one agent.")] = None,
    before: Annotated[
        Path | None,
        typer.Option("--before", metavar="FILE", help="The config that the jobs ran under. [default: the plane's]"),
    ] = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown, for a pull request.")] = False,
    max_newly_refused: Annotated[
        int | None,
        typer.Option("--max-newly-refused", metavar="N", min=0, help="Exit with 1 if more jobs are newly refused."),
    ] = None,
    max_spend_increase: Annotated[
        str | None,
        typer.Option("--max-spend-increase", metavar="PERCENT", help="Exit with 1 if spend grows by more: 5%."),
    ] = None,
) -> None:
    """Replay recorded jobs under a changed config, and show what it would have refused, called and cost.

    Breakers, retries, chains, time limits, guards and limits on spend decide as they would have. A call that was never
    made takes its outcome from calls of its model at about that time, so such figures have an interval. Rate limits,
    holds and repairs stay as they were. Reads ClickHouse.

    For example:

        breakwater plan new.yaml

        breakwater plan new.yaml --since 7d --agent content-writer

        breakwater plan new.yaml --markdown --max-newly-refused 0 --max-spend-increase 5%
    """
    increase = None if max_spend_increase is None else _share(max_spend_increase)
    if as_markdown and api.as_json:
        raise usage_error("--markdown and --json exclude each other", "Use only one of them.")
    api.plane.require_server(CLICKHOUSE_VARIABLE, "replay jobs", api.url, api.api_key)
    now = datetime.now(UTC)
    begin = formats.since(since, now)
    end = now if until is None else formats.since(until, now, "--until")
    if begin >= end:
        raise usage_error(f"--since {since} must be before --until", "--since is the earlier time.")
    config = load_config(file)
    was = load_config(before or api.plane.running_config or config_to_edit(None))
    if agent is not None and agent not in {*config.agents, *was.agents}:
        raise usage_error(f"neither config has an agent {agent!r}")
    report = connect.run(_replay(api.plane.clickhouse_url, config, was, begin, end, agent), waiting="replaying jobs")
    if api.as_json:
        output.json_document(document_of(report, begin, end))
    elif as_markdown:
        output.write(markdown_of(report))
    else:
        _show(report, begin, end)
    exceeded = _excess(report.effects, max_newly_refused, increase)
    for text in exceeded:
        output.note(text, "red")
    if exceeded:
        raise typer.Exit(ExitCode.FAILED)


async def _replay(
    url: str, config: Config, was: Config, since: datetime, until: datetime, agent: str | None
) -> PlanReport:
    effects = Effects(config.budgets.zone, agent)
    async with connect.analytics(url, answer_timeout_s=MAX_SILENCE_S) as analytics:
        policies = policy_of(config), policy_of(was)
        findings, changes = await replay_records(analytics, *policies, since, until, on_end=effects.add)
    return PlanReport(effects, findings, changes)


def _share(text: str) -> float:
    match = _INCREASE.fullmatch(text.strip())
    if match is None:
        raise usage_error(f"--max-spend-increase {text!r} is no percentage", "Write it like 5%.")
    return float(match[1]) / 100


def _excess(effects: Effects, max_newly_refused: int | None, increase: float | None) -> list[str]:
    """Returns which of the limits of the command's options the effects exceed, in words."""
    spend = effects.spend
    texts: list[str] = []
    if max_newly_refused is not None and effects.newly_refused > max_newly_refused:
        refused = quantity(effects.newly_refused, "job")
        texts.append(f"{refused} newly refused, more than --max-newly-refused {max_newly_refused}")
    if increase is not None and spend.after > spend.before * (1 + increase):
        more = percent(spend.after / spend.before - 1) if spend.before else "all of it"
        texts.append(f"spend grows by {more}, more than --max-spend-increase {percent(increase)}")
    return texts


def _lines(report: PlanReport) -> list[_Line]:
    effects = report.effects
    counts = (
        ("jobs newly refused", effects.newly_refused, "refused"),
        ("jobs refused no more", effects.refused_no_more, "answered"),
        ("jobs that lose their answer", effects.lost, "refused"),
        ("jobs that win an answer", effects.won, "answered"),
    )
    lines = [_count_line(name, effects.of_jobs(number, end)) for name, number, end in counts]
    lines += [
        _Line("jobs that another model answers", "", f"{effects.changed_model:,}"),
        _Line("jobs that end sooner", "", f"{effects.sooner:,}"),
        _Line("calls of models", *(f"{calls:,}" for calls in effects.calls)),
        _estimate_line("spend", effects.spend, _usd),
        _estimate_line("of it wasted", effects.waste, _usd),
        _estimate_line("duration, half of the jobs", effects.duration_ms(0.5), duration),
        _estimate_line("duration, 95 % of the jobs", effects.duration_ms(0.95), duration),
    ]
    counted = changes_of(report.changes, report.findings, effects.agent)
    return [*lines, *(_Line(change.name, f"{change.before:,}", f"{change.after:,}") for change in counted)]


def _count_line(name: str, estimate: Estimate) -> _Line:
    return _Line(name, "", f"{estimate.after:,.0f}", _interval(estimate, _number))


def _estimate_line(name: str, estimate: Estimate, text: Callable[[float], str]) -> _Line:
    return _Line(name, text(estimate.before), text(estimate.after), _interval(estimate, text))


def _interval(estimate: Estimate, text: Callable[[float], str]) -> str:
    if estimate.low == estimate.high == estimate.after:
        return ""
    return f"{text(estimate.low)} to {text(estimate.high)}"


def _usd(nano: float) -> str:
    return money(round(nano))


def _number(count: float) -> str:
    return f"{count:,.0f}"


def _time(at: datetime | None) -> str:
    return "no" if at is None else moment(at)


def _days(effects: Effects) -> list[tuple[str, str, str, str, str]]:
    return [
        (name, money(day.before), money(day.after), money(day.wasted_before), money(day.wasted_after))
        for name, day in sorted(effects.days.items())
    ]


def _notes(report: PlanReport) -> list[str]:
    """Returns what history can't tell, in words."""
    effects = report.effects
    notes: list[str] = []
    if effects.drawn:
        notes.append(f"{quantity(effects.drawn, 'job')} with calls that were never made: their outcomes are drawn")
    if effects.unknown:
        notes.append(f"{quantity(effects.unknown, 'job')} would call a model without any record: their end is unknown")
    followed = report.findings.followed
    if followed:
        reasons = ", ".join(f"{name} {count:,}" for name, count in followed.most_common(8))
        notes.append(f"taken from the record, as no rule here decides it: {reasons}")
    races = report.findings.races.total()
    if races:
        notes.append(f"{quantity(races, 'decision')} taken from the record, as the order of two events is not known")
    return notes


def _show(report: PlanReport, since: datetime, until: datetime) -> None:
    effects = report.effects
    output.print_styled(f"{quantity(effects.jobs, 'job')} from {moment(since)} to {moment(until)}")
    if not effects.jobs:
        output.note("nothing is recorded in this time, or retention has deleted it")
        return
    output.table(_LINES, _lines(report))
    if caps := cap_times(report.changes, report.findings):
        output.print_styled("\nLimits that are reached")
        output.table(_CAPS, caps)
    output.print_styled("\nSpend by day")
    output.table(_DAYS, _days(effects))
    if effects.most_changed:
        output.print_styled("\nJobs that change most; `breakwater executions ID` shows one")
        output.table(_JOBS, effects.most_changed)
    for text in _notes(report):
        output.note(text)


def markdown_of(report: PlanReport) -> str:
    """Returns the report as Markdown."""
    effects = report.effects
    parts = [
        f"**{quantity(effects.jobs, 'recorded job')} under the changed config**",
        _markdown(_LINES, _lines(report)),
    ]
    if caps := cap_times(report.changes, report.findings):
        parts.append(_markdown(_CAPS, caps))
    if effects.most_changed:
        parts.append(
            "<details><summary>Jobs that change most</summary>\n\n"
            f"{_markdown(_JOBS, effects.most_changed)}\n\n</details>"
        )
    parts += [f"- {text}" for text in _notes(report)]
    return "\n\n".join(parts)


def _markdown(columns: Sequence[Column[Any]], rows: Sequence[Any]) -> str:
    titles = [column.title for column in columns]
    cells = [[_cell(str(column.value(row))) for column in columns if column.value is not None] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [titles, ["---"] * len(columns), *cells])


def _cell(text: str) -> str:
    """Returns a text that neither ends a cell nor begins a tag."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def document_of(report: PlanReport, since: datetime, until: datetime) -> dict[str, Any]:
    """Returns the report for programs. Money is in USD, exactly."""
    effects = report.effects

    def amounts(estimate: Estimate) -> dict[str, str | None]:
        figures = (
            ("before", estimate.before),
            ("after", estimate.after),
            ("low", estimate.low),
            ("high", estimate.high),
        )
        return {name: formats.exact(round(figure)) for name, figure in figures}

    def figures(estimate: Estimate) -> dict[str, float]:
        return {"before": estimate.before, "after": estimate.after, "low": estimate.low, "high": estimate.high}

    return {
        "since": since,
        "until": until,
        "agent": effects.agent,
        "jobs": effects.jobs,
        "unknown": effects.unknown,
        "drawn": effects.drawn,
        "newly_refused": figures(effects.of_jobs(effects.newly_refused, "refused")),
        "refused_no_more": figures(effects.of_jobs(effects.refused_no_more, "answered")),
        "lost": figures(effects.of_jobs(effects.lost, "refused")),
        "won": figures(effects.of_jobs(effects.won, "answered")),
        "changed_model": effects.changed_model,
        "sooner": effects.sooner,
        "calls": {"before": effects.calls[0], "after": effects.calls[1]},
        "spend": amounts(effects.spend),
        "wasted": amounts(effects.waste),
        "duration_p50_ms": figures(effects.duration_ms(0.5)),
        "duration_p95_ms": figures(effects.duration_ms(0.95)),
        "changes": changes_of(report.changes, report.findings, effects.agent),
        "limits": cap_times(report.changes, report.findings),
        "days": [
            {
                "day": name,
                "spend": {"before": formats.exact(day.before), "after": formats.exact(day.after)},
                "wasted": {"before": formats.exact(day.wasted_before), "after": formats.exact(day.wasted_after)},
            }
            for name, day in sorted(effects.days.items())
        ],
        "most_changed": [
            {
                "execution_id": job.execution_id,
                "agent": job.agent,
                "before": job.before,
                "after": job.after,
                "cost_before": formats.exact(job.cost_before),
                "cost_after": formats.exact(job.cost_after),
            }
            for job in effects.most_changed
        ],
        "taken_from_record": dict(report.findings.followed),
        "races": report.findings.races.total(),
    }
