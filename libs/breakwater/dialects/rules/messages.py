"""Anthropic's Messages: requests as conversations in OpenAI's chat format, and results as messages.

A provider that speaks Messages gets the body as it is (`native_body`). Any other gets the chat form in its own words
(`for_chat`): what these two leave out is in `DROPPED`, and all else that a chat can't express is a loss.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import orjson
from pydantic import JsonValue
from pydantic_core import from_json

from breakwater.calls.rules.params import is_run_by_client
from breakwater.dialects.rules.chat_completions import completion_of, first_choice
from breakwater.dialects.rules.forms import EMPTY, Body, ChatForm, InvalidBodyError
from breakwater.dialects.rules.provider_state import (
    AUTHOR,
    STATE,
    UNSIGNED,
    StateRepair,
    is_token,
    lacks_thinking,
    opened,
    own_id,
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
    is_end,
    made_call_id,
    objects,
)
from breakwater.jobs.rules.ownership import shown
from breakwater.kernel.formats import words
from breakwater.kernel.surrogates import whole_escapes
from breakwater.kernel.validation import FieldError
from breakwater.prices.rules.price import InputSize, size_of_messages, size_of_params
from breakwater.prices.rules.usage import ESTIMATED, figure, is_estimated, of_completion

Block = dict[str, Any]

DROPPED: Mapping[str, str] = {
    "cache_control": "it sets what is cached; providers of chat completions cache by themselves",
    "thinking": "a model of another provider thinks as it does by default",
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
"""Fields of a request that a chat does not get, and why it means the same without them."""

_UNPRICED = "may cost more than tokens"
_KNOWN = words(
    """
    cache_control context_management max_tokens messages metadata output_config output_format service_tier speed
    stop_sequences system temperature thinking tool_choice tools top_k top_p
    """
)
_SAME = ("max_tokens", "temperature", "top_p", "top_k", "thinking")
"""Fields that are params of the same name and meaning; `for_chat` drops `thinking`, which estimates need."""
_NAMES: Mapping[str, str] = {
    "max_completion_tokens": "max_tokens",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
}
"""Params of a chat that have another name in the body."""
_OF_AGENT = words(
    "context_management metadata output_config stop_sequences temperature thinking tool_choice tools top_k top_p"
)
"""Params of an agent that Anthropic knows by the same name."""
_TOOL = words(
    """
    allowed_callers cache_control defer_loading description eager_input_streaming input_schema name strict type
    """
)
_OF_TOKENS = words("compaction document image mcp_tool_use search_result server_tool_use text tool_reference")
"""Types of blocks that cost tokens alone, as do results of tools."""
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
"""Types of fields whose content is read here: one of another type would be left out."""


# Requests


def dropped_fields(body: Body) -> set[str]:
    """The fields of a body, but for those of its messages and tools, that a chat does not get."""
    found = {
        name for name in _KNOWN & DROPPED.keys() if body.get(name) not in (None, "auto", "standard_only", "standard")
    }
    return found - {"thinking"} if fields(body.get("thinking")).get("type") == "disabled" else found


def chat_form(body: Body) -> ChatForm:
    """The body as a chat. Raises InvalidBodyError."""
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise InvalidBodyError(FieldError("messages", "must be a list of at least one message"))
    if body.get("thread") is not None:
        wrong = (
            "a conversation that Anthropic keeps can't be retried, limited or recorded: send all of it, without this"
        )
        raise InvalidBodyError(FieldError("thread", wrong))
    for name, (kinds, wanted) in _TYPES.items():
        if body.get(name) is not None and not isinstance(body[name], kinds):
            raise InvalidBodyError(FieldError(name, wanted))
    form = _Form()
    form.take_system(body.get("system"), "system")
    for index, message in enumerate(given):
        form.take_message(message, f"messages[{index}]")
    if fields(given[-1]).get("role") == "assistant":
        form.lose(f"messages[{len(given) - 1}]", "the beginning of an answer can't be continued in chat completions")
    form.take_params(body)
    if not form.messages and not form.losses:
        form.lose("messages", EMPTY)
    return ChatForm(form.messages, form.params, tuple(form.losses), tuple(form.unpriced), _NAMES)


class _Form:
    """A chat form in the making."""

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

    def take_system(self, given: Any, at: str) -> None:
        parts = [part for block, place in _blocks(given, at) for part in self._parts(block, place)]
        if parts:
            self.messages.append({"role": "system", **_content(parts)})

    def take_message(self, given: Any, at: str) -> None:
        message = fields(given)
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
        """The message of a tool's result, and files of it, which a chat has in messages of the user only."""
        texts = list[Block]()
        files = list[Block]()
        called = _own_id(block.get("tool_use_id"))
        for part, place in _blocks(block.get("content"), f"{at}.content"):
            for one in self._parts(part, place):
                if one.get("type") in ("image_url", "file"):
                    files += [{"type": "text", "text": f"A file in the result of {called}:"}, one]
                else:
                    texts.append(one)
        more = {name: block[name] for name in ("is_error", "cache_control") if block.get(name)}
        return {"role": "tool", "tool_call_id": called, **({"content": ""} | _content(texts)), **more}, files

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
                    elif (state := opened(token, block.get("thinking"))) is not None:
                        states.append(state)
                case "tool_use":
                    if fields(block.get("caller")).get("type", "direct") != "direct":
                        self.lose(
                            f"{place}.caller", "a tool that was not called by the model itself has no counterpart"
                        )
                    function = {"name": block.get("name"), "arguments": arguments_text(block.get("input") or {})}
                    calls.append({"id": _own_id(block.get("id")), "type": "function", "function": function})
                case _:
                    parts += self._parts(block, place)
        texts = [part.get("text") for part in parts]
        only_text = all(part.get("type") == "text" for part in parts)
        said: Any = ("".join(map(str, texts)) or None) if only_text else parts
        named = (("thinking_blocks", thinking), ("tool_calls", calls), ("cache_control", mark), (STATE, states))
        more: dict[str, Any] = {name: value for name, value in named if value}
        if more.keys() - {STATE} or said:
            self.messages.append({"role": "assistant", "content": said, **more})

    def _parts(self, block: Block, at: str) -> list[Block]:
        """The parts of a chat that a block is; one that has none is left as it is, and a loss."""
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
        about = [{"type": "text", "text": text} for name in ("title", "context") if (text := block.get(name))]
        match source.get("type"):
            case "text":
                return [*about, {"type": "text", "text": str(source.get("data")), **mark}]
            case "content":
                inner = [part for one, place in _blocks(source.get("content"), f"{at}.source.content")
                         for part in self._parts(one, place)]  # fmt: skip
                return [*about, *inner]
            case "base64":
                file = {"filename": str(title or "document.pdf"), "file_data": _url(source)}
                return [*about, {"type": "file", "file": file, **mark}]
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
            # Not in the chat form, and so not in an estimate.
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
    """The blocks of a content, each with its path. Raises InvalidBodyError."""
    if isinstance(content, str):
        yield {"type": "text", "text": content}, at
        return
    for index, block in enumerate(cast(list[Any], content) if isinstance(content, list) else ()):
        if not isinstance(block, dict):
            raise InvalidBodyError(FieldError(f"{at}[{index}]", "must be an object with a `type`"))
        yield cast(Block, block), f"{at}[{index}]"


