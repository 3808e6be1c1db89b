"""The page of all plans: their states, costs and waste."""

from __future__ import annotations

from typing import Any

from starlette.routing import Route

from breakwater.identity.pages.rendering import API_CLICKHOUSE_S, NavigationLink, PageContext, PagePart, fetch_part
from breakwater.identity.pages.visits import Visit, page
from breakwater.jobs.contract.submission import PlanList
from breakwater.jobs.views.plans import COLUMNS
from breakwater.kernel.pages.tables import PageTable

MAX_PLANS = 50

LINK = NavigationLink("/plans", "Plans", "p")


def routes(context: PageContext) -> list[Route]:
    """The route of this page."""
    return [
        page(
            context,
            "/plans",
            "plans.html",
            view,
            plan_list=lambda _, models: fetch_part(
                models.api.read(PlanList, "plans", {"limit": MAX_PLANS}, timeout_s=API_CLICKHOUSE_S)
            ),
        )
    ]


def view(visit: Visit, plan_list: PagePart[PlanList]) -> dict[str, Any]:
    """The values of the page."""
    plans = plan_list.value.plans if plan_list.value else ()
    return {"table": PageTable(visit.address, "list", "Plans", COLUMNS, plans), "max_plans": MAX_PLANS}
