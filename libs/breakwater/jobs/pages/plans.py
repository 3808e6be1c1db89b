"""The pages of plans: their states, costs and waste, and each with the graph of its jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from starlette.routing import Route

from breakwater.client import ApiError
from breakwater.identity.pages.rendering import API_CLICKHOUSE_S, NavigationLink, PageContext, PagePart, fetch_part
from breakwater.identity.pages.visits import NotFound, ReadModels, Visit, page
from breakwater.jobs.contract.submission import PlanJob, PlanList, PlanStatus
from breakwater.jobs.rules.plan_graph import PlanNode, plan_graph
from breakwater.jobs.rules.record import sum_of_known
from breakwater.jobs.views.plans import COLUMNS, JOBS
from breakwater.kernel.columns import Column, humanize
from breakwater.kernel.formats import money, quantity
from breakwater.kernel.pages.tables import PageTable
from breakwater.kernel.pages.words import segment

MAX_PLANS = 50
MAX_ROWS = 200
"""Maximum number of jobs in the table of a plan; the CSV has all."""

NODE_WIDTH = 190
NODE_HEIGHT = 44
COLUMN_WIDTH = 240
ROW_HEIGHT = 54
MARGIN = 4
_MAX_TEXT = 22

TONES = {"succeeded": "good", "partial": "warn", "cancelled": "warn", "dead_lettered": "bad", "failed": "bad"}
"""The tones of the states of plans and their jobs; others have none. A job that is pending only waits for its turn."""

LINK = NavigationLink("/plans", "Plans", "p")


@dataclass(frozen=True, slots=True)
class DrawnNode:
    """A node of a plan's graph, at its place in pixels."""

    node: PlanNode
    x: int
    y: int
    href: str
    """The URL of its execution, or of those of its jobs that have ended."""

    @property
    def title(self) -> str:
        """The name of its job, or the number of its jobs."""
        [first, *more] = self.node.jobs
        name = f"{len(self.node.jobs):,} × {self.node.agent}" if more else first.job_id
        return name if len(name) <= _MAX_TEXT else f"{name[: _MAX_TEXT - 9]}…{name[-8:]}"

    @property
    def state(self) -> str:
        """The state of its jobs, and what those that have ended cost: `succeeded, $0.10`."""
        ended = [job for job in self.node.jobs if job.completed_at is not None]
        cost = f", {money(sum_of_known(job.total_cost for job in ended))}" if ended else ""
        return f"{humanize(self.node.status)}{cost}"

    @property
    def tooltip(self) -> str:
        """All that there is to say about it."""
        jobs = self.node.jobs
        names = ", ".join(job.job_id for job in jobs[:20]) + (f" and {len(jobs) - 20:,} more" if len(jobs) > 20 else "")
        return f"{quantity(len(jobs), 'job')} of {self.node.agent}: {names}"


@dataclass(frozen=True, slots=True)
class PlanDrawing:
    """The graph of a plan, in pixels."""

    width: int
    height: int
    nodes: tuple[DrawnNode, ...]
    edges: tuple[str, ...]
    """The paths of the edges, as SVG writes them."""
    is_merged: bool
    """True if some nodes stand for several jobs."""


def routes(context: PageContext) -> list[Route]:
    """The routes of these pages."""
    return [
        page(
            context,
            "/plans",
            "plans.html",
            view,
            plan_list=lambda _, models: fetch_part(
                models.api.read(PlanList, "plans", {"limit": MAX_PLANS}, timeout_s=API_CLICKHOUSE_S)
            ),
        ),
        page(context, "/plans/{plan_key:path}", "plan.html", view_plan, plan_part=_plan),
    ]


def view(visit: Visit, plan_list: PagePart[PlanList]) -> dict[str, Any]:
    """The values of the page."""
    plans = plan_list.value.plans if plan_list.value else ()
    return {"table": PageTable(visit.address, "list", "Plans", COLUMNS, plans), "max_plans": MAX_PLANS, "tones": TONES}


