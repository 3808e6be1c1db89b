"""The forms of another API's request: as a chat, and as a provider of the same API gets it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pydantic import JsonValue

from breakwater.kernel.errors import BreakwaterError
from breakwater.kernel.validation import FieldError
from breakwater.prices.rules.price import InputSize

Body = Mapping[str, JsonValue]


EMPTY = "has no content that can be translated to a chat"
"""The loss of a conversation whose chat form has no message."""


class InvalidBodyError(BreakwaterError):
    """A body can't be read as a request of its API. `problem` names the field as the body does."""

    def __init__(self, problem: FieldError) -> None:
        super().__init__(f"{problem.path}: {problem.message}")
        self.problem = problem


@dataclass(frozen=True, slots=True)
class ChatForm:
    """A body as a chat completion: estimates, guards and records use it, and providers of another API get it.

    Attributes:
        messages: the conversation in OpenAI's chat format.
        params: the chat's params, such as `max_completion_tokens` and `tools`.
        losses: fields that a chat can't express. A translated call is refused for the first of them.
        unpriced: fields that may cost more than their own tokens. They are refused where a hard limit applies.
        names: the body's names for messages and params that it calls something else.
    """

    messages: list[dict[str, JsonValue]]
    params: dict[str, JsonValue] = field(default_factory=dict[str, JsonValue])
    losses: tuple[FieldError, ...] = ()
    unpriced: tuple[FieldError, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict[str, str])

    def in_body(self, path: str) -> str:
        """Returns the field of the body that a place in messages or params comes from."""
        return self.names.get(re.split(r"[.\[]", path)[0], path)


class Dialect(Protocol):
    """The pure rules of one API's requests."""

    def chat_form(self, body: Body) -> ChatForm:
        """Returns the body as a chat. Raises InvalidBodyError."""
        ...

    def native_body(
        self, body: Body, *, params: Body, max_tokens: int, system_prompt: str | None
    ) -> Mapping[str, JsonValue]:
        """Returns the body for a provider of the same API, without its model.

        Args:
            body: the body as the client wrote it.
            params: the agent's params, for those that the body lacks.
            max_tokens: the limit of output tokens; the body's own limit applies if it is lower.
            system_prompt: the agent's system prompt, for a body without one.
        """
        ...

    def size_of(self, body: Body) -> InputSize:
        """Returns the size of everything that a valid body sends, as `native_body` makes it."""
        ...
