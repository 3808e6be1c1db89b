"""The JSON of our own messages is that of pydantic, whatever they hold."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import ConfigDict

from breakwater.jobs.contract.execution import (
    Attempt,
    Cancellation,
    Choice,
    ErrorInfo,
    Event,
    Execution,
    FailureStatistics,
    Result,
)
from breakwater.kernel.event_json import json_of
from tests.tables import each_row

NOW = datetime(2026, 11, 21, 10, 0, 0, 123_456, tzinfo=UTC)
ERROR = ErrorInfo(kind="server", class_="ServerError", message="é \u2028 \x7f", retry_after_s=1.5, hash="0a1b2c3d")
STATISTICS = FailureStatistics(consecutive_failures=3, total_failures=3, unique_errors=1, reason="3 jobs failed")
ATTEMPT: dict[str, Any] = {
    "attempt_id": "e:1",
    "execution_id": "e",
    "job_id": "j",
    "agent": "writer",
    "number": 1,
    "model": "sim/m",
    "provider": "sim",
    "started_at": NOW,
    "completed_at": NOW,
    "duration_ms": 0,
    "outcome": "success",
    "cause": "first",
}
FIRST = Attempt(**ATTEMPT, cost=1_500_000, reserved=2, reserved_at=NOW, cost_tags={"team": "ü"}, dropped_params=("n",))
FAILED = Attempt(**{**ATTEMPT, "outcome": "error"}, error=ERROR, statistics=STATISTICS, refused_cap=10**18)
JOB: dict[str, Any] = {
    "execution_id": "e",
    "job_id": "j",
    "agent": "writer",
    "status": "succeeded",
    "queued_at": NOW,
    "dispatched_at": NOW,
    "completed_at": NOW,
    "duration_ms": 5,
}


@each_row(
    "message",
    [
        FIRST,
        FAILED,
        ERROR,
        Choice(
            index=0,
            output={"a": [1, None, 1.5e300, 1e-7, "\U0001f600"]},
        ),
        Cancellation(by="person", at=NOW),
        Execution(**JOB, attempts=(FIRST, FAILED), total_cost=-5, wasted_by_cause={"retry": 7}, error=ERROR, params={}),
        Result(**JOB, attempts=(FIRST,), choices=(Choice(index=0, output="x"),), response={"figure": 10**30}),
        Result(
            **JOB, output=[{}, [], True], cancellation=Cancellation(by="program", at=NOW), metadata={"a": {"b": "c"}}
        ),
    ],
)
def test_a_message_is_written_as_by_pydantic(message: Event) -> None:
    assert json_of(message) == message.model_dump_json().encode()


def test_half_a_pair_is_refused_as_by_pydantic() -> None:
    with pytest.raises(ValueError, match="surrogates not allowed"):
        Choice.of_valid({"index": 0, "output": "\ud83d", "finish_reason": None}).json_bytes()


def test_a_moment_of_another_form_is_left_to_pydantic() -> None:
    class Plain(Event):
        at: datetime | None = None

    assert json_of(Plain(at=NOW)) == Plain(at=NOW).model_dump_json().encode()
    assert json_of(Plain()) == b'{"at":null}'


def test_fields_that_a_message_does_not_declare_are_written_too() -> None:
    class Open(Event):
        model_config = ConfigDict(extra="allow")

        name: str

    class Outer(Event):
        inner: Open

    message = Outer(inner=Open.model_validate({"name": "a", "more": 1}))
    assert json_of(message) == message.model_dump_json().encode() == b'{"inner":{"name":"a","more":1}}'


def test_what_a_subclass_adds_is_left_out_as_by_pydantic() -> None:
    class Listed(Event):
        name: str

    class New(Listed):
        secret: str

    class Names(Event):
        listed: tuple[Listed, ...]

    message = Names(listed=(New(name="a", secret="b"),))
    assert json_of(message) == b'{"listed":[{"name":"a"}]}'
