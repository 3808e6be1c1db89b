"""What is asked of a scripted model and what it answers, whatever the interface: requests are read as OpenAI's."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from breakwater.embedded.provider.script import ErrorText, ScriptedPrice, ToolCall

CHARS_PER_TOKEN = 4
"""A common rule of thumb; a simulated model has no tokenizer."""

TOKENS_PER_MTOK = 1_000_000


def tokens_of(length: int) -> int:
    """Tokens of a text of so many characters; never zero."""
    return max(1, math.ceil(length / CHARS_PER_TOKEN))


class _Part(BaseModel):
    text: str | None = None


class _CallId(BaseModel):
    id: str | None = None


class _Message(BaseModel):
    """A message, as far as a scripted model looks at it."""

    role: str
    content: str | list[_Part] | None = None
    tool_calls: list[_CallId] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """All of its text."""
        if isinstance(self.content, list):
            return "".join(part.text or "" for part in self.content)
        return self.content or ""


class _Function(BaseModel):
    name: str = ""
    parameters: Any = {}


class _Tool(BaseModel):
    type: str = ""
    function: _Function = _Function()


class _NamedSchema(BaseModel):
    of: dict[str, Any] | None = Field(None, alias="schema")


class _ResponseFormat(BaseModel):
    type: str = ""
    json_schema: _NamedSchema | None = None


_Counted = Annotated[int, Field(strict=True, ge=1)]
_Stop = Annotated[str, Field(min_length=1)]


class ChatRequest(BaseModel):
    """The body of a chat completion, as far as a scripted model looks at it."""

    model_config = ConfigDict(frozen=True, hide_input_in_errors=True)

    model: Annotated[str, Field(min_length=1)]
    messages: Annotated[list[_Message], Field(min_length=1)]
    max_completion_tokens: _Counted | None = None
    max_tokens: _Counted | None = None
    n: Annotated[_Counted, Field(le=128)] | None = None
    stop: (
        Annotated[
            list[_Stop],
            BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
            Field(min_length=1, max_length=4),
        ]
        | None
    ) = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=20)] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    tools: list[_Tool] | None = None
    tool_choice: Any = None
    response_format: _ResponseFormat | None = None

    @field_validator("top_logprobs", "stream_options")
    @classmethod
    def _needs(cls, value: object, info: ValidationInfo) -> object:
        needed = {"top_logprobs": "logprobs", "stream_options": "stream"}[str(info.field_name)]
        if value not in (None, {}) and not info.data.get(needed):
            raise ValueError(f"is only allowed with `{needed}`")
        return value

    @property
    def prompt(self) -> str:
        """Text of the last user message."""
        return next((message.text for message in reversed(self.messages) if message.role == "user"), "")

    @property
    def wants_json(self) -> bool:
        """Whether the answer must be JSON."""
        return self.response_format is not None and self.response_format.type in ("json_object", "json_schema")

    @property
    def json_schema(self) -> dict[str, Any] | None:
        """What the answer must satisfy, where the request says so."""
        named = self.response_format and self.response_format.json_schema
        return named.of if named else None

    @property
    def offers_tools(self) -> bool:
        """Tools are offered, and the last message is not the result of one."""
        return bool(self.tools) and self.messages[-1].role != "tool"

    @property
    def forced_tool(self) -> _Function | None:
        """The function that `tool_choice` demands; where it demands any, the first."""
        functions = [tool.function for tool in self.tools or () if tool.type == "function"]
        match self.tool_choice:
            case "required":
                return functions[0] if functions else None
            case {"type": "function", "function": {"name": name}}:
                return next((function for function in functions if function.name == name), None)
            case _:
                return None

    @property
    def orphans(self) -> tuple[str, ...]:
        """Ids of tool calls that the messages right after them do not answer."""
        orphans: list[str] = []
        waiting: list[str] = []
        for message in self.messages:
            if message.role == "tool":
                waiting = [call_id for call_id in waiting if call_id != message.tool_call_id]
            else:
                orphans += waiting
                waiting = [str(call.id) for call in message.tool_calls or ()]
        return (*orphans, *waiting)

    @property
    def orphan_error(self) -> ErrorText:
        """What the interface says of them, worded as clients match it."""
        return ErrorText(
            param="messages",
            message="An assistant message with 'tool_calls' must be followed by tool messages responding to each "
            "'tool_call_id'. The following tool_call_ids did not have response messages: " + ", ".join(self.orphans),
        )


@dataclass(frozen=True, slots=True)
class AnswerUsage:
    """Tokens of an answer; `cached_tokens` are part of `input_tokens`."""

    input_tokens: int
    output_tokens: int
    cached_tokens: int

    def part(self, share: Fraction) -> AnswerUsage:
        """What a stream took of which only a share of the content was sent."""
        return replace(self, output_tokens=math.ceil(self.output_tokens * share))

    def cost_nano(self, price: ScriptedPrice) -> int:
        """What they cost in whole nano-dollars.

        The exact sum of the three parts is rounded half up, once: rounding each part would drift by up to a nano-dollar
        and a half a call. The plane's own price function follows the same rule, so the two agree to the nano-dollar.
        """
        cached_price = price.cached_input_usd_per_mtok
        exact = (
            (self.input_tokens - self.cached_tokens) * price.input_usd_per_mtok
            + self.cached_tokens * (price.input_usd_per_mtok if cached_price is None else cached_price)
            + self.output_tokens * price.output_usd_per_mtok
        )
        return (exact + TOKENS_PER_MTOK // 2) // TOKENS_PER_MTOK


@dataclass(frozen=True, slots=True)
class ScriptedAnswer:
    """What a model says. Each interface writes it, whole or as a stream.

    Attributes:
        number: its id, without the prefix that the interface gives it.
        choices: how many times it is said; 0 for an answer without any.
        usage: what it took.
        shown_usage: what it says that it took.
        stream_usage: a stream carries that, too.
        top_logprobs: how many likely tokens are listed at each place of the text; None where none were asked for.
    """

    number: str
    model: str
    content: str | None
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    choices: int
    usage: AnswerUsage
    shown_usage: AnswerUsage | None
    stream_usage: bool
    top_logprobs: int | None
