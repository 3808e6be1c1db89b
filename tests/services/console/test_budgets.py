"""The pages of budgets, and raising a cap."""

from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

from breakwater.kernel.types import NANO_PER_USD, format_time, ms_from_time, time_from_ms
from breakwater.limits.contract import BudgetStatus
from breakwater.limits.pages.budgets import budget_row, outlook
from breakwater.limits.rules.budget import Forecast, period
from breakwater.records import schema
from tests import api_documents as documents
from tests.cli.api_stub import problem
from tests.records import samples
from tests.services.console.conftest import Console
from tests.tables import each_row

EVIL = "<script>alert(1)</script>"
UTC_ZONE = ZoneInfo("UTC")
MONDAY_NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)


def budget(name: str = "global/daily", spent: str = "1", limit: str | None = "10", **fields: Any) -> dict[str, Any]:
    """A budget of the present period."""
    at = fields.pop("now", None) or datetime.now(UTC)
    current = period("daily" if name.endswith("/daily") else "monthly", at, UTC_ZONE)
    reached = limit is not None and float(spent) + float(fields.get("reserved", 0)) >= float(limit)
    present = {"period": current.name, "resets_at": format_time(time_from_ms(current.end_ms)), "reached": reached}
    return documents.budget(name, spent, limit, **present | fields)


def status(name: str = "global/daily", **fields: Any) -> BudgetStatus:
    return BudgetStatus.model_validate(budget(name, now=MONDAY_NOON, **fields))


def listed(*budgets: dict[str, Any], filled: bool = True) -> tuple[int, Any]:
    return 200, {"filled": filled, "budgets": list(budgets)}


USD = NANO_PER_USD
NOON_MS = ms_from_time(MONDAY_NOON)
HOUR_MS = 3_600_000


@each_row(
    ("of", "reported", "expected"),
    [
        (status(), Forecast(2 * USD, None), "Forecast: $2.00 of $10.00"),
        (status(limit=None), Forecast(2 * USD, None), "Forecast: $2.00"),
        (status(), Forecast(20 * USD, NOON_MS + 1), "Forecast: limit reached within an hour"),
        (status(), Forecast(20 * USD, NOON_MS + HOUR_MS), "Forecast: limit reached in about 1 hour"),
        (status(), Forecast(20 * USD, NOON_MS + 26 * HOUR_MS), "Forecast: limit reached in about 26 hours"),
        (
            status("global/monthly"),
            Forecast(20 * USD, NOON_MS + 80 * HOUR_MS),
            "Forecast: limit reached in about 3 days",
        ),
        (status(spent="10"), Forecast(20 * USD, None), "Limit reached"),
        (status(spent="9.99", reached=True), None, "Limit reached"),
        (status(spent="0"), None, "Nothing spent yet"),
        (status(), None, "Too early in the day to forecast"),
    ],
)
def test_an_outlook_in_words(of: BudgetStatus, reported: Forecast | None, expected: str):
    assert outlook(of, reported, is_recent_known=True, now_ms=NOON_MS) == expected


def test_a_line_follows_the_pace_and_warns_in_time():
    day = period("daily", MONDAY_NOON, UTC_ZONE)
    calm = budget_row(status(), day, 0, MONDAY_NOON)
    assert (calm.forecast, calm.tone) == (Forecast(1_500_000_000, None), "")
    assert budget_row(status(limit="1.2"), day, 0, MONDAY_NOON).tone == "warn", "it will be reached"
    assert budget_row(status(limit="100", spent="1", reserved="99"), day, 0, MONDAY_NOON).tone == "bad"
    assert budget_row(status(limit="0", spent="0"), day, 0, MONDAY_NOON).used == 1.0
    assert budget_row(status(limit=None), day, 0, MONDAY_NOON).bar is None
    unknown = budget_row(status(), day, None, MONDAY_NOON)
    assert unknown.forecast is None
    assert "ClickHouse is unavailable" in unknown.outlook
    yesterday = budget_row(status(period="2026-11-22"), day, 0, MONDAY_NOON)
    assert yesterday.forecast is None, "the counters are of a period that is over"


def test_a_hard_cap_is_never_passed_and_one_that_refuses_calls_is_reached():
    day = period("daily", MONDAY_NOON, UTC_ZONE)
    rows = [budget_row(status(limit="1.2", enforcement=one), day, 0, MONDAY_NOON) for one in ("hard", "soft")]
    assert [row.forecast and row.forecast.total for row in rows] == [1_200_000_000, 1_500_000_000]
    refusing = budget_row(status(limit="1.001", reached=True), day, NANO_PER_USD, MONDAY_NOON)
    assert (refusing.forecast, refusing.outlook, refusing.tone) == (None, "Limit reached", "bad")


