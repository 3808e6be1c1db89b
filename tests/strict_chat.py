"""What DeepSeek, Gemini and Kimi write with a tool call of chat completions, and refuse a conversation without."""

from __future__ import annotations

import json
from typing import Any

THINKERS = ("deepseek", "kimi")
"""Those that write their thoughts, and want them back with tool calls."""
_GEMINI_FIELDS = frozenset(
    {"role", "content", "refusal", "tool_calls", "tool_call_id", "name", "annotations", "extra_content"}
)
"""Fields of a message that Gemini takes; the others ignore what they do not know."""


def addition(provider: str, function: str, number: int) -> dict[str, Any]:
    """Returns what a provider adds to its tool call of that number in a conversation."""
    match provider:
        case "gemini":
            return {"extra_content": {"google": {"thought_signature": f"signed+/{number}="}}}
        case "kimi":
            return {"id": f"functions.{function}:{number}"}
        case _:
            return {}


def refusal(provider: str, message: dict[str, Any], number: int, *, thinks: bool) -> str | None:
    """Returns why a provider refuses a conversation with a message, whoever wrote that; None if it takes it.

    Args:
        provider: that is asked.
        message: of the conversation.
        number: its place there.
        thinks: it writes its thoughts, and wants them back with tool calls.
    """
    if provider == "gemini" and (unknown := message.keys() - _GEMINI_FIELDS):
        place = f"'messages[{number}]'"
        return f'Invalid JSON payload received. Unknown name "{min(unknown)}" at {place}: Cannot find field.'
    calls: list[dict[str, Any]] = message.get("tool_calls") or []
    if calls and thinks and not message.get("reasoning_content"):
        return "The `reasoning_content` in the thinking mode must be passed back to the API."
    if provider == "gemini" and calls and not signature_of(calls[0]):
        return (
            "Function call is missing a thought_signature in functionCall parts. This is required for tools to work "
            f"correctly: function call `{calls[0]['function']['name']}`, position {number}."
        )
    return None


def signature_of(call: dict[str, Any]) -> str | None:
    """Returns the signature that a tool call has from Gemini."""
    return call.get("extra_content", {}).get("google", {}).get("thought_signature")


def with_additions(provider: str, line: bytes, earlier: int) -> bytes:
    """Returns a line of an answer as the provider writes it, after a number of earlier tool calls."""
    prefix, document = (b"data: ", line[6:]) if line.startswith(b"data: ") else (b"", line)
    if not document.startswith(b"{"):
        return line
    content = json.loads(document)
    for choice in content.get("choices") or ():
        part: dict[str, Any] = choice.get("delta") or choice.get("message") or {}
        if provider not in THINKERS:
            part.pop("reasoning_content", None)
        for index, call in enumerate(part.get("tool_calls") or ()):
            if "id" in call:
                call |= addition(provider, call["function"]["name"], earlier + call.get("index", index))
    return prefix + json.dumps(content).encode() + b"\n"
