"""OpenAI's chat completions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from breakwater.dialects.api.pending_request import ParsedRequest
from breakwater.dialects.api.request_handler import ModelRequestHandler
from breakwater.dialects.api.request_options import OPENAI_ERRORS, REQUEST_HEADERS, options_of
from breakwater.dialects.contract.openai import ChatCompletion, ChatCompletionRequest
from breakwater.dialects.rules.chat_chunks import OBJECT, Assembly, missing_chunks_of
from breakwater.dialects.rules.chat_completions import completion_of, is_usage, job_of
from breakwater.identity.operations import operation
from breakwater.jobs.api.submission import Submission
from breakwater.kernel.http.parsing import read_command
from breakwater.kernel.http.problems import RequestError
from breakwater.kernel.validation import FieldError

_SHARED_FIELDS = ("id", "created", "model", "system_fingerprint")
"""Fields that all chunks of an answer have in common."""
_DONE = b"data: [DONE]\n\n"


class ChatRoutes:
    """The API of chat completions."""

    def __init__(self, handler: ModelRequestHandler) -> None:
        self._handler = handler

    @operation(
        "POST",
        "/v1/chat/completions",
        tag="openai",
        summary="Create a chat completion, as at OpenAI",
        description="Each call is a job. The response contains the provider's own object, or one in OpenAI's format if "
        "the provider speaks another dialect. The headers `x-breakwater-execution-id`, `-model`, `-attempts`, "
        "`-cost-usd` and `-cache` describe the job, and `-dropped-params` lists params that were not sent because the "
        "provider does not support them. The headers `x-ratelimit-limit-requests`, `-remaining-requests`, "
        "`-reset-requests`, and the same of `tokens`, are those of the tightest rate limit of the caller, if it has "
        "one. `x-should-retry: false` is set if a retry does not help. With `stream`, the response is server-sent "
        "events: OpenAI's `chat.completion.chunk` objects and `[DONE]`, or an `error` after some of the answer.",
        headers=REQUEST_HEADERS,
        body=ChatCompletionRequest,
        results={200: ("The answer.", ChatCompletion)},
        errors={
            **OPENAI_ERRORS,
            400: "The request is invalid; `param` is the field at fault. Or it is too long for the model "
            "(`context_length_exceeded`), or the provider refuses it (`invalid_request`).",
            404: "There is no such agent or model for this key (`model_not_found`).",
        },
    )
    async def create_chat_completion(self, request: Request) -> Response:
        """Responds with the chat completion once the job has ended, however long that takes."""
        return await self._handler.respond(request, self._parse)

    async def _parse(self, request: Request, body: bytes) -> ParsedRequest:
        parsed = read_command(body, ChatCompletionRequest)
        options = parsed.stream_options
        if options is not None and not parsed.stream:
            message = "stream_options: is only allowed when `stream` is true"
            raise RequestError(
                400, "invalid_request", message, [FieldError(path="stream_options", message="needs `stream`")]
            )
        agent, model = self._handler.agent_of(request, parsed.model)
        job = job_of(parsed, options_of(request.headers, parsed.breakwater), agent, model)
        return ParsedRequest(job, _ChatAnswer(with_usage=options is not None and bool(options.include_usage)))


@dataclass(frozen=True, slots=True)
class _ChatAnswer:
    with_usage: bool

    def body(self, sent: Submission, result: dict[str, Any]) -> bytes:  # noqa: ARG002  its id is the provider's
        """Writes a `chat.completion`."""
        return orjson.dumps(completion_of(result))

    def encoder(self, sent: Submission) -> ChatEvents:
        """Returns an encoder of chunks."""
        return ChatEvents(sent.job_id, sent.job.model or sent.job.agent, with_usage=self.with_usage)

    def fails_in_stream(self, result: dict[str, Any]) -> bool:  # noqa: ARG002
        """Returns False: before the answer has begun, an error is a response with the error's status."""
        return False


class ChatEvents:
    """An encoder of `chat.completion.chunk`s."""

    keep_alive: ClassVar[bytes] = b": still here\n\n"

    def __init__(self, job_id: str, model: str, *, with_usage: bool) -> None:
        """Begins an answer.

        Args:
            job_id: names the answer if its provider gives it no id, which clients need in each chunk.
            model: the requested model, for chunks of a provider that names none.
            with_usage: the client has asked for the usage.
        """
        self._own_head = {"id": f"chatcmpl-{job_id}", "created": int(time.time()), "model": model}
        self._with_usage = with_usage
        self._sent = Assembly()
        self._usage_sent = False
        self._shared: dict[str, Any] = {}

    def events(self, chunks: Iterable[dict[str, Any]]) -> bytes:
        """Writes the chunks themselves."""
        return b"".join([b"data: %b\n\n" % orjson.dumps(chunk) for chunk in chunks if self._accept(chunk)])

    def _accept(self, chunk: dict[str, Any]) -> bool:
        """Adapts a chunk and records it as sent. Returns False if the client has not asked for it."""
        if self._shared and chunk.get("id") != self._shared.get("id"):
            # The chunk is from another attempt, which continues the answer. The client sees one answer.
            chunk |= self._shared
        elif not self._shared:
            chunk |= {name: value for name, value in self._own_head.items() if chunk.get(name) is None}
        chunk["object"] = OBJECT  # clients skip an object that is not a chunk
        self._sent.add(chunk)
        self._shared = self._shared or {name: chunk[name] for name in _SHARED_FIELDS if name in chunk}
        if self._with_usage:
            if (usage := chunk.get("usage")) is not None:
                if is_usage(usage):
                    self._usage_sent = True
                else:
                    chunk["usage"] = None
        elif "usage" in chunk:
            del chunk["usage"]
            return bool(chunk["choices"])
        return True

    def end(
        self, result: dict[str, Any] | None, *, complete: bool, error: Callable[[dict[str, Any] | None], bytes]
    ) -> bytes:
        """Writes the rest of the answer, the usage, and `[DONE]`; or an error."""
        if result is None or result["status"] != "succeeded":
            return _data(error(result))
        completion = completion_of(result)
        missing_chunks = [] if complete and self._sent.finished else missing_chunks_of(completion, self._sent)
        if missing_chunks is None:
            # The job was decided by another answer than the one that was begun here.
            return _data(error(None))
        if self._with_usage and not self._usage_sent and completion.get("usage") is not None:
            head = {name: completion.get(name) for name in ("id", "created", "model")} | dict(self._sent.head)
            missing_chunks.append({**head, "object": OBJECT, "choices": [], "usage": completion["usage"]})
        return self.events(missing_chunks) + _DONE


def _data(body: bytes) -> bytes:
    return b"data: %b\n\n" % body
