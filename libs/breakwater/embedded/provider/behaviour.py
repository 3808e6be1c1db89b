"""What to answer to a request: a pure decision of the script, the request number, the seed and the time since start."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from statistics import NormalDist
from typing import Any, cast

import orjson

from breakwater.embedded.provider.chat import CHARS_PER_TOKEN, AnswerUsage, ChatRequest, ScriptedAnswer, tokens_of
from breakwater.embedded.provider.script import (
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
    rule: Fault | None = None


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
    fault = next((fault for index, fault in enumerate(plan.script.faults) if applies(index, fault)), None)
    decision = Decision(
        status=200,
        delay_s=_delay_s(plan, number, fault),
        answer=_answer(plan, number, request, fault),
        price=plan.script.price,
        billed=True,
        pace=plan.script.stream if request.stream else None,
        rule=fault,
    )
    if fault is None:
        return decision
    billed = not fault.refuses and fault.kind not in UNBILLED
    return replace(
        decision,
        status=None if fault.kind == "reset" else fault.status or 200,
        fault=fault.name,
        error=request.orphan_error if fault.error is None and fault.when == "orphan_tool_calls" else fault.error,
        billed=billed if fault.billed is None else fault.billed,
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


def _delay_s(plan: ModelPlan, number: int, fault: Fault | None) -> float:
    if fault is not None and fault.hang_s is not None:
        return fault.hang_s
    latency = plan.script.latency_ms if fault is None or fault.latency_ms is None else fault.latency_ms
    if not isinstance(latency, Latency):
        return latency / 1000
    sigma = math.log(latency.p95 / latency.p50) / _Z95
    # Half a step away from 0 and 1, where the inverse of the normal distribution has no value.
    quantile = (plan.bits(number, "latency") >> 12 | 1) / 2**52
    return latency.p50 * math.exp(sigma * _NORMAL.inv_cdf(quantile)) / 1000


def _answer(plan: ModelPlan, number: int, request: ChatRequest, fault: Fault | None) -> ScriptedAnswer:
    rules = plan.script
    said = fault if fault is not None and (fault.answer, fault.answer_json) != (None, None) else rules
    tool_calls = _tool_calls(rules, request) if said is rules else ()
    content = None if tool_calls else _text(said, plan.model, number, request)
    if content is not None:
        content = content[: min((at for stop in request.stop or () if (at := content.find(stop)) >= 0), default=None)]
    length = len(content) if content is not None else sum(len(str(call.arguments)) for call in tool_calls)

    def tokens(lane: str, otherwise: int) -> int:
        rule: int | tuple[int, int] | None = getattr(rules.usage, f"{lane}_tokens")
        if isinstance(rule, tuple):
            return rule[0] + plan.bits(number, lane) % (rule[1] - rule[0] + 1)
        return otherwise if rule is None else rule

    input_tokens = tokens("input", tokens_of(sum(len(message.text) for message in request.messages)))
    output_tokens = tokens("output", tokens_of(length))
    finish_reason = "tool_calls" if tool_calls else "stop"
    limit = request.max_completion_tokens or request.max_tokens
    if limit is not None and output_tokens > limit:
        content, tool_calls, finish_reason = _cut(content or "", output_tokens, limit), (), "length"
        output_tokens = limit
    choices = request.n or 1
    usage = AnswerUsage(input_tokens, output_tokens * choices, min(tokens("cached", 0), input_tokens))
    answer = ScriptedAnswer(
        number=f"{plan.bits(number, 'id'):016x}",
        model=plan.model,
        content=content,
        tool_calls=tool_calls,
        finish_reason=finish_reason,
        choices=choices,
        usage=usage,
        shown_usage=usage if rules.usage.report else None,
        stream_usage=bool((request.stream_options or {}).get("include_usage")),
        top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )
    return answer if fault is None else _altered(answer, fault)


def _altered(answer: ScriptedAnswer, fault: Fault) -> ScriptedAnswer:
    """An answer as a fault makes it."""
    if fault.kind == "no_content":
        answer = replace(answer, content=None, tool_calls=())
    return replace(
        answer,
        choices=0 if fault.kind == "no_choices" else answer.choices,
        finish_reason=fault.finish_reason or answer.finish_reason,
        shown_usage=answer.shown_usage and replace(answer.shown_usage, **fault.reports),
    )


def _tool_calls(rules: ModelScript, request: ChatRequest) -> tuple[ToolCall, ...]:
    forced = request.forced_tool
    if not request.offers_tools or rules.tool_calls or forced is None:
        return rules.tool_calls if request.offers_tools else ()
    arguments = example_of(forced.parameters, request.prompt[:ECHOED_CHARS])
    return (ToolCall(name=forced.name, arguments=arguments),)


def _text(said: ModelScript | Fault, model: str, number: int, request: ChatRequest) -> str:
    if said.answer_json is not None and (request.wants_json or said.answer is None):
        return orjson.dumps(said.answer_json).decode()
    if said.answer is not None:
        values = {"{prompt}": request.prompt, "{n}": str(number)}
        # One pass: a placeholder inside the prompt's own text stays what it is.
        return _PLACEHOLDER.sub(lambda match: values[match[0]], said.answer)
    text = f"Simulated answer {number} of {model} to: {request.prompt[:ECHOED_CHARS]}"
    if not request.wants_json:
        return text
    named = request.response_format and request.response_format.json_schema
    made = {"answer": text} if named is None or named.of is None else example_of(named.of, text)
    return orjson.dumps(made).decode()


def _cut(content: str, tokens: int, limit: int) -> str:
    return content[: min(len(content) * limit // tokens, limit * CHARS_PER_TOKEN)]


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
            required = rules.get("required", properties)
            return {name: example_of(properties.get(name, {}), text, depth + 1) for name in required}
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
