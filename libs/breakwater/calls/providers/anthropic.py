"""Anthropic's Messages API. On our side, conversations and answers keep OpenAI's format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import orjson
from pydantic import JsonValue

from breakwater.calls.providers.anthropic_stream import MessageEvents, text_of
from breakwater.calls.providers.base import (
    Call,
    StreamReader,
    UnusableAnswerError,
    Wire,
    params_to_translate,
    refusal_of,
)
from breakwater.dialects.rules.chat_chunks import Assembly
from breakwater.dialects.rules.messages import without_lone_thinking, without_thinking
from breakwater.dialects.rules.provider_state import plain_id
from breakwater.dialects.rules.tool_schemas import anthropic_tool
from breakwater.jobs.contract.execution import Choice
from breakwater.jobs.contract.job import CallApi
from breakwater.jobs.rules.chat_messages import OTHERS, arguments_text, fields, finish_reason, objects
from breakwater.kernel.errors import BreakwaterError
from breakwater.kernel.formats import words
from breakwater.kernel.surrogates import whole_escapes
from breakwater.prices.rules.price import max_tokens_of
from breakwater.prices.rules.usage import Usage, of_message

_KEYWORDS = ("title", "description", "enum", "const", "format", "default")
_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "uri", "ipv4", "ipv6", "uuid"})


class _InexpressibleError(BreakwaterError):
    """The schema allows values that no closed schema can describe."""


def closed_schema(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the nearest schema that Anthropic's structured outputs can enforce; None if there is none.

    Bounds of numbers, lengths and patterns are left out, so answers must still be checked against the whole schema.
    Objects are closed, and references are resolved. An object without named properties, a recursive schema and the
    intersection of objects (`allOf`) can't be expressed.

    Source: the limits of JSON schema that Anthropic documents for structured outputs.
    """
    try:
        return _close_schema(schema, schema, ())
    except _InexpressibleError:
        return None


def _close_schema(schema: Any, root: Mapping[str, Any], within: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(schema, Mapping):
        raise _InexpressibleError  # `true` allows anything
    node = cast(Mapping[str, Any], schema)
    if isinstance(ref := node.get("$ref"), str):
        if ref in within:
            raise _InexpressibleError
        annotations = {name: value for name, value in node.items() if name in ("title", "description")}
        return _close_schema(_at(root, ref), root, (*within, ref)) | annotations
    variants = node.get("anyOf", node.get("oneOf"))
    if "allOf" in node or (variants is not None and "properties" in node):
        raise _InexpressibleError  # closed objects have no intersection
    closed = {name: node[name] for name in _KEYWORDS if name in node}
    if closed.get("format") not in _FORMATS:
        closed.pop("format", None)
    if variants is not None:
        return closed | {"anyOf": [_close_schema(variant, root, within) for variant in variants]}
    if "enum" not in closed and "const" not in closed:
        closed |= _close_type(node, root, within)
    return closed


def _close_type(node: Mapping[str, Any], root: Mapping[str, Any], within: tuple[str, ...]) -> dict[str, Any]:
    kind = node.get("type", "object" if "properties" in node else None)
    if isinstance(kind, list):
        return {
            "anyOf": [_close_type({**node, "type": type_name}, root, within) for type_name in cast(list[Any], kind)]
        }
    match kind:
        case "object":
            properties = node.get("properties")
            if not isinstance(properties, Mapping) or not properties:
                raise _InexpressibleError
            named_properties = cast(Mapping[str, Any], properties)
            return {
                "type": "object",
                "properties": {name: _close_schema(value, root, within) for name, value in named_properties.items()},
                "required": [name for name in node.get("required", ()) if name in named_properties],
                "additionalProperties": False,
            }
        case "array":
            items = _close_schema(node.get("items"), root, within)
            return {"type": "array", "items": items, **({"minItems": 1} if node.get("minItems") else {})}
        case "string" | "integer" | "number" | "boolean" | "null":
            return {"type": kind}
        case _:
            raise _InexpressibleError


def _at(root: Mapping[str, Any], ref: str) -> Any:
    """Returns the target of a reference within the same document."""
    target: Any = root
    for step in ref.removeprefix("#").split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if not ref.startswith("#") or not isinstance(target, Mapping) or name not in target:
            raise _InexpressibleError
        target = cast(Mapping[str, Any], target)[name]
    return target


AnthropicBlock = dict[str, Any]
DEFAULT_MAX_TOKENS = 4096
"""Anthropic requires a limit; the worker always gives one."""

_NO_COUNTERPART: Mapping[str, Any] = {
    **dict.fromkeys(("audio", "function_call", "functions", "verbosity", "web_search_options"), ...),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "top_logprobs"), 0),
    "logit_bias": {},
    "logprobs": False,
    "modalities": ["text"],
    "n": 1,
}
"""OpenAI's params that Anthropic lacks, each with the value that has no effect. Any other value is refused."""
_DROPPED = frozenset({"prediction", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "seed", "store"})
"""OpenAI's params that do not change the answer, as they control storage, caching, counting or repetition."""
_TRANSLATED = words(
    """
    max_completion_tokens max_tokens metadata parallel_tool_calls reasoning_effort response_format stop system
    tool_choice tools user
    """
)


