"""Tables of the pages: their order and filter as the URL says, and the same as CSV."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import parse_qsl
from zoneinfo import ZoneInfo

import pytest

from breakwater.client import ApiClient
from breakwater.identity.contract import KeyDetails
from breakwater.identity.pages.rendering import PagePart
from breakwater.identity.pages.sessions import CachedSession, Session
from breakwater.identity.pages.visits import Visit
from breakwater.jobs.contract.submission import PlanList
from breakwater.jobs.pages import plans as plans_page
from breakwater.kernel.clickhouse.client import connect
from breakwater.kernel.columns import Column
from breakwater.kernel.pages.tables import PageTable, TableUrl, csv_text
from breakwater.local.ports import free_port
from tests.api_documents import plan
from tests.cli.api_stub import Stub
from tests.services.console.conftest import Console, Page, key_with, visiting
from tests.services.console.test_executions import ended, store
from tests.tables import each_row


@dataclass(frozen=True)
class Row:
    name: str
    cost: int | None = None
    at: datetime | None = None


COLUMNS: tuple[Column[Row], ...] = (
    Column("name", lambda row: row.name),
    Column("cost", lambda row: row.cost, "usd"),
    Column("at", lambda row: row.at, "time", page=False),
    Column("chart", None),
)
ROWS = (Row("b", 1), Row("A", None), Row("c", 3), Row("d", 1))


def table(query: str = "", max_rows: int | None = None) -> PageTable[Row]:
    return PageTable(TableUrl("/p", dict(parse_qsl(query))), "t", "Things", COLUMNS, ROWS, max_rows=max_rows)


@each_row(
    ("query", "names"),
    [
        ("", "bAcd"),
        ("t.sort=name", "Abcd"),
        ("t.sort=-name", "dcbA"),
        ("t.sort=cost", "cbdA"),
        ("t.sort=-cost", "bdcA"),
        ("t.sort=at", "bAcd"),
        ("t.sort=nonsense", "bAcd"),
        ("other.sort=name", "bAcd"),
        ("t.find=a", "A"),
        ("t.find=0.000000001&t.sort=-name", "db"),
        ("t.find=nobody", ""),
    ],
)
def test_rows_are_sorted_and_filtered_as_the_url_says(query: str, names: str) -> None:
    assert "".join(row.name for row in table(query).rows) == names


def test_headings_lead_to_their_order_and_back_and_keep_the_rest_of_the_url() -> None:
    [name, cost, chart] = table("window=1h&t.sort=cost&other.find=x").headings
    assert (name.sorted, cost.sorted, chart.sorted) == (None, "descending", None)
    assert (name.column.heading, cost.column.is_right_aligned) == ("Name", True)
    assert name.link == "/p?window=1h&t.sort=name&other.find=x#t"
    assert cost.link == "/p?window=1h&t.sort=-cost&other.find=x#t"
    assert chart.link is None
    assert table("t.sort=-cost").headings[1].sorted == "ascending"


def test_a_file_has_all_rows_with_exact_amounts_and_no_formula() -> None:
    shown = table("t.sort=name", max_rows=2)
    assert (len(shown.rows), shown.more, shown.count) == (2, 2, 4)
    assert csv_text(COLUMNS, table("t.sort=cost&csv=t", max_rows=2).ordered) == (
        "name,cost_usd,at\r\nc,0.000000003,\r\nb,0.000000001,\r\nd,0.000000001,\r\nA,,\r\n"
    )
    at = datetime(2026, 11, 21, 10, tzinfo=UTC)
    odd = [Row('=HYPERLINK("x")', -5, at), Row("-1"), Row("@x, y"), Row("plain")]
    assert list(csv.reader(io.StringIO(csv_text(COLUMNS, odd, head=False)))) == [
        ['\'=HYPERLINK("x")', "-0.000000005", "2026-11-21T10:00:00.000Z"],
        ["'-1", "", ""],
        ["'@x, y", "", ""],
        ["plain", "", ""],
    ]


def read(page: Page) -> list[dict[str, str]]:
    assert (page.status, page.headers["Content-Type"]) == (200, "text/csv; charset=utf-8")
    assert page.headers["Content-Disposition"].startswith("attachment; filename=")
    return list(csv.DictReader(io.StringIO(page.text, newline="")))


async def test_executions_are_sorted_over_all_that_match_and_all_are_saved(
    console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("breakwater.records.pages.executions.SAVED_ROWS_PER_QUERY", 50)
    await store(
        console,
        *(ended(number, total_cost=number * 1_000 + 1 if number % 10 else None) for number in range(1, 121)),
        ended(130, agent="reader", total_cost=10**9),
    )

    def first(page: Page) -> list[str]:
        return [part.split('"')[0] for part in page.text.split('href="/executions/')[1:]]

    dearest = await console.get("/executions?agent=writer&sort=total_cost")
    assert first(dearest)[:3] == ["job-119", "job-118", "job-117"]
    assert len(first(dearest)) == 50
    assert 'aria-sort="descending"><a href="/executions?agent=writer&amp;sort=-total_cost#list"' in dearest.text
    assert 'name="sort" value="total_cost"' in dearest.text, "a filter keeps the order"
    assert 'rel="next"' not in dearest.text
    assert first(await console.get("/executions?sort=-total_cost"))[:2] == ["job-001", "job-002"]
    saved = read(await console.get("/executions?agent=writer&csv=list"))
    assert [row["id"] for row in saved] == [f"job-{number:03}" for number in range(1, 121)]
    assert [row["total_cost_usd"] for row in saved[8:11]] == ["0.000009001", "", "0.000011001"]
    wrong = await console.get("/executions?min_cost=much&csv=list")
    assert (wrong.status, "is not an amount" in wrong.words) == (400, True)


async def test_without_clickhouse_nothing_is_saved_and_the_reason_is_shown(interface: Stub) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}/breakwater"
    async with visiting(interface, nowhere, connect(nowhere)) as console:
        await console.sign_in()
        page = await console.get("/executions?csv=list")
    assert (page.status, "ClickHouse does not respond" in page.words) == (503, True)


def test_a_page_is_a_function_of_plain_values() -> None:
    known = CachedSession(KeyDetails.model_validate(key_with("read")[1]), 0)
    session = Session(ApiClient("http://127.0.0.1:9"), known, "")
    visit = Visit(
        TableUrl("/plans", {"list.sort": "cost"}), datetime(2026, 11, 21, tzinfo=UTC), ZoneInfo("UTC"), session
    )
    plans = [plan(), plan("dearest", total_cost="7.000000000")]
    values = plans_page.view(visit, PagePart(PlanList.model_validate({"plans": plans})))
    assert [plan.plan_id for plan in values["table"].rows] == ["dearest", "report/47"]
