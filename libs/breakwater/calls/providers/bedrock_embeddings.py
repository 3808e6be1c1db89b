"""Embeddings of Bedrock, by `invoke`: Amazon's Titan and Cohere's models, each in a form of its own.

Requests and answers are translated from and to OpenAI's form. Fields that OpenAI lacks, such as Cohere's `input_type`,
go out as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from breakwater.calls.providers.base import Call, refusal_of
from breakwater.calls.providers.embeddings import EmbeddingsWire, ProviderEndpoint
from breakwater.dialects.rules.embeddings import inputs_of
from breakwater.jobs.rules.chat_messages import fields
from breakwater.prices.rules.usage import Usage

_OURS = frozenset({"model", "input", "encoding_format", "dimensions", "user"})
"""OpenAI's fields, which have other names there, or none."""
_TOKENS = "X-Amzn-Bedrock-Input-Token-Count"
_TITAN_TOKENS = "inputTextTokenCount"
_DOCUMENTS = "search_document"
"""The `input_type` of requests without one, which Cohere's models demand."""


@dataclass(frozen=True, slots=True)
class InvokedEmbeddings(EmbeddingsWire):
    """The embeddings of a model.

    Attributes:
        endpoint: the URLs of the models.
        is_titan: True for Amazon's Titan, False for Cohere's models.
    """

    endpoint: ProviderEndpoint
    is_titan: bool

    def body(self, call: Call) -> Mapping[str, Any]:
        """Returns the translated request. Raises CallError: its input is of tokens, or has too many texts."""
        assert call.native is not None
        texts = inputs_of(call.native)
        if not all(isinstance(text, str) for text in texts):
            raise refusal_of("Bedrock embeds texts, and no token ids", "input")
        further = {
            name: value for name, value in call.native.items() if name not in _OURS and name not in call.left_out
        }
        dimensions = call.native.get("dimensions")
        if self.is_titan:
            if len(texts) > 1:
                raise refusal_of("Titan embeds one text in a call: set max_inputs of its model to 1", "input")
            named = {} if dimensions is None else {"dimensions": dimensions}
            return {**further, **named, "inputText": texts[0]}
        named = {} if dimensions is None else {"output_dimension": dimensions}
        return {"input_type": _DOCUMENTS, **further, **named, "texts": texts, "embedding_types": ["float"]}

    def with_tokens(self, answer: dict[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
        """Returns an answer with its tokens, which only the headers of Cohere's models report."""
        tokens = headers.get(_TOKENS, "")
        return {_TITAN_TOKENS: int(tokens), **answer} if tokens.isascii() and tokens.isdigit() else answer

    def readable(self, answer: dict[str, Any], call: Call) -> dict[str, Any]:
        """Returns an answer in OpenAI's form, with packed vectors. Raises UnusableAnswerError."""
        return EmbeddingsWire.readable(self, {"model": call.model, **_as_list(answer)}, call)

    def usage(self, answer: Mapping[str, Any]) -> Usage:
        """Returns the tokens of the input."""
        return EmbeddingsWire.usage(self, answer if "data" in answer else _as_list(answer))


def _as_list(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an answer of Titan's or of Cohere's in OpenAI's form."""
    vectors = answer.get("embeddings")
    if "embedding" in answer:
        vectors = [answer["embedding"]]
    elif isinstance(vectors, dict):
        vectors = fields(vectors).get("float")
    tokens = answer.get(_TITAN_TOKENS)
    usage = {} if tokens is None else {"usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
    listed = cast(list[Any], vectors) if isinstance(vectors, list) else []
    return {"data": [{"embedding": vector} for vector in listed], **usage}
