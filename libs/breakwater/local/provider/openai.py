"""OpenAI's chat completions on the wire, and Azure's variant: reading a request, writing answers and errors."""

from __future__ import annotations

import time
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, cast

import orjson
from aiohttp import web
from pydantic import ValidationError

from breakwater.kernel.errors import BreakwaterError
from breakwater.local.provider.behaviour import CHARS_PER_TOKEN, AnswerUsage, ChatRequest, ScriptedAnswer
from breakwater.local.provider.script import (
    ErrorText,
    Pace,
    ScriptedHostedCall,
    ScriptedText,
    ScriptedToolCall,
    mistakes,
)


class RequestRefusedError(BreakwaterError):
    """The request is not one that the interface takes.

    Attributes:
        status: of the answer.
        error: the body of the answer.
        model: the model that it named, where that much could be read.
    """

    def __init__(self, status: int, error: ErrorText, model: str | None = None) -> None:
        super().__init__(error.message)
        self.status = status
        self.error = error
        self.model = model


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One event of a stream, as it is sent."""

    data: bytes
    content: bool = False
    """True if it carries some of the answer, so that it comes at the pace of the tokens."""
    ends: bool = False
    """True if it marks the answer as complete."""


def pieces_of(text: str, pace: Pace) -> list[str]:
    """Splits a text as a model streams it."""
    size = pace.tokens_per_chunk * CHARS_PER_TOKEN
    return [text[start : start + size] for start in range(0, len(text), size)]


def seal(text: str) -> str:
    """Returns a text in a form that only the provider reads: the signature of a thought, or its encrypted text."""
    return b64encode(blake2b(text.encode(), digest_size=16).digest() + text.encode()).decode()


def unseal(sealed_text: object) -> str | None:
    """Returns the text that was sealed; None for anything else."""
    try:
        opened = b64decode(str(sealed_text), validate=True)[16:].decode()
    except ValueError:
        return None
    return opened if seal(opened) == sealed_text else None


class OpenAI:
    """OpenAI's chat completions, and the base class of the other interfaces, which override where they differ.

    Attributes:
        id_header: carries the request's id.
        id_in_error: the body of an error has it, too.
        key_header: carries the API key; a bearer token is taken, too.
        server_error: type of errors from status 500 on that are not in `errors`.
        errors: the default error of a status.
    """

    id_header = "x-request-id"
    id_in_error = False
    key_header: str | None = None
    server_error = "server_error"
    errors: Mapping[int, ErrorText] = {
        status: ErrorText(type=kind, code=code, message=message)
        for status, kind, code, message in (
            (400, "invalid_request_error", None, "The request is invalid."),
            (401, "invalid_request_error", "invalid_api_key", "Incorrect API key provided."),
            (402, "insufficient_quota", "insufficient_quota", "The account has no credit left."),
            (403, "invalid_request_error", "permission_denied", "This key may not use this model."),
            (404, "invalid_request_error", "not_found", "The resource does not exist."),
            (422, "invalid_request_error", None, "A parameter has a value that can't be processed."),
            (429, "requests", "rate_limit_exceeded", "Rate limit reached; please try again later."),
            (500, "server_error", None, "The server had an error while processing your request."),
            (502, "server_error", None, "Bad gateway."),
            (503, "server_error", "service_unavailable", "The service is unavailable."),
            (504, "server_error", None, "The gateway timed out."),
            (529, "overloaded_error", "overloaded", "The service is overloaded."),
        )
    }

    def key_of(self, headers: Mapping[str, str]) -> str | None:
        """Returns the API key of a request."""
        if self.key_header is not None and self.key_header in headers:
            return headers[self.key_header]
        scheme, _, token = headers.get("Authorization", "").partition(" ")
        return token if scheme == "Bearer" else None

    def require(self, request: web.BaseRequest) -> None:
        """Raises RequestRefusedError where the request lacks a header or parameter."""

    def read(self, body: bytes, model: str | None = None) -> ChatRequest:
        """Reads a request; the body need not name the model where the URL does.

        Raises:
            RequestRefusedError: the interface does not take it.
        """
        content: Any = None
        try:
            content = orjson.loads(body)
            if model is not None and isinstance(content, dict):
                content["model"] = model
            return self.parse(content)
        except orjson.JSONDecodeError as error:
            raise RequestRefusedError(400, ErrorText(message=f"The body is not valid JSON: {error}"), model) from error
        except ValidationError as error:
            named = cast("dict[str, Any]", content).get("model") if isinstance(content, dict) else None
            param = ".".join(map(str, error.errors()[0]["loc"])) or None
            text = ErrorText(message=mistakes(error)[0], param=param)
            raise RequestRefusedError(400, text, named if isinstance(named, str) and named else None) from error

    def parse(self, content: Any) -> ChatRequest:
        """Reads a body. Raises ValidationError."""
        return ChatRequest.model_validate(content)

    def unknown_model(self, model: str) -> ErrorText:
        """Returns the error for a model that the script does not have."""
        message = f"The model `{model}` does not exist or you do not have access."
        return ErrorText(code="model_not_found", message=message)

    def error_text(self, status: int, scripted: ErrorText | None) -> ErrorText:
        """Completes an error with the defaults of its status.

        A message without a code gets none: the default code would describe another error.
        """
        default = self.errors.get(status) or ErrorText(
            type="invalid_request_error" if status < 500 else self.server_error,
            message=f"The request was answered with status {status}.",
        )
        if scripted is None:
            return default
        code = {} if scripted.message is None else {"code": None}
        return default.model_copy(update={**code, **scripted.model_dump(exclude_none=True)})

    def error(self, status: int, scripted: ErrorText | None = None) -> dict[str, Any]:
        """Returns the body of an error, completed with the defaults of its status."""
        return {"error": self.error_text(status, scripted).model_dump()}

    def error_headers(self, status: int, retry_after_s: float | None) -> dict[str, str]:
        """Returns `Retry-After` where the script has one, and the `x-ratelimit-*` family on 429.

        A wait with a fraction of a second is sent as it is: the standard allows whole seconds only, but gateways send
        fractions, and clients read them.
        """
        headers: dict[str, str] = {}
        if retry_after_s is not None:
            headers["Retry-After"] = f"{retry_after_s:.10g}"
            headers["retry-after-ms"] = f"{retry_after_s * 1000:.0f}"
        if status == 429:
            headers["x-ratelimit-remaining-requests"] = "0"
            headers["x-ratelimit-reset-requests"] = f"{retry_after_s if retry_after_s is not None else 1:.10g}s"
        return headers

    def failure_body(self, answer: ScriptedAnswer, error: ErrorText | None) -> dict[str, Any]:  # noqa: ARG002  for others
        """Returns the body of an answer that failed."""
        return self.error(500, error)

    def failure(self, document: dict[str, Any], sent: int) -> StreamEvent:  # noqa: ARG002  for others
        """Returns an error, or an answer that failed, as the last event of a stream after `sent` others."""
        return StreamEvent(self.event(document))

    def event(self, document: Mapping[str, Any]) -> bytes:
        """Returns an event of a stream."""
        return b"data: %b\n\n" % orjson.dumps(document)

    def response_body(self, answer: ScriptedAnswer) -> dict[str, Any]:
        """Returns an answer as a `chat.completion` object."""
        message: dict[str, Any] = {
            "role": "assistant",
            "content": answer.content,
            "refusal": _join(answer, "refusal"),
            "annotations": [
                {"type": "url_citation", "url_citation": cited}
                for part in answer.parts
                if part.type == "text"
                for cited in citations(part)
            ],
        }
        if (thought := _join(answer, "thinking")) is not None:
            message["reasoning_content"] = thought
        if answer.tool_calls:
            message["tool_calls"] = _tool_calls(answer)
        logprobs = logprobs_of(answer, answer.content)
        choice = {"message": message, "logprobs": logprobs, "finish_reason": answer.finish_reason}
        choices = [{"index": index, **choice} for index in range(answer.choices)]
        usage = {} if answer.shown_usage is None else {"usage": _usage(answer.shown_usage)}
        return {**_head(answer, "chat.completion"), "choices": choices, **usage}

    def stream(self, answer: ScriptedAnswer, pace: Pace) -> list[StreamEvent]:
        """Returns an answer as the events of a stream: `chat.completion.chunk` objects, and `[DONE]`."""
        head = _head(answer, "chat.completion.chunk")
        choices = range(answer.choices)
        usage = answer.shown_usage if answer.stream_usage else None

        def chunk(index: int, delta: dict[str, Any], finish: str | None = None) -> bytes:
            logprobs = logprobs_of(answer, delta.get("content"))
            choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
            return self.event({**head, "choices": [choice], **({} if usage is None else {"usage": None})})

        fields = {"reasoning_content": "thinking", "content": "text", "refusal": "refusal"}
        deltas: list[dict[str, Any]] = [
            {field: piece} for field, kind in fields.items() for piece in pieces_of(_join(answer, kind) or "", pace)
        ]
        for number, call in enumerate(_tool_calls(answer)):
            kind = call["type"]
            field = "arguments" if kind == "function" else "input"
            named = {**call, kind: {**call[kind], field: ""}}
            parts = [named, *({kind: {field: piece}} for piece in pieces_of(call[kind][field], pace))]
            deltas += ({"tool_calls": [{"index": number, **part}]} for part in parts)
        first_delta = {"role": "assistant", "content": None if answer.content is None else "", "refusal": None}
        events = [StreamEvent(chunk(index, first_delta)) for index in choices]
        events += (StreamEvent(chunk(index, delta), content=True) for delta in deltas for index in choices)
        events += (StreamEvent(chunk(index, {}, answer.finish_reason), ends=True) for index in choices)
        if usage is not None:
            events.append(StreamEvent(self.event({**head, "choices": [], "usage": _usage(usage)}), ends=True))
        return [*events, StreamEvent(b"data: [DONE]\n\n", ends=True)]

    def models(self, names: Iterable[str]) -> dict[str, Any]:
        """Returns the answer of `GET /v1/models`."""
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "simulated"} for name in names]
        return {"object": "list", "data": data}


class Azure(OpenAI):
    """Azure's deployments: OpenAI's bodies, with the model in the path."""

    key_header = "api-key"

    def require(self, request: web.BaseRequest) -> None:
        """Requires the version of the interface, a parameter of the URL."""
        if not request.query.get("api-version"):
            raise RequestRefusedError(404, ErrorText(message="Resource not found"))


def _head(answer: ScriptedAnswer, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{answer.number}",
        "object": kind,
        "created": int(time.time()),
        "model": answer.model,
        "system_fingerprint": "fp_simulated",
    }


def _tool_calls(answer: ScriptedAnswer) -> list[dict[str, Any]]:
    return [
        {
            "id": call_id(answer, index),
            **(
                {
                    "type": "function",
                    "function": {"name": call.name, "arguments": orjson.dumps(call.arguments).decode()},
                }
                if call.input is None
                else {"type": "custom", "custom": {"name": call.name, "input": call.input}}
            ),
        }
        for index, call in enumerate(answer.tool_calls)
    ]


def call_id(answer: ScriptedAnswer, index: int) -> str:
    """Returns the id of a tool call."""
    return f"call_{answer.number}_{index}"


_CALLS = (ScriptedToolCall, ScriptedHostedCall)


def _join(answer: ScriptedAnswer, kind: str) -> str | None:
    texts = [
        part.text
        for part in answer.parts
        if part.type == kind and not isinstance(part, _CALLS) and not getattr(part, "redacted", False)
    ]
    return "".join(texts) if texts else None


def citations(text: ScriptedText) -> list[dict[str, Any]]:
    """Returns the pages that a text cites, each for all of it."""
    return [{"start_index": 0, "end_index": len(text.text), "url": url, "title": url} for url in text.cites]


def logprobs_of(answer: ScriptedAnswer, text: str | None) -> dict[str, Any] | None:
    """Returns the likely tokens of a text, where the request wants them."""
    if answer.top_logprobs is None or not text:
        return None

    def entry(token: str, rank: int) -> dict[str, Any]:
        return {"token": token, "logprob": -0.25 * (rank + 1), "bytes": list(token.encode())}

    ranks = range(answer.top_logprobs)
    tokens = pieces_of(text, Pace())
    return {
        "content": [
            {**entry(token, 0), "top_logprobs": [entry(token + "~" * rank, rank) for rank in ranks]} for token in tokens
        ],
        "refusal": None,
    }


def _usage(usage: AnswerUsage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.input_tokens + usage.output_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            **({"cache_write_tokens": writes} if (writes := usage.cache_write_tokens) else {}),
        },
        **({"completion_tokens_details": {"reasoning_tokens": thought}} if (thought := usage.reasoning_tokens) else {}),
    }
