"""The page of an agent: its health, spend and waste, the success of its retries, its budgets."""

from __future__ import annotations

from collections.abc import Awaitable
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlencode

from starlette.routing import Route

from breakwater.alerts.contract import AlertList
from breakwater.breakers.contract import AgentHealth, BreakerList
from breakwater.client import ApiError
from breakwater.health.pages import tiles
from breakwater.health.pages.history import history_charts
from breakwater.health.pages.overall_health import is_spent, queue_of
from breakwater.health.pages.tiles import Tile
from breakwater.identity.pages.rendering import PageContext, PagePart, fetch_part, problems_of
from breakwater.identity.pages.visits import NotFound, PartReader, ReadModels, Visit, changes_reader, page, sums_reader
from breakwater.jobs.contract.execution import ExecutionSummary
from breakwater.kernel import formats
from breakwater.kernel.formats import quantity
from breakwater.kernel.http.contract import AgentQueue, Queues
from breakwater.kernel.pages import words
from breakwater.kernel.pages.time_range import BY_DATA
from breakwater.kernel.types import is_identifier
from breakwater.limits.contract import BudgetList
from breakwater.records import figures
from breakwater.records.events import ConfigChange
from breakwater.records.figures import History, RetryFigures, StreamLine, WasteLine
from breakwater.records.search import Filters, Page, search
from breakwater.records.views.executions import COLUMNS

T = TypeVar("T")

MAX_LATEST = 8
MAX_ERRORS = 20

LATEST_COLUMNS = [column for column in COLUMNS if column.key not in ("agent", "total_tokens", "error")]


def routes(context: PageContext) -> list[Route]:
    """The route of the page."""
    return [
        page(
            context,
            "/agents/{name:path}",
            "agent.html",
            view,
            default_range=BY_DATA,
            healths=lambda _, models: fetch_part(models.api.read(list[AgentHealth], "agents")),
            all_breakers=lambda _, models: fetch_part(models.api.read(BreakerList, "breakers")),
            all_budgets=_of_agent("budgets", BudgetList, BudgetList(filled=True, budgets=())),
            incidents=_of_agent("alerts", AlertList, AlertList(alerts=(), more=False, channels=1)),
            queues=lambda _, models: fetch_part(models.api.read(Queues, "queues")),
            history=sums_reader(figures.history),
            previous=sums_reader(figures.history, preceding=True),
            changes=changes_reader,
            waste=sums_reader(figures.waste),
            latest=_latest,
            errors=sums_reader(partial(figures.errors, limit=MAX_ERRORS)),
            retry_figures=sums_reader(figures.retries),
            refusals=sums_reader(figures.refusals),
            stream_lines=sums_reader(figures.streams),
        )
    ]


def _of_agent(path: str, form: type[T], default: T) -> PartReader:
    """Reads a part of the agent from the HTTP API; the part is `default` if no such agent is configured."""

    async def read_part(visit: Visit, models: ReadModels) -> T:
        try:
            return await models.api.read(form, path, {"agent": visit.path_params["name"]})
        except ApiError as error:
            if error.code != "unknown_agent":
                raise
            return default

    return lambda visit, models: fetch_part(read_part(visit, models))


def _latest(visit: Visit, models: ReadModels) -> Awaitable[PagePart[Page[ExecutionSummary]]]:
    window = visit.time_range.window
    filters = Filters(agent=visit.path_params["name"], since=window.start, until=window.end)
    return fetch_part(search(models.analytics, filters, limit=MAX_LATEST))


