"""All plans: the state of each, its cost and its waste."""

from __future__ import annotations

from starlette.routing import Route

from breakwater.contracts.submission import PlanList
from breakwater.views.plans import COLUMNS
from services.console.pages import Fetched, PageContext, fetched
from services.console.tables import PageTable
from services.console.visits import ReadModels, View, Visit, page

MOST = 50


def routes(context: PageContext) -> list[Route]:
    """The route of this page."""
    return [page(context, "/plans", "plans.html", read, view)]


async def read(_: Visit, sources: ReadModels) -> tuple[Fetched[PlanList]]:
    """The newest plans."""
    return (await fetched(sources.api.read(PlanList, "plans", {"limit": MOST})),)


def view(visit: Visit, found: Fetched[PlanList]) -> View:
    """A table of the plans."""
    plans = found.value.plans if found.value else ()
    return {"found": found, "table": PageTable(visit.address, "list", "Plans", COLUMNS, plans), "most": MOST}
