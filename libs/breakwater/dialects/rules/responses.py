"""OpenAI's Responses: requests as chats, and as bodies for a provider of the same API."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from pydantic import JsonValue

from breakwater.dialects.rules.forms import EMPTY, Body, ChatForm, InvalidBodyError
from breakwater.dialects.rules.provider_state import STATE, StateRepair, is_token, open_token, short_id
from breakwater.dialects.rules.responses_answer import OWN_ITEM
from breakwater.dialects.rules.tool_schemas import portable_tool
from breakwater.jobs.rules.chat_messages import arguments_text, fields, objects
from breakwater.kernel.formats import words
from breakwater.kernel.validation import FieldError
from breakwater.prices.rules.price import InputSize, size_of_messages, size_of_params

_SAME = words(
    """
    frequency_penalty metadata parallel_tool_calls presence_penalty prompt_cache_key prompt_cache_retention
    safety_identifier service_tier temperature top_p user
    """
)
"""Fields that a chat has under the same name."""

DROPPED: Mapping[str, str] = {
    "store": "a chat is not kept by its provider",
    "client_metadata": "it describes the program to OpenAI",
    "max_tool_calls": "it limits tools that a provider runs, and those are refused",
    "prompt_cache_options": "it says how long the provider caches the input",
    "include[]: reasoning.encrypted_content": "it is given in any case",
    "reasoning.summary": "the reasoning that a model shows is given whole",
    "reasoning.generate_summary": "the same",
    "input[]: reasoning": "only the model that wrote it gets it back, in the words of its API",
    "input[].id, .status, .phase, .prompt_cache_breakpoint": "they label items",
    "input[].content[]: annotations, logprobs": "they describe an earlier answer",
    "tools[].strict, where it is not given": "chat's default takes its place",
    "role developer": "it becomes `system`, which every server knows",
}
"""Fields that a translated call leaves out, and why it asks for the same without them."""

_TRANSLATED = words(
    "include input instructions max_output_tokens reasoning text tool_choice tools top_logprobs truncation"
)
_LEFT_OUT = ("client_metadata", "max_tool_calls", "prompt_cache_options")
_KNOWN = _SAME | _TRANSLATED | {name for name in DROPPED if name.isidentifier()}

_NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
}
"""The body's names for the fields of a chat."""

_OF_PLANE = ("background", "conversation", "previous_response_id")
_NOT_IN_JOB = "can't be in a job's request: the plane keeps conversations itself, for clients of POST /v1/responses"
_NOT_IN_CHAT = "can't be translated to a chat: it needs a provider with `api: responses`"
_RUN_BY_PROVIDER = "the provider runs this tool, and charges for it in addition to the tokens"
_UNKNOWN = "is not known to cost tokens alone"
_ITEMS = words(
    """
    additional_tools apply_patch_call apply_patch_call_output code_interpreter_call compaction compaction_summary
    compaction_trigger computer_call computer_call_output context_compaction file_search_call ghost_snapshot
    image_generation_call item_reference local_shell_call local_shell_call_output mcp_approval_request
    mcp_approval_response mcp_call mcp_list_tools shell_call shell_call_output tool_search_call tool_search_output
    web_search_call
    """
)
"""Types of items that a chat lacks and that cost nothing but tokens, as they report what was done before."""
_PARTS = frozenset({"input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"})
"""Types of text parts, which cost nothing but tokens even if their text is missing."""
_OF_FUNCTION = frozenset({"type", "name", "description", "parameters", "strict"})
_OF_CUSTOM = frozenset({"type", "name", "description", "format"})


def chat_form(body: Body) -> ChatForm:
    """Returns the request as a chat. Raises InvalidBodyError."""
    for name in _OF_PLANE:
        if body.get(name):
            raise InvalidBodyError(FieldError(name, _NOT_IN_JOB))
    translation = _Translation()
    params = translation.params(body)
    messages = translation.messages(body)
    if not messages and not translation.losses:
        translation.lose("input", EMPTY)
    losses = tuple(translation.losses)
    unpriced = tuple(translation.unpriced)
    return ChatForm(messages, params, losses, unpriced, _NAMES)


