"""Costs of calls in integer nano-dollars, and high estimates of the input tokens of calls that are not yet made.

The estimate is what a hard budget must have room for. What is sent is first measured by what tokenizers distinguish
(`InputSize`), and then counted by the rules of a provider. An estimate must not be below what the provider will count,
and is settled by that as soon as it is known. So it is taken from the least favourable of what providers document and
of what has been measured of their tokenizers, which the plane does not have. Of English it makes two to three times the
tokens that it is.

Only texts, and tools that a client defines, are counted by what tokenizers make of them. Every other byte of a body,
such as a field that no rule knows, is a token; so is every byte of a small body.
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
from pydantic import Field, JsonValue

from breakwater.contracts.types import Message, UsdAmount
from breakwater.policy.chat_messages import (
    FILES,
    IMAGES,
    SOUND_AND_FILM,
    FileContent,
    content_of,
    encoded,
    fields,
    payload_of,
)
from breakwater.policy.formats import words
from breakwater.policy.usage import STANDARD_TERMS, Usage

TOKENS_PER_PRICE = 1_000_000


@dataclass(frozen=True, slots=True)
class TokenKind:
    """Tokens that may have a price of their own.

    Attributes:
        whole: `input` or `output`, of which they are a part.
        percent: of its price they are taken to cost where theirs is not known.
        certain: providers charge just that, so it is no estimate.
    """

    whole: str
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
"""Makers count images and film that they are sent as any input. The percentages are about the highest that the price
list has of chat models, of caches Anthropic's."""

_SAID = ("output", "reasoning")

