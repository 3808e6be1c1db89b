from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakwater.breakers.contract import BreakerState, Health
from breakwater.breakers.rules.health import LAST_CALLS, NONE_SUCCEEDS, UNCALLED, CallHealth, Verdict, health_of_model
from breakwater.health.rules import health_of_agent, out_of_budget, speaks_against_health
from breakwater.jobs.contract.error_kinds import ErrorKind
from breakwater.jobs.contract.execution import Attempt, ErrorInfo, Outcome
from breakwater.kernel.types import time_from_ms
from breakwater.limits.rules.budget import NEVER_FITS, OWN_CAP
from tests.tables import each_row

MOMENT = time_from_ms(1_795_000_000_000)
SAYS_NOTHING = {"client", "logic", "context_overflow", "orphan_tool_calls", "rate_limit"}


def attempt(outcome: Outcome, kind: ErrorKind | None = None, *, counts: bool = False) -> Attempt:
    return Attempt(
        attempt_id="j:1",
        execution_id="j",
        job_id="j",
        agent="writer",
        number=1,
        model="sim/m",
        provider="sim",
        started_at=MOMENT,
        completed_at=MOMENT,
        duration_ms=0,
        outcome=outcome,
        error=None if kind is None else ErrorInfo(kind=kind, class_="SomeError", message="x"),
        counts_for_breaker=counts,
        cause="first",
    )


def test_a_success_speaks_for_a_models_health_and_a_refusal_says_nothing_of_it() -> None:
    assert speaks_against_health(attempt("success")) is False
    for kind in ("breaker_open", "budget_exceeded", "guard_tripped", "rate_limit", "retry_budget"):
        assert speaks_against_health(attempt("short_circuited", kind)) is None


@pytest.mark.parametrize("class_name", sorted(NEVER_FITS))
def test_a_call_that_no_cap_ever_has_room_for_speaks_against_it(class_name: str) -> None:
    refused = attempt("short_circuited", "budget_exceeded")
    error = ErrorInfo(kind="budget_exceeded", class_=class_name, message="x")
    assert speaks_against_health(refused.model_copy(update={"error": error})) is True


@each_row(
    ("refused_by", "class_name", "expected"),
    [
        ("agent:writer/daily", "BudgetExceededError", True),
        ("global/monthly", "BudgetExceededError", True),
        ("tenant:acme/daily", "BudgetExceededError", False),
        ("task", "BudgetExceededError", False),
        (OWN_CAP, "BudgetExceededError", False),
        ("agent:writer/daily", "BudgetHeldError", False),
    ],
)
def test_an_exhausted_cap_speaks_against_the_agent_unless_it_is_a_tenants_a_tasks_or_a_jobs(
    refused_by: str, class_name: str, *, expected: bool
) -> None:
    error = ErrorInfo(kind="budget_exceeded", class_=class_name, message="x")
    refused = attempt("short_circuited").model_copy(update={"error": error, "refused_by": refused_by})
    assert (out_of_budget(refused), speaks_against_health(refused)) == (expected, None)


@each_row("kind", get_args(ErrorKind))
@each_row("counts", [True, False])
def test_an_error_speaks_against_it_whether_a_breaker_counts_it_or_not_but_for_those_of_the_request_and_haste(
    kind: ErrorKind, *, counts: bool
) -> None:
    assert speaks_against_health(attempt("error", kind, counts=counts)) is (None if kind in SAYS_NOTHING else True)


@each_row(
    ("status", "class_name", "expected"),
    [
        (400, "BadRequestError", None),
        (422, "UnprocessableEntityError", None),
        (413, "RequestTooLargeError", None),
        (200, "WrongAnswerKindError", None),
        (404, "UnsupportedRequestError", None),
        (None, "OutputCutOffError", None),
        (401, "UnauthorizedError", True),
        (400, "UnauthorizedError", True),
        (403, "ForbiddenError", True),
        (404, "NotFoundError", True),
        (410, "ClientError", True),
    ],
)
def test_what_follows_the_request_says_nothing_and_a_refused_key_or_a_missing_model_speaks_against_it(
    status: int | None, class_name: str, expected: bool | None
) -> None:
    error = ErrorInfo(kind="client", class_=class_name, message="x", status_code=status)
    assert speaks_against_health(attempt("error").model_copy(update={"error": error})) is expected


FEW, MANY = CallHealth(2, 2, 1, 4, 2), CallHealth(NONE_SUCCEEDS, 2, None, NONE_SUCCEEDS, NONE_SUCCEEDS)
HEALTHY = Verdict("healthy", "20 of the last 20 calls succeeded")
SOME, DOWN = Verdict("degraded", "the last call failed"), Verdict("unhealthy", "24 calls failed in a row")


