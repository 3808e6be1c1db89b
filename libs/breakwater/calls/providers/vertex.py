"""Google's Vertex AI: Claude by its own API, all other models by the OpenAI-compatible endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from breakwater.calls.providers.anthropic import Messages, NativeMessages
from breakwater.calls.providers.base import Call, Wire
from breakwater.calls.providers.openai import ChatCompletions
from breakwater.calls.providers.settings import is_claude
from breakwater.jobs.contract.job import CallApi

ANTHROPIC_VERSION = "vertex-2023-10-16"


_EFFORTS = {"none": "minimal", "xhigh": "high", "max": "high"}
"""Efforts that Google's endpoint refuses, and the nearest that it has."""


class VertexChats(ChatCompletions):
    """`<base_url>/endpoints/openapi/chat/completions`. Models without a publisher are Google's."""

    def body(self, call: Call) -> Mapping[str, Any]:
        """Returns the chat, with the model's publisher, and for Google's models with an effort that they have."""
        body = ChatCompletions.body(self, call)
        model = call.model if "/" in call.model else f"google/{call.model}"
        effort = body.get("reasoning_effort")
        if effort in _EFFORTS and model.startswith("google/"):
            body = {**body, "reasoning_effort": _EFFORTS[effort]}
        return {**body, "model": model}


class _AsPrediction(Messages):
    """Messages as predictions: the URL has the model, and the body the version."""

    def url(self, model: str, *, streamed: bool = False) -> str:
        """Returns the URL of the model's prediction, of another operation for a stream."""
        operation = "streamRawPredict" if streamed else "rawPredict"
        name = quote(model.removeprefix("anthropic/"), safe="@")
        return f"{self.base_url.rstrip('/')}/publishers/anthropic/models/{name}:{operation}"

    def headers(self, key: str | None) -> Mapping[str, str]:
        """Returns the key as a bearer token."""
        return {} if key is None else {"Authorization": f"Bearer {key}"}


def _prediction(body: Mapping[str, Any], version: str) -> dict[str, Any]:
    return {"anthropic_version": version, **{name: value for name, value in body.items() if name != "model"}}


class VertexMessages(_AsPrediction):
    """Chats with Claude, which are translated to Messages."""

    def body(self, call: Call) -> Mapping[str, Any]:
        """Returns the translated call. Raises CallError."""
        return _prediction(Messages.body(self, call), self.version)


class VertexNativeMessages(_AsPrediction, NativeMessages):
    """Native requests for Claude, which go out as they are, but for the model and the version."""

    def body(self, call: Call) -> Mapping[str, Any]:
        """Returns the native request."""
        return _prediction(NativeMessages.body(self, call), self.version)


@dataclass(frozen=True, slots=True)
class VertexWires:
    """The APIs of each model.

    Attributes:
        base_url: the URL of the location, with its version and project.
    """

    base_url: str

    def __call__(self, model: str) -> Mapping[CallApi, Wire]:
        """Returns the APIs of a model."""
        if is_claude(model):
            chats: Wire = VertexMessages(self.base_url, ANTHROPIC_VERSION)
            return {"chat": chats, "messages": VertexNativeMessages(self.base_url, ANTHROPIC_VERSION)}
        return {"chat": VertexChats(f"{self.base_url.rstrip('/')}/endpoints/openapi")}
