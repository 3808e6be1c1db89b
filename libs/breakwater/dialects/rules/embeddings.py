"""OpenAI's embeddings: requests measured and checked, answers put in order, and vectors packed for the way.

A vector as JSON is long, and slow to copy. Between a provider and the client each is one text: the base64 of
the provider, as it is; or that of the numbers, in 32 bits each where they are exactly that, and else in 64. So a client
gets the numbers that the provider wrote, double for double.
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
from breakwater.jobs.rules.chat_messages import encoded, fields
from breakwater.kernel.errors import BreakwaterError
from breakwater.kernel.validation import FieldError
from breakwater.prices.rules.price import InputSize, size_of_inputs, size_of_params

PARAMS = frozenset(
    {
        "dimensions", "encoding_format", "input_type", "instruction", "late_chunking", "normalized", "output_dimension",
        "output_dtype", "prompt_name", "task", "truncate", "truncate_prompt_tokens", "truncation", "user",
    }
)  # fmt: skip
"""Fields of OpenAI, and of makers and servers whose API is compatible, that cost tokens alone."""
_ONCE = PARAMS - {"input_type", "instruction", "prompt_name", "task"}
"""Those of them that say nothing to the model."""
PROMPT_TOKENS = 32
"""Tokens of a prompt that a request only names, such as "Represent the query for retrieving documents"."""
INHERITED = PARAMS - {"encoding_format"}
"""Params of an agent that its requests get. The form of the vectors is for the client to choose, which reads them."""

MAX_VECTOR_BYTES = 5_500_000
"""The size limit of an answer's vectors as they are stored, which may be encrypted. The NATS servers take messages of
up to 8 MB."""

MAX_BATCHES = 100
"""The most calls of one job. Each is an attempt of its result, which has room for the vectors, too."""

_FLOAT32 = "float32"
_FLOAT64 = "float64"
_CODES = {_FLOAT32: "f", _FLOAT64: "d"}
_LOOK = 8
"""Numbers of a vector that are tried first in 32 bits."""
_FORMS = ("float", "base64")
_INPUT = "must be a text, a list of texts, a list of token ids, or a list of lists of token ids"


class BrokenEmbeddingsError(BreakwaterError):
    """An answer that can't be used; the text says why, in words of ours."""


class EmbeddingsTooLargeError(BrokenEmbeddingsError):
    """An answer with more vectors than can be stored."""


def chat_form(body: Body) -> ChatForm:
    """The request without a conversation: no chat can be made of it. Raises InvalidBodyError."""
    if (problem := request_objection(body)) is not None:
        raise InvalidBodyError(problem)
    params = {name: value for name, value in body.items() if name != "input"}
    unknown = (FieldError(name, "is not known to cost tokens alone") for name in params if name not in PARAMS)
    return ChatForm([], params, (FieldError("input", "is to be embedded, which a chat can't do"),), tuple(unknown))


def native_body(body: Body, *, params: Body, max_tokens: int = 0, system_prompt: str | None = None) -> Body:
    """The body that a provider gets, without its model."""
    del max_tokens, system_prompt
    return {name: value for name, value in params.items() if name in INHERITED} | dict(body)


def request_objection(body: Body) -> FieldError | None:
    """The reason why a request can't be made; None where it can."""
    given = body.get("input")
    if given is None:
        return FieldError("input", "is missing")
    if given in ([], {}):
        return FieldError("input", "is empty")
    if not isinstance(given, str) and (not isinstance(given, list) or _kind(given) is None):
        return FieldError("input", _INPUT)
    asked = body.get("dimensions")
    if asked is not None and (not isinstance(asked, int) or isinstance(asked, bool) or asked < 1):
        return FieldError("dimensions", "must be a whole number from 1")
    form = body.get("encoding_format")
    if form is not None and form not in _FORMS:
        return FieldError("encoding_format", "must be `float` or `base64`")
    return None


