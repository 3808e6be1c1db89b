"""The charts that the overview and the pages of agents share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from markupsafe import Markup

from breakwater.analytics.overview import Bucket, Spark
from breakwater.analytics.window import Window
from services.console import charts, words


@dataclass(frozen=True, slots=True)
class HistoryCharts:
    """What happened over time."""

    executions: Markup
    money: Markup
    latency: Markup
    empty: bool
    """Whether nothing happened at all, so that there is nothing to show."""


def history_charts(buckets: Sequence[Bucket], window: Window) -> HistoryCharts:
    """The charts of a time range."""
    moments, step = [one.at for one in buckets], timedelta(seconds=window.step_s)
    executions = charts.columns(
        "Executions",
        moments,
        [
            charts.Series("succeeded", "good", [one.succeeded for one in buckets]),
            charts.Series("failed", "bad", [one.failed for one in buckets]),
        ],
        lambda value: f"{value:,g}",
        step=step,
    )
    money = charts.lines(
        "Spend and waste",
        moments,
        [
            charts.Series("spent", "plain", [one.spend for one in buckets]),
            charts.Series("wasted", "bad", [one.wasted for one in buckets]),
        ],
        lambda value: words.short_money(round(value)),
        step=step,
    )
    latency = charts.lines(
        "Latency, from queued to ended",
        moments,
        [
            charts.Series("p50", "plain", [one.p50_ms for one in buckets]),
            charts.Series("p95", "second", [one.p95_ms for one in buckets]),
        ],
        words.duration,
        step=step,
    )
    nothing = not any(one.succeeded or one.failed or one.spend for one in buckets)
    return HistoryCharts(executions, money, latency, nothing)


def sparks(points: Sequence[Spark]) -> Markup:
    """An agent's executions over time, as a sparkline."""
    ended, failed = sum(one.executions for one in points), sum(one.failed for one in points)
    label = f"{ended:,} executions over time, {failed:,} of them failed"
    return charts.sparkline([one.executions for one in points], [one.failed for one in points], label)
