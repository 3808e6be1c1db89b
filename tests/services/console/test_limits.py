"""The pages of limits, and their forms."""

from datetime import UTC, datetime
from typing import Any

from breakwater.identity.contract import AuditEvent
from breakwater.kernel.pages.words import segment
from breakwater.records import rows, schema
from tests import api_documents as documents
from tests.cli.api_stub import problem
from tests.records import samples
from tests.services.console.conftest import SCOPES, Console, key_with
from tests.tables import each_row

EVIL = "<script>alert(1)</script>"
BOT = documents.limit()
EACH_KEY = documents.limit("key:*", used=None)
OF_CONFIG = documents.limit(
    "agent:wri/ter", "day", "12", id="agents.wri/ter.budget.daily_usd", source="config", by=None, at=None, reason=None,
    amount="10.000000000", remaining="0",
)  # fmt: skip
OF_TASKS = documents.limit(
    "task:* within agent:wri/ter", "total", None, id="agents.wri/ter.guard.max_iterations", source="config",
    unit="requests", amount="10", requests=10, resets_at=None, by=None, at=None, reason=None,
)  # fmt: skip
RAISED = {"amount": "30", "configured": "20.000000000", "until": documents.AT, "by": "zoë", "reason": EVIL}
RAISE = RAISED | {"scope": None, "at": documents.AT}
HERE = f"/limits/{segment(BOT['id'])}"


def answer(console: Console, *limits: dict[str, Any], after: str | None = None, **more: "tuple[int, Any]") -> None:
    """Lets the interface have limits, and its caller every scope."""
    answers = console.interface.answers
    answers["GET key"] = key_with(*SCOPES)
    answers["GET limits"] = 200, {"limits": limits, "continue_after": after}
    answers |= {f"GET limits/{limit['id']}": (200, limit) for limit in limits}


def sent(console: Console) -> "list[tuple[str, Any]]":
    """What the interface was asked to change."""
    return [
        (what, body) for what, body in console.interface.asked if not what.startswith("GET") and "sessions" not in what
    ]


async def test_limits_of_config_and_api_stand_in_one_table_with_their_use(console: Console) -> None:
    answer(console, OF_CONFIG, OF_TASKS, BOT | {"raised": RAISE, "amount": "30"}, EACH_KEY, after=EACH_KEY["id"])
    page = await console.get("/limits")
    assert page.status == 200
    shown = (
        "$10.00/day",
        "$30.00/month",
        "20 %",
        "130 %",
        "raised by zoë",
        "each by itself",
        "pilot customer",
        "10 jobs in total",
    )
    assert [words for words in shown if words not in page.words] == []
    assert f'href="/limits/{segment(OF_CONFIG["id"])}"' in page.text
    assert 'href="/limits?after=key%3A%2A.usd.month#all"' in page.text
    await console.get("/limits?kind=key&scope=team:research&after=x")
    query = {"kind": "key", "scope": "team:research", "after": "x", "limit": "200"}
    assert query in console.interface.queries
    saved = await console.get("/limits?csv=all")
    assert "key:acme-bot,30" in saved.text
    answer(console)
    assert "No limits Set one here" in (await console.get("/limits")).words
    console.interface.answers["GET limits"] = 503, problem("unavailable", "Redis does not answer")
    assert "Redis does not answer" in (await console.get("/limits")).words


async def test_limits_that_are_only_tried_stand_apart(console: Console) -> None:
    tried = OF_CONFIG | {"id": "shadow.limits.0", "scope": "agent:tried", "refused": 1234}
    console.interface.answers["GET limits"] = 200, {"limits": [BOT], "tried": [tried]}
    page = await console.get("/limits")
    shown = page.words[page.words.index("Only tried") :]
    assert "They refuse nothing" in shown
    assert "agent:tried" in shown
    assert "none; would have refused 1,234 calls" in shown
    assert "agent:tried" not in page.words[: page.words.index("Only tried")]


async def test_a_limit_is_set_in_the_words_of_the_command(console: Console) -> None:
    answer(console, BOT)
    console.interface.answers["PUT limits/key:acme-bot.usd.month"] = 200, BOT
    form = {"scope": " key:acme-bot ", "unit": "usd", "amount": " $20.50", "per": "month", "action": "refuse"}
    page = await console.get("/limits")
    assert 'value="50, 80, 100"' in page.text
    more = {"until": "2027-01-01T00:00", "reason": "pilot", "thresholds": "60 %, 90"}
    page = await console.submit("/limits", "/limits", **form, **more)
    body = {"scope": "key:acme-bot", "usd": "20.50", "per": "month", "action": "refuse"}
    until = "2027-01-01T00:00:00.000Z"
    assert sent(console) == [
        ("PUT limits/key:acme-bot.usd.month", body | {"thresholds": [60, 90], "until": until, "reason": "pilot"})
    ]
    assert "The limit key:acme-bot.usd.month is in effect." in page.words
    assert page.url.endswith(f"/limits/{BOT['id']}")
    console.interface.answers["PUT limits/key:a.concurrent"] = 200, BOT
    await console.submit("/limits", "/limits", scope="key:a", unit="concurrent", amount="5", per="", action="wait")
    assert sent(console)[-1] == ("PUT limits/key:a.concurrent", {"scope": "key:a", "concurrent": 5, "action": "wait"})


