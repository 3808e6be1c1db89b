"""OpenAI's embeddings: checks and sizes of requests, the order of answers, and a compact form of their vectors.

A vector as JSON is long, and slow to copy. Between the provider and the client, each vector is one text: the provider's
base64 unchanged, or the base64 of its numbers, in 32 bits each if that is exact, and otherwise in 64. So a client gets
exactly the numbers that the provider wrote.
"""

from __future__ import annotations

import binascii
import math
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from pydantic import JsonValue

from breakwater.dialects.rules.forms import Body, ChatForm, InvalidBodyError
from breakwater.jobs.rules.chat_messages import encode_json, fields
from breakwater.kernel.errors import BreakwaterError
from breakwater.kernel.validation import FieldError
from breakwater.prices.rules.price import InputSize, size_of_inputs, size_of_params
from breakwater.prices.rules.usage import figure

PARAMS = frozenset(
    {
        "dimensions", "encoding_format", "input_type", "instruction", "late_chunking", "normalized", "output_dimension",
        "output_dtype", "prompt_name", "task", "truncate", "truncate_prompt_tokens", "truncation", "user",
    }
)  # fmt: skip
"""Fields of OpenAI, and of makers and servers with a compatible API, that cost nothing but tokens."""
_ONCE = PARAMS - {"input_type", "instruction", "prompt_name", "task"}
"""Those of them that put no text in front of each input."""
PROMPT_TOKENS = 32
"""The most tokens of a prompt that a request only names, such as "Represent the query for retrieving documents"."""
INHERITED = PARAMS - {"encoding_format"}
"""Params of an agent that its requests get. The client chooses the encoding of the vectors, as it reads them."""

MAX_VECTOR_BYTES = 5_500_000
"""The size limit of an answer's packed vectors. NATS servers accept messages of 8 MB, and encryption adds a third."""

MAX_BATCHES = 100
"""The most calls of one job. Each is an attempt in its result, which must have room for the vectors, too."""

_FLOAT32 = "float32"
_FLOAT64 = "float64"
_CODES = {_FLOAT32: "f", _FLOAT64: "d"}
_TRIED_FIRST = 8
"""The numbers of a vector that are tried in 32 bits before the others."""
_FORMS = ("float", "base64")
_INPUT = "must be a text, a list of texts, a list of token ids, or a list of lists of token ids"


class BrokenEmbeddingsError(BreakwaterError):
    """An answer can't be used. The message says why, without the provider's text."""


class EmbeddingsTooLargeError(BrokenEmbeddingsError):
    """An answer has more vectors than can be stored."""


def chat_form(body: Body) -> ChatForm:
    """Returns the form of a request that can't become a chat. Raises InvalidBodyError."""
    if (problem := request_objection(body)) is not None:
        raise InvalidBodyError(problem)
    params = {name: value for name, value in body.items() if name != "input"}
    unknown = (FieldError(name, "is not known to cost tokens alone") for name in params if name not in PARAMS)
    return ChatForm([], params, (FieldError("input", "is to be embedded, which a chat can't do"),), tuple(unknown))


def native_body(body: Body, *, params: Body, max_tokens: int = 0, system_prompt: str | None = None) -> Body:
    """Returns the body for a provider, without its model."""
    del max_tokens, system_prompt
    return {name: value for name, value in params.items() if name in INHERITED} | dict(body)


def request_objection(body: Body) -> FieldError | None:
    """Returns why a request is invalid; None if it is valid."""
    request_input = body.get("input")
    if request_input is None:
        return FieldError("input", "is missing")
    if request_input in ([], {}):
        return FieldError("input", "is empty")
    if not isinstance(request_input, str) and (not isinstance(request_input, list) or _kind(request_input) is None):
        return FieldError("input", _INPUT)
    dimensions = body.get("dimensions")
    if dimensions is not None and (not isinstance(dimensions, int) or isinstance(dimensions, bool) or dimensions < 1):
        return FieldError("dimensions", "must be a whole number from 1")
    encoding_format = body.get("encoding_format")
    if encoding_format is not None and encoding_format not in _FORMS:
        return FieldError("encoding_format", "must be `float` or `base64`")
    return None


def _kind(items: Sequence[Any]) -> type | None:
    """Returns the type of all items of an input: `str`, `int` for token ids, or `list` for lists of token ids.

    None if the items are of any other type, or of several.
    """
    kinds = set(map(type, items))
    if kinds in ({str}, {int}):
        return kinds.pop()
    return list if kinds == {list} and all(set(map(type, item)) == {int} for item in items) else None


def inputs_of(body: Body) -> list[str | list[int]]:
    """Returns the inputs of a valid request, each a text or a list of token ids. Each gets an embedding."""
    request_input = cast(Any, body["input"])
    return [request_input] if isinstance(request_input, str) or isinstance(request_input[0], int) else request_input


def size_of(body: Body) -> InputSize:
    """Returns the size of what a valid request sends.

    A server may put an instruction, or a prompt that the request names, in front of each input.
    """
    inputs = inputs_of(body)
    prompts = {name: value for name, value in body.items() if name != "input" and name not in _ONCE}
    once = {name: value for name, value in body.items() if name in _ONCE}
    size = size_of_inputs(inputs) + size_of_params(once)
    if not prompts:
        return size
    return size + InputSize(signs=len(inputs) * (len(encode_json(prompts)) + PROMPT_TOKENS))


