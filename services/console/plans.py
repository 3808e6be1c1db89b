"""All plans: how each stands, and what it has cost and wasted."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from breakwater.contracts.submission import PlanList, PlanStatus
from services.console.pages import PageContext, fetched
from services.console.sessions import session_of
from services.console.tables import TableColumn, table_of

MOST = 50

COLUMNS: tuple[TableColumn[PlanStatus], ...] = (
    TableColumn("plan", "Plan", lambda plan: plan.plan_id),
    TableColumn("state", "State", lambda plan: plan.state),
    TableColumn("jobs", ">Jobs", lambda plan: sum(plan.jobs_by_status.values()), largest_first=True),
    TableColumn("cost", ">Cost", lambda plan: plan.total_cost, usd=True, largest_first=True),
    TableColumn("wasted", ">Wasted", lambda plan: plan.wasted_cost, usd=True, largest_first=True),
    TableColumn("cost_basis", "", lambda plan: plan.cost_basis),
    TableColumn("queued", "First queued", lambda plan: plan.first_queued_at, largest_first=True),
    TableColumn("ended", "Last ended", lambda plan: plan.last_completed_at, largest_first=True),
)


def routes(context: PageContext) -> list[Route]:
    """The route of this page."""

    async def show(request: Request) -> Response:
        found = await fetched(session_of(request).api.read(PlanList, "plans", {"limit": MOST}))
        plans = found.value.plans if found.value else ()
        return context.pages.render(
            request, "plans.html", found=found, table=table_of(request, "list", "Plans", COLUMNS, plans), most=MOST
        )

    return [Route("/plans", show, methods=["GET"])]
