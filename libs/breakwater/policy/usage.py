"""Usage of a call, as its provider reports it.

Providers share two dialects and not one way to fill them in: `docs/costs.md` has a table of who counts what where. What
can't be true as it is written is read at the highest that it can mean, and says so (`Usage.problem`): the bill may
differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal, InvalidOperation
from functools import reduce
from typing import Any, cast

from breakwater.policy.chat_messages import fields

MAX_USAGE = 100_000_000
"""Tokens. The largest models take and give a few million in one call."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a call. None where nothing, or nothing that can be true, was reported.

    Attributes:
        input_tokens: all of them, those read from a cache or written to one included.
        output_tokens: all of them, reasoning included.
        cached_tokens: of the input, read from a cache.
        cache_write_tokens: of the input, written to a cache.
        reasoning_tokens: of the output.
        parts: others that may have prices of their own, by their kind (`price.KINDS`): `cache_write_1h` of the tokens
            written to a cache, `input_…` of the input, others of the output.
        terms: on which the call was served, in the provider's words; none for its standard ones.
        problem: what can't be true of what was reported.
        tools: calls of tools that the provider ran, by their names.
        fees: nano-dollars that such calls cost at their makers' prices, by the same names; only of some of them.
        model: that answered, in the provider's words.
    """

    input_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None = None
    cache_write_tokens: int | None = None
    reasoning_tokens: int | None = None
    parts: Mapping[str, int] = field(default_factory=dict[str, int])
    terms: tuple[str, ...] = ()
    problem: str | None = None
    tools: Mapping[str, int] = field(default_factory=dict[str, int])
    fees: Mapping[str, int] = field(default_factory=dict[str, int])
    model: str | None = field(default=None, compare=False)


_COUNTS = ("cached_tokens", "cache_write_tokens", "reasoning_tokens", "input_tokens", "output_tokens")


def credible(usage: Usage) -> Usage:
    """The reported usage; nothing but the problem where it can't be what a call used."""
    named = {name: tokens for name in _COUNTS if (tokens := getattr(usage, name)) is not None}
    if usage.parts:
        named |= {f"{kind} tokens": tokens for kind, tokens in usage.parts.items()}
    if max(named.values(), default=0) <= MAX_USAGE:
        return usage
    what, tokens = next((what, tokens) for what, tokens in named.items() if tokens > MAX_USAGE)
    said = f"{Decimal(tokens):.3g} {what.replace('_', ' ')} were reported"
    return Usage(None, None, problem=f"{said}, over {MAX_USAGE:,} are not credible for one call", model=usage.model)


_MOST = Decimal(10) ** 40


def figure(value: Any) -> int | None:
    """A number of tokens, also one that is written as a text; None for anything else. Parts of a token are one."""
    if type(value) is int:
        return value if value >= 0 else None
    if isinstance(value, bool) or not isinstance(value, float | str):
        return None
    try:
        number = Decimal(value)
    except InvalidOperation:
        return None
    if not number.is_finite() or number < 0:
        return None
    return math.ceil(min(number, _MOST))


ESTIMATED = "estimated"
"""The field of a usage that marks its figures as our estimates."""


def with_estimated_usage(answer: Mapping[str, Any], estimate: Usage) -> dict[str, Any]:
    """An answer of any API with an estimated usage, marked as such, in place of one that was not reported."""
    names = ("prompt_tokens", "completion_tokens") if "choices" in answer else ("input_tokens", "output_tokens")
    counts = dict(zip(names, (estimate.input_tokens or 0, estimate.output_tokens or 0), strict=True))
    total = {} if "content" in answer else {"total_tokens": sum(counts.values())}
    return {**answer, "usage": {**counts, **total, ESTIMATED: True}}


def is_estimated(answer: Mapping[str, Any]) -> bool:
    """True for an answer whose usage is our estimate."""
    return fields(answer.get("usage")).get(ESTIMATED) is True


def highest(known: Any, given: Any) -> Any:
    """Usage that two events of a stream report together: the higher one of each figure, and of all else the later."""
    if isinstance(known, dict) and isinstance(given, dict):
        before, more = cast(dict[str, Any], known), cast(dict[str, Any], given)
        return {**before, **{name: highest(before.get(name), value) for name, value in more.items()}}
    tokens = figure(known)
    if tokens is not None and ((later := figure(given)) is None or later < tokens):
        return known
    return known if given is None else given


