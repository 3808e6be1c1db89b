"""What to answer to a request: a pure decision of the script, the request number, the seed and the time since start."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from statistics import NormalDist
from typing import Any, cast

import orjson

from breakwater.embedded.provider.chat import CHARS_PER_TOKEN, AnswerUsage, ChatRequest, ScriptedAnswer, tokens_of
from breakwater.embedded.provider.script import (
    NO_FAULT,
    ErrorText,
    Fault,
    Latency,
    ModelScript,
    Pace,
    ProviderScript,
    ScriptedPrice,
    ToolCall,
)

ECHOED_CHARS = 80
MAX_DEPTH = 20
UNBILLED = ("malformed_json", "empty_body", "truncated", "error_in_200", "reset")
"""Kinds of faults whose answer does not report its usage."""

_NORMAL = NormalDist()
_Z95 = _NORMAL.inv_cdf(0.95)
_PLACEHOLDER = re.compile(r"\{(?:prompt|n)\}")


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A model's script, and the key that all its draws come from."""

    model: str
    script: ModelScript
    key: bytes

    def bits(self, number: int, lane: str) -> int:
        """64 bits of a request that depend on nothing else; lanes keep the draws of one request independent."""
        return int.from_bytes(blake2b(f"{number}:{lane}".encode(), key=self.key, digest_size=8).digest())


