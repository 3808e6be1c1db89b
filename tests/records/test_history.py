"""The made-up history that benchmarks run on is one that the plane could have written."""

from collections import Counter
from datetime import timedelta
from itertools import pairwise

from bench.history import History
from breakwater.calls.rules.classify import error_identity
from breakwater.jobs.rules.record import totals
from breakwater.records import rows, schema
from tests.records.made import END, SMALL, made

LARGER = History(2_000, days=14, end=END)


def test_its_rows_are_those_of_the_records() -> None:
    history = made(LARGER)
    at = list(schema.ATTEMPTS.columns).index("stored_at")
    for record, row in zip(history.executions, history.rows["executions"], strict=True):
        assert rows.execution_row(record, int(str(row[-1]))) == row
    for attempt, row in zip(history.attempts, history.rows["attempts"], strict=True):
        assert row[at] == attempt.completed_at
        assert rows.attempt_row(attempt, int(str(row[-1])), attempt.completed_at) == row


def test_an_execution_sums_up_its_attempts() -> None:
    for record in made(LARGER).executions:
        sums = totals(record.attempts, answered=record.status == "succeeded")
        assert (record.input_tokens, record.output_tokens, record.cached_tokens) == (
            sums.input_tokens,
            sums.output_tokens,
            sums.cached_tokens,
        )
        assert (record.total_cost, record.wasted_cost, record.wasted_by_cause, record.cost_basis) == (
            sums.total_cost,
            sums.wasted_cost,
            sums.wasted_by_cause,
            sums.cost_basis,
        )
        assert [one.number for one in record.attempts] == list(range(1, record.attempts_count + 1))
        times = [record.queued_at, *(one.started_at for one in record.attempts), record.completed_at]
        assert all(earlier <= later for earlier, later in pairwise(times))


def test_it_is_the_same_for_a_seed() -> None:
    assert list(SMALL.batches()) == list(SMALL.batches())
    other = History(SMALL.executions, SMALL.days, SMALL.end, seed=8)
    assert next(other.batches())[1][0] != next(SMALL.batches())[1][0]


def test_it_has_what_a_plane_has() -> None:
    history = made(LARGER)
    assert len(history.executions) == LARGER.executions
    assert 2.0 < len(history.attempts) / LARGER.executions < 2.4
    assert len({one.agent for one in history.executions}) == 12
    assert len({one.model for one in history.attempts}) == 6
    assert len({one.provider for one in history.attempts}) == 3
    assert len({one.tenant for one in history.executions} - {None}) == 30
    assert {"first", "retry", "fallback", "self_correction"} <= {one.cause for one in history.attempts}
    assert {one.status for one in history.executions} == {"succeeded", "dead_lettered", "cancelled"}
    with_parent = sum(one.parent_execution_id is not None for one in history.executions)
    assert 0.02 < with_parent / LARGER.executions < 0.08
    assert any(one.cache_hit for one in history.executions)
    assert any(one.dry_run for one in history.executions)
    assert any(one.messages is not None and "[REDACTED]" in str(one.messages) for one in history.executions)
    assert all(history.rows[table.name] for table in schema.TABLES)
    assert all(END - timedelta(days=14) <= one.queued_at < END for one in history.executions)


def test_more_happens_by_day_than_at_night() -> None:
    by_hour = Counter(one.queued_at.hour for one in made(LARGER).executions)
    assert by_hour[14] > 3 * by_hour[3]


def test_an_error_has_the_identity_that_the_plane_gives_it() -> None:
    for attempt in made().attempts:
        if attempt.error is not None and not attempt.short_circuited:
            assert attempt.error.hash == error_identity(f"{attempt.error.class_}: {attempt.error.message}")
