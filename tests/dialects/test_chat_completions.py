"""OpenAI's requests as jobs, and results as OpenAI's objects and errors."""

from __future__ import annotations

from typing import Any

import pytest

from breakwater.dialects.contract.openai import CallOptions, ChatCompletionRequest
from breakwater.dialects.rules.chat_chunks import Assembly
from breakwater.dialects.rules.chat_completions import completion_of, error_of, first_choice, job_of
from tests.tables import each_row

MESSAGES = [
    {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "UklG", "format": "wav"}}]},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function"}], "audio": {"id": "a1"}},
]
PARAMS = {
    "tools": [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}],
    "parallel_tool_calls": False,
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
    "n": 2,
    "stop": ["END"],
    "seed": 2**63 - 1,
    "logprobs": True,
    "top_logprobs": 5,
    "reasoning_effort": "low",
    "user": "u1",
    "metadata": {"app": "shop"},
    "not_known_yet": {"a": [1.5, "b"]},
}


def request(**more: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate({"model": "writer", "messages": MESSAGES, **more})


def test_every_field_of_the_dialect_becomes_a_param_as_it_is() -> None:
    job = job_of(request(**PARAMS), CallOptions(), "writer", None)
    assert (job.agent, job.model, job.params) == ("writer", None, PARAMS)
    assert job.chat_messages() == MESSAGES
    assert job.include_response
    assert job.model_fields_set == {"agent", "messages", "params", "include_response"}


def test_what_asks_for_nothing_is_left_out() -> None:
    job = job_of(request(stop=None, n=None, stream=False, service_tier="auto"), CallOptions(), "writer", None)
    assert job.params == {}
    assert job_of(request(service_tier="flex"), CallOptions(), "writer", None).params == {"service_tier": "flex"}


def test_the_options_are_the_jobs_own_fields() -> None:
    options = {
        "tenant": "acme",
        "task_id": "t1",
        "parent_execution_id": "e0",
        "fallback_models": ["b"],
        "total_timeout_s": 20.0,
        "dry_run": True,
        "skip_cache": True,
        "metadata": {"order": 7},
    }
    job = job_of(request(), CallOptions.model_validate(options), "writer", "a")
    assert job.model == "a"
    assert job.model_dump(include=set(options)) == options


ENDS = [
    ("budget_exceeded", "budget_exceeded", None, 429, "insufficient_quota"),
    ("rate_limited", "rate_limit", None, 429, "rate_limit_exceeded"),
    ("breaker_open", "breaker_open", None, 503, "breaker_open"),
    ("guard_tripped", "guard_tripped", None, 403, "guard_tripped"),
    ("timeout", "timeout", None, 504, "timeout"),
    ("timeout", "server", 500, 504, "timeout"),
    # There was no time for the wait that would have followed.
    ("timeout", "rate_limit", 429, 429, "rate_limit_exceeded"),
    ("invalid", "invalid", None, 400, "invalid_request"),
    ("worker_lost", "worker_lost", None, 502, "worker_lost"),
    ("error", "rate_limit", 429, 429, "rate_limit_exceeded"),
    ("error", "retry_budget", None, 503, "retry_budget_exceeded"),
    ("error", "context_overflow", 400, 400, "context_length_exceeded"),
    ("error", "server", 500, 502, "provider_error"),
    ("error", "server", 503, 503, "provider_error"),
    ("error", "server", 529, 503, "provider_error"),
    ("error", "network", None, 502, "provider_unreachable"),
    ("error", "logic", None, 502, "invalid_output"),
    ("error", "client", 400, 400, "invalid_request"),
    ("error", "client", 404, 404, "model_not_found"),
    ("error", "client", 422, 422, "invalid_request"),
    # The plane's own key is wrong, not the client's: an SDK would say that the client's is.
    ("error", "client", 401, 502, "provider_error"),
    ("error", "client", 403, 502, "provider_error"),
    ("error", "client", 302, 502, "provider_error"),
    ("error", "client", 500, 400, "invalid_request"),
    ("error", "client", 501, 400, "invalid_request"),
    ("error", "kind_of_later", None, 502, "provider_error"),
]


@each_row(("reason", "kind", "status_code", "status", "code"), ENDS)
def test_why_a_job_ended_is_a_status_and_a_code(
    reason: str, kind: str, status_code: int | None, status: int, code: str
) -> None:
    error = {"kind": kind, "class": "SomeError", "message": "what happened", "status_code": status_code}
    found = error_of({"status": "dead_lettered", "reason": reason, "error": error})
    assert (found.status, found.code) == (status, code)
    assert found.message.endswith("what happened")
    assert found.param == ("messages" if kind == "context_overflow" else None)


REFUSED = {"short_circuited": True}
CALLED = {"short_circuited": False}


@each_row(
    ("reason", "class_name", "wait_s", "attempts", "status", "code", "may_retry"),
    [
        ("rate_limited", "RateLimitExceededError", 7.1, [REFUSED], 429, "rate_limit_exceeded", True),
        ("rate_limited", "ModelHeldError", 7.1, [REFUSED, REFUSED], 429, "rate_limit_exceeded", True),
        ("breaker_open", "CircuitOpenError", 7.1, [REFUSED], 503, "breaker_open", True),
        ("budget_exceeded", "BudgetExceededError", 7.1, [REFUSED], 429, "insufficient_quota", True),
        ("budget_exceeded", "BudgetHeldError", 5.0, [REFUSED], 429, "rate_limit_exceeded", True),
        ("budget_exceeded", "BudgetsRebuildingError", 5.0, [REFUSED], 503, "unavailable", True),
        ("budget_exceeded", "LimitUnreadableError", 5.0, [REFUSED], 503, "unavailable", True),
        # Waiting does not help.
        ("rate_limited", "RateLimitExceededError", None, [REFUSED], 429, "rate_limit_exceeded", False),
        ("budget_exceeded", "CallOverCapError", None, [REFUSED], 429, "insufficient_quota", False),
        ("breaker_open", "CircuitOpenError", None, [REFUSED], 503, "breaker_open", False),
        ("guard_tripped", "GuardTrippedError", None, [REFUSED], 403, "guard_tripped", False),
        # A repetition would make the calls again that failed before.
        ("rate_limited", "RateLimitExceededError", 7.1, [CALLED, REFUSED], 429, "rate_limit_exceeded", False),
    ],
)
def test_a_refused_job_may_be_repeated_where_waiting_helps_and_it_has_called_nothing(
    reason: str,
    class_name: str,
    wait_s: float | None,
    attempts: list[dict[str, bool]],
    status: int,
    code: str,
    may_retry: bool,
) -> None:
    error = {"kind": reason, "class": class_name, "message": "m", "retry_after_s": wait_s}
    found = error_of({"status": "dead_lettered", "reason": reason, "error": error, "attempts": attempts})
    assert (found.status, found.code, found.may_retry) == (status, code, may_retry)
    assert found.retry_after_s == wait_s


def test_a_wait_that_the_provider_asks_for_and_the_job_has_no_time_for_is_passed_on() -> None:
    for kind, status_code, status, code in (
        ("rate_limit", 429, 429, "rate_limit_exceeded"),
        ("server", 503, 503, "provider_error"),
        ("server", 500, 502, "provider_error"),
    ):
        error = {"kind": kind, "class": "E", "message": "m", "status_code": status_code, "retry_after_s": 3600.0}
        found = error_of({"status": "dead_lettered", "reason": "timeout", "error": error})
        assert (found.status, found.code, found.retry_after_s) == (status, code, 3600)


def test_a_providers_empty_account_is_a_spent_quota() -> None:
    error = {"kind": "quota", "class": "QuotaExceededError", "message": "m", "status_code": 402}
    found = error_of({"status": "dead_lettered", "reason": "error", "error": error})
    assert (found.status, found.code) == (429, "insufficient_quota")


def test_a_cancelled_job_is_a_conflict() -> None:
    found = error_of({"status": "cancelled", "reason": None, "error": None})
    assert (found.status, found.code, found.message) == (409, "cancelled", "the job ended cancelled")


ATTEMPT = {
    "outcome": "success",
    "input_tokens": 12,
    "output_tokens": 5,
    "cached_tokens": 4,
    "reasoning_tokens": None,
}
RESULT: dict[str, Any] = {
    "execution_id": "e1",
    "job_id": "e1",
    "agent": "writer",
    "status": "succeeded",
    "chosen_model": "claude",
    "output": "Hello",
    "attempts": [{"outcome": "error", "input_tokens": 9, "output_tokens": None}, ATTEMPT],
    "completed_at": "2026-11-23T09:00:00.500Z",
}


def test_a_result_of_another_dialect_becomes_a_chat_completion() -> None:
    assert completion_of(RESULT) == {
        "id": "chatcmpl-e1",
        "object": "chat.completion",
        "created": 1795424400,
        "model": "claude",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None, "annotations": []},
                "finish_reason": "stop",
                "logprobs": None,
            }
        ],
        "usage": {
            "prompt_tokens": 12,
            "completion_tokens": 5,
            "total_tokens": 17,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }


def test_thinking_in_anthropic_s_blocks_is_that_of_the_message() -> None:
    content = [{"type": "thinking", "thinking": "Hm.", "signature": "s"}, {"type": "text", "text": "Hello"}]
    [choice] = completion_of({**RESULT, "response": {"type": "message", "content": content}})["choices"]
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("Hm.", "Hello")


def test_a_message_that_calls_tools_stays_one() -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "find", "arguments": "{}"}}]
    [choice] = completion_of(RESULT | {"output": {"role": "assistant", "tool_calls": calls}})["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": [],
        "tool_calls": calls,
    }


def test_any_other_json_is_the_text_of_the_message() -> None:
    [choice] = completion_of(RESULT | {"output": {"title": "Öl"}})["choices"]
    assert choice["message"]["content"] == '{"title": "Öl"}'


def test_unknown_usage_is_absent_and_not_zero() -> None:
    unknown = [ATTEMPT | {"output_tokens": None}]
    assert "usage" not in completion_of(RESULT | {"attempts": unknown})
    assert "usage" not in completion_of(RESULT | {"attempts": []})


def test_the_providers_own_object_passes_as_it_is() -> None:
    own = {"id": "chatcmpl-9", "object": "chat.completion", "choices": [], "system_fingerprint": "fp_1"}
    assert completion_of(RESULT | {"response": own}) == own


