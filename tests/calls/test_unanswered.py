from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from breakwater.calls.rules.classify import NOT_SENT, NotSent, classify
from breakwater.calls.rules.unanswered import why_unanswered
from breakwater.jobs.contract.execution import Attempt, Reason
from tests.records.test_messages import attempt
from tests.tables import each_row


def failed(model: str = "m", kind: str = "server", cost: int | None = 10, **more: Any) -> Attempt:
    error = {"kind": kind, "class": "AnError", "message": "no"}
    return attempt(**({"model": model, "outcome": "error", "error": error, "cost": cost} | more))


def answered(model: str = "m", cost: int | None = 100) -> Attempt:
    return attempt(model=model, cost=cost, cost_basis="billed")


def lost(model: str = "m") -> Attempt:
    return failed(model, "worker_lost", outcome="worker_lost")


def refused(model: str = "m", **more: Any) -> Attempt:
    fields = {"outcome": "short_circuited", "short_circuited": True, "cost": 0, "cost_basis": "billed"} | more
    return attempt(model=model, **fields)


def refused_by(reason: str, model: str = "m", **error: Any) -> Attempt:
    said = {"kind": "client", "class": reason, "message": "no", **error}
    return refused(model, refused_reason=reason, error=said)


@pytest.mark.parametrize("reason", ["budget_exceeded", "guard_tripped", "rate_limited"])
def test_the_reason_is_the_last_refusal_whatever_failed_before(reason: Reason) -> None:
    for last in (refused_by(reason), refused_by(reason, "n")):
        for before in ([], [failed()], [failed(), refused_by("breaker_open", "o")], [lost()]):
            for stop in (reason, "error"):
                found, error = why_unanswered([*before, last], stop)
                assert (found, error.class_) == (reason, reason)


def test_a_breaker_that_is_open_on_another_model_is_the_reason() -> None:
    found = why_unanswered([failed("m"), refused_by("breaker_open", "n")], "breaker_open")
    assert (found[0], found[1].class_) == ("breaker_open", "breaker_open")


def test_a_refused_retry_says_no_more_than_the_failures_before_it() -> None:
    retry_budget = refused_by("error")
    assert why_unanswered([failed("m"), refused_by("breaker_open")], "breaker_open") == ("error", failed().error)
    assert why_unanswered([failed("m"), retry_budget], "error") == ("error", failed().error)
    assert why_unanswered([lost(), retry_budget], "error")[0] == "worker_lost"
    assert why_unanswered([failed("n"), retry_budget], "error")[1] == retry_budget.error


def test_a_fallback_that_the_request_could_not_be_sent_to_hides_no_failure() -> None:
    error = classify(NotSent("tools can't be translated", "tools[0]"), datetime.now(UTC)).error_info()
    not_sent = failed("n", "client", 0, error=error.model_dump(by_alias=True))
    assert why_unanswered([failed("m"), not_sent], "error") == ("error", failed().error)
    assert why_unanswered([not_sent, failed("m"), not_sent], "error")[1] == failed().error
    assert why_unanswered([refused_by("breaker_open"), not_sent], "error")[0] == "breaker_open"
    assert why_unanswered([not_sent], "error") == ("error", error)


OVERFLOW = {"kind": "context_overflow", "class": "ContextOverflowError", "message": "too long: m", "status_code": 400}
FIELD = {"kind": "client", "class": "UnprocessableEntityError", "message": "a field: n", "status_code": 422}
FORM = {"kind": "client", "class": "BadRequestError", "message": "a form: m", "status_code": 400}
FILTERED = {"kind": "client", "class": "ContentFilteredError", "message": "filtered", "status_code": 400}


def ended(model: str, error: dict[str, Any], **more: Any) -> Attempt:
    return failed(model, error=error, cost=0, **more)


@each_row("stop", ["error", "breaker_open", "rate_limited", "timeout"])
def test_the_overflow_of_the_model_that_was_asked_for_explains_the_failure_of_its_fallbacks(stop: Reason) -> None:
    overflow = ended("m", OVERFLOW)
    fallbacks = {
        "a field": [ended("n", FIELD)],
        "a translation": [ended("n", {**FIELD, "class": NOT_SENT, "status_code": 400})],
        "its server": [failed("n"), failed("n")],
        "its breaker": [refused_by("breaker_open", "n", retry_after_s=3.0)],
        "its hold": [refused_by("rate_limited", "n")],
        "a longer context": [ended("n", {**OVERFLOW, "message": "too long: n"}), ended("o", FIELD)],
    }
    for name, later in fallbacks.items():
        reason, error = why_unanswered([overflow, *later], stop)
        assert (reason, error.message) == ("error", "too long: m"), name


