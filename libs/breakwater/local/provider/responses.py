"""OpenAI's Responses on the wire: reading a request, writing answers and their events. It stores no responses."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field

from breakwater.local.provider.behaviour import ChatRequest, ScriptedAnswer
from breakwater.local.provider.openai import (
    OpenAI,
    RequestRefusedError,
    StreamEvent,
    call_id,
    citations,
    logprobs_of,
    pieces_of,
    seal,
    unseal,
)
from breakwater.local.provider.script import ErrorText, Pace, Part, ScriptedHostedCall

ENCRYPTED = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
_FUNCTION = {"description": None, "parameters": None, "strict": True}
_SEARCHES = ("web_search", "web_search_preview")
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_STEPS = {
    "web_search_call": ("in_progress", "searching", "completed"),
    "file_search_call": ("in_progress", "searching", "completed"),
    "code_interpreter_call": ("in_progress", "interpreting", "completed"),
    "image_generation_call": ("in_progress", "generating", "completed"),
    "mcp_call": ("in_progress", "completed"),
    "mcp_list_tools": ("in_progress", "completed"),
}
"""Events of a hosted tool's item, between the event that adds it and the event that ends it."""


class _Item(BaseModel):
    type: str = "message"
    id: str | None = None
    role: str | None = None
    content: str | list[Any] | None = None
    call_id: str | None = None
    output: str | list[Any] | None = None
    encrypted_content: str | None = None


class _Tool(BaseModel):
    type: str
    name: str = ""
    parameters: dict[str, Any] | None = None


class _Choice(BaseModel):
    type: str
    name: str | None = None


class _Format(BaseModel):
    type: str = "text"
    json_schema: dict[str, Any] | None = Field(None, alias="schema")


class _Text(BaseModel):
    format: _Format | None = None


class _Body(BaseModel):
    """All fields of the interface; like the real one, it refuses any other."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    model: Annotated[str, Field(min_length=1)]
    input: str | list[_Item]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(strict=True, ge=16)] | None = None
    metadata: dict[str, str] | None = None
    stream: bool | None = None
    include: list[str] | None = None
    tools: list[_Tool] | None = None
    tool_choice: str | _Choice | None = None
    text: _Text | None = None
    reasoning: dict[str, Any] | None = None
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=20)] | None = None
    previous_response_id: None = None
    background: Literal[False] | None = None
    conversation: None = None
    store: bool | None = None
    stream_options: dict[str, Any] | None = None
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    parallel_tool_calls: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    client_metadata: dict[str, str] | None = None
    context_management: Any = None
    max_tool_calls: Any = None
    moderation: Any = None
    prompt: Any = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: str | None = None
    user: str | None = None


class _ResponsesRequest(ChatRequest):
    @property
    def orphan_error(self) -> ErrorText:
        return ErrorText(param="input", message=f"No tool output found for function call {self.orphans[0]}.")


class Responses(OpenAI):
    """OpenAI's Responses. A scripted model's part in a conversation is the same as over chat completions."""

    def parse(self, content: Any) -> ChatRequest:
        """Reads a body, and brings it into the format of chat completions. Raises ValidationError."""
        body = _Body.model_validate(content)
        items = [_Item(role="user", content=body.input)] if isinstance(body.input, str) else body.input
        text_format = body.text.format if body.text is not None else None
        return _ResponsesRequest.model_validate(
            {
                "model": body.model,
                "messages": [{"role": "system", "content": body.instructions or ""}, *_messages(items)],
                "max_completion_tokens": body.max_output_tokens,
                "stream": body.stream,
                "tools": [_tool(tool) for tool in body.tools or ()],
                "tool_choice": _choice(body.tool_choice),
                "response_format": text_format
                and {"type": text_format.type, "json_schema": {"schema": text_format.json_schema}},
                "logprobs": LOGPROBS in (body.include or ()) or bool(body.top_logprobs),
                "top_logprobs": body.top_logprobs,
                "thinks": body.reasoning is not None and body.reasoning.get("effort") != "none",
                "searches": isinstance(body.tool_choice, _Choice) and body.tool_choice.type in _SEARCHES,
                "body": content,
            }
        )

    def response_body(self, answer: ScriptedAnswer) -> dict[str, Any]:
        """Returns an answer as a `response` object."""
        reason = _INCOMPLETE.get(answer.finish_reason)
        return {
            **_response_in_progress(answer),
            "status": "incomplete" if reason else "completed",
            "completed_at": None if reason else int(time.time()),
            "incomplete_details": {"reason": reason} if reason else None,
            "output": _items(answer, "incomplete" if reason else "completed"),
            **_usage_fields(answer),
        }

    def failure_body(self, answer: ScriptedAnswer, error: ErrorText | None) -> dict[str, Any]:
        """Returns a `response` object with the status `failed`."""
        text = self.error_text(500, error)
        return {
            **_response_in_progress(answer),
            "status": "failed",
            "error": {"code": text.code or "server_error", "message": text.message},
        }

    def failure(self, document: dict[str, Any], sent: int) -> StreamEvent:
        """Returns `response.failed`, or `error` where it is not the response that failed."""
        if "status" in document:
            ended = {"type": "response.failed", "response": document}
        else:
            error = document["error"]
            ended = {**error, "code": error["code"] or error["type"], "type": "error", "error": error}
        return StreamEvent(self.event({**ended, "sequence_number": sent}))

    def event(self, document: Mapping[str, Any]) -> bytes:
        """Returns an event of a stream, named after the document's type."""
        return b"event: %b\ndata: %b\n\n" % (str(document["type"]).encode(), orjson.dumps(document))

    def stream(self, answer: ScriptedAnswer, pace: Pace) -> list[StreamEvent]:
        """Returns an answer as the events of a stream, from `response.created` to the one of its end."""
        begun = _response_in_progress(answer)
        ended = self.response_body(answer)
        documents = [{"type": f"response.{name}", "response": begun} for name in ("created", "in_progress")]
        for index, item in enumerate(ended["output"]):
            documents += _events_of(answer, item, index, pace)
        documents.append({"type": f"response.{ended['status']}", "response": ended})
        return [
            StreamEvent(
                self.event({**document, "sequence_number": number}),
                content="delta" in document,
                ends=number == len(documents) - 1,
            )
            for number, document in enumerate(documents)
        ]


