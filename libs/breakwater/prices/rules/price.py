"""Prices calls in integer nano-dollars, and estimates high how many input tokens a call will have.

A hard budget must have room for the estimate, so it must not be below what the provider will count; the provider's own
count replaces it as soon as it is known. The plane has no tokenizers. It measures a request by the classes of bytes
that tokenizers distinguish (`InputSize`) and turns them into tokens by each provider's rules (`TokenRules`). The rules
assume the worst that providers document and that was measured on their tokenizers. For English text the estimate is
two to three times the real number of tokens.

Only text, and tools that the client defines, is counted by such rules. Every other byte of a body, such as a field
that no rule knows, counts as one token; so does every byte of a small body.
"""

from __future__ import annotations

import binascii
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import itemgetter
from typing import Any, cast

import orjson
from pydantic import JsonValue

from breakwater.jobs.rules.chat_messages import (
    FILES,
    IMAGES,
    SOUND_AND_FILM,
    FileContent,
    content_of,
    encode_json,
    fields,
    payload_of,
)
from breakwater.kernel.formats import words
from breakwater.kernel.immutable import changed, immutable
from breakwater.prices.rules.usage import STANDARD_TERMS, Usage
from breakwater.prices.settings import MAX_OUTPUT_TOKENS, Price, TokenPrices

TOKENS_PER_PRICE = 1_000_000


@dataclass(frozen=True, slots=True)
class TokenKind:
    """A kind of tokens that may have its own price.

    Attributes:
        direction: `input` or `output`, which these tokens are a part of.
        percent: the assumed price, in percent of the direction's, when the kind's own price is unknown.
        certain: True if providers charge exactly that percentage, so that it is no estimate.
    """

    direction: str
    percent: int = 100
    certain: bool = True


KINDS: Mapping[str, TokenKind] = {
    "cached": TokenKind("input"),
    "cache_write": TokenKind("input", 125, certain=False),
    "cache_write_1h": TokenKind("input", 200, certain=False),
    "input_audio": TokenKind("input", 1600, certain=False),
    "input_image": TokenKind("input"),
    "input_video": TokenKind("input"),
    "input_other": TokenKind("input", 500, certain=False),
    "reasoning": TokenKind("output"),
    "citation": TokenKind("output"),
    "output_audio": TokenKind("output", 1000, certain=False),
    "output_image": TokenKind("output", 2000, certain=False),
    "output_video": TokenKind("output", 200, certain=False),
    "output_other": TokenKind("output", 500, certain=False),
}
"""Providers count images and video in the input as ordinary input. The percentages are about the highest in the price
list of chat models; those of caches are Anthropic's."""

_OUTPUT_KINDS = ("output", "reasoning")

_TERMS = dict.fromkeys(("flex", "batch", "scale", "reserved", "provisioned_throughput"), 100) | {"us": 110, "fast": 600}
"""Percent of the standard price on terms that cost no more, are prepaid, add a fixed share, or are Anthropic's most
expensive."""
_OTHER_TERMS = 250
"""Percent of the standard price on any other terms: the highest in the price list, OpenAI's `priority`."""
KNOWN_TERMS = STANDARD_TERMS | _TERMS.keys() | {"priority", "performance", "premium", "eu", "ultrafast"}


@immutable()
class Cost:
    """The cost of a call.

    Attributes:
        nano: nano-dollars.
        doubt: a sentence on what has no known price, which makes the cost an estimate; None for an exact cost.
        unknown: the same on what could not even be estimated, which makes the cost unknown.
    """

    nano: int
    doubt: str | None = None
    unknown: str | None = None


