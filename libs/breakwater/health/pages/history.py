"""The charts of a time range, which the overview and the pages of agents share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, timedelta
from functools import partial

from markupsafe import Markup

from breakwater.kernel.pages import charts
from breakwater.kernel.pages.charts import Mark, Series
from breakwater.kernel.time_window import TimeWindow
from breakwater.records.events import ConfigChange
from breakwater.records.figures import WindowTotals


@dataclass(frozen=True, slots=True)
class HistoryCharts:
    """The charts of a time range."""

    executions: Markup
    money: Markup
    latency: Markup
    empty: bool
    """True if nothing happened in the time range."""


def history_charts(
    steps: Sequence[WindowTotals],
    window: TimeWindow,
    agent: str | None = None,
    *,
    previous_steps: Sequence[WindowTotals] = (),
    changes: Sequence[ConfigChange] = (),
) -> HistoryCharts:
    """Draws the charts of a time range, for one agent or for all.

    Args:
        steps: the totals of the window's steps.
        window: the time range.
        agent: the agent; None for all.
        previous_steps: the totals of the steps of `window.preceding`, which are a thin line; empty if they are unknown.
        changes: the changes of the config in the time range, which are marks.
    """
    is_compared = any(totals.executions or totals.spend for totals in previous_steps)

    def before(name: str, value: Callable[[WindowTotals], float | None]) -> list[Series]:
        """The thin line of a figure; none if nothing ran in the previous period."""
        return [Series(f"{name} before", "faint", list(map(value, previous_steps)), "thin")] if is_compared else []

    begin = window.preceding.start.astimezone(UTC)
    chart = partial(
        charts.over_time,
        moments=[window.at(index) for index in range(len(steps))],
        step=timedelta(seconds=window.step_s),
        executions={"agent": agent} if agent else {},
        marks=[
            Mark(
                change.at,
                f"config {change.version[:7]} {change.at.astimezone(UTC):%H:%M}",
                f"config version {change.version} was applied by {change.by}",
            )
            for change in changes
        ],
        note=f"“Before” is the previous period, from {begin:%b %d %H:%M} UTC, at the same distance from its start."
        if is_compared
        else "",
    )
    executions = chart(
        "Executions",
        series=[
            Series("succeeded", "good", [totals.succeeded for totals in steps], "bars", {"status": "succeeded"}),
            Series("failed", "bad", [totals.dead_lettered for totals in steps], "bars", {"status": "dead_lettered"}),
            *before("both", lambda totals: totals.decided),
        ],
        unit=charts.COUNT,
    )
    money = chart(
        "Spend and waste",
        series=[
            Series("spent", "plain", [totals.spend for totals in steps]),
            Series("wasted", "bad", [totals.wasted for totals in steps]),
            *before("spent", lambda totals: totals.spend),
        ],
        unit=charts.MONEY,
    )
    latency = chart(
        "Latency",
        series=[
            Series("p50", "plain", [totals.p50_ms for totals in steps]),
            Series("p95", "second", [totals.p95_ms for totals in steps]),
            *before("p95", lambda totals: totals.p95_ms),
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
