"""Bodies of other APIs: their chat forms, and the bodies that providers of the same API get. One file per API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pydantic import JsonValue

from breakwater.contracts.job import Job, NativeRequest, RequestApi
from breakwater.contracts.validation import FieldError
from breakwater.errors import BreakwaterError

Body = Mapping[str, JsonValue]


class InvalidBodyError(BreakwaterError):
    """A body can't be read as a request of its API. `problem` names the field in the body's own words."""

    def __init__(self, problem: FieldError) -> None:
        super().__init__(f"{problem.path}: {problem.message}")
        self.problem = problem


@dataclass(frozen=True, slots=True)
class ChatForm:
    """A body as a chat completion: estimates, guards and records use it, and providers of another API get it.

    Attributes:
        messages: the conversation in OpenAI's chat format.
        params: of the chat, such as `max_completion_tokens` and `tools`.
        losses: fields that a chat can't express: a translated call is refused for the first of them.
        unpriced: fields that may cost more than tokens, or are unknown: refused where a hard cap has to hold.
    """

    messages: list[dict[str, JsonValue]]
    params: dict[str, JsonValue] = field(default_factory=dict[str, JsonValue])
    losses: tuple[FieldError, ...] = ()
    unpriced: tuple[FieldError, ...] = ()


class Dialect(Protocol):
    """The pure rules of one API's requests."""

    def chat_form(self, body: Body) -> ChatForm:
        """The body as a chat. Raises InvalidBodyError."""
        ...

    def native_body(
        self, body: Body, *, params: Body, max_tokens: int, system_prompt: str | None
    ) -> Mapping[str, JsonValue]:
        """The body that a provider of the same API gets, without its model.

        Args:
            body: as the client wrote it.
            params: of the agent, for those that the body lacks.
            max_tokens: the most output; the body's own limit where that is lower.
            system_prompt: of the agent, for a body without one.
        """
        ...


DIALECTS: Mapping[RequestApi, Dialect] = {}


def chat_form(request: NativeRequest) -> ChatForm:
    """The chat form of a request, computed once. Raises InvalidBodyError."""
    return request.derived(lambda one: DIALECTS[one.api].chat_form(one.body))


def conversation_of(job: Job) -> list[dict[str, JsonValue]]:
    """The conversation of a job in OpenAI's chat format; empty for a job with `input`."""
    return job.chat_messages() if job.api_request is None else chat_form(job.api_request).messages


def params_of(job: Job) -> dict[str, JsonValue]:
    """The params of a job, in the words of a chat."""
    return job.params if job.api_request is None else chat_form(job.api_request).params
