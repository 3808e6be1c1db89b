"""The charts that the overview and the pages of agents share."""

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
    """Charts of a time range."""

    executions: Markup
    money: Markup
    latency: Markup
    empty: bool
    """True if nothing happened, so that there is nothing to show."""


def history_charts(steps: Sequence[WindowTotals], window: TimeWindow, agent: str | None = None) -> HistoryCharts:
    """The charts of a time range. `agent`: whose executions they are of; None for all."""
    chart = partial(
        charts.over_time,
        moments=[window.at(place) for place in range(len(steps))],
        step=timedelta(seconds=window.step_s),
        executions={"agent": agent} if agent else {},
    )
    executions = chart(
        "Executions",
        series=[
            Series("succeeded", "good", [one.succeeded for one in steps], "bars", {"status": "succeeded"}),
            Series("failed", "bad", [one.dead_lettered for one in steps], "bars", {"status": "dead_lettered"}),
        ],
        unit=charts.COUNT,
    )
    money = chart(
        "Spend and waste",
        series=[
            Series("spent", "plain", [one.spend for one in steps]),
            Series("wasted", "bad", [one.wasted for one in steps]),
        ],
        unit=charts.MONEY,
    )
    latency = chart(
        "Latency",
        series=[
            Series("p50", "plain", [one.p50_ms for one in steps]),
            Series("p95", "second", [one.p95_ms for one in steps]),
        ],
        unit=charts.DURATION,
    )
    nothing = not any(one.succeeded or one.dead_lettered or one.spend for one in steps)
    return HistoryCharts(executions, money, latency, nothing)


def sparks(steps: Sequence[WindowTotals]) -> Markup:
    """An agent's executions over time, as a sparkline."""
    ended, failed = [one.executions for one in steps], [one.dead_lettered for one in steps]
    return charts.sparkline(ended, failed, f"{sum(ended):,} executions over time, {sum(failed):,} of them failed")
