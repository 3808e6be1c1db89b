"""Reads the usage of a call from its provider's answer.

Providers share two dialects but fill them in differently: `docs/costs.md` has a table of who counts what where. A
report that contradicts itself is read at the highest that it can mean, and `Usage.problem` states the contradiction,
because the bill may differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from decimal import Decimal, InvalidOperation
from functools import reduce
from typing import Any, cast

from breakwater.jobs.rules.chat_messages import fields
from breakwater.kernel.immutable import immutable

MAX_USAGE = 100_000_000
"""The most tokens that one call can have. The largest models read and write a few million."""


@immutable()
class Usage:
    """The tokens of a call. A count is None when it was not reported, or cannot be true.

    Attributes:
        input_tokens: all input, including the tokens that were read from or written to a cache.
        output_tokens: all output, including reasoning.
        cached_tokens: the part of the input that was read from a cache.
        cache_write_tokens: the part of the input that was written to a cache.
        reasoning_tokens: the part of the output that is reasoning.
        parts: other tokens that may have their own price, by their kind (`price.KINDS`): `cache_write_1h` is a part of
            `cache_write_tokens`, `input_…` of the input, all others of the output.
        terms: the terms that the call was served on, in the provider's words; empty for its standard terms.
        problem: what is contradictory or impossible in the report; None if nothing is.
        tools: how often the provider ran its tools, by the tool's name.
        fees: nano-dollars for all runs of a tool at the provider's list price, by the tool's name, where it is known.
        model: the model that answered, in the provider's words.
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
    """Returns the reported usage; if one call cannot have used so much, return an unknown usage with the problem."""
    counts = {name: tokens for name in _COUNTS if (tokens := getattr(usage, name)) is not None}
    if usage.parts:
        counts |= {f"{kind} tokens": tokens for kind, tokens in usage.parts.items()}
    if max(counts.values(), default=0) <= MAX_USAGE:
        return usage
    name, tokens = next((name, tokens) for name, tokens in counts.items() if tokens > MAX_USAGE)
    report = f"{Decimal(tokens):.3g} {name.replace('_', ' ')} were reported"
    return Usage(None, None, problem=f"{report}, over {MAX_USAGE:,} are not credible for one call", model=usage.model)


_MAX_FIGURE = 10**18
"""Higher numbers are read as this one, so that sums of some of them have the 64 bits that JSON is written with."""


def figure(value: Any) -> int | None:
    """Reads a number of tokens, which may be a string; None for anything else. Fractions are rounded up."""
    if type(value) is int:
        return min(value, _MAX_FIGURE) if value >= 0 else None
    if isinstance(value, bool) or not isinstance(value, float | str):
        return None
    try:
        number = Decimal(value)
    except InvalidOperation:
        return None
    if not number.is_finite() or number < 0:
        return None
    return math.ceil(min(number, _MAX_FIGURE))


ESTIMATED = "estimated"
"""The field that marks the figures of a usage as our estimates."""


def with_estimated_usage(answer: Mapping[str, Any], estimate: Usage) -> dict[str, Any]:
    """Returns an answer of any dialect with the estimated usage, marked as such, in place of an unreported one."""
    names = ("prompt_tokens", "completion_tokens") if "choices" in answer else ("input_tokens", "output_tokens")
    counts = dict(zip(names, (estimate.input_tokens or 0, estimate.output_tokens or 0), strict=True))
    total = {} if "content" in answer else {"total_tokens": sum(counts.values())}
    return {**answer, "usage": {**counts, **total, ESTIMATED: True}}


def is_estimated(answer: Mapping[str, Any]) -> bool:
    """Returns True if an answer's usage is our estimate."""
    return fields(answer.get("usage")).get(ESTIMATED) is True


