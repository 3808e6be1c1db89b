"""What is shown of executions, of their attempts and of runs."""

from __future__ import annotations

from typing import Any

from breakwater.jobs.contract.execution import Execution, ExecutionSummary, FailureStatistics
from breakwater.kernel.columns import clock
from breakwater.records.views.executions import ATTEMPTS, COLUMNS, FACTS, as_tree, shorten
from tests.columns import texts, tones
from tests.records.samples import NOON, RATE_LIMITED, attempt, execution
from tests.tables import each_row


def facts(*attempts: Any, **fields: Any) -> dict[str, str]:
    return texts(FACTS, execution(attempts=attempts, **fields))


def test_an_execution_is_listed_with_how_it_ended_and_what_it_cost() -> None:
    failed = execution(
        status="dead_lettered", reason="error", error=RATE_LIMITED, total_cost=None, cost_basis="unknown", dry_run=True
    )
    shown = texts([column for column in COLUMNS if column.terminal], ExecutionSummary.of(failed))
    assert shown == {
        "ended": clock(NOON),
        "id": "e1",
        "agent": "writer",
        "status": "dead_lettered",
        "model": "gpt-4.1",
        "attempts": "1",
        "cost": "unknown",
        "took": "1.0 s",
        "reason": "dry run: error: slow down: “zu viele Anfragen”",
    }
    assert shorten("a\n b " + "c" * 90) == f"a b {'c' * 55}…"


def test_all_that_is_known_of_one_is_shown() -> None:
    statistics = FailureStatistics(
        consecutive_failures=3, total_failures=5, unique_errors=2, reason="3 consecutive failures"
    )
    more = {"tenant": "acme", "task_id": "t1", "plan_id": "p1", "parent_execution_id": "root", "config_version": "v1"}
    shown = facts(
        status="dead_lettered", reason="guard_tripped", error=RATE_LIMITED, statistics=statistics, output=None, **more
    )
    assert {name: shown[name] for name in ("status", "reason", "error", "stopped")} == {
        "status": "dead_lettered",
        "reason": "guard_tripped",
        "error": "RateLimitError: slow down: “zu viele Anfragen”",
        "stopped": statistics.in_words(),
    }
    assert [shown[name] for name in ("tenant", "task", "plan", "parent", "config")] == list(more.values())
    answered = facts(output="done")
    assert (answered["answer"], answered["took"], answered["queued"]) == (
        "done",
        "1.0 s",
        clock(execution().queued_at),
    )
    assert {"error", "stopped", "tenant", "cache", "left out", "usage", "dry run"}.isdisjoint(answered)


@each_row(
    ("fields", "cost", "wasted"),
    [
        ({"total_cost": 3_000_000}, "$0.003", None),
        ({"total_cost": 3_000_000, "cost_basis": "estimated"}, "$0.003 (estimated)", None),
        ({"total_cost": 0, "cost_basis": "none"}, "$0.00 (no call was made)", None),
        ({"total_cost": None, "wasted_cost": None, "cost_basis": "unknown"}, "unknown", None),
        # Of before the causes were stored.
        ({"total_cost": 3_000_000, "wasted_cost": 2_100_000}, "$0.003", "$0.0021"),
        (
            {
                "total_cost": 3_000_000,
                "wasted_cost": 2_100_000,
                "wasted_by_cause": {"fallback": 700_000, "retry": 1_400_000, "worker_lost": 0},
            },
            "$0.003",
            "$0.0021 (retry $0.0014, fallback $0.0007)",
        ),
    ],
)
def test_cost_is_shown_with_its_basis_and_waste_with_its_causes(
    fields: dict[str, Any], cost: str, wasted: str | None
) -> None:
    shown = facts(**fields)
    assert (shown["cost"], shown.get("wasted")) == (cost, wasted)


def test_an_answer_from_the_cache_names_its_source() -> None:
    hit = facts(cache_hit=True, cached_from="e0", total_cost=0, attempts_count=0)
    assert hit["cache"] == "answered from the cache of e0, nothing was called"
    assert facts(cache_hit=True)["cache"] == "answered from the cache, nothing was called"


def test_what_calls_left_out_is_shown_and_usage_that_is_not_credible() -> None:
    shown = facts(
        attempt(number=1, outcome="error", error=RATE_LIMITED),
        attempt(number=2, cause="context_trim", dropped_messages=1),
        attempt(number=3, cause="orphan_recovery", dropped_params=("top_p",), dropped_messages=4, usage_problem="odd"),
        finish_reason="length",
    )
    assert shown["left out"] == "1 message in attempt 2, 4 messages in attempt 3, top_p in attempt 3"
    assert (shown["usage"], shown["finish reason"]) == ("odd in attempt 3", "length")


def test_when_a_streamed_answer_began_and_how_fast_it_came_is_shown() -> None:
    streamed = attempt(first_token_ms=300, chunks=20)
    shown = facts(streamed)
    assert (shown["first token"], shown["tokens/s"]) == ("300 ms", "38")
    listed = texts(ATTEMPTS, streamed)
    assert (listed["first token"], listed["tokens/s"]) == ("300 ms", "38")
    for unanswered in (execution(status="dead_lettered"), execution(cache_hit=True)):
        assert "first token" not in texts(FACTS, unanswered.model_copy(update={"attempts": (streamed,)}))


def test_an_attempt_shows_why_it_was_made_what_it_waited_for_and_how_it_failed() -> None:
    retried = attempt(number=2, cause="retry", backoff_ms=2_000, outcome="error", error=RATE_LIMITED, cost=1_500_000)
    assert texts(ATTEMPTS, retried) == {
        "#": "2",
        "model": "gpt-4.1",
        "why": "retry",
        "outcome": "error",
        "took": "800 ms",
        "waited": "2.0 s",
        "cost": "$0.0015",
        "error": "rate_limit 429: slow down: “zu viele Anfragen”",
    }
    assert tones(ATTEMPTS, retried) == {"outcome": "bad"}
    refused = attempt(outcome="short_circuited", short_circuited=True, cost=None)
    assert ("cost" in texts(ATTEMPTS, refused), texts(ATTEMPTS, attempt(cost=None))["cost"]) == (False, "unknown")


def test_steps_of_a_run_stand_below_their_parents_also_where_these_go_round() -> None:
    def steps(*parents: tuple[str, str | None]) -> list[ExecutionSummary]:
        executions: list[Execution] = [execution(name, parent_execution_id=parent) for name, parent in parents]
        return [ExecutionSummary.of(one) for one in executions]

    tree = as_tree(steps(("root", None), ("a", "root"), ("b", "root"), ("a1", "a"), ("other", "gone")))
    assert [(step.depth, step.execution.execution_id) for step in tree] == [
        (0, "root"),
        (1, "a"),
        (2, "a1"),
        (1, "b"),
        (0, "other"),
    ]
    circle = as_tree(steps(("egg", "hen"), ("hen", "egg")))
    assert [(step.depth, step.execution.execution_id) for step in circle] == [(0, "egg"), (1, "hen")]
