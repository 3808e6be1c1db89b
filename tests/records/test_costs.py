"""What is said of a line of a month's costs, and its CSV."""

from __future__ import annotations

import csv
import io
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from breakwater.config import parse_config
from breakwater.kernel.formats import csv_text
from breakwater.kernel.types import NANO_PER_USD, ms_from_time
from breakwater.limits.rules.budget import period
from breakwater.records.contract import CostLine, CostsBy
from breakwater.records.rules.costs import (
    Cap,
    CostSums,
    cap_of,
    cost_line,
    month_after,
    month_before,
    month_of,
    raises_of,
    scope_of,
)
from tests.records.samples import budget_event
from tests.tables import each_row

BERLIN, KOLKATA = ZoneInfo("Europe/Berlin"), ZoneInfo("Asia/Kolkata")
USD = NANO_PER_USD
CAPS = parse_config(
    """
providers: {local: {base_url: "http://127.0.0.1:9/v1"}}
budgets: {global: {monthly_usd: 100}, tenants: {acme: {monthly_usd: 20, enforcement: hard}, "*": {monthly_usd: 1}}}
agents: {writer: {model: m, budget: {monthly_usd: 10, daily_usd: 1}}, reader: {model: m, budget: {daily_usd: 2}}}
"""
).limit_table


@pytest.mark.parametrize(
    ("name", "zone", "starts", "ends", "before"),
    [
        ("2026-11", BERLIN, "2026-10-31T23:00Z", "2026-11-30T23:00Z", "2026-10"),
        ("2026-01", KOLKATA, "2025-12-31T18:30Z", "2026-01-31T18:30Z", "2025-12"),
        ("2026-10", BERLIN, "2026-09-30T22:00Z", "2026-10-31T23:00Z", "2026-09"),
    ],
)
def test_a_month_is_one_of_the_budgets_time_zone(
    name: str, zone: ZoneInfo, starts: str, ends: str, before: str
) -> None:
    month = month_of(name, zone)
    assert (month.start_ms, month.end_ms) == tuple(ms_from_time(datetime.fromisoformat(one)) for one in (starts, ends))
    previous = month_before(month, zone)
    assert (previous.name, previous.end_ms) == (before, month.start_ms)
    assert month == period("monthly", datetime.fromisoformat(starts), zone)


def note(
    kind: str, limit: int | None, configured: int | None, scope: str = "tenant", window: str = "monthly", **of: Any
) -> Any:
    whose = of or {"tenant": "acme"}
    given = {"tenant": None, "agent": None, **whose, "scope": scope, "window": window, "kind": kind}
    return budget_event(**given, limit=limit, configured=configured)


RAISED = note("raised", 50 * USD, 20 * USD)


@each_row(
    ("key", "notes", "expected"),
    [
        (None, (), Cap()),
        ("global", (), Cap(100 * USD)),
        ("agent:writer", (), Cap(10 * USD, daily=USD)),
        ("agent:reader", (), Cap(daily=2 * USD)),
        ("tenant:acme", (), Cap(20 * USD, hard=True)),
        ("tenant:any other", (), Cap(USD)),
        ("tenant:acme", (RAISED,), Cap(50 * USD, hard=True, raised_from=20 * USD)),
        ("tenant:rival", (RAISED,), Cap(USD)),
        ("tenant:acme", (RAISED, note("soft_cap", 50 * USD, None)), Cap(50 * USD, hard=True, raised_from=20 * USD)),
        ("tenant:acme", (RAISED, note("raise_ended", 20 * USD, 20 * USD)), Cap(20 * USD, hard=True)),
        ("tenant:acme", (note("raised", 50 * USD, 10 * USD),), Cap(20 * USD, hard=True)),
        (
            "agent:writer",
            (note("raised", 30 * USD, 10 * USD, "agent", agent="writer"),),
            Cap(30 * USD, daily=USD, raised_from=10 * USD),
        ),
        # A day's raise is that of another budget.
        (
            "agent:writer",
            (note("raised", 5 * USD, USD, "agent", "daily", agent="writer"),),
            Cap(10 * USD, daily=5 * USD),
        ),
        (
            "agent:reader",
            (note("raised", 5 * USD, 2 * USD, "agent", "daily", agent="reader"),),
            Cap(daily=5 * USD, raised_from=2 * USD),
        ),
    ],
)
def test_the_cap_of_a_line(key: str | None, notes: tuple[Any, ...], expected: Cap) -> None:
    assert cap_of(key, CAPS, raises_of(notes)) == expected


