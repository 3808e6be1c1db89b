"""The console as people use it, in a browser: a job followed live, a reset, a replay, the charts; and every page."""

import re
import threading
import time
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
import yaml
from playwright.sync_api import Browser, Locator, Page, Route, expect

from tests.browser.conftest import RunningPlane, Visitor
from tests.browser.pages import (
    CONTRAST,
    FIRST_OF,
    LAPTOP,
    OTHER_RULES,
    PAGES,
    PHONE_AT_NIGHT,
    RECORD_SHIFTS,
    check_layout,
    check_markup,
    check_with_axe,
    show_as,
    text_colours,
    unfold,
)
from tests.browser.talk import TALK, TRACE_ID
from tests.helpers import wait_until

pytestmark = pytest.mark.long(about_s=60, together="console")


def test_a_conversation_does_nothing_and_is_unfolded_read_raw_traced_and_compared(visitor: Visitor):
    page = visitor.page
    visitor.open(f"/executions/{TALK}")
    assert page.evaluate("window.hacked") is None
    expect(page.locator("main img, main [href^='javascript:']")).to_have_count(0)
    expect(page.locator("main")).to_contain_text("image: image/png, 8 bytes; not shown")
    tides = page.locator("details.folded").filter(has_text="1 key: tides").first
    expect(tides.locator("details")).not_to_be_visible()
    tides.get_by_text("1 key: tides").click()
    tides.get_by_text("20 items").click()
    expect(tides.get_by_text('"day": 19')).to_be_visible()
    page.get_by_role("link", name="Raw").click()
    expect(page).to_have_url(re.compile(r"\?raw=1#conversation$"))
    expect(page.locator("pre.raw")).to_contain_text(f'"execution_id": "{TALK}"')
    page.get_by_role("link", name="Rendered").click()
    expect(page.locator("article h3").first).to_contain_text("system")
    trace = page.get_by_role("link", name="Trace")
    expect(trace).to_have_attribute("href", f"https://traces.example/{TRACE_ID}")
    page.get_by_text("Compare", exact=True).first.click()
    page.get_by_label("With the execution").fill("demo-0001")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Compare executions")).to_be_visible()
    expect(page).to_have_url(re.compile(r"/compare\?.*demo-0001"))
    expect(page.get_by_role("row").filter(has_text="temperature")).to_contain_text("≠ differs")
    expect(page.locator("pre.diff ins").first).to_be_visible()
    expect(page.get_by_role("link", name="Executions", exact=True)).to_have_attribute("aria-current", "page")


def test_without_a_key_nobody_gets_in(stranger: Visitor):
    stranger.expected = {403}
    stranger.open("/executions?status=dead_lettered")
    expect(stranger.page.get_by_role("heading", name="Sign in")).to_be_visible()
    check_markup(stranger.page)
    check_with_axe(stranger.page)
    stranger.page.emulate_media(color_scheme="dark")
    check_with_axe(stranger.page, CONTRAST)
    stranger.page.get_by_label("API key").fill("bw_0123456789ab_wrong")
    stranger.page.get_by_role("button", name="Sign in").click()
    expect(stranger.page.get_by_role("alert")).to_contain_text("This key is unknown")
    stranger.shoot("sign-in-refused")
    stranger.page.get_by_label("API key").fill(stranger.plane.key)
    stranger.page.keyboard.press("Enter")
    # Where they wanted to go in the first place.
    expect(stranger.page).to_have_url(re.compile(r"/executions\?status=dead_lettered$"))
    stranger.page.get_by_role("button", name="Sign out").click()
    expect(stranger.page.get_by_role("heading", name="Sign in")).to_be_visible()
    stranger.open("/")
    expect(stranger.page.get_by_role("heading", name="Sign in")).to_be_visible()


def test_the_keyboard_alone_reaches_everything(visitor: Visitor):
    visitor.open("/executions")
    visitor.page.keyboard.press("Tab")
    expect(visitor.page.get_by_role("link", name="Skip to the content")).to_be_focused()
    reached: set[str] = set()
    for _ in range(40):
        visitor.page.keyboard.press("Tab")
        reached.add(visitor.page.evaluate("document.activeElement.textContent.trim() || document.activeElement.id"))
    assert {"Overview", "Plans", "Sign out", "Search", "f-text", "7d"} <= reached


