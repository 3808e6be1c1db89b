"""How the plane is now, and whether all is well, in one sentence, as a person would say who has seen everything."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from breakwater.analytics.figures import WindowTotals
from breakwater.client import ApiClient
from breakwater.contracts.alerts import Alert, AlertList
from breakwater.contracts.breakers import AgentHealth, BreakerList
from breakwater.contracts.budgets import BudgetList, BudgetStatus
from breakwater.contracts.http import AgentQueue, Queues, ServiceQueue
from services.console import words
from services.console.pages import Fetched, fetched, problems_of

Tone = Literal["", "good", "warn", "bad"]
"""The empty one says neither that all is well nor that an operator must act."""

BEHIND = 1_000
"""A service with more waiting messages than this is behind."""
FEW_FAIL, SOME_FAIL, MANY_FAIL = 0.01, 0.05, 0.2
"""Shares of executions. Below the first all is well; below the second no operator has to act."""
MUCH_WASTED = 0.2
"""A share of spend."""
MAX_INCIDENTS = 1_000


@dataclass(frozen=True, slots=True)
class Live:
    """What the HTTP API reports of the whole plane; any part may be missing."""

    agents: Fetched[list[AgentHealth]]
    breakers: Fetched[BreakerList]
    budgets: Fetched[BudgetList]
    incidents: Fetched[AlertList]
    """Those that are not resolved."""
    queues: Fetched[Queues]

    @property
    def problems(self) -> tuple[str, ...]:
        """Why parts are missing, each reason once."""
        return problems_of(self.agents, self.breakers, self.budgets, self.incidents, self.queues)


@dataclass(frozen=True, slots=True)
class Remark:
    """Something that is not as it should be."""

    text: str
    href: str
    """The page on which to act."""
    tone: Tone


@dataclass(frozen=True, slots=True)
class OverallHealth:
    """The sentence at the top of the overview."""

    tone: Tone
    remarks: tuple[Remark, ...]
    """The worst first."""
    text: str
    """What is said if there are no remarks; empty otherwise."""


async def live(api: ApiClient) -> Live:
    """Reads all parts at the same time. Raises ApiKeyRefused."""
    return Live(
        *await asyncio.gather(
            fetched(api.read(list[AgentHealth], "agents")),
            fetched(api.read(BreakerList, "breakers")),
            fetched(api.read(BudgetList, "budgets")),
            fetched(api.read(AlertList, "alerts", {"limit": MAX_INCIDENTS})),
            fetched(api.read(Queues, "queues")),
        )
    )


def overall_health(totals: WindowTotals | None, live: Live, when: str, failed: str) -> OverallHealth:
    """Sums up how the plane is.

    Args:
        totals: what happened in a time range; None if unknown.
        live: how it is now.
        when: the time range in words, such as `in the last 24h`.
        failed: the URL of the executions that failed.
    """
    found = [*_breakers(live), *_budgets(live), *_services(live), *_jobs(live), *_incidents(live), *_agents(live)]
    found += _failures(totals, when, failed)
    remarks = tuple(sorted(found, key=lambda one: one.tone != "bad"))
    if remarks:
        return OverallHealth("bad" if remarks[0].tone == "bad" else "warn", remarks, "")
    # If a part is missing, the page says so, and does not claim that all is well.
    if totals is None or live.problems:
        return OverallHealth("warn", (), "No problems are known, but not everything could be checked.")
    share, wasted = shares(totals)
    much = wasted is not None and wasted >= MUCH_WASTED
    if much or (share is not None and share >= FEW_FAIL):
        text = f"No problems now; {sentence(_losses(totals, wasted if much else None))} {when}."
        return OverallHealth("warn" if much else "", (), text)
    return OverallHealth("good", (), f"All is well: {_summary(totals, when)}.")


def spent(budget: BudgetStatus) -> bool:
    """Whether a cap is reached. A cap of zero is intentional, and does not count."""
    return bool(budget.limit) and (budget.reached or budget.spent + budget.reserved >= (budget.limit or 0))


def queue_of(queues: Queues | None, agent: str) -> AgentQueue | None:
    """The queue of one agent; None if it has none, or if that is unknown."""
    return None if queues is None else next((one for one in queues.agents if one.agent == agent), None)


def shares(totals: WindowTotals | None) -> tuple[float | None, float | None]:
    """The share of executions that failed, and the share of spend that was wasted; None if unknown.

    Executions that were cancelled neither failed nor succeeded, and are left out.
    Where a part of the costs is unknown, the second share is a guess, good enough for a colour.
    """
    if totals is None:
        return None, None
    failed = totals.dead_lettered / totals.decided if totals.decided else None
    # Waste counts when its execution ends, and spend when its call starts: at the edges they may not match.
    fits = totals.spend and totals.wasted is not None and totals.wasted <= totals.spend
    return failed, (totals.wasted or 0) / (totals.spend or 1) if fits else None


def stuck(queues: Iterable[AgentQueue]) -> list[str]:
    """The agents that have waiting jobs, and none running."""
    return [one.agent for one in queues if one.waiting and one.in_progress == 0]


def behind(service: ServiceQueue) -> bool:
    """Whether too many messages wait for a service, or it has no queue at all."""
    return service.waiting is None or service.waiting > BEHIND


def sentence(parts: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else ""


def _summary(totals: WindowTotals, when: str) -> str:
    if not totals.executions:
        return f"nothing ran {when}, and there are no problems"
    if totals.executions == totals.succeeded:
        done = "one execution" if totals.executions == 1 else f"all {totals.executions:,} executions"
        return f"{done} succeeded {when}, and no breaker is open"
    failed = f"only {totals.dead_lettered:,}" if totals.dead_lettered else "none"
    return f"{failed} of {totals.executions:,} executions failed {when}, and no breaker is open"


def _losses(totals: WindowTotals, wasted: float | None) -> list[str]:
    """What was lost although there are no problems now. `wasted`: a large share of spend, or None."""
    found: list[str] = []
    if totals.dead_lettered:
        found.append(f"{totals.dead_lettered:,} of {totals.executions:,} executions failed")
    if wasted is not None:
        found.append(f"{words.percent(wasted)} of spend was wasted")
    return found


def _breakers(live: Live) -> Iterable[Remark]:
    breakers = live.breakers.value
    if breakers is None:
        return
    states = [one.state for one in breakers.breakers]
    if number := states.count("open"):
        yield Remark(_are(number, "breaker", "open"), "/breakers", "bad")
    if number := states.count("isolated"):
        yield Remark(_are(number, "breaker", "isolated"), "/breakers", "bad")
    if number := states.count("half_open"):
        yield Remark(_are(number, "breaker", "being probed"), "/breakers", "warn")
    if not breakers.alive:
        yield Remark("no breaker service is running, so failures open no breaker", "/breakers", "bad")


def _budgets(live: Live) -> Iterable[Remark]:
    budgets = live.budgets.value
    if budgets is None:
        return
    if not budgets.filled:
        yield Remark("the budgets' counters are being rebuilt from the records", "/budgets", "bad")
        return
    if number := sum(spent(one) for one in budgets.budgets):
        yield Remark(_are(number, "budget", "spent"), "/budgets", "bad")


def _services(live: Live) -> Iterable[Remark]:
    queues = live.queues.value
    for one in () if queues is None else queues.services:
        if one.waiting is None:
            yield Remark(f"{one.consumer} has no queue, so `breakwater setup` must run", "/#services", "bad")
        elif behind(one):
            yield Remark(f"{one.service} is behind by {one.waiting:,} messages", "/#services", "bad")


def _jobs(live: Live) -> Iterable[Remark]:
    queues = live.queues.value
    waiting = [] if queues is None else stuck(queues.agents)
    if waiting:
        who = waiting[0] if len(waiting) == 1 else f"{len(waiting)} agents"
        yield Remark(f"jobs of {who} are waiting and none is running", "/agents?sort=waiting", "warn")


def _incidents(live: Live) -> Iterable[Remark]:
    incidents = live.incidents.value
    alerts: tuple[Alert, ...] = () if incidents is None else incidents.alerts
    critical = sum(one.severity == "critical" and one.status != "acknowledged" for one in alerts)
    if critical:
        yield Remark(_are(critical, "critical incident", "unacknowledged"), "/alerts", "bad")
    others = sum(one.status != "acknowledged" for one in alerts) - critical
    if others:
        more = "other " if critical else ""
        yield Remark(_are(others, f"{more}incident", "unacknowledged"), "/alerts", "warn")


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