def _messages(items: list[_Item]) -> list[dict[str, Any]]:
    """Returns items as messages; consecutive items of the assistant become one message.

    Raises:
        RequestRefusedError: the encrypted content of a thought is not what was sent.
    """
    messages: list[dict[str, Any]] = []
    for item in items:
        role = item.role
        content = item.content or ""
        calls: list[dict[str, Any]] = []
        if item.type == "reasoning":
            if (seal := item.encrypted_content) is not None and unseal(seal) is None:
                message = f"The encrypted content for item {item.id} could not be verified."
                raise RequestRefusedError(400, ErrorText(code="invalid_encrypted_content", message=message))
            role = "assistant"
            content = ""
        elif item.type == "item_reference":
            raise RequestRefusedError(404, ErrorText(param="input", message=f"Item with id '{item.id}' not found."))
        elif item.type.endswith("_output"):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output or ""})
            continue
        elif item.type != "message":
            # A call of the client's tool has an id that its output repeats; one of a hosted tool has none.
            role = "assistant"
            content = ""
            calls = [] if item.call_id is None else [{"id": item.call_id}]
        parts = [{"text": content}] if isinstance(content, str) else content
        if role == "assistant" and messages and messages[-1]["role"] == "assistant":
            messages[-1]["content"] += parts
            messages[-1]["tool_calls"] += calls
        else:
            messages.append({"role": role, "content": [*parts], "tool_calls": calls})
    return messages


def _tool(tool: _Tool) -> dict[str, Any]:
    return {"type": tool.type, "function": {"name": tool.name, "parameters": tool.parameters or {}}}


def _choice(choice: str | _Choice | None) -> Any:
    return {"type": "function", "function": {"name": choice.name}} if isinstance(choice, _Choice) else choice


def _response_in_progress(answer: ScriptedAnswer) -> dict[str, Any]:
    """Returns the `response` object as it is before any output."""
    body = answer.request.body

    def param(name: str, default: Any = None) -> Any:
        value = body.get(name)
        return default if value is None else value

    tier = param("service_tier", "auto")
    return {
        "id": f"resp_{answer.number}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "error": None,
        "frequency_penalty": 0.0,
        "incomplete_details": None,
        "instructions": param("instructions"),
        "max_output_tokens": param("max_output_tokens"),
        "max_tool_calls": param("max_tool_calls"),
        "model": answer.model,
        "output": [],
        "parallel_tool_calls": param("parallel_tool_calls", True),
        "presence_penalty": 0.0,
        "previous_response_id": None,
        "prompt_cache_key": param("prompt_cache_key"),
        "prompt_cache_retention": param("prompt_cache_retention"),
        "reasoning": {"effort": None, "summary": None, **param("reasoning", {})},
        "safety_identifier": param("safety_identifier"),
        "service_tier": "default" if tier == "auto" else tier,
        "store": param("store", True),
        "temperature": param("temperature", 1.0),
        "text": {"format": {"type": "text"}, "verbosity": "medium", **param("text", {})},
        "tool_choice": param("tool_choice", "auto"),
        "tools": [{**_FUNCTION, **tool} if tool.get("type") == "function" else tool for tool in param("tools", [])],
        "top_logprobs": param("top_logprobs", 0),
        "top_p": param("top_p", 1.0),
        "truncation": param("truncation", "disabled"),
        "usage": None,
        "user": param("user"),
        "metadata": param("metadata", {}),
    }


def _usage_fields(answer: ScriptedAnswer) -> dict[str, Any]:
    if (usage := answer.shown_usage) is None:
        return {}
    tokens = {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": usage.cache_write_tokens},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.input_tokens + usage.output_tokens,
    }
    searches = sum(call.tool == "web_search" for call in answer.hosted_calls)
    return {"usage": tokens, **({"tool_usage": {"web_search": {"num_requests": searches}}} if searches else {})}