def highest(earlier: Any, later: Any) -> Any:
    """Merges the usage of two events of a stream: the higher one of each figure, and the later one of all else."""
    if isinstance(earlier, dict) and isinstance(later, dict):
        merged = cast(dict[str, Any], earlier)
        updates = cast(dict[str, Any], later)
        return {**merged, **{name: highest(merged.get(name), value) for name, value in updates.items()}}
    earlier_tokens = figure(earlier)
    if earlier_tokens is not None and ((later_tokens := figure(later)) is None or later_tokens < earlier_tokens):
        return earlier
    return earlier if later is None else later


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
"""The fields that may report each figure, by its meaning."""
_FEES = {
    "server_tool_use.web_search_requests": ("web_search", 10_000_000),  # Anthropic: $10 for a thousand
    "num_sources_used": ("live_search", 25_000_000),  # xAI
    "num_search_queries": ("search_queries", 5_000_000),  # Perplexity
}
"""The tool that each field counts, and the provider's list price of one run, in nano-dollars."""
_MEANING = {place: meaning for meaning, places in _PLACES.items() for place in places} | {
    place: place for place in _FEES
}
_MODALITIES = {"audio_tokens": "audio", "image_tokens": "image", "video_tokens": "video"}
_NO_KINDS = frozenset(
    {"text_tokens", "reasoning_tokens", "thinking_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens"}
)
"""Details whose tokens cost the same as any others of their direction."""


def _kind(place: str) -> tuple[str, str] | None:
    """Returns the direction and the name of a detail whose tokens may have their own price; None for other fields."""
    outer, _, name = place.rpartition(".")
    direction = "input" if outer in _INPUT_DETAILS else "output" if outer in _OUTPUT_DETAILS else None
    if direction is None or not name.endswith("_tokens") or "cache" in name or name in _NO_KINDS:
        return None
    return direction, name


STANDARD_TERMS = frozenset({"", "auto", "default", "standard", "standard_only", "on_demand", "global", "not_available"})
_MAX_TERM = 40


def of_completion(answer: Mapping[str, Any], *, thinks_apart: bool = False) -> Usage | None:
    """Returns the usage of a chat completion in OpenAI's dialect; None if none is reported.

    Args:
        answer: the whole completion.
        thinks_apart: True if the provider counts reasoning neither as output nor in the total.
    """
    report = next((report for report in _reports(answer) if report), None)
    if report is None:
        return None
    figures = _ReportedFigures(report)
    tokens = figures.most("input")
    cached = figures.least("cached")
    missed = figures.most("missed")
    if missed is not None and (hits_and_misses := missed + (cached or 0)) > (tokens or 0):
        if tokens:
            figures.doubt(f"{hits_and_misses} tokens in and not in a cache are more than {tokens} of input")
        tokens = hits_and_misses
    written, written_1h = figures.cache_writes(figures.most("written"))
    cache_tokens = (cached or 0) + (written or 0)
    if tokens is not None and cache_tokens > tokens:
        figures.doubt(f"{cache_tokens} tokens from and to a cache are more than {tokens} of input")
        tokens += cache_tokens
    return figures.usage(answer, tokens, cached, written, written_1h, thinks_apart=thinks_apart)


def of_embeddings(answer: Mapping[str, Any]) -> Usage | None:
    """Returns the usage of embeddings in OpenAI's dialect; all tokens are input. Some providers report only a total."""
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
"""Types of output items that record a tool's run by the provider."""


def of_response(answer: Mapping[str, Any]) -> Usage | None:
    """Returns the usage of a response in OpenAI's dialect, with the tools that the provider ran."""
    usage = of_completion(answer)
    items = answer.get("output")
    if usage is None or not isinstance(items, list):
        return usage
    tools = dict[str, int]()
    for item in map(fields, cast(list[Any], items)):
        # A search is charged; opening a page that it found is free.
        is_free = fields(item.get("action")).get("type", "search") != "search"
        if (kind := str(item.get("type"))) in _HOSTED_CALLS and not is_free:
            tools[kind.removesuffix("_call")] = tools.get(kind.removesuffix("_call"), 0) + 1
    searches = figure(fields(fields(answer.get("tool_usage")).get("web_search")).get("num_requests"))
    if searches is not None:
        tools["web_search"] = searches
    return replace(usage, tools={**usage.tools, **{name: calls for name, calls in tools.items() if calls}})