@each_row(
    ("calls", "verdict"),
    [
        (CallHealth(), UNCALLED),
        (CallHealth(0, None, 1, 1, 0), ("healthy", "the last call succeeded")),
        (CallHealth(0, None, 1), ("healthy", "the last call succeeded")),  # noted by an earlier version
        (CallHealth(0, None, 1, 20, 0), HEALTHY),
        (CallHealth(0, None, 1, 20, 3), ("healthy", "17 of the last 20 calls succeeded")),
        (CallHealth(0, None, 1, 20, 4), ("healthy", "the last call succeeded; 4 of the last 20 did not")),
        (CallHealth(0, None, 1, 2, 1), ("healthy", "1 of the last 2 calls succeeded")),
        (CallHealth(0, None, 1, 3, 2), ("healthy", "the last call succeeded; 2 of the last 3 did not")),
        (CallHealth(0, None, 1, 20, 19), ("healthy", "the last call succeeded; 19 of the last 20 did not")),
        (CallHealth(1, 2, 1, 18, 11), ("degraded", "11 of the last 18 calls failed")),
        (CallHealth(2, 2, 1, 20, 16), ("unhealthy", "16 of the last 20 calls failed")),
        (CallHealth(1, 2, None, 1, 1), SOME),
        (CallHealth(9, 2, None, 9, 9), ("degraded", "9 calls failed in a row")),
        (CallHealth(24, 2, None, 20, 20), DOWN),
    ],
)
def test_a_models_health_follows_its_last_calls_where_no_breaker_refuses(
    calls: CallHealth, verdict: tuple[Health, str]
) -> None:
    assert health_of_model(None, calls) == health_of_model("closed", calls) == verdict
    assert health_of_agent({"m": Verdict(*verdict)}, calls) == verdict


@each_row(
    ("breaker", "until_ms", "reason"),
    [
        ("open", 1_795_000_000_000, "breaker open until 11:06:40 UTC"),
        ("half_open", 1_795_000_000_000, "breaker half-open until a probe succeeds"),
        ("half_open", None, "breaker half-open, waits for a call to try it"),
        ("isolated", 0, "breaker isolated until an operator resets it"),
    ],
)
def test_a_model_is_unhealthy_while_its_breaker_is_not_closed(
    breaker: BreakerState, until_ms: int | None, reason: str
) -> None:
    for calls in (CallHealth(), CallHealth(0, None, 1, 20, 0), MANY):
        assert health_of_model(breaker, calls, until_ms) == ("unhealthy", reason)


@each_row(
    ("models", "calls", "verdict"),
    [
        ({}, CallHealth(), UNCALLED),
        ({}, CallHealth(1, 2, None, 1, 1), ("degraded", "the last call failed or was refused")),
        ({"m": UNCALLED, "n": HEALTHY}, CallHealth(0, None, 1, 20, 0), HEALTHY),
        ({"m": DOWN, "n": DOWN}, FEW, ("unhealthy", "m: 24 calls failed in a row")),
        ({"m": HEALTHY, "n": DOWN}, CallHealth(0, None, 1, 9, 0), ("degraded", "n: 24 calls failed in a row")),
        ({"m": SOME, "n": HEALTHY}, CallHealth(1, 2, 1, 9, 1), ("degraded", "m: the last call failed")),
        ({"m": SOME, "n": HEALTHY}, CallHealth(0, None, 1, 9, 1), ("healthy", "8 of the last 9 calls succeeded")),
        (
            {"m": HEALTHY},
            CallHealth(1, 2, 1, 20, 17),
            ("degraded", "17 of the last 20 calls failed or were refused"),
        ),
        ({"m": HEALTHY}, MANY, ("unhealthy", f"{NONE_SUCCEEDS} calls failed or were refused in a row")),
        ({"m": SOME, "n": SOME}, MANY, ("unhealthy", f"{NONE_SUCCEEDS} calls failed in a row")),
    ],
)
def test_an_agent_is_unhealthy_when_none_of_its_models_serves_and_degraded_when_its_last_call_failed(
    models: dict[str, Verdict], calls: CallHealth, verdict: tuple[Health, str]
) -> None:
    assert health_of_agent(models, calls) == verdict
    assert health_of_agent(models, calls, affordable=False) == (
        "unhealthy",
        "no call fits under a hard limit",
    )


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_the_last_call_decides_whether_an_agent_is_degraded(outcomes: list[bool]) -> None:
    """True failed; of an agent with one model."""
    in_a_row = next((n for n, failed in enumerate(reversed(outcomes)) if not failed), len(outcomes))
    remembered = outcomes[-LAST_CALLS:]
    last_failure = 2 if in_a_row else None
    calls = CallHealth(in_a_row, last_failure, 1, len(remembered), sum(remembered))
    verdict = health_of_agent({"m": health_of_model("closed", calls)}, calls)
    assert (verdict.health == "healthy") is not outcomes[-1]
    assert verdict == health_of_model("closed", calls)
