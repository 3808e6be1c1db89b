"""Why a model stopped: providers' words for it, in those of OpenAI."""

from __future__ import annotations

import re
from typing import Any

_SYNONYMS = {
    "stop": ("end_turn", "stop_sequence", "eos", "eos_token", "complete"),
    "length": (
        "max_tokens",
        "max_output_tokens",
        "model_length",
        "model_context_window_exceeded",
        "token_limit",
        "error_limit",
    ),
    "tool_calls": ("tool_use", "tool_call", "function_call"),
    "content_filter": (
        "refusal",
        "safety",
        "image_safety",
        "recitation",
        "blocklist",
        "prohibited_content",
        "image_prohibited_content",
        "image_recitation",
        "model_armor",
        "sensitive",
        "spii",
        "content_filtered",
        "guardrail_intervened",
        "error_toxic",
    ),
}
_STANDARD = {word: standard for standard, words in _SYNONYMS.items() for word in words}
_WORD = re.compile(r"[a-z][a-z0-9_.-]{0,63}")

INTERRUPTED = frozenset(
    {
        "error",  # Mistral, OpenRouter, Cohere
        "abort",  # vLLM, SGLang
        "timeout",  # Cohere
        "cancelled",  # watsonx, these two
        "time_limit",
        "network_error",  # Zhipu
        "insufficient_system_resource",  # DeepSeek
        "malformed_function_call",  # Gemini, these six
        "malformed_response",
        "unexpected_tool_call",
        "too_many_tool_calls",
        "missing_thought_signature",
        "function_call_filter",  # its endpoint that is compatible with OpenAI's
        "malformed_model_output",  # Bedrock, these two
        "malformed_tool_use",
    }
)
"""The answer is no good: its provider had a problem while the model was writing, or the model wrote no valid call."""
KNOWN_REASONS = INTERRUPTED | _STANDARD.keys() | _SYNONYMS.keys() | {"pause_turn", "compaction"}


def finish_reason(given: Any) -> str | None:
    """Why a model stopped: `stop`, `length`, `tool_calls` or `content_filter`; else the provider's own word.

    Args:
        given: what the provider says. Gemini adds a detail: `content_filter: RECITATION`, and gateways write the names
            of enumerations (`FinishReason.STOP`) and hyphens (`tool-calls`).

    Returns:
        None where it says nothing, or no word.
    """
    if not is_end(given):
        return None
    word = str(given).partition(":")[0].strip().rpartition(".")[2].lower().replace("-", "_")
    return _STANDARD.get(word, word) if _WORD.fullmatch(word) else None


def is_end(given: Any) -> bool:
    """Whether a finish reason says that the model has stopped: some write "" or "null" where it goes on."""
    return isinstance(given, str) and given.strip().lower() not in {"", "null", "none"}
