"""The pages of the console, and what is checked of each: its layout, its markup, and what axe finds."""

from typing import Any, Literal

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.browser.talk import TALK

PAGES = {
    "overview": "/",
    "now": "/now",
    "agents": "/agents",
    "agent": "/agents/content-writer?window=7d",
    "executions": "/executions",
    "plans": "/plans",
    "breakers": "/breakers",
    "limits": "/limits",
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
FIRST_OF = {
    "plans": ("plan", "main th a[href^='/plans/']"),
    "limits": ("limit", "main th a[href^='/limits/']"),
    "budgets": ("budget", "main th a[href^='/budgets/']"),
    "alerts": ("alert", "main a[href^='/alerts/']"),
    "dead-letters": ("dead-letter", "#list a[href^='/dead-letters/']"),
}
"""The pages of what the demo leaves behind, by the list whose first link of this kind leads there."""


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


DROP_REPEATED = """() => {
    const shape = (part) => [part, ...part.querySelectorAll("*")].map((one) =>
        [one.tagName, one.className, ...one.getAttributeNames(), Boolean(one.textContent.trim())].join()).join("|");
    for (const list of document.querySelectorAll("tbody, ul, ol, dl, select")) {
        const shapes = new Set();
        for (const part of [...list.children]) {
            const its = shape(part);
            if (shapes.has(its)) part.remove();
            shapes.add(its);
        }
    }
}"""
"""Leaves one of all rows and items of a list that differ in their texts and the values of their attributes alone."""


CONTRAST = {"runOnly": ["color-contrast"]}
OTHER_RULES = {"rules": {"color-contrast": {"enabled": False}}}


def unfold(page: Page) -> None:
    """Opens what is folded. Rows that differ in their texts alone are left once."""
    page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    page.evaluate(DROP_REPEATED)


SERIOUS = """(options) => {
    const minor = axe._audit.rules.filter((rule) => ["moderate", "minor"].includes(rule.impact));
    const rules = Object.fromEntries(minor.map((rule) => [rule.id, { enabled: false }]));
    return axe.run({ ...options, rules: { ...rules, ...options.rules } }).then((found) => found.violations
    .filter((finding) => ["serious", "critical"].includes(finding.impact))
    .map((finding) => [finding.id, finding.nodes[0].html, finding.nodes[0].failureSummary]));
}"""
"""Rules whose findings are never serious are not run, which saves a quarter of axe's time."""


def check_with_axe(page: Page, options: "dict[str, Any] | None" = None) -> None:
    """No serious finding; by all rules, or as axe's options say."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(Axe().axe_script)
    assert page.evaluate(SERIOUS, {"resultTypes": ["violations"], **(options or {})}) == []


TEXT_COLOURS = """() => [...document.querySelectorAll("body *")]
    .filter((part) => [...part.childNodes].some((of) => of.nodeType == 3 && of.data.trim()) && part.checkVisibility())
    .map((part) => {
        const text = getComputedStyle(part), shown = [text.color, parseFloat(text.fontSize) < 18];
        for (let of = part, style = text; of; style = (of = of.parentElement) && getComputedStyle(of)) {
            if (style.opacity != "1") shown.push(style.opacity);
            if (style.backgroundColor != "rgba(0, 0, 0, 0)") shown.push(style.backgroundColor);
            if (style.backgroundColor.startsWith("rgb(")) break;
        }
        return shown.join(" / ");
    })"""


def text_colours(page: Page) -> set[str]:
    """In what colours texts stand on a page, on what, and whether they are small: what their contrast follows from."""
    return set(page.evaluate(TEXT_COLOURS))


LAPTOP: "dict[str, Any]" = {"width": 1360, "height": 900, "colours": "light"}
PHONE_AT_NIGHT: "dict[str, Any]" = {"width": 390, "height": 844, "colours": "dark"}


def show_as(page: Page, *, width: int, height: int, colours: Literal["light", "dark"]) -> None:
    """Shows an open page on another screen."""
    page.set_viewport_size({"width": width, "height": height})
    page.emulate_media(color_scheme=colours)


RECORD_SHIFTS = """window.shifts = []; new PerformanceObserver((seen) => {
    for (const shift of seen.getEntries())
        window.shifts.push([shift.value, ...shift.sources.map((source) => source.node?.outerHTML?.slice(0, 120))]);
}).observe({ type: "layout-shift", buffered: true });"""
CUT_OFF = """() => [...document.querySelectorAll(".scroll")].filter((one) => one.checkVisibility())
    .filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.getAttribute("aria-label"))"""


def check_layout(page: Page, name: str) -> None:
    """What a laptop's screen shows of a page."""
    expect(page.locator(".chart:not(.drawn)")).to_have_count(0)
    shifts = page.evaluate("window.shifts")
    if "window=7d" not in page.url:  # its slow parts come later, and may be larger than what stands there before
        assert sum(shift[0] for shift in shifts) < 0.01, f"something moved while the page was drawn: {shifts}"
    assert page.evaluate(CUT_OFF) == []
    if name == "overview":
        assert page.evaluate("document.documentElement.scrollHeight") <= 1.5 * LAPTOP["height"]
