"""Figures at the top of a page, each a way to where one acts. Colour says that something is wrong."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from breakwater.analytics.overview import WindowTotals
from breakwater.contracts.alerts import Alert
from services.console import words
from services.console.live import Incidents, Live
from services.console.overall_health import MANY_FAIL, MUCH_WASTED, SOME_FAIL, shares, spent, stuck
from services.console.time_range import TimeRange

Colour = Literal["", "warn", "bad"]


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure."""

    label: str
    value: str
    note: str
    href: str
    colour: Colour = ""
    title: str = ""
    """What there is to know of the figure, for who points at it."""


def of_history(totals: WindowTotals, time_range: TimeRange, agent: str | None = None) -> list[Tile]:
    """Success, spend, waste and latency of a window."""
    failed, wasted = shares(totals)
    bad: Colour = "" if failed is None or failed < SOME_FAIL else "warn" if failed < MANY_FAIL else "bad"
    others = totals.executions - totals.succeeded - totals.dead_lettered
    cancelled = f", {others:,} cancelled" if others else ""
    return [
        Tile(
            "Success rate",
            words.percent(totals.success_rate),
            f"{_counted(totals.executions, 'execution')}, {totals.dead_lettered:,} failed{cancelled}",
            time_range.executions(agent=agent, status="dead_lettered"),
            bad,
            "Of executions that succeeded or failed. Dry runs are left out.",
        ),
        Tile("Spend", words.short_money(totals.spend), _calls(totals), "/budgets"),
        Tile(
            "Wasted",
            words.short_money(totals.wasted),
            _waste(totals, wasted),
            "#waste",
            "warn" if wasted is not None and wasted >= MUCH_WASTED else "",
        ),
        Tile(
            "p95 latency",
            words.duration(totals.p95_ms),
            f"half took under {words.duration(totals.p50_ms)}" if totals.executions else "nothing ran",
            "#latency",
        ),
    ]


def of_now(live: Live) -> list[Tile]:
    """What waits, which breakers are open, which incidents are not over."""
    return [_jobs(live), _breakers(live), _budgets(live), incidents(live.incidents.value)]


def incidents(told: Incidents | None, alerts: Iterable[Alert] | None = None) -> Tile:
    """Incidents that are not over. `alerts`: those that count, where it is not all."""
    if told is None:
        return Tile("Open incidents", "–", "can't be told now", "/alerts")
    counted = list(told.alerts if alerts is None else alerts)
    unattended = [one for one in counted if one.status != "acknowledged"]
    critical = sum(one.severity == "critical" for one in unattended)
    note = f"{critical:,} critical" if critical else f"{len(unattended):,} unattended" if counted else "none to look at"
    number = f"{len(counted):,}" + ("+" if told.more and alerts is None else "")
    return Tile("Open incidents", number, note, "/alerts", "bad" if critical else "warn" if unattended else "")


def _jobs(live: Live) -> Tile:
    told = live.queues.value
    if told is None:
        return Tile("Jobs now", "–", "can't be told now", "/agents?sort=waiting")
    waiting = sum(one.waiting or 0 for one in told.agents)
    in_work = sum(one.in_work or 0 for one in told.agents)
    sleeping = f", {told.parked:,} sleep" if told.parked else ""
    colour: Colour = "warn" if stuck(told.agents) else ""
    return Tile("Jobs waiting now", f"{waiting:,}", f"{in_work:,} in work{sleeping}", "/agents?sort=waiting", colour)


def _breakers(live: Live) -> Tile:
    told = live.breakers.value
    if told is None:
        return Tile("Open breakers", "–", "can't be told now", "/breakers")
    refusing = sum(one.state in ("open", "isolated") for one in told.breakers)
    probing = sum(one.state == "half_open" for one in told.breakers)
    note = f"{probing:,} being probed" if probing else f"of {len(told.breakers):,}"
    return Tile("Open breakers", f"{refusing:,}", note, "/breakers", "bad" if refusing else "warn" if probing else "")


def _budgets(live: Live) -> Tile:
    told = live.budgets.value
    if told is None:
        return Tile("Spent budgets", "–", "can't be told now", "/budgets")
    capped = [one for one in told.budgets if one.limit]
    if not told.filled:
        return Tile("Spent budgets", "–", "being rebuilt from the record", "/budgets", "bad")
    over = [one for one in capped if spent(one)]
    refuses = any(one.enforcement == "hard" for one in over)
    return Tile(
        "Spent budgets",
        f"{len(over):,}",
        f"of {len(capped):,}",
        "/budgets",
        "bad" if refuses else "warn" if over else "",
    )


def _calls(totals: WindowTotals) -> str:
    calls = _counted(totals.calls, "call")
    if totals.unknown_costs:
        return f"{_least(totals.spend)}{totals.unknown_costs:,} of {calls} of unknown cost"
    return calls


def _waste(totals: WindowTotals, share: float | None) -> str:
    if totals.unknown_waste:
        executions = _counted(totals.executions, "execution")
        return f"{_least(totals.wasted)}{totals.unknown_waste:,} of {executions} wasted an unknown amount"
    if totals.spend is None:
        return "what was spent is not known"
    if not totals.spend:
        return "nothing was spent"
    # All of the waste is known here. What else was spent can only make its share smaller.
    most = "at most " if share and totals.unknown_costs else ""
    return f"{most}{words.percent(share)} of what was spent"


def _least(known: int | None) -> str:
    """What stands before the number of those that are not known: no bound where nothing is known."""
    return "" if known is None else "at least: "


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