def test_of_the_providers_own_object_the_messages_are_such_as_clients_know() -> None:
    content = [{"type": "thinking", "thinking": "Well"}, {"type": "text", "text": "hi"}, {"type": "image_url"}]
    calls = [{"id": "a", "function": {"name": "f", "arguments": {"x": 1}}}, {"id": None, "type": "function"}, 7]
    own = {"choices": [{"message": {"content": content, "tool_calls": calls}, "finish_reason": "", "extra": 1}, None]}
    [choice] = completion_of(RESULT | {"response": own})["choices"]
    assert (choice["index"], choice["finish_reason"], choice["extra"]) == (0, "tool_calls", 1)
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == ("hi", "Well")
    assert message["content_parts"] == [{"type": "image_url"}]
    first, second = message["tool_calls"]
    assert first == {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}
    assert second["function"] == {"name": "", "arguments": "{}"}
    assert second["id"].startswith("call_")
    assert completion_of(RESULT | {"response": own})["choices"] == [choice], "its id is the same again"
    other = completion_of(RESULT | {"execution_id": "e2", "job_id": "e2", "response": own})["choices"][0]["message"][
        "tool_calls"
    ]
    assert other[1]["id"] != second["id"]


@each_row(
    ("given", "known"),
    [
        ("stop", "stop"),
        ("function_call", "function_call"),
        ("eos", "stop"),
        ("MAX_TOKENS", "length"),
        ("tool_use", "tool_calls"),
        ("FinishReason.SAFETY", "content_filter"),
        ("made up", "stop"),
        (7, "stop"),
        (["stop"], "stop"),
    ],
)
def test_why_a_model_stopped_is_a_word_that_clients_know_whole_and_streamed(given: Any, known: str) -> None:
    choice = {"index": 0, "finish_reason": given}
    own = {"choices": [{**choice, "message": {"content": "hi"}}]}
    assert completion_of(RESULT | {"response": own})["choices"][0]["finish_reason"] == known
    assert own["choices"][0]["finish_reason"] == given
    sent = Assembly()
    chunk = sent.add({"choices": [{**choice, "delta": {"content": "hi"}}]})
    assert chunk["choices"][0]["finish_reason"] == (known if isinstance(given, str) else None)
    assert sent.finish_reason(0) == (given if isinstance(given, str) else None)


