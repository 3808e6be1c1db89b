"""What anomalies are judged by, as ClickHouse gives it, though every row is stored twice."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from breakwater.alerts.rules.anomaly import LAPSE, NEW_NORMAL, Baseline, Minute
from breakwater.alerts.settings import AnomalyRules
from breakwater.jobs.contract.execution import Execution
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.records import rows, schema
from breakwater.records.anomalies import GRACE, baselines, latest_minutes
from tests.records.samples import NOON, attempt, attempt_row, execution
from tests.records.test_views import store_twice

RULES = AnomalyRules(minimum_calls=2, minimum_minutes=5, sustained_minutes=2)
MINUTE = timedelta(minutes=1)
NOW = NOON + GRACE
"""The minute before noon is the last one that is complete."""


def minute_of(ago: int, *calls: dict[str, Any], agent: str = "writer") -> list[Execution]:
    """The calls of the minute that began so many minutes before noon."""
    ended = {"completed_at": NOON - ago * MINUTE + timedelta(seconds=20), "agent": agent}
    return [execution(f"{agent}-{ago}-{number}", **ended, **fields) for number, fields in enumerate(calls)]


async def store(analytics: Analytics, executions: Sequence[Execution]) -> None:
    await store_twice(
        analytics, schema.EXECUTIONS, [rows.execution_row(one, number) for number, one in enumerate(executions)]
    )


OK = {"status": "succeeded", "total_cost": "0.25", "duration_ms": 1000}
FAILED = {"status": "dead_lettered", "reason": "error", "total_cost": "0.5", "duration_ms": 3000}
REFUSED = {"status": "dead_lettered", "reason": "breaker_open", "total_cost": "0", "duration_ms": 1}
CANCELLED = {"status": "cancelled", "total_cost": "0.75", "duration_ms": 1}


async def test_a_minute_has_what_was_answered_or_failed_and_all_that_was_spent(analytics: Analytics) -> None:
    at, before = NOON - MINUTE, NOON - 3 * MINUTE
    await store(
        analytics,
        [
            *minute_of(0, OK, OK),  # not over
            *minute_of(1, OK, FAILED, {**OK, "duration_ms": 2000}, REFUSED, CANCELLED),
            *minute_of(1, {**OK, "dry_run": True}, {**OK, "cache_hit": True}, REFUSED, agent="idle"),
            *minute_of(2, FAILED),  # too few to say how fast or how good, but not what was spent
            *minute_of(3, FAILED, {**FAILED, "reason": "timeout"}, {**FAILED, "reason": "worker_lost"}, OK),
            *minute_of(4, OK, OK),
            *minute_of(int(LAPSE / MINUTE) + 1, OK, OK, agent="gone"),
        ],
    )
    begun = {"agent": "writer", "started_at": at}
    streams = [attempt("s", number, first_token_ms=100 * number, **begun) for number in range(1, 4)]
    streams += [attempt("t", number, first_token_ms=None, **begun) for number in range(1, 4)]
    await store_twice(analytics, schema.ATTEMPTS, [attempt_row(one, number) for number, one in enumerate(streams)])
    assert await latest_minutes(analytics, RULES, NOW) == {
        ("writer", "error_rate"): (Minute(at, pytest.approx(1 / 3), 3), Minute(before, 0.75, 4)),  # pyright: ignore[reportArgumentType]
        ("writer", "latency"): (Minute(at, 2000, 3), Minute(before, 3000, 4)),
        ("writer", "spend_rate"): (Minute(at, 1.75, 3), Minute(NOON - 2 * MINUTE, 0.5, 1)),
        ("writer", "first_token"): (Minute(at, 200, 3),),
        ("writer", "fallback_share"): (Minute(at, 0, 2), Minute(NOON - 4 * MINUTE, 0, 2)),
    }
    assert await latest_minutes(analytics, RULES, NOW - timedelta(seconds=1)) == {
        **{
            ("writer", name): minutes
            for name, minutes in {
                "error_rate": (Minute(before, 0.75, 4), Minute(NOON - 4 * MINUTE, 0.0, 2)),
                "latency": (Minute(before, 3000, 4), Minute(NOON - 4 * MINUTE, 1000, 2)),
                "spend_rate": (Minute(NOON - 2 * MINUTE, 0.5, 1), Minute(before, 1.75, 4)),
                "fallback_share": (Minute(NOON - 4 * MINUTE, 0, 2),),
            }.items()
        },
        ("gone", "error_rate"): (Minute(NOON - LAPSE - MINUTE, 0.0, 2),),
        ("gone", "latency"): (Minute(NOON - LAPSE - MINUTE, 1000, 2),),
        ("gone", "spend_rate"): (Minute(NOON - LAPSE - MINUTE, 0.5, 2),),
        ("gone", "fallback_share"): (Minute(NOON - LAPSE - MINUTE, 0, 2),),
    }


async def test_a_minute_has_the_share_that_fallbacks_answered_and_how_many_times_as_much_that_cost(
    analytics: Analytics,
) -> None:
    mini = {**OK, "chosen_model": "mini"}
    dearer = {**mini, "total_cost": "0.4", "wasted_cost": "0.1", "requested_model_cost": "0.1"}
    unknown = ({**mini, "requested_model_cost": "0"}, {**dearer, "cost_basis": "unknown"}, {**mini, "total_cost": None})
    unanswered = ({**FAILED, "chosen_model": None}, {**mini, "cache_hit": True}, {**mini, "dry_run": True}, REFUSED)
    executions = minute_of(1, OK, dearer, {**dearer, "total_cost": "0.2"}, *unknown, *unanswered)
    await store(analytics, [*executions, *minute_of(1, OK, OK, agent="steady")])
    latest = await latest_minutes(analytics, RULES, NOW)
    at = NOON - MINUTE
    assert latest["writer", "fallback_share"] == (Minute(at, pytest.approx(5 / 6), 6),)  # pyright: ignore[reportArgumentType]
    assert latest["writer", "fallback_cost"] == (Minute(at, pytest.approx(2), 2),)  # pyright: ignore[reportArgumentType]
    assert ("steady", "fallback_cost") not in latest
    learned = await baselines(analytics, AnomalyRules(minimum_calls=1, sustained_minutes=1), NOW + 2 * MINUTE)
    assert not {measure for _, measure in learned if measure.startswith("fallback")}, "they have limits"


async def test_a_baseline_is_of_the_week_before_the_minutes_that_are_judged(analytics: Analytics) -> None:
    old = int(NEW_NORMAL / MINUTE) + 3

    def slow(ms: int) -> dict[str, Any]:
        return {**OK, "duration_ms": ms}

    executions = [
        *minute_of(1, *[slow(90_000)] * 2),  # judged, like the next one
        *minute_of(2, *[slow(90_000)] * 2),
        *[one for number in range(1, 6) for one in minute_of(2 + number, *[slow(1000 * number)] * 2)],
        *[one for number in range(1, 6) for one in minute_of(old + number, OK, FAILED)],
        *[one for number in range(4) for one in minute_of(10 + number, OK, OK, agent="young")],
        *minute_of(8 * 24 * 60, *[slow(90_000)] * 2),  # forgotten
    ]
    await store(analytics, executions)
    learned = await baselines(analytics, RULES, NOW)
    assert {agent for agent, _ in learned} == {"writer"}
    # Five minutes of 1 to 5 s, and five with a median of 3 s.
    assert learned["writer", "latency"] == Baseline(3000, pytest.approx(200), 3000)  # pyright: ignore[reportArgumentType]
    assert learned["writer", "error_rate"] == Baseline(0.25, 0.25, None)
    assert learned["writer", "spend_rate"] == Baseline(0.625, 0.125, 0.75)
