"""OpenAI-compatible HTTP endpoints: their settings and chat completions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import quote, urlsplit

from pydantic import JsonValue

from breakwater.calls.providers.base import Call, StreamReader, UnusableAnswerError, Wire
from breakwater.calls.providers.embeddings import EmbeddingsWire
from breakwater.calls.providers.responses import ResponsesWire
from breakwater.dialects.rules.chat_chunks import Assembly, Chunk
from breakwater.jobs.contract.execution import Choice
from breakwater.jobs.contract.job import CallApi
from breakwater.jobs.rules.chat_messages import OTHERS, fields, finish_reason, parts_of
from breakwater.kernel.types import unchecked
from breakwater.prices.rules.price import OUTPUT_LIMITS
from breakwater.prices.rules.usage import Usage, of_completion


@dataclass(frozen=True, slots=True)
class ChatCompletions:
    """OpenAI's chat completions: `<base_url>/chat/completions`, with the key as a bearer token."""

    base_url: str
    _host: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_host", urlsplit(self.base_url).hostname or "")

    def url(self, model: str, *, streamed: bool = False) -> str:  # noqa: ARG002  the body says it
        """Returns the URL of the chat completions."""
        return self.address("chat/completions", model)

    def address(self, operation: str, model: str) -> str:  # noqa: ARG002  it goes into the body
        """Returns the URL of an operation, which is the same for every model."""
        return f"{self.base_url.rstrip('/')}/{operation}"

    def headers(self, key: str | None) -> Mapping[str, str]:
        """Returns the key as a bearer token."""
        return {} if key is None else {"Authorization": f"Bearer {key}"}

    def body(self, call: Call) -> Mapping[str, Any]:
        """Returns the messages and params as they are, with the answer's schema if the params set no format."""
        body: dict[str, Any] = {**call.params, "model": call.model, "messages": call.messages}
        if call.output_schema is not None and "response_format" not in call.params:
            schema = {"name": "answer", "schema": call.output_schema, "strict": call.strict_output}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        # OpenAI's reasoning models refuse `max_tokens`, the only name that other servers know. OpenAI knows the other
        # name for all models.
        unknown = (*call.left_out, "max_tokens") if self._host == "api.openai.com" else call.left_out
        for refused_name, accepted_name in (OUTPUT_LIMITS, OUTPUT_LIMITS[::-1]) if unknown else ():
            if refused_name in body and refused_name in unknown and accepted_name not in unknown:
                limit = body.pop(refused_name)
                body.setdefault(accepted_name, limit)
        if call.streaming is not None:
            body["stream"] = True
            if "stream_options" not in call.left_out:
                body["stream_options"] = {"include_usage": True}
        return body

    def stream_reader(self, answer: Assembly) -> StreamReader:
        """Returns a reader that passes on chunks as they are."""
        return _Chunks(answer)

    def readable(self, answer: dict[str, Any], call: Call) -> dict[str, Any]:  # noqa: ARG002  it stays as it is
        """Returns the answer as it is."""
        return answer

    def usage(self, answer: Mapping[str, Any]) -> Usage | None:
        """Returns the tokens of a completion."""
        return of_completion(answer, thinks_apart=self._host.endswith("perplexity.ai"))

    def choices(self, answer: Mapping[str, Any]) -> Sequence[Choice]:
        """Returns all choices. Raises UnusableAnswerError."""
        choices = answer.get("choices")
        if not isinstance(choices, list) or not choices:
            raise UnusableAnswerError("the answer has no choices")
        return [_choice(index, fields(choice)) for index, choice in enumerate(cast(list[Any], choices))]


_FIELDS_BESIDE_TEXT = ("tool_calls", "function_call", "refusal", "audio", "images", OTHERS)
"""Fields of a message that have content in addition to its text."""


def _choice(index: int, choice: Mapping[str, Any]) -> Choice:
    message = dict(fields(choice.get("message")))
    reason = finish_reason(choice.get("finish_reason"))
    text, _, other_parts = parts_of(message.get("content"))
    output: JsonValue = (
        message if other_parts or any(message.get(name) for name in _FIELDS_BESIDE_TEXT) else text or None
    )
    return _made_choice(index=index, output=output, finish_reason=reason)


_made_choice = unchecked(Choice)


@dataclass(slots=True)
class _Chunks:
    _answer: Assembly
    ended: bool = False

    @property
    def whole(self) -> bool:
        """Returns True after `[DONE]` or all finish reasons, as some servers send only one of them."""
        return self.ended or self._answer.finished

    def read(self, event: Mapping[str, Any] | None) -> Iterable[Chunk]:
        """Returns the chunk itself. An event without choices and usage has none."""
        if event is None:
            self.ended = True
            return ()
        return (event,) if isinstance(event.get("choices"), list) or event.get("usage") else ()

    def answer(self) -> dict[str, Any]:
        """Returns a `chat.completion`."""
        return self._answer.completion()


@dataclass(frozen=True, slots=True)
class AzureDeployments(ChatCompletions):
    """`<base_url>/openai/deployments/<model>/chat/completions`, with the key in a header of its own."""

    api_version: str

    def address(self, operation: str, model: str) -> str:
        """Returns the URL of the deployment."""
        path = f"openai/deployments/{quote(model, safe='')}/{operation}"
        return f"{self.base_url.rstrip('/')}/{path}?api-version={self.api_version}"

    def headers(self, key: str | None) -> Mapping[str, str]:
        """Returns the key in its header."""
        return {} if key is None else {"api-key": key}


class AzureV1(ChatCompletions):
    """`<base_url>/openai/v1/chat/completions`, with the deployment as the model."""

    def headers(self, key: str | None) -> Mapping[str, str]:
        """Returns the key in its header."""
        return {} if key is None else {"api-key": key}


def openai_wires(base_url: str) -> dict[CallApi, Wire]:
    """Returns the APIs of an OpenAI-compatible endpoint."""
    chat = ChatCompletions(base_url)
    return {"chat": chat, "embeddings": EmbeddingsWire(chat), "responses": ResponsesWire(chat)}


def azure_wires(base_url: str, api_version: str | None) -> dict[CallApi, Wire]:
    """Returns the APIs of an Azure OpenAI resource; without a version, those of its `v1`, whose paths are OpenAI's."""
    if api_version is None:
        chat = AzureV1(f"{base_url.rstrip('/')}/openai/v1")
        return {"chat": chat, "embeddings": EmbeddingsWire(chat), "responses": ResponsesWire(chat)}
    dated = AzureDeployments(base_url, api_version)
    return {"chat": dated, "embeddings": EmbeddingsWire(dated)}
