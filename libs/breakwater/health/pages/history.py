"""The charts of a time range, which the overview and the pages of agents share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from markupsafe import Markup

from breakwater.kernel.pages import charts
from breakwater.kernel.pages.charts import Series
from breakwater.kernel.time_window import TimeWindow
from breakwater.records.figures import WindowTotals


@dataclass(frozen=True, slots=True)
class HistoryCharts:
    """The charts of a time range."""

    executions: Markup
    money: Markup
    latency: Markup
    empty: bool
    """True if nothing happened in the time range."""


def history_charts(steps: Sequence[WindowTotals], window: TimeWindow, agent: str | None = None) -> HistoryCharts:
    """Draws the charts of a time range, for one agent or for all."""
    chart = partial(
        charts.over_time,
        moments=[window.at(index) for index in range(len(steps))],
        step=timedelta(seconds=window.step_s),
        executions={"agent": agent} if agent else {},
    )
    executions = chart(
        "Executions",
        series=[
            Series("succeeded", "good", [totals.succeeded for totals in steps], "bars", {"status": "succeeded"}),
            Series("failed", "bad", [totals.dead_lettered for totals in steps], "bars", {"status": "dead_lettered"}),
        ],
        unit=charts.COUNT,
    )
    money = chart(
        "Spend and waste",
        series=[
            Series("spent", "plain", [totals.spend for totals in steps]),
            Series("wasted", "bad", [totals.wasted for totals in steps]),
        ],
        unit=charts.MONEY,
    )
    latency = chart(
        "Latency",
        series=[
            Series("p50", "plain", [totals.p50_ms for totals in steps]),
            Series("p95", "second", [totals.p95_ms for totals in steps]),
        ],
        unit=charts.DURATION,
    )
    is_empty = not any(totals.succeeded or totals.dead_lettered or totals.spend for totals in steps)
    return HistoryCharts(executions, money, latency, is_empty)


def sparks(steps: Sequence[WindowTotals]) -> Markup:
    """Draws an agent's executions over time as a sparkline."""
    executions = [totals.executions for totals in steps]
    failed = [totals.dead_lettered for totals in steps]
    label = f"{sum(executions):,} executions over time, {sum(failed):,} of them failed"
    return charts.sparkline(executions, failed, label)
