"""The health of the whole plane: a card for each kind of problem, the most severe first, or one calm sentence."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Literal
from urllib.parse import urlencode

from breakwater.alerts.contract import Alert, AlertList, Severity
from breakwater.alerts.rules.alert_rules import SEVERITIES, began_with, budget_of
from breakwater.breakers.contract import AgentHealth, BreakerList, BreakerStatus
from breakwater.client import ApiClient
from breakwater.identity.pages.rendering import PagePart, fetch_part, problems_of
from breakwater.kernel.formats import moment, money
from breakwater.kernel.http.contract import AgentQueue, Queues, ServiceQueue
from breakwater.kernel.pages import words
from breakwater.kernel.pages.words import segment
from breakwater.kernel.types import format_time
from breakwater.limits.contract import BudgetList, BudgetStatus
from breakwater.limits.views import owner_of
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
USED_FROM = 50
"""The used percentage of a limit from which the overview reads a budget."""
MAX_CARDS = 3
_REPLAY_MARGIN = timedelta(minutes=1)
"""A job's dead letter may be older than its incident, which begins at the end of the job by its record."""
_REFUSING = ("open", "isolated")
_TONES: Mapping[Severity, Tone] = {"critical": "bad", "warning": "warn", "info": ""}


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
class Action:
    """A form with one button, which operators see who may use it."""

    title: str
    """The text on the button, which says what it does."""
    path: str
    fields: Mapping[str, str]
    explanation: str
    verb: str
    """The text on the button that confirms it."""
    approval: bool = False
    """True if the right to approve is enough."""
    reason: str = "reason"
    """The name of the form's field for the reason."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem, or something to watch."""

    kind: str
    """Problems of one kind and severity share a card."""
    severity: Severity
    title: str
    href: str
    """The URL of its page."""
    all_href: str
    """The URL of the page with all problems of its kind."""
    text: str = ""
    """More about it."""
    since: datetime | None = None
    action: Action | None = None
    raised_budget: BudgetStatus | None = None
    """The budget whose limit the button raises."""


@dataclass(frozen=True, slots=True)
class Card:
    """A problem, and the number of further ones of its kind."""

    problem: Problem
    more: int

    @property
    def title(self) -> str:
        """The problem's title."""
        return self.problem.title

    @property
    def tone(self) -> Tone:
        """The tone of the card's severity."""
        return _TONES[self.problem.severity]


@dataclass(frozen=True, slots=True)
class OverallHealth:
    """The cards at the top of the overview, or its sentence."""

    tone: Tone
    cards: tuple[Card, ...]
    """The cards, the most severe first."""
    overflow: tuple[Card, ...]
    """The cards that there is no room for."""
    text: str
    """The sentence if there are no cards; otherwise empty."""

    @property
    def overflow_count(self) -> int:
        """The number of problems that have no room as a card."""
        return sum(1 + card.more for card in self.overflow)