@each_row(
    ("unit", "amount", "said"),
    [
        ("usd", "2,50", "contains a comma: write 2.50"),
        ("usd", "a lot", "is not an amount in USD"),
        ("tokens", "400,000", "is no whole number"),
        ("requests", "1.5", "is no whole number"),
        ("concurrent", "many", "is no whole number"),
    ],
)
async def test_an_amount_that_might_be_meant_otherwise_sets_nothing(
    console: Console, unit: str, amount: str, said: str
) -> None:
    answer(console)
    form = {"scope": f"key:{EVIL}", "unit": unit, "amount": amount, "per": "month", "action": "refuse"}
    page = await console.submit("/limits", "/limits", **form)
    assert (page.status, sent(console)) == (422, [])
    assert "The limit was not set: " in page.words
    assert said in page.words
    form_again = page.text.split('<details class="act" open')[1].split("</form>")[0]
    assert f'value="{amount}"' in form_again
    assert f'<option value="{unit}" selected>' in form_again
    assert EVIL not in page.text


async def test_a_limit_below_what_is_spent_is_set_if_that_is_confirmed(console: Console) -> None:
    answer(console, BOT)
    path = f"limits/{BOT['id']}"
    console.interface.answers[f"PUT {path}"] = 422, problem("below_spent", "$5.00 is spent already")
    form = {"id": BOT["id"], "scope": "key:acme-bot", "unit": "usd", "per": "month", "amount": "1", "action": "refuse"}
    page = await console.submit(HERE, f"{HERE}/set", **form)
    assert "The limit was not set: $5.00 is spent already" in page.words
    assert "Yes, refuse calls from now on" in page.words
    console.interface.answers[f"PUT {path}"] = 200, BOT
    await console.submit(HERE, f"{HERE}/set", **form, confirmed="stop")
    assert [body.get("stop") for _, body in sent(console)] == [None, True]


async def test_a_limit_is_raised_and_more_than_ten_times_is_asked_for_twice(console: Console) -> None:
    answer(console, BOT, EACH_KEY)
    for limit in (BOT, EACH_KEY):
        console.interface.answers[f"POST limits/{limit['id']}/raise"] = 200, limit
    page = await console.submit(HERE, f"{HERE}/raise", unit="usd", amount="250", reason="launch")
    assert sent(console) == []
    assert "Yes, raise it to $250.00, more than ten times $20.00" in page.words
    await console.submit(HERE, f"{HERE}/raise", unit="usd", amount="250", reason="launch", confirmed="250")
    assert sent(console) == [(f"POST limits/{BOT['id']}/raise", {"amount": "250", "reason": "launch"})]
    of_each = f"/limits/{segment(EACH_KEY['id'])}"
    page = await console.submit(of_each, f"{of_each}/raise", unit="usd", amount="30", reason="x", scope="key:a")
    assert sent(console)[-1][1] == {"amount": "30", "scope": "key:a", "reason": "x"}
    assert console.interface.queries[-1] == {"scope": "key:a"}


async def test_a_limit_of_the_config_is_only_raised_and_one_that_is_gone_is_not_found(console: Console) -> None:
    answer(console, OF_CONFIG, OF_TASKS, BOT)
    page = await console.get(f"/limits/{segment(OF_CONFIG['id'])}")
    assert "the config, where it is changed; here it can be raised" in page.words
    assert "Raise the limit" in page.words
    of_tasks = (await console.get(f"/limits/{segment(OF_TASKS['id'])}")).words
    assert "Raise the limit" not in of_tasks
    assert "Delete the limit" not in page.words
    assert "Change the limit" not in page.words
    assert 'href="/budgets/agent%3Awri%2Fter%2Fdaily"' in page.text, "its spend and forecast"
    console.interface.answers[f"DELETE limits/{BOT['id']}"] = 200, documents.limit_event(BOT)
    page = await console.submit(HERE, f"{HERE}/delete", reason="over")
    assert sent(console) == [(f"DELETE limits/{BOT['id']}", None)]
    assert {"reason": "over"} in console.interface.queries
    assert "The limit key:acme-bot.usd.month is deleted." in page.words
    console.interface.answers["GET limits/gone"] = 404, problem("unknown_limit", "there is no limit")
    assert (await console.get("/limits/gone")).status == 404


async def test_who_changed_a_limit_and_why_stands_on_its_page(console: Console) -> None:
    answer(console, BOT)
    details = {"limit_id": BOT["id"], "scope": "key:acme-bot", "usd": "20", "per": "month"}
    events = [
        samples.audit_event("a1", at=datetime.now(UTC), action="set_limit", by="ada", details=details, reason=EVIL),
        samples.audit_event("a2", at=datetime.now(UTC), action="set_limit", details=details | {"limit_id": "other"}),
    ]
    stored = [rows.audit_row(AuditEvent.model_validate(event), number) for number, event in enumerate(events)]
    await console.analytics.insert(schema.AUDIT, stored)
    page = await console.get(HERE)
    assert "ada set limit done" in page.words
    assert "usd 20, per month" in page.words
    assert page.words.count("set limit") == 1
    assert EVIL not in page.text


async def test_who_waits_for_a_limit_stands_on_its_page(console: Console) -> None:
    waiting = {"waiting": 3, "waiting_calls": [{"key": EVIL, "tenant": "acme", "since": documents.AT}]}
    answer(console, BOT | waiting)
    page = await console.get(HERE)
    assert "Waiting (3)" in page.words
    assert f"{EVIL} acme" in page.words
    assert EVIL not in page.text
    assert "3 wait" in (await console.get("/limits")).words


async def test_who_lacks_the_scope_sees_limits_and_sets_none(console: Console) -> None:
    answer(console, BOT)
    csrf = (await console.get("/limits")).csrf
    console.interface.answers["GET key"] = key_with("read")
    await console.sign_in()
    page = await console.get(HERE)
    assert "lacks the scope limits , and can't set or delete limits; with operate or approve" in page.words
    assert '<form method="post" action="/limits' not in page.text
    page = await console.post("/limits", {"csrf": csrf, "scope": "key:a", "unit": "usd", "amount": "1", "per": "day"})
    assert page.status == 403
    assert sent(console) == []
