"""The tiles with figures at the top of a page. Each links to the page on which to act; a colour marks a problem."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from breakwater.alerts.contract import Alert, AlertList
from breakwater.alerts.views import NO_CHANNEL
from breakwater.health.pages.overall_health import MANY_FAIL, MUCH_WASTED, SOME_FAIL, LiveState, is_spent, shares, stuck
from breakwater.kernel.formats import quantity
from breakwater.kernel.pages import words
from breakwater.kernel.pages.time_range import TimeRange
from breakwater.limits.contract import BudgetStatus
from breakwater.records.figures import WindowTotals

MUCH_ON_FALLBACKS = 0.5
"""The share of answers of fallbacks from which on their tile has a colour."""

Colour = Literal["", "warn", "bad"]


@dataclass(frozen=True, slots=True)
class Tile:
    """A tile with a figure."""

    label: str
    value: str
    """The figure: a text, or an amount as `words.money` writes it."""
    note: str
    href: str
    colour: Colour = ""
    title: str = ""
    """A tooltip."""


HISTORY = ("Success rate", "Spend", "Wasted", "On fallbacks", "p95 latency")
"""The labels of `of_history`."""


def pending(labels: Iterable[str] = HISTORY) -> list[Tile]:
    """Makes tiles whose figures are not known yet."""
    return [Tile(label, "…", "", "") for label in labels]


def of_history(totals: WindowTotals | None, time_range: TimeRange, agent: str | None = None) -> list[Tile]:
    """Makes tiles of success rate, spend, waste, fallbacks and latency in a time range; none if they are unknown."""
    if totals is None:
        return []
    failed, wasted = shares(totals)
    cancelled_count = totals.executions - totals.succeeded - totals.dead_lettered
    cancelled_text = f", {cancelled_count:,} cancelled" if cancelled_count else ""
    return [
        Tile(
            "Success rate",
            words.percent(totals.success_rate),
            f"{quantity(totals.executions, 'execution')}, {totals.dead_lettered:,} failed{cancelled_text}",
            time_range.executions(agent=agent, status="dead_lettered"),
            "" if failed is None or failed < SOME_FAIL else "warn" if failed < MANY_FAIL else "bad",
            "Executions that succeeded or failed, without dry runs.",
        ),
        Tile("Spend", words.money(totals.spend), _calls(totals), "/budgets"),
        Tile(
            "Wasted",
            words.money(totals.wasted),
            _waste(totals, wasted),
            "#waste",
            "warn" if wasted is not None and wasted >= MUCH_WASTED else "",
        ),
        Tile(
            "On fallbacks",
            words.percent(totals.fallback_share),
            _fallbacks(totals),
            "#providers" if agent is None else "#retries",
            "warn" if (totals.fallback_share or 0) >= MUCH_ON_FALLBACKS else "",
            "Share of the answers that fallback models gave, and their cost compared with that on the requested model.",
        ),
        Tile(
            "p95 latency",
            words.duration(totals.p95_ms),
            f"Median {words.duration(totals.p50_ms)}" if totals.executions else "nothing ran",
            "#latency",
        ),
    ]


def of_now(live_state: LiveState) -> list[Tile]:
    """Makes tiles of waiting jobs, open breakers, exhausted budgets and unresolved incidents."""
    return [_jobs(live_state), _breakers(live_state), _budgets(live_state), incidents(live_state.incidents.value)]


def unknown(label: str, href: str) -> Tile:
    """Makes a tile whose figure is unknown."""
    return Tile(label, "–", "unknown now", href)


def incidents(alert_list: AlertList | None, alerts: Iterable[Alert] | None = None) -> Tile:
    """Makes the tile of unresolved incidents. `alerts` are the incidents to count; by default all."""
    if alert_list is None:
        return unknown("Open incidents", "/alerts")
    counted_alerts = list(alert_list.alerts if alerts is None else alerts)
    pending = [alert for alert in counted_alerts if alert.status != "acknowledged"]
    critical = sum(alert.severity == "critical" for alert in pending)
    note = f"{critical:,} critical" if critical else f"{len(pending):,} unacknowledged" if counted_alerts else "none"
    number = f"{len(counted_alerts):,}" + ("+" if alert_list.more and alerts is None else "")
    colour: Colour = "bad" if critical else "warn" if pending else ""
    if alert_list.channels:
        return Tile("Open incidents", number, note, "/alerts", colour)
    return Tile("Open incidents", number, f"{note}; not sent to anyone", "/alerts", colour, NO_CHANNEL)


def spent_budgets(budgets: Iterable[BudgetStatus], capped: int, href: str, no_cap_note: str) -> Tile:
    """Makes the tile of reached limits, of the number of all limits. `no_cap_note` is the note if there are none."""
    reached = [budget for budget in budgets if is_spent(budget)]
    refuses = any(budget.enforcement == "hard" for budget in reached)
    note = f"of {capped:,}" if capped else no_cap_note
    return Tile("Exhausted limits", f"{len(reached):,}", note, href, "bad" if refuses else "warn" if reached else "")


def _fallbacks(totals: WindowTotals) -> str:
    if not totals.answered:
        return "no model answered"
    factor = totals.fallback_cost_factor
    if factor is None:
        return f"{totals.fell_back:,} of {quantity(totals.answered, 'answer')}"
    return f"{totals.fell_back:,} of {totals.answered:,}, {factor:.2g} × the cost"  # in one line


def _jobs(live_state: LiveState) -> Tile:
    queues = live_state.queues.value
    href = "/now"
    if queues is None:
        return unknown("Jobs now", href)
    waiting = sum(agent.waiting or 0 for agent in queues.agents)
    running = sum(agent.in_progress or 0 for agent in queues.agents)
    parked = f", {queues.parked:,} parked" if queues.parked else ""
    colour: Colour = "warn" if stuck(queues.agents) else ""
    return Tile("Jobs waiting now", f"{waiting:,}", f"{running:,} running{parked}", href, colour)


def _breakers(live_state: LiveState) -> Tile:
    if live_state.breakers.value is None:
        return unknown("Open breakers", "/breakers")
    states = [breaker.state for breaker in live_state.breakers.value.breakers]
    refusing = states.count("open") + states.count("isolated")
    probing = states.count("half_open")
    note = f"{probing:,} half-open" if probing else f"of {len(states):,}"
    return Tile("Open breakers", f"{refusing:,}", note, "/breakers", "bad" if refusing else "warn" if probing else "")


def _budgets(live_state: LiveState) -> Tile:
    budget_list = live_state.budgets.value
    if budget_list is None:
        return unknown("Exhausted limits", "/budgets")
    if not budget_list.filled:
        return Tile("Exhausted limits", "–", "being rebuilt from the records", "/budgets", "bad")
    return spent_budgets(budget_list.budgets, budget_list.capped, "/budgets", "of 0")


def _calls(totals: WindowTotals) -> str:
    calls = quantity(totals.calls, "call")
    if totals.unknown_costs:
        return f"{_at_least(totals.spend)}{totals.unknown_costs:,} of {calls} of unknown cost"
    return calls


def _waste(totals: WindowTotals, share: float | None) -> str:
    if totals.unknown_waste:
        executions = quantity(totals.executions, "execution")
        return f"{_at_least(totals.wasted)}{totals.unknown_waste:,} of {executions} wasted an unknown amount"
    if totals.spend is None:
        return "spend is unknown"
    if not totals.spend:
        return "nothing was spent"
    # All of the waste is known here, so unknown spend can only make its share smaller.
    at_most = "at most " if share and totals.unknown_costs else ""
    return f"{at_most}{words.percent(share)} of spend"


def _at_least(amount: int | None) -> str:
    """The words before a number of unknown amounts; empty if no amount is known, as there is no lower bound then."""
    return "" if amount is None else "at least: "