def of_floats(body: Body) -> bool:
    """Returns True if the vectors are floats, and not quantized to bytes or bits by Voyage's `output_dtype`."""
    return body.get("output_dtype") in {None, "float"}


def fallback_objection(lengths: Mapping[str, int | None]) -> str | None:
    """Returns why models can't stand in for one another; None if they can, or there is only one.

    Args:
        lengths: the declared dimensions of each model of a chain; None for a model that declares none.
    """
    if len(lengths) < 2:
        return None
    undeclared = next((model for model, length in lengths.items() if length is None), None)
    if undeclared is not None:
        return f"a fallback needs the same dimensions; set models.{undeclared}.dimensions"
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"models.{model}.dimensions is {length}" for model, length in lengths.items())
        return f"a fallback needs the same dimensions, and {listed}"
    return None


def recorded_input(body: Body) -> JsonValue:
    """Returns the inputs as a record has them, before redaction.

    Token ids are replaced by their number, as no redaction rule would find the text in them.
    """
    inputs = inputs_of(body)
    texts: list[JsonValue] = [item if isinstance(item, str) else f"{len(item)} token ids" for item in inputs]
    return texts[0] if isinstance(body["input"], str) else texts


def dimensions_of(body: Body, declared: int | None) -> int | None:
    """Returns the dimensions that vectors must have: those of the request, or else those declared for the model.

    None if neither is known, or the vectors are quantized.
    """
    return (cast(int | None, body.get("dimensions")) or declared) if of_floats(body) else None


def too_many(body: Body, declared: int | None) -> FieldError | None:
    """Returns why the answer to a request would be too large; None if it would not, or that is unknown.

    Args:
        body: the body of the request.
        declared: the declared dimensions of the model.
    """
    dimensions = dimensions_of(body, declared)
    bytes_each = 4 if body.get("encoding_format") == "base64" else 8
    max_vectors = None if dimensions is None else MAX_VECTOR_BYTES // _base64_length(dimensions * bytes_each)
    if max_vectors is None or (count := len(inputs_of(body))) <= max_vectors:
        return None
    problem = f"has {count} inputs; at most {max_vectors} vectors of {dimensions} dimensions fit into an answer"
    return FieldError("input", f"{problem}: send fewer in a request")


def too_many_batches(body: Body, max_inputs: int | None) -> FieldError | None:
    """Returns why a request needs too many calls; None if it does not.

    Args:
        body: the body of the request.
        max_inputs: the most inputs of one call.
    """
    if max_inputs is None or (count := len(inputs_of(body))) <= max_inputs * MAX_BATCHES:
        return None
    problem = f"has {count} inputs; at most {max_inputs * MAX_BATCHES} can be embedded, {max_inputs} in each call"
    return FieldError("input", f"{problem}: send fewer in a request")


def form_refused(body: Body, status: int | None, param: str | None, text: str) -> bool:
    """Returns True if a provider refuses a request for the encoding of the vectors, which can be translated.

    Args:
        body: the body of the request.
        status: the HTTP status of the error.
        param: the field at fault; None if the provider does not name it.
        text: the text of the error.
    """
    if status not in {400, 415, 422} or body.get("encoding_format") is None:
        return False
    return (param or "").startswith("encoding_format") or _OF_FORM.search(text) is not None


_OF_FORM = re.compile(r"encoding[ _-]?format|\bbase[ -]?64\b", re.I)


def _base64_length(size: int) -> int:
    return (size + 2) // 3 * 4


# Answers


def pack_vectors(answer: Mapping[str, Any], body: Body) -> dict[str, Any]:
    """Returns an answer with its embeddings in the order of the inputs, and their vectors packed.

    Args:
        answer: the answer as the provider sent it.
        body: the body of the request.

    Raises:
        BrokenEmbeddingsError: embeddings are missing, or are not vectors.
    """
    data = answer.get("data")
    count = len(inputs_of(body))
    if not isinstance(data, list) or not data:
        raise BrokenEmbeddingsError("the answer has no embeddings")
    items = [dict(fields(item)) for item in cast(list[Any], data)]
    if len(items) != count:
        raise BrokenEmbeddingsError(f"the answer has {len(items)} embeddings for {count} inputs")
    if any(item.get("index") is not None for item in items):
        by_index = {item["index"]: item for item in items if isinstance(item.get("index"), int)}
        if by_index.keys() != set(range(count)):
            raise BrokenEmbeddingsError("the indices of the embeddings are not those of the inputs")
        items = [by_index[index] for index in range(count)]
    for index, item in enumerate(items):
        vector = _pack(item.get("embedding"), f"the embedding of input {index} ", body)
        item.update(object="embedding", index=index, embedding=vector)
    check_together(items)
    answer_fields = {name: value for name, value in answer.items() if name != "usage" or value is not None}
    return {"object": "list", **answer_fields, "data": items}


