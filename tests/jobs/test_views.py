"""What is shown of dead letters and of plans."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from breakwater.jobs.contract.dead_letters import DeadLetterDetails, ListedDeadLetter
from breakwater.jobs.contract.submission import PlanStatus
from breakwater.jobs.views import dead_letters, plans
from breakwater.kernel.columns import clock
from breakwater.kernel.types import format_time
from tests.api_documents import dead_letter, dead_letter_details, plan
from tests.columns import texts, tones
from tests.tables import each_row

NOW = datetime.now(UTC)
BEFORE = NOW - timedelta(days=2)
REPLAYED: dict[str, Any] = {"replayable": False, "why_not": "it was replayed before, as rpl_1", "replayed_as": "rpl_1"}


def test_a_dead_letter_shows_what_was_given_up_and_why() -> None:
    listed = ListedDeadLetter.model_validate(dead_letter(17, at=format_time(BEFORE)))
    assert texts(dead_letters.COLUMNS, listed) == {
        "dead letter": "17",
        "given up": clock(BEFORE),
        "of": "job",
        "reason": "error",
        "agent": "writer",
        "execution": "e/1",
        "replay": "possible",
        "error": "the provider answered 500",
    }
    nobodys = ListedDeadLetter.model_validate(dead_letter(agent=None, execution_id=None))
    assert {"agent", "execution"}.isdisjoint(texts(dead_letters.COLUMNS, nobodys))


@each_row(
    ("fields", "replay", "tone"),
    [
        ({}, "possible", ""),
        ({"replayable": False, "why_not": "it is an event"}, "no", ""),
        (REPLAYED | {"replay_status": "succeeded"}, "succeeded", "good"),
        (REPLAYED | {"replay_status": "dead_lettered"}, "dead_lettered", "bad"),
        (REPLAYED, "done", ""),
    ],
)
def test_what_a_replay_would_do_or_has_done_is_shown(fields: dict[str, Any], replay: str, tone: str) -> None:
    listed = ListedDeadLetter.model_validate(dead_letter(**fields))
    assert texts(dead_letters.COLUMNS, listed)["replay"] == replay
    assert tones(dead_letters.COLUMNS, listed).get("replay", "") == tone


def test_all_of_one_dead_letter_is_shown_and_who_replayed_it_or_why_nobody_can() -> None:
    given_up = format_time(BEFORE)
    facts = texts(dead_letters.FACTS, DeadLetterDetails.model_validate(dead_letter_details(at=given_up)))
    assert facts == {
        "of": "job: bw.jobs.writer, 4,711 of JOBS",
        "agent": "writer",
        "execution": "e/1",
        "given up": clock(BEFORE),
        "error": "the provider answered 500",
        "replay": "possible",
    }
    by_ops: dict[str, Any] = {"replay_status": "succeeded", "replayed_by": "ops", "replayed_at": format_time(NOW)}
    done = texts(dead_letters.FACTS, DeadLetterDetails.model_validate(dead_letter_details(**REPLAYED | by_ops)))
    assert (done["replayed as"], done["replayed by"], "why not" in done) == ("rpl_1", f"ops at {clock(NOW)}", False)
    event = dead_letter_details(kind="event", replayable=False, why_not="it is an event")
    assert texts(dead_letters.FACTS, DeadLetterDetails.model_validate(event))["why not"] == "it is an event"


def test_a_plan_shows_its_state_its_jobs_and_what_they_cost() -> None:
    status = PlanStatus.model_validate(plan())
    queued = clock(status.first_queued_at)
    ended = clock(status.last_completed_at)
    listed = {"state": "partial", "jobs": "2 succeeded, 1 dead lettered", "wasted": "$0.02"}
    times = {"queued": queued, "ended": ended}
    assert texts(plans.COLUMNS, status) == {
        "plan": "report/47",
        "cost": "$0.42",
        "cost_basis": "estimated",
        **listed,
        **times,
    }
    assert texts(plans.FACTS, status) == {"cost": "$0.42 (estimated)", **listed, **times}


def test_a_plan_that_was_refused_says_why_and_one_of_unknown_cost_so() -> None:
    refused = plan(state="failed", refusal="the agent is down", jobs_by_status={}, total_cost="0", cost_basis="none")
    facts = texts(plans.FACTS, PlanStatus.model_validate(refused | {"last_completed_at": None}))
    assert (facts["refused"], facts["jobs"], facts["cost"]) == ("the agent is down", "none", "$0.00")
    unknown = PlanStatus.model_validate(plan(total_cost=None, wasted_cost=None, cost_basis="unknown"))
    assert texts(plans.COLUMNS, unknown) | {"cost": "unknown", "wasted": "unknown"} == texts(plans.COLUMNS, unknown)


def test_a_job_of_a_plan_shows_no_cost_before_it_ended() -> None:
    job = {
        "job_id": "report-47.1",
        "execution_id": "report-47.1",
        "agent": "writer",
        "status": "dead_lettered",
        "reason": "dependency_failed",
        "total_cost": "0.000000000",
        "queued_at": format_time(BEFORE),
        "completed_at": format_time(NOW),
    }
    running = job | {"status": "running", "reason": None, "completed_at": None}
    status = PlanStatus.model_validate(plan(jobs=[job, running]))
    ended, not_ended = (texts(plans.JOBS, one) for one in status.jobs)
    assert list(ended.values()) == ["report-47.1", "writer", "dead_lettered", "dependency_failed", "$0.00"]
    assert list(not_ended.values()) == ["report-47.1", "writer", "running"]
