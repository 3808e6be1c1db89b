"""What every provider offers, and how it tells that a call failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pydantic import JsonValue

from breakwater.policy.classify import Failure
from breakwater.policy.price import Usage


@dataclass(frozen=True, slots=True)
class Call:
    """One attempt to make."""

    attempt_id: str
    model: str
    messages: Sequence[Mapping[str, JsonValue]]
    params: Mapping[str, JsonValue]
    timeout_s: float
    traceparent: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model said. `output` is its text, or the whole assistant message where it calls tools."""

    output: JsonValue
    usage: Usage


class CallFailed(Exception):  # noqa: N818  what happened, in the field's words
    """The call gave no usable answer.

    Attributes:
        failure: what happened, for `policy.classify`.
        maybe_billed: the request may have reached a model, so that the provider may bill for it.
    """

    def __init__(self, failure: Failure, *, maybe_billed: bool) -> None:
        super().__init__(str(failure))
        self.failure = failure
        self.maybe_billed = maybe_billed


class Provider(Protocol):
    """Performs attempts."""

    async def perform(self, call: Call) -> Answer:
        """Makes the call once. Raises CallFailed, and nothing else."""
        ...

    async def close(self) -> None:
        """Frees connections."""
        ...
