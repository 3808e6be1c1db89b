"""Money on the command line, in the HTTP API, in the console and in alerts: one text for one amount."""

import csv
import http.cookiejar
import io
import re
import urllib.parse
import urllib.request
from collections.abc import Callable
from html import unescape
from typing import Any

import pytest

from breakwater.kernel.formats import exact_money, money, moneys, percent
from breakwater.kernel.types import nano_from_usd
from tests.browser.conftest import RunningPlane
from tests.commands import run_command

pytestmark = pytest.mark.long(about_s=4, together="console")

BUDGET = "agent:small-budget/daily"
Read = Callable[[str], str]


@pytest.fixture(scope="module")
def console(plane: RunningPlane) -> Read:
    """Reads a page of the console, or its CSV, as somebody who is signed in."""
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar()))
    form = urllib.parse.urlencode({"key": plane.key, "next": "/"}).encode()
    sent = urllib.request.Request(f"{plane.console_url}/sign-in", form, {"Origin": plane.console_url})
    browser.open(sent, timeout=60).close()

    def read(path: str) -> str:
        with browser.open(plane.console_url + path, timeout=60) as answer:
            return answer.read().decode()

    return read


@pytest.fixture(scope="module")
def cli(plane: RunningPlane) -> Callable[..., str]:
    """Runs a command on the plane, and returns what it printed."""

    def run(*arguments: str) -> str:
        ran = run_command(*arguments, "--data", str(plane.data), environment={"COLUMNS": "220", "TZ": "UTC"})
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    return run


def words(page: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", page)).split())


def on_hover(nano: int | None) -> str:
    """An amount as pages have it: rounded, and exact in the tooltip."""
    return f'<span class="money" title="{exact_money(nano)}">{money(nano)}</span>'


def row(printed: str, name: str) -> list[str]:
    """The cells of the line that begins with a name."""
    return next(re.split(r"  +", line.strip()) for line in printed.splitlines() if line.startswith(f"{name} "))


def test_a_budget_is_written_alike_everywhere(plane: RunningPlane, console: Read, cli: Callable[..., str]) -> None:
    budgets = {one["budget"]: one for one in plane.ask("GET", "/api/v1/budgets")["budgets"]}
    of = budgets[BUDGET]
    cap, spent, free = (nano_from_usd(of[name]) for name in ("limit", "spent", "remaining"))
    assert {of["limit"], of["spent"]} <= {f"{nano // 10**9}.{nano % 10**9:09d}" for nano in (cap, spent)}, (
        "exact in JSON"
    )
    assert row(cli("budgets"), BUDGET)[1:3] == [money(cap), money(spent)]
    pages = [console(path) for path in ("/budgets", f"/budgets/{urllib.parse.quote(BUDGET, safe='')}")]
    pages.append(console("/agents/small-budget?window=7d&whole=1"))
    assert [page.count(on_hover(cap)) > 0 for page in pages] == [True, True, True]
    assert [page.count(on_hover(spent)) > 0 for page in pages] == [True, True, True]
    assert on_hover(free) in pages[0]
    used = percent(spent / cap)
    assert [used in words(page) for page in pages[:2]] == [True, True]

    daily = row(cli("costs"), "small-budget")
    assert f"{money(cap)} a day" in daily
    assert f"{money(cap)} a day" in words(console("/costs?whole=1"))


def test_an_alert_has_the_same_amounts_and_the_same_share(plane: RunningPlane, cli: Callable[..., str]) -> None:
    alerts = plane.ask("GET", "/api/v1/alerts?limit=100&status=all")["alerts"]
    announced = [one for one in alerts if one["event"] in ("budget_soft_cap", "budget_hard_cap")]
    assert announced
    for one in announced:
        figures = one["payload"]
        total, limit = (nano_from_usd(figures[name]) for name in ("total", "limit"))
        spent, cap = moneys(total, limit)
        said = f"{spent} of {cap} ({percent(total / limit)})"
        assert said in one["text"]
        assert said in " ".join(cli("alerts", "show", one["incident_id"]).split())


def test_an_executions_cost_is_written_alike_everywhere(
    plane: RunningPlane, console: Read, cli: Callable[..., str]
) -> None:
    found: list[dict[str, Any]] = plane.ask("GET", "/api/v1/executions?limit=200")["executions"]
    of_the_demo = [one for one in found if one["execution_id"].startswith("demo-")]
    dearest = max(of_the_demo, key=lambda one: nano_from_usd(one["total_cost"] or "0"))
    refused = next(one for one in of_the_demo if one["agent"] == "small-budget" and one["status"] == "dead_lettered")
    for listed in (dearest, refused):
        name, cost = listed["execution_id"], nano_from_usd(listed["total_cost"])
        record = plane.ask("GET", f"/api/v1/executions/{name}")
        assert record["total_cost"] == listed["total_cost"]
        assert money(cost) in row(cli("executions", "--limit", "200").replace("demo-", "\ndemo-"), name)
        assert on_hover(cost) in console(f"/executions/{name}")
    assert (record["cost_basis"], refused["total_cost"]) == ("none", "0.000000000")
    assert "no call was made" in words(console(f"/executions/{refused['execution_id']}"))
    assert f"{money(0)} (no call was made)" in cli("executions", refused["execution_id"])


@pytest.mark.parametrize("by", ["agent", "model", "provider", "tenant", "key"])
def test_a_months_costs_are_written_alike_and_have_one_total(
    plane: RunningPlane, console: Read, cli: Callable[..., str], by: str
) -> None:
    costs = plane.ask("GET", f"/api/v1/costs?by={by}")
    total = nano_from_usd(costs["total"]["spend"])
    budgets = {one["budget"]: one for one in plane.ask("GET", "/api/v1/budgets")["budgets"]}
    assert costs["total"]["spend"] == budgets["global/monthly"]["spent"]
    assert sum(nano_from_usd(line["spend"]) for line in costs["lines"]) == total
    assert row(cli("costs", "--by", by), "all")[1] == money(total)
    page = console(f"/costs?by={by}&whole=1")
    assert on_hover(total) in page
    exported = list(csv.DictReader(io.StringIO(console(f"/costs.csv?by={by}"), newline="")))
    for line in costs["lines"]:
        amount = nano_from_usd(line["spend"])
        assert on_hover(amount) in page
        assert row(cli("costs", "--by", by), line["name"] or "none")[1] == money(amount)
        assert [one["spend"] for one in exported if one["name"] == (line["name"] or "")] == [line["spend"]]
