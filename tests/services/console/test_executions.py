"""The list of executions: found by filters, paged through, and safe whatever an agent wrote."""

from datetime import UTC, datetime, timedelta
from typing import Any, cast

from breakwater.jobs.contract.execution import ErrorInfo, Execution
from breakwater.kernel.time_window import TimeWindow
from breakwater.records import rows, schema
from breakwater.records.pages.executions import filters_of
from breakwater.records.search import Filters
from tests.records.samples import execution
from tests.services.console.conftest import Console
from tests.tables import each_row

EVIL = '<script>alert("1")</script>'


def ended(number: int, **fields: object) -> Execution:
    """One that ended so many minutes ago."""
    at = datetime.now(UTC).replace(microsecond=0) - timedelta(minutes=number)
    times = {"queued_at": at, "dispatched_at": at, "started_at": at, "completed_at": at}
    return execution(f"job-{number:03}", **(times | fields))


async def store(console: Console, *records: Execution) -> None:
    stored = [rows.execution_row(record, index) for index, record in enumerate(records)]
    await console.analytics.insert(schema.EXECUTIONS, stored)


async def test_an_empty_plane_says_how_to_fill_it(console: Console):
    page = await console.get("/executions")
    assert page.status == 200
    assert "Nothing ended in the last 24h" in page.words
    assert "breakwater submit" in page.words
    filtered = await console.get("/executions?agent=nobody")
    assert "Remove a filter" in filtered.words


async def test_executions_have_a_preview_of_prompt_and_answer_the_submitter_and_tokens(console: Console):
    asked = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Where is\n my parcel?"}]
    texts: dict[str, object] = {"messages": asked, "output": "On its way. " * 20}
    who: dict[str, object] = {"submitted_by": "checkout", "tenant": "acme", "total_tokens": 1_234}
    encrypted = {"messages": None, "output": None, "encrypted": "bwe1.00000000.token"}
    await store(console, ended(1, **texts, **who), ended(2, **encrypted, submitted_by="checkout"))
    for address in ("/executions?window=24h&flat=1", "/executions?window=24h"):
        page = await console.get(address)
        assert f"Where is my parcel? → {'On its way. ' * 10}".rstrip() in page.words
        assert "writer checkout · acme succeeded" in page.words
        assert "writer checkout succeeded" in page.words, "without the texts that are encrypted"
        assert "1,234 tokens" in page.words
    shown = await console.get("/executions/job-001")
    assert "Submitted by checkout Tenant acme" in shown.words


async def test_all_are_paged_through_and_none_twice(console: Console):
    await store(console, *(ended(number) for number in range(1, 61)))
    seen: list[str] = []
    address, pages = "/executions?window=24h", 0
    while address:
        page = await console.get(address)
        assert "60 executions in the last 24h" in page.words
        seen += [part.split('"')[0] for part in page.text.split('href="/executions/')[1:]]
        older = page.text.split('rel="next" href="')
        address = older[1].split('"')[0].replace("&amp;", "&") if len(older) > 1 else ""
        pages += 1
    assert pages == 2
    assert seen == [f"job-{number:03}" for number in range(1, 61)]
    newer = page.text.split('rel="prev" href="')[1].split('"')[0].replace("&amp;", "&")
    assert "job-050" in (await console.get(newer)).text


async def test_filters_are_kept_and_reported(console: Console):
    broken = ErrorInfo(kind="server", class_="ServerError", message="the cable is cut", status_code=503)
    await store(
        console,
        ended(1, agent="writer", tenant="acme", user="ada@example.com", team="search"),
        ended(2, agent="reader", status="dead_lettered", reason="error", error=broken),
        ended(3, agent="reader", total_cost=2_000_000_000),
    )
    by_agent = await console.get("/executions?agent=reader")
    assert "2 executions" in by_agent.words
    assert '<option value="reader" selected>' in by_agent.text
    assert "the cable is cut" in by_agent.text
    for query in ("user=ada%40example.com", "team=search", "user=ada%40example.com&team=search&flat=1"):
        of_user = await console.get(f"/executions?{query}&whole=1")
        assert "1 execution in" in of_user.words
        assert "ada@example.com · acme" in of_user.words
    assert 'name="user" value="ada@example.com"' in of_user.text
    shown = (await console.get("/executions/job-001")).text
    assert 'href="/executions?window=30d&amp;user=ada%40example.com"' in shown
    together = "agent=reader&status=dead_lettered&reason=error&error_kind=server&model=gpt-4.1&text=CABLE"
    page = await console.get(f"/executions?{together}&whole=1")
    assert "1 execution in" in page.words
    assert 'href="/executions/job-002"' in page.text


def test_the_fields_of_the_form_are_filters_and_its_amounts_are_in_dollars():
    window = TimeWindow.last(timedelta(hours=1), datetime(2026, 11, 22, 12, tzinfo=UTC))
    names = (
        "agent",
        "status",
        "reason",
        "model",
        "tenant",
        "user",
        "team",
        "task_id",
        "plan_id",
        "run_id",
        "error_kind",
        "text",
    )
    fields = {name: f"a {name}" for name in names}
    assert filters_of(fields, window) == Filters(since=window.start, until=window.end, **cast(Any, fields))
    for amount in ("1.5", "$1.5"):
        assert filters_of({"min_cost": amount}, window).min_cost == 1_500_000_000


