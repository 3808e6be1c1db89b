"""Queries that anomalies are judged by: the latest minutes and the baselines of all agents, one query each.

Statements: `anomalies.sql`. Both functions raise as `Analytics.query` does.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from breakwater.alerts.rules.anomaly import LAPSE, LEARNED_FROM, NEW_NORMAL, Baseline, Minute, Place
from breakwater.alerts.settings import AnomalyRules
from breakwater.kernel.clickhouse.client import Analytics, statements

SQL = statements(__file__)

GRACE = timedelta(seconds=30)
"""The time for which a minute waits for its last executions to be stored."""


async def latest_minutes(analytics: Analytics, rules: AnomalyRules, now: datetime) -> dict[Place, tuple[Minute, ...]]:
    """Returns the minutes that are judged, the newest first, of every figure of every agent."""
    until = _last_minute(now)
    count = rules.sustained_minutes
    parameters = _window(until - LAPSE, until, rules) | {"count": count}
    result = await analytics.query(SQL["latest"], parameters)
    return {(agent, measure): tuple(Minute(*minute) for minute in minutes) for agent, measure, minutes in result.rows}


async def baselines(analytics: Analytics, rules: AnomalyRules, now: datetime) -> dict[Place, Baseline]:
    """Returns the baselines that cover `minimum_minutes`; the minutes that are judged are no part of them."""
    until = _last_minute(now) - timedelta(minutes=rules.sustained_minutes)
    parameters = _window(until - LEARNED_FROM, until, rules)
    parameters |= {"settled": _text(until - NEW_NORMAL), "minimum_minutes": rules.minimum_minutes}
    result = await analytics.query(SQL["baselines"], parameters)
    return {(agent, measure): Baseline(*figures) for agent, measure, *figures in result.rows}


def _window(since: datetime, until: datetime, rules: AnomalyRules) -> dict[str, object]:
    return {"since": _text(since), "until": _text(until), "minimum_calls": rules.minimum_calls}


def _last_minute(now: datetime) -> datetime:
    return (now - GRACE).replace(second=0, microsecond=0)


def _text(moment: datetime) -> str:
    # Whole minutes without a fraction: ClickHouse finds the rows of a `DateTime` by their index.
    return f"{moment:%Y-%m-%d %H:%M:%S}"