NOVEMBER = month_of("2026-11", ZoneInfo("UTC"))
DECEMBER = month_after(NOVEMBER, ZoneInfo("UTC"))
MIDDLE = ms_from_time(datetime(2026, 11, 16, tzinfo=UTC))
EARLY = ms_from_time(datetime(2026, 11, 1, 20, tzinfo=UTC))
OVER = ms_from_time(datetime(2026, 12, 3, tzinfo=UTC))
# An eighth of the month, in which a quarter of half the month's spend was spent: it goes on as it did.
EVEN = CostSums(spend=12 * USD, recent=3 * USD, calls=10)


@each_row(
    ("sums", "cap", "now_ms", "expected"),
    [
        (EVEN, Cap(), MIDDLE, {"spend": 12 * USD, "forecast": 24 * USD, "cap": None}),
        (EVEN, Cap(20 * USD), MIDDLE, {"forecast": 24 * USD, "cap": 20 * USD}),
        (EVEN, Cap(20 * USD, hard=True), MIDDLE, {"forecast": 20 * USD, "next_month": 20 * USD}),
        # Next month has a day more, and no raise.
        (EVEN, Cap(), MIDDLE, {"next_month": 24 * USD * 31 // 30}),
        (EVEN, Cap(30 * USD, hard=True, raised_from=8 * USD), MIDDLE, {"forecast": 24 * USD, "next_month": 8 * USD}),
        (EVEN, Cap(8 * USD), MIDDLE, {"next_month": 24 * USD * 31 // 30}),
        (EVEN, Cap(30 * USD, hard=True, daily=USD), MIDDLE, {"next_month": 24 * USD * 31 // 30}),
        (EVEN, Cap(), EARLY, {"forecast": None, "next_month": None}),
        (EVEN, Cap(), OVER, {"spend": 12 * USD, "forecast": None, "next_month": None}),
        (CostSums(previous=7), Cap(), MIDDLE, {"spend": 0, "previous": 7, "forecast": None, "wasted": 0}),
        (CostSums(calls=2, unknown=2), Cap(), MIDDLE, {"spend": None, "wasted": 0, "previous": 0}),
        (CostSums(spend=1, calls=2, unknown=1), Cap(), OVER, {"spend": 1, "calls_of_unknown_cost": 1}),
        (CostSums(spend=1, unknown=1, unknown_wasted=1), Cap(), OVER, {"spend": 1, "wasted": None}),
        (CostSums(unknown_previous=1), Cap(), OVER, {"previous": None}),
    ],
)
def test_a_line(sums: CostSums, cap: Cap, now_ms: int, expected: dict[str, Any]) -> None:
    line = cost_line("acme", sums, cap, NOVEMBER, DECEMBER, now_ms)
    assert isinstance(line, CostLine)
    assert {name: getattr(line, name) for name in expected} == expected


def test_sums_add_up_and_all_but_tags_have_budgets() -> None:
    assert CostSums(spend=24 * USD, recent=6 * USD, calls=20) == EVEN + EVEN
    kinds: list[CostsBy] = ["agent", "tenant", "model", "provider", "key", "user", "team", "tag"]
    assert [scope_of(by, "x") for by in kinds] == [*(f"{by}:x" for by in kinds[:-1]), None]
    assert scope_of("tenant", None) is None


@each_row(
    ("value", "cell"),
    [
        ("acme", "acme"),
        ('a "b", c\nd', 'a "b", c\nd'),
        (None, ""),
        (0, "0"),
        (-5, "-5"),
        ("-5.000000001", "-5.000000001"),
        ("=1+1", "'=1+1"),
        ("@sum", "'@sum"),
        ("+49", "'+49"),
        ("-x", "'-x"),
        ("--1", "'--1"),
        ("\tx", "'\tx"),
        ("\n=1+1", "'\n=1+1"),
        ("\uff1d1+1", "'\uff1d1+1"),
    ],
)
def test_a_cell_of_csv_is_read_back_and_is_no_formula(value: str | int | None, cell: str) -> None:
    text = csv_text(("name", "x"), [(value, 1)])
    assert list(csv.reader(io.StringIO(text, newline=""))) == [["name", "x"], [cell, "1"]]
