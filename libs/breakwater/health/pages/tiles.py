"""The figures at the top of a page. Each links to the page on which to act; a colour says that something is wrong."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from breakwater.alerts.contract import Alert, AlertList
from breakwater.alerts.views import NO_CHANNEL
from breakwater.health.pages.overall_health import MANY_FAIL, MUCH_WASTED, SOME_FAIL, Live, shares, spent, stuck
from breakwater.kernel.formats import counted
from breakwater.kernel.pages import words
from breakwater.kernel.pages.time_range import TimeRange
from breakwater.limits.contract import BudgetStatus
from breakwater.records.figures import WindowTotals

Colour = Literal["", "warn", "bad"]


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure."""

    label: str
    value: str
    """Text, or an amount as `words.money` writes it."""
    note: str
    href: str
    colour: Colour = ""
    title: str = ""
    """A tooltip."""


HISTORY = ("Success rate", "Spend", "Wasted", "p95 latency")
"""The labels of `of_history`."""


def pending(labels: Iterable[str] = HISTORY) -> list[Tile]:
    """Tiles before their figures are known."""
    return [Tile(label, "…", "", "") for label in labels]


def of_history(totals: WindowTotals | None, time_range: TimeRange, agent: str | None = None) -> list[Tile]:
    """Success rate, spend, waste and latency in a time range; no tiles if they are unknown."""
    if totals is None:
        return []
    failed, wasted = shares(totals)
    others = totals.executions - totals.succeeded - totals.dead_lettered
    cancelled = f", {others:,} cancelled" if others else ""
    return [
        Tile(
            "Success rate",
            words.percent(totals.success_rate),
            f"{counted(totals.executions, 'execution')}, {totals.dead_lettered:,} failed{cancelled}",
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
            "p95 latency",
            words.duration(totals.p95_ms),
            f"Median {words.duration(totals.p50_ms)}" if totals.executions else "nothing ran",
            "#latency",
        ),
    ]


def of_now(live: Live) -> list[Tile]:
    """Waiting jobs, open breakers, exhausted budgets and unresolved incidents."""
    return [_jobs(live), _breakers(live), _budgets(live), incidents(live.incidents.value)]


def unknown(label: str, href: str) -> Tile:
    """A tile without its figure."""
    return Tile(label, "–", "unknown now", href)


def incidents(known: AlertList | None, alerts: Iterable[Alert] | None = None) -> Tile:
    """Unresolved incidents. `alerts`: those that count; all of them by default."""
    if known is None:
        return unknown("Open incidents", "/alerts")
    counts = list(known.alerts if alerts is None else alerts)
    pending = [one for one in counts if one.status != "acknowledged"]
    critical = sum(one.severity == "critical" for one in pending)
    note = f"{critical:,} critical" if critical else f"{len(pending):,} unacknowledged" if counts else "none"
    number = f"{len(counts):,}" + ("+" if known.more and alerts is None else "")
    colour: Colour = "bad" if critical else "warn" if pending else ""
    if known.channels:
        return Tile("Open incidents", number, note, "/alerts", colour)
    return Tile("Open incidents", number, f"{note}; not sent to anyone", "/alerts", colour, NO_CHANNEL)


def spent_budgets(budgets: Iterable[BudgetStatus], href: str, without: str) -> Tile:
    """The number of caps that are reached. `without`: the note if there are no caps."""
    capped = [one for one in budgets if one.limit]
    reached = [one for one in capped if spent(one)]
    refuses = any(one.enforcement == "hard" for one in reached)
    note = f"of {len(capped):,}" if capped else without
    return Tile("Exhausted budgets", f"{len(reached):,}", note, href, "bad" if refuses else "warn" if reached else "")


def _jobs(live: Live) -> Tile:
    queues, href = live.queues.value, "/agents?sort=waiting"
    if queues is None:
        return unknown("Jobs now", href)
    waiting = sum(one.waiting or 0 for one in queues.agents)
    running = sum(one.in_progress or 0 for one in queues.agents)
    parked = f", {queues.parked:,} parked" if queues.parked else ""
    colour: Colour = "warn" if stuck(queues.agents) else ""
    return Tile("Jobs waiting now", f"{waiting:,}", f"{running:,} running{parked}", href, colour)


def _breakers(live: Live) -> Tile:
    if live.breakers.value is None:
        return unknown("Open breakers", "/breakers")
    states = [one.state for one in live.breakers.value.breakers]
    refusing, probing = states.count("open") + states.count("isolated"), states.count("half_open")
    note = f"{probing:,} being probed" if probing else f"of {len(states):,}"
    return Tile("Open breakers", f"{refusing:,}", note, "/breakers", "bad" if refusing else "warn" if probing else "")


def _budgets(live: Live) -> Tile:
    known = live.budgets.value
    if known is None:
        return unknown("Exhausted budgets", "/budgets")
    if not known.filled:
        return Tile("Exhausted budgets", "–", "being rebuilt from the records", "/budgets", "bad")
    return spent_budgets(known.budgets, "/budgets", "of 0")


def _calls(totals: WindowTotals) -> str:
    calls = counted(totals.calls, "call")
    if totals.unknown_costs:
        return f"{_at_least(totals.spend)}{totals.unknown_costs:,} of {calls} of unknown cost"
    return calls


def _waste(totals: WindowTotals, share: float | None) -> str:
    if totals.unknown_waste:
        executions = counted(totals.executions, "execution")
        return f"{_at_least(totals.wasted)}{totals.unknown_waste:,} of {executions} wasted an unknown amount"
    if totals.spend is None:
        return "spend is unknown"
    if not totals.spend:
        return "nothing was spent"
    # All of the waste is known here. Unknown spend can only make its share smaller.
    at_most = "at most " if share and totals.unknown_costs else ""
    return f"{at_most}{words.percent(share)} of spend"


def _at_least(known: int | None) -> str:
    """In front of the number of unknown amounts. If nothing is known, there is no lower bound."""
    return "" if known is None else "at least: "
