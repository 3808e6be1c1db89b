"""Replays recorded jobs under a changed config, and reports what it would have done."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from breakwater.config import Config
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.replay.contract import ConfigPlan
from breakwater.replay.coverage import coverage
from breakwater.replay.policy import policy_of
from breakwater.replay.records import replay_records
from breakwater.replay.rules.effects import Effects, step_ms_of
from breakwater.replay.rules.engine import ReplayedJob
from breakwater.replay.rules.renames import Renames, policy_with
from breakwater.replay.rules.report import report_of

MAX_SILENCE_S = 120.0
"""The longest wait in seconds for the next rows of ClickHouse."""


async def plan_config(
    analytics: Analytics,
    config: Config,
    before: Config,
    since: datetime,
    until: datetime,
    agent: str | None = None,
    on_end: Callable[[ReplayedJob], None] = lambda _: None,
    *,
    renames: Renames | None = None,
    leaves_out_unknown: bool = False,
    console_url: str | None = None,
) -> ConfigPlan:
    """Replays the jobs that were started in a stretch of time.

    Args:
        analytics: the record.
        config: the changed config.
        before: the config that the jobs ran under.
        since: the beginning.
        until: the end.
        agent: the only agent whose jobs are reported on, by its old or new name; None for all.
        on_end: is called with each job that has been replayed, perhaps in another thread.
        renames: the names of agents in the changed config, by those in the record.
        leaves_out_unknown: True if jobs do not count whose end history can't tell.
        console_url: the console in people's browsers; None for that of the changed config.

    Returns:
        The report.

    Raises:
        QueryError, AnalyticsUnavailableError: as `Analytics.query`.
    """
    agent = (renames or {}).get(agent or "", agent)
    covered = await coverage(analytics, since, until, datetime.now(UTC))
    since = covered.since
    step_ms = step_ms_of((until - since) // timedelta(milliseconds=1))
    effects = Effects(config.budgets.zone, agent, step_ms, leaves_out_unknown=leaves_out_unknown)

    def add(run: ReplayedJob) -> None:
        effects.add(run)
        on_end(run)

    policies = policy_of(config), policy_with(renames or {}, policy_of(before))
    findings, changes = await replay_records(
        analytics, *policies, since, until, on_end=add, on_event=effects.add_event, renames=renames
    )
    url = console_url or config.console.url
    return report_of(effects, findings, changes, since, until, gaps=covered.gaps, console_url=url)
