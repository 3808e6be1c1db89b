from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from breakwater.jobs.contract.execution import Attempt, ErrorInfo
from breakwater.jobs.contract.job import Job
from breakwater.kernel.types import format_time, ms_from_time, nano_from_usd, time_from_ms, usd_from_nano
from breakwater.kernel.validation import explain, problems
from tests.tables import each_row


@given(st.integers(min_value=-(2**53), max_value=2**53))
def test_money_comes_back_from_its_text_to_the_nano_dollar(nano: int) -> None:
    text = usd_from_nano(nano)
    assert nano_from_usd(text) == nano
    assert Decimal(text) == Decimal(nano) / 10**9


@each_row("text", ["", "a lot", "1e400", "NaN", "Infinity", "0.0000000001", "1,50"])
def test_what_is_no_amount_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"amount|finer|beyond"):
        nano_from_usd(text)


@given(st.integers(min_value=0, max_value=4 * 10**12))
def test_times_come_back_to_the_millisecond(ms: int) -> None:
    moment = time_from_ms(ms)
    assert ms_from_time(moment) == ms
    assert ms_from_time(datetime.fromisoformat(format_time(moment))) == ms


@each_row(
    ("changes", "rate"),
    [
        ({}, 50.0),
        ({"output_tokens": 1}, None),
        ({"output_tokens": None}, None),
        ({"first_token_ms": None, "chunks": None}, None),
        ({"first_token_ms": 2250}, None),
        ({"chunks": 1}, None),
        ({"outcome": "error"}, None),
    ],
)
def test_the_rate_of_a_streamed_answer_is_that_of_its_tokens_after_the_first(
    changes: dict[str, Any], rate: float | None
) -> None:
    given: dict[str, Any] = {"first_token_ms": 250, "duration_ms": 2250, "output_tokens": 101, "chunks": 40}
    assert attempt(**{**given, **changes}).tokens_per_s == rate


def test_a_time_is_written_in_utc_with_milliseconds() -> None:
    assert format_time(datetime(2026, 11, 21, 10, 0, 0, 999_999, UTC)) == "2026-11-21T10:00:00.999Z"


def attempt(**more: Any) -> Attempt:
    now = datetime(2026, 11, 21, 10, 0, tzinfo=UTC)
    fields: dict[str, Any] = {
        "attempt_id": "j:1", "execution_id": "j", "job_id": "j", "agent": "a", "number": 1, "model": "m",
        "provider": "p", "started_at": now, "completed_at": now,
        "duration_ms": 0, "outcome": "success", "cause": "first",
    }  # fmt: skip
    return Attempt.model_validate(fields | more)


@each_row("character", "\x00\n\x1b\x7f\x85\x9b\u061c\u200f\u202e\u2066")
@each_row("field", ["job_id", "tenant", "task_id", "model"])
def test_names_with_characters_that_terminals_obey_are_refused(field: str, character: str) -> None:
    with pytest.raises(ValidationError) as refused:
        Job.model_validate({"agent": "writer", "prompt": "x", field: f"a{character}b"})
    assert explain(refused.value, Job) == (
        f"{field}: must not contain control characters, line breaks or bidirectional control characters"
    )
    Job.model_validate({"agent": "writer", "prompt": "x", field: "naïve 名前 👩\u200d🚀 שם"})


def test_an_event_comes_back_from_the_wire_as_it_was() -> None:
    error = ErrorInfo(kind="client", class_="BadRequestError", message="no", status_code=400)
    written = attempt(cost=1_500_000, cost_basis="billed", error=error, outcome="error")
    assert Attempt.model_validate_json(written.json_bytes()) == written
    assert b'"cost":"0.001500000"' in written.json_bytes()
    assert b'"class":"BadRequestError"' in written.json_bytes()


def test_an_unknown_cost_is_null_and_not_zero() -> None:
    assert b'"cost":null' in attempt().json_bytes()


def test_a_field_of_a_later_version_is_ignored_in_an_event() -> None:
    data = attempt().model_dump(mode="json") | {"from_the_future": 1}
    assert Attempt.model_validate(data) == attempt()


@each_row(
    ("fields", "path", "words"),
    [
        ({"promt": "x"}, "promt", "did you mean 'prompt'?"),
        ({"prompt": 3}, "prompt", "valid string"),
        ({}, "", "exactly one of prompt, messages, input and api_request is required; found none"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "", "found prompt and messages"),
        ({"messages": []}, "messages", "is empty"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", "should be"),
        (
            {"messages": [{"role": "user", "content": 3}]},
            "messages.0.content",
            "a valid string, or should be",
        ),
        ({"prompt": "x", "total_timeout_s": 0}, "total_timeout_s", "greater than 0"),
        ({"prompt": "x", "job_id": ""}, "job_id", "is empty"),
        ({"prompt": "x", "job_id": "a\nb"}, "job_id", "must not contain control characters"),
        ({"prompt": "x", "job_id": "j" * 129}, "job_id", "at most 128"),
        ({"prompt": "x", "reply_to": "bw.jobs.other"}, "reply_to", "inbox"),
        ({"prompt": "x", "reply_to": "$JS.API.INFO"}, "reply_to", "inbox"),
        ({"prompt": "x", "params": []}, "params", "dictionary"),
    ],
)
def test_a_wrong_job_is_explained_by_path(fields: dict[str, Any], path: str, words: str) -> None:
    document = {"agent": "a"} | fields
    with pytest.raises(ValidationError) as caught:
        Job.model_validate(document)
    found = problems(caught.value, Job, document)
    assert any(problem.path == path and words in problem.message for problem in found), found
    assert words in explain(caught.value, Job, document)


def test_an_explanation_never_repeats_what_was_given() -> None:
    with pytest.raises(ValidationError) as caught:
        Job.model_validate({"agent": "a", "prompt": ["sk-very-secret"]})
    assert "secret" not in explain(caught.value)


def test_a_prompt_is_one_user_message_and_messages_pass_with_all_their_fields() -> None:
    assert Job(agent="a", prompt="hi").chat_messages() == [{"role": "user", "content": "hi"}]
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}], "reasoning": "kept"},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]
    assert Job.model_validate({"agent": "a", "messages": messages}).chat_messages() == messages
