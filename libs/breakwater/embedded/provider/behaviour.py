"""What to answer to a request: a pure decision of the script, the request number, the seed and the time since start."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from statistics import NormalDist
from typing import Any, cast

import orjson

from breakwater.embedded.provider import wire
from breakwater.embedded.provider.script import (
    ErrorText,
    Fault,
    Latency,
    ModelScript,
    ProviderScript,
    ScriptedPrice,
    ToolCall,
    price_nano,
)
from breakwater.embedded.provider.wire import CHARS_PER_TOKEN, AnswerUsage, ChatRequest, Decision, tokens_of

MAX_DEPTH = 20


def example_of(schema: object, text: str, depth: int = 0) -> Any:
    """A value for a schema.

    Args:
        schema: types, properties, items, bounds, `enum`, `const` and alternatives are understood; the rest is not.
        text: what strings say.
        depth: how deep it is already.
    """
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return text
    rules = cast(Mapping[str, Any], schema)
    for keyword in ("const", "default"):
        if keyword in rules:
            return rules[keyword]
    for keyword in ("enum", "examples"):
        if rules.get(keyword):
            return rules[keyword][0]
    for keyword in ("anyOf", "oneOf"):
        if rules.get(keyword):
            return example_of(rules[keyword][0], text, depth + 1)
    kinds = rules.get("type", "object" if "properties" in rules else "string")
    match kinds[0] if isinstance(kinds, list) else kinds:
        case "object":
            properties = cast(Mapping[str, Any], rules.get("properties", {}))
            return {
                name: example_of(properties.get(name, {}), text, depth + 1)
                for name in rules.get("required", properties)
            }
        case "array":
            return [example_of(rules.get("items", {}), text, depth + 1)] * int(rules.get("minItems", 0))
        case "integer" | "number":
            return rules.get("minimum", rules.get("exclusiveMinimum", 0) + 1 if "exclusiveMinimum" in rules else 0)
        case "boolean":
            return True
        case "null":
            return None
        case _:
            least, most = int(rules.get("minLength", 0)), int(rules.get("maxLength", len(text)))
            return text[:most].ljust(least, ".")


_NORMAL = NormalDist()
_Z95 = _NORMAL.inv_cdf(0.95)
_PLACEHOLDER = re.compile(r"\{(?:prompt|n)\}")
ECHOED_CHARS = 80
DEFAULT_STALL_S = 30.0


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A model's script, and the key that all its draws come from."""

    model: str
    script: ModelScript
    key: bytes


@dataclass(frozen=True, slots=True)
class _Answer:
    content: str | None
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    usage: AnswerUsage


def make_plans(script: ProviderScript) -> dict[str, ModelPlan]:
    """The plan of each model. A model's draws depend on the seed and its own name, not on the other models."""
    return {
        model: ModelPlan(model, rules, blake2b(f"{script.seed}\n{model}".encode(), digest_size=32).digest())
        for model, rules in script.models.items()
    }


def refuse(status: int, fault: str, error: ErrorText | None = None) -> Decision:
    """An error that no script asked for: a wrong key, an unknown model, a request that can't be read."""
    return Decision(status=status, fault=fault, error=error)


def decide(plan: ModelPlan, number: int, elapsed_s: float, request: ChatRequest) -> Decision:
    """Decides the answer to the `number`-th request (from 1) of a model.

    The same plan, number, time and request always give the same decision.

    Args:
        plan: the model's script and key.
        number: counts the requests of this model.
        elapsed_s: seconds since the provider's clock was started.
        request: what was asked.
    """
    for index, fault in enumerate(plan.script.faults):
        if _applies(fault, index, plan, number, elapsed_s, request):
            return _fail(fault, plan, number, request)
    return _succeed(plan, number, request)


def _applies(fault: Fault, index: int, plan: ModelPlan, number: int, elapsed_s: float, request: ChatRequest) -> bool:
    if fault.from_s is not None and elapsed_s < fault.from_s:
        return False
    if fault.to_s is not None and elapsed_s >= fault.to_s:
        return False
    if fault.requests is not None:
        first, last = fault.requests
        if number < first or (last is not None and number > last):
            return False
    if fault.when == "orphan_tool_calls" and not request.orphans:
        return False
    if fault.stream is not None and not request.stream:
        return False
    return fault.rate is None or _draw(plan.key, number, f"fault{index}") < fault.rate


