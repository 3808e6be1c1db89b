"""The embeddings of OpenAI-compatible endpoints: `<base_url>/embeddings`, and those of Azure's deployments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from breakwater.calls.providers.base import AnswerTooLargeError, Call, StreamReader, UnusableAnswerError
from breakwater.dialects.rules.chat_chunks import Assembly
from breakwater.dialects.rules.embeddings import BrokenEmbeddingsError, EmbeddingsTooLargeError, packed, summary
from breakwater.jobs.contract.execution import Choice
from breakwater.kernel.json_values import flaw_of
from breakwater.prices.rules.usage import Usage, model_of, of_embeddings

MAX_ANSWER_BYTES = 32 * 1024 * 1024
"""As JSON a number has up to 22 characters, and is packed into 11 at most."""


class ProviderEndpoint(Protocol):
    """Address and key of an API's operations."""

    def address(self, operation: str, model: str) -> str:
        """The URL of an operation for a model."""
        ...

    def headers(self, key: str | None) -> Mapping[str, str]:
        """Headers that identify the caller."""
        ...


@dataclass(frozen=True, slots=True)
class EmbeddingsWire:
    """OpenAI's embeddings, at the endpoint of its chat completions."""

    endpoint: ProviderEndpoint

    def url(self, model: str) -> str:
        """Next to the chat completions."""
        return self.endpoint.address("embeddings", model)

    def headers(self, key: str | None) -> Mapping[str, str]:
        """Those of the chat completions."""
        return self.endpoint.headers(key)

    def body(self, call: Call) -> Mapping[str, Any]:
        """The request as its client wrote it; without the form of the vectors where the model knows floats alone."""
        assert call.native is not None
        form = {"encoding_format"}.intersection(call.left_out)
        return {**{name: value for name, value in call.native.items() if name not in form}, "model": call.model}

    def packed(self, answer: Mapping[str, Any], call: Call) -> dict[str, Any]:
        """The answer with a packed vector for each input, in their order. Raises UnusableAnswerError."""
        assert call.native is not None
        try:
            found = packed(answer, call.native)
        except EmbeddingsTooLargeError as large:
            raise AnswerTooLargeError(str(large)) from large
        except BrokenEmbeddingsError as broken:
            raise UnusableAnswerError(str(broken)) from broken
        if (flaw := flaw_of(found)) is not None:
            raise UnusableAnswerError(f"the answer {flaw}")
        return found

    def usage(self, answer: Mapping[str, Any]) -> Usage:
        """Tokens of the input."""
        return of_embeddings(answer) or Usage(None, 0, model=model_of(answer))

    def choices(self, answer: Mapping[str, Any]) -> Sequence[Choice]:
        """The number of embeddings of a packed answer, and of their dimensions."""
        return [Choice(index=0, output=summary(answer))]

    def stream_reader(self, answer: Assembly) -> StreamReader:
        """Embeddings come whole."""
        raise NotImplementedError