def _kind(given: Sequence[Any]) -> type | None:
    """The type of all items of a list that is an input: `str`, `int` for token ids, `list` for lists of them."""
    kinds = set(map(type, given))
    if kinds in ({str}, {int}):
        return kinds.pop()
    return list if kinds == {list} and all(set(map(type, one)) == {int} for one in given) else None


def inputs_of(body: Body) -> list[str | list[int]]:
    """The inputs of a valid request, each a text or a list of token ids. There is an embedding of each."""
    given = cast(Any, body["input"])
    return [given] if isinstance(given, str) or isinstance(given[0], int) else given


def size_of(body: Body) -> InputSize:
    """Size of what a valid request sends.

    A server may write an instruction, or a prompt that the request names, before each of the inputs.
    """
    inputs = inputs_of(body)
    prompts = {name: value for name, value in body.items() if name != "input" and name not in _ONCE}
    once = {name: value for name, value in body.items() if name in _ONCE}
    size = size_of_inputs(inputs) + size_of_params(once)
    if not prompts:
        return size
    return size + InputSize(signs=len(inputs) * (len(encoded(prompts)) + PROMPT_TOKENS))


def of_floats(body: Body) -> bool:
    """True if the vectors are of numbers, and not quantized to bytes or bits, as Voyage's `output_dtype` asks."""
    return body.get("output_dtype") in {None, "float"}


