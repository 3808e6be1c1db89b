"""Anthropic's Messages, as the HTTP API takes and gives them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, JsonValue, StringConstraints

from breakwater.dialects.contract.openai import CallOptions
from breakwater.kernel.types import NO_CONTROLS, Event, Message

_Model = Annotated[str, StringConstraints(min_length=1, max_length=400, pattern=NO_CONTROLS)]


class CountTokensRequest(Message):
    """Anthropic's request for the number of its input tokens."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: _Model = Field(
        description="An agent, `agent/model`, or any model if the API key is bound to an agent.",
        examples=["content-writer", "content-writer/claude-sonnet-4-5"],
    )
    messages: Annotated[list[dict[str, JsonValue]], Field(min_length=1)]


class MessagesRequest(CountTokensRequest):
    """Anthropic's request. Fields that are not named here go to Anthropic as they are, or become those of a chat."""

    max_tokens: Annotated[int, Field(ge=1)] | None = Field(default=None, description="Default: the agent's limit.")
    stream: bool | None = Field(default=None, description="True to stream the answer as server-sent events.")
    breakwater: CallOptions | None = Field(
        default=None, description="Breakwater's own options; in the SDK: `extra_body`."
    )


class AnthropicMessage(Event):
    """Anthropic's `message`."""

    model_config = ConfigDict(extra="allow")

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, JsonValue]]
    stop_reason: str
    stop_sequence: str | None
    usage: dict[str, JsonValue] = Field(description="Zero tokens if unknown.")


class InputTokenCount(Event):
    """The number of input tokens of a request."""

    input_tokens: int = Field(description="Estimated.")


class AnthropicErrorDetails(Event):
    """An error in Anthropic's words."""

    type: str = Field(description="`invalid_request_error`, `rate_limit_error`, `overloaded_error`, …")
    message: str = Field(description="Begins with the field at fault, such as `messages[0].role`.")
    details: dict[str, JsonValue] | None = Field(
        default=None, description="For a field that Anthropic's SDK goes on without: `thread`."
    )


class AnthropicErrorBody(Event):
    """The body of every response under `/v1/messages` with a status of 400 or above."""

    type: Literal["error"] = "error"
    error: AnthropicErrorDetails
    request_id: str | None
