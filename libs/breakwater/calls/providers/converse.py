"""Amazon Bedrock's Converse: a request and an answer of Anthropic's Messages in its form, and its streams.

Converse has the same blocks as Messages under other names, so a chat is translated to Messages first, and answers are
read and recorded as Messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from breakwater.calls.providers.anthropic_stream import MessageEvents
from breakwater.calls.providers.base import refusal_of
from breakwater.calls.providers.settings import is_claude
from breakwater.dialects.rules.chat_chunks import Chunk
from breakwater.jobs.rules.chat_messages import encode_json, fields, objects
from breakwater.kernel.formats import words
from breakwater.prices.rules.usage import of_message

JsonBlock = dict[str, Any]

_OWN_FIELDS = words(
    """
    additionalModelResponseFieldPaths guardrailConfig outputConfig performanceConfig projectIdentifier promptVariables
    requestMetadata serviceTier
    """
)
"""Converse's own fields, which a call may have as params."""
_TRANSLATED = words(
    """
    additionalModelRequestFields cache_control max_tokens messages metadata model output_config service_tier
    stop_sequences stream system temperature tool_choice tools top_p
    """
)
_TIERS = {"default": "default", "flex": "flex", "priority": "priority", "reserved": "reserved"}
_TO_CLAUDE = ("computer_", "bash_", "text_editor_", "memory_")
"""Prefixes of the types of Anthropic's own tools that a client runs, and for which Converse has no form."""


def converse_request(message_request: Mapping[str, Any], model: str, betas: Sequence[str] = ()) -> dict[str, Any]:
    """Translates a request of Messages.

    Fields without a counterpart go to the model as they are (`additionalModelRequestFields`), and Bedrock names those
    that the model does not have. `metadata` and a `service_tier` that Bedrock does not offer are left out.

    Args:
        message_request: the request.
        model: the model's id; some features exist for Claude only.
        betas: Anthropic's betas.

    Raises:
        CallError: the request needs something that Converse does not have.
    """
    documents = _Documents()
    own_fields = {name: value for name, value in message_request.items() if name in _OWN_FIELDS}
    model_fields = {
        name: value
        for name, value in message_request.items()
        if name not in _OWN_FIELDS and name not in _TRANSLATED and value is not None
    }
    if betas:
        model_fields["anthropic_beta"] = [*betas]
    turns: list[JsonBlock] = [
        {"role": turn.get("role"), "content": [*_content(turn.get("content"), documents)]}
        for turn in objects(message_request.get("messages") or [])
    ]
    if (mark := message_request.get("cache_control")) is not None and turns:
        turns[-1]["content"].append(_cache_point(mark))
    request: dict[str, Any] = {"messages": turns}
    if system := [*_content(message_request.get("system"), documents)]:
        request["system"] = system
    limits = {
        "maxTokens": message_request.get("max_tokens"),
        "temperature": message_request.get("temperature"),
        "topP": message_request.get("top_p"),
        "stopSequences": message_request.get("stop_sequences") or None,
    }
    if inference := {name: value for name, value in limits.items() if value is not None}:
        request["inferenceConfig"] = inference
    request |= _tool_config(message_request, model, model_fields, has_calls=_has_tool_blocks(turns))
    if (tier := _TIERS.get(str(message_request.get("service_tier")))) is not None:
        request["serviceTier"] = {"type": tier}
    if output := _output_config(fields(message_request.get("output_config"))):
        request["outputConfig"] = output
    request |= own_fields
    model_fields |= fields(message_request.get("additionalModelRequestFields"))
    return request | ({"additionalModelRequestFields": model_fields} if model_fields else {})


def _content(content: Any, documents: _Documents) -> Iterator[JsonBlock]:
    """Yields the blocks of a content, each followed by a cache point if it is marked."""
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else objects(content or [])
    for block in blocks:
        yield _block(block, documents)
        if (mark := block.get("cache_control")) is not None:
            yield _cache_point(mark)


def _cache_point(mark: Any) -> JsonBlock:
    ttl = fields(mark).get("ttl")
    return {"cachePoint": {"type": "default", **({} if ttl is None else {"ttl": ttl})}}