def fallback_objection(lengths: Mapping[str, int | None]) -> str | None:
    """The reason why models can't stand in for one another; None where they can, or there is only one.

    Args:
        lengths: the declared dimensions of each model of a chain.
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
    """The inputs as a record has them, before redaction: token ids are only counted, as no rule would find a text."""
    given = inputs_of(body)
    texts: list[JsonValue] = [one if isinstance(one, str) else f"{len(one)} token ids" for one in given]
    return texts[0] if isinstance(body["input"], str) else texts


def dimensions_of(body: Body, declared: int | None) -> int | None:
    """The dimensions that vectors must have: those asked for, or else those declared for the model.

    None where neither is known, or where the vectors are quantized.
    """
    return (cast(int | None, body.get("dimensions")) or declared) if of_floats(body) else None


def too_many(body: Body, declared: int | None) -> FieldError | None:
    """The reason why the answer to a request would be too large; None where it would not, or that is not known.

    Args:
        body: of the request.
        declared: the dimensions of the model.
    """
    dimensions = dimensions_of(body, declared)
    bytes_each = 4 if body.get("encoding_format") == "base64" else 8
    most = None if dimensions is None else MAX_VECTOR_BYTES // _base64_length(dimensions * bytes_each)
    if most is None or (count := len(inputs_of(body))) <= most:
        return None
    words = f"has {count} inputs; at most {most} vectors of {dimensions} dimensions fit into an answer"
    return FieldError("input", f"{words}: send fewer in a request")


def too_many_batches(body: Body, max_inputs: int | None) -> FieldError | None:
    """The reason why a request needs too many calls; None where it does not.

    Args:
        body: of the request.
        max_inputs: of one call.
    """
    if max_inputs is None or (count := len(inputs_of(body))) <= max_inputs * MAX_BATCHES:
        return None
    words = f"has {count} inputs; at most {max_inputs * MAX_BATCHES} can be embedded, {max_inputs} in each call"
    return FieldError("input", f"{words}: send fewer in a request")


def form_refused(body: Body, status: int | None, param: str | None, text: str) -> bool:
    """True if a provider refuses a request for the form of the vectors, which can be translated.

    Args:
        body: of the request.
        status: of the error.
        param: the field at fault, where the provider names it.
        text: of the error.
    """
    if status not in {400, 415, 422} or body.get("encoding_format") is None:
        return False
    return (param or "").startswith("encoding_format") or _OF_FORM.search(text) is not None


_OF_FORM = re.compile(r"encoding[ _-]?format|\bbase[ -]?64\b", re.I)


def _base64_length(size: int) -> int:
    return (size + 2) // 3 * 4


# Answers


def packed(answer: Mapping[str, Any], body: Body) -> dict[str, Any]:
    """An answer with its embeddings in the order of the inputs, and their vectors packed.

    Args:
        answer: as the provider sent it.
        body: of the request.

    Raises:
        BrokenEmbeddingsError: it lacks embeddings, or has some that are no vectors.
    """
    data = answer.get("data")
    count = len(inputs_of(body))
    if not isinstance(data, list) or not data:
        raise BrokenEmbeddingsError("the answer has no embeddings")
    items = [dict(fields(one)) for one in cast(list[Any], data)]
    if len(items) != count:
        raise BrokenEmbeddingsError(f"the answer has {len(items)} embeddings for {count} inputs")
    if any(item.get("index") is not None for item in items):
        by_index = {item["index"]: item for item in items if isinstance(item.get("index"), int)}
        if by_index.keys() != set(range(count)):
            raise BrokenEmbeddingsError("the indices of the embeddings are not those of the inputs")
        items = [by_index[index] for index in range(count)]
    for index, item in enumerate(items):
        vector = _packed(item.get("embedding"), f"the embedding of input {index} ", body)
        item.update(object="embedding", index=index, embedding=vector)
    check_together(items)
    rest = {name: value for name, value in answer.items() if name != "usage" or value is not None}
    return {"object": "list", **rest, "data": items}


def check_together(items: Iterable[Mapping[str, Any]]) -> None:
    """Raises BrokenEmbeddingsError where packed vectors have several lengths, or too many bytes for a result."""
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
    """The sum of the usages of several answers; None where one of them has none."""
    total: dict[str, int] = {}
    for usage in map(fields, usages):
        counts = {name: usage.get(name) for name in ("prompt_tokens", "total_tokens")}
        for name, count in counts.items():
            if not isinstance(count, int):
                return None
            total[name] = total.get(name, 0) + count
    return total or None


def _packed(vector: Any, broken: str, body: Body) -> Any:
    """A vector as a base64 text, as `{"float32": …}` or `{"float64": …}`; one of whole numbers remains a list."""
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
            return _base64(_bytes(_FLOAT32, numbers))  # of a provider that knows floats alone
        if type(total) is int and set(map(type, numbers)) == {int}:
            return numbers
        if _in_32_bits(numbers[:_LOOK]) is not None and (raw := _in_32_bits(numbers)) is not None:
            return {_FLOAT32: _base64(raw)}
        return {_FLOAT64: _base64(_bytes(_FLOAT64, numbers))}
    except (TypeError, struct.error):
        raise BrokenEmbeddingsError(f"{broken}has a value that is no number") from None
    except OverflowError:
        raise BrokenEmbeddingsError(f"{broken}has a number that is too large") from None


def _in_32_bits(numbers: Sequence[float]) -> bytes | None:
    """Numbers in 32 bits each; None where that makes others of them."""
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
    """The base64 of a packed vector, and the kind of its numbers."""
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
    """The output of a job, from its packed answer: how many embeddings there are, and of how many dimensions."""
    return {"embeddings": len(answer["data"]), "dimensions": _length(answer["data"][0]["embedding"])}


def answer_of(packed_answer: Mapping[str, Any], form: JsonValue) -> dict[str, Any]:
    """An answer as its client reads it.

    Args:
        packed_answer: of the job.
        form: `encoding_format` of the request.
    """
    data = packed_answer["data"]
    if form != "base64":
        data = [{**item, "embedding": _as_floats(item["embedding"])} for item in data]
    return {**packed_answer, "data": data}


def _as_floats(vector: Any) -> list[float]:
    if isinstance(vector, list):
        return cast(list[float], vector)
    text, kind = _text_of(vector)
    return _numbers(kind, binascii.a2b_base64(text))