def test_what_ends_the_job_is_hidden_by_no_overflow() -> None:
    for reason in ("budget_exceeded", "guard_tripped"):
        assert why_unanswered([ended("m", OVERFLOW), refused_by(reason, "n")], "error")[0] == reason


def test_of_a_trimmed_conversation_the_whole_one_explains_the_overflow() -> None:
    trimmed = ended("m", {**OVERFLOW, "message": "too long: trimmed"}, dropped_messages=2, cause="context_trim")
    assert why_unanswered([ended("m", OVERFLOW), trimmed, trimmed], "error")[1].message == "too long: m"


def test_an_overflow_that_was_repaired_explains_nothing() -> None:
    assert why_unanswered([ended("m", OVERFLOW), failed("m", cause="output_limit")], "error")[1].class_ == "AnError"
    attempts = [ended("m", OVERFLOW), failed("m", cause="output_limit"), ended("n", FIELD)]
    assert why_unanswered(attempts, "error")[1].class_ == "AnError"


@each_row(
    ("attempts", "message"),
    [
        ([failed("m"), ended("n", FIELD)], "no"),
        ([failed("m"), failed("m"), ended("n", FIELD), ended("o", FORM)], "no"),
        ([failed("m"), refused_by("error"), ended("n", FIELD)], "no"),
        ([ended("m", FILTERED), ended("n", FIELD)], "filtered"),
        ([failed("m"), ended("n", FILTERED)], "filtered"),
        ([ended("m", FORM), ended("n", FIELD)], "a form: m"),
        ([ended("m", FORM), failed("n")], "no"),
        ([failed("m"), ended("m", FORM)], "a form: m"),
        ([ended("m", {**FIELD, "class": NOT_SENT}), ended("n", FORM)], "a form: m"),
        ([ended("n", FIELD)], "a field: n"),
    ],
)
def test_a_fallback_that_refuses_how_the_request_is_written_hides_no_other_failure(
    attempts: list[Attempt], message: str
) -> None:
    reason, error = why_unanswered(attempts, "error")
    assert (reason, error.message) == ("error", message)


def test_of_open_breakers_the_one_that_may_be_asked_first_says_when() -> None:
    refusals = [refused_by("breaker_open", name, retry_after_s=after) for name, after in (("a", 9.0), ("b", 3.0))]
    quota = failed("c", error={"kind": "rate_limit", "class": "RateLimitError", "message": "", "retry_after_s": 1.0})
    reason, error = why_unanswered([quota, *refusals, refused_by("breaker_open", "d")], "breaker_open")
    assert (reason, error.retry_after_s) == ("breaker_open", 3.0)


@pytest.mark.parametrize("reason", ["breaker_open", "rate_limited", "budget_exceeded"])
def test_of_several_refusals_the_one_that_ends_first_says_when_from_the_end_of_the_job(reason: Reason) -> None:
    ends = datetime(2026, 1, 1, 12, tzinfo=UTC)
    earlier = refused_by(reason, "a", retry_after_s=9.0).model_copy(
        update={"completed_at": ends - timedelta(seconds=4)}
    )
    for last_wait_s, wait_s in ((None, 5.0), (60.0, 5.0), (4.5, 4.5)):
        last = refused_by(reason, "b", retry_after_s=last_wait_s).model_copy(update={"completed_at": ends})
        assert why_unanswered([earlier, last], reason)[1].retry_after_s == wait_s, last_wait_s


@each_row(
    ("attempts", "stop", "reason", "class_name"),
    [
        ([], "timeout", "timeout", "TotalTimeoutError"),
        ([answered()], "timeout", "timeout", "TotalTimeoutError"),
        ([answered()], "error", "worker_lost", "WorkerLostError"),
        ([failed(), lost()], "error", "worker_lost", "WorkerLostError"),
        ([failed()], "timeout", "timeout", "AnError"),
        ([failed()], "error", "error", "AnError"),
    ],
)
def test_without_a_refusal_the_last_call_says_why(
    attempts: list[Attempt], stop: Reason, reason: Reason, class_name: str
) -> None:
    found, error = why_unanswered(attempts, stop)
    assert (found, error.class_) == (reason, class_name)
