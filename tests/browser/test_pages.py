"""Every page of the console, on a laptop and on a phone: what it shows, its markup, and what axe finds."""

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.browser.conftest import Visitor
from tests.browser.talk import TALK

pytestmark = pytest.mark.long(about_s=50, together="pages")

PAGES = {
    "overview": "/",
    "agents": "/agents",
    "agent": "/agents/content-writer?window=7d",
    "executions": "/executions",
    "executions-found": "/executions?status=dead_lettered&window=7d",
    "execution": "/executions/demo-0001",
    "plans": "/plans",
    "breakers": "/breakers",
    "budgets": "/budgets",
    "costs": "/costs?by=model",
    "alerts": "/alerts",
    "dead-letters": "/dead-letters",
    "audit": "/audit",
    "execution-raw": f"/executions/{TALK}?raw=1",
    "conversation": f"/executions/{TALK}",
    "comparison": f"/compare?a=demo-0001&b={TALK}",
    "breaker": "/breakers/one?agent=support-triage&model=gpt-4o-mini",
}
ONE_OF = {
    "budget": ("/budgets", "main th a[href^='/budgets/']"),
    "alert": ("/alerts", "main a[href^='/alerts/']"),
    "dead-letter": ("/dead-letters?agent=wrong-key", "#list a[href^='/dead-letters/']"),
}
"""Pages of what the demo leaves behind: a list, and a link on it."""


def check_markup(page: Page) -> None:
    """What people need who have no mouse, or do not see the page."""
    assert page.locator("h1").count() == 1
    assert page.locator("main").count() == 1
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("input:not([type=hidden]), select, textarea, button, a[href]")]
            .filter((one) => !(one.labels?.length || one.getAttribute("aria-label") || one.textContent.trim()))
            .map((one) => one.outerHTML.slice(0, 120))"""
    )
    assert nameless == []
    doubled = page.evaluate(
        """() => [...document.querySelectorAll("[id]")].map((one) => one.id)
            .filter((id, index, all) => all.indexOf(id) !== index)"""
    )
    assert doubled == []


def check_with_axe(page: Page) -> None:
    """No serious finding, also in what is folded."""
    page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    findings = Axe().run(page).response["violations"]
    serious = [one for one in findings if one["impact"] in ("serious", "critical")]
    assert [(one["id"], one["nodes"][0]["html"], one["nodes"][0]["failureSummary"]) for one in serious] == []


def open_page(visitor: Visitor, name: str) -> None:
    """Opens a page of those above by its name."""
    if name in PAGES:
        visitor.open(PAGES[name])
    else:
        path, link = ONE_OF[name]
        visitor.open(path)
        visitor.open(visitor.page.locator(link).first.get_attribute("href") or "")


@pytest.mark.timeout(600)
def test_every_page_shows_the_demos_data(visitor: Visitor, subtests: pytest.Subtests):
    for name in (*PAGES, *ONE_OF):
        with subtests.test(name):
            open_page(visitor, name)
            visitor.shoot(name)
            expect(visitor.page.locator("main .problem")).to_have_count(0)
            check_markup(visitor.page)
            assert len(visitor.page.locator("main").inner_text()) > 100
            check_with_axe(visitor.page)


@pytest.mark.timeout(600)
def test_every_page_fits_a_phone(by_phone: Visitor, subtests: pytest.Subtests):
    for name in (*PAGES, *ONE_OF):
        with subtests.test(name):
            open_page(by_phone, name)
            by_phone.shoot(f"{name}-phone")
            assert by_phone.page.evaluate("document.documentElement.scrollWidth") <= 390
            background = by_phone.page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert background == "rgb(13, 17, 23)", "it is dark where the phone is"
            check_with_axe(by_phone.page)


def test_the_overview_takes_one_and_a_half_screens_and_no_sum_is_cut_off(visitor: Visitor):
    for path, most in (("/", 1.5 * 900), ("/costs?by=tenant", None)):
        visitor.open(path)
        assert (
            visitor.page.evaluate(
                """() => [...document.querySelectorAll(".scroll")].filter((one) => one.checkVisibility())
                .filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.getAttribute("aria-label"))"""
            )
            == []
        ), path
        assert most is None or visitor.page.evaluate("document.documentElement.scrollHeight") <= most