def test_a_job_is_followed_live_from_queued_to_done(visitor: Visitor, plane: RunningPlane):
    job_id = f"watched-{uuid.uuid4().hex[:8]}"
    # The first model is down, and the second one takes its time: there is something to see.
    with plane.behaving(**{"gpt-4o": {"faults": [{"status": 503}]}, "gpt-4o-mini": {"latency_ms": 4_000}}):
        job = {"agent": "content-writer", "job_id": job_id, "prompt": "Say something about harbours."}
        plane.ask("POST", "/api/v1/jobs", job)
        visitor.open(f"/executions/{job_id}")
        expect(visitor.page.get_by_text("This job is running")).to_be_visible()
        steps = visitor.page.locator("ol.steps li")
        expect(steps.filter(has_text="failed").first).to_be_visible()
        expect(steps.filter(has_text="gpt-4o-mini is called").first).to_be_visible()
        visitor.shoot("live")
        # Nobody touches anything: the page turns into the record by itself.
        expect(visitor.page.get_by_role("heading", name="Attempts")).to_be_visible()
    expect(visitor.page.locator(".head .badge").first).to_have_text("succeeded")
    expect(visitor.page.get_by_role("region", name="Attempts").get_by_text("fallback")).to_be_visible()
    visitor.shoot("live-done")


def test_now_refreshes_without_losing_the_selection_and_cancels_all_of_it(visitor: Visitor, plane: RunningPlane):
    page = visitor.page
    prefix = uuid.uuid4().hex[:8]
    slow = {"faults": [], "latency_ms": 120_000}

    def submit(number: int) -> None:
        job = {"agent": "content-writer", "job_id": f"{prefix}-{number}", "prompt": f"Say {number} things about tides."}
        plane.ask("POST", "/api/v1/jobs", job)

    with plane.behaving(**{"gpt-4o": slow, "gpt-4o-mini": slow}):
        for number in range(3):
            submit(number)
        visitor.open("/now?agent=content-writer")
        box = [page.get_by_label(f"Select job {prefix}-{number}") for number in range(4)]
        box[0].check()
        box[2].check()
        age = page.locator("[data-age-s]").first
        submit(3)
        # Nobody touches anything: the list is renewed with the new job in it, and the ages go on.
        expect(box[3]).to_be_visible()
        assert [one.is_checked() for one in box] == [True, False, True, False]
        expect(page.locator(".live")).to_have_text("live")
        expect(box[2]).to_be_focused()
        expect(age).not_to_have_text(age.text_content() or "")
        check_markup(page)
        check_with_axe(page)
        visitor.shoot("now-selected")
        show_as(page, **PHONE_AT_NIGHT)
        visitor.shoot("now-selected-phone")
        page.get_by_text("Cancel 2 selected…").click()
        page.get_by_label("Reason").fill("they say too much")
        page.get_by_role("button", name="Yes, cancel 2 jobs").click()
        expect(page.get_by_text("2 jobs are being cancelled, and will make no further call.")).to_be_visible()
        expect(box[0]).to_have_count(0)
        expect(box[2]).to_have_count(0)
        show_as(page, **LAPTOP)
        row = page.get_by_role("row").filter(has=box[1])
        row.get_by_text("Cancel…").click()
        row.get_by_role("button", name="Yes, cancel this job").click()
        expect(page.get_by_text("1 job is being cancelled, and will make no further call.")).to_be_visible()
        expect(box[1]).to_have_count(0)
        plane.ask("POST", f"/api/v1/jobs/{prefix}-3/cancel", {})
    status = {number: plane.ask("GET", f"/api/v1/jobs/{prefix}-{number}?wait_s=60")["status"] for number in range(4)}
    assert set(status.values()) == {"cancelled"}


def test_the_colours_that_were_chosen_are_those_of_the_next_page(newcomer: Visitor):
    page = newcomer.page
    newcomer.open("/audit")
    page.get_by_role("button", name="Switch between light and dark").click()
    page.get_by_role("link", name="Plans", exact=True).click()
    expect(page.get_by_role("heading", name="Plans", level=1)).to_be_visible()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(13, 17, 23)"


def state_of(plane: RunningPlane, agent: str, model: str) -> str:
    known = plane.ask("GET", "/api/v1/breakers")["breakers"]
    return next(one["state"] for one in known if (one["agent"], one["model"]) == (agent, model))