def view(
    visit: Visit,
    healths: PagePart[list[AgentHealth]],
    all_breakers: PagePart[BreakerList],
    all_budgets: PagePart[BudgetList],
    incidents: PagePart[AlertList],
    queues: PagePart[Queues],
    history: PagePart[History],
    previous: PagePart[History],
    changes: PagePart[tuple[ConfigChange, ...]],
    waste: PagePart[tuple[WasteLine, ...]],
    retry_figures: PagePart[RetryFigures],
    stream_lines: PagePart[tuple[StreamLine, ...]],
    **errors_and_latest: PagePart[Any],
) -> dict[str, Any] | NotFound:
    """The values of the page; its status is 404 if nothing is known about the agent."""
    time_range = visit.time_range
    name = visit.path_params["name"]
    if not is_identifier(name):
        return NotFound("Page not found", f"There is no page at {visit.address.path}.")
    totals = history.value and history.value.totals
    health = next((candidate for candidate in healths.value or () if candidate.agent_id == name), None)
    breakers = all_breakers.value.breakers if all_breakers.value else ()
    own_budgets = (
        [budget for budget in all_budgets.value.budgets if budget.agent == name] if all_budgets.value else None
    )
    present_tiles = [_jobs(name, queue_of(queues.value, name)), tiles.incidents(incidents.value)]
    if own_budgets is not None:
        present_tiles.append(
            tiles.spent_budgets(
                own_budgets, sum(bool(budget.limit) for budget in own_budgets), "#budgets", "it has none of its own"
            )
        )
    if totals is not None:
        fallbacks = quantity(totals.fallbacks, "fallback")
        present_tiles.append(Tile("Retries", f"{totals.retries:,}", fallbacks, "#retries"))
    is_known = (
        health is not None
        or healths.value is None
        or totals is None
        or totals.executions
        or totals.calls
        or totals.short_circuits
    )
    parts = (healths, all_breakers, all_budgets, incidents, queues, history, waste, retry_figures, stream_lines)
    return {
        "status": 200 if is_known else 404,
        "name": name,
        "is_known": is_known,
        "health": health,
        "configured": healths.value is not None,
        "breakers": {breaker.model: breaker for breaker in breakers if breaker.agent == name},
        "past_tiles": tiles.pending() if history.pending else tiles.of_history(totals, time_range, name),
        "present_tiles": present_tiles,
        "problems": problems_of(*parts, *errors_and_latest.values()),
        "pending": history.pending,
        "history_charts": history.value
        and history_charts(
            history.value.steps,
            time_range.window,
            name,
            previous_steps=previous.value.steps if previous.value else (),
            changes=changes.value or (),
        ),
        "all_waste": sum(line.cost for line in waste.value or ()),
        "unknown_waste": totals and totals.unknown_waste,
        "retries": retry_figures.value,
        "retry_benefit": retry_benefit(retry_figures.value, time_range.words) if retry_figures.value else None,
        "streams": stream_lines.value,
        "budgets": own_budgets,
        "spent": is_spent,
        "latest_columns": LATEST_COLUMNS,
    }


def retry_benefit(figures: RetryFigures, range_text: str) -> tuple[str, ...]:
    """Describes the benefit of retries and fallbacks in sentences.

    Args:
        figures: the figures of retries.
        range_text: words for the time range, such as `in the last 24h`.
    """
    if not figures.retried and not figures.fell_back:
        return (f"Nothing was retried {range_text}.",)
    sentences: list[str] = []
    if figures.retried:
        outcome = _outcome(figures.saved, figures.retried, "were retried", figures.rate)
        cost = formats.money(figures.cost)
        sentences.append(f"{_verdict('Retrying', figures.rate)}: {outcome}. The retries cost {cost}.")
    if figures.fell_back:
        outcome = _outcome(figures.saved_by_fallback, figures.fell_back, "fell back", figures.fallback_rate)
        sentences.append(f"{_verdict('Falling back to another model', figures.fallback_rate)}: {outcome}.")
    return tuple(sentences)


def _verdict(action: str, rate: float | None) -> str:
    share = rate or 0.0
    return f"{action} {'helped' if share >= 0.5 else 'sometimes helped' if share > 0 else 'did not help'}"


def _outcome(saved: int, tried: int, action: str, rate: float | None) -> str:
    if tried == 1:
        return f"the one execution that {action.replace('were', 'was')} {'succeeded' if saved else 'failed'}"
    return f"{saved:,} of {tried:,} executions that {action} succeeded ({words.percent(rate)})"


def _jobs(name: str, queue: AgentQueue | None) -> Tile:
    label = "Jobs waiting now"
    href = f"/now?{urlencode({'agent': name})}"
    if queue is None:
        return tiles.unknown(label, href)
    if queue.waiting is None:
        return Tile(label, "–", "it has no queue", href)
    note = f"{queue.in_progress:,} running, of {queue.concurrency:,} in parallel"
    return Tile(label, f"{queue.waiting:,}", note, href, "warn" if queue.waiting and not queue.in_progress else "")
