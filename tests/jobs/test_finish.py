from __future__ import annotations

from typing import Any

from breakwater.jobs.rules.chat_messages import finish_reason
from tests.tables import each_row


@each_row(
    ("given", "reason"),
    [
        ("stop", "stop"),
        ("end_turn", "stop"),
        ("STOP", "stop"),
        ("eos", "stop"),
        ("length", "length"),
        ("max_tokens", "length"),
        ("MAX_TOKENS", "length"),
        ("model_length", "length"),
        ("tool_calls", "tool_calls"),
        ("tool_use", "tool_calls"),
        ("function_call", "tool_calls"),
        ("content_filter", "content_filter"),
        ("content_filter: RECITATION", "content_filter"),
        ("refusal", "content_filter"),
        ("guardrail_intervened", "content_filter"),
        ("ERROR_TOXIC", "content_filter"),
        ("ERROR_LIMIT", "length"),
        ("token_limit", "length"),
        ("pause_turn", "pause_turn"),
        ("FinishReason.MAX_TOKENS", "length"),
        ("tool-calls", "tool_calls"),
        ("malformed-function-call", "malformed_function_call"),
        ("function_call_filter: MALFORMED_FUNCTION_CALL", "function_call_filter"),
        ("null", None),
        (None, None),
        ("", None),
        (7, None),
        (["stop"], None),
        ("no word at all", None),
        ("stop\x1b[31m", None),
        ("x" * 65, None),
    ],
)
def test_a_providers_word_is_said_in_openais(given: Any, reason: str | None) -> None:
    assert finish_reason(given) == reason