async def test_what_takes_long_to_find_follows_the_page(console: Console):
    await store(console, ended(1, agent="writer"))
    for query, list_follows, filters_follow in (
        ("agent=writer&text=job-001", True, True),
        ("agent=writer&sort=total_cost&window=30d", True, True),
        ("agent=writer&sort=total_cost&window=24h", False, False),
        ("agent=writer&window=30d", False, True),
    ):
        first = await console.get(f"/executions?{query}")
        assert ("/executions/job-001" in first.text) != list_follows, query
        assert ("data-pending" in first.text) == ("whole=1" in first.text) == filters_follow, query
        # One is in the form of the time range.
        kept = first.text.count('<input type="hidden" name="agent" value="writer">')
        assert ('<option value="writer" selected' in first.text, kept) == (not filters_follow, 1 + filters_follow), (
            query
        )
        whole = await console.get(f"/executions?{query}", **{"X-Refresh": "1"})
        assert "data-pending" not in whole.text, query
        assert "/executions/job-001" in whole.text, query
        assert '<option value="writer" selected' in whole.text, query


@each_row(
    ("query", "said"),
    [
        ("min_cost=cheap", "'cheap' is not an amount in dollars"),
        ("min_cost=NaN", "not an amount in dollars"),
        ("min_cost=-1", "not an amount in dollars"),
        ("after=nonsense", "has no dot"),
        ("before=12x.e", "milliseconds"),
    ],
)
async def test_what_is_wrong_with_an_address_is_reported(console: Console, query: str, said: str):
    page = await console.get(f"/executions?{query}")
    assert page.status == 200
    assert said in page.words


async def test_yesterday_is_a_day_and_not_the_last_24_hours(console: Console):
    yesterday = datetime.now(UTC).replace(hour=12, minute=0, second=0, microsecond=0) - timedelta(days=1)
    times = {"queued_at": yesterday, "dispatched_at": yesterday, "started_at": yesterday, "completed_at": yesterday}
    await store(
        console,
        execution("then", **times),
        execution("before", **times | {"completed_at": yesterday - timedelta(days=1)}),
    )
    page = await console.get("/executions?window=yesterday")
    assert "1 execution yesterday" in page.words
    assert 'href="/executions/then"' in page.text


async def test_both_cursors_at_once_are_no_error(console: Console):
    assert (await console.get("/executions?after=1795255200000.a&before=1795255200000.b")).status == 200


async def test_what_agents_and_errors_are_called_is_only_text(console: Console):
    error = ErrorInfo(kind="server", class_="ServerError", message=EVIL)
    await store(console, ended(1, agent=EVIL, tenant=EVIL, status="dead_lettered", reason="error", error=error))
    page = await console.get(f"/executions?text={EVIL}")
    assert "<script>alert" not in page.text
    assert EVIL in page.words or "&lt;script&gt;" in page.text


async def test_without_clickhouse_the_page_says_so(console: Console):
    await console.analytics.execute("RENAME TABLE executions TO hidden")
    page = await console.get("/executions")
    await console.analytics.execute("RENAME TABLE hidden TO executions")
    assert page.status == 200
    assert "ClickHouse refused" in page.words
    assert "breakwater setup" in page.words


async def test_a_run_of_twenty_steps_is_one_row_that_unfolds_into_its_tree(console: Console):
    loop = [
        ended(
            60 - number,
            run_id="acme/research",
            tenant="acme",
            agent="writer" if number else "planner",
            parent_execution_id=None if number == 0 else "job-060" if number < 19 else "job-050",
            total_cost=1_000_001,
            wasted_cost=5_000 if number == 3 else 0,
            **({"status": "dead_lettered", "reason": "timeout"} if number == 3 else {}),
        )
        for number in range(20)
    ]
    await store(console, *loop, ended(61, agent="alone"))
    page = await console.get("/executions")
    assert "21 executions in the last 24h" in page.words
    assert "20 steps" in page.words
    assert "1 of 20 failed" in page.words
    assert "$0.02" in page.words
    assert page.text.count('href="/executions/') == 1, "that of the execution without a run"
    unfolded = await console.get("/executions?open=acme/research")
    ids = [part.split('"')[0] for part in unfolded.text.split('href="/executions/')[1:]]
    # Below its parent.
    assert ids == [f"job-{60 - number:03}" for number in (*range(11), 19, *range(11, 19))] + ["job-061"]
    assert 'data-depth="2"' in unfolded.text
    # A filter finds the run by one of its steps, and that by the run unfolds it.
    failed = await console.get("/executions?status=dead_lettered")
    assert "1 execution in the last 24h" in failed.words
    assert "20 steps" in failed.words
    assert "job-050" in (await console.get("/executions?run_id=acme/research")).text
    flat = await console.get("/executions?flat=1")
    assert flat.text.count('href="/executions/') == 21