def dropped_fields(body: Body) -> set[str]:
    """Returns the fields of a body that its chat form leaves out, except those of items and tools."""
    dropped = {name for name in _LEFT_OUT if body.get(name) is not None}
    summary = {f"reasoning.{name}" for name in ("summary", "generate_summary")}
    return dropped | {path for path in summary if fields(body.get("reasoning")).get(path.partition(".")[2]) is not None}


def _tools_run_by_provider(tool: Mapping[str, Any], place: str) -> Iterator[FieldError]:
    """Yields a problem if the provider runs a tool itself, or for each tool of a namespace that it runs."""
    match tool:
        case {"type": "function" | "custom" | "apply_patch" | "computer" | "computer_use_preview" | "local_shell"}:
            return
        case {"type": "tool_search", "execution": "client"}:
            return
        case {"type": "namespace", "tools": list(tools)}:
            for number, nested_tool in enumerate(objects(tools)):
                yield from _tools_run_by_provider(nested_tool, f"{place}.tools[{number}]")
        case _:
            yield FieldError(f"{place}.type", f"{tool.get('type')!r}: {_RUN_BY_PROVIDER}")


@dataclass(slots=True)
class _Translation:
    losses: list[FieldError] = field(default_factory=list[FieldError])
    unpriced: list[FieldError] = field(default_factory=list[FieldError])

    def lose(self, path: str, message: str = _NOT_IN_CHAT) -> None:
        self.losses.append(FieldError(path, message))

    def params(self, body: Body) -> dict[str, JsonValue]:
        params: dict[str, JsonValue] = {name: body[name] for name in _SAME if body.get(name) is not None}
        if params.get("service_tier") == "auto":
            del params["service_tier"]  # means the same as leaving it out
        for name, value in body.items():
            if name not in _KNOWN and value is not None:
                self.lose(name)
                self.unpriced.append(FieldError(name, _UNKNOWN))
        if (max_output_tokens := body.get("max_output_tokens")) is not None:
            params["max_tokens"] = max_output_tokens
        if (top_logprobs := body.get("top_logprobs")) is not None:
            params |= {"top_logprobs": top_logprobs, "logprobs": True} if top_logprobs else {}
        for number, included in enumerate(_list(body, "include")):
            if included == "message.output_text.logprobs":
                params["logprobs"] = True
            elif included != "reasoning.encrypted_content":
                self.lose(f"include[{number}]")
        if body.get("truncation") not in (None, "disabled"):
            self.lose("truncation", "only `disabled` can be translated; `on_context_overflow: trim` of the agent trims")
        self._reasoning(_optional_object(body, "reasoning"), params)
        self._text(_optional_object(body, "text"), params)
        self._tools(body, params)
        return params

    def _reasoning(self, reasoning: Mapping[str, Any], params: dict[str, JsonValue]) -> None:
        for name, value in reasoning.items():
            if name == "effort" and value is not None:
                params["reasoning_effort"] = value
            elif value is not None and name not in ("summary", "generate_summary"):
                self.lose(f"reasoning.{name}")

    def _text(self, text: Mapping[str, Any], params: dict[str, JsonValue]) -> None:
        for name, value in text.items():
            if value is None:
                continue
            if name == "verbosity":
                params["verbosity"] = value
            elif name != "format":
                self.lose(f"text.{name}")
            elif (kind := fields(value).get("type")) == "json_schema":
                schema = {name: field_value for name, field_value in fields(value).items() if name != "type"}
                params["response_format"] = {"type": "json_schema", "json_schema": schema}
            elif kind == "json_object":
                params["response_format"] = {"type": "json_object"}
            elif kind != "text":
                self.lose("text.format.type")

    def _tools(self, body: Body, params: dict[str, JsonValue]) -> None:
        tools = dict[tuple[str, str], dict[str, Any]]()
        choice: Any = body.get("tool_choice")
        if not isinstance(choice, str | dict | None):
            raise InvalidBodyError(FieldError("tool_choice", "must be a string or an object"))
        for number, tool in enumerate(_list(body, "tools")):
            tool = _object(tool, f"tools[{number}]")
            if (translated := self._tool(tool, f"tools[{number}]")) is not None:
                tools[_key(tool)] = translated
        kind = choice if isinstance(choice, str) or choice is None else fields(choice).get("type")
        if kind == "allowed_tools":
            # The other tools are left out, which every server understands.
            allowed = [_key(allowed_tool) for allowed_tool in objects(fields(choice).get("tools"))]
            if missing := [key for key in allowed if key not in tools]:
                self.lose("tool_choice.tools", f"{missing[0][1] or missing[0][0]!r} is none of the tools")
            tools = {key: tool for key, tool in tools.items() if key in allowed}
            choice = fields(choice).get("mode")
        elif kind in ("function", "custom"):
            choice = {"type": kind, kind: {"name": fields(choice).get("name")}}
        elif kind not in (None, "auto", "none", "required"):
            self.lose("tool_choice.type" if isinstance(choice, dict) else "tool_choice")
        if tools:
            params["tools"] = list(tools.values())
            if choice is not None:
                params["tool_choice"] = choice
        else:
            params.pop("parallel_tool_calls", None)  # chat refuses it without tools

    def _tool(self, tool: Mapping[str, Any], place: str) -> dict[str, Any] | None:
        kind = tool.get("type")
        if kind not in ("function", "custom"):
            self.lose(f"{place}.type", f"{kind!r} {_NOT_IN_CHAT}")
            self.unpriced += _tools_run_by_provider(tool, place)
            return None
        known_fields = _OF_FUNCTION if kind == "function" else _OF_CUSTOM
        for name, value in tool.items():
            if name not in known_fields and value not in (None, False):
                self.lose(f"{place}.{name}")
        translated = {
            name: value for name, value in tool.items() if name in known_fields - {"type"} and value is not None
        }
        if kind == "custom" and (text_format := fields(translated.get("format"))).get("type") == "grammar":
            grammar = {name: value for name, value in text_format.items() if name != "type"}
            translated["format"] = {"type": "grammar", "grammar": grammar}
        return {"type": kind, kind: translated}

    def messages(self, body: Body) -> list[dict[str, JsonValue]]:
        conversation = _Conversation()
        instructions = body.get("instructions")
        if isinstance(instructions, list):
            self._items(instructions, "instructions", conversation)
        elif not isinstance(instructions, str | None):
            raise InvalidBodyError(FieldError("instructions", "must be a string"))
        elif instructions:
            conversation.say("system", instructions)
        request_input = body.get("input")
        if isinstance(request_input, str):
            conversation.say("user", request_input)
        elif isinstance(request_input, list):
            self._items(request_input, "input", conversation)
        elif request_input is not None or body.get("prompt") is None:
            problem = "is required" if request_input is None else "must be a string or a list of items"
            raise InvalidBodyError(FieldError("input", problem))
        conversation.end_results()
        return conversation.messages

    def _items(self, items: Iterable[Any], name: str, conversation: _Conversation) -> None:
        for number, value in enumerate(items):
            place = f"{name}[{number}]"
            item = _object(value, place)
            if item.get("tools") and item.get("type") != "mcp_list_tools":
                for index, tool in enumerate(objects(item["tools"])):
                    self.unpriced += _tools_run_by_provider(tool, f"{place}.tools[{index}]")
            match item.get("type", "message"):
                case "message":
                    role = item.get("role")
                    if role not in ("user", "system", "developer", "assistant"):
                        self.lose(f"{place}.role", "must be user, system, developer or assistant")
                        continue
                    content = self._content(item.get("content"), f"{place}.content")
                    conversation.say("system" if role == "developer" else str(role), content)
                case "function_call":
                    if item.get("namespace") is not None:
                        self.lose(f"{place}.namespace")
                    arguments = arguments_text(item.get("arguments"))
                    self._call(item, place, "function", "arguments", arguments, conversation)
                case "custom_tool_call":
                    self._call(item, place, "custom", "input", item.get("input"), conversation)
                case "function_call_output" | "custom_tool_call_output":
                    output = self._content(item.get("output"), f"{place}.output")
                    conversation.results(self._require_text(item, place, "call_id"), output)
                case "reasoning":
                    if (state := open_token(item.get("encrypted_content"))) is not None:
                        conversation.recall(state)
                case kind:
                    self.lose(f"{place}.type", f"{kind!r} {_NOT_IN_CHAT}")
                    if not isinstance(kind, str) or kind not in _ITEMS:
                        self.unpriced.append(FieldError(f"{place}.type", f"{kind!r} {_UNKNOWN}"))

    def _call(
        self, item: Mapping[str, Any], place: str, kind: str, name: str, arguments: Any, conversation: _Conversation
    ) -> None:
        function = {"name": self._require_text(item, place, "name"), name: arguments}
        conversation.calls({"id": self._require_text(item, place, "call_id"), "type": kind, kind: function})

    def _require_text(self, item: Mapping[str, Any], place: str, name: str) -> Any:
        if not isinstance(item.get(name), str):
            self.lose(f"{place}.{name}", "is required")
        return item.get(name)

    def _content(self, content: Any, place: str) -> Any:
        """Returns a text or a list of a chat's parts. A single text is never a list, as more servers take a text."""
        if content is None or isinstance(content, str):
            return content or ""
        if not isinstance(content, list):
            raise InvalidBodyError(FieldError(place, "must be a string or a list of parts"))
        parts = list[dict[str, Any]]()
        for number, item in enumerate(cast(list[Any], content)):
            at = f"{place}[{number}]"
            part = self._part(_object(item, at), at)
            if part is not None:
                parts.append(part)
        return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts

    def _part(self, part: Mapping[str, Any], place: str) -> dict[str, Any] | None:
        match part:
            case {"type": "input_text" | "output_text" | "text", "text": text}:
                return {"type": "text", "text": text}
            case {"type": "refusal", "refusal": text}:
                return {"type": "refusal", "refusal": text}
            case {"type": "input_image", "image_url": str() as url}:
                detail = part.get("detail")
                return {"type": "image_url", "image_url": {"url": url, **({"detail": detail} if detail else {})}}
            case {"type": "input_file", "file_data": str()} | {"type": "input_file", "file_id": str()}:
                file_fields = ("file_data", "file_id", "filename")
                return {
                    "type": "file",
                    "file": {name: part[name] for name in file_fields if part.get(name) is not None},
                }
            case {"type": "input_audio", "input_audio": sound}:
                return {"type": "input_audio", "input_audio": sound}
            case {"type": "input_image" | "input_file" | "input_audio"}:
                reference = next((name for name in ("file_url", "file_id") if part.get(name) is not None), "type")
                self.lose(f"{place}.{reference}")
            case _:
                kind = part.get("type")
                self.lose(f"{place}.type", f"{kind!r} {_NOT_IN_CHAT}")
                if not isinstance(kind, str) or kind not in _PARTS:
                    self.unpriced.append(FieldError(f"{place}.type", f"{kind!r} {_UNKNOWN}"))
        return None


