"""Tables of the pages: their order and filter as the URL says, and the same as CSV."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from html import unescape
from urllib.parse import parse_qsl
from zoneinfo import ZoneInfo

import pytest

from breakwater.client import ApiClient
from breakwater.identity.contract import KeyDetails
from breakwater.identity.pages.pages import Fetched
from breakwater.identity.pages.sessions import CachedSession, Session
from breakwater.identity.pages.visits import Visit
from breakwater.jobs.contract.submission import PlanList
from breakwater.jobs.pages import plans as plans_page
from breakwater.kernel.clickhouse.client import connect
from breakwater.kernel.columns import Column
from breakwater.kernel.pages.tables import PageTable, TableUrl, csv_text
from breakwater.local.ports import free_port
from tests.api_documents import answer, breaker, health, incident
from tests.cli.api_stub import Stub
from tests.services.console.conftest import Console, Page, key_with, visiting
from tests.services.console.test_budgets import budget
from tests.services.console.test_budgets import listed as budgets
from tests.services.console.test_dead_letters import dead_letter
from tests.services.console.test_dead_letters import listed as dead_letters
from tests.services.console.test_executions import ended, store
from tests.services.console.test_plans import PLAN
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


async def test_each_table_is_saved_from_its_page_as_it_is_filtered_there(console: Console) -> None:
    answer(
        console.interface,
        agents=[health("writer", "unhealthy"), health("reader")],
        breakers=[breaker("writer", "gpt-4.1", "open", "3 failures"), breaker("reader", "mini")],
        alerts=[incident(1), incident(2, "warning")],
    )
    console.interface.answers["GET budgets"] = budgets(
        budget(spent="2.5"),
        budget("agent:writer/monthly", spent="0.000000001"),
        budget("tenant:acme/daily", limit=None),
    )
    console.interface.answers["GET dlq"] = dead_letters(dead_letter(), dead_letter(8, agent="reader"))
    saved = {
        "/agents?csv=agents&find=writer": ("name", ["writer"]),
        "/breakers?csv=breakers&breakers.sort=-agent": ("agent", ["writer", "reader"]),
        "/budgets?csv=day": ("spent_usd", ["2.500000000"]),
        "/budgets?csv=month": ("spent_usd", ["0.000000001"]),
        "/budgets?csv=uncapped": ("budget", ["tenant:acme/daily"]),
        "/alerts?csv=now&now.find=WARNING": ("incident_id", ["inc_2"]),
        "/dead-letters?csv=list&list.sort=-dead_letter": ("dead_letter", ["7", "8"]),
        "/dead-letters?csv=errors": ("dead_letters", ["2"]),
    }
    for path, (column, values) in saved.items():
        assert [row[column] for row in read(await console.get(path))] == values, path
    for path in ("/agents?csv=nothing", "/alerts?csv=history-of-nobody"):
        page = await console.get(path)
        assert (page.status, "Nothing to save" in page.words) == (404, True)


async def test_each_table_says_how_to_save_and_sort_it(console: Console) -> None:
    answer(console.interface, agents=[health("writer")], breakers=[breaker("writer", "m")], alerts=[incident(1)])
    console.interface.answers["GET budgets"] = budgets(budget())
    console.interface.answers["GET dlq"] = dead_letters(dead_letter())
    await store(console, ended(1))
    for path in ("/agents", "/breakers", "/budgets", "/alerts", "/dead-letters", "/executions"):
        page = await console.get(path)
        links = [unescape(link) for link in re.findall(r'href="([^"]*[?&;]csv=[^"]*)"', page.text)]
        assert links, path
        for link in links:
            assert read(await console.get(link)), link
        sorting = re.findall(r'<th scope="col"[^>]*><a href="([^"]*sort=[^"]*)"', page.text)
        assert sorting, path
        turned = await console.get(unescape(sorting[0]))
        assert (turned.status, turned.text.count('aria-sort="') >= 1) == (200, True)


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


async def test_budgets_are_in_groups_with_the_most_used_first_and_those_without_a_cap_folded(console: Console) -> None:
    console.interface.answers["GET budgets"] = budgets(
        budget(spent="1"),
        budget("tenant:near/daily", spent="9"),
        budget("agent:writer/monthly", spent="5"),
        budget("tenant:free/daily", spent="700", limit=None),
    )
    page = await console.get("/budgets")
    shown = page.text[page.text.index('id="day"') :]
    assert (
        shown.index("tenant%3Anear%2Fdaily") < shown.index("global%2Fdaily") < shown.index("agent%3Awriter%2Fmonthly")
    )
    folded = shown[shown.index("<details") : shown.index("</details>")]
    assert "tenant%3Afree%2Fdaily" in folded
    assert "<details open" not in shown
    assert "<details open" in (await console.get("/budgets?uncapped.sort=spent")).text
    console.interface.answers["GET budgets"] = budgets(budget(limit=None))
    assert "<summary><b>Without a cap" not in (await console.get("/budgets")).text, "there is nothing else to see"


async def test_dead_letters_are_grouped_by_their_error_but_for_numbers_in_it(console: Console) -> None:
    console.interface.answers["GET dlq"] = dead_letters(
        dead_letter(9, error="timeout after 31 s", agent="reader", at="2026-11-22T12:00:00.000Z"),
        dead_letter(8, error="no such model", replayable=False),
        dead_letter(7, error="timeout after 30 s"),
    )
    page = await console.get("/dead-letters?reason=error")
    assert "timeout after 31 s error reader , writer 2 2 Nov 22 10:00:00 Nov 22 12:00:00" in page.words
    assert "no such model error writer 1 0" in page.words
    address = unescape(re.findall(r'href="(/dead-letters\?[^"]*error=[0-9a-f]{8}#list)"', page.text)[0])
    one = await console.get(address)
    assert "Filtered by the error “timeout after 31 s”" in one.words
    assert re.findall(r'aria-label="Select dead letter (\d)"', one.text) == ["9", "7"]
    assert "Replay all" not in one.words, "that would replay others, too"


def test_a_page_is_a_function_of_plain_values() -> None:
    known = CachedSession(KeyDetails.model_validate(key_with("read")[1]), 0)
    session = Session(ApiClient("http://127.0.0.1:9"), known, "")
    visit = Visit(
        TableUrl("/plans", {"list.sort": "cost"}), datetime(2026, 11, 21, tzinfo=UTC), ZoneInfo("UTC"), session
    )
    plans = [PLAN, PLAN | {"plan_id": "dearest", "total_cost": "7.000000000"}]
    values = plans_page.view(visit, Fetched(PlanList.model_validate({"plans": plans})))
    assert [plan.plan_id for plan in values["table"].rows] == ["dearest", "report/47"]