def request_body(call: Call) -> Mapping[str, Any]:
    """Translates a call.

    Messages: system and developer messages become `system`; tool calls and their results become blocks; consecutive
    messages of one role become one. `cache_control` is kept, on parts and on whole messages. A participant's `name`
    has no counterpart and is left out. Ids of tool calls become ids that Anthropic accepts.

    Params: OpenAI's are translated. Anthropic's own (`thinking`, `top_k`, …) are passed on, as are unknown ones:
    Anthropic names those that it does not accept. `dropped_params` are left out, and so is `thinking` if Anthropic
    would refuse it because another model has written a turn.

    The schema of an answer goes into `output_config.format`, Anthropic's structured outputs, which newer models have
    (set `output.native: false` for others). A schema that can't be expressed there is not sent; answers are checked in
    any case.

    Raises:
        CallError: the call needs something that only OpenAI has, and leaving it out would change the answer.
    """
    params = params_to_translate(call, "Anthropic", dropped=_DROPPED, no_counterpart=_NO_COUNTERPART)
    system, turns = _conversation(call.messages)
    system = [*_blocks(params.get("system")), *system]
    body: dict[str, Any] = {
        **{name: value for name, value in params.items() if name not in _TRANSLATED},
        "model": call.model,
        "messages": turns,
        "max_tokens": max_tokens_of(params, DEFAULT_MAX_TOKENS),
        **({"system": system} if system else {}),
        **_tools(params),
    }
    if "stop" in params:
        stop = params["stop"]
        body["stop_sequences"] = [stop] if isinstance(stop, str) else stop
    user_id = fields(params.get("metadata")).get("user_id", params.get("user"))
    if user_id is not None:
        body["metadata"] = {"user_id": user_id}
    if call.streaming is not None:
        body["stream"] = True
    output = _output_config(call, params)
    body |= {"output_config": output} if output else {}
    return without_thinking(body) if "thinking" in call.left_out else without_lone_thinking(body)


_NO_TEXT = "(empty message)"
"""Replaces a user's message without a visible character where a message is required."""


def _conversation(messages: Sequence[Mapping[str, Any]]) -> tuple[list[AnthropicBlock], list[dict[str, Any]]]:
    """Returns the system prompt, and turns that Anthropic accepts.

    A turn of the assistant must not end in thinking, and the last one not in white space. A blank last message of the
    user is replaced by `_NO_TEXT`, as Anthropic would otherwise continue the turn before it. A system prompt without
    any message becomes a message of the user.
    """
    system, turns = _turns(messages)
    for turn in turns:
        while turn["role"] == "assistant" and turn["content"] and str(turn["content"][-1].get("type")) in _THOUGHTS:
            turn["content"].pop()
    turns = [turn for turn in turns if turn["content"]]
    if not turns and system:
        return [], [{"role": "user", "content": system}]
    last_role = messages[-1].get("role") if messages else None
    if last_role == "user" and (not turns or turns[-1]["role"] == "assistant"):
        turns.append({"role": "user", "content": [{"type": "text", "text": _NO_TEXT}]})
    if turns and turns[-1]["role"] == "assistant" and (last := turns[-1]["content"][-1]).get("type") == "text":
        turns[-1]["content"][-1] = {**last, "text": str(last["text"]).rstrip()}
    return system, turns


_THOUGHTS = frozenset({"thinking", "redacted_thinking"})


def _turns(messages: Iterable[Mapping[str, Any]]) -> tuple[list[AnthropicBlock], list[dict[str, Any]]]:
    system: list[AnthropicBlock] = []
    turns: list[dict[str, Any]] = []
    for message in messages:
        match message.get("role"):
            case "system" | "developer":
                system += _mark_last(_blocks(message.get("content")), message)
                continue
            case "user":
                role = "user"
                blocks = _blocks(message.get("content"))
            case "assistant":
                role = "assistant"
                blocks = _assistant_blocks(message)
            case "tool":
                result_blocks = _blocks(message.get("content"))
                content = {"content": result_blocks} if result_blocks else {}
                result = {"type": "tool_result", "tool_use_id": _plain_id(message.get("tool_call_id"))}
                error_mark = {"is_error": True} if message.get("is_error") is True else {}
                role = "user"
                blocks = [result | content | error_mark]
            case unknown:
                raise refusal_of(f"messages with the role {unknown!r} are not supported by Anthropic", "messages")
        blocks = _mark_last(blocks, message)
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += blocks
        elif blocks:
            turns.append({"role": role, "content": blocks})
    return system, turns


