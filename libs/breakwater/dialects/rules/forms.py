"""Forms of another API's request: as a chat, and as a provider of the same API gets it."""

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
"""Of a conversation without a message in its chat form."""


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
        unpriced: fields that may cost more than their own tokens: refused where a cap has to hold.
        names: fields of the body that messages and params come from, where those are called otherwise.
    """

    messages: list[dict[str, JsonValue]]
    params: dict[str, JsonValue] = field(default_factory=dict[str, JsonValue])
    losses: tuple[FieldError, ...] = ()
    unpriced: tuple[FieldError, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict[str, str])

    def in_body(self, path: str) -> str:
        """The field of the body that a place in messages or params comes from."""
        return self.names.get(re.split(r"[.\[]", path)[0], path)


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

    def size_of(self, body: Body) -> InputSize:
        """Size of all that a valid body sends, as `native_body` makes it."""
        ...
