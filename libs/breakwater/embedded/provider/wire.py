"""OpenAI's chat completions on the wire: reading a request, writing answers and errors."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import orjson

from breakwater.embedded.provider.script import BrokenKind, ErrorText, Pace, ScriptedPrice, StreamFault, ToolCall

JSON_FORMATS = frozenset({"json_object", "json_schema"})
MAX_CHOICES = 128
MAX_STOPS = 4
MAX_TOP_LOGPROBS = 20
_FINGERPRINT = "fp_simulated"
CHARS_PER_TOKEN = 4
"""A common rule of thumb; a simulated model has no tokenizer."""


@dataclass(frozen=True, slots=True)
class ForcedTool:
    """A tool that has to be called."""

    name: str
    parameters: object
    """The JSON schema of its arguments."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What a request says, as far as a scripted model looks at it."""

    model: str
    prompt: str
    """Text of the last user message."""
    text_length: int
    """Characters of all messages together."""
    max_tokens: int | None = None
    wants_json: bool = False
    schema: Mapping[str, Any] | None = None
    """What the answer must satisfy, where the request says so."""
    offers_tools: bool = False
    """Tools are offered, and the last message is not the result of one."""
    forced_tool: ForcedTool | None = None
    """The request demands a tool call, of this one."""
    choices: int = 1
    """How many answers it wants."""
    orphans: tuple[str, ...] = ()
    """Ids of tool calls that have no result."""
    orphan_error: ErrorText | None = None
    """What the interface says of them; None for OpenAI's words."""
    stream: bool = False
    """The answer is wanted in chunks."""
    stream_usage: bool = False
    """And its usage with them."""
    stop: tuple[str, ...] = ()
    """The answer ends before the first of these."""
    top_logprobs: int | None = None
    """So many likely tokens are wanted at each place of the answer; None: none, nor how likely its own are."""


@dataclass(frozen=True, slots=True)
class AnswerUsage:
    """Tokens of an answer; `cached_tokens` are part of `input_tokens`."""

    input_tokens: int
    output_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Decision:
    """What happens to one request.

    Attributes:
        status: the HTTP status; None where no HTTP answer is sent.
        delay_s: how long until then.
        fault: the name of what went wrong, None for an ordinary answer.
        billed: the call is billed when its time has come, whether or not the client still listens.
        hangs: a client that leaves before the time has come ends the call.
        billed_when_abandoned: and it is billed even so.
        usage: tokens of the answer, and what is billed when the call is billed.
        cost_nano: what the call costs when it is billed, in nano-dollars.
        report_usage: the answer carries its usage.
        reported: the usage that it carries, where that is not what is billed.
        broken: the way in which a 200 is broken.
        error: the body's error, for the status or for `error_in_200`.
        headers: sent with the error besides.
        price: what tokens cost, for a stream that ends early.
        streamed: the answer is sent in chunks, at this pace.
        stream_usage: the stream carries its usage.
        top_logprobs: how many likely tokens are listed at each place of the text; None where none were asked for.
        stream_fault: what goes wrong with the stream.
        after_chunks: after so many chunks of content; None: after the last.
        stall_s: how long a stalled one is silent.
    """

    status: int | None
    delay_s: float = 0.0
    fault: str | None = None
    billed: bool = False
    hangs: bool = False
    billed_when_abandoned: bool = False
    completion_id: str = ""
    content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    choices: int = 1
    finish_reason: str = "stop"
    usage: AnswerUsage | None = None
    cost_nano: int = 0
    report_usage: bool = True
    reported: AnswerUsage | None = None
    broken: BrokenKind | None = None
    error: ErrorText | None = None
    retry_after_s: float | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    price: ScriptedPrice | None = None
    streamed: Pace | None = None
    stream_usage: bool = False
    top_logprobs: int | None = None
    stream_fault: StreamFault | None = None
    after_chunks: int | None = None
    stall_s: float = 0.0

    @property
    def shown_usage(self) -> AnswerUsage | None:
        """The usage that the answer carries."""
        return (self.reported or self.usage) if self.report_usage else None