def _succeed(plan: ModelPlan, number: int, request: ChatRequest, fault: Fault | None = None) -> Decision:
    answer = _answer(plan, number, request, fault)
    latency = plan.script.latency_ms if fault is None or fault.latency_ms is None else fault.latency_ms
    reported = None if fault is None or fault.reports is None else replace(answer.usage, **fault.reports)
    return Decision(
        status=200,
        delay_s=_delay_s(latency, plan.key, number),
        fault=None if fault is None else _name(fault),
        billed=True if fault is None or fault.billed is None else fault.billed,
        completion_id=f"chatcmpl-{_bits(plan.key, number, 'id'):016x}",
        content=answer.content,
        tool_calls=answer.tool_calls,
        choices=request.choices,
        finish_reason=answer.finish_reason if fault is None or fault.finish_reason is None else fault.finish_reason,
        usage=answer.usage,
        cost_nano=cost_of(plan.script.price, answer.usage),
        report_usage=plan.script.usage.report,
        reported=reported,
        price=plan.script.price,
        streamed=plan.script.stream if request.stream else None,
        stream_usage=request.stream_usage,
        top_logprobs=request.top_logprobs,
    )


def _fail(fault: Fault, plan: ModelPlan, number: int, request: ChatRequest) -> Decision:
    whole = _succeed(plan, number, request, fault)
    if fault.answer is not None or fault.answer_json is not None:
        return whole
    if fault.hang_s is not None:
        # A client that waits it out gets the ordinary answer.
        return replace(whole, delay_s=fault.hang_s, hangs=True, billed_when_abandoned=fault.billed_when_abandoned)
    if fault.stream is not None:
        stall_s = DEFAULT_STALL_S if fault.stall_s is None else fault.stall_s
        whole = replace(whole, stream_fault=fault.stream, after_chunks=fault.after_chunks, stall_s=stall_s)
        return replace(whole, error=fault.error)
    if fault.status is not None and fault.status < 300:
        return replace(whole, status=fault.status)
    # These report their usage, so they are billed like any answer.
    whole_body = fault.kind in ("no_choices", "no_content", "byte_order_mark")
    if fault.kind == "no_content":
        whole = replace(whole, content=None, tool_calls=())
    billed = whole_body or plan.script.billed_on_error if fault.billed is None else fault.billed
    error = fault.error
    if error is None and fault.when == "orphan_tool_calls":
        error = request.orphan_error or wire.orphan_tool_calls(request.orphans)
    if fault.kind is not None:
        return replace(
            whole, status=None if fault.kind == "reset" else 200, broken=fault.kind, billed=billed, error=error
        )
    sent = {"error": error, "retry_after_s": fault.retry_after_s, "headers": fault.headers}
    return replace(whole, status=fault.status, billed=billed, **sent)


def _name(fault: Fault) -> str:
    if fault.kind is not None:
        return fault.kind
    if fault.stream is not None:
        return f"stream_{fault.stream}"
    if fault.hang_s is not None:
        return "hang"
    return "status" if fault.status is not None else "answer"