async def test_all_budgets_with_what_is_spent_and_how_much_of_the_cap(console: Console):
    at = "2026-11-22T10:00:00.000Z"
    raised = {"amount": "10", "configured": "5", "until": at, "by": "zoë", "reason": EVIL, "at": at}
    console.interface.answers["GET budgets"] = listed(
        budget(spent="2.5", reserved="0.5", raised=raised),
        budget("agent:wri/ter/monthly", spent="0", limit=None, enforcement="none"),
        budget("tenant:acme/daily", spent="9.5", enforcement="soft"),
    )
    page = await console.get("/budgets")
    assert page.status == 200
    assert "$2.50" in page.words
    assert "30 %" in page.words
    assert "raised by zoë" in page.words
    assert "Nothing spent yet" in page.words
    assert page.text.count('<figure class="chart"') == 2, "those nearest to their limits"
    assert page.words.index("Spend: tenant acme, daily") < page.words.index("Spend: the plane, daily")
    assert 'href="/budgets/agent%3Awri%2Fter%2Fmonthly"' in page.text


async def test_of_thousands_of_tenants_those_are_listed_that_matter(console: Console):
    small = [budget(f"tenant:t{number}/daily", spent="0.01", limit=None) for number in range(1_000)]
    capped = [budget(f"tenant:capped{number}/daily", spent="0", limit="5") for number in range(5)]
    console.interface.answers["GET budgets"] = listed(
        budget(), *small[:500], budget("tenant:dear/daily", spent="3", limit=None), *small[500:], *capped
    )
    page = await console.get("/budgets")
    assert "Today (6)" in page.words
    assert "Without a limit (1,001)" in page.words
    assert "The first 200 of 1,001" in page.words
    assert "tenant dear" in page.words
    assert all(f"tenant capped{number}" in page.words for number in range(5))


async def test_a_budget_that_burns_down(console: Console):
    now = datetime.now(UTC)
    attempt = samples.attempt(started_at=now, cost=2 * USD, cost_basis="billed", agent="wri/ter")
    await console.analytics.insert(schema.ATTEMPTS, [samples.attempt_row(attempt, 1)])
    console.interface.answers["GET budgets"] = listed(budget("agent:wri/ter/monthly", spent="2", limit="1000"))
    page = await console.get("/budgets/agent%3Awri%2Fter%2Fmonthly")
    assert page.status == 200
    assert "Spend: wri/ter, monthly" in page.words
    assert "limit $1,000.00" in page.words
    assert "$2.00" in page.words
    assert "calls that might exceed it are refused" in page.words
    assert 'data-style="dashed"' in page.text
    assert 'href="/executions?agent=wri%2Fter&amp;from=' in page.text


async def test_a_total_has_no_forecast_no_chart_and_no_end(console: Console):
    total = budget("agent:bot/total", spent="2", period="total", resets_at=None)
    console.interface.answers["GET budgets"] = listed(budget(), total)
    page = await console.get("/budgets")
    assert "In total (1)" in page.words
    assert "Never resets" in page.words
    assert page.text.count('<figure class="chart"') == 1
    page = await console.get("/budgets/agent%3Abot%2Ftotal")
    assert page.status == 200
    assert "Resets never" in page.words
    assert '<figure class="chart"' not in page.text


async def test_a_budget_of_nobody_and_counters_that_are_rebuilt(console: Console):
    console.interface.answers["GET budgets"] = listed(filled=False)
    page = await console.get("/budgets")
    assert "The counters are being rebuilt" in page.words
    missing = await console.get(f"/budgets/{EVIL}/daily".replace("<", "%3C").replace(">", "%3E"))
    assert missing.status == 404
    assert EVIL not in missing.text


HERE = "/budgets/agent%3Awriter%2Fdaily"


def raises(console: Console) -> list[Any]:
    """What the interface was asked to raise."""
    return [body for what, body in console.interface.asked if what == "POST budgets/raise"]


async def test_a_cap_is_raised_with_a_reason(console: Console):
    console.interface.answers["GET budgets"] = listed(budget("agent:writer/daily", limit="500"))
    console.interface.answers["POST budgets/raise"] = 200, {}
    page = await console.submit(HERE, HERE, limit_usd=" $1250.50 ", reason="launch day")
    assert raises(console) == [{"budget": "agent:writer/daily", "limit_usd": "1250.50", "reason": "launch day"}]
    assert "The limit of agent:writer/daily is $1,250.50 until its period ends." in page.words
    assert "Budget: writer, daily" in page.words
    assert "This was not done" not in page.words


