"""The charts that the overview and the pages of agents share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from markupsafe import Markup

from breakwater.analytics.overview import Bucket, Spark
from breakwater.analytics.window import Window
from services.console import charts
from services.console.charts import Series


@dataclass(frozen=True, slots=True)
class HistoryCharts:
    """What happened over time."""

    executions: Markup
    money: Markup
    latency: Markup
    empty: bool
    """Whether nothing happened at all, so that there is nothing to show."""


def history_charts(buckets: Sequence[Bucket], window: Window, agent: str | None = None) -> HistoryCharts:
    """The charts of a time range. `agent`: whose executions they are of; None for all."""
    chart = partial(
        charts.over_time,
        moments=[one.at for one in buckets],
        step=timedelta(seconds=window.step_s),
        executions={"agent": agent} if agent else {},
    )
    executions = chart(
        "Executions",
        series=[
            Series("succeeded", "good", [one.succeeded for one in buckets], "bars", {"status": "succeeded"}),
            Series("failed", "bad", [one.failed for one in buckets], "bars", {"status": "dead_lettered"}),
        ],
        unit=charts.COUNT,
    )
    money = chart(
        "Spend and waste",
        series=[
            Series("spent", "plain", [one.spend for one in buckets]),
            Series("wasted", "bad", [one.wasted for one in buckets]),
        ],
        unit=charts.MONEY,
    )
    latency = chart(
        "Latency",
        series=[
            Series("p50", "plain", [one.p50_ms for one in buckets]),
            Series("p95", "second", [one.p95_ms for one in buckets]),
        ],
        unit=charts.DURATION,
    )
    nothing = not any(one.succeeded or one.failed or one.spend for one in buckets)
    return HistoryCharts(executions, money, latency, nothing)


def sparks(points: Sequence[Spark]) -> Markup:
    """An agent's executions over time, as a sparkline."""
    ended, failed = sum(one.executions for one in points), sum(one.failed for one in points)
    label = f"{ended:,} executions over time, {failed:,} of them failed"
    return charts.sparkline([one.executions for one in points], [one.failed for one in points], label)