class RequestRefusedError(Exception):
    """The request is not one the endpoint takes.

    Attributes:
        error: the body of the 400 it is answered with.
        model: the model it named, where that much could be read.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, model: str | None = None):
        super().__init__(message)
        self.error = ErrorText(message=message, param=param, code=code)
        self.model = model


def tokens_of(length: int) -> int:
    """Tokens of a text of so many characters; never zero."""
    return max(1, math.ceil(length / CHARS_PER_TOKEN))


def read_object(body: bytes) -> dict[str, Any]:
    """A request's body as a JSON object.

    Raises:
        RequestRefusedError: it is none.
    """
    try:
        payload: object = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestRefusedError(f"The body is not valid JSON: {error}") from error
    if not isinstance(payload, dict):
        raise RequestRefusedError("The body must be a JSON object.")
    return cast("dict[str, Any]", payload)


def read_request(body: bytes, model: str | None = None) -> ChatRequest:
    """Reads the body of `POST /v1/chat/completions`.

    Args:
        body: as it was sent.
        model: the model where the URL names it; the body then need not.

    Raises:
        RequestRefusedError: it is no JSON object, lacks a model or messages, or asks for what is not simulated.
    """
    fields = read_object(body)
    model = model or fields.get("model")
    if not isinstance(model, str) or not model:
        raise RequestRefusedError("You must name a model, as text.", param="model")
    messages = _messages(fields, model)
    options: Any = fields.get("stream_options") or {}
    if options and not fields.get("stream"):
        raise RequestRefusedError(
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
            param="stream_options",
            model=model,
        )
    choices = fields.get("n")
    if choices is not None and (isinstance(choices, bool) or choices not in range(1, MAX_CHOICES + 1)):
        raise RequestRefusedError(f"`n` must be a whole number from 1 to {MAX_CHOICES}.", param="n", model=model)
    response_format = fields.get("response_format")
    request = summarise(
        model,
        messages,
        max_tokens=_max_tokens(fields, model),
        wants_json=isinstance(response_format, dict)
        and cast("dict[str, Any]", response_format).get("type") in JSON_FORMATS,
        schema=_schema(response_format),
        has_tools=bool(fields.get("tools")),
    )
    return replace(
        request,
        choices=choices or 1,
        forced_tool=_forced_tool(fields),
        stream=bool(fields.get("stream")),
        stream_usage=bool(options.get("include_usage")),
        stop=_stop(fields, model),
        top_logprobs=_top_logprobs(fields, model),
    )


def _stop(fields: dict[str, Any], model: str) -> tuple[str, ...]:
    stop = fields.get("stop")
    if stop is None:
        return ()
    found: list[Any] = [stop] if isinstance(stop, str) else cast("list[Any]", stop) if isinstance(stop, list) else []
    if not 1 <= len(found) <= MAX_STOPS or not all(isinstance(text, str) and text for text in found):
        raise RequestRefusedError(f"`stop` must be a text, or 1 to {MAX_STOPS} of them.", param="stop", model=model)
    return tuple(found)


def _top_logprobs(fields: dict[str, Any], model: str) -> int | None:
    top, asked = fields.get("top_logprobs"), fields.get("logprobs")
    if top is not None and not asked:
        raise RequestRefusedError("`top_logprobs` needs `logprobs`.", param="top_logprobs", model=model)
    if top is not None and (isinstance(top, bool) or top not in range(MAX_TOP_LOGPROBS + 1)):
        message = f"`top_logprobs` must be a whole number from 0 to {MAX_TOP_LOGPROBS}."
        raise RequestRefusedError(message, param="top_logprobs", model=model)
    return (top or 0) if asked else None


def _forced_tool(fields: dict[str, Any]) -> ForcedTool | None:
    """The function that `tool_choice` demands; where it demands any, the first."""
    functions = [tool["function"] for tool in fields.get("tools") or () if tool.get("type") == "function"]
    match fields.get("tool_choice"):
        case "required":
            named = functions
        case {"type": "function", "function": {"name": name}}:
            named = [function for function in functions if function.get("name") == name]
        case _:
            return None
    return ForcedTool(named[0]["name"], named[0].get("parameters", {})) if named else None


def _schema(response_format: Any) -> Mapping[str, Any] | None:
    named: Any = response_format.get("json_schema") if isinstance(response_format, dict) else None
    schema: Any = named.get("schema") if isinstance(named, dict) else None
    return cast("dict[str, Any]", schema) if isinstance(schema, dict) else None


def summarise(
    model: str,
    messages: list[dict[str, Any]],
    *,
    max_tokens: int | None,
    wants_json: bool,
    has_tools: bool,
    schema: Mapping[str, Any] | None = None,
) -> ChatRequest:
    """What a conversation in OpenAI's format comes to for a scripted model."""
    return ChatRequest(
        model=model,
        prompt=next((_text(m) for m in reversed(messages) if m["role"] == "user"), ""),
        text_length=sum(len(_text(message)) for message in messages),
        max_tokens=max_tokens,
        wants_json=wants_json,
        schema=schema,
        offers_tools=has_tools and messages[-1]["role"] != "tool",
        orphans=find_orphans(messages),
    )