def _block(block: Mapping[str, Any], documents: _Documents) -> JsonBlock:
    match block.get("type"):
        case "text":
            return {"text": block.get("text")}
        case "image":
            return {"image": _image(fields(block.get("source")))}
        case "document":
            return {"document": documents.translate(block)}
        case "tool_use":
            call = {"toolUseId": block.get("id"), "name": block.get("name"), "input": block.get("input") or {}}
            return {"toolUse": call}
        case "tool_result":
            content = [part for part in _content(block.get("content"), documents) if "cachePoint" not in part]
            result: JsonBlock = {"toolUseId": block.get("tool_use_id"), "content": content}
            return {"toolResult": result | ({"status": "error"} if block.get("is_error") else {})}
        case "thinking":
            signature = {"signature": block["signature"]} if block.get("signature") else {}
            return {"reasoningContent": {"reasoningText": {"text": block.get("thinking") or "", **signature}}}
        case "redacted_thinking":
            return {"reasoningContent": {"redactedContent": block.get("data")}}
        case "search_result":
            texts = [{"text": part.get("text")} for part in objects(block.get("content") or [])]
            result = {"source": block.get("source"), "title": block.get("title"), "content": texts}
            return {"searchResult": result | _citations(block)}
        case kind:
            raise refusal_of(f"content of type {kind!r} is not supported by Bedrock's Converse", "messages")


def _citations(block: Mapping[str, Any]) -> JsonBlock:
    enabled = fields(block.get("citations")).get("enabled")
    return {} if enabled is None else {"citations": {"enabled": enabled}}


def _image(source: Mapping[str, Any]) -> JsonBlock:
    kind = str(source.get("media_type")).removeprefix("image/").replace("jpg", "jpeg")
    if (stored := _in_s3(source)) is not None:
        suffix = str(source["url"]).rpartition(".")[2].lower().replace("jpg", "jpeg")
        return {"format": suffix, "source": stored}
    if source.get("type") != "base64":
        raise refusal_of("Bedrock loads no image from a URL, except s3://: send its data", "messages")
    return {"format": kind, "source": {"bytes": source.get("data")}}


def _in_s3(source: Mapping[str, Any]) -> JsonBlock | None:
    url = source.get("url")
    return {"s3Location": {"uri": url}} if isinstance(url, str) and url.startswith("s3://") else None


class _Documents:
    """Translates the documents of one request, each of which needs a name of its own there."""

    def __init__(self) -> None:
        self._names = set[str]()

    def translate(self, block: Mapping[str, Any]) -> JsonBlock:
        source = fields(block.get("source"))
        document: JsonBlock = {"format": "pdf", "name": self._name_of(block.get("title"))}
        match source.get("type"):
            case "text":
                document |= {"format": "txt", "source": {"text": source.get("data")}}
            case "base64":
                document["source"] = {"bytes": source.get("data")}
            case "content":
                content = source.get("content")
                texts = [content] if isinstance(content, str) else [part.get("text") for part in objects(content or [])]
                document |= {"format": "txt", "source": {"content": [{"text": text} for text in texts]}}
            case "url" if (stored := _in_s3(source)) is not None:
                document["source"] = stored
            case _:
                raise refusal_of("Bedrock loads no document from a URL, except s3://: send its data", "messages")
        if (context := block.get("context")) is not None:
            document["context"] = context
        return document | _citations(block)

    def _name_of(self, title: Any) -> str:
        # Letters, digits, single spaces, hyphens and brackets are allowed.
        name = re.sub(r"\s+", " ", re.sub(r"[^A-Za-z0-9\s()\[\]-]", "-", str(title or "document")))[:180]
        unique = next(
            numbered for number in range(1, 100_000) if (numbered := _numbered(name, number)) not in self._names
        )
        self._names.add(unique)
        return unique


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name} ({number})"


def _has_tool_blocks(turns: Iterable[Mapping[str, Any]]) -> bool:
    return any("toolUse" in block or "toolResult" in block for turn in turns for block in turn["content"])


def _tool_config(
    message_request: Mapping[str, Any], model: str, model_fields: dict[str, Any], *, has_calls: bool
) -> JsonBlock:
    """Returns `toolConfig`. What only Claude has is added to the fields for the model."""
    tools = list[JsonBlock]()
    for tool in objects(message_request.get("tools") or []):
        kind = tool.get("type")
        if kind in (None, "custom"):
            schema = tool.get("input_schema") or {"type": "object", "properties": {}}
            tool_spec: JsonBlock = {"name": tool.get("name"), "inputSchema": {"json": schema}}
            tool_spec |= {name: tool[name] for name in ("description", "strict") if tool.get(name)}
            tools.append({"toolSpec": tool_spec})
            if (mark := tool.get("cache_control")) is not None:
                tools.append(_cache_point(mark))
        elif is_claude(model) and str(kind).startswith(_TO_CLAUDE):
            model_fields["tools"] = [*model_fields.get("tools", ()), tool]
        else:
            raise refusal_of(f"a tool of type {kind!r} is not supported by Bedrock's Converse for {model}", "tools")
    choice = fields(message_request.get("tool_choice"))
    if not tools:
        return {}
    config: JsonBlock = {"tools": tools}
    match choice.get("type"):
        case "none" if not has_calls:
            return {}
        case "none":
            # Converse refuses a conversation with calls and without tools.
            raise refusal_of("Bedrock's Converse can't forbid calls of tools after some were made", "tool_choice")
        case "auto" | "any" as kind:
            config["toolChoice"] = {kind: {}}
        case "tool":
            config["toolChoice"] = {"tool": {"name": choice.get("name")}}
        case _:
            pass
    if choice.get("disable_parallel_tool_use"):
        if not is_claude(model):
            raise refusal_of(f"Bedrock can't have {model} call one tool at a time", "parallel_tool_calls")
        model_fields["tool_choice"] = {**choice}
    return {"toolConfig": config}