def of_message(answer: Mapping[str, Any]) -> Usage | None:
    """Returns the usage of a message in Anthropic's dialect, whose input excludes the tokens from or to a cache.

    None if none is reported.
    """
    report = answer.get("usage")
    if not report:
        return None
    # The tokens spent on compacting the conversation are counted only in the iterations.
    steps = fields(report).get("iterations")
    if isinstance(steps, list) and steps:
        report = highest(report, reduce(_add, map(fields, cast(list[Any], steps))))
    figures = _ReportedFigures(report)
    tokens = figures.most("input")
    cached = figures.least("cached")
    written, written_1h = figures.cache_writes(figures.most("written"))
    if tokens is not None:
        tokens += (cached or 0) + (written or 0)
    usage = figures.usage(answer, tokens, cached, written, written_1h)
    server_tools = _server_tools(answer.get("content"))
    if not server_tools:
        return usage
    # Searches are counted in the usage; fetching is free, and so is running code in an answer that searches or fetches.
    runs_code_free = usage.tools or "web_fetch" in server_tools
    uncounted = {"web_search", "web_fetch", *(("code_execution",) if runs_code_free else ())}
    counted_tools = {name: uses for name, uses in server_tools.items() if name not in uncounted}
    return replace(usage, tools={**usage.tools, **counted_tools})


def _server_tools(content: Any) -> dict[str, int]:
    """Counts the uses of tools that Anthropic ran, by their names."""
    uses = dict[str, int]()
    for block in map(fields, cast(list[Any], content) if isinstance(content, list) else ()):
        name = block.get("name")
        if block.get("type") != "server_tool_use" or not isinstance(name, str) or name.startswith("tool_search_"):
            continue
        name = "code_execution" if name.endswith("code_execution") else name
        uses[name] = uses.get(name, 0) + 1
    return uses


def model_of(answer: Mapping[str, Any]) -> str | None:
    """Returns the model that answered; None if the answer does not name it."""
    model = answer.get("model")
    return model if isinstance(model, str) and model else None


def _reports(answer: Mapping[str, Any]) -> Iterator[Any]:
    """Yields the fields that may hold the usage: Groq's streams have their own, Moonshot's use the last choice."""
    yield answer.get("usage")
    yield fields(answer.get("x_groq")).get("usage")
    choices = answer.get("choices")
    for choice in cast(list[Any], choices) if isinstance(choices, list) else ():
        yield fields(choice).get("usage")


def _add(total: Any, step: Any) -> Any:
    if isinstance(total, dict) and isinstance(step, dict):
        totals = cast(dict[str, Any], total)
        additions = cast(dict[str, Any], step)
        return {**totals, **{name: _add(totals.get(name), value) for name, value in additions.items()}}
    total_tokens = figure(total)
    return step if total_tokens is None else total_tokens + (figure(step) or 0)


def _leaves(reported: Mapping[str, Any], outer: str = "") -> Iterator[tuple[str, Any]]:
    """Yields each reported value with its place, such as `prompt_tokens_details.cached_tokens`."""
    for name, value in reported.items():
        if isinstance(value, dict):
            yield from _leaves(cast(dict[str, Any], value), f"{outer}{name}.")
        elif value is not None:
            yield f"{outer}{name}", value


def _figure_name(meaning: str | tuple[str, str]) -> str:
    """Describes the meaning of a figure in our own words, because a provider may put anything into a field's name."""
    if isinstance(meaning, str):
        return meaning
    direction, name = meaning
    return name if name in _MODALITIES else f"other {direction} tokens"