def test_a_breaker_is_isolated_with_the_keyboard_alone_and_reset_with_the_mouse(visitor: Visitor, plane: RunningPlane):
    page = visitor.page

    def tab_to(name: str) -> None:
        for _ in range(80):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.innerText?.trim().split('\\n')[0]") == name:
                return
        pytest.fail(f"{name} is not reached")

    visitor.open("/breakers")
    row = page.get_by_role("row").filter(has_text="support-triage").filter(has_text="gpt-4o-mini")
    row.get_by_role("link", name="gpt-4o-mini").click()
    tab_to("Isolate…")
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.type("the provider told us to wait")
    tab_to("Isolate this breaker")
    page.keyboard.press("Enter")
    expect(page.get_by_role("status").filter(has_text="support-triage").first).to_be_visible()
    expect(page.locator("#state")).to_contain_text("the provider told us to wait")
    assert state_of(plane, "support-triage", "gpt-4o-mini") == "isolated"
    visitor.shoot("breaker-isolated")
    page.get_by_text("Reset…").click()
    page.get_by_role("button", name="Reset this breaker").click()
    expect(page.get_by_role("status").filter(has_text="support-triage").first).to_be_visible()
    assert state_of(plane, "support-triage", "gpt-4o-mini") == "closed"
    expect(page.locator("#changes")).to_contain_text("reset by", timeout=60_000)


def test_a_dead_letter_is_replayed_and_followed_to_its_end(visitor: Visitor, plane: RunningPlane):
    page = visitor.page
    isolated = {"agent": "nightly-digest", "model": "gpt-4o-mini"}
    plane.ask("POST", "/api/v1/breakers/isolate", isolated)
    refused = plane.ask("POST", "/api/v1/jobs?wait_s=60", {"agent": "nightly-digest", "prompt": "Sum up the day."})
    assert refused["status"] == "dead_lettered"
    plane.ask("POST", "/api/v1/breakers/reset", isolated)
    visitor.open("/dead-letters?agent=nightly-digest")
    page.locator("#list").get_by_role("rowheader").get_by_role("link").first.click()
    visitor.shoot("dead-letter")
    page.get_by_text("Replay…").first.click()
    page.get_by_role("button", name="Replay it").click()
    expect(page.get_by_role("status").first).to_contain_text("eplayed")
    page.get_by_role("link", name=re.compile("^rpl_")).first.click()
    expect(page.get_by_role("heading", name="Attempts")).to_be_visible()
    expect(page.locator(".head .badge").first).to_have_text("succeeded")


def test_many_dead_letters_are_replayed_with_progress(visitor: Visitor):
    page = visitor.page
    visitor.open("/dead-letters?agent=wrong-key")
    page.get_by_text(re.compile("^Replay all")).click()
    page.get_by_role("button", name="Yes, replay them").click()
    expect(page.locator("[data-replay-result]")).to_contain_text(re.compile(r"\d+ replayed"))
    expect(page.locator("[data-replay-result] a")).to_be_visible()
    visitor.shoot("replayed")


def test_ticked_dead_letters_are_dismissed_and_found_among_the_dismissed(visitor: Visitor):
    page = visitor.page
    visitor.open("/dead-letters?agent=wrong-key")
    page.locator("#list td input[type=checkbox]").first.check()
    page.get_by_role("button", name="Dismiss 1 selected").click()
    expect(page.get_by_role("status").first).to_contain_text("1 dead letter dismissed")
    page.get_by_role("link", name="Dismissed", exact=True).click()
    expect(page.get_by_role("button", name="Replay selected")).to_be_visible()
    expect(page.locator("#list tbody input[type=checkbox]")).to_have_count(1)
    visitor.shoot("dismissed")


def test_single_keys_search_go_to_pages_and_help_but_not_while_typing(visitor: Visitor):
    page = visitor.page
    visitor.open("/agents")
    page.keyboard.press("?")
    help_list = page.get_by_role("dialog", name="Keyboard shortcuts")
    expect(help_list).to_contain_text("g eExecutions")
    page.keyboard.press("Escape")
    expect(help_list).not_to_be_visible()
    page.keyboard.press("/")
    box = page.get_by_role("searchbox", name="Filter Agents")
    expect(box).to_be_focused()
    page.keyboard.type("ge?/")
    expect(box).to_have_value("ge?/")
    expect(help_list).not_to_be_visible()
    page.keyboard.press("Escape")
    expect(box).not_to_be_focused()
    keys = (
        "Object.fromEntries([...document.querySelectorAll('[data-key]')].map((one) => [one.dataset.key, one.pathname]))"
    )
    assert page.evaluate(keys).items() >= {"d": "/dead-letters", "b": "/breakers", "c": "/costs"}.items()
    page.keyboard.press("g")
    page.keyboard.press("c")
    expect(page).to_have_url(f"{visitor.plane.console_url}/costs")
    page.wait_for_load_state()  # the script listens from then on
    # A page without a search leads to that of the executions.
    page.keyboard.press("/")
    expect(page.locator("#f-text")).to_be_focused()
    page.wait_for_load_state()
    page.keyboard.press("Escape")
    page.keyboard.press("e")
    page.get_by_text("custom", exact=True).click()
    page.keyboard.press("Escape")
    expect(page.get_by_label("From (UTC)")).not_to_be_visible()


