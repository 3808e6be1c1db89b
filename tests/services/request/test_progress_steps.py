"""What of a job's steps is reported, where the record and what is heard overlap."""

from datetime import UTC, datetime, timedelta

import pytest

from breakwater.identity.event_stream import server_sent
from breakwater.jobs.api.progress import SentSteps, decision, steps_of_undecided
from breakwater.jobs.contract.execution import ErrorInfo, Notification, Progress
from breakwater.jobs.rules.record import steps_of
from breakwater.jobs.store.accepted import JobStatus
from tests.services.request.test_progress import attempt_of

NOW = datetime(2026, 11, 21, 10, 0, tzinfo=UTC)


def step(state: str, event: Notification | None = None, attempt: int | None = None) -> Progress:
    return Progress.model_validate(
        {
            "execution_id": "j",
            "job_id": "j",
            "agent": "writer",
            "state": state,
            "event": event,
            "attempt": attempt,
            "at": NOW,
        }
    )


def test_that_it_is_queued_is_no_news_once_anything_is_known() -> None:
    sent = SentSteps()
    assert sent.take(step("queued"))
    assert not sent.take(step("queued"))
    begun = SentSteps()
    assert begun.take(step("dispatched"))
    assert not begun.take(step("queued")), "the worker was faster than the API"


def test_that_a_worker_has_it_may_be_news_again_but_not_from_before_what_is_recorded() -> None:
    sent = SentSteps()
    assert sent.take(steps_of(attempt_of("j", 1, fails=True))[-1])
    assert not sent.take(step("dispatched"), while_looking=True)
    assert sent.take(step("dispatched")), "another worker has taken it over"
    waiting = SentSteps()
    assert waiting.take(step("queued"))
    assert waiting.take(step("dispatched"), while_looking=True)


def test_an_attempt_begins_and_ends_once_in_whatever_order_that_is_heard() -> None:
    sent = SentSteps()
    assert sent.take(steps_of(attempt_of("j", 2))[-1])
    assert not sent.take(step("in_progress", "agent.attempt.start", 2))
    assert not sent.take(step("in_progress", "agent.attempt.error", 2)), "it has one end only"
    assert sent.take(step("in_progress", "agent.attempt.start", 3))
    assert not sent.take(step("in_progress", "agent.attempt.start", 3))


def test_what_was_not_heard_is_missing_until_it_is_reported() -> None:
    sent = SentSteps()
    sent.take(steps_of(attempt_of("j", 1))[-1])
    sent.take(steps_of(attempt_of("j", 3))[-1])
    assert sent.complete_to == 1
    sent.take(steps_of(attempt_of("j", 2))[-1])
    assert sent.complete_to == 3


def test_waits_and_handovers_are_reported_as_often_as_they_are_and_the_end_once() -> None:
    sent = SentSteps()
    assert [sent.take(step("waiting")) for _ in range(2)] == [True, True]
    assert [sent.take(step("succeeded")) for _ in range(2)] == [True, False]


@pytest.mark.parametrize("checkpoint", [None, "{", '{"later_version": 1}'])
def test_a_checkpoint_that_says_nothing_still_says_that_a_worker_has_it(checkpoint: str | None) -> None:
    status = JobStatus("writer", NOW, taken=True, checkpoint=checkpoint)
    assert [found.state for found in steps_of_undecided("j", status, [], NOW)] == ["queued", "dispatched"]
    attempts = [attempt_of("j", 1, fails=True)]
    assert [found.state for found in steps_of_undecided("j", status, attempts, NOW)] == ["queued", "in_progress"]


def test_a_call_whose_attempt_is_recorded_is_not_under_way() -> None:
    checkpoint = (
        '{"dispatched_at": "2026-11-21T10:00:00Z",'
        ' "in_flight": {"number": 1, "model": "m", "started_at": "2026-11-21T10:00:01Z"}}'
    )
    status = JobStatus(None, None, taken=True, checkpoint=checkpoint)
    attempt = attempt_of("j", 1, fails=True)
    assert steps_of_undecided("j", status, [attempt], NOW) == list(steps_of(attempt))
    assert steps_of_undecided("j", status, [], NOW) == [], "whose agent is not known"


def test_a_wait_that_is_over_is_not_reported() -> None:
    for seconds, states in ((60, ["queued", "dispatched", "waiting"]), (-1, ["queued", "dispatched"])):
        resume_at = (NOW + timedelta(seconds=seconds)).isoformat()
        checkpoint = f'{{"dispatched_at": "2026-11-21T10:00:00Z", "resume_at": "{resume_at}"}}'
        status = JobStatus("writer", NOW, taken=True, checkpoint=checkpoint)
        assert [found.state for found in steps_of_undecided("j", status, [], NOW)] == states


def test_of_a_result_only_the_decision_is_reported_and_events_are_what_the_standard_says() -> None:
    record = b'{"execution_id": "x", "job_id": "j", "status": "succeeded", "output": "\\n\\nevent: x", "reason": null}'
    data = decision(record)
    assert data == b'{"execution_id":"x","job_id":"j","status":"succeeded","reason":null}'
    assert server_sent("decided", data, 7) == b"event: decided\ndata: " + data + b"\nid: 7\n\n"


def test_a_refusal_has_its_own_name_also_for_who_joins_late() -> None:
    error = ErrorInfo(kind="budget_exceeded", class_="BudgetExceededError", message="no room", figures="$1 of $2")
    refused = attempt_of("j", 1).model_copy(
        update={
            "outcome": "short_circuited",
            "short_circuited": True,
            "error": error,
            "refused_by": "agent:writer/daily",
            "refused_reason": "budget_exceeded",
        }
    )
    refusal, ended = steps_of(refused, {"job_id": "j", "parent_execution_id": "parent"})
    assert (refusal.event, refusal.scope, refusal.enforcement) == (
        "agent.budget.exceeded",
        "agent:writer/daily",
        "hard",
    )
    assert (ended.event, ended.scope, ended.success) == ("agent.attempt.error", None, False)
    assert {step.parent_execution_id for step in (refusal, ended)} == {"parent"}
    assert "$" not in f"{refusal.json_bytes()}"
    sent = SentSteps()
    assert [sent.take(step) for step in (refusal, ended, refusal, ended)] == [True, True, False, False]
