from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from zoneinfo import ZoneInfo

import pytest

from breakwater.jobs.contract.execution import Attempt, CostBasis
from breakwater.limits.rules.ledger import AttemptSums
from breakwater.local.demo.reconciliation import LedgerComparison, ProviderCall, compare
from tests.records.samples import attempt

LEDGER = (
    ProviderCall("job-1:1", "gpt-4o", 0),
    ProviderCall("job-1:2", "gpt-4o-mini", 700),
    ProviderCall("job-2:1", "gpt-4o", 1_001),
    ProviderCall("job-3:1", "o3", 0),
)


def row(execution_id: str, number: int, agent: str, model: str, cost: int | None, basis: CostBasis) -> Attempt:
    return attempt(execution_id, number, agent=agent, model=model, cost=cost, cost_basis=basis)


ROWS = (
    row("job-1", 1, "writer", "gpt-4o", 0, "billed"),
    row("job-1", 2, "writer", "gpt-4o-mini", 700, "billed"),
    row("job-2", 1, "writer", "gpt-4o", 1_001, "billed"),
    row("job-3", 1, "researcher", "o3", 5_000, "estimated"),
    attempt("job-4", agent="writer", outcome="short_circuited", short_circuited=True, cost=None),
)
REDIS = {
    "global": AttemptSums(calls=4, spent=6_701),
    "agent:writer": AttemptSums(calls=3, spent=1_701),
    "agent:researcher": AttemptSums(calls=1, spent=5_000),
}


def compared(
    ledger: tuple[ProviderCall, ...] = LEDGER,
    rows: tuple[Attempt, ...] = ROWS,
    redis: Mapping[str, AttemptSums] = REDIS,
    reserved: Mapping[str, int] | None = None,
) -> LedgerComparison:
    day = ROWS[0].started_at.date().isoformat()
    held = {(day, scope): amount for scope, amount in (reserved or {}).items()}
    return compare(ledger, {(day, scope): sums for scope, sums in redis.items()}, held, rows, ZoneInfo("UTC"))


def wrong_lines(comparison: LedgerComparison) -> list[str]:
    return [line.name for line in comparison.figures if not line.agree]


def test_ledgers_that_agree_have_no_differences() -> None:
    comparison = compared()
    assert comparison.agree
    assert comparison.differences == ()
    figures = {line.name: (line.provider, line.redis, line.clickhouse) for line in comparison.figures}
    assert figures == {
        "calls": (4, 4, 4),
        "billed": ("0.000001701", None, "0.000001701"),
        "estimated": ("0.000000000", None, "0.000005000"),
        "spend": (None, "0.000006701", "0.000006701"),
        "reserved": (None, "0.000000000", None),
    }


def test_one_nano_dollar_is_a_difference_named_with_its_call_and_both_figures() -> None:
    ledger = (*LEDGER[:2], replace(LEDGER[2], cost=1_002), LEDGER[3])
    comparison = compared(ledger)
    assert wrong_lines(comparison) == ["billed"]
    assert comparison.differences == ("job-2:1: the provider billed $0.000001002, ClickHouse says $0.000001001",)


def test_sums_that_agree_by_chance_hide_no_wrong_call() -> None:
    ledger = (LEDGER[0], replace(LEDGER[1], cost=699), replace(LEDGER[2], cost=1_002), LEDGER[3])
    comparison = compared(ledger)
    assert wrong_lines(comparison) == []
    assert not comparison.agree
    assert [difference.partition(": ")[0] for difference in comparison.differences] == ["job-1:2", "job-2:1"]


def test_a_call_that_clickhouse_lacks_is_named() -> None:
    comparison = compared(rows=ROWS[:2] + ROWS[3:])
    assert wrong_lines(comparison) == ["calls", "billed", "spend"]
    assert comparison.differences[0] == "job-2:1: not in ClickHouse"
    assert "agent:writer: 3 calls and $0.000001701 in Redis, 2 and $0.0000007 in ClickHouse" in comparison.differences


def test_an_attempt_that_the_provider_never_heard_of_is_named() -> None:
    comparison = compared(LEDGER[:2] + LEDGER[3:])
    assert comparison.differences == ("job-2:1: not at the provider",)


def test_a_call_of_another_model_is_a_difference_even_at_the_same_cost() -> None:
    comparison = compared((*LEDGER[:3], replace(LEDGER[3], model="o1")))
    assert comparison.differences == ("job-3:1: the provider called o1, ClickHouse says o3",)


def test_a_call_that_was_made_twice_is_a_difference_even_where_nothing_was_billed() -> None:
    comparison = compared((*LEDGER, LEDGER[0]))
    assert wrong_lines(comparison) == ["calls"]
    assert comparison.differences == ("job-1:1: 2 times at the provider",)


def test_a_call_of_somebody_else_is_a_difference() -> None:
    comparison = compared((*LEDGER, ProviderCall(None, "gpt-4o", 5)))
    assert comparison.differences == ("a call without an id: not in ClickHouse",)


@pytest.mark.parametrize(("billed", "agree"), [(0, True), (5_000, True), (5_001, False)])
def test_the_provider_may_bill_an_unanswered_call_up_to_what_the_plane_reckons(billed: int, agree: bool) -> None:
    comparison = compared((*LEDGER[:3], replace(LEDGER[3], cost=billed)))
    assert comparison.agree is agree
    if not agree:
        assert "ClickHouse says $0.000005 at most" in comparison.differences[0]


def test_redis_is_compared_for_each_agent() -> None:
    swapped = {"agent:writer": AttemptSums(calls=3, spent=1_700), "agent:researcher": AttemptSums(calls=1, spent=5_001)}
    comparison = compared(redis={**REDIS, **swapped})
    assert wrong_lines(comparison) == []
    assert comparison.differences == (
        "agent:researcher: 1 calls and $0.000005001 in Redis, 1 and $0.000005 in ClickHouse",
        "agent:writer: 3 calls and $0.0000017 in Redis, 3 and $0.000001701 in ClickHouse",
    )


def test_a_reservation_that_was_not_given_back_is_a_difference() -> None:
    comparison = compared(reserved={"global": 9, "agent:writer": 9})
    assert wrong_lines(comparison) == ["reserved"]
    assert "agent:writer: Redis still holds $0.000000009 for calls that have ended" in comparison.differences


def test_an_unknown_cost_is_never_taken_for_zero() -> None:
    rows = (row("job-1", 1, "writer", "gpt-4o", None, "unknown"), *ROWS[1:])
    assert compared(rows=rows).differences == ("job-1:1: its cost is unknown",)
