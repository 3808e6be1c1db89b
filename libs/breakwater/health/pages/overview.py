"""The first page: overall health, spend, errors, waste, providers and services."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from typing import Any, get_args

from starlette.routing import Route

from breakwater.breakers.contract import AgentHealth
from breakwater.breakers.rules.health import Verdict
from breakwater.health.pages import tiles
from breakwater.health.pages.history import history_charts
from breakwater.health.pages.overall_health import LiveState, behind, overall_health, read_live_state
from breakwater.health.rules import combine
from breakwater.identity.pages.rendering import NavigationLink, PageContext, PagePart, problems_of
from breakwater.identity.pages.visits import Visit, changes_reader, page, sums_reader
from breakwater.kernel.http.contract import ServiceQueue
from breakwater.kernel.nats import topology
from breakwater.kernel.nats.subjects import decode_token
from breakwater.kernel.pages.time_range import BY_DATA, TimeRange
from breakwater.kernel.pages.words import segment
from breakwater.records import figures
from breakwater.records.events import ConfigChange
from breakwater.records.figures import History, Spender, SpendLine

MAX_CAUSES = 3
"""Maximum number of rows of the tables of errors and waste."""
MAX_SPENDERS = 5

_SPENDERS: tuple[Spender, ...] = get_args(Spender)
_CHANNEL = topology.alert_consumer("x").removesuffix("x")
_TASKS = {
    "breaker": "counts failures",
    "budget": "counts what calls cost",
    topology.ALERTER_EVENTS: "raises alerts on breakers, budgets and guards",
    topology.ALERTER_EXECUTIONS: "raises alerts on how executions end",
    topology.ALERTER_DEAD_LETTERS: "raises alerts on dead letters",
    topology.ALERTER_REPLAYS: "retries alerts",
    "sink-events": "stores events",
    "sink-alerts": "stores incidents",
    "sink-audit": "stores the audit log",
}

LINK = NavigationLink("/", "Overview", "o")


def routes(context: PageContext) -> list[Route]:
    """The routes of this page."""
    return [
        page(
            context,
            "/",
            "overview.html",
            view,
            default_range=BY_DATA,
            live_state=lambda _, models: read_live_state(models.api),
            history=sums_reader(figures.history),
            previous=sums_reader(figures.history, preceding=True),
            changes=changes_reader,
            refusals=sums_reader(figures.refusals),
            errors=sums_reader(partial(figures.errors, limit=MAX_CAUSES)),
            waste=sums_reader(figures.waste),
            providers=sums_reader(figures.providers),
            spenders=lambda visit, models: sums_reader(
                partial(figures.spend_by, by=_spender(visit), limit=MAX_SPENDERS)
            )(visit, models),
        )
    ]


def view(
    visit: Visit,
    live_state: LiveState,
    history: PagePart[History],
    previous: PagePart[History],
    changes: PagePart[tuple[ConfigChange, ...]],
    **_: object,
) -> dict[str, Any]:
    """The values of the page."""
    time_range = visit.time_range
    by = _spender(visit)
    queues = live_state.queues.value
    totals = history.value and history.value.totals
    return {
        "health": overall_health(totals, live_state, time_range.words, time_range.executions(status="dead_lettered")),
        "past_tiles": tiles.pending() if history.pending else tiles.of_history(totals, time_range),
        "present_tiles": tiles.of_now(live_state),
        "history_charts": history.value
        and history_charts(
            history.value.steps,
            time_range.window,
            previous_steps=previous.value.steps if previous.value else (),
            changes=changes.value or (),
        ),
        "unknown_waste": totals and totals.unknown_waste,
        "by": by,
        "tabs": [(spender, visit.address.link("spend", by=spender), spender == by) for spender in _SPENDERS],
        "address": partial(_address, time_range, by),
        "behind": behind,
        "problems": problems_of(history),
        "provider_health": _provider_health(live_state.agents.value or ()),
        "late": [service for service in queues.services if behind(service)] if queues else [],
        "task_of": task_of,
        "max_causes": MAX_CAUSES,
        "max_spenders": MAX_SPENDERS,
    }


def _provider_health(agents: Iterable[AgentHealth]) -> dict[tuple[str | None, str], Verdict]:
    """Combines the health of each provider's model over all agents that call it."""
    verdicts: dict[tuple[str | None, str], dict[str, Verdict]] = defaultdict(dict)
    for agent in agents:
        for model in agent.models:
            verdicts[model.provider, model.model][agent.agent_id] = Verdict(model.health, model.health_reason)
    return {key: combine(models) for key, models in verdicts.items()}


def _spender(visit: Visit) -> Spender:
    spender = visit.get("by")
    return spender if spender in _SPENDERS else "agent"


def _address(time_range: TimeRange, by: Spender, line: SpendLine) -> str | None:
    """The URL of a spender's page; None if the spender has no name."""
    if line.key is None:
        return None
    return f"/agents/{segment(line.key)}" if by == "agent" else time_range.executions(**{by: line.key})


def task_of(queue: ServiceQueue) -> str:
    """Describes why a service reads a queue."""
    if queue.consumer.startswith(_CHANNEL):
        return f"delivers alerts to the channel {decode_token(queue.consumer.removeprefix(_CHANNEL))}"
    return _TASKS.get(queue.consumer, f"reads {queue.stream}")
