from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from breakwater.contracts.execution import Execution
from breakwater.policy.alert_rules import AnomalyRules
from breakwater.policy.anomaly import LAPSE, Baseline
from breakwater.policy.signals import Firing, Resolved, Signal
from services.alerter.baselines import CAUGHT_UP, GRACE, MAX_DURATIONS, SAVE_EVERY, Baselines
from tests.analytics.samples import attempt

AT = datetime(2026, 11, 21, 10, 0, 0, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
SECOND = timedelta(seconds=1)
RULES = AnomalyRules(minimum_minutes=10, minimum_calls=5)


def execution(at: datetime, agent: str = "writer", **fields: Any) -> Execution:
    given: dict[str, Any] = {
        "execution_id": "e1",
        "agent": agent,
        "status": "succeeded",
        "queued_at": at,
        "dispatched_at": at,
        "completed_at": at,
        "duration_ms": 1000,
        "total_cost": "0.01",
    }
    return Execution.model_validate(given | fields)


def work(
    baselines: Baselines, start: datetime, minutes: int, *, calls: int = 10, agent: str = "writer", **fields: Any
) -> list[Signal]:
    """So many minutes of an agent, each closed in time."""
    found: list[Signal] = []
    for number in range(minutes):
        for call in range(calls):
            at = start + number * MINUTE + call * SECOND
            baselines.add(execution(at, agent, **fields), at)
        now = start + (number + 1) * MINUTE + GRACE
        baselines.add(execution(now, "another", dry_run=True), now)
        found += baselines.close(now)
    return found


def silence(baselines: Baselines, now: datetime) -> tuple[Signal, ...]:
    """What is closed when nothing came for long."""
    return baselines.close(now + GRACE + CAUGHT_UP)


def stored(baselines: Baselines, now: datetime = AT + timedelta(days=1), agent: str = "writer") -> Baseline:
    baseline = Baseline.from_json(baselines.changed(now)[agent])
    assert baseline is not None
    return baseline


FAILED: dict[str, Any] = {"status": "dead_lettered", "reason": "error"}


def test_an_agent_that_begins_to_fail_is_reported_in_the_third_minute_and_again_when_it_recovers() -> None:
    baselines = Baselines(RULES)
    assert work(baselines, AT, 20) == []
    assert work(baselines, AT + 20 * MINUTE, 2, **FAILED) == []
    (raised,) = work(baselines, AT + 22 * MINUTE, 5, **FAILED)
    assert isinstance(raised, Firing)
    assert (raised.key, raised.agent) == ("agent_anomaly/writer/error_rate", "writer")
    assert raised.at == AT + 23 * MINUTE
    (over,) = work(baselines, AT + 27 * MINUTE, 10)
    assert isinstance(over, Resolved)
    assert (over.key, over.at) == (raised.key, AT + 30 * MINUTE)


def test_an_agent_whose_answers_begin_late_is_reported_though_they_end_as_soon() -> None:
    baselines, fast = Baselines(RULES), {"attempts": (attempt(first_token_ms=200, chunks=9),)}
    slow = {"attempts": (attempt(outcome="error"), attempt(first_token_ms=2600, chunks=9))}
    assert work(baselines, AT, 20, **fast) == []
    (raised,) = work(baselines, AT + 20 * MINUTE, 10, **slow)
    assert isinstance(raised, Firing)
    assert raised.key == "agent_anomaly/writer/first_token"
    assert "took 2.6 s to the first token, the median of 10 streams; the baseline is 2" in raised.text
    (over,) = work(baselines, AT + 30 * MINUTE, 10, **fast)
    assert isinstance(over, Resolved)
    assert over.key == raised.key


def test_agents_have_figures_of_their_own() -> None:
    baselines = Baselines(RULES)
    for number in range(30):
        start = AT + number * MINUTE
        for agent, cost in (("cheap", "0.01"), ("dear", "5" if number < 20 else "50")):
            for call in range(5):
                baselines.add(execution(start + call * SECOND, agent, total_cost=cost), start)
        signals = silence(baselines, start + MINUTE)
        assert [signal.key for signal in signals] == (["agent_anomaly/dear/spend_rate"] if number == 22 else [])


def test_what_was_refused_or_cancelled_is_neither_a_call_nor_a_failure_but_what_it_spent_is_spent() -> None:
    baselines = Baselines(RULES)
    for reason in ("breaker_open", "budget_exceeded", "guard_tripped", "rate_limited", "invalid"):
        refused = execution(AT, status="dead_lettered", reason=reason, duration_ms=0, total_cost="0")
        for _ in range(20):
            baselines.add(refused, AT)
    for _ in range(20):
        baselines.add(execution(AT, status="cancelled", total_cost=None, duration_ms=0), AT)
    silence(baselines, AT + MINUTE)
    assert baselines.changed(AT) == {}, "nothing was done"
    for _ in range(10):
        baselines.add(execution(AT + 5 * MINUTE), AT + 5 * MINUTE)
    baselines.add(execution(AT + 5 * MINUTE, status="cancelled", total_cost="0.5", duration_ms=0), AT + 5 * MINUTE)
    silence(baselines, AT + 6 * MINUTE)
    learned = stored(baselines)
    assert learned.error_rate.level.first == (0.0,)
    assert learned.latency.level.first == (1000.0,)
    assert learned.spend_rate.level.first == (600_000_000.0,)


def test_dry_runs_and_cached_answers_count_for_nothing() -> None:
    baselines = Baselines(RULES)
    for _ in range(20):
        baselines.add(execution(AT, dry_run=True), AT)
        baselines.add(execution(AT, cache_hit=True), AT)
    silence(baselines, AT + MINUTE)
    assert baselines.changed(AT) == {}


def test_each_way_to_fail_is_a_failure() -> None:
    for reason in ("error", "timeout", "worker_lost"):
        baselines = Baselines(RULES)
        for _ in range(10):
            baselines.add(execution(AT, status="dead_lettered", reason=reason), AT)
        silence(baselines, AT + MINUTE)
        assert stored(baselines).error_rate.level.first == (1.0,)


def test_unknown_costs_are_left_out_and_are_not_zero() -> None:
    baselines = Baselines(RULES)
    for number, costs in enumerate((("0.5", None), (None, None))):
        for cost in costs:
            baselines.add(execution(AT + number * MINUTE, total_cost=cost), AT + number * MINUTE)
    silence(baselines, AT + 2 * MINUTE)
    assert stored(baselines).spend_rate.level.first == (500_000_000.0,)


def test_the_median_of_a_busy_minute_is_taken_from_all_of_it() -> None:
    baselines = Baselines(RULES)
    for duration_ms in range(100 * MAX_DURATIONS):
        baselines.add(execution(AT, duration_ms=duration_ms), AT)
    silence(baselines, AT + MINUTE)
    (median_ms,) = stored(baselines).latency.level.first
    assert abs(median_ms - 50 * MAX_DURATIONS) < 100


def test_a_minute_is_closed_when_it_is_over_by_the_grace_and_not_before() -> None:
    baselines = Baselines(RULES)
    for at in (AT, AT + MINUTE + GRACE - timedelta(milliseconds=1)):
        baselines.add(execution(at), at)
        baselines.close(at)
    assert baselines.changed(AT) == {}
    baselines.add(execution(AT + MINUTE + GRACE), AT + MINUTE + GRACE)
    baselines.close(AT + MINUTE + GRACE)
    assert stored(baselines).spend_rate.level.learned == 1


def test_a_late_execution_counts_in_the_minute_that_is_open() -> None:
    baselines = Baselines(RULES)
    work(baselines, AT, 1, calls=1)
    baselines.add(execution(AT, total_cost="0.5"), AT + 3 * MINUTE)
    baselines.add(execution(AT + 3 * MINUTE, total_cost="0.1"), AT + 3 * MINUTE)
    silence(baselines, AT + 4 * MINUTE)
    assert stored(baselines).spend_rate.level.first == (10_000_000.0, 500_000_000.0, 100_000_000.0)


def test_a_clock_that_is_ahead_closes_no_minute_early_and_holds_none_open() -> None:
    baselines = Baselines(RULES)
    baselines.add(execution(AT + timedelta(days=400)), AT)
    baselines.close(AT + SECOND)
    assert baselines.changed(AT) == {}
    baselines.add(execution(AT + SECOND), AT + SECOND)
    silence(baselines, AT + MINUTE)
    assert stored(baselines).spend_rate.level.first == (20_000_000.0,)


def test_a_backlog_is_judged_minute_by_minute_though_it_comes_in_pieces() -> None:
    baselines = Baselines(RULES)
    now = AT + timedelta(hours=3)
    assert baselines.close(now) == (), "before anything is heard nothing is over"
    for second in range(0, 30 * 60, 6):
        baselines.add(execution(AT + second * SECOND), now)
        assert baselines.close(now) == ()
    silence(baselines, now)
    level = stored(baselines).spend_rate.level
    assert (level.learned, level.baseline, level.spread) == (30, 100_000_000.0, 0.0)


def test_an_anomaly_of_an_agent_that_was_stopped_is_over_after_a_while() -> None:
    baselines = Baselines(RULES)
    work(baselines, AT, 20)
    assert len(work(baselines, AT + 20 * MINUTE, 3, **FAILED)) == 1
    last = AT + 22 * MINUTE
    assert silence(baselines, last + LAPSE * MINUTE) == ()
    (over,) = silence(baselines, last + (LAPSE + 2) * MINUTE)
    assert isinstance(over, Resolved)
    assert over.key == "agent_anomaly/writer/error_rate"
    assert silence(baselines, last + (LAPSE + 60) * MINUTE) == ()


def test_figures_are_saved_at_most_every_five_minutes_and_only_where_they_changed() -> None:
    baselines = Baselines(RULES)
    work(baselines, AT, 1)
    assert set(baselines.changed(AT)) == {"writer"}
    assert baselines.changed(AT + SAVE_EVERY) == {}, "nothing changed"
    work(baselines, AT + MINUTE, 1)
    assert baselines.changed(AT + SAVE_EVERY - SECOND) == {}
    assert set(baselines.changed(AT + SAVE_EVERY)) == {"writer"}


def test_what_begins_or_ends_is_saved_at_once() -> None:
    baselines = Baselines(RULES)
    work(baselines, AT, 20)
    now = AT + 20 * MINUTE
    baselines.changed(now)
    work(baselines, now, 2, **FAILED)
    assert baselines.changed(now + SECOND) == {}
    work(baselines, now + 2 * MINUTE, 1, **FAILED)
    assert stored(baselines, now + SECOND).anomalies() == {"error_rate"}
    work(baselines, now + 3 * MINUTE, 3)
    assert stored(baselines, now + SECOND).anomalies() == set()


def test_a_restored_agent_goes_on_where_it_was_and_what_is_reported_again_changes_nothing() -> None:
    before = Baselines(RULES)
    work(before, AT, 20)
    (raised,) = work(before, AT + 20 * MINUTE, 3, **FAILED)
    saved = before.changed(AT + 23 * MINUTE)
    after = Baselines(RULES)
    after.restore("writer", saved["writer"])
    assert work(after, AT + 20 * MINUTE, 3, **FAILED) == []
    assert after.changed(AT + timedelta(days=1)) == {}
    (over,) = work(after, AT + 23 * MINUTE, 3)
    assert over.key == raised.key


def test_what_can_not_be_read_is_learned_again() -> None:
    baselines = Baselines(RULES)
    for data in (b"", b"{}x", b'{"version": 99}'):
        baselines.restore("writer", data)
    work(baselines, AT, 1)
    assert stored(baselines).spend_rate.level.learned == 1


def test_the_agents_kept_are_bounded_and_those_heard_of_last_stay() -> None:
    baselines = Baselines(RULES, most_agents=3)
    for agent in ("a", "b", "c", "a", "d"):
        baselines.add(execution(AT, agent), AT)
    silence(baselines, AT + MINUTE)
    assert set(baselines.changed(AT)) == {"a", "c", "d"}


def test_an_agent_with_an_anomaly_is_not_forgotten_before_others() -> None:
    baselines = Baselines(RULES, most_agents=2)
    work(baselines, AT, 20)
    work(baselines, AT + 20 * MINUTE, 3, **FAILED)
    for agent in ("a", "b", "c"):
        work(baselines, AT + 23 * MINUTE, 1, agent=agent)
    (over,) = work(baselines, AT + 24 * MINUTE, 3)
    assert over.key == "agent_anomaly/writer/error_rate"
