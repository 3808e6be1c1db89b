"""By what providers' texts and codes tell an error that has a recovery of its own.

No status code does: they all answer 400 for a conversation that is too long or torn, and only their words differ.
"""

from __future__ import annotations

import re

_OVERFLOW_CODES = frozenset({"context_length_exceeded", "exceed_context_size_error", "model_context_window_exceeded"})
_OVERFLOW = re.compile(
    "|".join(
        (
            r"prompt (is )?too long",  # Anthropic, Ollama
            r"input is too long",  # Bedrock
            r"prompt \([^)]{0,40}\) is too long",  # vLLM
            r"input token count[^.]{0,40}exceeds",  # Gemini
            r"longer than the maximum model length",  # vLLM
            r"maximum prompt length",  # xAI
            r"too many (input )?tokens",  # Cohere
            r"exceeds? the (available )?context",  # llama.cpp
            r"`inputs`( tokens \+ `max_new_tokens`)? must (be|have)",  # Text Generation Inference
        )
    ),
    re.I,
)
_CONTEXT = re.compile(r"context[_ -]?(length|window|size|limit)", re.I)
_TOO_MUCH = re.compile(
    r"exceed|maximum|too (long|large|many|big)|longer than|larger than|overflow|reduce the length", re.I
)
"""A text that only names the context window may be about a parameter of that name."""

_ORPHANS = re.compile(
    "|".join(
        (
            r"'tool_calls' must be followed by tool messages",  # OpenAI, and most that are compatible
            r"role '?tool'? must be a response to a prece+ding message with '?tool_calls",
            r"no tool (output found for function call|call found for function call output)",  # OpenAI's Responses
            r"`?tool_use`? ids were found without `?tool_result`? blocks",  # Anthropic
            r"unexpected `?tool_use_id`? found in `?tool_result`? blocks",
            r"`?tool_result`? block must have a corresponding `?tool_use`? block",
            r"function response (parts|turn)[^.]{0,80}function call (parts|turn)",  # Gemini
            r"function call (parts|turn)[^.]{0,80}function response (parts|turn)",
            r"not the same number of function calls and responses",  # Mistral
            r"expected toolresult blocks at|toolresult blocks at [^ ]{1,40} exceeds the number of tooluse",  # Bedrock
        )
    ),
    re.I,
)

_EMPTY_ACCOUNT = frozenset({"insufficient_quota", "billing_not_active", "billing_hard_limit_reached"})


def is_context_overflow(code: str | None, type_: str | None, text: str) -> bool:
    """Whether the conversation did not fit into the model's context window."""
    if code in _OVERFLOW_CODES or type_ in _OVERFLOW_CODES:
        return True
    return bool(_OVERFLOW.search(text) or (_CONTEXT.search(text) and _TOO_MUCH.search(text)))


def has_orphan_tool_calls(text: str) -> bool:
    """Whether a tool call had no result, or a result no call."""
    return bool(_ORPHANS.search(text))


def is_empty_account(code: str | None, type_: str | None) -> bool:
    """Whether the account is out of credit, which OpenAI answers with the status of a rate limit."""
    return code in _EMPTY_ACCOUNT or type_ in _EMPTY_ACCOUNT