def test_the_navigation_counts_what_needs_attention(visitor: Visitor):
    visitor.open("/dead-letters")
    all_reasons = visitor.page.locator(".tile").first.locator("b").inner_text()
    visitor.open("/plans")  # which renews itself; the figures are read every 10 s
    badge = visitor.page.get_by_role("navigation", name="Pages").get_by_role("link", name="Dead letters")
    expect(badge).to_have_accessible_name(f"Dead letters {all_reasons} dead letters")
    expect(badge.locator(".badge")).to_be_visible()


def test_a_page_is_not_live_while_clickhouse_does_not_respond(newcomer: Visitor):
    page, empty = newcomer.page, '<div id="away" data-live></div>'
    newcomer.open("/plans")
    expect(page.locator(".live")).to_have_text("live")

    def without_clickhouse(route: Route) -> None:
        served = route.fetch()
        body = served.text()
        assert empty in body
        away = '<div id="away" data-live><p class="notice bad" data-away="ClickHouse">It is silent.</p></div>'
        route.fulfill(response=served, body=body.replace(empty, away))

    page.route("**/plans", without_clickhouse)
    expect(page.locator(".live.stale")).to_have_text("not live: ClickHouse does not respond")
    page.unroute_all(behavior="wait")
    expect(page.locator(".live:not(.stale)")).to_have_text("live")


def test_without_javascript_nothing_pretends_to_be_live(chromium: Browser, plane: RunningPlane):
    context = chromium.new_context(java_script_enabled=False, reduced_motion="reduce")
    page = context.new_page()
    page.goto(f"{plane.console_url}/sign-in?next=/dead-letters")
    page.get_by_label("API key").fill(plane.key)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("heading", name="Dead letters", level=1)).to_be_visible()
    expect(page.get_by_label("Select all")).not_to_be_visible()
    page.get_by_role("link", name="Overview", exact=True).click()
    expect(page.get_by_role("heading", name="Overview", level=1)).to_be_visible()
    expect(page.locator(".live")).not_to_be_visible()
    check_figures_are_a_table(page)
    context.close()


def canvas_of(visitor: Visitor, name: str) -> Locator:
    canvas = visitor.page.get_by_role("img", name=f"{name}: a chart")
    expect(visitor.page.locator(f"#chart-{name.lower()}.drawn")).to_be_visible()
    return canvas


def at_value(canvas: Locator) -> "tuple[float, float, int]":
    """Where the first bar is that is not empty, from the left and the top of the chart, and which row it is."""
    return tuple(
        canvas.evaluate(
            """(canvas) => {
                const chart = Chart.getChart(canvas), data = chart.data.datasets[0].data;
                const row = data.findIndex((point) => point.y > 0), bar = chart.getDatasetMeta(0).data[row];
                return [bar.x, (bar.y + bar.base) / 2, row];
            }"""
        )
    )


RENEW_FOR_WHAT_IS_MISSING = """const every = window.setInterval;
window.setInterval = (work, ms) => every(() => {
    if (document.querySelector(".problem, [data-pending], .live.stale")) work();
}, ms);"""
"""A page renews itself every five seconds, and a chart between two looks at it; but on a busy machine, a part that was
not read in time comes with the next time only."""