async def _plan(visit: Visit, models: ReadModels) -> PagePart[PlanStatus] | ApiError:
    """Reads a plan. Returns the error of the HTTP API if it does not exist."""
    path = f"plans/{segment(visit.path_params['plan_key'])}"
    try:
        return PagePart(await models.api.read(PlanStatus, path, timeout_s=API_CLICKHOUSE_S))
    except ApiError as error:
        return error if error.status == 404 else PagePart(None, error.message)


def view_plan(visit: Visit, plan_part: PagePart[PlanStatus] | ApiError) -> dict[str, Any] | NotFound:
    """The values of the page of a plan."""
    if isinstance(plan_part, ApiError):
        return NotFound("Plan not found", plan_part.message)
    plan = plan_part.value
    jobs = plan.jobs if plan else ()
    own_ids = {job.execution_id: job.job_id for job in jobs}

    def dependencies(job: PlanJob) -> str:
        return ", ".join(own_ids.get(needed, needed) for needed in job.depends_on)

    columns: tuple[Column[PlanJob], ...] = (
        *JOBS,
        Column("wasted", lambda job: job.wasted_cost if job.completed_at else "", "usd"),
        Column("depends on", dependencies, below=True),
    )
    return {
        "plan": plan,
        "problem": plan_part.problem,
        "tones": TONES,
        "drawing": None if plan is None else drawing_of(plan),
        "jobs_table": PageTable(visit.address, "jobs", "Jobs", columns, jobs, max_rows=MAX_ROWS),
    }


def drawing_of(plan: PlanStatus) -> PlanDrawing | None:
    """Draws the graph of a plan; None if no dependencies are known."""
    nodes = plan_graph(plan.jobs)
    if not any(node.dependencies for node in nodes):
        return None
    drawn_nodes = [DrawnNode(node, *_place(node.column, node.row), _href(plan, node.jobs)) for node in nodes]
    edges = [_path(nodes[needed], node) for node in nodes for needed in node.dependencies]
    last_row = max(max(node.row, *node.passed_rows) if node.passed_rows else node.row for node in nodes)
    last_x, last_y = _place(nodes[-1].column, last_row)
    return PlanDrawing(
        last_x + NODE_WIDTH + MARGIN,
        last_y + NODE_HEIGHT + MARGIN,
        tuple(drawn_nodes),
        tuple(edges),
        len(nodes) < len(plan.jobs),
    )


def _place(column: int, row: int) -> tuple[int, int]:
    return MARGIN + column * COLUMN_WIDTH, MARGIN + row * ROW_HEIGHT


def _href(plan: PlanStatus, jobs: Sequence[PlanJob]) -> str:
    first = jobs[0]
    if len(jobs) == 1:
        return f"/executions/{segment(first.execution_id)}"
    filters = {"window": "30d", "plan_id": plan.plan_key, "agent": first.agent}
    return f"/executions?{urlencode(filters | ({'status': first.status} if first.completed_at else {}))}"


def _path(needed: PlanNode, node: PlanNode) -> str:
    """The line from the right side of a node to the left side of one that depends on it, past those between them."""
    bend = (COLUMN_WIDTH - NODE_WIDTH) // 2
    x, y = _place(needed.column, needed.row)
    path = f"M{x + NODE_WIDTH} {y + NODE_HEIGHT // 2}"
    stops = [*needed.passed_rows[: node.column - needed.column - 1], node.row]
    for column, row in enumerate(stops, needed.column + 1):
        next_x, next_y = _place(column, row)
        curve = (x + NODE_WIDTH + bend, y, next_x - bend, next_y, next_x, next_y)
        path += "C" + " ".join(str(size + NODE_HEIGHT // 2 if index % 2 else size) for index, size in enumerate(curve))
        if column < node.column:
            path += f"H{next_x + NODE_WIDTH}"
        x = next_x
        y = next_y
    return path