@each_row(
    ("given", "reported"),
    [
        ("2,50", "'2,50' contains a comma: write 2.50, with a decimal point"),
        ("1,250.50", "contains a comma: write 2.50"),
        ("1.250,50", "contains a comma: write 2.50"),
        ("a lot", "'a lot' is not an amount in USD"),
        ("2_50", "'2_50' is not an amount in USD"),
        ("", "'' is not an amount in USD"),
    ],
)
async def test_an_amount_that_might_be_meant_otherwise_raises_nothing(console: Console, given: str, reported: str):
    console.interface.answers["GET budgets"] = listed(budget("agent:writer/daily", limit="1"))
    console.interface.answers["POST budgets/raise"] = 200, {}
    page = await console.submit(HERE, HERE, limit_usd=given, reason=f'launch "{EVIL}')
    assert page.status == 422
    assert "The limit was not raised: " in page.words
    assert reported in page.words
    assert raises(console) == []
    form = page.text.split('<details class="act" open')[1].split("</form>")[0]
    assert f'value="{given}"' in form.replace("&#39;", "'"), "it is filled in again"
    assert "launch &#34;&lt;script" in form
    assert EVIL not in page.text


async def test_more_than_ten_times_the_cap_is_asked_for_twice(console: Console):
    console.interface.answers["GET budgets"] = listed(budget("agent:writer/daily", limit="2"))
    console.interface.answers["POST budgets/raise"] = 200, {}
    fields = {"limit_usd": "250", "reason": "launch"}
    page = await console.submit(HERE, HERE, **fields)
    assert raises(console) == []
    assert "Yes, raise it to $250.00, more than ten times the limit of $2.00" in page.words
    sure = page.text.split('name="confirmed" value="')[1].split('"')[0]
    page = await console.submit(HERE, HERE, **fields | {"limit_usd": "2500", "confirmed": sure})
    assert raises(console) == [], "that was said of another amount"
    await console.submit(HERE, HERE, **fields, confirmed=sure)
    assert [one["limit_usd"] for one in raises(console)] == ["250"]
    await console.submit(HERE, HERE, **fields | {"limit_usd": "20"})
    assert [one["limit_usd"] for one in raises(console)] == ["250", "20"], "ten times are done at once"


async def test_what_the_interface_refuses_is_reported_in_the_form_which_stays_filled(console: Console):
    console.interface.answers["GET budgets"] = listed(budget("agent:writer/daily"))
    refusal = "a limit can't be lower than the config's ($10.00)"
    console.interface.answers["POST budgets/raise"] = 422, problem("below_cap", refusal)
    page = await console.submit(HERE, HERE, limit_usd="1", reason="launch")
    form = page.text.split('<details class="act" open')[1].split("</form>")[0]
    assert "The limit was not raised: a limit can&#39;t be lower than the config&#39;s ($10.00)" in form
    assert 'value="1"' in form
    assert 'value="launch"' in form
    page = await console.submit(HERE, HERE, limit_usd="12", reason=" ")
    assert "The limit was not raised: a raise needs a reason" in page.words
    assert len(raises(console)) == 1
    gone = await console.post("/budgets/agent%3Agone%2Fdaily", {"csrf": page.csrf, "limit_usd": "12", "reason": "x"})
    assert gone.status == 404
    assert len(raises(console)) == 1, "its limit is not known"
    console.interface.answers["GET budgets"] = 503, problem("unavailable", "Redis does not answer")
    page = await console.post(HERE, {"csrf": page.csrf, "limit_usd": "12", "reason": "launch"})
    assert "Redis does not answer" in page.words
    assert len(raises(console)) == 1, "what the limit is now could not be shown"


async def test_the_counters_are_compared_with_the_record_when_asked_for(console: Console):
    differing = documents.reconciled(difference="0.5", recorded_calls=2)
    reconciliation: dict[str, Any] = {"equal": False, "budgets": [differing], "reserved": "0", "held": "0"}
    reconciliation["at"] = documents.AT
    console.interface.answers["GET budgets/reconciliation"] = 200, reconciliation
    page = await console.get("/budgets/reconciliation")
    assert "The counters in Redis differ" in page.words
    assert "12 counted, 2 recorded" in page.words
    console.interface.answers["GET budgets/reconciliation"] = 200, {**reconciliation, "equal": True, "budgets": []}
    assert "The counters in Redis agree" in (await console.get("/budgets/reconciliation")).words
