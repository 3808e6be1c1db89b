"""The health of the whole plane, in one sentence."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from breakwater.alerts.contract import AlertList
from breakwater.breakers.contract import AgentHealth, BreakerList
from breakwater.client import ApiClient
from breakwater.identity.pages.rendering import PagePart, fetch_part, problems_of
from breakwater.kernel.http.contract import AgentQueue, Queues, ServiceQueue
from breakwater.kernel.pages import words
from breakwater.limits.contract import BudgetList, BudgetStatus
from breakwater.records.figures import WindowTotals

Tone = Literal["", "good", "warn", "bad"]
"""The empty tone says neither that all is well nor that an operator must act."""

BEHIND = 1_000
"""A service with more waiting messages than this is behind."""
FEW_FAIL = 0.01
"""The share of failed executions below which all is well."""
SOME_FAIL = 0.05
"""The share of failed executions below which no operator has to act."""
MANY_FAIL = 0.2
MUCH_WASTED = 0.2
"""The share of wasted spend that counts as much."""
MAX_INCIDENTS = 1_000


@dataclass(frozen=True, slots=True)
class LiveState:
    """The present state of the plane as the HTTP API has it; any part may be missing."""

    agents: PagePart[list[AgentHealth]]
    breakers: PagePart[BreakerList]
    budgets: PagePart[BudgetList]
    incidents: PagePart[AlertList]
    """The unresolved incidents."""
    queues: PagePart[Queues]

    @property
    def problems(self) -> tuple[str, ...]:
        """The reasons why parts are missing, each once."""
        return problems_of(self.agents, self.breakers, self.budgets, self.incidents, self.queues)


@dataclass(frozen=True, slots=True)
class Remark:
    """A remark on a problem, or on something to watch."""

    text: str
    href: str
    """The URL of the page on which to act."""
    tone: Tone


@dataclass(frozen=True, slots=True)
class OverallHealth:
    """The sentence at the top of the overview."""

    tone: Tone
    remarks: tuple[Remark, ...]
    """The remarks, the worst first."""
    text: str
    """The sentence if there are no remarks; otherwise empty."""


async def read_live_state(api: ApiClient) -> LiveState:
    """Reads all parts at the same time. Raises ApiKeyRefusedError."""
    return LiveState(
        *await asyncio.gather(
            fetch_part(api.read(list[AgentHealth], "agents")),
            fetch_part(api.read(BreakerList, "breakers")),
            fetch_part(api.read(BudgetList, "budgets")),
            fetch_part(api.read(AlertList, "alerts", {"limit": MAX_INCIDENTS})),
            fetch_part(api.read(Queues, "queues")),
        )
    )


def overall_health(
    totals: WindowTotals | None, live_state: LiveState, range_text: str, failed_url: str
) -> OverallHealth:
    """Summarises the health of the plane.

    Args:
        totals: the sums of a time range; None if unknown.
        live_state: the present state.
        range_text: words for the time range, such as `in the last 24h`.
        failed_url: URL of the failed executions.
    """
    remarks = list(_remarks(live_state))
    failed_share, wasted_share = shares(totals)
    if failed_share is not None and failed_share >= SOME_FAIL:
        text = f"{words.percent(failed_share)} of executions failed {range_text}"
        remarks.append(Remark(text, failed_url, "bad" if failed_share >= MANY_FAIL else "warn"))
    remarks.sort(key=lambda remark: remark.tone != "bad")
    if remarks:
        return OverallHealth("bad" if remarks[0].tone == "bad" else "warn", tuple(remarks), "")
    # If a part is missing, the page must not claim that all is well.
    if totals is None or live_state.problems:
        return OverallHealth("warn", (), "No problems are known, but not everything could be checked.")
    is_much_wasted = wasted_share is not None and wasted_share >= MUCH_WASTED
    if is_much_wasted or (failed_share is not None and failed_share >= FEW_FAIL):
        losses: list[str] = []
        if totals.dead_lettered:
            losses.append(f"{totals.dead_lettered:,} of {totals.executions:,} executions failed")
        if is_much_wasted:
            losses.append(f"{words.percent(wasted_share)} of spend was wasted")
        text = f"No problems now; {' and '.join(losses)} {range_text}."
        return OverallHealth("warn" if is_much_wasted else "", (), text)
    return OverallHealth("good", (), f"All is well: {_summary(totals, range_text)}.")


def is_spent(budget: BudgetStatus) -> bool:
    """Returns whether a cap is reached. A cap of zero does not count, because it is intentional."""
    return bool(budget.limit) and (budget.reached or budget.spent + budget.reserved >= (budget.limit or 0))


def queue_of(queues: Queues | None, agent: str) -> AgentQueue | None:
    """The queue of an agent; None if it has none, or it is unknown."""
    return None if queues is None else next((queue for queue in queues.agents if queue.agent == agent), None)


def shares(totals: WindowTotals | None) -> tuple[float | None, float | None]:
    """The share of executions that failed, and the share of spend that was wasted; None if unknown.

    Cancelled executions neither failed nor succeeded, and do not count. If some costs are unknown, the second share is
    an approximation that is good enough for a colour.
    """
    if totals is None:
        return None, None
    failed = totals.dead_lettered / totals.decided if totals.decided else None
    # Waste counts when its execution ends, but spend when its call starts, so waste may exceed spend at the edges.
    is_comparable = totals.spend and totals.wasted is not None and totals.wasted <= totals.spend
    return failed, (totals.wasted or 0) / (totals.spend or 1) if is_comparable else None


def stuck(queues: Iterable[AgentQueue]) -> list[str]:
    """The agents that have waiting jobs but no running ones."""
    return [queue.agent for queue in queues if queue.waiting and queue.in_progress == 0]


def behind(service: ServiceQueue) -> bool:
    """Returns whether too many messages wait for a service, or it has no queue at all."""
    return service.waiting is None or service.waiting > BEHIND


def _summary(totals: WindowTotals, range_text: str) -> str:
    if not totals.executions:
        return f"nothing ran {range_text}, and there are no problems"
    if totals.executions == totals.succeeded:
        succeeded = "one execution" if totals.executions == 1 else f"all {totals.executions:,} executions"
        return f"{succeeded} succeeded {range_text}, and no breaker is open"
    failed = f"only {totals.dead_lettered:,}" if totals.dead_lettered else "none"
    return f"{failed} of {totals.executions:,} executions failed {range_text}, and no breaker is open"


def _remarks(live_state: LiveState) -> Iterator[Remark]:
    """Yields a remark on each problem of the present state."""
    if (breakers := live_state.breakers.value) is not None:
        states = Counter(breaker.state for breaker in breakers.breakers)
        yield from _are(states["open"], "breaker", "open", "/breakers", "bad")
        yield from _are(states["isolated"], "breaker", "isolated", "/breakers", "bad")
        yield from _are(states["half_open"], "breaker", "half-open", "/breakers", "warn")
        if not breakers.alive:
            yield Remark("no breaker service is running, so failures open no breaker", "/breakers", "bad")
    if (budgets := live_state.budgets.value) is not None:
        if budgets.filled:
            yield from _are(
                sum(is_spent(budget) for budget in budgets.budgets), "budget", "exhausted", "/budgets", "bad"
            )
        else:
            yield Remark("the budgets' counters are being rebuilt from the records", "/budgets", "bad")
    if (queues := live_state.queues.value) is not None:
        for service in queues.services:
            if service.waiting is None:
                yield Remark(f"{service.consumer} has no queue; run `breakwater setup`", "/#services", "bad")
            elif behind(service):
                yield Remark(f"{service.service} is behind by {service.waiting:,} messages", "/#services", "bad")
        if waiting := stuck(queues.agents):
            agents = waiting[0] if len(waiting) == 1 else f"{len(waiting)} agents"
            yield Remark(f"jobs of {agents} are waiting and none is running", "/agents?sort=waiting", "warn")
    incidents = live_state.incidents.value.alerts if live_state.incidents.value else ()
    alerts = [alert for alert in incidents if alert.status != "acknowledged"]
    critical = sum(alert.severity == "critical" for alert in alerts)
    yield from _are(critical, "critical incident", "unacknowledged", "/alerts", "bad")
    incident_name = "other incident" if critical else "incident"
    yield from _are(len(alerts) - critical, incident_name, "unacknowledged", "/alerts", "warn")
    healths = Counter(agent.health for agent in live_state.agents.value or ())
    yield from _are(healths["unhealthy"], "agent", "unhealthy", "/agents?sort=health", "bad")
    yield from _are(healths["degraded"], "agent", "degraded", "/agents?sort=health", "warn")


def _are(number: int, noun: str, state: str, href: str, tone: Tone) -> Iterator[Remark]:
    if number:
        yield Remark(f"{number:,} {noun}{' is' if number == 1 else 's are'} {state}", href, tone)
