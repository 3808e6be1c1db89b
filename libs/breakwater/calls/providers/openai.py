"""Any OpenAI-compatible HTTP endpoint: its chat completions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast
from urllib.parse import quote, urlsplit

from pydantic import Field, JsonValue

from breakwater.calls.providers.base import (
    ApiVersion,
    Call,
    HttpSettings,
    HttpUrl,
    Provider,
    StreamReader,
    UnusableAnswerError,
    Wire,
)
from breakwater.calls.providers.embeddings import EmbeddingsWire
from breakwater.calls.providers.responses import ResponsesWire
from breakwater.dialects.rules.chat_chunks import Assembly, Chunk
from breakwater.jobs.contract.execution import Choice
from breakwater.jobs.contract.job import CallApi
from breakwater.jobs.rules.chat_messages import OTHERS, fields, finish_reason, parts_of
from breakwater.prices.rules.price import OUTPUT_LIMITS
from breakwater.prices.rules.usage import Usage, of_completion
from breakwater.redaction.rules.redact import DEFAULT_REDACTION, RedactionRules


class OpenAISettings(HttpSettings):
    """Any OpenAI-compatible endpoint: OpenAI, Gemini, vLLM, Ollama, OpenRouter and others."""

    kind: Literal["openai"] = "openai"
    base_url: HttpUrl = Field(description="Up to and including /v1.")
    api: Literal["chat", "responses"] = Field(
        default="chat",
        description="`responses`: requests of the Responses API go to `<base_url>/responses` as they are; others are "
        "chat completions. `chat`: Responses are translated to chat completions.",
    )

    @property
    def apis(self) -> Collection[CallApi]:
        """Chat and embeddings, and Responses where the config says so."""
        return ("chat", "embeddings", "responses") if self.api == "responses" else ("chat", "embeddings")

    def open(self, redaction: RedactionRules = DEFAULT_REDACTION) -> Provider:
        """Makes the provider. Raises ConfigError."""
        from breakwater.calls.providers.http import HttpProvider

        chat = ChatCompletions(self.base_url)
        wires: dict[CallApi, Wire] = {
            "chat": chat,
            "embeddings": EmbeddingsWire(chat),
            "responses": ResponsesWire(chat),
        }
        return HttpProvider({api: wires[api] for api in self.apis}, self, redaction)


@dataclass(frozen=True, slots=True)
class ChatCompletions:
    """OpenAI's chat completions: `<base_url>/chat/completions`, with the key as a bearer token."""

    base_url: str
    _host: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_host", urlsplit(self.base_url).hostname or "")

    def url(self, model: str) -> str:
        """Of the chat completions."""
        return self.address("chat/completions", model)

    def address(self, operation: str, model: str) -> str:  # noqa: ARG002  it goes into the body
        """The same for every model."""
        return f"{self.base_url.rstrip('/')}/{operation}"

    def headers(self, key: str | None) -> Mapping[str, str]:
        """The bearer token."""
        return {} if key is None else {"Authorization": f"Bearer {key}"}

    def body(self, call: Call) -> Mapping[str, Any]:
        """Messages and params as they are; the answer's schema where the params don't set a format themselves."""
        body: dict[str, Any] = {**call.params, "model": call.model, "messages": call.messages}
        if call.output_schema is not None and "response_format" not in call.params:
            schema = {"name": "answer", "schema": call.output_schema, "strict": call.strict_output}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        # OpenAI's reasoning models refuse the old name, which other servers know alone; it knows the new for all.
        unknown = (*call.left_out, "max_tokens") if self._host == "api.openai.com" else call.left_out
        for refused, known in (OUTPUT_LIMITS, OUTPUT_LIMITS[::-1]) if unknown else ():
            if refused in body and refused in unknown and known not in unknown:
                limit = body.pop(refused)
                body.setdefault(known, limit)
        if call.streaming is not None:
            body["stream"] = True
            if "stream_options" not in call.left_out:
                body["stream_options"] = {"include_usage": True}
        return body

    def stream_reader(self, answer: Assembly) -> StreamReader:
        """Chunks are passed on as they are."""
        return _Chunks(answer)

    def usage(self, answer: Mapping[str, Any]) -> Usage | None:
        """Tokens of a completion."""
        return of_completion(answer, thinks_apart=self._host.endswith("perplexity.ai"))

    def choices(self, answer: Mapping[str, Any]) -> Sequence[Choice]:
        """All choices. Raises UnusableAnswerError."""
        found = answer.get("choices")
        if not isinstance(found, list) or not found:
            raise UnusableAnswerError("the answer has no choices")
        return [_choice(index, fields(one)) for index, one in enumerate(cast(list[Any], found))]


_BESIDE_TEXT = ("tool_calls", "function_call", "refusal", "audio", "images", OTHERS)
"""Fields of a message that say something without a text, or in addition to it."""


def _choice(index: int, choice: Mapping[str, Any]) -> Choice:
    said = dict(fields(choice.get("message")))
    reason = finish_reason(choice.get("finish_reason"))
    text, _, others = parts_of(said.get("content"))
    output: JsonValue = said if others or any(said.get(name) for name in _BESIDE_TEXT) else text or None
    return Choice(index=index, output=output, finish_reason=reason)


@dataclass(slots=True)
class _Chunks:
    _answer: Assembly
    done: bool = False

    @property
    def whole(self) -> bool:
        """Some servers send no `[DONE]`, and some no reason why the answer ended."""
        return self.done or self._answer.finished

    def read(self, event: Mapping[str, Any] | None) -> Iterable[Chunk]:
        """The chunk itself; an event without choices may have the usage, or mean nothing."""
        if event is None:
            self.done = True
            return ()
        return (event,) if isinstance(event.get("choices"), list) or event.get("usage") else ()

    def answer(self) -> dict[str, Any]:
        """A `chat.completion`."""
        return self._answer.completion()


class AzureSettings(HttpSettings):
    """An Azure OpenAI resource. Its models are named by their deployments."""

    kind: Literal["azure"]
    base_url: HttpUrl = Field(description="The resource, as in `https://NAME.openai.azure.com`.")
    api_version: ApiVersion = "2024-10-21"

    @property
    def apis(self) -> Collection[CallApi]:
        """Chat and embeddings."""
        return ("chat", "embeddings")

    def open(self, redaction: RedactionRules = DEFAULT_REDACTION) -> Provider:
        """Makes the provider. Raises ConfigError."""
        from breakwater.calls.providers.http import HttpProvider

        chat = AzureDeployments(self.base_url, self.api_version)
        return HttpProvider({"chat": chat, "embeddings": EmbeddingsWire(chat)}, self, redaction)


@dataclass(frozen=True, slots=True)
class AzureDeployments(ChatCompletions):
    """`<base_url>/openai/deployments/<model>/chat/completions`, with the key in a header of its own."""

    api_version: str

    def address(self, operation: str, model: str) -> str:
        """The deployment's own."""
        path = f"openai/deployments/{quote(model, safe='')}/{operation}"
        return f"{self.base_url.rstrip('/')}/{path}?api-version={self.api_version}"

    def headers(self, key: str | None) -> Mapping[str, str]:
        """The key."""
        return {} if key is None else {"api-key": key}