def _content(parts: list[Block]) -> dict[str, JsonValue]:
    """The content of a message: a text where it is one. Empty for no parts."""
    if len(parts) == 1 and parts[0].get("type") == "text":
        return {("content" if name == "text" else name): value for name, value in parts[0].items() if name != "type"}
    return {"content": cast(JsonValue, parts)} if parts else {}


def _own_id(tool_use_id: Any) -> Any:
    return own_id(tool_use_id) if isinstance(tool_use_id, str) else tool_use_id


def _token_in(block: Block) -> Any:
    """The field of a block of thinking that names its author."""
    return block.get("signature") if block.get("type") == "thinking" else block.get("data")


def _url(source: Any) -> str | None:
    given = fields(source)
    if given.get("type") == "base64":
        return f"data:{given.get('media_type')};base64,{given.get('data')}"
    return url if given.get("type") == "url" and isinstance(url := given.get("url"), str) else None


def for_chat(
    messages: Sequence[Mapping[str, JsonValue]], params: Mapping[str, JsonValue]
) -> tuple[list[dict[str, JsonValue]], dict[str, JsonValue]]:
    """The conversation and the params of a chat form for a provider of chat completions, as `DROPPED` says.

    Args:
        messages: of the chat form, perhaps repaired.
        params: the same with those of the agent.
    """
    shown = {name: value for name, value in params.items() if name != "thinking"}
    if isinstance(tools := shown.get("tools"), list):
        shown["tools"] = [_unmarked(tool) for tool in objects(tools)]
    sent: list[dict[str, JsonValue]] = []
    for message in messages:
        plain = {name: value for name, value in message.items() if name not in _OWN}
        if isinstance(content := plain.get("content"), list):
            plain["content"] = [_unmarked(part) for part in objects(content)]
        if plain.get("content") is not None or plain.get("tool_calls"):
            sent.append(plain)
    return sent, shown