def test_a_chart_is_read_and_leads_on_by_mouse_and_keyboard(newcomer: Visitor):
    newcomer.page.add_init_script(RENEW_FOR_WHAT_IS_MISSING)
    newcomer.open("/?by=model&window=1h")
    check_log_scale_and_colours(newcomer)
    canvas = canvas_of(newcomer, "Executions")
    check_keyboard(newcomer, canvas)
    x, y, row = at_value(canvas)
    canvas.hover(position={"x": x, "y": y})
    told = canvas.evaluate("(canvas) => Chart.getChart(canvas).tooltip.body.map((one) => one.lines[0].trim())")
    cells = newcomer.page.locator("#chart-executions tbody tr").nth(row).locator("td").all_text_contents()
    assert told == [f"succeeded: {cells[0]}", f"failed: {cells[1]}"]
    newcomer.shoot("chart-tooltip")
    choose_time_range(newcomer, canvas)
    # Back to what the page had before, as the state is in the URL only.
    newcomer.page.go_back()
    expect(newcomer.page).to_have_url(re.compile("window=1h&log=chart-latency"))
    expect(newcomer.page.locator("#since")).not_to_contain_text(" to ")  # the page before it has the same chart
    canvas = canvas_of(newcomer, "Executions")
    x, y, row = at_value(canvas)
    cells = newcomer.page.locator("#chart-executions tbody tr").nth(row).locator("td").all_text_contents()
    canvas.click(position={"x": x, "y": y})
    expect(newcomer.page).to_have_url(re.compile(r"/executions\?from=.*&to=.*&status=succeeded$"))
    expect(newcomer.page.locator("#list .sub")).to_contain_text(re.compile(rf"^{cells[0]} execution"))


def check_log_scale_and_colours(visitor: Visitor) -> None:
    its = "(canvas) => [Chart.getChart(canvas).scales.y].flatMap((axis) => [axis.type, axis.options.grid.color])"
    light = canvas_of(visitor, "Latency").evaluate(its)
    assert light[0] == "linear"
    visitor.page.locator("#chart-latency").get_by_role("button", name="Log scale").click()
    expect(visitor.page).to_have_url(re.compile("log=chart-latency"))
    assert canvas_of(visitor, "Latency").evaluate(its) == ["logarithmic", light[1]]
    expect(visitor.page.get_by_role("button", name="Log scale", pressed=True)).to_have_count(1)
    visitor.page.emulate_media(color_scheme="dark")
    chart = canvas_of(visitor, "Latency")
    wait_until(lambda: chart.evaluate(its)[1] != light[1], "the chart to be drawn again, without a reload")


def check_keyboard(visitor: Visitor, canvas: Locator) -> None:
    page = visitor.page
    canvas.focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    active = canvas.evaluate("(canvas) => Chart.getChart(canvas).getActiveElements().map((one) => one.index)")
    last = page.locator("#chart-executions tbody tr").count() - 1
    assert active == [last - 1, last - 1]
    # A browser then stays on its page. Who sees the request is told of its route later: that ends with its use.
    page.route("**/executions?from=*", lambda route: route.fulfill(status=204), times=1)
    with page.expect_request("**/executions?from=*"):
        page.keyboard.press("Enter")


def choose_time_range(visitor: Visitor, canvas: Locator) -> None:
    """Drags the mouse over a part of a chart of an hour."""
    x, y, _ = at_value(canvas)
    box = canvas.bounding_box()
    assert box
    visitor.page.mouse.move(box["x"] + x - 40, box["y"] + y)
    visitor.page.mouse.down()
    visitor.page.mouse.move(box["x"] + x + 40, box["y"] + y, steps=4)
    visitor.shoot("chart-drag")
    visitor.page.mouse.up()
    expect(visitor.page).to_have_url(re.compile(r"/\?by=model&log=chart-latency&from=[^&]+&to=[^&]+$"))
    figure = visitor.page.locator("#chart-executions.drawn")
    length_s = figure.evaluate("(one) => (one.dataset.end - one.dataset.start) / 1000")
    assert 60 <= length_s < 1_800, "a part of the hour"
    expect(visitor.page.locator("#since")).to_contain_text(" to ")


def test_a_chart_without_its_script_is_an_open_table(newcomer: Visitor):
    newcomer.expected = {"ERR_FAILED"}
    newcomer.page.route("**/Chart.bundle.js*", lambda route: route.abort())
    newcomer.open("/?window=1h")
    check_figures_are_a_table(newcomer.page)


def check_figures_are_a_table(page: Page) -> None:
    expect(page.get_by_role("region", name="Figures: Executions").get_by_role("table")).to_be_visible()
    expect(page.locator("canvas").first).not_to_be_visible()


