"""Anthropic's Messages: requests as conversations in OpenAI's chat format, and results as messages.

A provider that speaks Messages gets the body as it is (`native_body`). Any other gets the chat form, translated by
`for_chat`. What both leave out on purpose is in `DROPPED`; everything else that a chat can't express is a loss.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import orjson
from pydantic import JsonValue
from pydantic_core import from_json

from breakwater.dialects.rules.chat_completions import completion_of, first_choice
from breakwater.dialects.rules.forms import EMPTY, Body, ChatForm, InvalidBodyError
from breakwater.dialects.rules.params import is_run_by_client
from breakwater.dialects.rules.provider_state import (
    AUTHOR,
    STATE,
    UNSIGNED,
    StateRepair,
    is_token,
    lacks_thinking,
    open_token,
    original_id,
    plain_id,
    state_of_calls,
    token_of,
)
from breakwater.dialects.rules.tool_schemas import anthropic_tool
from breakwater.jobs.rules.chat_messages import (
    ORDER,
    THOUGHT,
    arguments_text,
    call_id,
    fields,
    finish_reason,
    generated_call_id,
    is_end,
    objects,
    thoughts_in,
)
from breakwater.kernel.formats import words
from breakwater.kernel.surrogates import whole_escapes
from breakwater.kernel.validation import FieldError
from breakwater.prices.rules.price import InputSize, size_of_messages, size_of_params
from breakwater.prices.rules.usage import ESTIMATED, figure, is_estimated, of_completion

Block = dict[str, Any]

DROPPED: Mapping[str, str] = {
    "cache_control": "it sets what is cached; providers of chat completions cache by themselves",
    "thinking": "a model of another provider thinks as it does by default, except of Gemini's own API",
    "thinking blocks": "only the model that wrote them gets them back, in the words of its API",
    "context_management": "`clear_thinking_…` only: there are no thinking blocks to clear",
    "metadata": "it names the user for the provider's own abuse detection",
    "service_tier": "`auto` and `standard_only`: a chat has the standard tier",
    "speed": "`standard` only",
    "is_error": "the text of a tool's result says that it is an error",
    "citations": "of earlier answers; what they cite is in the conversation",
    "caller": "`direct` only: the model itself has called the tool",
    "defer_loading": "the tool is offered from the start",
    "eager_input_streaming": "it sets how a tool's input is streamed",
    "output_config of a message": "the effort of the request holds",
}
"""Fields of a request that its chat form leaves out, and why it means the same without them."""

_UNPRICED = "may cost more than tokens"
_KNOWN = words(
    """
    cache_control context_management max_tokens messages metadata output_config output_format service_tier speed
    stop_sequences system temperature thinking tool_choice tools top_k top_p
    """
)
_SAME = ("max_tokens", "temperature", "top_p", "top_k", "thinking")
"""Fields that a chat has under the same name. `thinking` is for estimates and Gemini: `for_chat` drops it."""
_NAMES: Mapping[str, str] = {
    "max_completion_tokens": "max_tokens",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
}
"""The body's names for params of a chat."""
_OF_AGENT = words(
    "context_management metadata output_config stop_sequences temperature thinking tool_choice tools top_k top_p"
)
"""Params of an agent that Anthropic has under the same name."""
_TOOL = words(
    """
    allowed_callers cache_control defer_loading description eager_input_streaming input_schema name strict type
    """
)
_OF_TOKENS = words("compaction document image mcp_tool_use search_result server_tool_use text tool_reference")
"""Types of blocks that cost nothing but tokens, like results of tools."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}

_TYPES: Mapping[str, tuple[Any, str]] = {
    **dict.fromkeys(
        words("context_management metadata output_config output_format thinking tool_choice"),
        (dict, "must be an object"),
    ),
    **dict.fromkeys(("stop_sequences", "tools"), (list, "must be a list")),
    **dict.fromkeys(("service_tier", "speed"), (str, "must be a string")),
    "system": ((str, list), "must be a text or a list of blocks"),
}
"""Types of fields whose content is read here, and what an error says of another type."""


# Requests


def dropped_fields(body: Body) -> set[str]:
    """Returns the fields of a body that its chat form leaves out, except those of messages and tools."""
    dropped = {
        name for name in _KNOWN & DROPPED.keys() if body.get(name) not in (None, "auto", "standard_only", "standard")
    }
    return dropped - {"thinking"} if fields(body.get("thinking")).get("type") == "disabled" else dropped


def chat_form(body: Body) -> ChatForm:
    """Returns the body as a chat. Raises InvalidBodyError."""
    turns = body.get("messages")
    if not isinstance(turns, list) or not turns:
        raise InvalidBodyError(FieldError("messages", "must be a list of at least one message"))
    if body.get("thread") is not None:
        problem = (
            "a conversation that Anthropic keeps can't be retried, limited or recorded: send all of it, without this"
        )
        raise InvalidBodyError(FieldError("thread", problem))
    for name, (kinds, requirement) in _TYPES.items():
        if body.get(name) is not None and not isinstance(body[name], kinds):
            raise InvalidBodyError(FieldError(name, requirement))
    form = _Form()
    form.take_system(body.get("system"), "system")
    for index, message in enumerate(turns):
        form.take_message(message, f"messages[{index}]")
    if fields(turns[-1]).get("role") == "assistant":
        form.lose(f"messages[{len(turns) - 1}]", "the beginning of an answer can't be continued in chat completions")
    form.take_params(body)
    if not form.messages and not form.losses:
        form.lose("messages", EMPTY)
    return ChatForm(form.messages, form.params, tuple(form.losses), tuple(form.unpriced), _NAMES)


class _Form:
    """Builds a chat form."""

    def __init__(self) -> None:
        self.messages: list[dict[str, JsonValue]] = []
        self.params: dict[str, JsonValue] = {}
        self.losses: list[FieldError] = []
        self.unpriced: list[FieldError] = []

    def lose(self, path: str, message: str) -> None:
        self.losses.append(FieldError(path, message))

    def _lose_priced(self, path: str, message: str) -> None:
        self.lose(path, message)
        self.unpriced.append(FieldError(path, _UNPRICED))

    # Messages

    def take_system(self, content: Any, at: str) -> None:
        parts = [part for block, place in _blocks(content, at) for part in self._parts(block, place)]
        if parts:
            self.messages.append({"role": "system", **_content(parts)})

    def take_message(self, value: Any, at: str) -> None:
        message = fields(value)
        content = message.get("content")
        place = f"{at}.content"
        if content is not None and not isinstance(content, str | list):
            raise InvalidBodyError(FieldError(place, "must be a text or a list of blocks"))
        match message.get("role"):
            case "user":
                self._take_user(content, place)
            case "assistant":
                self._take_assistant(content, place)
            case "system":
                self.take_system(content, place)
            case str() as role:
                self.lose(f"{at}.role", f"{role!r} has no counterpart in chat completions")
                self._take_user(content, place)
            case _:
                raise InvalidBodyError(FieldError(f"{at}.role", "must be 'user' or 'assistant'"))

    def _take_user(self, content: Any, at: str) -> None:
        results = list[dict[str, JsonValue]]()
        parts = list[Block]()
        for block, place in _blocks(content, at):
            if block.get("type") == "tool_result":
                message, files = self._result(block, place)
                results.append(message)
                parts += files
            else:
                parts += self._parts(block, place)
        self.messages += results
        if parts:
            self.messages.append({"role": "user", **_content(parts)})

    def _result(self, block: Block, at: str) -> tuple[dict[str, JsonValue], list[Block]]:
        """Returns the message of a tool's result, and its files, which a chat allows only in messages of the user."""
        texts = list[Block]()
        files = list[Block]()
        tool_call_id = _original_id(block.get("tool_use_id"))
        for part, place in _blocks(block.get("content"), f"{at}.content"):
            for chat_part in self._parts(part, place):
                if chat_part.get("type") in ("image_url", "file"):
                    files += [{"type": "text", "text": f"A file in the result of {tool_call_id}:"}, chat_part]
                else:
                    texts.append(chat_part)
        marks = {name: block[name] for name in ("is_error", "cache_control") if block.get(name)}
        return {"role": "tool", "tool_call_id": tool_call_id, **({"content": ""} | _content(texts)), **marks}, files

    def _take_assistant(self, content: Any, at: str) -> None:
        parts = list[Block]()
        thinking = list[Block]()
        calls = list[Block]()
        states = list[Block]()
        mark: Any = None
        for block, place in _blocks(content, at):
            mark = block.get("cache_control", mark)
            match block.get("type"):
                case "thinking" | "redacted_thinking":
                    if not is_token(token := _token_in(block)):
                        thinking.append(block)
                    elif (state := open_token(token, block.get("thinking"))) is not None:
                        states.append(state)
                case "tool_use":
                    if fields(block.get("caller")).get("type", "direct") != "direct":
                        self.lose(
                            f"{place}.caller", "a tool that was not called by the model itself has no counterpart"
                        )
                    function = {"name": block.get("name"), "arguments": arguments_text(block.get("input") or {})}
                    calls.append({"id": _original_id(block.get("id")), "type": "function", "function": function})
                case _:
                    parts += self._parts(block, place)
        texts = [part.get("text") for part in parts]
        only_text = all(part.get("type") == "text" for part in parts)
        chat_content: Any = ("".join(map(str, texts)) or None) if only_text else parts
        optional_fields = (
            ("thinking_blocks", thinking),
            ("tool_calls", calls),
            ("cache_control", mark),
            (STATE, states),
        )
        extra: dict[str, Any] = {name: value for name, value in optional_fields if value}
        if extra.keys() - {STATE} or chat_content:
            self.messages.append({"role": "assistant", "content": chat_content, **extra})

    def _parts(self, block: Block, at: str) -> list[Block]:
        """Returns the parts of a chat for a block. A block without a counterpart stays as it is, and is a loss."""
        kind = block.get("type")
        mark = {name: block[name] for name in ("cache_control",) if block.get(name)}
        match kind:
            case "text" if isinstance(text := block.get("text"), str):
                return [{"type": "text", "text": text, **mark}] if text else []
            case "image" if (url := _url(block.get("source"))) is not None:
                return [{"type": "image_url", "image_url": {"url": url}, **mark}]
            case "document":
                return self._document(block, at, mark)
            case _:
                of_tokens = str(kind) in _OF_TOKENS or str(kind).endswith("_tool_result")
                message = f"a block of type {kind!r} has no counterpart in chat completions"
                (self.lose if of_tokens else self._lose_priced)(at, message)
                return [block]

    def _document(self, block: Block, at: str, mark: Block) -> list[Block]:
        source = fields(block.get("source"))
        title = block.get("title")
        if fields(block.get("citations")).get("enabled"):
            self.lose(f"{at}.citations", "citations have no counterpart in chat completions")
        heading = [{"type": "text", "text": text} for name in ("title", "context") if (text := block.get(name))]
        match source.get("type"):
            case "text":
                return [*heading, {"type": "text", "text": str(source.get("data")), **mark}]
            case "content":
                inner = [part for inner_block, place in _blocks(source.get("content"), f"{at}.source.content")
                         for part in self._parts(inner_block, place)]  # fmt: skip
                return [*heading, *inner]
            case "base64":
                file = {"filename": str(title or "document.pdf"), "file_data": _url(source)}
                return [*heading, {"type": "file", "file": file, **mark}]
            case kind:
                self.lose(f"{at}.source.type", f"a document from a {kind!r} has no counterpart in chat completions")
                return [block]

    # Params

    def take_params(self, body: Body) -> None:
        params = self.params
        params |= {name: body[name] for name in _SAME if body.get(name) is not None}
        if body.get("stop_sequences"):
            params["stop"] = body["stop_sequences"]
        if body.get("service_tier") not in (None, "auto", "standard_only"):
            params["service_tier"] = body["service_tier"]
        if body.get("speed") not in (None, "standard"):
            self._lose_priced("speed", "has no counterpart in chat completions")
        self._take_tools(body)
        self._take_output(body)
        for index, edit in enumerate(objects(fields(body.get("context_management")).get("edits"))):
            kind = str(edit.get("type"))
            if not _is_of_thinking(edit):
                lose = self.lose if kind.startswith("clear_") else self._lose_priced
                lose(f"context_management.edits[{index}]", "a chat is sent whole")
        for name, value in body.items():
            if name not in _KNOWN and value not in (None, [], {}):
                self._lose_priced(name, "has no counterpart in chat completions")

    def _take_tools(self, body: Body) -> None:
        tools = [self._tool(tool, place) for tool, place in _blocks(body.get("tools"), "tools")]
        if functions := [tool for tool in tools if tool is not None]:
            self.params["tools"] = cast(JsonValue, functions)
        choice = fields(body.get("tool_choice"))
        match choice.get("type"):
            case None:
                pass
            case "tool":
                self.params["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
            case str() as kind if kind in _CHOICES:
                self.params["tool_choice"] = _CHOICES[kind]
            case _:
                self.lose("tool_choice.type", "has no counterpart in chat completions")
        if choice.get("disable_parallel_tool_use") and functions:
            self.params["parallel_tool_calls"] = False

    def _tool(self, tool: Block, at: str) -> dict[str, JsonValue] | None:
        kind = tool.get("type")
        if kind not in (None, "custom"):
            message = f"{kind!r} has no counterpart in chat completions; offer a tool with an `input_schema`"
            (self.lose if is_run_by_client(kind) else self._lose_priced)(f"{at}.type", message)
            return None
        for name in sorted(tool.keys() - _TOOL):
            # The chat form lacks this field, so an estimate of the cost would lack it, too.
            self._lose_priced(f"{at}.{name}", "has no counterpart in chat completions")
        if tool.get("allowed_callers") not in (None, ["direct"]):
            self._lose_priced(f"{at}.allowed_callers", "has no counterpart in chat completions")
        function = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
        schema = {"parameters": tool["input_schema"]} if tool.get("input_schema") is not None else {}
        mark = {"cache_control": tool["cache_control"]} if tool.get("cache_control") else {}
        return {"type": "function", "function": {**function, **schema}, **mark}

    def _take_output(self, body: Body) -> None:
        config = fields(body.get("output_config"))
        if config.get("effort") is not None:
            self.params["reasoning_effort"] = config["effort"]
        shape = fields(config.get("format") or body.get("output_format"))
        if shape.get("type") == "json_schema":
            schema = {"name": "answer", "schema": shape.get("schema"), "strict": True}
            self.params["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif shape:
            self.lose("output_config.format.type", "has no counterpart in chat completions")
        for name in sorted(config.keys() - {"effort", "format"}):
            self.lose(f"output_config.{name}", "has no counterpart in chat completions")


def _blocks(content: Any, at: str) -> Iterator[tuple[Block, str]]:
    """Yields the blocks of a content, each with its path. Raises InvalidBodyError."""
    if isinstance(content, str):
        yield {"type": "text", "text": content}, at
        return
    for index, block in enumerate(cast(list[Any], content) if isinstance(content, list) else ()):
        if not isinstance(block, dict):
            raise InvalidBodyError(FieldError(f"{at}[{index}]", "must be an object with a `type`"))
        yield cast(Block, block), f"{at}[{index}]"


def _content(parts: list[Block]) -> dict[str, JsonValue]:
    """Returns the content of a message, with the fields of its only text if it has one part; empty without parts."""
    if len(parts) == 1 and parts[0].get("type") == "text":
        return {("content" if name == "text" else name): value for name, value in parts[0].items() if name != "type"}
    return {"content": cast(JsonValue, parts)} if parts else {}


def _original_id(tool_use_id: Any) -> Any:
    return original_id(tool_use_id) if isinstance(tool_use_id, str) else tool_use_id


def _token_in(block: Block) -> Any:
    """Returns the field of a thinking block that may contain a token."""
    return block.get("signature") if block.get("type") == "thinking" else block.get("data")


def _url(source: Any) -> str | None:
    source_fields = fields(source)
    if source_fields.get("type") == "base64":
        return f"data:{source_fields.get('media_type')};base64,{source_fields.get('data')}"
    return url if source_fields.get("type") == "url" and isinstance(url := source_fields.get("url"), str) else None


def for_chat(
    messages: Sequence[Mapping[str, JsonValue]], params: Mapping[str, JsonValue]
) -> tuple[list[dict[str, JsonValue]], dict[str, JsonValue]]:
    """Returns a chat form without the fields that only Anthropic knows, for a provider of chat completions.

    Args:
        messages: the messages of the chat form, perhaps repaired.
        params: its params, with those of the agent.
    """
    chat_params = {name: value for name, value in params.items() if name != "thinking"}
    if isinstance(tools := chat_params.get("tools"), list):
        chat_params["tools"] = [_without_mark(tool) for tool in objects(tools)]
    chat_messages: list[dict[str, JsonValue]] = []
    for message in messages:
        chat_message = {name: value for name, value in message.items() if name not in _OWN}
        if isinstance(content := chat_message.get("content"), list):
            chat_message["content"] = [_without_mark(part) for part in objects(content)]
        if chat_message.get("content") is not None or chat_message.get("tool_calls"):
            chat_messages.append(chat_message)
    return chat_messages, chat_params


_OWN = frozenset({"cache_control", "is_error", "thinking_blocks"})
"""Fields of a chat form's messages that only Anthropic knows."""


def _without_mark(part: Block) -> JsonValue:
    return {name: value for name, value in part.items() if name != "cache_control"}


def native_body(body: Body, *, params: Body, max_tokens: int, system_prompt: str | None) -> Mapping[str, JsonValue]:
    """Returns the body for a provider that speaks Messages, without its model.

    Thinking that Anthropic has not signed is left out, and ids of tool calls become ids that Anthropic accepts.

    Args:
        body: the body as the client wrote it.
        params: the agent's params, for those that the body lacks.
        max_tokens: the limit of output tokens; the body's own limit applies if it is lower.
        system_prompt: the agent's system prompt, for a body without one.
    """
    agent_fields = {name: value for name, value in params.items() if name in _OF_AGENT}
    if (stop := params.get("stop")) is not None:
        agent_fields.setdefault("stop_sequences", [stop] if isinstance(stop, str) else stop)
    if (effort := params.get("reasoning_effort")) is not None:
        agent_fields.setdefault("output_config", {"effort": effort})
    if isinstance(tools := agent_fields.get("tools"), list):
        agent_fields["tools"] = [anthropic_tool(tool) for tool in objects(tools)]
    if system_prompt is not None:
        agent_fields["system"] = system_prompt
    asked_tokens = figure(body.get("max_tokens"))
    turns = _with_own_thinking(body.get("messages"))
    token_limit = max_tokens if asked_tokens is None else min(asked_tokens, max_tokens)
    native = {**agent_fields, **body, "max_tokens": token_limit, "messages": turns}
    # If only Anthropic has written this conversation, the client itself decides about `thinking`.
    is_own = "thinking" in body and turns is body.get("messages")
    return native if is_own else without_lone_thinking(native)


def size_of(body: Body) -> InputSize:
    """Returns the size of everything that a valid body sends to a provider that speaks Messages."""
    system = body.get("system")
    messages = cast(list[Any], body["messages"])
    params = {name: value for name, value in body.items() if name not in ("system", "messages")}
    return size_of_messages([system]) + size_of_messages(messages) + size_of_params(params)


def _with_own_thinking(messages: JsonValue) -> JsonValue:
    """Returns messages without the thinking of other providers' models, and with ids that Anthropic accepts.

    The same object is returned if nothing has changed.
    """
    turns: list[JsonValue] = []
    changed = False
    for message in cast(list[Any], messages) if isinstance(messages, list) else ():
        content = fields(message).get("content")
        if not isinstance(content, list):
            turns.append(message)
            continue
        blocks = [_plain(block) for block in cast(list[Any], content) if not _is_of_plane(block)]
        if len(blocks) == len(cast(list[Any], content)) and all(map(operator.is_, blocks, cast(list[Any], content))):
            turns.append(message)
            continue
        changed = True
        if blocks:
            turns.append({**message, "content": blocks})
    return turns if changed else messages


def _is_of_plane(block: Any) -> bool:
    kind = fields(block).get("type")
    return kind in _THINKING and is_token(_token_in(cast(Block, block)))


def _plain(block: Any) -> Any:
    """Returns a block whose tool use has an id that Anthropic accepts; the same object if nothing has changed."""
    name = _IDS.get(str(fields(block).get("type")))
    tool_use_id = None if name is None else block.get(name)
    return (
        {**block, name: plain_id(tool_use_id)}
        if isinstance(tool_use_id, str) and plain_id(tool_use_id) != tool_use_id
        else block
    )


_THINKING = ("thinking", "redacted_thinking")
_IDS: Mapping[str, str] = {"tool_use": "id", "tool_result": "tool_use_id"}


def repaired_body(body: Body, repairs: Collection[StateRepair]) -> Mapping[str, JsonValue]:
    """Returns a body without any thinking, for a provider of Messages that has refused the thinking in it."""
    if "foreign" not in repairs or not isinstance(turns := body.get("messages"), list):
        return body
    plain: list[JsonValue] = []
    for turn in turns:
        content = fields(turn).get("content")
        if isinstance(content, list):
            blocks = [block for block in content if fields(block).get("type") not in _THINKING]
            plain += [{**fields(turn), "content": blocks}] if blocks else []
        else:
            plain.append(turn)
    return without_lone_thinking({**body, "messages": plain})


def without_lone_thinking(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a body for Anthropic, without `thinking` if a turn of tools in it has begun without thinking."""
    enabled = fields(body.get("thinking")).get("type") == "enabled"
    return without_thinking(body) if enabled and lacks_thinking(objects(body.get("messages"))) else body


def without_thinking(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a body for Anthropic without `thinking` and the settings that need it."""
    plain = {name: value for name, value in body.items() if name != "thinking"}
    management = fields(plain.pop("context_management", None))
    edits = [edit for edit in objects(management.get("edits") or ()) if not _is_of_thinking(edit)]
    return plain | ({"context_management": {**management, "edits": edits}} if edits else {})


def _is_of_thinking(edit: Block) -> bool:
    return str(edit.get("type")).startswith("clear_thinking_")


# Answers

ARGUMENTS = "partial_json"
"""The field of a block in which a stored answer has the input of a tool as the model wrote it."""

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_KNOWN_STOPS = words(
    "end_turn max_tokens stop_sequence tool_use pause_turn refusal model_context_window_exceeded compaction"
)
_WITH_INPUT = ("tool_use", "server_tool_use", "mcp_tool_use")


def message_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the message of a job that succeeded, which Anthropic's SDKs can read whatever the provider sent.

    Args:
        result: a `Result`, as JSON.
    """
    message = unparsed_message_of(result)
    return {**message, "content": [_with_parsed_input(with_fields(block)) for block in message["content"]]}


_FIELDS: Mapping[str, Block] = {
    "text": {"citations": None},
    **{kind: {"caller": {"type": "direct"}} for kind in ("tool_use", "server_tool_use")},
}
"""Fields of blocks that Anthropic's answers always have."""
_USAGE_FIELDS = dict.fromkeys(
    words(
        "cache_creation cache_creation_input_tokens cache_read_input_tokens inference_geo output_tokens_details "
        "server_tool_use service_tier"
    )
)
"""Fields of a usage that Anthropic's answers always have."""


def with_fields(block: Block) -> Block:
    """Returns a block with all fields that clients may expect."""
    return {**_FIELDS.get(block["type"], {}), **block}


def _with_parsed_input(block: Block) -> Block:
    if ARGUMENTS not in block:
        return block
    block_fields = {name: value for name, value in block.items() if name != ARGUMENTS}
    return {**block_fields, "input": input_of(block[ARGUMENTS])}


def unparsed_message_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the message of a job that succeeded, with the inputs of its tools as texts in `partial_json`."""
    response = fields(result.get("response"))
    seed = str(result["job_id"])
    # Of an answer with an author, a client of another API gets its state in tokens (`provider_state`).
    if isinstance(response.get("content"), list) and "choices" not in response and AUTHOR not in response:
        head = response
        reason = response.get("stop_reason")
        provider_id = response.get("id")
        content = blocks_of(response["content"], seed)
        usage = usage_of(response.get("usage"))
        if not usage:
            usage = _usage(completion_of({**result, "response": None}))
        sequence = response.get("stop_sequence")
    else:
        head = completion_of(result)
        sequence = None
        provider_id = None
        choice = first_choice(head)
        author = response.get(AUTHOR)
        content = _blocks_of_choice(choice, seed, author)
        reason = choice.get("finish_reason")
        usage = _usage(head)
    calls_tool = any(block["type"] == "tool_use" for block in content)
    message_fields = {name: value for name, value in head.items() if name in _OF_MESSAGE and value is not None}
    return {
        **start_of(seed, head.get("model"), provider_id),
        **message_fields,
        "content": content,
        "stop_reason": stop_reason(reason, called=calls_tool),
        "stop_sequence": sequence if isinstance(sequence, str) else None,
        "usage": full_usage(usage),
    }


def full_usage(reported: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a usage with all fields that clients may expect."""
    return {**_USAGE_FIELDS, "input_tokens": 0, "output_tokens": 0, **reported}


_OF_MESSAGE = ("container", "context_management", "stop_details")
"""Further fields of a message."""


def start_of(job_id: str, model: Any, original_id: Any) -> dict[str, Any]:
    """Returns an empty message. It keeps the provider's id, by which the provider may know it later."""
    return {
        "id": original_id if isinstance(original_id, str) and original_id else f"msg_{job_id}",
        "type": "message",
        "role": "assistant",
        "model": model if isinstance(model, str) else "",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
        "usage": full_usage({}),
    }


def stop_reason(reason: Any, *, called: bool) -> str:
    """Returns a `stop_reason` that Anthropic's SDKs know. `called` is True if the answer calls a tool."""
    if isinstance(reason, str) and reason in _KNOWN_STOPS and not (called and reason == "end_turn"):
        return reason
    chat_reason = _STOP_REASONS.get(finish_reason(reason) or "", "end_turn") if is_end(reason) else "end_turn"
    return "tool_use" if called and chat_reason == "end_turn" else chat_reason


def blocks_of(content: Any, seed: str) -> list[Block]:
    """Returns the blocks of an answer in Anthropic's dialect as SDKs can read them, with tools' inputs as texts."""
    ids = set[str]()
    return [block for reported in objects(content) if (block := block_of(reported, ids, seed)) is not None]


def block_of(reported: Block, ids: set[str], seed: str) -> Block | None:
    """Returns a block as SDKs can read it; None for a block without a type.

    Args:
        reported: the block as the provider sent it.
        ids: the ids of the tool uses before it, to which its own is added.
        seed: the id of the execution, see `generated_call_id`.
    """
    kind = reported.get("type")
    if kind not in _WITH_INPUT:
        reported = _without(reported, ARGUMENTS)
    match kind:
        case "text":
            block = {**reported, "text": text if isinstance(text := reported.get("text"), str) else ""}
            return block if isinstance(block.get("citations"), list) else _without(block, "citations")
        case "thinking":
            texts = {name: reported.get(name) for name in ("thinking", "signature")}
            return {**reported, **{name: text if isinstance(text, str) else "" for name, text in texts.items()}}
        case "redacted_thinking":
            return {**reported, "data": str(reported.get("data") or "")}
        case "compaction":
            return {**reported, "content": text if isinstance(text := reported.get("content"), str) else ""}
        case str() if kind in _WITH_INPUT:
            arguments = reported.get(ARGUMENTS) or reported.get("input") or ""
            name = reported.get("name")
            return {
                **_without(reported, "input"),
                "id": _tool_id(call_id(reported.get("id")), ids, seed),
                "name": name if isinstance(name, str) else "",
                ARGUMENTS: readable(arguments_text(arguments)),
            }
        case str() if kind:
            return reported
        case _:
            return None


def _without(block: Block, name: str) -> Block:
    return {key: value for key, value in block.items() if key != name}


def _tool_id(tool_use_id: str | None, ids: set[str], seed: str) -> str:
    """Returns the id of a tool use in the characters that Anthropic accepts in the next request."""
    if tool_use_id is None or tool_use_id in ids:
        tool_use_id = generated_call_id(seed, 0, len(ids))
    ids.add(tool_use_id)
    return plain_id(tool_use_id)


SPOKEN: Mapping[str, str] = {THOUGHT: "thinking", "reasoning": "thinking", "content": "text", "refusal": "text"}
"""The types of blocks, by the fields of a chat's message that become them."""


def signature_of(author: Any, thought_in: str) -> str:
    """Returns the signature of a chat's thinking: a token by which its author gets it back.

    Args:
        author: the author; None if it is unknown.
        thought_in: the field of the chat's message that has the thinking.
    """
    return token_of(author, thought_in=thought_in) if isinstance(author, str) else UNSIGNED


def _blocks_of_choice(choice: Mapping[str, Any], seed: str, author: Any) -> list[Block]:
    """Returns the blocks of a chat's choice in the order in which the model wrote them.

    Before tool uses comes a block with the state that their author needs back.
    """
    message = fields(choice.get("message"))
    blocks = list[Block]()
    signed = list[Block]()
    if author is None:
        signed = blocks_of(message.get("thinking_blocks") or (), seed)
    elif not message.get(THOUGHT):
        message = {**message, THOUGHT: thoughts_in(message.get("thinking_blocks"))}
    thought = THOUGHT if message.get(THOUGHT) else "reasoning"
    order = choice.get(ORDER) or [(name, 0) for name in (thought, "content", "refusal", "tool_calls")]
    for number, (name, start) in enumerate(order):
        end = next((later_start for later_name, later_start in order[number + 1 :] if later_name == name), None)
        if name == "tool_calls":
            if not start and (token := state_of_calls(author, message, plain_id)) is not None:
                blocks.append(state_block(token))
            blocks += map(_tool_use, objects(message.get(name) or ())[start:end])
        elif isinstance(value := message.get(name), str) and (text := value[start:end]):
            kind = SPOKEN[name]
            if signed and kind == "thinking":
                continue
            if blocks and blocks[-1]["type"] == kind:
                blocks[-1][kind] += text
            else:
                signature = {"signature": signature_of(author, name)} if kind == "thinking" else {}
                blocks.append({"type": kind, kind: text, **signature})
    return signed + blocks


def state_block(token: str) -> Block:
    """Returns a block with a token. Clients send it back without reading it."""
    return {"type": "redacted_thinking", "data": token}


def _tool_use(call: Block) -> Block:
    function = fields(call.get("function"))
    tool_use = {"type": "tool_use", "id": plain_id(str(call.get("id"))), "name": str(function.get("name") or "")}
    return {**tool_use, ARGUMENTS: readable(arguments_text(function.get("arguments")))}


def usage_of(reported: Any) -> dict[str, Any]:
    """Returns a usage in Anthropic's dialect with input and output tokens; empty if neither is reported."""
    usage = {name: value for name, value in fields(reported).items() if value is not None}
    tokens = {name: figure(usage.get(name)) for name in ("input_tokens", "output_tokens")}
    return {**usage, **{name: count or 0 for name, count in tokens.items()}} if any(tokens.values()) else {}


def _usage(completion: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the usage of a chat completion as Anthropic has it, which counts cached tokens separately."""
    usage = of_completion(completion)
    if usage is None or usage.input_tokens is None:
        return {}
    cache_counts = {
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": usage.cache_write_tokens,
    }
    known_cache_counts = {name: tokens for name, tokens in cache_counts.items() if tokens is not None}
    return {
        "input_tokens": max(0, usage.input_tokens - sum(known_cache_counts.values())),
        **known_cache_counts,
        "output_tokens": usage.output_tokens or 0,
        **({"output_tokens_details": {"thinking_tokens": thought}} if (thought := usage.reasoning_tokens) else {}),
        **({ESTIMATED: True} if is_estimated(completion) else {}),
    }


# Inputs of tools: SDKs parse them while they are streamed, and fail if they are not JSON


def input_of(arguments: str) -> dict[str, Any]:
    """Parses the input of a tool from a text that `readable` has returned, even if that is cut off."""
    return from_json(arguments, allow_partial=True, allow_inf_nan=False) if arguments.strip(_SPACE) else {}


def readable(arguments: str) -> str:
    """Returns the longest beginning of a tool's arguments that is a JSON object, or the beginning of one."""
    arguments = whole_escapes(arguments)
    if is_readable(arguments):
        return arguments
    low = 0
    high = len(arguments)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_readable(arguments[:middle]) else (low, middle)
    return arguments[:low]


def is_readable(arguments: str) -> bool:
    """Returns True for a JSON object, or the beginning of one."""
    text = arguments.lstrip(_SPACE)
    if not text.startswith("{"):
        return not text
    try:
        from_json(text, allow_inf_nan=False)
    except ValueError as error:
        return "EOF while parsing" in str(error)
    return True


def is_whole(arguments: str) -> bool:
    """Returns True for a complete JSON object."""
    try:
        return isinstance(orjson.loads(whole_escapes(arguments)), dict)
    except orjson.JSONDecodeError:
        return False


_SPACE = " \t\r\n"