@dataclass(slots=True)
class _Conversation:
    """Builds the messages of a chat. All items of one turn of the assistant become one message, as a chat demands."""

    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    _files: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Files of the latest results. A chat allows them only in a message of the user, which must follow all results."""
    _recalled: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """States of the turn that is about to begin."""

    def recall(self, state: dict[str, Any]) -> None:
        """Takes the state that the author of a turn needs back. It belongs to the current turn, or to the next one."""
        turn = self.messages[-1] if self.messages else {}
        if state["calls"]:  # their turn may be over, as they may have results by now
            turns = (message for message in reversed(self.messages) if _call_ids(message) & state["calls"].keys())
            turn = next(turns, turn)
        if turn.get("role") == "assistant":
            turn.setdefault(STATE, []).append(state)
        else:
            self._recalled.append(state)

    def _begin(self, role: str, content: Any) -> None:
        states = self._recalled
        self._recalled = []
        more = {STATE: states} if states and role == "assistant" else {}
        self.messages.append({"role": role, "content": content, **more})

    def say(self, role: str, content: Any) -> None:
        self.end_results()
        if content == []:
            return
        last = self.messages[-1] if self.messages else {}
        if role != "assistant" or not last.get("tool_calls"):
            self._begin(role, content)
        else:
            # No message may stand between calls and their results, so the text joins the message of the calls.
            before = _parts(last.get("content"))
            more = _parts(content)
            last["content"] = [*before, *more] if before else content

    def calls(self, call: dict[str, Any]) -> None:
        self.end_results()
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self._begin("assistant", None)
        self.messages[-1].setdefault("tool_calls", []).append(call)

    def results(self, tool_call_id: Any, content: Any) -> None:
        if isinstance(content, list):
            parts = objects(cast(Any, content))
            texts = [part for part in parts if part.get("type") == "text"]
            for part in parts:
                if part.get("type") != "text":
                    self._files += [{"type": "text", "text": f"A file in the result of {tool_call_id}:"}, part]
            content = texts[0]["text"] if len(texts) == 1 else texts or ""
        self.messages.append({"role": "tool", "tool_call_id": tool_call_id, "content": content})

    def end_results(self) -> None:
        if self._files:
            self.messages.append({"role": "user", "content": self._files})
            self._files = []


def _call_ids(message: Mapping[str, Any]) -> set[str]:
    return {str(call.get("id")) for call in objects(message.get("tool_calls") or ())}


def _parts(content: Any) -> list[Any]:
    if isinstance(content, list):
        return cast(list[Any], content)
    return [{"type": "text", "text": content}] if content else []


def _key(tool: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the type and the name of a tool."""
    return str(tool.get("type") or ""), str(tool.get("name") or "")