def _mark_last(blocks: list[AnthropicBlock], message: Mapping[str, Any]) -> list[AnthropicBlock]:
    """Puts the message's cache mark on the last block, as the prompt is cached up to there."""
    mark = message.get("cache_control")
    return [*blocks[:-1], {**blocks[-1], "cache_control": mark}] if mark and blocks else blocks


def _blocks(content: Any) -> list[AnthropicBlock]:
    """Returns the blocks of a content, without texts that have no visible character, which Anthropic refuses."""
    if not isinstance(content, list):
        content = [{"type": "text", "text": content}] if isinstance(content, str) else []
    blocks = (_block(fields(part)) for part in cast(list[Any], content))
    return [block for block in blocks if block.get("type") != "text" or str(block.get("text") or "").strip()]


def _block(part: Mapping[str, Any]) -> AnthropicBlock:
    match part.get("type"):
        case "image_url":
            image = part.get("image_url")
            url = image if isinstance(image, str) else fields(image).get("url")
            return _mark_last([{"type": "image", "source": _image_source(str(url))}], part)[0]
        case "refusal":
            return {"type": "text", "text": part.get("refusal")}
        case "file" if str(data := fields(part.get("file")).get("file_data")).startswith("data:application/pdf;"):
            return _mark_last([{"type": "document", "source": _image_source(str(data))}], part)[0]
        case "input_audio" | "file" as kind:
            raise refusal_of(f"content of type {kind!r} is not supported by Anthropic", "messages")
        case _:
            return dict(part)


def _image_source(url: str) -> dict[str, str]:
    if not url.startswith("data:"):
        return {"type": "url", "url": url}
    header, _, data = url.removeprefix("data:").partition(",")
    media_type, *more = header.split(";")
    if "base64" not in more:
        raise refusal_of("an image in a data: URL must be base64 for Anthropic", "messages")
    return {"type": "base64", "media_type": media_type, "data": data}


def _assistant_blocks(message: Mapping[str, Any]) -> list[AnthropicBlock]:
    calls = [fields(call) for call in _list(message.get("tool_calls"))]
    return [
        *(dict(fields(block)) for block in _list(message.get("thinking_blocks"))),
        *_blocks(message.get("content")),
        *(
            {"type": "tool_use", "id": _plain_id(call.get("id")), **_tool_input(fields(call.get("function")))}
            for call in calls
        ),
    ]


def _plain_id(call_id: Any) -> Any:
    return plain_id(call_id) if isinstance(call_id, str) else call_id


def _tool_input(function: Mapping[str, Any]) -> dict[str, Any]:
    # Models sometimes write arguments that are not JSON. Anthropic accepts only objects, and the result of the tool,
    # which follows, shows the model what has become of them.
    try:
        arguments: Any = orjson.loads(whole_escapes(function.get("arguments") or "{}"))
    except orjson.JSONDecodeError:  # also raised if it is not a text
        arguments = None
    return {"name": function.get("name"), "input": arguments if isinstance(arguments, dict) else {}}


def _tools(params: Mapping[str, Any]) -> dict[str, Any]:
    if not (tools := _list(params.get("tools"))):
        return {}
    translated: dict[str, Any] = {"tools": [anthropic_tool(fields(tool)) for tool in tools]}
    choice = _tool_choice(params.get("tool_choice"))
    if params.get("parallel_tool_calls") is False and (choice or {}).get("type") != "none":
        choice = {"type": "auto", **(choice or {}), "disable_parallel_tool_use": True}
    return translated | {"tool_choice": choice} if choice else translated


def _tool_choice(choice: Any) -> dict[str, Any] | None:
    match choice:
        case None:
            return None
        case "auto" | "none":
            return {"type": choice}
        case "required":
            return {"type": "any"}
        case {"type": "function", "function": {"name": name}}:
            return {"type": "tool", "name": name}
        case {"type": "auto" | "any" | "tool" | "none"}:
            return dict(choice)
        case _:
            raise refusal_of("this 'tool_choice' is not supported by Anthropic", "tool_choice")


def _output_config(call: Call, params: Mapping[str, Any]) -> dict[str, Any]:
    config = dict(fields(params.get("output_config")))
    if "reasoning_effort" in params:
        config.setdefault("effort", params["reasoning_effort"])
    match params.get("response_format"):
        case None if call.output_schema is not None and "format" not in config:
            if (schema := closed_schema(call.output_schema)) is not None:
                config["format"] = {"type": "json_schema", "schema": schema}
        case None | {"type": "text"}:
            pass
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            config["format"] = {"type": "json_schema", "schema": schema}
        case other:
            text = f"the response_format {fields(other).get('type')!r} is not supported by Anthropic"
            raise refusal_of(text, "response_format")
    return config


