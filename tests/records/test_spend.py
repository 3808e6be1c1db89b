"""The sums that budgets are made again from are those of the ledger, whatever attempts are stored and however often."""

import random
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from breakwater.jobs.contract.execution import Attempt
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.clickhouse.errors import QueryError
from breakwater.kernel.types import time_from_ms
from breakwater.limits.rules.budget import Period, period, periods_since
from breakwater.limits.rules.ledger import AttemptSums, Ledger, charged_at, ledger
from breakwater.records import schema
from breakwater.records.rows import attempt_row, budget_row
from breakwater.records.spend import budget_notes, spend, stored_upto
from tests.records.samples import attempt, budget_event, full_budget_event, repair

BERLIN = ZoneInfo("Europe/Berlin")
# Around the night of 25 hours, and the end of the month.
FIRST, LAST = datetime(2026, 10, 23, 20, tzinfo=UTC), datetime(2026, 11, 2, 4, tzinfo=UTC)
SOME_PERIODS = periods_since(FIRST, LAST, BERLIN)
LOG_CREATED = datetime(2026, 10, 28, 7, 30, 0, 500_000, tzinfo=UTC)
MS = timedelta(milliseconds=1)

Stored = tuple[Attempt, int, datetime]
"""With its sequence, and when it was stored."""