_INPUT_DETAILS = ("prompt_tokens_details", "input_tokens_details")
_OUTPUT_DETAILS = ("completion_tokens_details", "output_tokens_details")
_PLACES = {
    "input": ("prompt_tokens", "input_tokens"),
    "output": ("completion_tokens", "output_tokens"),
    "total": ("total_tokens",),
    "cached": (
        *(f"{details}.cached_tokens" for details in _INPUT_DETAILS),
        "prompt_cache_hit_tokens",
        "cached_tokens",
        "cache_read_input_tokens",
        "cached_prompt_text_tokens",
    ),
    "missed": ("prompt_cache_miss_tokens",),
    "written": (
        *(
            f"{details}.{name}"
            for details in _INPUT_DETAILS
            for name in ("cache_write_tokens", "cache_creation_tokens", "cache_creation_input_tokens")
        ),
        "cache_creation_input_tokens",
    ),
    **{
        lifetime: tuple(
            f"{outer}cache_creation.ephemeral_{lifetime}_input_tokens"
            for outer in ("", *(f"{details}." for details in _INPUT_DETAILS))
        )
        for lifetime in ("1h", "5m")
    },
    "reasoning": (
        *(f"{details}.{name}" for details in _OUTPUT_DETAILS for name in ("reasoning_tokens", "thinking_tokens")),
        "reasoning_tokens",
        "thinking_tokens",
    ),
    "citation": ("citation_tokens",),
}
"""Places of figures of the same tokens."""
_FEES = {
    "server_tool_use.web_search_requests": ("web_search", 10_000_000),  # Anthropic: $10 for a thousand
    "num_sources_used": ("live_search", 25_000_000),  # xAI
    "num_search_queries": ("search_queries", 5_000_000),  # Perplexity
}
"""Tools by the places of their counts, and what a call costs at their makers."""
_MEANING = {place: what for what, places in _PLACES.items() for place in places} | {place: place for place in _FEES}
_MODALITIES = {"audio_tokens": "audio", "image_tokens": "image", "video_tokens": "video"}
_NO_KINDS = frozenset(
    {"text_tokens", "reasoning_tokens", "thinking_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens"}
)
"""Details that cost what all of it costs."""


def _kind(place: str) -> tuple[str, str] | None:
    """The direction and the name of tokens in the details that have a price of their own."""
    outer, _, name = place.rpartition(".")
    direction = "input" if outer in _INPUT_DETAILS else "output" if outer in _OUTPUT_DETAILS else None
    if direction is None or not name.endswith("_tokens") or "cache" in name or name in _NO_KINDS:
        return None
    return direction, name


STANDARD_TERMS = frozenset({"", "auto", "default", "standard", "standard_only", "on_demand", "global", "not_available"})
_MAX_TERM = 40


def of_completion(answer: Mapping[str, Any], *, thinks_apart: bool = False) -> Usage | None:
    """The usage of a chat completion in OpenAI's dialect; None where none is reported.

    Args:
        answer: the whole completion.
        thinks_apart: the provider counts reasoning neither into the output nor into the total.
    """
    reported = next((one for one in _reports(answer) if one), None)
    if reported is None:
        return None
    figures = _ReportedFigures(reported)
    tokens, cached, written = figures.most("input"), figures.least("cached"), figures.most("written")
    missed = figures.most("missed")
    if missed is not None and (seen := missed + (cached or 0)) > (tokens or 0):
        if tokens:
            figures.doubt(f"{seen} tokens in and not in a cache are more than {tokens} of input")
        tokens = seen
    written, hour = figures.written(written)
    aside = (cached or 0) + (written or 0)
    if tokens is not None and aside > tokens:
        figures.doubt(f"{aside} tokens from and to a cache are more than {tokens} of input")
        tokens += aside
    return figures.usage(answer, tokens, cached, written, hour, thinks_apart=thinks_apart)


def of_embeddings(answer: Mapping[str, Any]) -> Usage | None:
    """The usage of embeddings in OpenAI's dialect: all of it is input, and some makers report the total alone."""
    reported = fields(answer.get("usage"))
    if not reported:
        return None
    if not any(name in reported for name in _PLACES["input"]):
        reported = {"prompt_tokens": reported.get("total_tokens"), **reported}
    usage = of_completion({**answer, "usage": reported})
    if usage is None or usage.input_tokens is None:
        return usage
    return replace(usage, input_tokens=usage.input_tokens + (usage.output_tokens or 0), output_tokens=0)