@dataclass(frozen=True, slots=True)
class Decision:
    """What happens to one request.

    Attributes:
        status: the HTTP status; None where no HTTP answer is sent.
        fault: what the ledger calls that which went wrong; None for an ordinary answer.
        error: the body's error, where it has one.
        delay_s: how long until the answer.
        answer: what the model says; None where the request did not get to one.
        price: what that costs.
        billed: it is billed when its time has come, whether or not the client still listens.
        pace: of its stream; None where it comes whole.
        rule: the fault of the script that applies.
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


def make_plans(script: ProviderScript) -> dict[str, ModelPlan]:
    """The plan of each model. A model's draws depend on the seed and its own name, not on the other models."""
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
        request: what was asked.
    """
    applies = partial(_applies, plan, number, elapsed_s, request)
    rule = next((fault for index, fault in enumerate(plan.script.faults) if applies(index, fault)), NO_FAULT)
    whole = not rule.refuses and rule.kind not in UNBILLED
    return Decision(
        status=None if rule.kind == "reset" else rule.status or 200,
        fault=rule.name,
        error=request.orphan_error if rule.error is None and rule.when == "orphan_tool_calls" else rule.error,
        delay_s=_delay_s(plan, number, rule),
        answer=_answer(plan, number, request, rule),
        price=plan.script.price,
        billed=whole if rule.billed is None else rule.billed,
        pace=plan.script.stream if request.stream else None,
        rule=rule,
    )


def _applies(plan: ModelPlan, number: int, elapsed_s: float, request: ChatRequest, index: int, fault: Fault) -> bool:
    first, last = fault.requests or (1, None)
    return (
        (fault.from_s or 0) <= elapsed_s < (math.inf if fault.to_s is None else fault.to_s)
        and first <= number <= (math.inf if last is None else last)
        and (fault.when is None or bool(request.orphans))
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
    rules, choices = plan.script.usage, request.n or 1
    content, tool_calls = _said(plan, number, request, fault)
    if content is not None:
        content = content[: min((at for stop in request.stop or () if (at := content.find(stop)) >= 0), default=None)]
    length = len(content) if content is not None else sum(len(str(call.arguments)) for call in tool_calls)

    def tokens(lane: str, rule: int | tuple[int, int] | None, otherwise: int) -> int:
        if isinstance(rule, tuple):
            return rule[0] + plan.bits(number, lane) % (rule[1] - rule[0] + 1)
        return otherwise if rule is None else rule

    asked = sum(len(message.text) for message in request.messages)
    input_tokens = tokens("input", rules.input_tokens, tokens_of(asked))
    output_tokens = tokens("output", rules.output_tokens, tokens_of(length))
    cached_tokens = min(tokens("cached", rules.cached_tokens, 0), input_tokens)
    finish_reason = "tool_calls" if tool_calls else "stop"
    limit = request.max_completion_tokens or request.max_tokens
    if limit is not None and output_tokens > limit:
        content, tool_calls, finish_reason = _cut(content or "", output_tokens, limit), (), "length"
        output_tokens = limit
    usage = AnswerUsage(input_tokens, output_tokens * choices, cached_tokens)
    silent = fault.kind == "no_content"
    return ScriptedAnswer(
        number=f"{plan.bits(number, 'id'):016x}",
        model=plan.model,
        content=None if silent else content,
        tool_calls=() if silent else tool_calls,
        finish_reason=fault.finish_reason or finish_reason,
        choices=0 if fault.kind == "no_choices" else choices,
        usage=usage,
        shown_usage=replace(usage, **fault.reports) if rules.report else None,
        stream_usage=bool((request.stream_options or {}).get("include_usage")),
        top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )


def _said(plan: ModelPlan, number: int, request: ChatRequest, fault: Fault) -> tuple[str | None, tuple[ToolCall, ...]]:
    """The text, or the calls of tools."""
    rules, forced = plan.script, request.forced_tool
    if fault.answer is not None:
        return _filled(fault.answer, number, request), ()
    if request.offers_tools and rules.tool_calls:
        return None, rules.tool_calls
    if request.offers_tools and forced is not None:
        arguments = example_of(forced.parameters, request.prompt[:ECHOED_CHARS])
        return None, (ToolCall(name=forced.name, arguments=arguments),)
    if rules.answer_json is not None and (request.wants_json or rules.answer is None):
        return orjson.dumps(rules.answer_json).decode(), ()
    if rules.answer is not None:
        return _filled(rules.answer, number, request), ()
    text = f"Simulated answer {number} of {plan.model} to: {request.prompt[:ECHOED_CHARS]}"
    if request.wants_json:
        schema = request.json_schema
        text = orjson.dumps({"answer": text} if schema is None else example_of(schema, text)).decode()
    return text, ()


def _filled(template: str, number: int, request: ChatRequest) -> str:
    values = {"{prompt}": request.prompt, "{n}": str(number)}
    # One pass: a placeholder inside the prompt's own text stays what it is.
    return _PLACEHOLDER.sub(lambda match: values[match[0]], template)


def _cut(content: str, tokens: int, limit: int) -> str:
    return content[: min(len(content) * limit // tokens, limit * CHARS_PER_TOKEN)]


def example_of(schema: Any, text: str, depth: int = 0) -> Any:
    """A value for a schema.

    Args:
        schema: types, properties, items, bounds, `enum`, `const` and alternatives are understood; the rest is not.
        text: what strings say.
        depth: how deep it is already.
    """
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return text
    rules, within = cast("dict[str, Any]", schema), partial(example_of, text=text, depth=depth + 1)
    match rules:
        case {"const": value} | {"default": value} | {"enum": [value, *_]} | {"examples": [value, *_]}:
            return value
        case {"anyOf": [first, *_]} | {"oneOf": [first, *_]}:
            return within(first)
        case {"type": [first, *_]}:
            return within({**rules, "type": first})
        case {"type": "object"} | {"properties": _}:
            properties = rules.get("properties", {})
            return {name: within(properties.get(name, {})) for name in rules.get("required", properties)}
        case {"type": "array"}:
            return [within(rules.get("items", {}))] * int(rules.get("minItems", 0))
        case {"type": "integer" | "number"}:
            return rules.get("minimum", rules.get("exclusiveMinimum", -1) + 1)
        case {"type": "boolean"}:
            return True
        case {"type": "null"}:
            return None
        case _:
            least, most = int(rules.get("minLength", 0)), int(rules.get("maxLength", len(text)))
            return text[:most].ljust(least, ".")
