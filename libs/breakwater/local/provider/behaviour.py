"""The answer to a request: a pure decision of the script, the request number, the seed and the time since the start.

Requests of every interface are read as OpenAI's, and each interface writes the answer in its own form.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from hashlib import blake2b
from statistics import NormalDist
from typing import Annotated, Any, cast

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from breakwater.local.provider.script import (
    NO_FAULT,
    ErrorText,
    Fault,
    Latency,
    ModelScript,
    Pace,
    Part,
    ProviderScript,
    ScriptedHostedCall,
    ScriptedPrice,
    ScriptedRefusal,
    ScriptedText,
    ScriptedThinking,
    ScriptedToolCall,
)

ECHOED_CHARS = 80
MAX_DEPTH = 20
UNBILLED = ("malformed_json", "empty_body", "truncated", "error_in_200", "failed", "reset")
"""Kinds of faults whose answer does not report its usage, and is therefore not billed."""

_NORMAL = NormalDist()
_Z95 = _NORMAL.inv_cdf(0.95)
_PLACEHOLDER = re.compile(r"\{(?:prompt|n)\}")

CHARS_PER_TOKEN = 4
"""A common rule of thumb; a simulated model has no tokenizer."""

TOKENS_PER_MTOK = 1_000_000


def tokens_of(length: int) -> int:
    """Returns the tokens of a text of `length` characters; never zero."""
    return max(1, math.ceil(length / CHARS_PER_TOKEN))


class _RequestPart(BaseModel):
    text: str | None = None


class _CallId(BaseModel):
    id: str | None = None


class _RequestMessage(BaseModel):
    """The fields of a message that a scripted model reads."""

    role: str
    content: str | list[_RequestPart] | None = None
    tool_calls: list[_CallId] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """The text of all parts."""
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
    json_schema: dict[str, Any] | None = Field(None, alias="schema")


class _ResponseFormat(BaseModel):
    type: str = ""
    json_schema: _NamedSchema | None = None


_Counted = Annotated[int, Field(strict=True, ge=1)]
_Stop = Annotated[str, Field(min_length=1)]


class ChatRequest(BaseModel):
    """The fields of a chat completion's body that a scripted model reads."""

    model_config = ConfigDict(frozen=True, hide_input_in_errors=True)

    model: Annotated[str, Field(min_length=1)]
    messages: Annotated[list[_RequestMessage], Field(min_length=1)]
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
    reasoning_effort: str | None = None
    """Makes the model think without showing its thoughts."""
    thinks: bool = False
    """True if it asks for the model's thoughts, too."""
    searches: bool = False
    """True if it demands a search of the web."""
    embeds: tuple[str, ...] = ()
    """The texts that it wants embeddings of, instead of an answer."""
    body: dict[str, Any] = Field(default_factory=dict)
    """The body as it came, where the answer repeats some of it."""
    key: str | None = None
    """The API key that it came with."""
    cached_tokens: int = 0
    """The tokens of its beginning that the model's prompt cache has."""

    @field_validator("top_logprobs", "stream_options")
    @classmethod
    def _needs(cls, value: object, info: ValidationInfo) -> object:
        needed = {"top_logprobs": "logprobs", "stream_options": "stream"}[str(info.field_name)]
        if value not in (None, {}) and not info.data.get(needed):
            raise ValueError(f"is only allowed with `{needed}`")
        return value

    @property
    def prompt(self) -> str:
        """The text of the last user message."""
        return next((message.text for message in reversed(self.messages) if message.role == "user"), "")

    @property
    def wants_json(self) -> bool:
        """Returns True if the answer must be JSON."""
        return self.response_format is not None and self.response_format.type in ("json_object", "json_schema")

    @property
    def json_schema(self) -> dict[str, Any] | None:
        """The schema for the answer, if the request has one."""
        named = self.response_format and self.response_format.json_schema
        return named.json_schema if named else None

    @property
    def offers_tools(self) -> bool:
        """Returns True if tools are offered, and the last message is not the result of one."""
        return bool(self.tools) and self.messages[-1].role != "tool"

    @property
    def demanded_tool(self) -> str | None:
        """The name of the tool that must be called."""
        return None if self.forced_tool is None or self.tool_choice == "required" else self.forced_tool.name

    @property
    def turn(self) -> int:
        """The number of the assistant's messages."""
        return sum(message.role == "assistant" for message in self.messages)

    @property
    def input_tokens(self) -> int:
        """Tokens of its texts."""
        return tokens_of(sum(len(message.text) for message in self.messages))

    @property
    def forced_tool(self) -> _Function | None:
        """The function that `tool_choice` demands: the first, where it leaves the choice."""
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
        """The interface's error about orphans, in the words that clients look for."""
        return ErrorText(
            param="messages",
            message="An assistant message with 'tool_calls' must be followed by tool messages responding to each "
            "'tool_call_id'. The following tool_call_ids did not have response messages: " + ", ".join(self.orphans),
        )


