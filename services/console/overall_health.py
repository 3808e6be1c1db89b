"""Whether all is well, in words: what a person would say who has looked at everything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from breakwater.analytics.overview import WindowTotals
from breakwater.contracts.alerts import Alert
from breakwater.contracts.api import AgentQueue, BudgetStatus, ServiceQueue
from services.console import words
from services.console.live import Live

Tone = Literal["", "good", "warn", "bad"]
"""The empty one says neither that all is well nor that somebody must act."""

BEHIND = 1_000
"""A service that has more messages before it than this is behind."""
FEW_FAIL, SOME_FAIL, MANY_FAIL = 0.01, 0.05, 0.2
"""Shares of executions. Below the first one all is well, below the second one nobody has to act."""
MUCH_WASTED = 0.2
"""The same of spend."""


@dataclass(frozen=True, slots=True)
class Remark:
    """Something that is not as it should be."""

    text: str
    href: str
    """Where one does something about it."""
    tone: Tone


@dataclass(frozen=True, slots=True)
class OverallHealth:
    """The answer."""

    tone: Tone
    remarks: tuple[Remark, ...]
    """The worst first."""
    text: str
    """What there is to say without any remarks, or besides them; may be empty."""


def overall_health(totals: WindowTotals | None, live: Live, when: str, failed: str) -> OverallHealth:
    """How the plane stands.

    Args:
        totals: what happened; None where that is not known.
        live: how it is now.
        when: the stretch of time that `totals` tell of, such as `in the last 24h`.
        failed: the address of the executions that failed.
    """
    found = [*_breakers(live), *_budgets(live), *_services(live), *_jobs(live), *_incidents(live), *_agents(live)]
    found += _failures(totals, when, failed)
    remarks = tuple(sorted(found, key=lambda one: one.tone != "bad"))
    # Where something can't be asked, the page says so; that all is well nobody may claim then.
    unknown = totals is None or bool(live.problems)
    if remarks:
        return OverallHealth("bad" if remarks[0].tone == "bad" else "warn", remarks, "")
    if unknown:
        return OverallHealth("warn", (), "Nothing wrong is known, but not everything could be asked.")
    share, wasted = shares(totals)
    much = wasted is not None and wasted >= MUCH_WASTED
    if totals is not None and (much or (share is not None and share >= FEW_FAIL)):
        text = f"Nothing is open now; {sentence(_losses(totals, wasted if much else None))} {when}."
        return OverallHealth("warn" if much else "", (), text)
    return OverallHealth("good", (), f"All is well: {_usual(totals, when)}.")


def spent(budget: BudgetStatus) -> bool:
    """Whether a cap is reached. A cap of nothing is meant so."""
    return bool(budget.limit) and budget.spent + budget.reserved >= (budget.limit or 0)


def shares(totals: WindowTotals | None) -> tuple[float | None, float | None]:
    """Which share of executions failed, and which share of spend was wasted; None where it can't be told.

    Executions that were cancelled neither failed nor succeeded: they are no part of the first one.
    Of money it is what is known: where a part is not, the share is a guess, good enough for a colour.
    """
    if totals is None:
        return None, None
    failed = totals.dead_lettered / totals.decided if totals.decided else None
    # Waste counts when its execution ends, and spend when its call begins: at the edge they may not fit.
    fits = totals.spend and totals.wasted is not None and totals.wasted <= totals.spend
    return failed, (totals.wasted or 0) / (totals.spend or 1) if fits else None


def stuck(queues: Iterable[AgentQueue]) -> list[str]:
    """The agents whose jobs wait while none is in work."""
    return [one.agent for one in queues if one.waiting and one.in_work == 0]


def behind(service: ServiceQueue) -> bool:
    """Whether a service has more before it than it should, or can't be given anything at all."""
    return service.waiting is None or service.waiting > BEHIND