_HOSTED_CALLS = frozenset(
    f"{name}_call" for name in ("code_interpreter", "file_search", "image_generation", "mcp", "web_search")
)
"""Types of items that say that a provider has run a tool."""


def of_response(answer: Mapping[str, Any]) -> Usage | None:
    """The usage of a response in OpenAI's dialect, with the calls of tools that the provider ran."""
    usage = of_completion(answer)
    items = answer.get("output")
    if usage is None or not isinstance(items, list):
        return usage
    tools = dict[str, int]()
    for item in map(fields, cast(list[Any], items)):
        # A page that a search found is opened for nothing.
        is_free = fields(item.get("action")).get("type", "search") != "search"
        if (kind := str(item.get("type"))) in _HOSTED_CALLS and not is_free:
            tools[kind.removesuffix("_call")] = tools.get(kind.removesuffix("_call"), 0) + 1
    searches = figure(fields(fields(answer.get("tool_usage")).get("web_search")).get("num_requests"))
    if searches is not None:
        tools["web_search"] = searches
    return replace(usage, tools={**usage.tools, **{name: calls for name, calls in tools.items() if calls}})


def of_message(answer: Mapping[str, Any]) -> Usage | None:
    """The usage of a message in Anthropic's dialect, which counts tokens from and to the cache apart from the input."""
    reported = answer.get("usage")
    if not reported:
        return None
    # What a conversation was made shorter with is counted there alone.
    steps = fields(reported).get("iterations")
    if isinstance(steps, list) and steps:
        reported = highest(reported, reduce(_added, map(fields, cast(list[Any], steps))))
    figures = _ReportedFigures(reported)
    tokens, cached = figures.most("input"), figures.least("cached")
    written, hour = figures.written(figures.most("written"))
    if tokens is not None:
        tokens += (cached or 0) + (written or 0)
    usage = figures.usage(answer, tokens, cached, written, hour)
    ran = _server_tools(answer.get("content"))
    if not ran:
        return usage
    # Searches are counted in the usage, fetching is free, and so is code where the same answer searches or fetches.
    left_out = {"web_search", "web_fetch", *(("code_execution",) if usage.tools or "web_fetch" in ran else ())}
    return replace(usage, tools={**usage.tools, **{name: ran[name] for name in ran if name not in left_out}})


def _server_tools(content: Any) -> dict[str, int]:
    """The calls of tools that Anthropic ran, by their names."""
    found = dict[str, int]()
    for block in map(fields, cast(list[Any], content) if isinstance(content, list) else ()):
        name = block.get("name")
        if block.get("type") != "server_tool_use" or not isinstance(name, str) or name.startswith("tool_search_"):
            continue
        name = "code_execution" if name.endswith("code_execution") else name
        found[name] = found.get(name, 0) + 1
    return found


def model_of(answer: Mapping[str, Any]) -> str | None:
    """The model that answered, where the answer says so."""
    model = answer.get("model")
    return model if isinstance(model, str) and model else None


def _reports(answer: Mapping[str, Any]) -> Iterator[Any]:
    """Possible places of usage: Groq's streams have it in a field of their own, Moonshot's in the last choice."""
    yield answer.get("usage")
    yield fields(answer.get("x_groq")).get("usage")
    choices = answer.get("choices")
    for choice in cast(list[Any], choices) if isinstance(choices, list) else ():
        yield fields(choice).get("usage")


def _added(one: Any, other: Any) -> Any:
    if isinstance(one, dict) and isinstance(other, dict):
        before, more = cast(dict[str, Any], one), cast(dict[str, Any], other)
        return {**before, **{name: _added(before.get(name), value) for name, value in more.items()}}
    here, there = figure(one), figure(other)
    return other if here is None else here + (there or 0)


def _leaves(reported: Mapping[str, Any], outer: str = "") -> Iterator[tuple[str, Any]]:
    """Reported values, by their place: `prompt_tokens_details.cached_tokens`."""
    for name, value in reported.items():
        if isinstance(value, dict):
            yield from _leaves(cast(dict[str, Any], value), f"{outer}{name}.")
        elif value is not None:
            yield f"{outer}{name}", value


def _named(what: str | tuple[str, str]) -> str:
    """Meaning of figures, in words of ours: a provider may name anything."""
    return what if isinstance(what, str) else what[1] if what[1] in _MODALITIES else f"other {what[0]} tokens"