def _messages(fields: dict[str, Any], model: str) -> list[dict[str, Any]]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestRefusedError("`messages` must be a list with at least one message.", param="messages", model=model)
    for index, message in enumerate(cast("list[Any]", messages)):
        if not isinstance(message, dict) or not isinstance(cast("dict[str, Any]", message).get("role"), str):
            raise RequestRefusedError(
                "A message must be an object with a `role`.", param=f"messages[{index}]", model=model
            )
    return cast("list[dict[str, Any]]", messages)


def _max_tokens(fields: dict[str, Any], model: str) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = fields.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise RequestRefusedError(f"`{name}` must be a whole number of at least 1.", param=name, model=model)
        return value
    return None


def _text(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = cast("list[Any]", content)
        return "".join(str(cast("dict[str, Any]", part).get("text", "")) for part in parts if isinstance(part, dict))
    return ""


def find_orphans(messages: Iterable[dict[str, Any]]) -> tuple[str, ...]:
    """Ids of tool calls that the messages right after them do not answer."""
    orphans: list[str] = []
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            answered = message.get("tool_call_id")
            waiting = [call_id for call_id in waiting if call_id != answered]
            continue
        orphans += waiting
        calls = message.get("tool_calls")
        waiting = [
            str(cast("dict[str, Any]", call).get("id"))
            for call in (cast("list[Any]", calls) if isinstance(calls, list) else [])
            if isinstance(call, dict)
        ]
    return (*orphans, *waiting)


def write_completion(decision: Decision, model: str) -> bytes:
    """A `chat.completion` object."""
    message: dict[str, Any] = {"role": "assistant", "content": decision.content, "refusal": None, "annotations": []}
    if decision.tool_calls:
        message["tool_calls"] = _tool_calls(decision)
    logprobs = _logprobs(decision, decision.content)
    choice = {"message": message, "logprobs": logprobs, "finish_reason": decision.finish_reason}
    choices = [{"index": index, **choice} for index in range(decision.choices)]
    answer: dict[str, Any] = {
        "id": decision.completion_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": _FINGERPRINT,
        "choices": choices if decision.broken != "no_choices" else [],
    }
    if (usage := decision.shown_usage) is not None:
        answer["usage"] = _usage(usage)
    return orjson.dumps(answer)


def _tool_calls(decision: Decision) -> list[dict[str, Any]]:
    return [
        {
            "id": f"call_{decision.completion_id[-16:]}_{index}",
            "type": "function",
            "function": {"name": call.name, "arguments": orjson.dumps(call.arguments).decode()},
        }
        for index, call in enumerate(decision.tool_calls)
    ]


def _logprobs(decision: Decision, text: str | None) -> dict[str, Any] | None:
    if decision.top_logprobs is None or not text:
        return None

    def entry(token: str, rank: int) -> dict[str, Any]:
        return {"token": token, "logprob": -0.25 * (rank + 1), "bytes": list(token.encode())}

    tokens = [text[start : start + CHARS_PER_TOKEN] for start in range(0, len(text), CHARS_PER_TOKEN)]
    ranks = range(decision.top_logprobs)
    listed = [
        {**entry(token, 0), "top_logprobs": [entry(token + "~" * rank, rank) for rank in ranks]} for token in tokens
    ]
    return {"content": listed, "refusal": None}


def _usage(usage: AnswerUsage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.input_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One event of a stream, as it is sent."""

    data: bytes
    content: bool = False
    """It carries some of the answer, so it comes at the pace of the tokens."""
    ends: bool = False
    """It is one of those that say that the answer is whole."""


def pieces_of(text: str, pace: Pace) -> list[str]:
    """A text as a model streams it."""
    size = pace.tokens_per_chunk * CHARS_PER_TOKEN
    return [text[start : start + size] for start in range(0, len(text), size)]


def write_stream(decision: Decision, model: str, pace: Pace) -> list[StreamEvent]:
    """The events of a streamed answer: `chat.completion.chunk` objects, and `[DONE]`."""
    usage = decision.shown_usage if decision.stream_usage else None
    head = {
        "id": decision.completion_id,
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": _FINGERPRINT,
    }

    def event(index: int, delta: dict[str, Any], finish: str | None = None) -> bytes:
        logprobs = _logprobs(decision, delta.get("content"))
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        chunk = {**head, "choices": [choice], **({} if usage is None else {"usage": None})}
        return b"data: %b\n\n" % orjson.dumps(chunk)

    choices = range(decision.choices if decision.broken != "no_choices" else 0)
    empty = None if decision.content is None else ""
    events = [StreamEvent(event(i, {"role": "assistant", "content": empty, "refusal": None})) for i in choices]
    deltas: list[dict[str, Any]] = [{"content": piece} for piece in pieces_of(decision.content or "", pace)]
    for number, call in enumerate(_tool_calls(decision)):
        function = call["function"]
        named = {"name": function["name"], "arguments": ""}
        deltas.append({"tool_calls": [{"index": number, **call, "function": named}]})
        deltas += (
            {"tool_calls": [{"index": number, "function": {"arguments": piece}}]}
            for piece in pieces_of(function["arguments"], pace)
        )
    events += (StreamEvent(event(i, delta), content=True) for delta in deltas for i in choices)
    events += (StreamEvent(event(i, {}, decision.finish_reason), ends=True) for i in choices)
    if usage is not None:
        chunk = {**head, "choices": [], "usage": _usage(usage)}
        events.append(StreamEvent(b"data: %b\n\n" % orjson.dumps(chunk), ends=True))
    return [*events, StreamEvent(b"data: [DONE]\n\n", ends=True)]


def write_error_event(error: bytes) -> bytes:
    """An error in the middle of a stream."""
    return b"data: %b\n\n" % error


def write_models(models: Iterable[str]) -> bytes:
    """The answer of `GET /v1/models`."""
    data = [{"id": model, "object": "model", "created": 0, "owned_by": "simulated"} for model in models]
    return orjson.dumps({"object": "list", "data": data})


REQUESTS_PER_MINUTE = 10_000
"""The limit that a rate-limited answer names; nothing is enforced by it, faults decide."""

_STANDARD = {
    400: ErrorText(type="invalid_request_error", message="The request is invalid."),
    401: ErrorText(type="invalid_request_error", code="invalid_api_key", message="Incorrect API key provided."),
    402: ErrorText(type="insufficient_quota", code="insufficient_quota", message="The account has no credit left."),
    403: ErrorText(type="invalid_request_error", code="permission_denied", message="This key may not use this model."),
    404: ErrorText(type="invalid_request_error", code="not_found", message="The resource does not exist."),
    413: ErrorText(type="invalid_request_error", code="request_too_large", message="The request is too large."),
    422: ErrorText(type="invalid_request_error", message="A parameter has a value that can't be processed."),
    429: ErrorText(type="requests", code="rate_limit_exceeded", message="Rate limit reached; please try again later."),
    500: ErrorText(type="server_error", message="The server had an error while processing your request."),
    502: ErrorText(type="server_error", message="Bad gateway."),
    503: ErrorText(type="server_error", code="service_unavailable", message="The service is unavailable."),
    504: ErrorText(type="server_error", message="The gateway timed out."),
    529: ErrorText(type="overloaded_error", code="overloaded", message="The service is overloaded."),
}


def unknown_model(model: str) -> ErrorText:
    """The body of the 404 for a model that the script does not have."""
    return ErrorText(code="model_not_found", message=f"The model `{model}` does not exist or you do not have access.")


def orphan_tool_calls(orphans: tuple[str, ...]) -> ErrorText:
    """The body of the 400 for tool calls without results, worded as clients match it."""
    return ErrorText(
        param="messages",
        message="An assistant message with 'tool_calls' must be followed by tool messages responding to each "
        f"'tool_call_id'. The following tool_call_ids did not have response messages: {', '.join(orphans)}",
    )


def unlisted_error(status: int, server_error: str) -> ErrorText:
    """The error of a status that has none of its own. `server_error`: what the interface calls those from 500 on."""
    kind = "invalid_request_error" if status < 500 else server_error
    return ErrorText(type=kind, message=f"The request was answered with status {status}.")


def write_error(status: int, custom: ErrorText | None) -> bytes:
    """An error body; what `custom` leaves out is what the status says by default.

    A custom message without a code gets no code: the default one would be about another error.
    """
    standard = _STANDARD.get(status) or unlisted_error(status, "server_error")
    custom = custom or standard
    code = custom.code if custom.code is not None or custom.message is not None else standard.code
    return orjson.dumps(
        {
            "error": {
                "message": custom.message if custom.message is not None else standard.message,
                "type": custom.type if custom.type is not None else standard.type,
                "param": custom.param,
                "code": code,
            }
        }
    )


def error_headers(status: int, retry_after_s: float | None) -> dict[str, str]:
    """`Retry-After` where the script gives one, and the `x-ratelimit-*` family on 429.

    A wait that is not whole seconds is sent as it is: the standard knows whole seconds only, but gateways do send
    fractions, and clients read them.
    """
    headers: dict[str, str] = {}
    if retry_after_s is not None:
        headers["Retry-After"] = f"{retry_after_s:.10g}"
        headers["retry-after-ms"] = f"{retry_after_s * 1000:.0f}"
    if status == 429:
        headers["x-ratelimit-limit-requests"] = str(REQUESTS_PER_MINUTE)
        headers["x-ratelimit-remaining-requests"] = "0"
        headers["x-ratelimit-reset-requests"] = f"{retry_after_s if retry_after_s is not None else 1:.10g}s"
    return headers
