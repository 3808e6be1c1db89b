"""The lists that the command line and the console both show, each from the columns of one view.

What the columns show has tests beside the view. A face needs to show them at all: `tests/cli/test_listings.py` and
`tests/services/console/test_listings.py` go through all of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from breakwater.alerts.contract import Alert, UndeliveredAlert
from breakwater.alerts.views import INCIDENTS, UNDELIVERED
from breakwater.breakers.contract import AgentHealth, BreakerStatus
from breakwater.breakers.views import COLUMNS as BREAKERS
from breakwater.health.views import HEALTH
from breakwater.jobs.contract.dead_letters import ListedDeadLetter
from breakwater.jobs.contract.submission import PlanStatus
from breakwater.jobs.views.dead_letters import COLUMNS as DEAD_LETTERS
from breakwater.jobs.views.plans import COLUMNS as PLANS
from breakwater.kernel.columns import Column
from breakwater.limits.contract import BudgetStatus, ListedLimit, StoppedTask
from breakwater.limits.views import COLUMNS as BUDGETS
from breakwater.limits.views import LISTED_LIMITS, TASKS
from tests import api_documents as documents

EVIL = '<script>alert("1")</script>'
"""What a person, a model or a provider may have written into any text."""


@dataclass(frozen=True, slots=True)
class Listing:
    """One list.

    Attributes:
        command: the command that prints it, which is also its group's default where it ends with `list`.
        query: what the command asks the API for, without options.
        page: the page of the console that it is on.
        table: the table's name there, for its file; empty where the page shows other columns.
        path: where the API returns it, below `/api/v1`.
        document: what the API returns: one row, whose long text is evil.
        row: the row, parsed.
        columns: the view's.
        nothing: what the API returns without a row.
        none: how a terminal and how the page say that; empty where the page needs ClickHouse to know.
    """

    command: tuple[str, ...]
    query: dict[str, str]
    page: str
    table: str
    path: str
    document: Any
    row: Any
    columns: Sequence[Column[Any]]
    nothing: Any
    none: tuple[str, str]

    def __str__(self) -> str:
        return " ".join(self.command)


def _listing(
    command: str,
    page: str,
    path: str,
    row: tuple[type[Any], documents.Document],
    columns: Sequence[Column[Any]],
    envelope: tuple[str, documents.Document],
    none: tuple[str, str],
    query: dict[str, str] | None = None,
) -> Listing:
    model, document = row
    name, rest = envelope
    address, _, table = page.partition("#")
    return Listing(
        tuple(command.split()),
        query or {},
        address,
        table,
        path,
        {name: [document], **rest} if name else [document],
        model.model_validate(document),
        columns,
        {name: [], **rest} if name else [],
        none,
    )


LISTINGS = (
    _listing(
        "agents list",
        "/agents#",
        "agents",
        (AgentHealth, documents.health("writer", "degraded") | {"health_reason": EVIL}),
        HEALTH,
        ("", {}),
        ("no agents are configured", ""),
    ),
    _listing(
        "breakers list",
        "/breakers#breakers",
        "breakers",
        (BreakerStatus, documents.breaker(state="isolated", reason=EVIL)),
        BREAKERS,
        ("breakers", {"alive": True}),
        ("no agent has a breaker: the config sets `breaker: off` for all", "No breakers"),
    ),
    _listing(
        "guards list",
        "/breakers#tasks",
        "guards",
        (StoppedTask, documents.stopped_task(reason=EVIL)),
        TASKS,
        ("stopped", {}),
        ("no task is stopped", "No task is stopped"),
    ),
    _listing(
        "limits list",
        "/limits#all",
        "limits",
        (ListedLimit, documents.limit(f"tenant:{EVIL}", id="own", reason=EVIL)),
        LISTED_LIMITS,
        ("limits", {}),
        ("there are no limits; see `breakwater limits set --help`", "No limits"),
        {"limit": "1000"},
    ),
    _listing(
        "budgets list",
        "/budgets#day",
        "budgets",
        (BudgetStatus, documents.budget(f"tenant:{EVIL}/daily")),
        BUDGETS,
        ("budgets", {"filled": True}),
        ("there are no budgets", "Nothing spent"),
    ),
    _listing(
        "alerts list",
        "/alerts#now",
        "alerts",
        (Alert, documents.incident(title=EVIL)),
        INCIDENTS,
        ("alerts", {"more": False, "channels": 1}),
        ("no incident is unresolved", "All is well"),
        {"status": "unresolved", "limit": "100"},
    ),
    _listing(
        "alerts undelivered",
        "/alerts#undelivered",
        "alerts/undelivered",
        (UndeliveredAlert, documents.undelivered(error=EVIL)),
        UNDELIVERED,
        ("undelivered", {"more": False, "channels": 1}),
        ("every alert has arrived, or is on its way", "Every alert was delivered"),
        {"limit": "100"},
    ),
    _listing(
        "dlq list",
        "/dead-letters#list",
        "dlq",
        (ListedDeadLetter, documents.dead_letter(error=EVIL)),
        DEAD_LETTERS,
        ("dead_letters", {"more": False, "counts": []}),
        ("nothing was given up within 7 days", "No dead letters"),
        {"limit": "100"},
    ),
    _listing(
        "plans list",
        "/plans#list",
        "plans",
        (PlanStatus, documents.plan(EVIL)),
        PLANS,
        ("plans", {}),
        ("no plans", "No plans"),
        {"limit": "20"},
    ),
)