@dataclass(frozen=True, slots=True)
class Rates:
    """Prices of a model in nano-dollars per million tokens.

    Attributes:
        steps: for each kind, `input` and `output` included, pairs of a number of input tokens and the price of calls
            with more than that, in ascending order. A price is None when it is unknown.
        per_call: nano-dollars for each call, in addition to its tokens.
    """

    steps: Mapping[str, Sequence[tuple[int, int | None]]]
    per_call: int = 0
    _highest: dict[tuple[tuple[str, ...], frozenset[int]], int] = field(
        default_factory=dict[tuple[tuple[str, ...], frozenset[int]], int], init=False, repr=False, compare=False
    )
    """Cached results of `_highest_rate`: prices never change, and a model's calls mostly share kinds and steps."""

    def _rate(self, kind: str, tokens: int) -> tuple[int, bool]:
        """Returns a kind's price in a call with `tokens` of input, and whether it is certain."""
        known_rate = None
        for above, nano in self.steps.get(kind, ()):
            if tokens > above:
                known_rate = nano
        if known_rate is not None:
            return known_rate, True
        rule = KINDS[kind]
        direction_rate, _ = self._rate(rule.direction, tokens)
        return -(-direction_rate * rule.percent // 100), rule.certain

    def cost(self, usage: Usage, terms: Sequence[str] = ()) -> Cost | None:
        """Returns the cost of a call, rounded half up once to whole nano-dollars; None when its usage is unknown.

        Args:
            usage: the call's usage. When its parts exceed the total, the most expensive parts count first.
            terms: the terms that the call was served on and that these prices do not cover.
        """
        if usage.input_tokens is None or usage.output_tokens is None:
            return None
        written = usage.cache_write_tokens or 0
        written_1h = usage.parts.get("cache_write_1h", 0)
        parts = {
            "cached": usage.cached_tokens,
            "reasoning": usage.reasoning_tokens,
            **usage.parts,
            "cache_write": written - min(written_1h, written),
        }
        used_kinds = [(kind, tokens) for kind, tokens in parts.items() if tokens]
        exact = 0  # in nano-dollars times a million
        unpriced = [f"the terms {term!r}" for term in terms]
        for direction, total in (("input", usage.input_tokens), ("output", usage.output_tokens)):
            rates = [
                (*self._rate(kind, usage.input_tokens), kind, count)
                for kind, count in used_kinds
                if KINDS[kind].direction == direction
            ]
            plain_tokens = total
            for rate, certain, kind, count in sorted(rates, reverse=True):
                tokens = min(count, plain_tokens)
                exact += tokens * rate
                plain_tokens -= tokens
                if tokens and not certain:
                    unpriced.append(f"{kind.replace('_', ' ')} tokens")
            exact += plain_tokens and plain_tokens * self._rate(direction, usage.input_tokens)[0]
        nano = (2 * exact + TOKENS_PER_PRICE) // (2 * TOKENS_PER_PRICE) + self.per_call
        for term in terms:
            nano = -(-nano * _TERMS.get(term, _OTHER_TERMS) // 100)
        return Cost(nano, f"no price is known for {' and '.join(unpriced)}" if unpriced else None)

    def worst_case(self, input_tokens: int, max_tokens: int, size: InputSize) -> int:
        """Returns the most nano-dollars that a call can cost, at the highest of the prices that may apply."""
        # A provider may write the whole input into its cache by itself, and charge more for that.
        writes = "cache_write" in self.steps or size.cache_ttl_s
        kinds = ["input", "cached", *(["cache_write"] if writes else [])]
        if size.cache_ttl_s > SHORT_CACHE_S:
            kinds.append("cache_write_1h")
        reached = frozenset(above + 1 for steps in self.steps.values() for above, _ in steps if above < input_tokens)
        exact = input_tokens * self._highest_rate(kinds, reached)
        exact += max_tokens and max_tokens * self._highest_rate(_OUTPUT_KINDS, reached)
        if audio := min(size.audio_tokens, input_tokens):
            exact += audio * (self._highest_rate([*kinds, "input_audio"], reached) - self._highest_rate(kinds, reached))
        return (2 * exact + TOKENS_PER_PRICE) // (2 * TOKENS_PER_PRICE) + self.per_call

    def _highest_rate(self, kinds: Iterable[str], reached: frozenset[int]) -> int:
        key = tuple(kinds), reached
        if (nano := self._highest.get(key)) is None:
            nano = self._highest[key] = max([self._rate(kind, tokens)[0] for tokens in reached for kind in kinds])
        return nano


@dataclass(frozen=True, slots=True)
class Tariff:
    """All prices of a model.

    Attributes:
        standard: the rates on standard terms.
        on_terms: the rates on other terms, by the name of the terms.
        tools: nano-dollars for each use of a tool that the provider runs, by the tool's name.
    """

    standard: Rates
    on_terms: Mapping[str, Rates] = field(default_factory=dict[str, Rates])
    tools: Mapping[str, int] = field(default_factory=dict[str, int])

    def cost(self, usage: Usage) -> Cost | None:
        """Returns the cost of a call, with the tools that the provider ran; None when its usage is unknown."""
        priced_term = next((term for term in usage.terms if term in self.on_terms), None)
        rates = self.standard if priced_term is None else self.on_terms[priced_term]
        cost = rates.cost(usage, [term for term in usage.terms if term != priced_term])
        return cost if cost is None or not usage.tools else self._with_tools(cost, usage)

    def _with_tools(self, cost: Cost, usage: Usage) -> Cost:
        """Adds the tools that the provider ran, at the config's prices or else at the provider's list prices."""
        nano = cost.nano
        for tool, uses in usage.tools.items():
            nano += uses * self.tools[tool] if tool in self.tools else usage.fees.get(tool, 0)
        estimated = [tool for tool in usage.tools if tool not in self.tools]
        unknown = [tool for tool in estimated if tool not in usage.fees]
        doubt = f"no price is known for the tools {', '.join(estimated)}" if estimated else None
        return Cost(nano, "; ".join(filter(None, (cost.doubt, doubt))) or None, doubt if unknown else None)

    def worst_case(self, input_tokens: int, max_tokens: int, size: InputSize | None = None) -> int | None:
        """Returns the most nano-dollars that a call can cost, on the standard terms or on those that it asks for.

        Args:
            input_tokens: a high estimate of the input.
            max_tokens: the most output that the call may have.
            size: the size of the request.
        """
        size = size or InputSize()
        possible_rates = [self.standard, *([self.on_terms[size.term]] if size.term in self.on_terms else [])]
        return max(rates.worst_case(input_tokens, max_tokens, size) for rates in possible_rates)


_PRICED = {
    "input": "input_usd_per_mtok",
    "output": "output_usd_per_mtok",
    "cached": "cached_input_usd_per_mtok",
    "cache_write": "cache_write_usd_per_mtok",
    "cache_write_1h": "cache_write_1h_usd_per_mtok",
    "input_audio": "audio_input_usd_per_mtok",
    "output_audio": "audio_output_usd_per_mtok",
}


def tariff_of(price: Price) -> Tariff:
    """Returns configured prices in nano-dollars, as `Tariff` applies them."""
    tiers = [(-1, price), *sorted(((tier.above_tokens, tier) for tier in price.tiers), key=itemgetter(0))]
    terms = {name.strip().lower(): _rates([(-1, prices)]) for name, prices in price.service_tiers.items()}
    return Tariff(_rates(tiers), terms)


def _rates(tiers: Sequence[tuple[int, TokenPrices]]) -> Rates:
    all_steps = {kind: [(above, getattr(prices, name)) for above, prices in tiers] for kind, name in _PRICED.items()}
    return Rates({kind: steps for kind, steps in all_steps.items() if any(nano is not None for _, nano in steps)})


CHOICES = ("n", "best_of")
MAX_CHOICES = 128


def choices_of(params: Mapping[str, JsonValue]) -> int:
    """Returns how many answers a request makes the provider generate, by its `n` or `best_of`; at least 1."""
    return max(_positive(params.get(name)) or 1 for name in CHOICES)


def max_tokens_of(params: Mapping[str, JsonValue], default: int) -> int:
    """Returns the output limit of a request in tokens: its own, the higher one if it has two, else the default."""
    limits = [value for name in OUTPUT_LIMITS if (value := _positive(params.get(name))) is not None]
    return max(limits, default=default)


def max_output_of(params: Mapping[str, JsonValue], default: int) -> int:
    """Returns the most output tokens that a call may have: all choices, with thinking and wrong predictions.

    Thinking counts towards the output limit wherever providers document it, with two exceptions: Anthropic's thinking
    budget may exceed the limit when a model thinks between tool calls, and Alibaba's comes on top of it. OpenAI charges
    each token of a `prediction` that is not in the answer as output.
    """
    limit = max(max_tokens_of(params, default), *(_budget(_part(params.get(name), key)) for name, key in _THINKING))
    prediction = params.get("prediction")
    predicted = 0 if prediction is None else len(_json(prediction))
    return (limit + _budget(params.get("thinking_budget")) + predicted) * choices_of(params)


MAX_OBSERVED = 1000
"""The most calls whose output is remembered, the latest ones."""
MIN_OBSERVED = 100
"""The number of observed calls that it takes to predict the next one's output."""
MARGIN = 2
"""The multiple of the largest observed output that a call may have."""


def observed_limit(params: Mapping[str, JsonValue], default: int, outputs: Sequence[int]) -> int | None:
    """Returns an output limit in tokens derived from recent answers, for calls that reserve no more than it.

    Args:
        params: the request's parameters.
        default: the agent's limit, for requests without their own.
        outputs: the output tokens of the latest calls.

    Returns:
        None to keep the request's own limit: when too few calls were observed, when the request's limit is lower
        anyway, when it asks for several answers, and when the model may think beyond its limit.
    """
    requested_limit = max_tokens_of(params, default)
    if len(outputs) < MIN_OBSERVED or max_output_of(params, default) != requested_limit:
        return None
    limit = max(1, MARGIN * max(outputs))
    return limit if limit < requested_limit else None


def with_output_limit(params: Mapping[str, JsonValue], limit: int) -> dict[str, JsonValue]:
    """Returns the request's parameters with each output limit lowered to `limit` where it is higher."""
    return {
        name: min(_positive(value) or limit, limit) if name in OUTPUT_LIMITS else value
        for name, value in params.items()
    }


_THINKING = (("thinking", "budget_tokens"), ("reasoning", "max_tokens"))
OUTPUT_LIMITS = ("max_tokens", "max_completion_tokens")


def _positive(value: JsonValue) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _budget(value: JsonValue) -> int:
    return min(_positive(value) or 0, MAX_OUTPUT_TOKENS)


def _part(value: JsonValue, key: str) -> JsonValue:
    return value.get(key) if isinstance(value, dict) else None


_LOWERCASE = b"abcdefghijklmnopqrstuvwxyz "
_ASCII = bytes(range(128))
_TOOLS = ("tools", "functions")
_WITH_INSTRUCTIONS = (*_TOOLS, "response_format", "output_config", "output_format")
_CACHE = b'"cache_control":'
_SHORT_CACHE = re.compile(
    rb'"cache_control":(null|\{"type":"ephemeral"(,"ttl":"5m")?\}|\{"ttl":"5m","type":"ephemeral"\})'
)
SHORT_CACHE_S = 300
LONG_CACHE_S = 3600
_IN_PLAIN_TEXT = ("text/", "application/json", "application/xml")


@immutable(slots=False)
class InputSize:
    """The size of a request or of a part of one. Sizes of parts add up with `+`.

    Attributes:
        lowercase: bytes of small Latin letters and spaces, several of which share a token.
        signs: bytes of all other ASCII characters (capitals, digits, punctuation, line ends), and all bytes that are
            no text.
        foreign: bytes of all other scripts.
        images: number of images, inline and by URL.
        media_bytes: decoded bytes of audio and video.
        documents: number of inline documents, such as PDFs.
        document_bytes: decoded bytes of those.
        linked_files: number of files that are only referenced, by URL or id, so that their size is unknown.
        messages: number of messages in the conversation.
        tools: True if there are tools or a schema, for which providers add their own instructions.
        provided_tools: number of tools that the provider defines itself and the request only names.
        cache_ttl_s: how long the provider is asked to cache a part of the request; 0 if it is not asked to.
        term: the terms that are asked for (`service_tier`); empty for the standard ones.
        label_bytes: bytes of the field names and labels of messages, which count with the messages.
        body_bytes: bytes of the JSON body; 0 if they are not counted (see `with_each_byte`).
    """

    lowercase: int = 0
    signs: int = 0
    foreign: int = 0
    images: int = 0
    media_bytes: int = 0
    documents: int = 0
    document_bytes: int = 0
    linked_files: int = 0
    messages: int = 0
    tools: bool = False
    provided_tools: int = 0
    cache_ttl_s: int = 0
    term: str = ""
    label_bytes: int = 0
    body_bytes: int = 0

    @property
    def audio_tokens(self) -> int:
        """The number of tokens that may be audio. A file that is only referenced counts as audio, too."""
        return math.ceil(self.media_bytes / BYTES_PER_MEDIA_TOKEN) + self.linked_files * LINKED_FILE_TOKENS

    def __add__(self, other: InputSize) -> InputSize:
        return InputSize(
            lowercase=self.lowercase + other.lowercase,
            signs=self.signs + other.signs,
            foreign=self.foreign + other.foreign,
            images=self.images + other.images,
            media_bytes=self.media_bytes + other.media_bytes,
            documents=self.documents + other.documents,
            document_bytes=self.document_bytes + other.document_bytes,
            linked_files=self.linked_files + other.linked_files,
            messages=self.messages + other.messages,
            tools=self.tools or other.tools,
            provided_tools=self.provided_tools + other.provided_tools,
            cache_ttl_s=max(self.cache_ttl_s, other.cache_ttl_s),
            term=self.term or other.term,
            label_bytes=self.label_bytes + other.label_bytes,
            body_bytes=self.body_bytes + other.body_bytes,
        )


def size_of_params(
    params: Mapping[str, JsonValue],
    *,
    schema: Mapping[str, Any] | None = None,
    input: JsonValue = None,  # noqa: A002  the job's word for it
) -> InputSize:
    """Returns the size of a request without its conversation: tools, other parameters and the answer's schema.

    Args:
        params: the parameters that the provider receives with the messages.
        schema: the JSON schema that the provider must make the answer fit.
        input: the input of a job that has no messages.
    """
    tally = _Tally()
    for name in _TOOLS:
        tally.take_tools(params.get(name))
    if other_params := {name: value for name, value in params.items() if name not in _TOOLS}:
        tally.raw_values.append(other_params)
    tally.documents += [_json(value) for value in (schema, input) if value is not None]
    has_schema = schema is not None or _part(params.get("text"), "format") is not None
    tools = has_schema or any(params.get(name) for name in _WITH_INSTRUCTIONS)
    return tally.size() + InputSize(tools=tools, term=term_of(params) or "")


def term_of(params: Mapping[str, JsonValue]) -> str | None:
    """Returns the terms that a request asks for; None for the standard ones."""
    tier = params.get("service_tier")
    term = tier.strip().lower() if isinstance(tier, str) else ""
    return None if term in STANDARD_TERMS else term


def size_of_messages(messages: Iterable[Any]) -> InputSize:
    """Returns the size of a conversation. Everything but images and files counts as text or byte by byte.

    The messages may hold OpenAI's messages, items and parts, and Anthropic's blocks, also within a tool's result.
    """
    tally = _Tally()
    count = 0
    for message in messages:
        tally.take(message)
        count += 1
    return tally.size(messages=count)


def size_of_inputs(inputs: Iterable[str | Sequence[int]]) -> InputSize:
    """Returns the size of inputs to embed. Each is a text, or a list of token ids, each of which counts as one."""
    texts: list[bytes] = []
    tokens = 0
    count = 0
    for embedded in inputs:
        if isinstance(embedded, str):
            texts.append(_encode(embedded))
        else:
            tokens += len(embedded)
        count += 1
    return _size_of_bytes(b"".join(texts), messages=count) + InputSize(signs=tokens)


BYTES_OF_SMALL_BODIES = 8_192
"""Up to this size each byte of a body is reserved as a token: that costs little, and a short text may be all rare
words."""
ENVELOPE_BYTES = 24
"""Bytes of a body around its content, without the model's name."""


def with_each_byte(size: InputSize, body: Any) -> InputSize:
    """Returns a body's size with `body_bytes` set; the exact bytes are counted only if the body may be small."""
    size_bytes = size.lowercase + size.signs + size.foreign
    has_files = size.images or size.documents or size.media_bytes > BYTES_OF_SMALL_BODIES
    if size_bytes < BYTES_OF_SMALL_BODIES and not has_files:
        size_bytes = len(encode_json(body))
    return changed(size, body_bytes=size.body_bytes + size_bytes)


def size_of_added(messages: Sequence[Any]) -> InputSize:
    """Returns the size of the messages that a repair adds to a call."""
    return with_each_byte(size_of_messages(messages), messages) if messages else InputSize()


def _size_of_bytes(text: bytes, messages: int = 0, label_bytes: int = 0) -> InputSize:
    # Deleting in C is some thirty times as fast as looking at each character.
    foreign = 0 if text.isascii() else len(text.translate(None, _ASCII))
    not_lowercase = len(text.translate(None, _LOWERCASE))
    return InputSize(
        lowercase=len(text) - not_lowercase,
        signs=not_lowercase - foreign,
        foreign=foreign,
        messages=messages,
        label_bytes=label_bytes,
    )


def _cache_ttl_s(document: bytes) -> int:
    """Returns how long a JSON document asks to be cached: an hour unless every mark is known to ask for less."""
    marks = document.count(_CACHE)
    if not marks:
        return 0
    return SHORT_CACHE_S if len(_SHORT_CACHE.findall(document)) == marks else LONG_CACHE_S


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _json(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        # Integers beyond 64 bits are valid JSON, but orjson refuses them.
        return _encode(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


_TEXT_FIELDS = words(
    """
    arguments content context data encrypted_content function_call input output reasoning reasoning_content refusal
    signature stderr stdout summary text thinking thinking_blocks title tool_calls
    """
)
"""Fields of messages, items and parts that a model reads as text."""
_TOOL_FIELDS = words(
    """
    cache_control custom defer_loading description format function input_examples input_schema name parameters strict
    tools type
    """
)
"""Fields of tools that a model reads as text."""
_DEFINED_BY_CLIENT = (None, "function", "custom", "namespace")
"""Types of tools that the request defines completely."""
_LABELS = ("role", "type")
_LABEL_LENGTH = 32
_MESSAGE_STRUCTURE_BYTES = len('{"role":"","content":""},')
_TEXT_STRUCTURE_BYTES = len('{"type":"","text":""},')
_DESCRIPTION_BYTES = 128
"""Bytes next to an image or a document, such as its title, that the price of the image or document covers."""


def _parts_in_item(item: Mapping[str, Any], kind: Any) -> str | None:
    """Returns the field of a message or an item that holds parts, which may be files; None if no field does."""
    if kind in (None, "message"):
        return "content" if "role" in item else None
    if isinstance(kind, str) and kind.endswith("_output"):
        return "output"
    return "content" if kind == "reasoning" else None


def _parts_in_block(kind: Any) -> str | None:
    """Returns the field of a content block that holds parts; None if no field does."""
    holds_parts = isinstance(kind, str) and (kind.endswith("tool_result") or kind == "search_result")
    return "content" if holds_parts else None


def _structure(holder: Mapping[str, Any]) -> int:
    """Counts the bytes of an object's field names, with quotes, colons and commas, and of its labels."""
    labels = (value for name in _LABELS if isinstance(value := holder.get(name), str))
    return sum(map(len, holder)) + 6 * len(holder) + sum(map(len, labels))


_NOTHING = InputSize()


@dataclass(slots=True)
class _Tally:
    """Collects the parts of a request by the way in which they are counted.

    Attributes:
        texts: texts, without their quotes.
        documents: JSON that a model reads as text.
        raw_values: values that count byte by byte.
        structure: bytes of field names, without those that count with a file.
        label_bytes: see `InputSize`.
        files: the size of images and files.
        provided_tools: see `InputSize`.
    """

    texts: list[bytes] = field(default_factory=list[bytes])
    documents: list[bytes] = field(default_factory=list[bytes])
    raw_values: list[Any] = field(default_factory=list[Any])
    structure: int = 0
    label_bytes: int = 0
    files: InputSize = _NOTHING
    provided_tools: int = 0

    def size(self, messages: int = 0) -> InputSize:
        """Returns the size of everything collected."""
        documents = b"".join(self.documents)
        raw_json = _json(self.raw_values)[1:-1] if self.raw_values else b""
        size = _size_of_bytes(b"".join((*self.texts, documents)), messages, self.label_bytes)
        if raw_json or self.structure or self.provided_tools or documents:
            commas = max(0, len(self.raw_values) - 1)  # between the raw values
            ttl_s = max(_cache_ttl_s(documents), _cache_ttl_s(raw_json))
            signs = len(raw_json) - commas + self.structure
            size += InputSize(signs=signs, provided_tools=self.provided_tools, cache_ttl_s=ttl_s)
        return size if self.files is _NOTHING else size + self.files

    def take(self, message: Any) -> None:
        """Collects a message or an item. Its field names and labels go to `label_bytes`."""
        match message:
            case {"role": str() as role, "content": str() as text} if len(message) == 2 and len(role) <= _LABEL_LENGTH:
                self.texts.append(_encode(text))
                self.label_bytes += _MESSAGE_STRUCTURE_BYTES + len(role)
            case {"type": "item_reference" | "image_generation_call" as kind}:
                self.files += InputSize(linked_files=1) if kind == "item_reference" else InputSize(images=1)
                self.raw_values.append(message)
            case dict():
                holder = cast(dict[str, Any], message)
                self.label_bytes += _structure(holder)
                self._take_fields(holder, _parts_in_item(holder, holder.get("type")))
            case _:
                self._take_content(message)

    def take_tools(self, tools: Any) -> None:
        """Collects tools as text, and fields of unknown meaning byte by byte as well."""
        if tools is not None:
            self.documents.append(_json(tools))
            self._take_each_tool(tools)

    def _take_each_tool(self, tools: Any) -> None:
        for tool in cast(list[Any], tools if isinstance(tools, list) else [tools]):
            if not isinstance(tool, dict):
                self.raw_values.append(tool)
                continue
            definition = cast(dict[str, Any], tool)
            if definition.get("type") not in _DEFINED_BY_CLIENT:
                self.provided_tools += 1
            for holder in (definition, fields(definition.get("function"))):
                if not holder.keys() <= _TOOL_FIELDS:
                    self.raw_values.append({name: value for name, value in holder.items() if name not in _TOOL_FIELDS})
            if "tools" in definition:
                self._take_each_tool(definition["tools"])

    def _take_fields(self, holder: Mapping[str, Any], parts_in: str | None) -> None:
        unknown = dict[str, Any]()
        for name, value in holder.items():
            if name == parts_in:
                self._take_content(value)
            elif name in _TEXT_FIELDS and isinstance(value, str):
                self.texts.append(_encode(value))
            elif name in _TEXT_FIELDS and name != "content":
                self.documents.append(_json(value))
            elif name == "tools":
                self.take_tools(value)
            elif not (name in _LABELS and isinstance(value, str) and len(value) <= _LABEL_LENGTH):
                unknown[name] = value
        if unknown:
            self.raw_values.append(unknown)

    def _take_content(self, content: Any) -> None:
        match content:
            case None:
                pass
            case str():
                self.texts.append(_encode(content))
            case list():
                for part in cast(list[Any], content):
                    if isinstance(part, dict | str):
                        self.structure += 3  # quotes of a text, and a comma
                        self._take_content(part)
                    else:
                        self.raw_values.append(part)
                        self.structure += 1
            case {"type": str() as kind, "text": str() as text} if len(content) == 2 and len(kind) <= _LABEL_LENGTH:
                self.texts.append(_encode(text))
                self.structure += _TEXT_STRUCTURE_BYTES + len(kind)
            case {"type": str() as kind} if kind in FILES:
                self._take_file(kind, cast(dict[str, Any], content))
            case dict():
                part = cast(dict[str, Any], content)
                self.structure += _structure(part)
                self._take_fields(part, _parts_in_block(part.get("type")))
            case _:
                self.raw_values.append(content)

    def _take_file(self, kind: str, part: Mapping[str, Any]) -> None:
        name, payload = payload_of(part)
        content_field: str | None = "content"
        covered = 0
        if payload.get("type") == "content":
            self._take_content(payload.get("content"))  # the blocks of an Anthropic document
        elif payload.get("type") == "text" and isinstance(text := payload.get("data"), str):
            content_field = "data"
            self.texts.append(_encode(text))
        else:
            file = content_of(payload)
            size = _size_of_file(kind, file)
            content_field = file.field
            covered = _DESCRIPTION_BYTES if size.images or size.documents or size.linked_files else 0
            self.files += size
        descriptions = [{key: value for key, value in payload.items() if key != content_field}]
        if name is not None:
            descriptions.append({key: value for key, value in part.items() if key != name})
        self.raw_values += descriptions
        if covered:
            self.structure -= min(covered, sum(map(len, map(_json, descriptions))))


def _size_of_file(kind: str, file: FileContent) -> InputSize:
    if file.data is None:
        return InputSize(images=1) if kind in IMAGES else InputSize(linked_files=1)
    if file.media_type.startswith(_IN_PLAIN_TEXT):
        return _size_of_bytes(_decode(file.data))
    if file.media_type.startswith("image/") or (kind in IMAGES and not file.media_type):
        return InputSize(images=1)
    if file.media_type.startswith(("audio/", "video/")) or (kind in SOUND_AND_FILM and not file.media_type):
        return InputSize(media_bytes=file.size)
    return InputSize(documents=1, document_bytes=file.size)


def _decode(data: str) -> bytes:
    try:
        return binascii.a2b_base64(_encode(data), strict_mode=True)
    except binascii.Error:
        return _encode(data)  # the field holds the text itself, not base64


BASE_TOKENS = 32
"""Tokens that a provider adds around a call's messages."""
PROVIDED_TOOL_TOKENS = 2_000
"""Tokens of a tool that the provider defines. Anthropic documents up to 735 for a definition and 499 for its
instructions."""
PAGE_TEXT_TOKENS = 3_000
"""Tokens of a page of a PDF, in addition to its picture: Anthropic documents 1,500 to 3,000."""
BYTES_PER_DOCUMENT_TOKEN = 2
"""Bytes of a PDF per token. Its text is compressed, and each page counts as an image as well; scans have far fewer
tokens per byte."""
BYTES_PER_MEDIA_TOKEN = 32
"""Bytes of audio and video per token: Gemini counts 32 tokens a second, and speech seldom has less than a kilobyte a
second."""
LINKED_FILE_TOKENS = 200_000
"""Tokens of a file of unknown size: as many as most models' context holds."""

MAX_INPUT_TOKENS = 100_000_000
"""The cap of estimates. No model takes that many tokens, so the provider refuses the call whatever the estimate."""


@dataclass(frozen=True, slots=True)
class TokenRules:
    """A provider's rules for counting tokens. For all providers, every byte of `InputSize.signs` may be a token.

    Attributes:
        lowercase_bytes: bytes of small Latin letters and spaces per token.
        foreign_bytes: bytes of other scripts per token. Byte-level tokenizers never make two tokens of one byte.
        image_tokens: tokens of the largest image at the highest resolution.
        tool_tokens: tokens of the instructions that the provider adds for tools or a schema.
        message_tokens: tokens between two messages.
        message_bytes: bytes by which a chat message is longer in the provider's own API.
        document_tokens: the most tokens of all documents of a call: the largest context of the provider's models. The
            provider refuses a call with more, and bills nothing.
    """

    lowercase_bytes: float
    foreign_bytes: float
    image_tokens: int
    tool_tokens: int
    message_tokens: int = 8
    message_bytes: int = 0
    document_tokens: int = MAX_INPUT_TOKENS


OPENAI = TokenRules(
    lowercase_bytes=2.0, foreign_bytes=1.2, image_tokens=12_000, tool_tokens=200, document_tokens=1_050_000
)
"""Images: 10,000 patches with GPT-5.4's `detail: original`, and a fifth more for its multipliers."""
ANTHROPIC = TokenRules(
    lowercase_bytes=1.75,
    foreign_bytes=1.2,
    image_tokens=5_000,
    tool_tokens=1_000,
    message_bytes=24,
    document_tokens=1_000_000,
)
"""Text: Opus 4.7 makes up to 1.47 times as many tokens of a text as its predecessors. Images: 2,576 pixels at the long
edge are 4,784 tokens. Tools: up to 530 tokens are documented; the rest is headroom for newer models."""
GEMINI = TokenRules(
    lowercase_bytes=2.0, foreign_bytes=1.5, image_tokens=5_000, tool_tokens=200, document_tokens=2_100_000
)
"""Images: 258 tokens for each tile, at most sixteen tiles; at most 2,240 tokens with Gemini 3."""
GENERIC = TokenRules(lowercase_bytes=1.75, foreign_bytes=1.0, image_tokens=16_384, tool_tokens=1_000)
"""The rules of an endpoint that may serve any model. Images: Qwen-VL's own limit."""
_CONVERSE = replace(GENERIC, message_bytes=ANTHROPIC.message_bytes)
"""The rules of Bedrock's models, whose blocks are not much longer than those of Messages."""

_OPENAI_IMAGES = (("gpt-4o-mini", 48_169), ("gpt-4o", 1_445), ("gpt-4-turbo", 1_445), ("gpt-4.1", 3_779))
"""Tokens of an image: the base and eight tiles at high detail (2,833 + 8 x 5,667, and 85 + 8 x 170); for GPT-4.1, 1,536
patches times nano's factor of 2.46."""
_OPENAI_NAME = re.compile(r"(ft:)?(gpt-|chatgpt-|o\d)")


def estimate_input_tokens(size: InputSize, rules: TokenRules) -> int:
    """Returns a high estimate of the tokens that a provider will count as input."""
    first_pages = size.documents * (rules.image_tokens + PAGE_TEXT_TOKENS)
    documents = min(size.document_bytes / BYTES_PER_DOCUMENT_TOKEN + first_pages, rules.document_tokens)
    total = (
        math.ceil(_text_tokens(size, rules) + documents + size.media_bytes / BYTES_PER_MEDIA_TOKEN)
        + size.images * rules.image_tokens
        + size.linked_files * LINKED_FILE_TOKENS
        + (rules.tool_tokens if size.tools else 0)
        + size.provided_tools * PROVIDED_TOOL_TOKENS
    )
    return min(total, MAX_INPUT_TOKENS)


def worst_input_tokens(estimated: int, size: InputSize, rules: TokenRules, model: str) -> int:
    """Returns the most tokens that a provider may count as input: a token for each byte of labels and small bodies.

    Args:
        estimated: the result of `estimate_input_tokens`.
        size: the size of the whole request.
        rules: the provider's rules.
        model: the provider's name of the model.
    """
    if not size.body_bytes:
        return estimated
    translated = size.messages * rules.message_bytes
    labels = size.label_bytes + translated - size.messages * rules.message_tokens
    each_byte = min(size.body_bytes + ENVELOPE_BYTES + len(model) + translated, BYTES_OF_SMALL_BODIES)
    return estimated + max(0, labels, math.ceil(each_byte - _text_tokens(size, rules)))


def _text_tokens(size: InputSize, rules: TokenRules) -> float:
    text = size.lowercase / rules.lowercase_bytes + size.signs + size.foreign / rules.foreign_bytes
    return text + BASE_TOKENS + size.messages * rules.message_tokens


def likely_input_tokens(size: InputSize) -> int:
    """Returns how many tokens a request probably has. Budgets must not use this: it is often too low.

    A token is about four characters of English prose, three of code and JSON, and one or two of other scripts.
    """
    text = size.lowercase / 4.2 + size.signs * 0.45 + size.foreign / 2.5
    files = size.document_bytes / 20 + size.media_bytes / BYTES_PER_MEDIA_TOKEN
    return max(1, math.ceil(text + files) + 4 * size.messages + 1_500 * (size.images + size.linked_files))


@lru_cache(maxsize=1024)
def rules_for(kind: str, base_url: str, models: tuple[str, ...], image_tokens: int | None = None) -> TokenRules:
    """Returns the token rules of a model.

    Args:
        kind: the kind of its provider.
        base_url: the provider's base URL; empty if it has none.
        models: the model's names, the most informative first: the name of an Azure deployment may not name its model.
        image_tokens: the config's figure, which overrides the rules'.
    """
    names = [model.rpartition("/")[2].lower() for model in models]
    rules = _rules_of(kind, base_url, names)
    if rules is OPENAI:
        documented = (tokens for part, tokens in _OPENAI_IMAGES for name in names if part in name)
        rules = replace(rules, image_tokens=next(documented, rules.image_tokens))
    return rules if image_tokens is None else replace(rules, image_tokens=image_tokens)


def _rules_of(kind: str, base_url: str, names: list[str]) -> TokenRules:
    # The model's name comes before the URL: a gateway serves models of every maker.
    if kind == "anthropic" or any("claude" in name for name in names):
        return ANTHROPIC
    if kind == "gemini" or "googleapis.com" in base_url or any("gemini" in name for name in names):
        return GEMINI
    if kind == "azure" or "api.openai.com" in base_url or any(_OPENAI_NAME.match(name) for name in names):
        return OPENAI
    return _CONVERSE if kind == "bedrock" else GENERIC