def _answer(plan: ModelPlan, number: int, request: ChatRequest, fault: Fault | None) -> _Answer:
    rules = plan.script
    tool_calls: tuple[ToolCall, ...] = ()
    content: str | None
    if fault is not None and (fault.answer is not None or fault.answer_json is not None):
        content = _text(fault.answer, fault.answer_json, plan.model, number, request)
    elif rules.tool_calls and request.offers_tools:
        content, tool_calls = None, rules.tool_calls
    elif request.forced_tool is not None and request.offers_tools:
        arguments = example_of(request.forced_tool.parameters, request.prompt[:ECHOED_CHARS])
        content, tool_calls = None, (ToolCall(name=request.forced_tool.name, arguments=arguments),)
    else:
        content = _text(rules.answer, rules.answer_json, plan.model, number, request)
    if content is not None:
        content = content[: min((at for stop in request.stop if (at := content.find(stop)) >= 0), default=len(content))]
    usage_rule = rules.usage
    length = len(content) if content is not None else sum(len(str(call.arguments)) for call in tool_calls)
    input_tokens = _tokens(usage_rule.input_tokens, plan.key, number, "input")
    if input_tokens is None:
        input_tokens = tokens_of(request.text_length)
    output_tokens = _tokens(usage_rule.output_tokens, plan.key, number, "output")
    if output_tokens is None:
        output_tokens = tokens_of(length)
    cached_tokens = min(_tokens(usage_rule.cached_tokens, plan.key, number, "cached") or 0, input_tokens)
    finish_reason = "tool_calls" if tool_calls else "stop"
    if request.max_tokens is not None and output_tokens > request.max_tokens:
        content, tool_calls, finish_reason = _cut(content or "", output_tokens, request.max_tokens), (), "length"
        output_tokens = request.max_tokens
    output_tokens *= request.choices
    return _Answer(content, tool_calls, finish_reason, AnswerUsage(input_tokens, output_tokens, cached_tokens))


def _text(answer: str | None, answer_json: object, model: str, number: int, request: ChatRequest) -> str:
    if answer_json is not None and (request.wants_json or answer is None):
        return orjson.dumps(answer_json).decode()
    if answer is not None:
        values = {"{prompt}": request.prompt, "{n}": str(number)}
        # One pass: a placeholder inside the prompt's own text stays what it is.
        return _PLACEHOLDER.sub(lambda match: values[match[0]], answer) if "{" in answer else answer
    text = f"Simulated answer {number} of {model} to: {request.prompt[:ECHOED_CHARS]}"
    if not request.wants_json:
        return text
    made: object = {"answer": text} if request.schema is None else example_of(request.schema, text)
    return orjson.dumps(made).decode()


def _cut(content: str, tokens: int, limit: int) -> str:
    return content[: min(len(content) * limit // tokens, limit * CHARS_PER_TOKEN)]


def cost_of(price: ScriptedPrice, usage: AnswerUsage) -> int:
    """What tokens cost, in nano-dollars."""
    cached = price.cached_input_usd_per_mtok
    return price_nano(
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
        cached_tokens=usage.cached_tokens,
        input_nano_per_mtok=price.input_usd_per_mtok,
        output_nano_per_mtok=price.output_usd_per_mtok,
        cached_input_nano_per_mtok=price.input_usd_per_mtok if cached is None else cached,
    )


def partly(decision: Decision, sent: int, chunks: int) -> Decision:
    """What a stream comes to of which only some chunks of content were sent: it is billed for these."""
    usage, price = decision.usage, decision.price
    if usage is None or price is None or sent >= chunks:
        return decision
    usage = replace(usage, output_tokens=math.ceil(usage.output_tokens * sent / chunks))
    return replace(decision, usage=usage, cost_nano=cost_of(price, usage))


def _delay_s(latency: float | Latency, key: bytes, number: int) -> float:
    if not isinstance(latency, Latency):
        return latency / 1000
    sigma = math.log(latency.p95 / latency.p50) / _Z95
    # Half a step away from 0 and 1, where the inverse of the normal distribution has no value.
    quantile = (_bits(key, number, "latency") >> 12 | 1) / 2**52
    return latency.p50 * math.exp(sigma * _NORMAL.inv_cdf(quantile)) / 1000


def _tokens(rule: int | tuple[int, int] | None, key: bytes, number: int, lane: str) -> int | None:
    if not isinstance(rule, tuple):
        return rule
    low, high = rule
    return low + _bits(key, number, lane) % (high - low + 1)


def _bits(key: bytes, number: int, lane: str) -> int:
    """64 bits that depend on nothing but these three; lanes keep the draws of one request independent."""
    return int.from_bytes(blake2b(f"{number}:{lane}".encode(), key=key, digest_size=8).digest())


def _draw(key: bytes, number: int, lane: str) -> float:
    return (_bits(key, number, lane) >> 11) / 2**53
