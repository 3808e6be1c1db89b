"""Suggests settings of a config from the record of its jobs, and writes them as a patch of its file."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from difflib import unified_diff
from io import StringIO
from itertools import chain
from time import monotonic

from breakwater.config import Config, parse_config
from breakwater.config.edit import with_settings
from breakwater.config.pricing import deployment_pricing
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.errors import ConfigError
from breakwater.kernel.formats import quantity
from breakwater.limits.contract import LimitSettings
from breakwater.limits.rules.limit import default_id
from breakwater.replay.contract import ConfigSuggestions, SuggestedExperiment, SuggestedSetting
from breakwater.replay.coverage import coverage
from breakwater.replay.policy import policy_of
from breakwater.replay.records import uncollected
from breakwater.replay.rules.grid import SettingValue
from breakwater.replay.rules.history import Policy
from breakwater.replay.rules.report import figure_of, spend_of
from breakwater.replay.rules.suggest import LEAST_DAYS, Search, Suggestions
from breakwater.replay.sample import Sample, read_sample

TYPICAL_TOKENS = 500
"""The input, and the output, of the call by which models are compared that have no record."""


async def suggest_settings(
    analytics: Analytics,
    config: Config,
    file_name: str,
    since: datetime,
    until: datetime,
    *,
    agent: str | None,
    time_limit_s: float,
    on_progress: Callable[[str, float], None] = lambda _, __: None,
) -> ConfigSuggestions:
    """Suggests settings from the jobs that were started in a stretch of time.

    Args:
        analytics: the record.
        config: the config that the jobs ran under.
        file_name: the name of its file, as the patch has it.
        since: the beginning.
        until: the end.
        agent: the only agent whose settings are tried; None for all.
        time_limit_s: the time in seconds after which no further value is tried.
        on_progress: is called with what is done and with the share that is, perhaps in another thread.

    Raises:
        QueryError, AnalyticsUnavailableError: as `Analytics.query`.
    """
    ends_at = monotonic() + time_limit_s
    is_wanted = True
    policy = policy_of(config)
    covered = await coverage(analytics, since, until, datetime.now(UTC))
    since = covered.since
    sample = await read_sample(analytics, policy, since, until, lambda share: on_progress("reading the record", share))

    def policy_with(values: Mapping[tuple[str, ...], SettingValue]) -> Policy | None:
        try:
            return policy_of(parse_config(with_settings(config.text, values)))
        except ConfigError:
            return None

    def goes_on() -> bool:
        result = search.result
        on_progress("trying settings", result.replays / max(1, result.most_replays))
        return is_wanted and monotonic() < ends_at

    search = Search(
        sample.days,
        policy,
        policy_with,
        agent=agent,
        prices=prices_of(config),
        has_whole_days=sample.has_whole_days,
        goes_on=goes_on,
    )
    with uncollected():
        try:
            result = await asyncio.to_thread(search.run)
        finally:
            is_wanted = False  # the thread of a command that was interrupted ends after its replay
    notes = (*covered.gaps, *_notes(result, sample, time_limit_s))
    return _report(result, sample, config, file_name, since, until, agent, notes)


def prices_of(config: Config) -> dict[str, int]:
    """Returns what a thousand tokens, half of them output, cost of each model that has a price, in nano-dollars."""
    prices: dict[str, int] = {}
    for agent in config.agents.values():
        for model in agent.chain:
            for deployment in config.deployments(agent, model)[:1]:
                pricing = deployment_pricing(config, deployment)
                price = None if pricing is None else pricing.worst_case(TYPICAL_TOKENS, TYPICAL_TOKENS)
                if price is not None:
                    prices[model] = price
    return prices


def _report(
    result: Suggestions,
    sample: Sample,
    config: Config,
    file_name: str,
    since: datetime,
    until: datetime,
    agent: str | None,
    notes: tuple[str, ...],
) -> ConfigSuggestions:
    of_config = (suggestion for suggestion in result.suggestions if not suggestion.setting.is_of_plane)
    values = {suggestion.setting.path: suggestion.value for suggestion in of_config}
    events = chain.from_iterable(part.changes.limits for part in sample.days)
    limits = {event.limit_id: event.after for event in events if event.raised is None}
    commands = {
        name: command_for(name, limit, suggestion.value)
        for suggestion in result.suggestions
        if suggestion.setting.is_of_plane and (limit := limits.get(name := suggestion.setting.name)) is not None
    }
    return ConfigSuggestions(
        since=since,
        until=until,
        agent=agent,
        jobs=sample.jobs,
        recorded_jobs=sample.recorded_jobs,
        suggestions=tuple(
            SuggestedSetting(
                setting=suggestion.setting.name,
                agent=suggestion.setting.agent,
                before=suggestion.setting.value,
                after=suggestion.value,
                merit=suggestion.merit,
                days=suggestion.effect.days,
                jobs=suggestion.effect.jobs,
                answered=figure_of(suggestion.effect.answered),
                spend=spend_of(suggestion.effect.spend),
                duration_p95_ms=figure_of(suggestion.effect.p95_ms),
                command=commands.get(suggestion.setting.name) if suggestion.setting.is_of_plane else None,
            )
            for suggestion in result.suggestions
        ),
        experiments=tuple(
            SuggestedExperiment(
                setting=experiment.setting.name,
                agent=experiment.setting.agent,
                before=experiment.setting.value,
                value=experiment.value,
                reason=experiment.reason,
            )
            for experiment in result.experiments
        ),
        replays=result.replays,
        is_complete=result.is_complete,
        notes=notes,
        patch=patch_of(config.text, with_settings(config.text, values), file_name),
    )


def command_for(limit_id: str, limit: LimitSettings, value: SettingValue) -> str:
    """Returns the command that sets the amount of a limit which is not in the config, and nothing else of it."""
    amount = Decimal(str(value))
    words = ["breakwater", "limits", "set", limit.scope, f"--{limit.unit}", f"{amount:f}", "--per", f"{limit.per}"]
    if limit.action != "refuse":
        words += ["--action", limit.action]
    if limit.thresholds != LimitSettings.model_fields["thresholds"].default:
        words += chain.from_iterable(("--threshold", str(percent)) for percent in limit.thresholds)
    if limit_id != default_id(limit.scope, limit.unit, limit.per):
        words += ["--id", limit_id]
    return shlex.join(words)


def _notes(result: Suggestions, sample: Sample, time_limit_s: float) -> list[str]:
    notes: list[str] = []
    if sample.jobs < sample.recorded_jobs:
        read = f"a sample of {sample.jobs:,} of {quantity(sample.recorded_jobs, 'job')} was replayed"
        if not sample.has_whole_days:
            notes.append(f"{read}, a part of each day: limits were not tried")
        elif len(sample.days) > 1:
            notes.append(f"{read}: limits of weeks, months and quarters were not tried")
    for name, days in sorted(result.few_days.items()):
        notes.append(f"{name} has jobs on {quantity(days, 'day')}; suggestions need {LEAST_DAYS}")
    if not result.is_complete:
        tried = f"{result.replays} of {result.most_replays} replays"
        notes.append(f"stopped after {time_limit_s:g} s and {tried}; --time-limit tries more, the dearest agents first")
    return notes


def patch_of(before: str, after: str, file_name: str) -> str:
    """Returns the changes of a text as a unified diff; empty if there are none."""
    # Lines as `patch` has them: `splitlines` would also end one at other separators, such as U+2028.
    lines = unified_diff(list(StringIO(before)), list(StringIO(after)), file_name, file_name)
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