@dataclass(frozen=True, slots=True)
class AnswerUsage:
    """Tokens of an answer; reasoning is a part of the output, and the others are disjoint parts of the input."""

    input_tokens: int
    output_tokens: int
    cached_tokens: int
    cache_write_tokens: int = 0
    cache_write_1h_tokens: int = 0
    reasoning_tokens: int = 0

    def part(self, share: Fraction) -> AnswerUsage:
        """Returns the usage of a stream that was sent only in part."""
        sent = math.ceil(self.output_tokens * share)
        return replace(self, output_tokens=sent, reasoning_tokens=min(self.reasoning_tokens, sent))

    def cost_nano(self, price: ScriptedPrice) -> int:
        """Returns the cost in whole nano-dollars.

        The exact sum of all parts is rounded half up, once: rounding each part would drift by up to a nano-dollar
        and a half a call. The plane's own price function follows the same rule, so the two agree to the nano-dollar.
        """
        fresh_price = price.input_usd_per_mtok
        cached_price = price.cached_input_usd_per_mtok
        write_price = price.cache_write_usd_per_mtok
        hour_price = price.cache_write_1h_usd_per_mtok
        fresh = self.input_tokens - self.cached_tokens - self.cache_write_tokens - self.cache_write_1h_tokens
        exact = (
            fresh * fresh_price
            + self.cached_tokens * (fresh_price if cached_price is None else cached_price)
            + self.cache_write_tokens * (-(-fresh_price * 125 // 100) if write_price is None else write_price)
            + self.cache_write_1h_tokens * (fresh_price * 2 if hour_price is None else hour_price)
            + self.output_tokens * price.output_usd_per_mtok
        )
        return (exact + TOKENS_PER_MTOK // 2) // TOKENS_PER_MTOK


@dataclass(frozen=True, slots=True)
class ScriptedAnswer:
    """A model's answer, which each interface writes as one body or as a stream.

    Attributes:
        number: the id, without the prefix of the interface.
        request: the one that it answers.
        parts: of the answer, in order.
        stopped_by: the text of the request's `stop` that ended it.
        dimensions: of embeddings.
        choices: number of choices with the same content; 0 for an answer without any.
        usage: tokens that are billed.
        shown_usage: tokens that the answer reports.
        stream_usage: a stream reports them, too.
        top_logprobs: number of likely tokens that are listed at each place of the text; None where none were requested.
    """

    number: str
    model: str
    request: ChatRequest
    parts: tuple[Part, ...]
    stopped_by: str | None
    dimensions: int
    finish_reason: str
    choices: int
    usage: AnswerUsage
    shown_usage: AnswerUsage | None
    stream_usage: bool
    top_logprobs: int | None

    @property
    def content(self) -> str | None:
        """All of its text."""
        texts = [part.text for part in self.parts if part.type == "text"]
        return "".join(texts) if texts else None

    @property
    def tool_calls(self) -> tuple[ScriptedToolCall, ...]:
        """Calls of the client's tools."""
        return tuple(part for part in self.parts if part.type == "tool_call")

    @property
    def hosted_calls(self) -> tuple[ScriptedHostedCall, ...]:
        """Calls of the provider's tools."""
        return tuple(part for part in self.parts if part.type == "hosted")

    def cost_nano(self, usage: AnswerUsage, price: ScriptedPrice) -> int:
        """Returns the cost of a part of it in whole nano-dollars: its tokens, and all calls of the provider's tools."""
        return usage.cost_nano(price) + sum(price.hosted_usd.get(call.tool, 0) for call in self.hosted_calls)


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A model's script, and the key that all its draws come from."""

    model: str
    script: ModelScript
    key: bytes

    def bits(self, number: int, lane: str) -> int:
        """Returns 64 bits of the request with that number; lanes keep the draws of one request independent."""
        return int.from_bytes(blake2b(f"{number}:{lane}".encode(), key=self.key, digest_size=8).digest())

    def draw(self, number: int, lane: str, rule: int | tuple[int, int]) -> int:
        """Returns the number of a rule, or one from its range."""
        return rule[0] + self.bits(number, lane) % (rule[1] - rule[0] + 1) if isinstance(rule, tuple) else rule

    def input_tokens(self, number: int, request: ChatRequest) -> int:
        """Returns the tokens of a request."""
        rule = self.script.usage.input_tokens
        return self.draw(number, "input", request.input_tokens if rule is None else rule)


@dataclass(frozen=True, slots=True)
class Decision:
    """The course of one request.

    Attributes:
        status: the HTTP status; None where no HTTP answer is sent.
        fault: name of the fault in the ledger; None for an ordinary answer.
        error: the body's error, where it has one.
        delay_s: time until the answer.
        answer: the model's answer; None where the request did not reach a model.
        price: of the model.
        billed: the answer is billed when its time has come, even if the client has left.
        pace: of its stream; None where it comes whole.
        rule: the fault of the script that applies.
        headers: of an answer that is no error.
    """

    status: int | None
    fault: str | None = None
    error: ErrorText | None = None
    delay_s: float = 0.0
    answer: ScriptedAnswer | None = None
    price: ScriptedPrice | None = None
    billed: bool = False
    pace: Pace | None = None
    rule: Fault = NO_FAULT
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


def make_plans(script: ProviderScript) -> dict[str, ModelPlan]:
    """Returns the plan of each model, whose draws depend on the seed and its own name, not on the other models."""
    return {
        model: ModelPlan(model, rules, blake2b(f"{script.seed}\n{model}".encode(), digest_size=32).digest())
        for model, rules in script.models.items()
    }


def decide(plan: ModelPlan, number: int, elapsed_s: float, request: ChatRequest) -> Decision:
    """Decides the answer to the `number`-th request (from 1) of a model.

    The same plan, number, time and request always give the same decision.

    Args:
        plan: the model's script and key.
        number: counts the requests of this model.
        elapsed_s: seconds since the provider's clock was started.
        request: the request.
    """
    applies = partial(_applies, plan, number, elapsed_s, request)
    rule = next((fault for index, fault in enumerate(plan.script.faults) if applies(index, fault)), NO_FAULT)
    reports_usage = not rule.refuses and rule.kind not in UNBILLED
    return Decision(
        status=None if rule.kind == "reset" else rule.status or 200,
        fault=rule.name,
        error=request.orphan_error if rule.error is None and rule.when == "orphan_tool_calls" else rule.error,
        delay_s=_delay_s(plan, number, rule),
        answer=_answer(plan, number, request, rule),
        price=plan.script.price,
        billed=reports_usage if rule.billed is None else rule.billed,
        pace=plan.script.stream if request.stream else None,
        rule=rule,
        headers=plan.script.headers,
    )


def _applies(plan: ModelPlan, number: int, elapsed_s: float, request: ChatRequest, index: int, fault: Fault) -> bool:
    first, last = fault.requests or (1, None)
    return (
        (fault.from_s or 0) <= elapsed_s < (math.inf if fault.to_s is None else fault.to_s)
        and first <= number <= (math.inf if last is None else last)
        and (fault.when is None or bool(request.orphans))
        and (fault.key is None or fault.key == request.key)
        and (fault.stream is None or bool(request.stream))
        and (fault.rate is None or (plan.bits(number, f"fault{index}") >> 11) / 2**53 < fault.rate)
    )


def _delay_s(plan: ModelPlan, number: int, fault: Fault) -> float:
    if fault.hang_s is not None:
        return fault.hang_s
    latency = plan.script.latency_ms if fault.latency_ms is None else fault.latency_ms
    if not isinstance(latency, Latency):
        return latency / 1000
    sigma = math.log(latency.p95 / latency.p50) / _Z95
    # Half a step away from 0 and 1, where the inverse of the normal distribution has no value.
    quantile = (plan.bits(number, "latency") >> 12 | 1) / 2**52
    return latency.p50 * math.exp(sigma * _NORMAL.inv_cdf(quantile)) / 1000


def _answer(plan: ModelPlan, number: int, request: ChatRequest, fault: Fault) -> ScriptedAnswer:
    rules = plan.script.usage
    choices = request.n or 1
    scripted_parts = () if request.embeds else _answer_parts(plan, number, request, fault)
    parts, stopped_by = _cut_at_stop(scripted_parts, request.stop)
    input_tokens = plan.input_tokens(number, request)
    cached = min(max(plan.draw(number, "cached", rules.cached_tokens), request.cached_tokens), input_tokens)
    written = min(plan.draw(number, "written", rules.cache_write_tokens), input_tokens - cached)
    hour = min(plan.draw(number, "hour", rules.cache_write_1h_tokens), input_tokens - cached - written)
    length = tokens_of(sum(map(_length, parts)))
    output_tokens = plan.draw(number, "output", length if rules.output_tokens is None else rules.output_tokens)
    finish_reason = "tool_calls" if any(part.type == "tool_call" for part in parts) else "stop"
    limit = request.max_completion_tokens or request.max_tokens
    if limit is not None and output_tokens > limit:
        parts = tuple(_cut_to_limit(parts, output_tokens, limit))
        finish_reason = "length"
        output_tokens = limit
    thought = sum(len(part.text) for part in parts if part.type == "thinking")
    rule = rules.reasoning_tokens
    reasoning = plan.draw(number, "reasoning", (thought and tokens_of(thought)) if rule is None else rule)
    output_tokens = 0 if request.embeds else output_tokens * choices
    usage = AnswerUsage(input_tokens, output_tokens, cached, written, hour, min(reasoning, output_tokens))
    return ScriptedAnswer(
        number=f"{plan.bits(number, 'id'):016x}",
        model=plan.model,
        request=request,
        parts=() if fault.kind == "no_content" else parts,
        stopped_by=stopped_by,
        dimensions=plan.script.dimensions,
        finish_reason=fault.finish_reason or finish_reason,
        choices=0 if fault.kind == "no_choices" else choices,
        usage=usage,
        shown_usage=(replace(usage, **fault.reports) if fault.reports else usage) if rules.report else None,
        stream_usage=bool((request.stream_options or {}).get("include_usage")),
        top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )


def _length(part: Part) -> int:
    match part:
        case ScriptedToolCall():
            return len(str(part.arguments) if part.input is None else part.input)
        case ScriptedHostedCall():
            return 0
        case _:
            return len(part.text)


def _answer_parts(plan: ModelPlan, number: int, request: ChatRequest, fault: Fault) -> tuple[Part, ...]:
    """Returns the parts of the answer."""
    turns = plan.script.turns
    offered = {tool.function.name for tool in request.tools or ()}
    turn = turns[request.turn] if request.turn < len(turns) else ()
    if fault.answer is not None:
        parts: tuple[Part, ...] = (ScriptedText(text=_fill(fault.answer, number, request)),)
    elif turn and offered.issuperset(part.name for part in turn if part.type == "tool_call"):
        parts = tuple(
            part.model_copy(update={"text": _fill(part.text, number, request)}) if part.type == "text" else part
            for part in turn
        )
    else:
        text, calls = _without_turns(plan, number, request)
        parts = calls if text is None else (ScriptedText(text=text),)
    hidden = request.reasoning_effort not in (None, "none")
    if (request.thinks or hidden) and not any(part.type == "thinking" for part in parts):
        thought = f"Thinking about: {request.prompt[:ECHOED_CHARS]}"
        parts = (ScriptedThinking(text=thought, redacted=not request.thinks), *parts)
    if request.searches and not any(part.type == "hosted" for part in parts):
        parts = (ScriptedHostedCall(query=request.prompt[:ECHOED_CHARS]), *parts)
    return parts


def _without_turns(plan: ModelPlan, number: int, request: ChatRequest) -> tuple[str | None, tuple[Part, ...]]:
    """Returns the text, or the calls of tools."""
    rules = plan.script
    forced = request.forced_tool
    if (
        request.offers_tools
        and rules.tool_calls
        and request.demanded_tool in (None, *(c.name for c in rules.tool_calls))
    ):
        return None, rules.tool_calls
    if request.offers_tools and forced is not None:
        arguments = example_of({"type": "object", **_object(forced.parameters)}, request.prompt[:ECHOED_CHARS])
        return None, (ScriptedToolCall(name=forced.name, arguments=arguments),)
    if rules.answer_json is not None and (request.wants_json or rules.answer is None):
        return orjson.dumps(rules.answer_json).decode(), ()
    if rules.answer is not None:
        return _fill(rules.answer, number, request), ()
    text = f"Simulated answer {number} of {plan.model} to: {request.prompt[:ECHOED_CHARS]}"
    if request.wants_json:
        schema = request.json_schema
        text = orjson.dumps({"answer": text} if schema is None else example_of(schema, text)).decode()
    return text, ()


def _cut_at_stop(parts: tuple[Part, ...], stops: list[str] | None) -> tuple[tuple[Part, ...], str | None]:
    """Cuts an answer before the first of the texts that end it, and returns that text, too."""
    for index, part in enumerate(parts):
        if part.type != "text":
            continue
        matches = [(at, stop) for stop in stops or () if (at := part.text.find(stop)) >= 0]
        if matches:
            at, stop = min(matches)
            return (*parts[:index], part.model_copy(update={"text": part.text[:at]})), stop
    return parts, None


def _object(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _fill(template: str, number: int, request: ChatRequest) -> str:
    values = {"{prompt}": request.prompt, "{n}": str(number)}
    # In one pass, so that a placeholder in the prompt's own text is not filled.
    return _PLACEHOLDER.sub(lambda match: values[match[0]], template)


def _cut_to_limit(parts: tuple[Part, ...], tokens: int, limit: int) -> Iterator[Part]:
    """Yields as much of an answer as fits the limit, without calls of the client's tools."""
    texts = (ScriptedText, ScriptedThinking, ScriptedRefusal)
    length = sum(len(part.text) for part in parts if isinstance(part, texts))
    chars_left = min(length * limit // tokens, limit * CHARS_PER_TOKEN)
    for index, part in enumerate(parts):
        if isinstance(part, ScriptedHostedCall):
            yield part
        elif isinstance(part, texts):
            if chars_left or not index:
                yield part.model_copy(update={"text": part.text[:chars_left]})
            chars_left = max(0, chars_left - len(part.text))


def example_of(schema: Any, text: str, depth: int = 0) -> Any:
    """Returns a value for a JSON schema.

    Args:
        schema: types, properties, items, bounds, `enum`, `const` and alternatives are understood; the rest is not.
        text: content of strings.
        depth: present depth of the value.
    """
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return text
    rules = cast("dict[str, Any]", schema)
    nested_example = partial(example_of, text=text, depth=depth + 1)
    match rules:
        case {"const": value} | {"default": value} | {"enum": [value, *_]} | {"examples": [value, *_]}:
            return value
        case {"anyOf": [first, *_]} | {"oneOf": [first, *_]}:
            return nested_example(first)
        case {"type": [first, *_]}:
            return nested_example({**rules, "type": first})
        case {"type": "object"} | {"properties": _}:
            properties = rules.get("properties", {})
            return {name: nested_example(properties.get(name, {})) for name in rules.get("required", properties)}
        case {"type": "array"}:
            return [nested_example(rules.get("items", {}))] * int(rules.get("minItems", 0))
        case {"type": "integer" | "number"}:
            return rules.get("minimum", rules.get("exclusiveMinimum", -1) + 1)
        case {"type": "boolean"}:
            return True
        case {"type": "null"}:
            return None
        case _:
            shortest = int(rules.get("minLength", 0))
            longest = int(rules.get("maxLength", len(text)))
            return text[:longest].ljust(shortest, ".")