_OWN = frozenset({"cache_control", "is_error", "thinking_blocks"})
"""Fields of messages in a chat form that only Anthropic knows."""


def _unmarked(part: Block) -> JsonValue:
    return {name: value for name, value in part.items() if name != "cache_control"}


def native_body(body: Body, *, params: Body, max_tokens: int, system_prompt: str | None) -> Mapping[str, JsonValue]:
    """The body for a provider that speaks Messages, without its model.

    Args:
        body: as the client wrote it; thinking that Anthropic has not signed is left out, and ids of tools are such as
            it takes.
        params: of the agent, for those that the body lacks.
        max_tokens: the most output; the body's own limit where that is lower.
        system_prompt: of the agent, for a body without one.
    """
    agents = {name: value for name, value in params.items() if name in _OF_AGENT}
    if (stop := params.get("stop")) is not None:
        agents.setdefault("stop_sequences", [stop] if isinstance(stop, str) else stop)
    if (effort := params.get("reasoning_effort")) is not None:
        agents.setdefault("output_config", {"effort": effort})
    if isinstance(tools := agents.get("tools"), list):
        agents["tools"] = [anthropic_tool(tool) for tool in objects(tools)]
    if system_prompt is not None:
        agents["system"] = system_prompt
    asked_tokens = figure(body.get("max_tokens"))
    turns = _signed(body.get("messages"))
    most = max_tokens if asked_tokens is None else min(asked_tokens, max_tokens)
    native = {**agents, **body, "max_tokens": most, "messages": turns}
    # What a client asks of Anthropic in a conversation with it alone is its own.
    is_own = "thinking" in body and turns is body.get("messages")
    return native if is_own else without_lone_thinking(native)


def size_of(body: Body) -> InputSize:
    """Size of all that a valid body sends to a provider that speaks Messages."""
    system = body.get("system")
    messages = cast(list[Any], body["messages"])
    more = {name: value for name, value in body.items() if name not in ("system", "messages")}
    return size_of_messages([system]) + size_of_messages(messages) + size_of_params(more)


def _signed(messages: JsonValue) -> JsonValue:
    """The messages without thinking of other providers' models, and with ids that Anthropic takes; else the same."""
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
    """A block with an id of a tool's use that Anthropic takes; the same where it has none, or such a one."""
    name = _IDS.get(str(fields(block).get("type")))
    own = None if name is None else block.get(name)
    return {**block, name: plain_id(own)} if isinstance(own, str) and plain_id(own) != own else block


_THINKING = ("thinking", "redacted_thinking")
_IDS: Mapping[str, str] = {"tool_use": "id", "tool_result": "tool_use_id"}


def repaired_body(body: Body, repairs: Collection[StateRepair]) -> Mapping[str, JsonValue]:
    """The body for a provider of Messages that has refused the thinking in it: without all of it."""
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
    """A body for Anthropic, without `thinking` where the conversation has turns of tools that began without."""
    enabled = fields(body.get("thinking")).get("type") == "enabled"
    return without_thinking(body) if enabled and lacks_thinking(objects(body.get("messages"))) else body


