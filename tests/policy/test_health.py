from __future__ import annotations

from typing import get_args

import pytest

from breakwater.contracts.events import BreakerState, Health
from breakwater.contracts.execution import Attempt, ErrorInfo, ErrorKind, Outcome
from breakwater.contracts.types import time_from_ms
from breakwater.policy.budget import NEVER_FITS
from breakwater.policy.health import NONE_SUCCEEDS, failed, health_of_agent, health_of_model

MOMENT = time_from_ms(1_795_000_000_000)
SAYS_NOTHING = {"logic", "context_overflow", "orphan_tool_calls", "rate_limit"}


def attempt(outcome: Outcome, kind: ErrorKind | None = None, *, counts: bool = False) -> Attempt:
    return Attempt(
        attempt_id="j:1",
        execution_id="j",
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
    assert failed(attempt("success")) is False
    for kind in ("breaker_open", "budget_exceeded", "guard_tripped", "rate_limit", "retry_budget"):
        assert failed(attempt("short_circuited", kind)) is None


@pytest.mark.parametrize("class_name", sorted(NEVER_FITS))
def test_a_call_that_no_cap_ever_has_room_for_speaks_against_it(class_name: str) -> None:
    refused = attempt("short_circuited", "budget_exceeded")
    error = ErrorInfo(kind="budget_exceeded", class_=class_name, message="x")
    assert failed(refused.model_copy(update={"error": error})) is True


@pytest.mark.parametrize("kind", get_args(ErrorKind))
@pytest.mark.parametrize("counts", [True, False])
def test_an_error_speaks_against_it_whether_a_breaker_counts_it_or_not_but_for_those_of_the_request_and_haste(
    kind: ErrorKind, *, counts: bool
) -> None:
    assert failed(attempt("error", kind, counts=counts)) is (None if kind in SAYS_NOTHING else True)


@pytest.mark.parametrize(
    ("breaker", "in_a_row", "health"),
    [
        (None, 0, "healthy"),
        (None, 1, "degraded"),
        (None, NONE_SUCCEEDS - 1, "degraded"),
        (None, NONE_SUCCEEDS, "unhealthy"),
        ("closed", 0, "healthy"),
        ("closed", 2, "degraded"),
        *((state, in_a_row, "unhealthy") for state in ("open", "half_open", "isolated") for in_a_row in (0, 3)),
    ],
)
def test_a_model_is_unhealthy_while_its_breaker_holds_calls_back_or_none_succeeds_and_degraded_while_some_fail(
    breaker: BreakerState | None, in_a_row: int, health: Health
) -> None:
    assert health_of_model(breaker, in_a_row) == health


@pytest.mark.parametrize(
    ("models", "in_a_row", "health"),
    [
        ([], 0, "healthy"),
        ([], 1, "degraded"),
        (["healthy"], 0, "healthy"),
        (["healthy", "healthy"], 2, "degraded"),
        (["unhealthy"], 0, "unhealthy"),
        (["unhealthy", "unhealthy"], 0, "unhealthy"),
        (["unhealthy", "healthy"], 0, "degraded"),
        (["unhealthy", "degraded"], 0, "degraded"),
        # Its latest call went well, by another model than the one that failed before.
        (["degraded", "healthy"], 0, "healthy"),
        (["degraded"], 1, "degraded"),
        (["degraded", "degraded"], NONE_SUCCEEDS, "unhealthy"),
    ],
)
def test_an_agent_is_unhealthy_when_none_of_its_models_serves(
    models: list[Health], in_a_row: int, health: Health
) -> None:
    assert health_of_agent(models, in_a_row) == health
