"""Why a model stopped: providers' words for it, in those of OpenAI."""

from __future__ import annotations

import re
from typing import Any

_SYNONYMS = {
    "stop": ("end_turn", "stop_sequence", "eos", "eos_token", "complete"),
    "length": ("max_tokens", "max_output_tokens", "model_length", "model_context_window_exceeded"),
    "tool_calls": ("tool_use", "tool_call", "function_call"),
    "content_filter": (
        "refusal",
        "safety",
        "image_safety",
        "recitation",
        "blocklist",
        "prohibited_content",
        "spii",
        "content_filtered",
        "guardrail_intervened",
    ),
}
_STANDARD = {word: standard for standard, words in _SYNONYMS.items() for word in words}
_WORD = re.compile(r"[a-z][a-z0-9_.-]{0,63}")

INTERRUPTED = frozenset({"error", "abort", "insufficient_system_resource"})
"""The provider had a problem of its own while the model was still writing: Mistral, OpenRouter; vLLM; DeepSeek."""


def finish_reason(given: Any) -> str | None:
    """Why a model stopped: `stop`, `length`, `tool_calls` or `content_filter`; else the provider's own word.

    Args:
        given: what the provider says. Gemini adds a detail: `content_filter: RECITATION`.

    Returns:
        None where it says nothing, or no word.
    """
    word = given.partition(":")[0].strip().lower() if isinstance(given, str) else ""
    return _STANDARD.get(word, word) if _WORD.fullmatch(word) else None