def _list(value: Any) -> Sequence[Any]:
    return cast(list[Any], value) if isinstance(value, list) else ()


def dropped_params(params: Mapping[str, JsonValue]) -> list[str]:
    """Returns the params of a call that are left out, as they do not change the answer.

    `metadata` counts if it has more than the `user_id` that Anthropic knows.
    """
    # `is not False`, as a seed may be 0.
    dropped = {name for name in _DROPPED.intersection(params) if params[name] is not None and params[name] is not False}
    if fields(params.get("metadata")).keys() - {"user_id"}:
        dropped.add("metadata")
    return sorted(dropped)


@dataclass(frozen=True, slots=True)
class Messages:
    """The API at `<base_url>/messages`. `request_body` says what is translated, and what is refused."""

    base_url: str
    version: str

    def url(self, model: str, *, streamed: bool = False) -> str:  # noqa: ARG002  the body says both
        """Returns the URL, which is the same for every model."""
        return f"{self.base_url.rstrip('/')}/messages"

    def headers(self, key: str | None) -> Mapping[str, str]:
        """Returns the API's version, and the key."""
        return {"anthropic-version": self.version, **({} if key is None else {"x-api-key": key})}

    def body(self, call: Call) -> Mapping[str, Any]:
        """Returns the translated call. Raises CallError."""
        return request_body(call)

    def stream_reader(self, answer: Assembly) -> StreamReader:  # noqa: ARG002  its own form has to be kept
        """Returns a reader of the events of a message."""
        return MessageEvents(self.usage)

    def readable(self, answer: dict[str, Any], call: Call) -> dict[str, Any]:  # noqa: ARG002  it stays as it is
        """Returns the answer as it is."""
        return answer

    def usage(self, answer: Mapping[str, Any]) -> Usage | None:
        """Returns the tokens of a message."""
        return of_message(answer)

    def choices(self, answer: Mapping[str, Any]) -> Sequence[Choice]:
        """Returns one choice: its text, even that of a refusal, or the assistant message if it calls tools.

        Such a message has the blocks of extended thinking as `thinking_blocks`, which Anthropic needs back, unchanged,
        with the results of the tools.
        """
        content = answer.get("content")
        if not isinstance(content, list | str):
            raise UnusableAnswerError("the answer has no content")
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        blocks = objects(content)
        text = "".join(text for block in blocks if (text := text_of(block)) is not None)
        calls = [_tool_call(block) for block in blocks if block.get("type") == "tool_use"]
        output: JsonValue = text or None
        if calls:
            message: dict[str, Any] = {"role": "assistant", "content": text or None, "tool_calls": calls}
            thinking = [dict(block) for block in blocks if str(block.get("type")) in _THOUGHTS]
            if thinking:
                message["thinking_blocks"] = thinking
            output = message
        return [Choice(index=0, output=output, finish_reason=finish_reason(answer.get("stop_reason")))]


class NativeMessages(Messages):
    """The API for native requests, which go out as they are."""

    def body(self, call: Call) -> Mapping[str, Any]:
        """Returns the native request, with the repaired conversation if there is one."""
        body: dict[str, Any] = {**(call.native or {}), "model": call.model}
        if call.repaired:
            system, turns = _conversation(call.messages)
            body |= {"messages": turns, **({"system": system} if system else {})}
        if call.streaming is not None:
            body["stream"] = True
        output = _output_config(call, {"output_config": body.get("output_config")})
        body |= {"output_config": output} if output else {}
        return without_thinking(body) if "thinking" in call.left_out else body

    def stream_reader(self, answer: Assembly) -> StreamReader:  # noqa: ARG002  its own form has to be kept
        """Returns a reader that passes on the events of a message."""
        return MessageEvents(self.usage, native=True)

    def choices(self, answer: Mapping[str, Any]) -> Sequence[Choice]:
        """Returns one choice, even for an answer with nothing but thinking or uses of the provider's own tools."""
        (choice,) = Messages.choices(self, answer)
        other_blocks = [dict(block) for block in objects(answer.get("content")) if block.get("type") != "text"]
        if choice.output is not None or not other_blocks:
            return [choice]
        return [choice.model_copy(update={"output": {"role": "assistant", "content": None, OTHERS: other_blocks}})]


def _tool_call(block: Mapping[str, Any]) -> dict[str, Any]:
    arguments = block.get("partial_json") or block.get("input") or {}
    function = {"name": block.get("name"), "arguments": arguments_text(arguments)}
    return {"id": block.get("id"), "type": "function", "function": function}


def anthropic_wires(base_url: str, version: str) -> dict[CallApi, Wire]:
    """Returns the APIs of an endpoint of Anthropic's: Messages as they are, and chats, which are translated."""
    return {"chat": Messages(base_url, version), "messages": NativeMessages(base_url, version)}
