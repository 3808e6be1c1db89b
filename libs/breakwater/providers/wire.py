"""What sets one HTTP API apart from another: where a call goes, how it is written, and how an answer is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from pydantic import JsonValue

from breakwater.policy.classify import HttpFailure
from breakwater.policy.price import Usage
from breakwater.providers.base import Call, CallFailed


class UnusableAnswerError(Exception):
    """A 200 that says nothing; its text says what is missing."""


class Wire(Protocol):
    """An HTTP API, as pure functions of values; `breakwater.providers.http` does the rest."""

    def url(self, model: str) -> str:
        """Where a call for a model goes, percent-encoded."""
        ...

    def headers(self, key: str | None) -> Mapping[str, str]:
        """What shows who calls."""
        ...

    def body(self, call: Call) -> Mapping[str, Any]:
        """The request.

        Raises:
            CallFailed: the call asks for what the API does not know (see `refused`).
        """
        ...

    def usage(self, answer: Mapping[str, Any]) -> Usage | None:
        """The tokens that an answer reports; None where it reports none."""
        ...

    def output(self, answer: Mapping[str, Any]) -> JsonValue:
        """The text of an answer, or the whole assistant message in OpenAI's format where it calls tools.

        Raises:
            UnusableAnswerError: there is none.
        """
        ...


def refused(text: str) -> CallFailed:
    """A request that the provider would not take; it is not made."""
    return CallFailed(HttpFailure(400, text, "unsupported_parameter", "invalid_request_error"), maybe_billed=False)


def count(value: Any) -> int | None:
    """A number of tokens; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def fields(value: Any) -> Mapping[str, Any]:
    """A JSON object; empty where there is something else."""
    return value if isinstance(value, dict) else {}