def test_what_was_typed_survives_a_sign_in_that_ended(newcomer: Visitor):
    page = newcomer.page
    newcomer.open("/breakers/one?agent=support-triage&model=gpt-4o-mini")
    page.get_by_text("Isolate…").click()
    page.get_by_role("textbox").fill("a long story")
    page.context.clear_cookies()
    expect(page.locator("[data-refresh-s]")).to_contain_text("signed out", timeout=60_000)
    expect(page.get_by_role("textbox")).to_have_value("a long story")
    page.get_by_role("button", name="Isolate this breaker").click()
    expect(page.get_by_role("alert")).to_contain_text("nothing was changed")
    page.get_by_label("API key").fill(newcomer.plane.key)
    page.get_by_role("button", name="Sign in").click()
    expect(page).to_have_url(re.compile(r"/breakers/one\?agent=support-triage"))


def test_a_table_is_sorted_filtered_and_saved_by_its_url(visitor: Visitor):
    visitor.open("/agents?window=24h")
    page = visitor.page
    page.get_by_role("columnheader", name="Spend").get_by_role("link").click()
    expect(page).to_have_url(re.compile(r"sort=spend"))
    expect(page.get_by_role("columnheader", name="Spend")).to_have_attribute("aria-sort", "descending")
    box = page.get_by_role("searchbox", name="Filter Agents")
    box.fill("writer")
    box.press("Enter")
    expect(page).to_have_url(re.compile(r"sort=spend.*find=writer"))
    rows = page.locator("#agents tbody tr")
    expect(rows).to_have_count(1)
    with page.expect_download() as saving:
        page.get_by_role("link", name="Save Agents as CSV").click()
    assert saving.value.suggested_filename == "agents.csv"
    lines = Path(saving.value.path()).read_text().splitlines()
    assert lines[0].startswith("name,health,health_reason,success,executions")
    assert [line.split(",")[0] for line in lines[1:]] == [rows.locator("a").first.inner_text()]


def test_a_time_range_is_typed_or_chosen(visitor: Visitor):
    page = visitor.page
    visitor.open("/executions?agent=wrong-key")
    page.get_by_text("custom", exact=True).click()
    page.get_by_label("From (UTC)").fill("2020-01-01T00:00")
    page.get_by_label("To (UTC)").fill("2020-01-02T00:00")
    page.get_by_role("button", name="Show").click()
    expect(page.get_by_text("No execution that ended from Jan 01 00:00 to Jan 02 00:00 matches.")).to_be_visible()
    page.get_by_text("custom", exact=True).click()
    page.get_by_role("link", name="this month").click()
    expect(page.locator("#list")).to_contain_text(re.compile(r"\d executions this month"))


def test_on_a_phone_a_row_is_two_lines_that_unfold_with_their_headings(by_phone: Visitor):
    page = by_phone.page
    by_phone.open("/dead-letters?agent=wrong-key")
    badge = page.get_by_role("navigation", name="Pages").get_by_role("link", name="Dead letters")
    expect(badge).to_have_accessible_name(re.compile(r"^Dead letters \d+ dead letters$"))
    expect(badge.locator(".badge")).to_be_visible()
    rows = page.locator("#list tbody tr")
    first = rows.first
    first.evaluate("row => { for (let n = 0; n < 50; n++) row.after(row.cloneNode(true)); }")
    assert page.evaluate("document.documentElement.scrollHeight") <= 6_000
    reason = first.locator("td[data-label=Reason]")
    expect(first.get_by_role("rowheader")).to_be_visible()
    expect(reason).not_to_be_visible()
    first.get_by_label(re.compile("^Details of")).click()
    expect(reason).to_be_visible()
    assert reason.evaluate("cell => getComputedStyle(cell, '::before').content") == '"Reason"'
    expect(rows.nth(1).locator("td[data-label=Reason]")).not_to_be_visible()
    # Nothing is cut off, and a screen reader still has a table.
    assert page.locator("#list .scroll").evaluate("part => part.scrollWidth <= part.clientWidth")
    expect(page.get_by_role("table").first).to_be_attached()
    expect(first.get_by_role("cell").first).to_be_visible()
    # An incident's title says what is wrong in its second half.
    by_phone.open("/alerts")
    headline = page.locator("#history tbody .headline").first
    headline.evaluate("link => { link.textContent = 'openai refuses the key '.repeat(9); }")
    lines = "link => Math.round(link.clientHeight / parseFloat(getComputedStyle(link).lineHeight))"
    assert headline.evaluate(lines) == 2


