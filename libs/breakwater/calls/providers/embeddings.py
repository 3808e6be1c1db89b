"""The embeddings of OpenAI-compatible endpoints: `<base_url>/embeddings`, and those of Azure's deployments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from breakwater.calls.providers.base import AnswerTooLargeError, Call, StreamReader, UnusableAnswerError
from breakwater.dialects.rules.chat_chunks import Assembly
from breakwater.dialects.rules.embeddings import BrokenEmbeddingsError, EmbeddingsTooLargeError, pack_vectors, summary
from breakwater.jobs.contract.execution import Choice
from breakwater.kernel.json_values import flaw_of
from breakwater.prices.rules.usage import Usage, model_of, of_embeddings

MAX_ANSWER_BYTES = 32 * 1024 * 1024
"""The size limit of an answer as JSON. A number in it has up to 22 characters, and packed at most 11."""


class ProviderEndpoint(Protocol):
    """The URLs of an API's operations, and its key."""

    def address(self, operation: str, model: str) -> str:
        """Returns the URL of an operation for a model."""
        ...

    def headers(self, key: str | None) -> Mapping[str, str]:
        """Returns the headers that identify the caller."""
        ...


@dataclass(frozen=True, slots=True)
class EmbeddingsWire:
    """OpenAI's embeddings, at the endpoint of its chat completions."""

    endpoint: ProviderEndpoint

    def url(self, model: str, *, streamed: bool = False) -> str:  # noqa: ARG002  they come whole
        """Returns the URL next to that of the chat completions."""
        return self.endpoint.address("embeddings", model)

    def headers(self, key: str | None) -> Mapping[str, str]:
        """Returns the headers of the chat completions."""
        return self.endpoint.headers(key)

    def body(self, call: Call) -> Mapping[str, Any]:
        """Returns the client's request, without `encoding_format` if the model only has floats."""
        assert call.native is not None
        omitted = {"encoding_format"}.intersection(call.left_out)
        return {**{name: value for name, value in call.native.items() if name not in omitted}, "model": call.model}

    def with_tokens(self, answer: dict[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:  # noqa: ARG002
        """Returns an answer with the tokens that its headers report; OpenAI's has its own."""
        return answer

    def readable(self, answer: dict[str, Any], call: Call) -> dict[str, Any]:
        """Returns an answer with a packed vector for each input, in order. Raises UnusableAnswerError."""
        assert call.native is not None
        try:
            packed_answer = pack_vectors(answer, call.native)
        except EmbeddingsTooLargeError as large:
            raise AnswerTooLargeError(str(large)) from large
        except BrokenEmbeddingsError as broken:
            raise UnusableAnswerError(str(broken)) from broken
        if (flaw := flaw_of(packed_answer)) is not None:
            raise UnusableAnswerError(f"the answer {flaw}")
        return packed_answer

    def usage(self, answer: Mapping[str, Any]) -> Usage:
        """Returns the tokens of the input."""
        return of_embeddings(answer) or Usage(None, 0, model=model_of(answer))

    def choices(self, answer: Mapping[str, Any]) -> Sequence[Choice]:
        """Returns one choice, with the number of embeddings of a packed answer, and their dimensions."""
        return [Choice(index=0, output=summary(answer))]

    def stream_reader(self, answer: Assembly) -> StreamReader:
        """Raises NotImplementedError: embeddings are never streamed."""
        raise NotImplementedError
