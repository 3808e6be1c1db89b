"""Each list of a view in the console: on its page, in its file, without a row, and for who may only look.

Without ClickHouse: what these pages show beside the list is then not known, which must not keep the list from them.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import AsyncGenerator
from html import unescape
from typing import Any

import pytest
import pytest_asyncio

from breakwater.kernel.clickhouse.client import connect
from breakwater.kernel.columns import Column
from breakwater.local.ports import free_port
from tests import api_documents as documents
from tests.api_documents import breaker, dead_letter, health, incident
from tests.cli.api_stub import Stub, problem
from tests.listings import EVIL, LISTINGS, Listing
from tests.services.console.conftest import Console, Page, key_with, visiting
from tests.services.console.inert import check_page
from tests.services.console.test_budgets import budget
from tests.services.console.test_budgets import listed as budgets
from tests.services.console.test_dead_letters import listed as dead_letters
from tests.tables import each_row

WITH_ACTIONS = ("breakers", "budgets", "alerts", "dlq")
"""The lists below which it says what a key with more rights could do."""
each_listing = each_row("listing", LISTINGS, ids=str)


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def served(stub: Stub) -> AsyncGenerator[Console]:
    nowhere = f"http://127.0.0.1:{free_port()}/breakwater"
    async with visiting(stub, nowhere, connect(nowhere)) as console:
        yield console


@pytest.fixture
def visited(served: Console, interface: Stub) -> Console:
    served.http.cookie_jar.clear()
    return served


def answer(console: Console, listing: Listing, document: Any) -> None:
    """Has the API return this one list, and nothing else of the page."""
    key = console.interface.answers["GET key"]
    console.interface.answers.clear()
    console.interface.answers |= {"GET key": key, f"GET {listing.path}": (200, document)}


def name_in_file(column: Column[Any]) -> str:
    return f"{column.key}_usd" if column.kind == "usd" else column.key


def saved_rows(page: Page) -> list[dict[str, str]]:
    assert (page.status, page.headers["Content-Type"]) == (200, "text/csv; charset=utf-8")
    assert page.headers["Content-Disposition"].startswith("attachment; filename=")
    return list(csv.DictReader(io.StringIO(page.text, newline="")))


@each_listing
async def test_a_page_shows_the_row_of_its_list_as_text_and_without_one_says_so(
    console: Console, listing: Listing
) -> None:
    answer(console, listing, listing.document)
    page = await console.get(listing.page)
    assert (page.status, EVIL in page.words) == (200, True)
    check_page(page.text)
    if listing.table:
        assert f"csv={listing.table}" in page.text, "it is saved from here"
        [sorting, *_] = re.findall(rf'<th scope="col"[^>]*><a href="([^"]*{listing.table}.sort=[^"]*)"', page.text)
        assert 'aria-sort="' in (await console.get(unescape(sorting))).text
    if listing.none[1]:
        assert listing.none[1] not in page.words
        answer(console, listing, listing.nothing)
        page = await console.get(listing.page)
        assert (page.status, EVIL in page.words, listing.none[1] in page.words) == (200, False, True)


@each_row("listing", [listing for listing in LISTINGS if listing.table], ids=str)
async def test_the_file_of_a_list_has_the_columns_of_its_view(console: Console, listing: Listing) -> None:
    answer(console, listing, listing.document)
    [row] = saved_rows(await console.get(f"{listing.page}?csv={listing.table}"))
    columns = {name_in_file(column): column for column in listing.columns if column.value is not None}
    assert [name for name in columns if name not in row] == []
    for name, column in columns.items():
        value = column.value and column.value(listing.row)
        if isinstance(value, str):
            assert row[name] == value, name


@each_listing
async def test_where_the_api_is_away_the_page_says_why(console: Console, listing: Listing) -> None:
    console.interface.answers[f"GET {listing.path}"] = 503, problem("unavailable", "Redis does not answer")
    page = await console.get(listing.page)
    assert (page.status, "Redis does not answer" in page.words) == (200, True)


@each_listing
async def test_who_may_only_look_sees_no_buttons(visited: Console, listing: Listing) -> None:
    visited.interface.answers["GET key"] = key_with("read", name="viewer")
    assert (await visited.sign_in()).status == 303
    answer(visited, listing, listing.document)
    page = await visited.get(listing.page)
    assert EVIL in page.words
    forms = re.findall(r'<form method="post".*?</form>', page.text.split("<main")[1], re.DOTALL)
    assert not any("<button" in form for form in forms)
    assert ("Your key viewer is read-only" in page.words) is (listing.path in WITH_ACTIONS)


async def test_each_table_is_saved_from_its_page_as_it_is_filtered_there(console: Console) -> None:
    documents.answer(
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
        assert [row[column] for row in saved_rows(await console.get(path))] == values, path
    for path in ("/agents?csv=nothing", "/alerts?csv=history-of-nobody"):
        page = await console.get(path)
        assert (page.status, "Nothing to save" in page.words) == (404, True)


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
    assert "<summary><b>Without a limit" not in (await console.get("/budgets")).text, "there is nothing else to see"


async def test_dead_letters_are_grouped_by_their_error_but_for_numbers_in_it(console: Console) -> None:
    console.interface.answers["GET dlq"] = dead_letters(
        dead_letter(9, error="timeout after 31 s", agent="reader", at="2026-11-22T12:00:00.000Z"),
        dead_letter(8, error="no such model", replayable=False),
        dead_letter(7, error="timeout after 30 s"),
    )
    page = await console.get("/dead-letters?reason=error")
    assert "timeout after 31 s error reader , writer 2 2 Nov 21 10:00:00 Nov 22 12:00:00" in page.words
    assert "no such model error writer 1 0" in page.words
    address = unescape(re.findall(r'href="(/dead-letters\?[^"]*error=[0-9a-f]{8}#list)"', page.text)[0])
    one = await console.get(address)
    assert "Filtered by the error “timeout after 31 s”" in one.words
    assert re.findall(r'aria-label="Select dead letter (\d)"', one.text) == ["9", "7"]
    assert "Replay all" not in one.words, "that would replay others, too"
