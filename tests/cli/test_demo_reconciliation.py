from __future__ import annotations

from dataclasses import replace

import pytest

from breakwater.cli.demo.reconciliation import LedgerComparison, ProviderCall, RecordedCall, RedisCounters, compare

LEDGER = (
    ProviderCall("job-1:1", "gpt-4o", 0),
    ProviderCall("job-1:2", "gpt-4o-mini", 700),
    ProviderCall("job-2:1", "gpt-4o", 1_001),
    ProviderCall("job-3:1", "o3", 0),
)
ROWS = (
    RecordedCall("job-1:1", "writer", "gpt-4o", 0, "billed"),
    RecordedCall("job-1:2", "writer", "gpt-4o-mini", 700, "billed"),
    RecordedCall("job-2:1", "writer", "gpt-4o", 1_001, "billed"),
    RecordedCall("job-3:1", "researcher", "o3", 5_000, "estimated"),
)
BY_AGENT = {"writer": RedisCounters(3, 1_701), "researcher": RedisCounters(1, 5_000)}
TOTAL = RedisCounters(4, 6_701)


def compared(
    ledger: tuple[ProviderCall, ...] = LEDGER,
    rows: tuple[RecordedCall, ...] = ROWS,
    total: RedisCounters = TOTAL,
    by_agent: dict[str, RedisCounters] | None = None,
) -> LedgerComparison:
    return compare(ledger, total, BY_AGENT if by_agent is None else by_agent, rows)


def wrong_lines(comparison: LedgerComparison) -> list[str]:
    return [line.name for line in comparison.figures if not line.agree]


def test_ledgers_that_agree_have_no_differences() -> None:
    comparison = compared()
    assert comparison.agree
    assert comparison.differences == ()
    figures = {line.name: (line.provider, line.redis, line.clickhouse) for line in comparison.figures}
    assert figures == {
        "calls": (4, 4, 4),
        "billed": (1_701, None, 1_701),
        "estimated": (0, None, 5_000),
        "spend": (None, 6_701, 6_701),
        "reserved": (None, 0, None),
    }


def test_one_nano_dollar_is_a_difference_named_with_its_model_its_call_and_both_figures() -> None:
    ledger = (*LEDGER[:2], replace(LEDGER[2], cost=1_002), LEDGER[3])
    comparison = compared(ledger)
    assert wrong_lines(comparison) == ["billed"]
    assert comparison.differences == (
        "gpt-4o: 2 calls and $0.000001002 billed at the provider, 2 and $0.000001001 billed in ClickHouse "
        "(job-2:1: the provider billed $0.000001002, ClickHouse says $0.000001001)",
    )


def test_sums_that_agree_by_chance_hide_no_wrong_call() -> None:
    ledger = (LEDGER[0], replace(LEDGER[1], cost=699), replace(LEDGER[2], cost=1_002), LEDGER[3])
    comparison = compared(ledger)
    assert wrong_lines(comparison) == []
    assert not comparison.agree
    assert [difference.partition(":")[0] for difference in comparison.differences] == ["gpt-4o", "gpt-4o-mini"]


def test_a_call_that_clickhouse_lacks_is_named() -> None:
    comparison = compared(rows=ROWS[:2] + ROWS[3:])
    assert wrong_lines(comparison) == ["calls", "billed", "spend"]
    assert "not in ClickHouse: job-2:1" in comparison.differences[0]
    assert comparison.differences[1] == "writer: 3 calls and $0.000001701 in Redis, 2 and $0.0000007 in ClickHouse"


def test_an_attempt_that_the_provider_never_heard_of_is_named() -> None:
    comparison = compared(LEDGER[:2] + LEDGER[3:])
    assert "not at the provider: job-2:1" in comparison.differences[0]


def test_a_call_that_was_made_twice_is_a_difference_even_where_nothing_was_billed() -> None:
    comparison = compared((*LEDGER, LEDGER[0]))
    assert wrong_lines(comparison) == ["calls"]
    assert "1 more than once at the provider" in comparison.differences[0]


def test_a_call_of_somebody_else_is_a_difference() -> None:
    comparison = compared((*LEDGER, ProviderCall(None, "gpt-4o", 5)))
    assert "not in ClickHouse: without an id" in comparison.differences[0]


@pytest.mark.parametrize(("billed", "agree"), [(0, True), (5_000, True), (5_001, False)])
def test_the_provider_may_bill_an_unanswered_call_up_to_what_the_plane_reckons(billed: int, agree: bool) -> None:
    comparison = compared((*LEDGER[:3], replace(LEDGER[3], cost=billed)))
    assert comparison.agree is agree
    if not agree:
        assert "ClickHouse says $0.000005 at most" in comparison.differences[0]


def test_redis_is_compared_for_each_agent() -> None:
    swapped = {"writer": RedisCounters(3, 1_700), "researcher": RedisCounters(1, 5_001)}
    comparison = compared(by_agent=swapped)
    assert wrong_lines(comparison) == []
    assert comparison.differences == (
        "researcher: 1 calls and $0.000005001 in Redis, 1 and $0.000005 in ClickHouse",
        "writer: 3 calls and $0.0000017 in Redis, 3 and $0.000001701 in ClickHouse",
    )


def test_a_reservation_that_was_not_given_back_is_a_difference() -> None:
    held = {**BY_AGENT, "writer": RedisCounters(3, 1_701, 9)}
    comparison = compared(total=replace(TOTAL, reserved=9), by_agent=held)
    assert wrong_lines(comparison) == ["reserved"]
    assert comparison.differences == ("writer: Redis still holds $0.000000009 for calls that have ended",)


def test_an_unknown_cost_is_never_taken_for_zero() -> None:
    rows = (replace(ROWS[0], cost=None, cost_basis="unknown"), *ROWS[1:])
    comparison = compared(rows=rows)
    assert comparison.differences == ("the cost of 1 calls is unknown: job-1:1",)