_TERMS = dict.fromkeys(("flex", "batch", "scale", "reserved", "provisioned_throughput"), 100) | {"us": 110, "fast": 600}
"""Percent of the standard price for terms that cost no more, were paid before, add a fixed share, or are Anthropic's
dearest."""
_OTHER_TERMS = 250
"""The most that the price list has, for OpenAI's `priority`."""
KNOWN_TERMS = STANDARD_TERMS | _TERMS.keys() | {"priority", "performance", "premium", "eu", "ultrafast"}


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of a call.

    Attributes:
        nano: nano-dollars.
        doubt: what no price is known for, so that it is an estimate.
        unknown: what no price is known for, and was not estimated either: the cost is not known.
    """

    nano: int
    doubt: str | None = None
    unknown: str | None = None


@dataclass(frozen=True, slots=True)
class Rates:
    """Prices of a model in nano-dollars per million tokens.

    Attributes:
        steps: by kind, `input` and `output` among them, the price above so many tokens of input, the lowest first.
            None where none is known.
        per_call: nano-dollars in addition to the tokens.
    """

    steps: Mapping[str, Sequence[tuple[int, int | None]]]
    per_call: int = 0
    _highest: dict[tuple[tuple[str, ...], frozenset[int]], int] = field(
        default_factory=dict[tuple[tuple[str, ...], frozenset[int]], int], init=False, repr=False, compare=False
    )
    """Results of `_dearest`: prices stay the same, and so mostly do the kinds and steps of a model's calls."""

    def _rate(self, kind: str, tokens: int) -> tuple[int, bool]:
        """The price of a kind in a call with so much input, and whether it is known."""
        found = None
        for above, nano in self.steps.get(kind, ()):
            if tokens > above:
                found = nano
        if found is not None:
            return found, True
        rule = KINDS[kind]
        whole, _ = self._rate(rule.whole, tokens)
        return -(-whole * rule.percent // 100), rule.certain

    def cost(self, usage: Usage, terms: Sequence[str] = ()) -> Cost | None:
        """Cost of a call, rounded half up once to whole nano-dollars. None where its usage is unknown.

        Args:
            usage: of the call. Parts that are more than the whole count from the dearest on.
            terms: on which it was served and which these prices are not of.
        """
        if usage.input_tokens is None or usage.output_tokens is None:
            return None
        written, hour = usage.cache_write_tokens or 0, usage.parts.get("cache_write_1h", 0)
        parts = {
            "cached": usage.cached_tokens,
            "reasoning": usage.reasoning_tokens,
            **usage.parts,
            "cache_write": written - min(hour, written),
        }
        used = [(KINDS[kind].whole, kind, tokens) for kind, tokens in parts.items() if tokens]
        exact, unknown = 0, [f"the terms {term!r}" for term in terms]
        for whole, left in (("input", usage.input_tokens), ("output", usage.output_tokens)):
            of_whole = [(*self._rate(kind, usage.input_tokens), kind, count) for of, kind, count in used if of == whole]
            for rate, known, kind, count in sorted(of_whole, reverse=True):
                tokens = min(count, left)
                exact, left = exact + tokens * rate, left - tokens
                if tokens and not known:
                    unknown.append(f"{kind.replace('_', ' ')} tokens")
            exact += left and left * self._rate(whole, usage.input_tokens)[0]
        nano = (2 * exact + TOKENS_PER_PRICE) // (2 * TOKENS_PER_PRICE) + self.per_call
        for term in terms:
            nano = -(-nano * _TERMS.get(term, _OTHER_TERMS) // 100)
        return Cost(nano, f"no price is known for {' and '.join(unknown)}" if unknown else None)

    def worst_case(self, input_tokens: int, max_tokens: int, asked: InputSize) -> int:
        """The most that a call can cost, at the dearest of the prices that may apply."""
        # A provider may write the whole input into its cache by itself, and charge more for that.
        writes = "cache_write" in self.steps or asked.cache_ttl_s
        kinds = ["input", "cached", *(["cache_write"] if writes else [])]
        if asked.cache_ttl_s > SHORT_CACHE_S:
            kinds.append("cache_write_1h")
        reached = frozenset(above + 1 for steps in self.steps.values() for above, _ in steps if above < input_tokens)
        exact = input_tokens * self._dearest(kinds, reached)
        exact += max_tokens and max_tokens * self._dearest(_SAID, reached)
        if sound := min(asked.sound_tokens, input_tokens):
            exact += sound * (self._dearest([*kinds, "input_audio"], reached) - self._dearest(kinds, reached))
        return (2 * exact + TOKENS_PER_PRICE) // (2 * TOKENS_PER_PRICE) + self.per_call

    def _dearest(self, kinds: Iterable[str], reached: frozenset[int]) -> int:
        key = tuple(kinds), reached
        if (nano := self._highest.get(key)) is None:
            nano = self._highest[key] = max([self._rate(kind, tokens)[0] for tokens in reached for kind in kinds])
        return nano


@dataclass(frozen=True, slots=True)
class Tariff:
    """Prices of a model: its standard rates, those on other terms that are known, and those of calls of tools."""

    standard: Rates
    on_terms: Mapping[str, Rates] = field(default_factory=dict[str, Rates])
    tools: Mapping[str, int] = field(default_factory=dict[str, int])

    def cost(self, usage: Usage) -> Cost | None:
        """Cost of a call. None where its usage is unknown."""
        known = next((term for term in usage.terms if term in self.on_terms), None)
        rates = self.standard if known is None else self.on_terms[known]
        cost = rates.cost(usage, [term for term in usage.terms if term != known])
        return cost if cost is None or not usage.tools else self._with_tools(cost, usage)

    def _with_tools(self, cost: Cost, usage: Usage) -> Cost:
        """The cost with that of the tools that the provider ran: at the config's prices, else at their makers'."""
        nano = cost.nano
        for tool, calls in usage.tools.items():
            nano += calls * self.tools[tool] if tool in self.tools else usage.fees.get(tool, 0)
        estimated = [tool for tool in usage.tools if tool not in self.tools]
        unknown = [tool for tool in estimated if tool not in usage.fees]
        doubt = f"no price is known for the tools {', '.join(estimated)}" if estimated else None
        return Cost(nano, "; ".join(filter(None, (cost.doubt, doubt))) or None, doubt if unknown else None)

    def worst_case(self, input_tokens: int, max_tokens: int, asked: InputSize | None = None) -> int | None:
        """The most that a call can cost, on the standard terms or on those that it asks for.

        Args:
            input_tokens: a high estimate.
            max_tokens: all the output that it may have.
            asked: what it sends.
        """
        asked = asked or InputSize()
        rates = [self.standard, *([self.on_terms[asked.term]] if asked.term in self.on_terms else [])]
        return max(one.worst_case(input_tokens, max_tokens, asked) for one in rates)


class TokenPrices(Message):
    """Prices in USD per million tokens. Kinds of tokens without a price of their own are estimated."""

    input_usd_per_mtok: UsdAmount
    output_usd_per_mtok: UsdAmount
    cached_input_usd_per_mtok: UsdAmount | None = Field(default=None, description="By default the input price.")
    cache_write_usd_per_mtok: UsdAmount | None = Field(
        default=None, description="By default 1.25 times the input price, as an estimate."
    )
    cache_write_1h_usd_per_mtok: UsdAmount | None = Field(
        default=None, description="Of what is kept for an hour. By default twice the input price, as an estimate."
    )
    audio_input_usd_per_mtok: UsdAmount | None = Field(
        default=None, description="By default 16 times the input price, as an estimate."
    )
    audio_output_usd_per_mtok: UsdAmount | None = Field(
        default=None, description="By default ten times the output price, as an estimate."
    )


_PRICED = {
    "input": "input_usd_per_mtok",
    "output": "output_usd_per_mtok",
    "cached": "cached_input_usd_per_mtok",
    "cache_write": "cache_write_usd_per_mtok",
    "cache_write_1h": "cache_write_1h_usd_per_mtok",
    "input_audio": "audio_input_usd_per_mtok",
    "output_audio": "audio_output_usd_per_mtok",
}


class TierPrices(TokenPrices):
    """Prices of calls with a long input: of all their tokens, and not only of those above."""

    above_tokens: int = Field(ge=1, description="Calls with more tokens of input have these prices.")


class Price(TokenPrices):
    """Prices of a model."""

    tiers: tuple[TierPrices, ...] = Field(default=(), description="Prices of calls with a long input.")
    service_tiers: dict[str, TokenPrices] = Field(
        default_factory=dict,
        description="Prices where the answer says that it was served on other terms: `priority`. Jobs may ask for "
        "these terms.",
    )

    def tariff(self) -> Tariff:
        """The prices as they are applied."""
        tiers = [(-1, self), *sorted(((tier.above_tokens, tier) for tier in self.tiers), key=itemgetter(0))]
        terms = {name.strip().lower(): _rates([(-1, prices)]) for name, prices in self.service_tiers.items()}
        return Tariff(_rates(tiers), terms)


def _rates(tiers: Sequence[tuple[int, TokenPrices]]) -> Rates:
    steps = {kind: [(above, getattr(one, name)) for above, one in tiers] for kind, name in _PRICED.items()}
    return Rates({kind: found for kind, found in steps.items() if any(nano is not None for _, nano in found)})


CHOICES = ("n", "best_of")
MAX_CHOICES = 128


def choices_of(params: Mapping[str, JsonValue]) -> int:
    """Number of answers a request has made: those that it asks for, or of which it asks for the best."""
    return max(_positive(params.get(name)) or 1 for name in CHOICES)


def max_tokens_of(params: Mapping[str, JsonValue], default: int) -> int:
    """The output limit of a request: the higher one where it has two, else the default."""
    given = [value for name in OUTPUT_LIMITS if (value := _positive(params.get(name))) is not None]
    return max(given, default=default)


def max_output_of(params: Mapping[str, JsonValue], default: int) -> int:
    """The most tokens that a call may give: all of its choices, what it may think, and what was predicted wrongly.

    Thinking is within the limit of the output wherever that is documented. Two budgets of it are not: Anthropic's may
    be more than the limit where a model thinks between tool calls, and Alibaba's comes on top of it. OpenAI charges
    each token of a `prediction` that is not in the answer as one of the output.
    """
    within = max(max_tokens_of(params, default), *(_budget(_part(params.get(name), key)) for name, key in _THINKING))
    predicted = 0 if (prediction := params.get("prediction")) is None else len(_json(prediction))
    return (within + _budget(params.get("thinking_budget")) + predicted) * choices_of(params)


OBSERVED, ENOUGH = 1000, 100
"""The latest calls whose output is remembered, and how many of them are enough to go by."""
MARGIN = 2


def observed_limit(params: Mapping[str, JsonValue], default: int, outputs: Sequence[int]) -> int | None:
    """The output limit of a call that is held for what answers have been like; None: that of the request.

    Not where several answers are asked for, or where the model may think beyond its limit.

    Args:
        params: of the request.
        default: the agent's limit, where the request has none.
        outputs: the tokens of the latest answers.
    """
    most = max_tokens_of(params, default)
    if len(outputs) < ENOUGH or max_output_of(params, default) != most:
        return None
    limit = max(1, MARGIN * max(outputs))
    return limit if limit < most else None


def limited(params: Mapping[str, JsonValue], limit: int) -> dict[str, JsonValue]:
    """The request's parameters with an output limit of at most that."""
    return {
        name: min(_positive(value) or limit, limit) if name in OUTPUT_LIMITS else value
        for name, value in params.items()
    }


_THINKING = (("thinking", "budget_tokens"), ("reasoning", "max_tokens"))
OUTPUT_LIMITS = ("max_tokens", "max_completion_tokens")
MAX_OUTPUT_TOKENS = 10_000_000


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
SHORT_CACHE_S, LONG_CACHE_S = 300, 3600
_IN_PLAIN_TEXT = ("text/", "application/json", "application/xml")


@dataclass(frozen=True, slots=True)
class InputSize:
    """Size of what a call sends, to be added up.

    Attributes:
        lowercase: bytes of small Latin letters and spaces, of which a token holds several.
        signs: bytes of the rest of ASCII (capitals, digits, punctuation, line ends), and all of what is no text.
        foreign: bytes of every other script.
        images: inline and by URL.
        media_bytes: of sound and film, decoded.
        documents: PDFs and the like that are sent along.
        document_bytes: of those, decoded.
        linked_files: files that are only named, by URL or id, so that their size is not known.
        messages: of the conversation.
        tools: whether there are tools or a schema, for which providers add instructions of their own.
        provided_tools: tools that the provider defines itself, which the request only names.
        cache_ttl_s: for how long the provider is asked to keep some of it in its cache; 0 where it is not asked to.
        term: on which it is to be served (`service_tier`); empty for the standard ones.
        label_bytes: of the names of fields of messages, and of their labels, which count with the messages.
        body_bytes: of the JSON that is sent; 0 where they are not counted (`with_each_byte`).
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
    def sound_tokens(self) -> int:
        """Number of its tokens that may be sound; that of a file which is only named is not known."""
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
    """Size of what a call sends apart from its conversation: tools, other params, and the schema of its answer.

    Args:
        params: what goes to the provider with the messages.
        schema: what the provider is to hold the answer to.
        input: of a job that has no messages.
    """
    tally = _Tally()
    for name in _TOOLS:
        tally.take_tools(params.get(name))
    if more := {name: value for name, value in params.items() if name not in _TOOLS}:
        tally.others.append(more)
    tally.documents += [_json(value) for value in (schema, input) if value is not None]
    instructed = schema is not None or _part(params.get("text"), "format") is not None
    tools = instructed or any(params.get(name) for name in _WITH_INSTRUCTIONS)
    return tally.size() + InputSize(tools=tools, term=term_of(params) or "")


def term_of(params: Mapping[str, JsonValue]) -> str | None:
    """The terms that a request asks for; None for the standard ones."""
    tier = params.get("service_tier")
    term = tier.strip().lower() if isinstance(tier, str) else ""
    return None if term in STANDARD_TERMS else term


def size_of_messages(messages: Iterable[Any]) -> InputSize:
    """Size of a conversation. Only what a provider reads as an image or a file is not counted as text or by its bytes.

    OpenAI's messages, items and parts are understood, and Anthropic's blocks, also within a tool's result.
    """
    tally, count = _Tally(), 0
    for count, message in enumerate(messages, 1):  # noqa: B007  the last count is how many there are
        tally.take(message)
    return tally.size(messages=count)


def size_of_inputs(inputs: Iterable[str | Sequence[int]]) -> InputSize:
    """Size of texts that are to be embedded, each by itself. One that comes as token ids has no other tokens."""
    texts, tokens, count = list[bytes](), 0, 0
    for count, one in enumerate(inputs, 1):  # noqa: B007  the last count is how many there are
        if isinstance(one, str):
            texts.append(_encoded(one))
        else:
            tokens += len(one)
    return _size_of_bytes(b"".join(texts), messages=count) + InputSize(signs=tokens)


BYTES_OF_SMALL_BODIES = 8_192
"""Up to here each byte of a body is reserved as a token: that costs little, and a short text may be all rare words."""
ENVELOPE_BYTES = 24
"""Bytes of a body around its content, but for the name of its model."""


def with_each_byte(size: InputSize, body: Any) -> InputSize:
    """The size of a body with its bytes, which are counted where it may be small."""
    size_bytes = size.lowercase + size.signs + size.foreign
    has_files = size.images or size.documents or size.media_bytes > BYTES_OF_SMALL_BODIES
    if size_bytes < BYTES_OF_SMALL_BODIES and not has_files:
        size_bytes = len(encoded(body))
    return size + InputSize(body_bytes=size_bytes)


def size_of_added(messages: Sequence[Any]) -> InputSize:
    """Size of messages that a repair adds to a call."""
    return with_each_byte(size_of_messages(messages), messages) if messages else InputSize()


def _size_of_bytes(text: bytes, messages: int = 0, label_bytes: int = 0) -> InputSize:
    # Deleting in C is some thirty times as fast as looking at each character.
    foreign = 0 if text.isascii() else len(text.translate(None, _ASCII))
    others = len(text.translate(None, _LOWERCASE))
    lowercase, signs = len(text) - others, others - foreign
    return InputSize(lowercase, signs, foreign, messages=messages, label_bytes=label_bytes)


def _cache_ttl_s(document: bytes) -> int:
    """The time for which JSON asks a provider to cache: an hour, unless each mark is known to ask for less."""
    marks = document.count(_CACHE)
    if not marks:
        return 0
    return SHORT_CACHE_S if len(_SHORT_CACHE.findall(document)) == marks else LONG_CACHE_S


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _json(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        # Numbers beyond 64 bits are JSON, too.
        return _encoded(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


_READ = words(
    """
    arguments content context data encrypted_content function_call input output reasoning reasoning_content refusal
    signature stderr stdout summary text thinking thinking_blocks title tool_calls
    """
)
"""Fields of messages, items and parts that a model reads as text."""
_OF_TOOL = words(
    """
    cache_control custom defer_loading description format function input_examples input_schema name parameters strict
    tools type
    """
)
"""Fields of tools that a model reads as text."""
_DEFINED_BY_CLIENT = (None, "function", "custom", "namespace")
"""Types of tools whose definition is all in the request."""
_LABELS = ("role", "type")
_LABEL_LENGTH = 32
_STRUCTURE_OF_MESSAGE, _STRUCTURE_OF_TEXT = len('{"role":"","content":""},'), len('{"type":"","text":""},')
_DESCRIPTION_BYTES = 128
"""Bytes next to an image or a document, such as its title, that count with it."""


def _parts_in_item(item: Mapping[str, Any], kind: Any) -> str | None:
    """The field of a message or an item that holds parts, perhaps files; None where none does."""
    if kind in (None, "message"):
        return "content" if "role" in item else None
    if isinstance(kind, str) and kind.endswith("_output"):
        return "output"
    return "content" if kind == "reasoning" else None


def _parts_in_block(kind: Any) -> str | None:
    """The same of a block of a message's content."""
    holds_parts = isinstance(kind, str) and (kind.endswith("tool_result") or kind == "search_result")
    return "content" if holds_parts else None


def _structure(holder: Mapping[str, Any]) -> int:
    """Bytes of the names of fields, with quotes, colons and commas, and of labels."""
    labels = (value for name in _LABELS if isinstance(value := holder.get(name), str))
    return sum(map(len, holder)) + 6 * len(holder) + sum(map(len, labels))


_NOTHING = InputSize()


@dataclass(slots=True)
class _Tally:
    """Parts of a request, by how they are counted.

    Attributes:
        texts: without their quotes.
        documents: JSON that a model reads as text.
        others: values whose bytes are counted.
        structure: bytes of the names of fields, less those that count with a file.
        label_bytes: see `InputSize`.
        files: images and files.
        provided_tools: see `InputSize`.
    """

    texts: list[bytes] = field(default_factory=list[bytes])
    documents: list[bytes] = field(default_factory=list[bytes])
    others: list[Any] = field(default_factory=list[Any])
    structure: int = 0
    label_bytes: int = 0
    files: InputSize = _NOTHING
    provided_tools: int = 0

    def size(self, messages: int = 0) -> InputSize:
        """The size of all of it."""
        documents, others = b"".join(self.documents), _json(self.others)[1:-1] if self.others else b""
        read = _size_of_bytes(b"".join((*self.texts, documents)), messages, self.label_bytes)
        if others or self.structure or self.provided_tools or documents:
            counted = len(others) - max(0, len(self.others) - 1) + self.structure  # without the commas between them
            ttl_s = max(_cache_ttl_s(documents), _cache_ttl_s(others))
            read += InputSize(signs=counted, provided_tools=self.provided_tools, cache_ttl_s=ttl_s)
        return read if self.files is _NOTHING else read + self.files

    def take(self, message: Any) -> None:
        """Counts a message or an item, whose own labels count with it."""
        match message:
            case {"role": str() as role, "content": str() as text} if len(message) == 2 and len(role) <= _LABEL_LENGTH:
                self.texts.append(_encoded(text))
                self.label_bytes += _STRUCTURE_OF_MESSAGE + len(role)
            case {"type": "item_reference" | "image_generation_call" as kind}:
                self.files += InputSize(linked_files=1) if kind == "item_reference" else InputSize(images=1)
                self.others.append(message)
            case dict():
                holder = cast(dict[str, Any], message)
                self.label_bytes += _structure(holder)
                self._take_fields(holder, _parts_in_item(holder, holder.get("type")))
            case _:
                self._take_content(message)

    def take_tools(self, tools: Any) -> None:
        """Counts tools as text, and the bytes of what is not known to be text."""
        if tools is not None:
            self.documents.append(_json(tools))
            self._take_each_tool(tools)

    def _take_each_tool(self, tools: Any) -> None:
        for tool in cast(list[Any], tools if isinstance(tools, list) else [tools]):
            if not isinstance(tool, dict):
                self.others.append(tool)
                continue
            definition = cast(dict[str, Any], tool)
            if definition.get("type") not in _DEFINED_BY_CLIENT:
                self.provided_tools += 1
            for holder in (definition, fields(definition.get("function"))):
                if not holder.keys() <= _OF_TOOL:
                    self.others.append({name: value for name, value in holder.items() if name not in _OF_TOOL})
            if "tools" in definition:
                self._take_each_tool(definition["tools"])

    def _take_fields(self, holder: Mapping[str, Any], parts_in: str | None) -> None:
        unknown = dict[str, Any]()
        for name, value in holder.items():
            if name == parts_in:
                self._take_content(value)
            elif name in _READ and isinstance(value, str):
                self.texts.append(_encoded(value))
            elif name in _READ and name != "content":
                self.documents.append(_json(value))
            elif name == "tools":
                self.take_tools(value)
            elif not (name in _LABELS and isinstance(value, str) and len(value) <= _LABEL_LENGTH):
                unknown[name] = value
        if unknown:
            self.others.append(unknown)

    def _take_content(self, content: Any) -> None:
        match content:
            case None:
                pass
            case str():
                self.texts.append(_encoded(content))
            case list():
                for part in cast(list[Any], content):
                    if isinstance(part, dict | str):
                        self.structure += 3  # quotes of a text, and a comma
                        self._take_content(part)
                    else:
                        self.others.append(part)
                        self.structure += 1
            case {"type": str() as kind, "text": str() as text} if len(content) == 2 and len(kind) <= _LABEL_LENGTH:
                self.texts.append(_encoded(text))
                self.structure += _STRUCTURE_OF_TEXT + len(kind)
            case {"type": str() as kind} if kind in FILES:
                self._take_file(kind, cast(dict[str, Any], content))
            case dict():
                part = cast(dict[str, Any], content)
                self.structure += _structure(part)
                self._take_fields(part, _parts_in_block(part.get("type")))
            case _:
                self.others.append(content)

    def _take_file(self, kind: str, part: Mapping[str, Any]) -> None:
        name, payload = payload_of(part)
        content, covered = ("content",), 0
        if payload.get("type") == "content":
            self._take_content(payload.get("content"))  # blocks of a document of Anthropic's
        elif payload.get("type") == "text" and isinstance(text := payload.get("data"), str):
            content = ("data",)
            self.texts.append(_encoded(text))
        else:
            found = content_of(payload)
            size, content = _size_of_file(kind, found), () if found.field is None else (found.field,)
            covered = _DESCRIPTION_BYTES if size.images or size.documents or size.linked_files else 0
            self.files += size
        beside = [{key: value for key, value in payload.items() if key not in content}]
        if name is not None:
            beside.append({key: value for key, value in part.items() if key != name})
        self.others += beside
        if covered:
            self.structure -= min(covered, sum(map(len, map(_json, beside))))


def _size_of_file(kind: str, found: FileContent) -> InputSize:
    if found.data is None:
        return InputSize(images=1) if kind in IMAGES else InputSize(linked_files=1)
    if found.media_type.startswith(_IN_PLAIN_TEXT):
        return _size_of_bytes(_decoded(found.data))
    if found.media_type.startswith("image/") or (kind in IMAGES and not found.media_type):
        return InputSize(images=1)
    if found.media_type.startswith(("audio/", "video/")) or (kind in SOUND_AND_FILM and not found.media_type):
        return InputSize(media_bytes=found.size)
    return InputSize(documents=1, document_bytes=found.size)


def _decoded(data: str) -> bytes:
    try:
        return binascii.a2b_base64(_encoded(data), strict_mode=True)
    except binascii.Error:
        return _encoded(data)  # not base64 then, but the text itself


BASE_TOKENS = 32
"""Tokens of a call around its messages."""
PROVIDED_TOOL_TOKENS = 2_000
"""Tokens of a tool that the provider defines, with its instructions. Anthropic documents up to 735 of a definition and
499 of instructions."""
PAGE_TEXT_TOKENS = 3_000
"""Tokens of a page of a PDF, in addition to its picture: Anthropic documents 1,500 to 3,000."""
BYTES_PER_DOCUMENT_TOKEN = 2
"""Bytes of a PDF for a token. Its text is compressed, and each page is a picture as well; scans come to far less."""
BYTES_PER_MEDIA_TOKEN = 32
"""Bytes of sound and film for a token: Gemini's 32 a second, at one kilobyte a second. Speech is seldom smaller."""
LINKED_FILE_TOKENS = 200_000
"""Tokens of a file whose size is not known: all that fits in the context of most models."""

MAX_INPUT_TOKENS = 100_000_000
"""Tokens that no model takes: the provider refuses such a call, at any estimated cost."""


@dataclass(frozen=True, slots=True)
class TokenRules:
    """A provider's way to count. A sign of ASCII other than a small letter may be a token with all of them.

    Attributes:
        lowercase_bytes: bytes of small Latin letters and spaces for a token.
        foreign_bytes: bytes of other scripts for a token. Byte-level tokenizers make no more than one of each.
        image_tokens: for the largest image at the highest resolution.
        tool_tokens: of the instructions that a provider adds where there are tools or a schema.
        message_tokens: of the separator of two messages.
        message_bytes: that a message of a chat has more in the provider's own API.
    """

    lowercase_bytes: float
    foreign_bytes: float
    image_tokens: int
    tool_tokens: int
    message_tokens: int = 8
    message_bytes: int = 0


OPENAI = TokenRules(lowercase_bytes=2.0, foreign_bytes=1.2, image_tokens=12_000, tool_tokens=200)
"""Images: 10,000 patches of GPT-5.4's `detail: original`, and a fifth for what its multipliers may add."""
ANTHROPIC = TokenRules(lowercase_bytes=1.75, foreign_bytes=1.2, image_tokens=5_000, tool_tokens=1_000, message_bytes=24)
"""Text: Opus 4.7 makes up to 1.47 times the tokens of its predecessors of the same text. Images: 2,576 pixels at the
long edge are 4,784 tokens. Tools: up to 530 tokens documented, and headroom for newer models."""
GEMINI = TokenRules(lowercase_bytes=2.0, foreign_bytes=1.5, image_tokens=5_000, tool_tokens=200)
"""Images: 258 tokens for each tile, at most sixteen of them; at most 2,240 tokens with Gemini 3."""
GENERIC = TokenRules(lowercase_bytes=1.75, foreign_bytes=1.0, image_tokens=16_384, tool_tokens=1_000)
"""Rules of an endpoint that serves anything. Images: Qwen-VL's own limit."""

_OPENAI_IMAGES = (("gpt-4o-mini", 48_169), ("gpt-4o", 1_445), ("gpt-4-turbo", 1_445), ("gpt-4.1", 3_779))
"""Base and eight tiles at high detail (2,833 + 8 x 5,667 and 85 + 8 x 170); 1,536 patches by nano's 2.46."""
_OPENAI_NAME = re.compile(r"(ft:)?(gpt-|chatgpt-|o\d)")


def estimate_input_tokens(size: InputSize, rules: TokenRules) -> int:
    """A high estimate of the tokens that a provider will count as input."""
    files = size.document_bytes / BYTES_PER_DOCUMENT_TOKEN + size.media_bytes / BYTES_PER_MEDIA_TOKEN
    total = (
        math.ceil(_text_tokens(size, rules) + files)
        + size.images * rules.image_tokens
        + size.documents * (rules.image_tokens + PAGE_TEXT_TOKENS)
        + size.linked_files * LINKED_FILE_TOKENS
        + (rules.tool_tokens if size.tools else 0)
        + size.provided_tools * PROVIDED_TOOL_TOKENS
    )
    return min(total, MAX_INPUT_TOKENS)


def worst_input_tokens(estimated: int, size: InputSize, rules: TokenRules, model: str) -> int:
    """The most tokens that a provider may count as input: labels have as many as bytes, and so has a small body.

    Args:
        estimated: by `estimate_input_tokens`.
        size: of all that is sent.
        rules: of the provider.
        model: its name there.
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
    """The tokens that a request probably has: no high estimate, and nothing that a budget may go by.

    Of English prose about four characters are a token, of code and JSON three, and of other scripts one or two.
    """
    text = size.lowercase / 4.2 + size.signs * 0.45 + size.foreign / 2.5
    files = size.document_bytes / 20 + size.media_bytes / BYTES_PER_MEDIA_TOKEN
    return max(1, math.ceil(text + files) + 4 * size.messages + 1_500 * (size.images + size.linked_files))


@lru_cache(maxsize=1024)
def rules_for(kind: str, base_url: str, models: tuple[str, ...], image_tokens: int | None = None) -> TokenRules:
    """The rules of a model.

    Args:
        kind: of its provider.
        base_url: of its provider; empty where it has none.
        models: the names it goes by, the surest first: an Azure deployment's own name may say nothing.
        image_tokens: of the config, which wins.
    """
    names = [model.rpartition("/")[2].lower() for model in models]
    rules = _rules_of(kind, base_url, names)
    if rules is OPENAI:
        known = (most for part, most in _OPENAI_IMAGES for name in names if part in name)
        rules = replace(rules, image_tokens=next(known, rules.image_tokens))
    return rules if image_tokens is None else replace(rules, image_tokens=image_tokens)


def _rules_of(kind: str, base_url: str, names: list[str]) -> TokenRules:
    # The model's own name first: a gateway serves those of every maker.
    if kind == "anthropic" or any("claude" in name for name in names):
        return ANTHROPIC
    if "googleapis.com" in base_url or any("gemini" in name for name in names):
        return GEMINI
    if kind == "azure" or "api.openai.com" in base_url or any(_OPENAI_NAME.match(name) for name in names):
        return OPENAI
    return GENERIC
