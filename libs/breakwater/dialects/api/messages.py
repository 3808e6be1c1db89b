"""Anthropic's Messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from breakwater.dialects.api.pending_request import ParsedRequest
from breakwater.dialects.api.request_handler import ModelRequestHandler
from breakwater.dialects.api.request_options import REQUEST_HEADERS, options_of
from breakwater.dialects.contract.anthropic import (
    AnthropicMessage,
    CountTokensRequest,
    InputTokenCount,
    MessagesRequest,
)
from breakwater.dialects.rules.forms import InvalidBodyError
from breakwater.dialects.rules.messages import message_of
from breakwater.dialects.rules.messages_stream import PING, MessageStream, event_bytes
from breakwater.dialects.rules.native_requests import chat_form
from breakwater.identity.operations import TOO_MANY, operation
from breakwater.jobs.api.submission import Submission
from breakwater.jobs.contract.job import SENT_BY_PLANE, Job, NativeRequest
from breakwater.jobs.rules.chat_messages import encode_json
from breakwater.kernel.http.parsing import invalid_job, read_command
from breakwater.prices.rules.price import likely_input_tokens, size_of_messages, size_of_params

_BETA = "anthropic-beta"


class MessageRoutes:
    """The API of Messages, and of counting their tokens."""

    def __init__(self, handler: ModelRequestHandler) -> None:
        self._handler = handler

    @operation(
        "POST",
        "/v1/messages",
        tag="anthropic",
        summary="Create a message, as at Anthropic",
        description="Each call is a job. A provider of the kind `anthropic` gets the body as it is; for any other it "
        "is translated to a chat completion, and a field that has no equivalent there is refused by name. The API key "
        "is sent as `x-api-key` or as a bearer token. The headers `x-breakwater-execution-id`, `-model`, `-attempts`, "
        "`-cost-usd` and `-cache` describe the job. The headers `anthropic-ratelimit-requests-limit`, `-remaining`, "
        "`-reset`, and the same of `tokens`, are those of the tightest rate limit of the caller, if it has one. "
        "`x-should-retry: false` is set if a retry does not help. "
        "With `stream`, the response is server-sent events: Anthropic's, or an `error` after some of the answer.",
        headers={
            "x-api-key": "The API key, unless it is a bearer token.",
            _BETA: "Passed on to Anthropic.",
            **REQUEST_HEADERS,
        },
        body=MessagesRequest,
        results={200: ("The answer.", AnthropicMessage)},
        errors={
            400: "The request is invalid (`invalid_request_error`): the message begins with the field at fault. Or it "
            "is too long for the model, or the provider refuses it.",
            403: "The task was stopped, or the key may not do this (`permission_error`).",
            404: "There is no such agent or model for this key (`not_found_error`).",
            409: "The idempotency key is that of another call, or the job was cancelled (`invalid_request_error`).",
            413: "The body is too large (`request_too_large`).",
            429: "A budget or a rate limit is used up (`rate_limit_error`). " + TOO_MANY,
            502: "No model gave a usable answer (`api_error`).",
            504: "The job's time was over (`timeout_error`).",
            529: "The breakers of all models are open, a provider is overloaded, or nothing was accepted "
            "(`overloaded_error`).",
        },
    )
    async def create_message(self, request: Request) -> Response:
        """Responds with the message once the job has ended, however long that takes."""
        return await self._handler.respond(request, self._parse)

    async def _parse(self, request: Request, body: bytes) -> ParsedRequest:
        parsed = read_command(body, MessagesRequest)
        agent, model = self._handler.agent_of(request, parsed.model)
        options = options_of(request.headers, parsed.breakwater).model_dump(exclude_unset=True)
        if parsed.stream:
            options["stream"] = True
        beta = request.headers.getlist(_BETA)
        native = NativeRequest(api="messages", body=_body_of(parsed), headers={_BETA: ",".join(beta)} if beta else {})
        model_option = {} if model is None else {"model": model}
        job = Job(agent=agent, api_request=native, include_response=True, **model_option, **options)
        return ParsedRequest(job, _MessageAnswer())

    @operation(
        "POST",
        "/v1/messages/count_tokens",
        tag="anthropic",
        summary="Count the input tokens of a message, as at Anthropic",
        description="An estimate by the size of the request: no provider is asked. It takes the API key as "
        "`/v1/messages` does.",
        body=CountTokensRequest,
        results={200: ("The number.", InputTokenCount)},
        errors={404: "There is no such agent or model for this key (`not_found_error`)."},
    )
    async def count_message_tokens(self, request: Request) -> Response:
        """Responds with the estimated number of tokens. Raises RequestError."""
        parsed = read_command(await self._handler.read(request), CountTokensRequest)
        self._handler.agent_of(request, parsed.model)
        try:
            tokens = _estimate_input(NativeRequest(api="messages", body=_body_of(parsed)))
        except InvalidBodyError as error:
            raise invalid_job([error.problem]) from None
        return Response(InputTokenCount(input_tokens=tokens).json_bytes(), 200, media_type="application/json")


def _body_of(parsed: CountTokensRequest) -> dict[str, Any]:
    """Returns the body as the client wrote it, without fields that are not Anthropic's or that the plane sends."""
    declared = {name: getattr(parsed, name) for name in parsed.model_fields_set if name in type(parsed).model_fields}
    body = {**declared, **(parsed.model_extra or {})}
    return {name: value for name, value in body.items() if name not in (*SENT_BY_PLANE, "breakwater")}


def _estimate_input(request: NativeRequest) -> int:
    """Estimates the input tokens of a request. Raises InvalidBodyError."""
    form = chat_form(request)
    return likely_input_tokens(size_of_messages(form.messages) + size_of_params(form.params))


class _MessageAnswer:
    def body(self, sent: Submission, result: dict[str, Any]) -> bytes:  # noqa: ARG002  the result has its id
        """Writes a `message`."""
        return encode_json(message_of(result))

    def encoder(self, sent: Submission) -> MessagesEncoder:
        """Returns an encoder of chunks."""
        request = sent.job.api_request
        assert request is not None
        return MessagesEncoder(MessageStream(sent.job_id, partial(_estimate_input, request)))

    def fails_in_stream(self, result: dict[str, Any]) -> bool:  # noqa: ARG002
        """Returns False: before the answer has begun, an error is a response with the error's status."""
        return False


@dataclass(frozen=True, slots=True)
class MessagesEncoder:
    """An encoder of Anthropic's events."""

    keep_alive: ClassVar[bytes] = event_bytes([PING])

    stream: MessageStream

    def events(self, chunks: Iterable[dict[str, Any]]) -> bytes:
        """Writes the events of chunks."""
        return event_bytes(self.stream.feed(chunks))

    def end(
        self,
        result: dict[str, Any] | None,
        *,
        complete: bool,  # noqa: ARG002  the stream compares the result with what it has sent
        error: Callable[[dict[str, Any] | None], bytes],
    ) -> bytes:
        """Writes the rest of the message, or an error."""
        if result is None or result["status"] != "succeeded":
            return _error(error(result))
        missing_events = self.stream.end(result)
        if missing_events is None:
            # The job was decided by another answer than the one that was begun here.
            return _error(error(None))
        return event_bytes(missing_events)


def _error(body: bytes) -> bytes:
    return b"event: error\ndata: %b\n\n" % body
