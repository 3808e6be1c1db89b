"""What OpenTelemetry's semantic conventions for GenAI 0.1.0 say of the spans that Breakwater sends, as a table.

`problems` holds a span against it. A collector in a test does so with every span that reaches it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, cast

from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

TEXT, WHOLE, NUMBER, BOOLEAN, TEXTS = "string_value", "int_value", "double_value", "bool_value", "array_value"

_REQUESTED = {
    "gen_ai.request.choice.count": WHOLE,
    "gen_ai.request.frequency_penalty": NUMBER,
    "gen_ai.request.max_tokens": WHOLE,
    "gen_ai.request.presence_penalty": NUMBER,
    "gen_ai.request.seed": WHOLE,
    "gen_ai.request.stop_sequences": TEXTS,
    "gen_ai.request.temperature": NUMBER,
    "gen_ai.request.top_p": NUMBER,
    "gen_ai.output.type": TEXT,
}
_CONTENT = {
    "gen_ai.input.messages": TEXT,
    "gen_ai.output.messages": TEXT,
    "gen_ai.system_instructions": TEXT,
}
_BOTH = {
    "gen_ai.operation.name": TEXT,
    "gen_ai.agent.name": TEXT,
    "gen_ai.conversation.id": TEXT,
    "gen_ai.response.finish_reasons": TEXTS,
    "error.type": TEXT,
    **_REQUESTED,
    **_CONTENT,
}
ATTRIBUTES: Mapping[str, Mapping[str, str]] = {
    "chat": _BOTH
    | {
        "gen_ai.provider.name": TEXT,
        "gen_ai.request.model": TEXT,
        "gen_ai.request.reasoning.level": TEXT,
        "gen_ai.request.stream": BOOLEAN,
        "gen_ai.request.top_k": WHOLE,
        "gen_ai.response.id": TEXT,
        "gen_ai.response.model": TEXT,
        "gen_ai.response.time_to_first_chunk": NUMBER,
        "gen_ai.usage.cache_read.input_tokens": WHOLE,
        "gen_ai.usage.input_tokens": WHOLE,
        "gen_ai.usage.output_tokens": WHOLE,
        "gen_ai.usage.reasoning.output_tokens": WHOLE,
        "server.address": TEXT,
        "server.port": WHOLE,
        "http.response.status_code": WHOLE,
        "langfuse.observation.cost_details": TEXT,
    },
    # Its usage is left out on purpose, and an agent with several models has none that it requests.
    "invoke_agent": _BOTH | {"input.value": TEXT, "output.value": TEXT},
    "POST": {
        "http.request.method": TEXT,
        "http.response.status_code": WHOLE,
        "http.route": TEXT,
        "url.path": TEXT,
        "url.scheme": TEXT,
        "error.type": TEXT,
        "gen_ai.agent.name": TEXT,
    },
}
"""By operation, or by method of a request."""

REQUIRED: Mapping[str, frozenset[str]] = {
    "chat": frozenset({"gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model"}),
    "invoke_agent": frozenset({"gen_ai.operation.name", "gen_ai.agent.name"}),
    "POST": frozenset({"http.request.method", "http.route", "url.path", "url.scheme"}),
}
KINDS = {
    "chat": Span.SPAN_KIND_CLIENT,
    "invoke_agent": Span.SPAN_KIND_INTERNAL,
    "POST": Span.SPAN_KIND_SERVER,
}
NAMED_BY = {"chat": "gen_ai.request.model", "invoke_agent": "gen_ai.agent.name", "POST": "http.route"}
VALUES = {"gen_ai.output.type": frozenset({"text", "json", "image", "speech"})}

NEWER_THAN_THE_PACKAGE = frozenset({"gen_ai.request.reasoning.level"})
"""`opentelemetry-semantic-conventions` names what there was when GenAI got conventions of its own, and no more."""

_FIELDS_OF_PARTS = {
    "text": {"content"},
    "tool_call": {"name"},
    "tool_call_response": {"response"},
    "blob": {"modality", "content"},
    "uri": {"modality", "uri"},
    "file": {"modality", "file_id"},
}


def problems(span: Span) -> list[str]:
    """What is wrong with a span; nothing is said of one that is none of Breakwater's."""
    values = {one.key: one.value for one in span.attributes}
    operation = values.get("gen_ai.operation.name") or values.get("http.request.method")
    if operation is None:
        return [f"{span.name}: {name} without an operation" for name in values if name.startswith("gen_ai.")]
    return [f"{span.name}: {problem}" for problem in _problems(span, operation.string_value, values)]


def _problems(span: Span, operation: str, values: Mapping[str, AnyValue]) -> Iterator[str]:
    if operation not in ATTRIBUTES:
        yield f"{operation} is no operation"
        return
    known = ATTRIBUTES[operation]
    if span.kind != KINDS[operation]:
        yield f"is of kind {Span.SpanKind.Name(span.kind)}"
    if missing := REQUIRED[operation] - values.keys():
        yield f"has no {', '.join(sorted(missing))}"
        return
    if span.name != f"{operation} {values[NAMED_BY[operation]].string_value}":
        yield "is not named after its operation"
    for name, value in values.items():
        if name.startswith("breakwater."):
            continue
        if name not in known:
            yield f"{name} is not known"
        elif (kind := value.WhichOneof("value")) != known[name]:
            yield f"{name} is a {kind}"
        elif kind == TEXTS and any(one.WhichOneof("value") != TEXT for one in value.array_value.values):
            yield f"{name} holds more than texts"
        elif name in VALUES and value.string_value not in VALUES[name]:
            yield f"{name} can't be {value.string_value}"
        elif name in _CONTENT:
            yield from (f"{name}: {problem}" for problem in _wrong_content(name, value.string_value))
    if ("error.type" in values) != (span.status.code == Status.STATUS_CODE_ERROR):
        yield "has an error without a status, or a status without an error"
    if ("server.address" in values) != ("server.port" in values):
        yield "has half of an address"
    if "gen_ai.request.stream" in values and not values["gen_ai.request.stream"].bool_value:
        yield "says that it does not stream"
    if "gen_ai.request.choice.count" in values and values["gen_ai.request.choice.count"].int_value == 1:
        yield "says that it wants one choice"


def _wrong_content(name: str, text: str) -> Iterator[str]:
    content: Any = json.loads(text)
    if not isinstance(content, list) or not content:
        yield "is no list"
        return
    for one in cast(list[dict[str, Any]], content):
        if name == "gen_ai.system_instructions":
            parts = [one]
            if one["type"] != "text":
                yield f"{one} is no text"
        elif not isinstance(one.get("role"), str) or not isinstance(one.get("parts"), list):
            yield f"{one} is no message"
            continue
        else:
            parts = one["parts"]
        for part in parts:
            if missing := _FIELDS_OF_PARTS.get(part["type"], set()) - part.keys():
                yield f"{part} has no {missing}"
