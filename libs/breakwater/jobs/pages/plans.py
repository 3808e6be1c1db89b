"""All plans: the state of each, its cost and its waste."""

from __future__ import annotations

from typing import Any

from starlette.routing import Route

from breakwater.identity.pages.pages import API_CLICKHOUSE_S, Fetched, PageContext, fetched
from breakwater.identity.pages.visits import Visit, page
from breakwater.jobs.contract.submission import PlanList
from breakwater.jobs.views.plans import COLUMNS
from breakwater.kernel.pages.tables import PageTable

MOST = 50


def routes(context: PageContext) -> list[Route]:
    """The route of this page."""
    return [
        page(
            context,
            "/plans",
            "plans.html",
            view,
            found=lambda _, models: fetched(
                models.api.read(PlanList, "plans", {"limit": MOST}, timeout_s=API_CLICKHOUSE_S)
            ),
        )
    ]


def view(visit: Visit, found: Fetched[PlanList]) -> dict[str, Any]:
    """A table of the plans."""
    plans = found.value.plans if found.value else ()
    return {"table": PageTable(visit.address, "list", "Plans", COLUMNS, plans), "most": MOST}
