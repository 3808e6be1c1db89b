"""The state of the whole plane in one sentence."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from breakwater.alerts.contract import AlertList
from breakwater.breakers.contract import AgentHealth, BreakerList
from breakwater.client import ApiClient
from breakwater.identity.pages.pages import Fetched, fetched, problems_of
from breakwater.kernel.http.contract import AgentQueue, Queues, ServiceQueue
from breakwater.kernel.pages import words
from breakwater.limits.contract import BudgetList, BudgetStatus
from breakwater.records.figures import WindowTotals

Tone = Literal["", "good", "warn", "bad"]
"""The empty tone says neither that all is well nor that an operator must act."""

BEHIND = 1_000
"""A service with more waiting messages than this is behind."""
FEW_FAIL, SOME_FAIL, MANY_FAIL = 0.01, 0.05, 0.2
"""Shares of executions. Below the first all is well; below the second no operator has to act."""
MUCH_WASTED = 0.2
"""A share of spend."""
MAX_INCIDENTS = 1_000


@dataclass(frozen=True, slots=True)
class Live:
    """The HTTP API's view of the whole plane; any part may be missing."""

    agents: Fetched[list[AgentHealth]]
    breakers: Fetched[BreakerList]
    budgets: Fetched[BudgetList]
    incidents: Fetched[AlertList]
    """The unresolved ones."""
    queues: Fetched[Queues]

    @property
    def problems(self) -> tuple[str, ...]:
        """The reasons why parts are missing, each one once."""
        return problems_of(self.agents, self.breakers, self.budgets, self.incidents, self.queues)


@dataclass(frozen=True, slots=True)
class Remark:
    """A problem, or something to watch."""

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
    """The sentence if there are no remarks; empty otherwise."""


async def live(api: ApiClient) -> Live:
    """Reads all parts at the same time. Raises ApiKeyRefusedError."""
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
    """Sums up the state of the plane.

    Args:
        totals: the sums of a time range; None if unknown.
        live: the state now.
        when: the time range in words, such as `in the last 24h`.
        failed: the URL of the executions that failed.
    """
    found = [*_remarks(live)]
    share, wasted = shares(totals)
    if share is not None and share >= SOME_FAIL:
        text = f"{words.percent(share)} of executions failed {when}"
        found.append(Remark(text, failed, "bad" if share >= MANY_FAIL else "warn"))
    remarks = tuple(sorted(found, key=lambda one: one.tone != "bad"))
    if remarks:
        return OverallHealth("bad" if remarks[0].tone == "bad" else "warn", remarks, "")
    # If a part is missing, the page says so, and does not claim that all is well.
    if totals is None or live.problems:
        return OverallHealth("warn", (), "No problems are known, but not everything could be checked.")
    much = wasted is not None and wasted >= MUCH_WASTED
    if much or (share is not None and share >= FEW_FAIL):
        failures = (
            f"{totals.dead_lettered:,} of {totals.executions:,} executions failed" if totals.dead_lettered else ""
        )
        losses = " and ".join(filter(None, (failures, f"{words.percent(wasted)} of spend was wasted" if much else "")))
        return OverallHealth("warn" if much else "", (), f"No problems now; {losses} {when}.")
    return OverallHealth("good", (), f"All is well: {_summary(totals, when)}.")


def spent(budget: BudgetStatus) -> bool:
    """True if a cap is reached. A cap of zero is intentional, and does not count."""
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
    """True if too many messages wait for a service, or it has no queue at all."""
    return service.waiting is None or service.waiting > BEHIND


def _summary(totals: WindowTotals, when: str) -> str:
    if not totals.executions:
        return f"nothing ran {when}, and there are no problems"
    if totals.executions == totals.succeeded:
        done = "one execution" if totals.executions == 1 else f"all {totals.executions:,} executions"
        return f"{done} succeeded {when}, and no breaker is open"
    failed = f"only {totals.dead_lettered:,}" if totals.dead_lettered else "none"
    return f"{failed} of {totals.executions:,} executions failed {when}, and no breaker is open"


def _remarks(live: Live) -> Iterator[Remark]:
    """Everything that is not as it should be now."""
    if (breakers := live.breakers.value) is not None:
        states = Counter(one.state for one in breakers.breakers)
        yield from _are(states["open"], "breaker", "open", "/breakers", "bad")
        yield from _are(states["isolated"], "breaker", "isolated", "/breakers", "bad")
        yield from _are(states["half_open"], "breaker", "being probed", "/breakers", "warn")
        if not breakers.alive:
            yield Remark("no breaker service is running, so failures open no breaker", "/breakers", "bad")
    if (budgets := live.budgets.value) is not None:
        if budgets.filled:
            yield from _are(sum(spent(one) for one in budgets.budgets), "budget", "exhausted", "/budgets", "bad")
        else:
            yield Remark("the budgets' counters are being rebuilt from the records", "/budgets", "bad")
    if (queues := live.queues.value) is not None:
        for one in queues.services:
            if one.waiting is None:
                yield Remark(f"{one.consumer} has no queue; run `breakwater setup`", "/#services", "bad")
            elif behind(one):
                yield Remark(f"{one.service} is behind by {one.waiting:,} messages", "/#services", "bad")
        if waiting := stuck(queues.agents):
            who = waiting[0] if len(waiting) == 1 else f"{len(waiting)} agents"
            yield Remark(f"jobs of {who} are waiting and none is running", "/agents?sort=waiting", "warn")
    alerts = (
        [one for one in live.incidents.value.alerts if one.status != "acknowledged"] if live.incidents.value else []
    )
    critical = sum(one.severity == "critical" for one in alerts)
    yield from _are(critical, "critical incident", "unacknowledged", "/alerts", "bad")
    other = "other incident" if critical else "incident"
    yield from _are(len(alerts) - critical, other, "unacknowledged", "/alerts", "warn")
    healths = Counter(one.health for one in live.agents.value or ())
    yield from _are(healths["unhealthy"], "agent", "unhealthy", "/agents?sort=health", "bad")
    yield from _are(healths["degraded"], "agent", "degraded", "/agents?sort=health", "warn")


def _are(number: int, what: str, state: str, href: str, tone: Tone) -> Iterator[Remark]:
    if number:
        yield Remark(f"{number:,} {what}{' is' if number == 1 else 's are'} {state}", href, tone)