def sentence(parts: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else ""


def _usual(totals: WindowTotals | None, when: str) -> str:
    if totals is None or not totals.executions:
        return f"nothing ran {when}, and nothing is amiss"
    if totals.executions == totals.succeeded:
        ended = "one execution ended" if totals.executions == 1 else f"all {totals.executions:,} executions ended"
        return f"{ended} well {when}, and no breaker is open"
    failed = f"only {totals.dead_lettered:,}" if totals.dead_lettered else "none"
    return f"{failed} of {totals.executions:,} executions failed {when}, and no breaker is open"


def _losses(totals: WindowTotals, wasted: float | None) -> list[str]:
    """What was lost without anything being amiss now; `wasted` where it is much."""
    found: list[str] = []
    if totals.dead_lettered:
        found.append(f"{totals.dead_lettered:,} of {totals.executions:,} executions failed")
    if wasted is not None:
        found.append(f"{words.percent(wasted)} of what was spent was wasted")
    return found


def _breakers(live: Live) -> Iterable[Remark]:
    told = live.breakers.value
    if told is None:
        return
    states = [one.state for one in told.breakers]
    if number := states.count("open"):
        yield Remark(_are(number, "breaker", "open"), "/breakers", "bad")
    if number := states.count("isolated"):
        yield Remark(_are(number, "breaker", "forced open"), "/breakers", "bad")
    if number := states.count("half_open"):
        yield Remark(_are(number, "breaker", "being probed"), "/breakers", "warn")
    if not told.alive:
        yield Remark("no breaker service is at work, so no failure opens a breaker", "/breakers", "bad")


def _budgets(live: Live) -> Iterable[Remark]:
    told = live.budgets.value
    if told is None:
        return
    if not told.filled:
        yield Remark("the budgets' counters are being rebuilt from the record", "/budgets", "bad")
        return
    if number := sum(spent(one) for one in told.budgets):
        yield Remark(_are(number, "budget", "spent"), "/budgets", "bad")


def _services(live: Live) -> Iterable[Remark]:
    told = live.queues.value
    for one in () if told is None else told.services:
        if one.waiting is None:
            yield Remark(f"{one.consumer} has no queue, so `breakwater setup` must run", "/#services", "bad")
        elif behind(one):
            yield Remark(f"{one.service} is behind by {one.waiting:,} messages", "/#services", "bad")


def _jobs(live: Live) -> Iterable[Remark]:
    told = live.queues.value
    waiting = [] if told is None else stuck(told.agents)
    if waiting:
        who = waiting[0] if len(waiting) == 1 else f"{len(waiting)} agents"
        yield Remark(f"jobs of {who} wait and none is in work", "/agents?sort=waiting", "warn")


def _incidents(live: Live) -> Iterable[Remark]:
    told = live.incidents.value
    alerts: tuple[Alert, ...] = () if told is None else told.alerts
    critical = sum(one.severity == "critical" and one.status != "acknowledged" for one in alerts)
    if critical:
        yield Remark(_are(critical, "critical incident", "unattended"), "/alerts", "bad")
    others = sum(one.status != "acknowledged" for one in alerts) - critical
    if others:
        more = "other " if critical else ""
        yield Remark(_are(others, f"{more}incident", "firing"), "/alerts", "warn")


def _agents(live: Live) -> Iterable[Remark]:
    healths = [one.health for one in live.agents.value or ()]
    if number := healths.count("unhealthy"):
        yield Remark(_are(number, "agent", "unhealthy"), "/agents?sort=health", "bad")
    if number := healths.count("degraded"):
        yield Remark(_are(number, "agent", "degraded"), "/agents?sort=health", "warn")


def _failures(totals: WindowTotals | None, when: str, href: str) -> Iterable[Remark]:
    failed, _ = shares(totals)
    if failed is not None and failed >= SOME_FAIL:
        text = f"{words.percent(failed)} of executions failed {when}"
        yield Remark(text, href, "bad" if failed >= MANY_FAIL else "warn")


def _are(number: int, what: str, how: str) -> str:
    return f"{number:,} {what}{' is' if number == 1 else 's are'} {how}"
