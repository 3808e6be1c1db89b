"""OpenAI's embeddings on the wire, and Azure's: reading a request, and vectors that depend on model and input alone."""

from __future__ import annotations

import math
from array import array
from base64 import b64encode
from hashlib import shake_256
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from breakwater.local.provider.behaviour import CHARS_PER_TOKEN, ChatRequest, ScriptedAnswer
from breakwater.local.provider.openai import Azure, OpenAI

MAX_INPUTS = 2048
DECIMALS = 8
_NUMBERS = [byte - 127.5 for byte in range(256)]
_SQUARES = [number * number for number in _NUMBERS]

_Text = Annotated[str, Field(min_length=1)]
_Tokens = Annotated[list[int], Field(min_length=1)]
_Inputs = Annotated[list[_Text] | list[_Tokens], Field(min_length=1, max_length=MAX_INPUTS)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    model: Annotated[str, Field(min_length=1)]
    input: _Text | _Tokens | _Inputs
    dimensions: Annotated[int, Field(strict=True, ge=1)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    user: str | None = None


class Embeddings(OpenAI):
    """OpenAI's embeddings: a scripted answer has no text, and only its input is billed."""

    def parse(self, content: Any) -> ChatRequest:
        """Reads a body, whose inputs are messages of the user. Raises ValidationError."""
        body = _Body.model_validate(content)
        several = isinstance(body.input, list) and not isinstance(body.input[0], int)
        inputs = body.input if several else [body.input]
        # An input of token ids costs as much as the text that they encode.
        texts = [text if isinstance(text, str) else " " * len(text) * CHARS_PER_TOKEN for text in inputs]  # pyright: ignore[reportArgumentType]
        return ChatRequest.model_validate(
            {
                "model": body.model,
                "messages": [{"role": "user", "content": text} for text in texts],
                "embeds": [str(text_or_tokens) for text_or_tokens in inputs],
                "body": content,
            }
        )

    def response_body(self, answer: ScriptedAnswer) -> dict[str, Any]:
        """Returns an answer as a list of `embedding` objects."""
        body = answer.request.body
        dimensions = body.get("dimensions") or answer.dimensions
        data: list[dict[str, Any]] = []
        for index, text in enumerate(answer.request.embeds if answer.choices else ()):
            vector = vector_of(answer.model, text, dimensions)
            encoded = b64encode(array("f", vector)).decode() if body.get("encoding_format") == "base64" else vector
            data.append({"object": "embedding", "index": index, "embedding": encoded})
        tokens = answer.shown_usage and answer.shown_usage.input_tokens
        usage = {} if tokens is None else {"usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
        return {"object": "list", "data": data, "model": answer.model, **usage}


class AzureEmbeddings(Azure, Embeddings):
    """Azure's deployments of embedding models."""


def vector_of(model: str, text: str, dimensions: int) -> list[float]:
    """Returns a vector of length 1; with fewer dimensions, one that points in the same direction in these."""
    drawn = shake_256(f"{model}\n{text}".encode()).digest(dimensions)
    scale = 1 / math.sqrt(sum(map(_SQUARES.__getitem__, drawn)))
    # 256 roundings instead of one for each dimension, which would be most of the time of a batch.
    numbers = [round(number * scale, DECIMALS) for number in _NUMBERS]
    return list(map(numbers.__getitem__, drawn))