class _ReportedFigures:
    def __init__(self, reported: Any) -> None:
        self._reported = fields(reported)
        self._problems: list[str] = []
        self._found: dict[str | tuple[str, str], list[int]] = {}
        self._kinds: list[tuple[str, str]] = []
        for place, value in _leaves(self._reported):
            what = _MEANING.get(place)
            if what is None:
                what = _kind(place)
                if what is None:
                    continue
                self._kinds.append(what)
            tokens = figure(value)
            if tokens is None:
                self.doubt(f"{place if place in _MEANING else _named(what)} is no number of tokens")
            else:
                self._found.setdefault(what, []).append(tokens)
        for what, found in self._found.items():
            if len(found) > 1 and len({tokens for tokens in found if tokens}) > 1:
                self.doubt(f"two figures of the same tokens differ ({_named(what)})")
        if not self._reported:
            self.doubt("what was reported as usage is no object")

    def doubt(self, problem: str) -> None:
        self._problems.append(problem)

    def most(self, what: str) -> int | None:
        """The highest figure of those that mean the same; None where there is none."""
        return max(self._found.get(what, ()), default=None)

    def least(self, what: str) -> int | None:
        """The lowest, of tokens that cost less than others; a zero says nothing where there is another figure."""
        found = self._found.get(what, ())
        return min(filter(None, found), default=max(found, default=None))

    def written(self, written: int | None) -> tuple[int | None, int]:
        """Tokens that were written to a cache, and how many of them for an hour."""
        hour = self.most("1h") or 0
        both = hour + (self.most("5m") or 0)
        if written and both > written:
            self.doubt(f"{both} tokens were written to a cache for some time, and {written} at all")
        return (max(both, written or 0) if both or written is not None else None), hour

    def _parts(self, direction: str) -> dict[str, int]:
        parts: dict[str, int] = {}
        for what in dict.fromkeys(self._kinds):
            if what[0] == direction and (tokens := max(self._found.get(what, (0,)))):
                kind = f"{direction}_{_MODALITIES.get(what[1], 'other')}"
                parts[kind] = parts.get(kind, 0) + tokens
        return parts

    def _whole(self, tokens: int | None, parts: Mapping[str, int], what: str) -> int | None:
        """All tokens of a direction, of which the parts should be a part."""
        special = sum(parts.values())
        if tokens is None or special <= tokens:
            return tokens
        self.doubt(f"{special} {what} tokens of special kinds are more than {tokens} of all")
        return tokens + special

    def usage(
        self,
        answer: Mapping[str, Any],
        tokens: int | None,
        cached: int | None,
        written: int | None,
        hour: int,
        *,
        thinks_apart: bool = False,
    ) -> Usage:
        """The usage, from what is known of the input."""
        heard, said = self._parts("input"), self._parts("output")
        tokens = self._whole(tokens, heard, "input")
        if tokens == 0:
            self.doubt("0 input tokens were reported")
            tokens = None
        output = self._output(tokens, self._whole(self.most("output"), said, "output"), thinks_apart=thinks_apart)
        if cited := self.most("citation"):
            output, said["citation"] = (output or 0) + cited, cited
        words = (answer.get("service_tier"), *map(self._reported.get, ("service_tier", "speed", "inference_geo")))
        fees = {} if _FEES.keys().isdisjoint(self._found) else _FEES
        tools = {name: calls for place, (name, _) in fees.items() if (calls := self.most(place))}
        terms = (word.strip().lower()[:_MAX_TERM] for word in words if isinstance(word, str))
        return Usage(
            tokens,
            output,
            cached,
            written,
            self.most("reasoning"),
            {**({"cache_write_1h": hour} if hour else {}), **heard, **said},
            tuple(term for term in dict.fromkeys(terms) if term not in STANDARD_TERMS),
            "; ".join(dict.fromkeys(self._problems)) or None,
            tools,
            {name: nano * tools[name] for name, nano in fees.values() if name in tools},
            model_of(answer),
        )

    def _output(self, tokens: int | None, output: int | None, *, thinks_apart: bool) -> int | None:
        """The output: what the total has beyond the input, and reasoning, wherever it is counted."""
        said, thought = output or 0, self.most("reasoning") or 0
        apart = thinks_apart or thought > said
        most = said + thought if apart else said
        total = self.most("total")
        if total and tokens is not None and (rest := total - tokens) != most:
            if rest > most:
                most = rest
            elif not (thinks_apart and rest == said):
                self.doubt(f"the parts are {tokens + most} tokens, and the total is {total}")
        elif apart and thought and not total and not thinks_apart:
            self.doubt(f"{thought} tokens of reasoning are more than {said} of output")
        return most if most or output is not None else None