def check_together(items: Iterable[Mapping[str, Any]]) -> None:
    """Checks that packed vectors have the same length and fit into a result. Raises BrokenEmbeddingsError."""
    size = 0
    lengths = set[int]()
    for item in items:
        lengths.add(_length(item["embedding"]))
        size += _stored_bytes(item["embedding"])
    if len(lengths) > 1:
        raise BrokenEmbeddingsError(f"the embeddings have different lengths: {min(lengths)} to {max(lengths)}")
    if size > MAX_VECTOR_BYTES:
        words = f"the embeddings have {size} bytes; at most {MAX_VECTOR_BYTES} can be stored"
        raise EmbeddingsTooLargeError(f"{words}: send fewer inputs in a request")


def usage_of_all(usages: Iterable[Any]) -> dict[str, int] | None:
    """Returns the sum of the usages of several answers; None if one of them has none."""
    total: dict[str, int] = {}
    for usage in map(fields, usages):
        for name in ("prompt_tokens", "total_tokens"):
            count = figure(usage.get(name))
            if count is None:
                return None
            total[name] = total.get(name, 0) + count
    return total or None


def _pack(vector: Any, broken: str, body: Body) -> Any:
    """Packs a vector as a base64 text, `{"float32": …}` or `{"float64": …}`. A vector of integers stays a list."""
    if isinstance(vector, str) and vector:
        try:
            raw = binascii.a2b_base64(vector, strict_mode=True)
            total = sum(_numbers(_FLOAT32, raw)) if of_floats(body) else 0
        except (ValueError, struct.error):
            raise BrokenEmbeddingsError(f"{broken}is not the base64 of 32-bit numbers") from None
        if not math.isfinite(total):
            raise BrokenEmbeddingsError(f"{broken}has a value that is no number")
        return vector
    if not isinstance(vector, list) or not vector:
        raise BrokenEmbeddingsError(f"{broken}is missing")
    numbers = cast(list[Any], vector)
    try:
        total = sum(numbers)
        if not math.isfinite(total) and not all(map(math.isfinite, numbers)):
            raise BrokenEmbeddingsError(f"{broken}has a value that is no number")
        if body.get("encoding_format") == "base64":
            return _base64(_bytes(_FLOAT32, numbers))  # the provider only has floats
        if type(total) is int and set(map(type, numbers)) == {int}:
            return numbers
        if _in_32_bits(numbers[:_TRIED_FIRST]) is not None and (raw := _in_32_bits(numbers)) is not None:
            return {_FLOAT32: _base64(raw)}
        return {_FLOAT64: _base64(_bytes(_FLOAT64, numbers))}
    except (TypeError, struct.error):
        raise BrokenEmbeddingsError(f"{broken}has a value that is no number") from None
    except OverflowError:
        raise BrokenEmbeddingsError(f"{broken}has a number that is too large") from None


def _in_32_bits(numbers: Sequence[float]) -> bytes | None:
    """Packs numbers into 32 bits each; None if that would change them."""
    try:
        raw = _bytes(_FLOAT32, numbers)
    except OverflowError:
        return None
    return raw if _numbers(_FLOAT32, raw) == numbers else None


def _bytes(kind: str, numbers: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(numbers)}{_CODES[kind]}", *numbers)  # twice as fast as an array


def _numbers(kind: str, raw: bytes) -> list[float]:
    code = _CODES[kind]
    return list(struct.unpack(f"<{len(raw) // struct.calcsize(code)}{code}", raw))


def _base64(raw: bytes) -> str:
    return binascii.b2a_base64(raw, newline=False).decode()


def _text_of(vector: Any) -> tuple[str, str]:
    """Returns the base64 of a packed vector, and the type of its numbers."""
    for kind, text in fields(vector).items():
        return text, kind
    return vector, _FLOAT32


def _length(vector: Any) -> int:
    if isinstance(vector, list):
        return len(cast(list[Any], vector))
    text, kind = _text_of(vector)
    return (len(text) // 4 * 3 - text[-2:].count("=")) // struct.calcsize(_CODES[kind])


def _stored_bytes(vector: Any) -> int:
    return 4 * len(cast(list[Any], vector)) if isinstance(vector, list) else len(_text_of(vector)[0])


def summary(answer: Mapping[str, Any]) -> dict[str, JsonValue]:
    """Returns the output of a job from its packed answer: the number of embeddings, and their dimensions."""
    return {"embeddings": len(answer["data"]), "dimensions": _length(answer["data"][0]["embedding"])}


def answer_of(packed_answer: Mapping[str, Any], encoding_format: JsonValue) -> dict[str, Any]:
    """Returns an answer as its client reads it.

    Args:
        packed_answer: the packed answer of the job.
        encoding_format: the field of the request.
    """
    data = packed_answer["data"]
    if encoding_format != "base64":
        data = [{**item, "embedding": _as_floats(item["embedding"])} for item in data]
    return {**packed_answer, "data": data}


def _as_floats(vector: Any) -> list[float]:
    if isinstance(vector, list):
        return cast(list[float], vector)
    text, kind = _text_of(vector)
    return _numbers(kind, binascii.a2b_base64(text))