class _ReportedFigures:
    """The figures of a reported usage by their meaning, and the contradictions between them."""

    def __init__(self, reported: Any) -> None:
        self._reported = fields(reported)
        self._problems: list[str] = []
        self._figures: dict[str | tuple[str, str], list[int]] = {}
        self._kinds: list[tuple[str, str]] = []
        for place, value in _leaves(self._reported):
            meaning = _MEANING.get(place)
            if meaning is None:
                meaning = _kind(place)
                if meaning is None:
                    continue
                self._kinds.append(meaning)
            tokens = figure(value)
            if tokens is None:
                self.doubt(f"{place if place in _MEANING else _figure_name(meaning)} is no number of tokens")
            else:
                self._figures.setdefault(meaning, []).append(tokens)
        for meaning, figures in self._figures.items():
            if len(figures) > 1 and len({tokens for tokens in figures if tokens}) > 1:
                self.doubt(f"two figures of the same tokens differ ({_figure_name(meaning)})")
        if not self._reported:
            self.doubt("what was reported as usage is no object")

    def doubt(self, problem: str) -> None:
        self._problems.append(problem)

    def most(self, meaning: str) -> int | None:
        """Returns the highest of the figures with this meaning; None if there are none."""
        return max(self._figures.get(meaning, ()), default=None)

    def least(self, meaning: str) -> int | None:
        """Returns the lowest figure above zero, for tokens that cost less than others; zero if all figures are zero."""
        figures = self._figures.get(meaning, ())
        return min(filter(None, figures), default=max(figures, default=None))

    def cache_writes(self, written: int | None) -> tuple[int | None, int]:
        """Returns the tokens that were written to a cache, and how many of them for an hour."""
        written_1h = self.most("1h") or 0
        with_lifetime = written_1h + (self.most("5m") or 0)
        if written and with_lifetime > written:
            self.doubt(f"{with_lifetime} tokens were written to a cache for some time, and {written} at all")
        total = max(with_lifetime, written or 0) if with_lifetime or written is not None else None
        return total, written_1h

    def _parts(self, direction: str) -> dict[str, int]:
        """Returns the tokens of a direction that may have their own price, by their kind."""
        parts: dict[str, int] = {}
        for detail in dict.fromkeys(self._kinds):
            if detail[0] == direction and (tokens := max(self._figures.get(detail, (0,)))):
                kind = f"{direction}_{_MODALITIES.get(detail[1], 'other')}"
                parts[kind] = parts.get(kind, 0) + tokens
        return parts

    def _total(self, tokens: int | None, parts: Mapping[str, int], direction: str) -> int | None:
        """Returns all tokens of a direction; parts that exceed the reported total are added to it."""
        special = sum(parts.values())
        if tokens is None or special <= tokens:
            return tokens
        self.doubt(f"{special} {direction} tokens of special kinds are more than {tokens} of all")
        return tokens + special

    def usage(
        self,
        answer: Mapping[str, Any],
        tokens: int | None,
        cached: int | None,
        written: int | None,
        written_1h: int,
        *,
        thinks_apart: bool = False,
    ) -> Usage:
        """Builds the usage from the figures of the input, which each dialect adds up in its own way."""
        input_parts = self._parts("input")
        output_parts = self._parts("output")
        tokens = self._total(tokens, input_parts, "input")
        if tokens == 0:
            self.doubt("0 input tokens were reported")
            tokens = None
        reported_output = self._total(self.most("output"), output_parts, "output")
        output = self._output(tokens, reported_output, thinks_apart=thinks_apart)
        if cited := self.most("citation"):
            output = (output or 0) + cited
            output_parts["citation"] = cited
        words = (answer.get("service_tier"), *map(self._reported.get, ("service_tier", "speed", "inference_geo")))
        fees = {} if _FEES.keys().isdisjoint(self._figures) else _FEES
        tools = {name: uses for place, (name, _) in fees.items() if (uses := self.most(place))}
        terms = (word.strip().lower()[:_MAX_TERM] for word in words if isinstance(word, str))
        return Usage(
            tokens,
            output,
            cached,
            written,
            self.most("reasoning"),
            {**({"cache_write_1h": written_1h} if written_1h else {}), **input_parts, **output_parts},
            tuple(term for term in dict.fromkeys(terms) if term not in STANDARD_TERMS),
            "; ".join(dict.fromkeys(self._problems)) or None,
            tools,
            {name: nano * tools[name] for name, nano in fees.values() if name in tools},
            model_of(answer),
        )

    def _output(self, tokens: int | None, output: int | None, *, thinks_apart: bool) -> int | None:
        """Returns the output with its reasoning, or all tokens of the total beyond the input if those are more."""
        answered = output or 0
        reasoning = self.most("reasoning") or 0
        apart = thinks_apart or reasoning > answered
        all_output = answered + reasoning if apart else answered
        total = self.most("total")
        if total and tokens is not None and (beyond_input := total - tokens) != all_output:
            if beyond_input > all_output:
                all_output = beyond_input
            elif not (thinks_apart and beyond_input == answered):
                self.doubt(f"the parts are {tokens + all_output} tokens, and the total is {total}")
        elif apart and reasoning and not total and not thinks_apart:
            self.doubt(f"{reasoning} tokens of reasoning are more than {answered} of output")
        return all_output if all_output or output is not None else None