def _items(answer: ScriptedAnswer, status: str) -> list[dict[str, Any]]:
    """Returns the items of an answer; the last one has its status."""
    if not answer.choices:
        return []
    calls = iter(range(len(answer.tool_calls)))
    items = [
        {"id": f"{answer.number}_{index}", "status": "completed", **_item(answer, part, calls)}
        for index, part in enumerate(answer.parts)
    ]
    for item in items:
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
        item["id"] = f"{prefix.get(item['type'], item['type'].removesuffix('_call'))}_{item['id']}"
    if items:
        items[-1]["status"] = status
    return items


def _item(answer: ScriptedAnswer, part: Part, calls: Iterator[int]) -> dict[str, Any]:
    match part.type:
        case "text":
            logprobs = logprobs_of(answer, part.text) or {"content": []}
            content = {
                "type": "output_text",
                "text": part.text,
                "annotations": [{"type": "url_citation", **cited} for cited in citations(part)],
                "logprobs": logprobs["content"],
            }
            return {"type": "message", "role": "assistant", "content": [content]}
        case "refusal":
            return {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": part.text}]}
        case "thinking":
            body = answer.request.body
            summed = part.text and not part.redacted and (body.get("reasoning") or {}).get("summary")
            encrypted = {"encrypted_content": seal(part.text)} if ENCRYPTED in (body.get("include") or ()) else {}
            summary = [{"type": "summary_text", "text": part.text}] if summed else []
            return {"type": "reasoning", "summary": summary, **encrypted}
        case "tool_call":
            called = {"call_id": call_id(answer, next(calls)), "name": part.name}
            if part.input is not None:
                return {"type": "custom_tool_call", **called, "input": part.input}
            return {"type": "function_call", **called, "arguments": orjson.dumps(part.arguments).decode()}
        case "hosted":
            return dict(part.item) if part.item is not None else _search(part)


def _search(part: ScriptedHostedCall) -> dict[str, Any]:
    return {"type": "web_search_call", "action": {"type": "search", "query": part.query, "queries": [part.query]}}


def _events_of(answer: ScriptedAnswer, item: dict[str, Any], index: int, pace: Pace) -> Iterator[dict[str, Any]]:
    """Yields the events of an item, without their numbers."""
    place = {"item_id": item["id"], "output_index": index}

    def added_event(**fields: Any) -> dict[str, Any]:
        begun = {**item, "status": "in_progress", **fields}
        return {"type": "response.output_item.added", "output_index": index, "item": begun}

    def text_events(
        name: str, text: str, field: str, /, *more: dict[str, Any], **fields: Any
    ) -> Iterator[dict[str, Any]]:
        at = {**place, **{key: fields[key] for key in fields if key.endswith("index")}}
        extra = {"logprobs": list[Any]()} if name == "output_text" else {}
        for piece in pieces_of(text, pace):
            probable = {"logprobs": (logprobs_of(answer, piece) or {"content": []})["content"]} if extra else {}
            yield {"type": f"response.{name}.delta", **at, "delta": piece, **probable}
        yield from more
        yield {"type": f"response.{name}.done", **at, field: text, **extra, **fields}

    match item["type"]:
        case "message":
            [part] = item["content"]
            at = {**place, "content_index": 0}
            field = "text" if "text" in part else "refusal"
            empty = {**part, field: "", **({"annotations": [], "logprobs": []} if field == "text" else {})}
            annotation_events = [
                {
                    "type": "response.output_text.annotation.added",
                    **at,
                    "annotation_index": number,
                    "annotation": annotation,
                }
                for number, annotation in enumerate(part.get("annotations", ()))
            ]
            yield added_event(content=[])
            yield {"type": "response.content_part.added", **at, "part": empty}
            probable = {"logprobs": part["logprobs"]} if field == "text" else {}
            yield from text_events(part["type"], part[field], field, *annotation_events, content_index=0, **probable)
            yield {"type": "response.content_part.done", **at, "part": part}
        case "reasoning":
            yield added_event(summary=[])
            for number, part in enumerate(item["summary"]):
                at = {**place, "summary_index": number}
                yield {"type": "response.reasoning_summary_part.added", **at, "part": {**part, "text": ""}}
                yield from text_events("reasoning_summary_text", part["text"], "text", summary_index=number)
                yield {"type": "response.reasoning_summary_part.done", **at, "part": part}
        case "function_call":
            yield added_event(arguments="")
            yield from text_events("function_call_arguments", item["arguments"], "arguments", name=item["name"])
        case "custom_tool_call":
            yield added_event(input="")
            yield from text_events("custom_tool_call_input", item["input"], "input")
        case kind:
            yield added_event()
            yield from ({"type": f"response.{kind}.{step}", **place} for step in _STEPS.get(kind, ()))
    yield {"type": "response.output_item.done", "output_index": index, "item": item}
