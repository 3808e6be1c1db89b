"""The charts and the words that the overview and the pages of agents share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from markupsafe import Markup

from breakwater.analytics.breakdown import RefusalLine
from breakwater.analytics.overview import Bucket, Spark
from breakwater.analytics.window import Window
from services.console import charts, words


@dataclass(frozen=True, slots=True)
class Drawn:
    """What happened over time."""

    executions: Markup
    money: Markup
    latency: Markup
    empty: bool
    """Whether nothing happened at all: there is nothing to look at then."""


def drawn(buckets: Sequence[Bucket], window: Window) -> Drawn:
    """Draws the charts of a window."""
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
        "Time from queueing to the end",
        moments,
        [
            charts.Series("p50", "plain", [one.p50_ms for one in buckets]),
            charts.Series("p95", "second", [one.p95_ms for one in buckets]),
        ],
        words.duration,
        step=step,
    )
    nothing = not any(one.succeeded or one.failed or one.spend for one in buckets)
    return Drawn(executions, money, latency, nothing)


def sparks(points: Sequence[Spark]) -> Markup:
    """An agent's executions in a few strokes."""
    ended, failed = sum(one.executions for one in points), sum(one.failed for one in points)
    label = f"{ended:,} executions over time, {failed:,} of them failed"
    return charts.sparkline([one.executions for one in points], [one.failed for one in points], label)


def causes(cause: str) -> str:
    """Why money was wasted, in plain words."""
    return _CAUSES.get(cause, words.plainly(cause))


def holding(line: RefusalLine) -> str:
    """What held calls back, in words."""
    if line.called:
        return "the provider's rate limit"
    match line.kind:
        case "rate_limit":
            return f"the rate limit of {line.by.replace(':', ' ', 1)}" if line.by else "a rate limit"
        case "budget_exceeded":
            return f"the budget {line.by}" if line.by else "a budget"
        case "breaker_open":
            return "an open breaker"
        case "retry_budget":
            return "the limit on retries of the whole fleet"
        case "guard_tripped":
            return "a task's guard"
        case kind:
            return words.plainly(kind) or "the plane"


_CAUSES = {
    "retry": "failed, then tried again",
    "fallback": "failed, then another model",
    "self_correction": "answer was no use, asked again",
    "worker_lost": "worker died in the call",
    "failed": "the job failed in the end",
}
