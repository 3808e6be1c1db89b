"""The first page: overall health, spend, failures with their causes, and waste."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from typing import Any, get_args

from starlette.routing import Route

from breakwater.breakers.contract import AgentHealth
from breakwater.health.pages import tiles
from breakwater.health.pages.history import history_charts
from breakwater.health.pages.overall_health import Live, behind, live, overall_health
from breakwater.health.rules import Verdict, combined
from breakwater.identity.pages.pages import Fetched, PageContext, problems_of
from breakwater.identity.pages.visits import Visit, page, summed
from breakwater.kernel.http.contract import ServiceQueue
from breakwater.kernel.nats import topology
from breakwater.kernel.nats.subjects import decode_token
from breakwater.kernel.pages.time_range import BY_DATA, TimeRange
from breakwater.kernel.pages.words import segment
from breakwater.records import figures
from breakwater.records.figures import History, Spender, SpendLine

CAUSES, SHOWN = 3, 5
"""Rows of the tables of failures and waste, and of spenders."""

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


def routes(context: PageContext) -> list[Route]:
    """The routes of this page."""
    return [
        page(
            context,
            "/",
            "overview.html",
            view,
            default_range=BY_DATA,
            live=lambda _, models: live(models.api),
            history=summed(figures.history),
            held=summed(figures.refusals),
            errors=summed(partial(figures.errors, limit=CAUSES)),
            waste=summed(figures.waste),
            providers=summed(figures.providers),
            spenders=lambda visit, models: summed(partial(figures.spend_by, by=_spender(visit), limit=SHOWN))(
                visit, models
            ),
        )
    ]


def view(visit: Visit, live: Live, history: Fetched[History], **_: object) -> dict[str, Any]:
    """The sentence, the tiles and the charts of the page."""
    time_range, by, queues = visit.time_range, _spender(visit), live.queues.value
    totals = history.value and history.value.totals
    return {
        "health": overall_health(totals, live, time_range.words, time_range.executions(status="dead_lettered")),
        "past_tiles": tiles.pending() if history.pending else tiles.of_history(totals, time_range),
        "present_tiles": tiles.of_now(live),
        "history_charts": history.value and history_charts(history.value.steps, time_range.window),
        "unknown_waste": totals and totals.unknown_waste,
        "by": by,
        "tabs": [(one, visit.address.link("spend", by=one), one == by) for one in _SPENDERS],
        "address": partial(_address, time_range, by),
        "behind": behind,
        "problems": problems_of(history),
        "provider_health": _provider_health(live.agents.value or ()),
        "late": [one for one in queues.services if behind(one)] if queues else [],
        "task_of": task_of,
        "causes": CAUSES,
        "shown": SHOWN,
    }


def _provider_health(agents: Iterable[AgentHealth]) -> dict[tuple[str | None, str], Verdict]:
    """The health of each provider's model, over all agents that call it."""
    found: dict[tuple[str | None, str], dict[str, Verdict]] = defaultdict(dict)
    for agent in agents:
        for model in agent.models:
            found[model.provider, model.model][agent.agent_id] = Verdict(model.health, model.health_reason)
    return {key: combined(models) for key, models in found.items()}


def _spender(visit: Visit) -> Spender:
    wanted = visit.get("by")
    return wanted if wanted in _SPENDERS else "agent"


def _address(time_range: TimeRange, by: Spender, line: SpendLine) -> str | None:
    """The page of a spender; None if it has no name."""
    if line.key is None:
        return None
    return f"/agents/{segment(line.key)}" if by == "agent" else time_range.executions(**{by: line.key})


def task_of(queue: ServiceQueue) -> str:
    """The task for which a service reads a queue, in words."""
    if queue.consumer.startswith(_CHANNEL):
        return f"delivers alerts to the channel {decode_token(queue.consumer.removeprefix(_CHANNEL))}"
    return _TASKS.get(queue.consumer, f"reads {queue.stream}")