def some_attempts(picked: random.Random, count: int) -> list[Attempt]:
    """Of all kinds; charged on, and just before, the boundaries of days among other times."""
    boundaries = [time_from_ms(edge) for one in SOME_PERIODS for edge in (one.start_ms, one.end_ms)]
    everything: list[Attempt] = []
    for number in range(count):
        moment = FIRST + MS * picked.randrange((LAST - FIRST) // MS)
        if picked.random() < 0.4:
            moment = picked.choice(boundaries) - MS * picked.choice((0, 1))
        outcome = picked.choice(("success", "success", "error", "short_circuited", "worker_lost"))
        cost, held = (picked.choice((None, 0, 1, 10**18 - 1, picked.randrange(10**9))) for _ in range(2))
        started_late = timedelta(seconds=picked.choice((0, -7200, 3, 7200)))
        everything.append(
            attempt(
                f"e{number}",
                agent=picked.choice(("writer", "support/tier 1", "a:b")),
                tenant=picked.choice((None, "acme", "writer")),
                started_at=moment + started_late,
                reserved_at=moment if started_late or picked.random() < 0.5 else None,
                outcome=outcome,
                short_circuited=outcome == "short_circuited",
                cost=cost,
                cost_basis=picked.choice(("billed", "billed", "estimated", "unknown")),
                reserved=cost if picked.random() < 0.2 else held,
                input_tokens=picked.choice((None, 7, 300)),
                output_tokens=picked.choice((None, 0, 50)),
                reserved_tokens=picked.choice((None, 0, 20, 4_000)),
            )
        )
    return everything


def in_two_logs(everything: Iterable[Attempt]) -> list[Stored]:
    """Stored when they were charged: the earlier log has the higher sequences."""
    stored: list[Stored] = []
    sequence = {True: 1_000_000, False: 0}
    for one in sorted(everything, key=charged_at):
        earlier = charged_at(one) < LOG_CREATED
        sequence[earlier] += 3
        stored.append((one, sequence[earlier], charged_at(one)))
    return stored


async def store(analytics: Analytics, stored: Iterable[Stored]) -> None:
    await analytics.insert(schema.ATTEMPTS, [attempt_row(*one) for one in stored])


def of_periods(whole: Ledger, periods: Iterable[Period]) -> Ledger:
    names = {one.name for one in periods}
    return {place: figures for place, figures in whole.items() if place[0] in names}


async def test_what_is_stored_adds_up_to_the_ledger_of_the_same_attempts(analytics: Analytics) -> None:
    picked = random.Random(1)
    stored = in_two_logs(some_attempts(picked, 800))
    await analytics.execute(f"SYSTEM STOP MERGES {analytics.database}.attempts")
    await store(analytics, stored)
    await store(analytics, picked.sample(stored, 300))
    later = [sequence for _, sequence, at in stored if at >= LOG_CREATED]
    for upto in (0, picked.choice(later), picked.choice(later) + 1, later[-1]):
        counted = [one for one, sequence, at in stored if at < LOG_CREATED or sequence <= upto]
        expected = of_periods(ledger(counted, BERLIN), SOME_PERIODS)
        assert await spend(analytics, SOME_PERIODS, log_created=LOG_CREATED, upto=upto) == expected
    # The sample must be one that would show a mistake.
    total = expected["2026-10", "global"]
    assert total.spent > 10**18
    assert all(value for _, value in total.items())
    assert total.calls > total.gauged > total.exceeded


async def test_nothing_stored_adds_nothing(analytics: Analytics) -> None:
    assert await spend(analytics, SOME_PERIODS, log_created=LOG_CREATED, upto=9) == {}
    assert await spend(analytics, (), log_created=LOG_CREATED, upto=9) == {}
    assert await stored_upto(analytics, log_created=LOG_CREATED) == 0


async def test_a_budget_whose_costs_are_all_unknown_has_its_calls(analytics: Analytics) -> None:
    day = period("daily", LOG_CREATED, BERLIN)
    await store(analytics, [(attempt(started_at=LOG_CREATED, cost=None, cost_basis="unknown"), 4, LOG_CREATED)])
    unpriced = attempt(cost=None, cost_basis="unknown")
    expected = AttemptSums(calls=1, unpriced=1, tokens=(unpriced.input_tokens or 0) + (unpriced.output_tokens or 0))
    found = await spend(analytics, [day], log_created=LOG_CREATED, upto=4)
    assert found == {("2026-10-28", "global"): expected, ("2026-10-28", "agent:writer"): expected}


async def test_the_night_of_25_hours_belongs_to_its_day(analytics: Analytics) -> None:
    midnight = datetime(2026, 10, 24, 22, tzinfo=UTC)
    moments = (midnight - MS, midnight, midnight + timedelta(hours=25) - MS, midnight + timedelta(hours=25))
    await store(
        analytics,
        [(attempt(f"e{n}", started_at=at, cost=10**n), n, LOG_CREATED) for n, at in enumerate(moments)],
    )
    day = period("daily", midnight, BERLIN)
    found = await spend(analytics, [day], log_created=LOG_CREATED, upto=9)
    assert found["2026-10-25", "global"].spent == 110


async def test_the_highest_sequence_is_that_of_the_log_as_it_is_now(analytics: Analytics) -> None:
    before = (attempt("before"), 900, LOG_CREATED - MS)
    await store(analytics, [before])
    assert await stored_upto(analytics, log_created=LOG_CREATED) == 0
    await store(analytics, [(attempt("first"), 3, LOG_CREATED), (attempt("second"), 12, LOG_CREATED + MS), before])
    assert await stored_upto(analytics, log_created=LOG_CREATED) == 12


async def test_a_log_that_began_within_a_millisecond_has_what_was_stored_in_the_rest_of_it(
    analytics: Analytics,
) -> None:
    created = LOG_CREATED + timedelta(microseconds=400)
    await store(analytics, [(attempt(started_at=LOG_CREATED), 5, created + timedelta(microseconds=1))])
    day = period("daily", LOG_CREATED, BERLIN)
    assert await stored_upto(analytics, log_created=created) == 5
    assert await spend(analytics, [day], log_created=created, upto=4) == {}


async def test_notes_are_those_of_the_periods_in_their_order(analytics: Analytics) -> None:
    raised, repaired, crossed = full_budget_event(), repair(), budget_event()
    late = budget_event("late", at=crossed.at + timedelta(hours=1))
    elsewhere = [
        budget_event("the day before", period="2026-11-20"),
        budget_event("a window that has no such period", window="monthly"),
    ]
    written = [late, raised, *elsewhere, repaired, crossed]
    for _ in range(2):
        await analytics.insert(
            schema.BUDGET_EVENTS, [budget_row(event, 9 - sequence) for sequence, event in enumerate(written)]
        )
    day, month = (period(window, crossed.at, BERLIN) for window in ("daily", "monthly"))
    assert await budget_notes(analytics, [day, month]) == (crossed, repaired, raised, late)
    assert await budget_notes(analytics, [month]) == (raised,)
    assert await budget_notes(analytics, []) == ()


async def test_a_database_without_tables_is_reported(analytics: Analytics) -> None:
    await analytics.execute("DROP TABLE attempts")
    with pytest.raises(QueryError, match="attempts"):
        await stored_upto(analytics, log_created=LOG_CREATED)
    with pytest.raises(QueryError, match="attempts"):
        await spend(analytics, SOME_PERIODS, log_created=LOG_CREATED, upto=1)