def _output_config(config: Mapping[str, Any]) -> JsonBlock:
    output: JsonBlock = {} if config.get("effort") is None else {"effort": config["effort"]}
    format_ = fields(config.get("format"))
    if format_.get("type") == "json_schema":
        schema = {"schema": encode_json(format_.get("schema")).decode(), "name": "answer"}
        output["textFormat"] = {"type": "json_schema", "structure": {"jsonSchema": schema}}
    return output


# Answers

_STOP_REASONS = {"guardrail_intervened": "refusal", "content_filtered": "refusal"}
"""Anthropic's words for stop reasons that it does not have; all others are the same."""


def message_of(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an answer as a message of Anthropic's. What the answer has besides stays in fields of its own."""
    content = fields(fields(answer.get("output")).get("message")).get("content")
    message = _message_start()
    if isinstance(content, list):
        message["content"] = [_answer_block(fields(block)) for block in cast(list[Any], content)]
    else:
        del message["content"]
    return {**message, **_stop(answer), **_rest(answer, ("output",)), "usage": _usage(fields(answer.get("usage")))}


def _message_start() -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [], "stop_sequence": None}


def _stop(event: Mapping[str, Any]) -> dict[str, Any]:
    reason = event.get("stopReason")
    if not isinstance(reason, str) or reason not in _STOP_REASONS:
        return {"stop_reason": reason}
    details = {"type": "refusal", "category": None, "explanation": reason}
    return {"stop_reason": _STOP_REASONS[reason], "stop_details": details}


def _rest(event: Mapping[str, Any], without: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the fields that Messages does not have, such as a guardrail's `trace`, and the tier by Anthropic's name.

    `p` is padding.
    """
    further = {
        name: value
        for name, value in event.items()
        if name not in ("stopReason", "usage", "serviceTier", "p", *without)
    }
    tier = fields(event.get("serviceTier")).get("type")
    return further if tier is None else {**further, "service_tier": tier}


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a usage in Anthropic's terms. In both, the input excludes tokens from and to a cache."""
    counts = {
        "input_tokens": usage.get("inputTokens"),
        "output_tokens": usage.get("outputTokens"),
        "cache_read_input_tokens": usage.get("cacheReadInputTokens"),
        "cache_creation_input_tokens": usage.get("cacheWriteInputTokens"),
    }
    reported = {name: tokens for name, tokens in counts.items() if tokens is not None}
    lifetimes = {
        f"ephemeral_{detail.get('ttl')}_input_tokens": detail.get("inputTokens")
        for detail in objects(usage.get("cacheDetails") or [])
    }
    return {**reported, "cache_creation": lifetimes} if lifetimes else reported


def _answer_block(block: Mapping[str, Any]) -> JsonBlock:
    if isinstance(text := block.get("text"), str):
        return {"type": "text", "text": text}
    if call := fields(block.get("toolUse")):
        kind = call.get("type") or "tool_use"
        return {"type": kind, "id": call.get("toolUseId"), "name": call.get("name"), "input": call.get("input")}
    if reasoning := fields(block.get("reasoningContent")):
        if "redactedContent" in reasoning:
            return {"type": "redacted_thinking", "data": reasoning["redactedContent"]}
        thought = fields(reasoning.get("reasoningText"))
        return {"type": "thinking", "thinking": thought.get("text") or "", "signature": thought.get("signature") or ""}
    if cited := fields(block.get("citationsContent")):
        text = "".join(str(part.get("text") or "") for part in objects(cited.get("content") or []))
        return {"type": "text", "text": text, "citations": [*map(_citation, objects(cited.get("citations") or []))]}
    name = next(iter(block), "unknown")
    return {"type": name, name: block.get(name)}


_LOCATIONS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "documentChar": (
        "char_location",
        {"documentIndex": "document_index", "start": "start_char_index", "end": "end_char_index"},
    ),
    "documentPage": (
        "page_location",
        {"documentIndex": "document_index", "start": "start_page_number", "end": "end_page_number"},
    ),
    "documentChunk": (
        "content_block_location",
        {"documentIndex": "document_index", "start": "start_block_index", "end": "end_block_index"},
    ),
    "searchResultLocation": (
        "search_result_location",
        {"searchResultIndex": "search_result_index", "start": "start_block_index", "end": "end_block_index"},
    ),
    "web": ("web_search_result_location", {"url": "url"}),
}
"""Anthropic's types of citations and their fields, by Converse's locations."""