def _object(value: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InvalidBodyError(FieldError(place, "must be an object"))
    return cast(dict[str, Any], value)


def _optional_object(body: Body, name: str) -> Mapping[str, Any]:
    return {} if (value := body.get(name)) is None else _object(value, name)


def _list(body: Body, name: str) -> Sequence[Any]:
    value = body.get(name)
    if value is not None and not isinstance(value, list):
        raise InvalidBodyError(FieldError(name, "must be a list"))
    return value or ()


def native_body(body: Body, *, params: Body, max_tokens: int, system_prompt: str | None) -> Mapping[str, JsonValue]:
    """Returns the body for a provider that speaks Responses.

    Reasoning that the plane has made from another dialect's answer is left out, as no provider knows it. Ids of calls
    become ids that OpenAI accepts.

    Args:
        body: the body as the client wrote it.
        params: the agent's params, with a chat's names, for fields that the body lacks.
        max_tokens: the limit of output tokens.
        system_prompt: the agent's system prompt, for a body without one.
    """
    native: dict[str, Any] = {**body, "max_output_tokens": max_tokens}
    request_input = body.get("input")
    if isinstance(request_input, list):
        native["input"] = [_with_short_id(item) for item in request_input if not _is_own_reasoning(item)]
    has_instructions = body.get("instructions") or any(
        item.get("role") in ("system", "developer") for item in objects(request_input or [])
    )
    if system_prompt is not None and not has_instructions:
        native["instructions"] = system_prompt
    for name, value in params.items():
        match name:
            case "max_tokens" | "max_completion_tokens":
                pass
            case "reasoning_effort":
                native["reasoning"] = {"effort": value, **fields(native.get("reasoning"))}
            case "verbosity":
                native["text"] = {"verbosity": value, **fields(native.get("text"))}
            case "response_format":
                native["text"] = {"format": text_format(fields(value)), **fields(native.get("text"))}
            case "tools":
                native.setdefault("tools", [_flat(portable_tool(tool)) for tool in objects(value)])
            case "tool_choice":
                native.setdefault("tool_choice", _flat(value) if isinstance(value, dict) else value)
            case _:
                if native.get(name) is None:
                    native[name] = value
    return native


def size_of(body: Body) -> InputSize:
    """Returns the size of everything that a valid body sends to a provider that speaks Responses."""
    size = size_of_params({name: value for name, value in body.items() if name not in ("input", "instructions")})
    for conversation in (body.get("instructions"), body.get("input")):
        size += size_of_messages(cast(list[Any], conversation if isinstance(conversation, list) else [conversation]))
    return size


def _with_short_id(item: JsonValue) -> JsonValue:
    call_id = fields(item).get("call_id")
    if not isinstance(call_id, str) or call_id == (shorter_id := short_id(call_id)):
        return item
    return {**fields(item), "call_id": shorter_id}


def repaired_body(body: Body, repairs: Collection[StateRepair]) -> Mapping[str, JsonValue]:
    """Returns a body without any reasoning, for a provider of Responses that has refused the reasoning in it.

    The ids of items are left out, too: a provider that knows an item by its id demands the reasoning next to it.
    """
    if "foreign" not in repairs or not isinstance(items := body.get("input"), list):
        return body
    items = [item for item in items if fields(item).get("type") != "reasoning"]
    return {**body, "input": [_without_id(item) for item in items]}


def _without_id(item: JsonValue) -> JsonValue:
    if fields(item).get("type", "message") not in ("message", "function_call", "custom_tool_call"):
        return item
    return {name: value for name, value in fields(item).items() if name != "id"} if isinstance(item, dict) else item


def text_format(response_format: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a chat's `response_format` as `text.format`."""
    return _flat(response_format)


def _flat(holder: Mapping[str, Any]) -> dict[str, Any]:
    """Flattens a tool, a tool choice or a format of a chat, whose fields are one level deeper there."""
    inner = fields(holder.get(str(holder.get("type"))))
    return {"type": holder.get("type"), **inner} if inner else dict(holder)


def input_of(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns a chat's messages as items."""
    items = list[dict[str, Any]]()
    for message in messages:
        role = message.get("role")
        content = message.get("content")
        if role == "tool":
            output_item = {"type": "function_call_output", "call_id": message.get("tool_call_id")}
            items.append(
                {**output_item, "output": content if isinstance(content, str) else _items_of_parts(content, "input")}
            )
            continue
        if content:
            kind = "output" if role == "assistant" else "input"
            item_content = content if isinstance(content, str) else _items_of_parts(content, kind)
            items.append({"type": "message", "role": role, "content": item_content})
        for call in objects(message.get("tool_calls") or []):
            kind = "function" if call.get("custom") is None else "custom"
            item_type = "custom_tool_call" if kind == "custom" else "function_call"
            items.append({"type": item_type, "call_id": call.get("id"), **fields(call.get(kind))})
    return items


def _items_of_parts(parts: Any, kind: str) -> list[dict[str, Any]]:
    return [_item_of_part(part, kind) for part in objects(parts or [])]


def _item_of_part(part: Mapping[str, Any], kind: str) -> dict[str, Any]:
    match part:
        case {"type": "text", "text": text}:
            return {"type": f"{kind}_text", "text": text}
        case {"type": "image_url", "image_url": image}:
            image_fields = fields(image) or {"url": image}
            return {
                "type": "input_image",
                "image_url": image_fields.get("url"),
                "detail": image_fields.get("detail") or "auto",
            }
        case {"type": "file", "file": file}:
            return {"type": "input_file", **fields(file)}
        case _:
            return dict(part)


def _is_own_reasoning(item: Any) -> bool:
    item_fields = fields(item)
    if item_fields.get("type") != "reasoning":
        return False
    encrypted = item_fields.get("encrypted_content")
    return is_token(encrypted) or (not encrypted and str(item_fields.get("id")).startswith(f"rs_{OWN_ITEM}"))
