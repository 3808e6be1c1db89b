"""Anthropic's Messages API, spoken natively; conversations and answers keep OpenAI's format on our side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import orjson
from pydantic import Field, JsonValue

from breakwater.policy.price import Usage
from breakwater.providers.anthropic_request import request_body
from breakwater.providers.base import URL, ApiVersion, Call, HttpSettings, Provider
from breakwater.providers.wire import UnusableAnswerError, count, fields


class AnthropicSettings(HttpSettings):
    """Anthropic, or a gateway that speaks its Messages API. Betas are switched on under `headers`."""

    kind: Literal["anthropic"]
    base_url: str = Field(default="https://api.anthropic.com/v1", pattern=URL, description="Up to and including /v1.")
    version: ApiVersion = Field(default="2023-06-01", description="Sent as `anthropic-version`.")

    def open(self) -> Provider:
        """Makes the provider. Raises ConfigError."""
        from breakwater.providers.http import HttpProvider

        return HttpProvider(Messages(self.base_url, self.version), self)


@dataclass(frozen=True, slots=True)
class Messages:
    """`<base_url>/messages`. What is translated, and what is refused, stands in `anthropic_request`."""

    base_url: str
    version: str

    def url(self, model: str) -> str:  # noqa: ARG002  it goes into the body
        """The same for every model."""
        return f"{self.base_url.rstrip('/')}/messages"

    def headers(self, key: str | None) -> Mapping[str, str]:
        """The API's version, and the key."""
        return {"anthropic-version": self.version, **({} if key is None else {"x-api-key": key})}

    def body(self, call: Call) -> Mapping[str, Any]:
        """The translated call. Raises CallFailed."""
        return request_body(call)

    def usage(self, answer: Mapping[str, Any]) -> Usage | None:
        """Tokens; Anthropic counts those from and to the cache beside the input, here they are a part of it."""
        reported = fields(answer.get("usage"))
        if not reported:
            return None
        fresh = count(reported.get("input_tokens"))
        read, written = (count(reported.get(f"cache_{what}_input_tokens")) for what in ("read", "creation"))
        return Usage(
            None if fresh is None else fresh + (read or 0) + (written or 0),
            count(reported.get("output_tokens")),
            cached_tokens=read,
            cache_write_tokens=written,
            reasoning_tokens=count(fields(reported.get("output_tokens_details")).get("thinking_tokens")),
        )

    def output(self, answer: Mapping[str, Any]) -> JsonValue:
        """The text, also that of a refusal; with tool calls the assistant message. Raises UnusableAnswerError.

        Such a message has the blocks of extended thinking as `thinking_blocks`: Anthropic wants them back, unchanged,
        with the tools' results.
        """
        content = answer.get("content")
        blocks = [fields(block) for block in cast(list[Any], content)] if isinstance(content, list) else []
        text = "".join(str(block.get("text") or "") for block in blocks if block.get("type") == "text")
        calls = [_tool_call(block) for block in blocks if block.get("type") == "tool_use"]
        if calls:
            message: dict[str, Any] = {"role": "assistant", "content": text or None, "tool_calls": calls}
            thinking = [dict(block) for block in blocks if block.get("type") in ("thinking", "redacted_thinking")]
            if thinking:
                message["thinking_blocks"] = thinking
            return message
        if not text:
            raise UnusableAnswerError(f"the answer has no content (stop_reason: {answer.get('stop_reason')})")
        return text


def _tool_call(block: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": block.get("name"), "arguments": orjson.dumps(block.get("input") or {}).decode()}
    return {"id": block.get("id"), "type": "function", "function": function}