def _citation(citation: Mapping[str, Any]) -> JsonBlock:
    cited_text = "".join(str(part.get("text") or "") for part in objects(citation.get("sourceContent") or []))
    title = citation.get("title")
    for location, (kind, names) in _LOCATIONS.items():
        if place := fields(fields(citation.get("location")).get(location)):
            translated = {name: place.get(own_name) for own_name, name in names.items()}
            if "document_index" in translated:
                return {"type": kind, "cited_text": cited_text, "document_title": title, **translated}
            source = {} if location == "web" else {"source": citation.get("source") or ""}
            return {"type": kind, "cited_text": cited_text, "title": title, **source, **translated}
    return {**citation, "type": "bedrock", "cited_text": cited_text}


class ConverseEvents:
    """Reads the events of a stream, each an object with the event's type as its only name."""

    def __init__(self) -> None:
        self._events = MessageEvents(of_message)
        self._begun = set[int]()
        self.ended = False

    @property
    def whole(self) -> bool:
        """Returns True if the model has stopped. The usage, which comes last, may be missing."""
        return self._events.whole

    def read(self, event: Mapping[str, Any] | None) -> Iterable[Chunk]:
        """Returns the chunks of an event."""
        chunks = [chunk for translated in self._translate(event or {}) for chunk in self._events.read(translated)]
        self.ended = self._events.ended
        return chunks

    def answer(self) -> dict[str, Any]:
        """Returns the message so far."""
        return self._events.answer()

    def _translate(self, event: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields the events of Anthropic's that say the same."""
        for kind, value in event.items():
            content = fields(value)
            index = content.get("contentBlockIndex")
            match kind:
                case "messageStart":
                    yield {"type": "message_start", "message": _message_start()}
                case "contentBlockStart" if isinstance(index, int):
                    yield self._begin(index, _answer_block(_begun_block(fields(content.get("start")))))
                case "contentBlockDelta" if isinstance(index, int):
                    start, *deltas = _delta(fields(content.get("delta")))
                    if start is not None and index not in self._begun:
                        yield self._begin(index, start)
                    for delta in deltas:
                        yield {"type": "content_block_delta", "index": index, "delta": delta}
                case "contentBlockStop" if isinstance(index, int):
                    self._begun.discard(index)
                    yield {"type": "content_block_stop", "index": index}
                case "messageStop":
                    yield {"type": "message_delta", "delta": {**_stop(content), **_rest(content)}}
                case "metadata":
                    usage = _usage(fields(content.get("usage")))
                    yield {"type": "message_delta", "delta": _rest(content), "usage": usage}
                    yield {"type": "message_stop"}
                case _:
                    pass

    def _begin(self, index: int, block: JsonBlock) -> dict[str, Any]:
        self._begun.add(index)
        return {"type": "content_block_start", "index": index, "content_block": block}


def _begun_block(start: Mapping[str, Any]) -> JsonBlock:
    """Returns a block that has begun. The input of a call follows in pieces."""
    return {"toolUse": {**start["toolUse"], "input": {}}} if fields(start.get("toolUse")) else dict(start)


def _delta(delta: Mapping[str, Any]) -> tuple[JsonBlock | None, *tuple[JsonBlock, ...]]:
    """Returns the block that a delta begins where its start was not announced, and the deltas of Anthropic's."""
    if isinstance(text := delta.get("text"), str):
        return {"type": "text", "text": ""}, {"type": "text_delta", "text": text}
    if call := fields(delta.get("toolUse")):
        return None, {"type": "input_json_delta", "partial_json": call.get("input")}
    if reasoning := fields(delta.get("reasoningContent")):
        if "redactedContent" in reasoning:
            return ({"type": "redacted_thinking", "data": reasoning["redactedContent"]},)
        start = {"type": "thinking", "thinking": "", "signature": ""}
        if isinstance(text := reasoning.get("text"), str):
            return start, {"type": "thinking_delta", "thinking": text}
        return start, {"type": "signature_delta", "signature": reasoning.get("signature")}
    if citation := fields(delta.get("citation")):
        return {"type": "text", "text": ""}, {"type": "citations_delta", "citation": _citation(citation)}
    return (None,)