@contextmanager
def arriving_in_pieces(console_url: str) -> Generator[str]:
    """The console behind a slow connection: a page stops arriving for a while after its first chart."""

    class Slowly(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            request = Request(console_url + self.path, headers={"Cookie": self.headers.get("Cookie", "")})
            with urlopen(request, timeout=60) as answer:
                body, kind = answer.read(), answer.headers["Content-Type"]
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.end_headers()
            first_chart = body.find(b"</figure>") + 1
            self.wfile.write(body[:first_chart])
            if first_chart:
                self.wfile.flush()
                time.sleep(0.5)
            self.wfile.write(body[first_chart:])

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Slowly) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def test_a_config_is_tried_on_the_jobs_of_the_day(visitor: Visitor, plane: RunningPlane):
    page = visitor.page
    visitor.open("/config")
    wrong = page.get_by_label("Changed config, in YAML")
    wrong.fill("agents: {writer: {modle: m}}")
    page.get_by_role("button", name="Try it on these jobs").click()
    expect(page.get_by_role("alert")).to_contain_text("agents.writer.modle: is not a known setting; did you mean")
    document = yaml.safe_load((plane.data / "breakwater.simulated.yaml").read_text())
    document["agents"]["small-budget"]["budget"]["daily_usd"] = "0.0003"
    wrong.fill(yaml.safe_dump(document))
    page.get_by_role("button", name="Try it on these jobs").click()
    headline = page.get_by_role("heading", name="would have been refused")
    expect(headline).to_be_visible()
    assert re.match(r"\d+ (\(.*\) )?more of \d+ jobs would have been refused; spend −.* → ", headline.inner_text())
    expect(page.locator(".chart.drawn")).to_have_count(2)
    expect(page.get_by_role("region", name="Jobs that change most").get_by_role("link").first).to_be_visible()
    check_markup(page)
    visitor.shoot("config-plan")
    show_as(page, **PHONE_AT_NIGHT)
    wait_until(lambda: page.evaluate("document.documentElement.scrollWidth") <= 390, "the page to fit")
    visitor.shoot("config-plan-phone")
    unfold(page)
    check_with_axe(page)
    show_as(page, **LAPTOP)
    check_with_axe(page, CONTRAST)


def test_nothing_moves_on_a_page_that_arrives_in_pieces(newcomer: Visitor, plane: RunningPlane):
    page = newcomer.page
    newcomer.leave()
    page.add_init_script(RECORD_SHIFTS)
    with arriving_in_pieces(plane.console_url) as url:
        page.goto(f"{url}/budgets")
        expect(page.locator(".chart.drawn").nth(1)).to_be_visible()
        check_layout(page, "budgets")


@pytest.mark.timeout(600)
def test_every_page_shows_the_demos_data_and_fits_a_laptop_and_a_phone(visitor: Visitor, subtests: pytest.Subtests):
    page = visitor.page
    page.add_init_script(RECORD_SHIFTS)
    known: set[str] = set()
    left = dict(PAGES)
    while left:
        name = next(iter(left))
        with subtests.test(name):
            show_as(page, **LAPTOP)
            visitor.open(left.pop(name))
            if name in FIRST_OF:
                opened, link = FIRST_OF[name]
                left[opened] = page.locator(link).first.get_attribute("href") or ""
            expect(page.locator("main .problem")).to_have_count(0)
            check_layout(page, name)
            visitor.shoot(name)  # a picture of the whole page makes the screen taller, which may move what stands on it
            check_markup(page)
            assert len(page.locator("main").inner_text()) > 100
            show_as(page, **PHONE_AT_NIGHT)
            # Charts follow the width a frame later.
            # Not by Playwright's wait_for_function, which needs `eval` where this is not true at once.
            wait_until(lambda: page.evaluate("document.documentElement.scrollWidth") <= 390, "the page to fit")
            visitor.shoot(f"{name}-phone")
            background = page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert background == "rgb(13, 17, 23)", "it is dark where the phone is"
            unfold(page)
            # Half of axe's time is the contrast, and pages are made of the same few colours.
            colours = text_colours(page)
            check_with_axe(page, {} if colours - known else OTHER_RULES)
            show_as(page, **LAPTOP)
            if light := text_colours(page) - known:
                check_with_axe(page, CONTRAST)
            known |= colours | light