def without_thinking(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """A body for Anthropic without `thinking`, and without what needs it."""
    plain = {name: value for name, value in body.items() if name != "thinking"}
    management = fields(plain.pop("context_management", None))
    edits = [edit for edit in objects(management.get("edits") or ()) if not _is_of_thinking(edit)]
    return plain | ({"context_management": {**management, "edits": edits}} if edits else {})


def _is_of_thinking(edit: Block) -> bool:
    return str(edit.get("type")).startswith("clear_thinking_")


# Answers

ARGUMENTS = "partial_json"
"""Field of a block in which a stored answer has the input of a tool as it was written."""

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_KNOWN_STOPS = words(
    "end_turn max_tokens stop_sequence tool_use pause_turn refusal model_context_window_exceeded compaction"
)
_WITH_INPUT = ("tool_use", "server_tool_use", "mcp_tool_use")


def message_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """The message of a job that succeeded, such as Anthropic's SDKs can read, whatever came.

    Args:
        result: a `Result`, as JSON.
    """
    message = written(result)
    return {**message, "content": [_read(with_fields(block)) for block in message["content"]]}


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
"""The same of a usage."""


def with_fields(block: Block) -> Block:
    """A block with all fields that clients may expect."""
    return {**_FIELDS.get(block["type"], {}), **block}


def _read(block: Block) -> Block:
    if ARGUMENTS not in block:
        return block
    rest = {name: value for name, value in block.items() if name != ARGUMENTS}
    return {**rest, "input": input_of(block[ARGUMENTS])}


def written(result: Mapping[str, Any]) -> dict[str, Any]:
    """The same message; its tools' inputs are texts, in `partial_json`."""
    response = fields(result.get("response"))
    seed = str(result["execution_id"])
    if isinstance(response.get("content"), list) and "choices" not in response:
        head = response
        reason = response.get("stop_reason")
        own = response.get("id")
        content = blocks_of(response["content"], seed)
        usage = usage_of(response.get("usage"))
        if not usage:
            usage = _usage(completion_of({**result, "response": None}))
        sequence = response.get("stop_sequence")
    else:
        head = completion_of(result)
        sequence = None
        own = None
        choice = first_choice(head)
        author = response.get(AUTHOR)
        content = _said(choice, seed, author)
        reason = choice.get("finish_reason")
        usage = _usage(head)
    called = any(block["type"] == "tool_use" for block in content)
    more = {name: value for name, value in head.items() if name in _OF_MESSAGE and value is not None}
    return {
        **start_of(seed, head.get("model"), own),
        **more,
        "content": content,
        "stop_reason": stop_reason(reason, called=called),
        "stop_sequence": sequence if isinstance(sequence, str) else None,
        "usage": full_usage(usage),
    }


def full_usage(known: Mapping[str, Any]) -> dict[str, Any]:
    """A usage with all fields that clients may expect."""
    return {**_USAGE_FIELDS, "input_tokens": 0, "output_tokens": 0, **known}


_OF_MESSAGE = ("container", "context_management", "stop_details")
"""Further fields of a message."""


def start_of(execution_id: str, model: Any, own_id: Any) -> dict[str, Any]:
    """A message that nothing is said in yet. `own_id`: of its provider, which may know it by that later."""
    return {
        "id": own_id if isinstance(own_id, str) and own_id else f"msg_{shown(execution_id)}",
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
    """A `stop_reason` that Anthropic's SDKs know. `called`: the answer calls a tool."""
    if isinstance(reason, str) and reason in _KNOWN_STOPS and not (called and reason == "end_turn"):
        return reason
    known = _STOP_REASONS.get(finish_reason(reason) or "", "end_turn") if is_end(reason) else "end_turn"
    return "tool_use" if called and known == "end_turn" else known


def blocks_of(content: Any, seed: str) -> list[Block]:
    """The blocks of an answer in Anthropic's dialect that an SDK can read, tools' inputs as texts."""
    ids = set[str]()
    return [block for given in objects(content) if (block := block_of(given, ids, seed)) is not None]


def block_of(given: Block, ids: set[str], seed: str) -> Block | None:
    """One of these blocks; None for one without content.

    Args:
        given: as it came.
        ids: of the tools before it; that of this one is added.
        seed: the id of the execution, see `made_call_id`.
    """
    kind = given.get("type")
    if kind not in _WITH_INPUT:
        given = _without(given, ARGUMENTS)
    match kind:
        case "text":
            block = {**given, "text": text if isinstance(text := given.get("text"), str) else ""}
            return block if isinstance(block.get("citations"), list) else _without(block, "citations")
        case "thinking":
            texts = {name: given.get(name) for name in ("thinking", "signature")}
            return {**given, **{name: text if isinstance(text, str) else "" for name, text in texts.items()}}
        case "redacted_thinking":
            return {**given, "data": str(given.get("data") or "")}
        case "compaction":
            return {**given, "content": text if isinstance(text := given.get("content"), str) else ""}
        case str() if kind in _WITH_INPUT:
            arguments = given.get(ARGUMENTS) or given.get("input") or ""
            name = given.get("name")
            return {
                **_without(given, "input"),
                "id": _tool_id(call_id(given.get("id")), ids, seed),
                "name": name if isinstance(name, str) else "",
                ARGUMENTS: readable(arguments_text(arguments)),
            }
        case str() if kind:
            return given
        case _:
            return None


def _without(block: Block, name: str) -> Block:
    return {key: value for key, value in block.items() if key != name}


def _tool_id(own: str | None, ids: set[str], seed: str) -> str:
    """The id of a tool's use; Anthropic would refuse one with other signs in the next request."""
    if own is None or own in ids:
        own = made_call_id(seed, 0, len(ids))
    ids.add(own)
    return plain_id(own)


SPOKEN: Mapping[str, str] = {THOUGHT: "thinking", "reasoning": "thinking", "content": "text", "refusal": "text"}
"""Fields of a chat's message, and the blocks that they are."""


def signature_of(author: Any, thought_in: str) -> str:
    """The signature of thinking of a chat: a token, by which its author gets it back.

    Args:
        author: None where it is not known.
        thought_in: the field of the chat's message that it is of.
    """
    return token_of(author, thought_in=thought_in) if isinstance(author, str) else UNSIGNED


def _said(choice: Mapping[str, Any], seed: str, author: Any) -> list[Block]:
    """The blocks of a chat's choice in the order in which they were said; before tools what their author wants."""
    message = fields(choice.get("message"))
    blocks = list[Block]()
    signed = blocks_of(message.get("thinking_blocks") or (), seed)
    thought = THOUGHT if message.get(THOUGHT) else "reasoning"
    order = choice.get(ORDER) or [(name, 0) for name in (thought, "content", "refusal", "tool_calls")]
    for number, (name, start) in enumerate(order):
        end = next((begins for other, begins in order[number + 1 :] if other == name), None)
        if name == "tool_calls":
            if not start and (token := state_of_calls(author, message, plain_id)) is not None:
                blocks.append(state_block(token))
            blocks += map(_used, objects(message.get(name) or ())[start:end])
        elif isinstance(said := message.get(name), str) and (text := said[start:end]):
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
    """A block with a token: clients send it back unread."""
    return {"type": "redacted_thinking", "data": token}


def _used(call: Block) -> Block:
    function = fields(call.get("function"))
    used = {"type": "tool_use", "id": plain_id(str(call.get("id"))), "name": str(function.get("name") or "")}
    return {**used, ARGUMENTS: readable(arguments_text(function.get("arguments")))}


def usage_of(reported: Any) -> dict[str, Any]:
    """A usage in Anthropic's dialect, with both its figures; empty where there is none."""
    given = {name: value for name, value in fields(reported).items() if value is not None}
    tokens = {name: figure(given.get(name)) for name in ("input_tokens", "output_tokens")}
    return {**given, **{name: count or 0 for name, count in tokens.items()}} if any(tokens.values()) else {}


def _usage(completion: Mapping[str, Any]) -> dict[str, Any]:
    """The usage of a chat completion in Anthropic's words, which count what is cached apart."""
    used = of_completion(completion)
    if used is None or used.input_tokens is None:
        return {}
    aside = {"cache_read_input_tokens": used.cached_tokens, "cache_creation_input_tokens": used.cache_write_tokens}
    cached = {name: tokens for name, tokens in aside.items() if tokens is not None}
    return {
        "input_tokens": max(0, used.input_tokens - sum(cached.values())),
        **cached,
        "output_tokens": used.output_tokens or 0,
        **({"output_tokens_details": {"thinking_tokens": thought}} if (thought := used.reasoning_tokens) else {}),
        **({ESTIMATED: True} if is_estimated(completion) else {}),
    }


# Inputs of tools: SDKs parse them while they come, and fail at what is no JSON


def input_of(arguments: str) -> dict[str, Any]:
    """The input of a tool, of a text that `readable` has given; of one that is cut off what it says."""
    return from_json(arguments, allow_partial=True, allow_inf_nan=False) if arguments.strip(_SPACE) else {}


def readable(arguments: str) -> str:
    """The longest beginning of a tool's arguments that is an object of JSON, or the beginning of one."""
    arguments = whole_escapes(arguments)
    if is_readable(arguments):
        return arguments
    least = 0
    most = len(arguments)
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if is_readable(arguments[:middle]) else (least, middle)
    return arguments[:least]


def is_readable(arguments: str) -> bool:
    """True for an object of JSON, or its beginning."""
    text = arguments.lstrip(_SPACE)
    if not text.startswith("{"):
        return not text
    try:
        from_json(text, allow_inf_nan=False)
    except ValueError as error:
        return "EOF while parsing" in str(error)
    return True


def is_whole(arguments: str) -> bool:
    """True for a whole object of JSON."""
    try:
        return isinstance(orjson.loads(whole_escapes(arguments)), dict)
    except orjson.JSONDecodeError:
        return False


_SPACE = " \t\r\n"