def test_why_a_model_that_called_a_tool_stopped_is_that_where_its_word_is_unknown() -> None:
    call = {"id": "a", "function": {"name": "f", "arguments": "{}"}}
    own = {"choices": [{"message": {"tool_calls": [call]}, "finish_reason": "done"}]}
    assert completion_of(RESULT | {"response": own})["choices"][0]["finish_reason"] == "tool_calls"
    sent = Assembly()
    sent.add({"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, **call}]}}]})
    chunk = sent.add({"choices": [{"index": 0, "delta": {}, "finish_reason": "done"}]})
    assert chunk["choices"][0]["finish_reason"] == "tool_calls"


@each_row(
    ("usage", "kept"),
    [
        (None, False),
        ({}, False),
        ([], False),
        ({"prompt_tokens": None, "completion_tokens": None, "total_tokens": None}, False),
        ("3", False),
        ({"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": None}, True),
    ],
)
def test_a_usage_without_figures_is_left_out(usage: Any, kept: bool) -> None:
    own = {"object": "text_completion", "choices": [], "usage": usage}
    made = completion_of(RESULT | {"response": own})
    assert (made["object"], made.get("usage", "none")) == ("chat.completion", usage if kept else "none")


def test_why_another_dialect_stopped_is_said_in_openais_words() -> None:
    reasons = {
        "stop": "stop",
        "length": "length",
        "content_filter": "content_filter",
        "pause_turn": "stop",
        None: "stop",
    }
    for reason, expected in reasons.items():
        made = completion_of(RESULT | {"response": {"type": "message"}, "finish_reason": reason})
        assert (made["id"], made["choices"][0]["finish_reason"]) == ("chatcmpl-e1", expected)


def test_all_choices_of_a_result_are_those_of_the_completion() -> None:
    choices = [
        {"index": 0, "output": None, "finish_reason": "content_filter"},
        {"index": 1, "output": "hi", "finish_reason": "length"},
        {"index": 2, "output": MESSAGES[1], "finish_reason": "tool_calls"},
    ]
    made = completion_of(RESULT | {"choices": choices})["choices"]
    assert [(one["index"], one["message"]["content"], one["finish_reason"]) for one in made] == [
        (0, None, "content_filter"),
        (1, "hi", "length"),
        (2, None, "tool_calls"),
    ]


@pytest.mark.parametrize(
    ("class_name", "code"), [("ContentFilteredError", "content_filter"), ("OutputLimitError", "max_tokens_reached")]
)
def test_an_answer_that_says_nothing_is_the_clients_error(class_name: str, code: str) -> None:
    failed = {"status": "dead_lettered", "reason": "error", "error": {"kind": "client", "class": class_name}}
    assert (error_of(failed).status, error_of(failed).code) == (400, code)


@each_row(("indexes", "chosen"), [([0, 1], 0), ([1, 0], 1), ([-1, 0], 1), ([None], 0), ([2, 1], 0), ([], None)])
def test_the_first_choice_is_the_one_that_is_streamed(indexes: list[int | None], chosen: int | None) -> None:
    choices = [{"index": index, "place": place} for place, index in enumerate(indexes)]
    assert first_choice({"choices": choices}).get("place") == chosen