async def read_live_state(api: ApiClient) -> LiveState:
    """Reads all parts at the same time. Raises ApiKeyRefusedError."""
    return LiveState(
        *await asyncio.gather(
            fetch_part(api.read(list[AgentHealth], "agents")),
            fetch_part(api.read(BreakerList, "breakers")),
            fetch_part(api.read(BudgetList, "budgets", {"used_from": USED_FROM})),
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
    problems = list(_problems(live_state))
    failed_share, wasted_share = shares(totals)
    if failed_share is not None and failed_share >= SOME_FAIL:
        severity: Severity = "critical" if failed_share >= MANY_FAIL else "warning"
        text = f"{words.percent(failed_share)} of executions failed {range_text}"
        problems.append(Problem("failures", severity, text, failed_url, failed_url))
    if problems:
        cards = _cards(problems)
        return OverallHealth(cards[0].tone, cards[:MAX_CARDS], cards[MAX_CARDS:], "")
    # If a part is missing, the page must not claim that all is well.
    if totals is None or live_state.problems:
        return OverallHealth("warn", (), (), "No problems are known, but not everything could be checked.")
    is_much_wasted = wasted_share is not None and wasted_share >= MUCH_WASTED
    if is_much_wasted or (failed_share is not None and failed_share >= FEW_FAIL):
        losses: list[str] = []
        if totals.dead_lettered:
            losses.append(f"{totals.dead_lettered:,} of {totals.executions:,} executions failed")
        if is_much_wasted:
            losses.append(f"{words.percent(wasted_share)} of spend was wasted")
        text = f"No problems now; {' and '.join(losses)} {range_text}."
        return OverallHealth("warn" if is_much_wasted else "", (), (), text)
    return OverallHealth("good", (), (), f"All is well: {_summary(totals, range_text)}.")


def is_spent(budget: BudgetStatus) -> bool:
    """Returns whether a limit is reached. A limit of zero does not count, because it is intentional."""
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


def _cards(problems: Iterable[Problem]) -> tuple[Card, ...]:
    """Makes a card for each kind of problem, the most severe first; its problem is the oldest of them."""
    groups: dict[tuple[str, Severity], list[Problem]] = {}
    for problem in sorted(problems, key=lambda problem: -SEVERITIES.index(problem.severity)):
        groups.setdefault((problem.kind, problem.severity), []).append(problem)
    return tuple(Card(min(group, key=_age), len(group) - 1) for group in groups.values())


def _age(problem: Problem) -> float:
    """A sort key: the oldest first, and those of unknown age last."""
    return float("inf") if problem.since is None else problem.since.timestamp()


def _problems(live_state: LiveState) -> Iterator[Problem]:
    """Yields the problems of the present state."""
    breakers = live_state.breakers.value
    refusing = [breaker for breaker in breakers.breakers if breaker.state != "closed"] if breakers else []
    yield from map(_of_breaker, refusing)
    if breakers and not breakers.alive:
        text = "Failures open no breaker, and none closes. `breakwater doctor` shows why."
        title = "No breaker service is running"
        yield Problem("breaker service", "critical", title, "/breakers", "/breakers", text)
    budget_list = live_state.budgets.value
    budgets = {} if budget_list is None else {budget.budget: budget for budget in budget_list.budgets}
    spent = [budget for budget in budgets.values() if is_spent(budget)] if budget_list and budget_list.filled else []
    yield from map(_of_budget, spent)
    if budget_list and not budget_list.filled:
        text = "Until then hard limits refuse calls."
        title = "The counters of limits are being rebuilt from the records"
        yield Problem("counters", "critical", title, "/budgets", "/budgets", text)
    yield from _of_queues(live_state.queues.value)
    open_places = {(breaker.agent, breaker.model) for breaker in refusing}
    spent_names = {budget.budget for budget in spent}
    for alert in live_state.incidents.value.alerts if live_state.incidents.value else ():
        event = began_with(alert)
        has_own_card = (
            (alert.agent, alert.model) in open_places if event == "breaker_open" else budget_of(alert) in spent_names
        )
        if alert.status != "acknowledged" and not has_own_card:
            yield _of_incident(alert, budgets)
    for agent in live_state.agents.value or ():
        # A breaker that is not closed has a card.
        if agent.health != "healthy" and all(model.breaker in (None, "closed") for model in agent.models):
            severity: Severity = "critical" if agent.health == "unhealthy" else "warning"
            title = f"{agent.agent_id} is {agent.health}"
            href = f"/agents/{segment(agent.agent_id)}"
            yield Problem("agent", severity, title, href, "/agents?sort=health", agent.health_reason)


def _of_breaker(breaker: BreakerStatus) -> Problem:
    agent = "all agents" if breaker.agent == "*" else breaker.agent
    place = {"agent": breaker.agent, "model": breaker.model}
    refused = f"It refuses only {breaker.open_for}. " if breaker.open_for and breaker.state == "open" else ""
    severity: Severity = "info"
    if breaker.state in _REFUSING:
        severity = "critical" if breaker.open_for is None else "warning"
    return Problem(
        "breaker",
        severity,
        f"The breaker of {agent} on {breaker.model} is {breaker.state.replace('_', '-')}",
        f"/breakers/one?{urlencode(place)}",
        "/breakers",
        f"{refused}{breaker.reason or ''}",
        breaker.since,
        Action(
            "Reset: let its calls through…",
            "/breakers/reset",
            place,
            f"The breaker of {agent} on {breaker.model} closes and forgets its failures, and a rate limit's hold ends: "
            "calls are let through again.",
            "Reset this breaker",
        ),
    )


def _of_budget(budget: BudgetStatus) -> Problem:
    is_hard = budget.enforcement == "hard"
    effect = "calls that might exceed it are refused" if is_hard else "calls continue, as it is a soft limit"
    return Problem(
        "budget",
        "critical" if is_hard and budget.scope in ("global", "agent") and budget.within is None else "warning",
        f"The {budget.window} limit of {owner_of(budget)} is exhausted",
        f"/budgets/{segment(budget.budget)}",
        "/budgets",
        f"{money(budget.spent)} of {money(budget.limit or 0)} is spent: {effect}.",
        raised_budget=budget,
    )


def _of_queues(queues: Queues | None) -> Iterator[Problem]:
    """Yields the services that are behind, and the agents whose jobs no worker runs."""
    for service in queues.services if queues else ():
        if service.waiting is None:
            title = f"{service.consumer} has no queue"
            yield Problem("service", "critical", title, "/#services", "/#services", "Run `breakwater setup`.")
        elif behind(service):
            title = f"{service.service} is behind by {service.waiting:,} messages"
            yield Problem("service", "critical", title, "/#services", "/#services")
    for agent in stuck(queues.agents if queues else ()):
        title = f"Jobs of {agent} are waiting and none is running"
        href = "/agents?sort=waiting"
        yield Problem("queue", "warning", title, f"/agents/{segment(agent)}", href)


def _of_incident(alert: Alert, budgets: Mapping[str, BudgetStatus]) -> Problem:
    event = began_with(alert)
    href = f"/alerts/{segment(alert.incident_id)}"
    problem = Problem(event, alert.severity, alert.title, href, "/alerts", alert.text, alert.opened_at)
    budget = budgets.get(budget_of(alert) or "")
    if budget is not None and budget.limit is not None:
        return replace(problem, raised_budget=budget)
    return replace(problem, action=_action_on(alert, event))


def _action_on(alert: Alert, event: str) -> Action:
    """The action that ends an incident; to acknowledge it where only people can end it."""
    names = {name: value for name, value in alert.payload.items() if isinstance(value, str)}
    if (
        event in ("retries_exhausted", "job_dead_lettered")
        and alert.agent
        and {"execution_id", "reason"} <= names.keys()
    ):
        since = alert.opened_at - _REPLAY_MARGIN
        fields = {"agent": alert.agent, "reason": names["reason"], "since": format_time(since)}
        return Action(
            "Replay: run its failed jobs again…",
            "/dead-letters/replay",
            {"all": "1", "window": "7d", "total": str(alert.count), **fields},
            f"All dead letters of {alert.agent} with the reason {names['reason']} since {moment(since)} run again as "
            "new executions, at their own cost; those that were replayed before do not.",
            "Replay them",
            reason="why",
        )
    if event == "guard_tripped" and "task_key" in names:
        return Action(
            "Reset: let the task continue…",
            "/breakers/tasks/reset",
            {"task_id": names["task_key"], "tenant": alert.tenant or ""},
            "Its counts are reset, and its next job runs.",
            "Let this task continue",
            approval=True,
        )
    return Action(
        "Acknowledge: end its reminders…",
        "/alerts/ack",
        {"incident_id": alert.incident_id},
        "Others see that you are on it, and no more reminders are sent.",
        "Acknowledge",
        approval=True,
    )
