"""The page of the audit log."""

from datetime import UTC, datetime, timedelta

from breakwater.records import rows, schema
from tests.records import samples
from tests.services.console.conftest import Console, key_with

EVIL = "<script>alert(1)</script>"


async def test_who_did_what_and_what_came_of_it_the_latest_first(console: Console) -> None:
    at = datetime.now(UTC) - timedelta(minutes=5)
    events = [
        samples.audit_event("a1", at=at, outcome="begun"),
        samples.audit_event("a1", at=at, reason=EVIL),
        samples.audit_event(
            "a2", at=at + timedelta(seconds=9), action="reset_task", outcome="refused", error="unknown_task", by="ada",
            details={"task_id": "t2"}, reason=None,
        ),
        samples.audit_event("a3", at=at - timedelta(days=9), by="long ago"),
    ]  # fmt: skip
    stored = [rows.audit_row(event, sequence) for sequence, event in enumerate(events)]
    await console.analytics.insert(schema.AUDIT, stored)
    page = await console.get("/audit")
    assert page.status == 200
    assert "reset task refused unknown task task id t2 –" in page.words
    assert "raise cap done budget agent:writer/daily limit usd 50.000000000 <script>" in page.words
    assert "begun" not in page.words
    assert EVIL not in page.text
    assert page.words.index("reset task refused") < page.words.index("raise cap done")
    assert "long ago" not in page.words
    assert "long ago" in (await console.get("/audit?window=30d")).words
    only = await console.get("/audit?by=ada&action=reset_task")
    assert "t2" in only.words
    assert "agent:writer/daily" not in only.words
    assert only.text.count(">Filter</button>") == 1
    assert "No such actions" in (await console.get("/audit?by=nobody")).words


async def test_the_log_is_for_keys_with_its_scope_and_nobody_else_is_shown_a_link(visited: Console) -> None:
    visited.interface.answers["GET key"] = key_with("read", "operate")
    await visited.sign_in()
    assert (await visited.get("/audit")).status == 403
    visited.interface.answers["GET executions"] = 200, {}
    assert "/audit" not in (await visited.get("/executions")).text
