"""`breakwater plan` and `suggest`: what a changed config would have done with recorded jobs, and which is better."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from breakwater.client.commands import Api, api_command
from breakwater.config import Config, load_config
from breakwater.kernel.commands import connect, formats, output
from breakwater.kernel.commands.errors import ExitCode, usage_error
from breakwater.kernel.formats import hint, moment, quantity
from breakwater.local.plane import CLICKHOUSE_VARIABLE, config_to_edit
from breakwater.replay.contract import ConfigPlan, ConfigSuggestions
from breakwater.replay.plan import MAX_SILENCE_S, plan_config
from breakwater.replay.rules.renames import renames_of
from breakwater.replay.suggest import suggest_settings
from breakwater.replay.views import (
    ALERTS,
    DAYS,
    EXPERIMENTS,
    JOBS,
    LIMITS,
    SHOWN_ALERTS,
    SUGGESTIONS,
    changed_limits,
    excesses_of,
    headline,
    limits_title,
    line_columns,
    lines_of,
    markdown_of,
)

_INCREASE = re.compile(r"(\d+(?:\.\d+)?)\s*%?")

_Since = Annotated[str, typer.Option("--since", metavar="AGO", help="Jobs since: 12h, 30d, or a time.")]
_Until = Annotated[
    str | None, typer.Option("--until", metavar="AGO", help="Jobs before: 1d, or a time.", show_default="now")
]


class UnknownJobs(StrEnum):
    """The place in the report of jobs whose end history can't tell."""

    COUNT = "count"
    EXCLUDE = "exclude"


@api_command
def plan(
    api: Api,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The changed config.")],
    since: _Since = "30d",
    until: _Until = None,
    agent: Annotated[str | None, typer.Option("--agent", help="Report on the jobs of one agent.")] = None,
    before: Annotated[
        Path | None,
        typer.Option("--before", metavar="FILE", help="The config that the jobs ran under. [default: the plane's]"),
    ] = None,
    renames: Annotated[
        list[str] | None,
        typer.Option("--rename", metavar="OLD=NEW", help="An agent of the record that FILE has under a new name."),
    ] = None,
    unknown: Annotated[
        UnknownJobs, typer.Option("--unknown", help="Jobs whose end history can't tell: count them, or exclude them.")
    ] = UnknownJobs.COUNT,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown, for a pull request.")] = False,
    max_newly_refused: Annotated[
        int | None,
        typer.Option("--max-newly-refused", metavar="N", min=0, help="Exit with 1 if more jobs may be newly refused."),
    ] = None,
    max_spend_increase: Annotated[
        str | None,
        typer.Option("--max-spend-increase", metavar="PERCENT", help="Exit with 1 if spend may grow by more: 5%."),
    ] = None,
) -> None:
    """Replay recorded jobs under a changed config, and show what it would have refused, called and cost.

    Breakers, retries, chains, time limits, guards and limits on spend decide as they would have. A call that was never
    made takes its outcome from calls of its model at about that time, so such figures have an interval. Rate limits,
    holds and repairs stay as they were. Reads ClickHouse.

    What history can't tell is counted and named below the tables: jobs whose end is unknown, calls without a price, and
    time that retention has cut.

    For example:

        breakwater plan new.yaml

        breakwater plan new.yaml --since 7d --agent content-writer

        breakwater plan new.yaml --rename writer=author --unknown exclude

        breakwater plan new.yaml --markdown --max-newly-refused 0 --max-spend-increase 5%
    """
    increase = None if max_spend_increase is None else _share(max_spend_increase)
    if as_markdown and api.as_json:
        raise usage_error("--markdown and --json exclude each other", "Use only one of them.")
    api.plane.require_server(CLICKHOUSE_VARIABLE, "replay jobs", api.url, api.api_key)
    begin, end = _times(since, until)
    config = load_config(file)
    was = load_config(before or api.plane.running_config or config_to_edit(None))
    new_names = _renames(renames or [], config, was)
    if agent is not None and agent not in {*config.agents, *was.agents}:
        raise usage_error(f"neither config has an agent {agent!r}{hint(agent, {*config.agents, *was.agents})}")
    planning = _plan(
        *(api.plane.clickhouse_url, config, was, begin, end, agent),
        renames=new_names,
        leaves_out_unknown=unknown is UnknownJobs.EXCLUDE,
        console_url=api.plane.console_url,
    )
    report = connect.run(planning, waiting="replaying jobs")
    if api.as_json:
        output.json_document(report.model_dump(mode="json"))
    elif as_markdown:
        output.write(markdown_of(report))
    elif report.jobs:
        _show(report)
    else:
        output.print_styled(f"no job from {moment(begin)} to {moment(end)}")
        for text in report.notes:
            output.note(text)
    exceeded = excesses_of(report, max_newly_refused, increase)
    for text in exceeded:
        output.note(text, "red")
    if exceeded:
        raise typer.Exit(ExitCode.FAILED)


@api_command
def suggest(
    api: Api,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="The config that the jobs ran under.", show_default="the plane's"),
    ] = None,
    since: _Since = "30d",
    until: _Until = None,
    agent: Annotated[str | None, typer.Option("--agent", help="Try the settings of one agent.")] = None,
    time_limit_s: Annotated[
        float, typer.Option("--time-limit", metavar="SECONDS", min=1, help="Time limit of the search in seconds.")
    ] = 120,
) -> None:
    """Search the record for settings that would have served better, and print them as a patch of the config.

    Replays recorded jobs with other thresholds and cool-downs of breakers, attempts, delays, time limits, guards,
    orders of fallbacks and hard limits. A value is chosen on every second day, and suggested only if the other days
    agree: more answers at the same price, or the same answers for less money or in less time. For limits that were set
    by API it prints commands. Changes nothing. Reads ClickHouse.

    For example:

        breakwater suggest

        breakwater suggest --since 90d --agent content-writer

        breakwater suggest breakwater.yaml | patch breakwater.yaml
    """
    api.plane.require_server(CLICKHOUSE_VARIABLE, "replay jobs", api.url, api.api_key)
    begin, end = _times(since, until)
    path = file or api.plane.running_config or config_to_edit(None)
    config = load_config(path)
    if agent is not None and agent not in config.agents:
        raise usage_error(f"the config has no agent {agent!r}{hint(agent, config.agents)}")
    report = connect.run(_suggest(api.plane.clickhouse_url, config, path, begin, end, agent, time_limit_s))
    if api.as_json:
        output.json_document(report.model_dump(mode="json"))
    elif report.jobs:
        _show_suggestions(report)
    else:
        output.print_styled(f"no job from {moment(begin)} to {moment(end)}")
        for text in report.notes:
            output.note(text)


async def _suggest(
    url: str, config: Config, path: Path, since: datetime, until: datetime, agent: str | None, time_limit_s: float
) -> ConfigSuggestions:
    state = ""

    def on_progress(task: str, share: float) -> None:
        nonlocal state
        state = f"{'━' * round(24 * share):╌<24} {task}"

    async with (
        connect.analytics(url, answer_timeout_s=MAX_SILENCE_S) as analytics,
        connect.progress(lambda: state, lines_every_s=None),
    ):
        return await suggest_settings(
            analytics,
            config,
            str(path),
            since,
            until,
            agent=agent,
            time_limit_s=time_limit_s,
            on_progress=on_progress,
        )


def _show_suggestions(report: ConfigSuggestions) -> None:
    count = len(report.suggestions)
    output.print_styled((f"{quantity(count, 'setting') if count else 'No setting'} would have served better", "bold"))
    output.print_styled(f"{quantity(report.jobs, 'job')} from {moment(report.since)} to {moment(report.until)}")
    if report.suggestions:
        output.table(SUGGESTIONS, report.suggestions)
    if report.experiments:
        output.print_styled("\nWorth a try; history can't tell what it would do")
        output.table(EXPERIMENTS, report.experiments)
    for text in report.notes:
        output.note(text)
    if commands := [suggestion.command for suggestion in report.suggestions if suggestion.command is not None]:
        output.print_styled("\nTo set what is not in the config")
        for command in commands:
            output.write(command)
    if report.patch:
        output.write(f"\n{report.patch}", end="")


async def _plan(
    url: str, config: Config, was: Config, since: datetime, until: datetime, agent: str | None, **options: Any
) -> ConfigPlan:
    async with connect.analytics(url, answer_timeout_s=MAX_SILENCE_S) as analytics:
        return await plan_config(analytics, config, was, since, until, agent, **options)


def _renames(texts: Sequence[str], config: Config, was: Config) -> dict[str, str]:
    """Returns the new names of agents by their old ones. Raises CliError: a config has no such agent."""
    try:
        names = renames_of(texts)
    except ValueError as error:
        raise usage_error(f"--rename {error}", "Write it like old=new.") from error
    for old, new in names.items():
        if old not in was.agents:
            raise usage_error(f"--rename: the recorded config has no agent {old!r}{hint(old, was.agents)}")
        if new not in config.agents:
            raise usage_error(f"--rename: the changed config has no agent {new!r}{hint(new, config.agents)}")
    return names


def _times(since: str, until: str | None) -> tuple[datetime, datetime]:
    """Returns the beginning and the end of a stretch of time. Raises CliError if it is none."""
    now = datetime.now(UTC)
    begin = formats.since(since, now)
    end = now if until is None else formats.since(until, now, "--until")
    if begin >= end:
        raise usage_error(f"--since {since} must be before --until", "--since is the earlier time.")
    return begin, end


def _share(text: str) -> float:
    match = _INCREASE.fullmatch(text.strip())
    if match is None:
        raise usage_error(f"--max-spend-increase {text!r} is no percentage", "Write it like 5%.")
    return float(match[1]) / 100


def _show(report: ConfigPlan) -> None:
    output.print_styled((headline(report), "bold"))
    output.print_styled(f"{quantity(report.jobs, 'job')} from {moment(report.since)} to {moment(report.until)}")
    lines = lines_of(report)
    output.table(line_columns(lines), lines)
    if report.limits:
        output.print_styled(f"\n{limits_title(report)}")
    if limits := changed_limits(report):
        output.table(LIMITS, limits)
    if report.alerts:
        output.print_styled("\nAlerts added and removed")
        output.table(ALERTS, report.alerts[:SHOWN_ALERTS])
    output.print_styled("\nSpend by day")
    output.table(DAYS, report.days)
    if report.most_changed:
        output.print_styled("\nJobs that change most; `breakwater executions ID` shows one")
        output.table(JOBS, report.most_changed)
    for text in report.notes:
        output.note(text)
