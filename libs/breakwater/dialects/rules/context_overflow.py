"""Context overflows: reads the figures in a provider's refusal, and rewords it for the client's API.

Coding agents shorten a conversation only if the refusal has their API's wording. Figures that a provider does not state
stay unknown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from breakwater.dialects.rules.provider_words import known_or_hash
from breakwater.jobs.contract.job import CallApi

_SAFETY = 0.9
"""The share of the calculated room that is used, because tokens are not evenly spread over a text."""
_MIN_RATIO = 0.1
_MAX_RATIO = 0.9
_MAX_TEXT = 4_000
"""The number of characters of a provider's text that are searched."""
_N = r"(?P<{}>\d[\d,]{{0,14}})"
_LIMIT, _USED, _INPUT, _OUTPUT = (_N.format(name) for name in ("limit", "used", "input", "output"))
_OVERFLOWS = tuple(
    re.compile(pattern, re.I | re.S)
    for pattern in (
        # OpenAI, DeepSeek, vLLM, OpenRouter
        rf"maximum context length is {_LIMIT} tokens.{{1,80}}?requested (about )?\d[\d,]* tokens"
        rf" \({_INPUT} (of text input|in (the|your) \w+)[,;] {_OUTPUT} (in|for) ",
        rf"maximum context length is {_LIMIT} tokens.{{1,80}}?(resulted in|requested) (about )?{_USED} tokens",
        rf"maximum context length is {_LIMIT} tokens.{{1,40}}?requested {_OUTPUT} output tokens"
        rf" and your prompt contains (?P<least>at least )?{_INPUT} input",
        rf"context length of {_LIMIT} tokens.{{1,40}}?tokens: {_INPUT} tokens .{{1,40}}? and {_OUTPUT} tokens for",
        rf"passed {_INPUT} input tokens and requested {_OUTPUT} output tokens.{{1,80}}?length is only {_LIMIT} tokens",
        rf"too large: {_OUTPUT}\. .{{1,40}}?context length is {_LIMIT} tokens and your request has {_INPUT} input",
        rf"limit of {_LIMIT} tokens.{{1,80}}?resulted in {_USED} tokens",
        # Groq, OpenAI
        rf"too large for .{{1,300}}?Limit {_LIMIT}, Requested {_USED}",
        # Cerebras
        rf"current length is {_USED} while limit is {_LIMIT}",
        # vLLM
        rf"passed {_USED} input tokens.{{1,80}}?context length is only {_LIMIT} tokens",
        rf"prompt \(?length {_USED}\)? .{{1,40}}?max(?:imum model length of|_model_len) {_LIMIT}",
        # xAI
        rf"maximum prompt length is {_LIMIT} .{{1,40}}?contains {_USED} tokens",
        # Anthropic
        rf"exceed context limit: {_INPUT} \+ {_OUTPUT} > {_LIMIT}",
        rf"too long: {_USED} tokens > {_LIMIT}",
        # Fireworks
        rf"too long: {_USED}, .{{1,40}}?context length: {_LIMIT}",
        # Gemini
        rf"token count \({_USED}\) exceeds .{{1,60}}? \({_LIMIT}\)",
        # GitHub
        rf"token count of {_USED} exceeds the limit of {_LIMIT}",
        # Mistral
        rf"contains {_USED} tokens.{{1,80}}?model with {_LIMIT} maximum",
        # llama.cpp
        rf"\({_USED} tokens\) exceeds .{{1,40}}?\({_LIMIT} tokens\)",
        rf"\({_USED} tokens\) is too large to process.{{1,60}}?batch size: {_LIMIT}\)",
        # Text Generation Inference, Together
        rf"must be <= {_LIMIT}\. Given: {_INPUT} `inputs` tokens and {_OUTPUT} `max_new_tokens`",
    )
)


def keep_ratio_from(message: str) -> float | None:
    """Returns the share of a conversation that fits, by the limit and the tokens in a provider's refusal.

    Returns:
        A share for `trim`, from 0.1 to 0.9, with a margin; None if the text has no such numbers.
    """
    numbers = _numbers(message)
    # The answer's part of the window is not available to the conversation.
    room = numbers.get("limit", 0) - numbers.get("output", 0)
    used = numbers.get("input", numbers.get("used", 0))
    return min(max(room / used * _SAFETY, _MIN_RATIO), _MAX_RATIO) if used else None


MIN_OUTPUT_TOKENS = 16
"""The fewest tokens that make a useful answer."""


def output_limit_from(message: str) -> int | None:
    """Returns the output limit that fits into the context window after the conversation, by a provider's refusal.

    Returns:
        Tokens; None if the text has no such numbers, or the conversation alone does not fit.
    """
    numbers = _numbers(message)
    if "output" not in numbers:
        return None
    room = numbers["limit"] - numbers["input"]
    if "least" in numbers:
        room = min(room, numbers["output"] // 2)  # the provider did not count the whole input
    return room if room >= MIN_OUTPUT_TOKENS else None


_OUTPUT_LIMITS = tuple(
    re.compile(pattern, re.I)
    for pattern in (
        # OpenAI, Azure
        rf"supports at most {_LIMIT} (?:completion|output) tokens",
        # DeepSeek
        rf"valid range of max_tokens is \[1, ?{_LIMIT}\]",
        # Groq
        rf"max_(?:completion_)?tokens`? must be less than or equal to `?{_LIMIT}",
        # Anthropic, and what is compatible with it
        rf"max_tokens: [\d,]{{1,20}} > {_LIMIT}, which is the maximum",
    )
)


def most_output_in(message: str) -> int | None:
    """Returns the most output tokens of a model that a provider's refusal states; None if it states none."""
    match = next((match for pattern in _OUTPUT_LIMITS if (match := pattern.search(message[:_MAX_TEXT]))), None)
    return None if match is None else _figure(match["limit"])


MAX_FIGURE = 100_000_000
"""The most tokens that are believed: no context is longer, and a higher number counts something else."""
_BARE_NUMBER = re.compile(r"(?<![a-z0-9_.,:/-])(?:\d{1,3}(?:,\d{3})+|\d{4,9})(?![a-z0-9_/-]|[.,:]\d)", re.I)
"""A number that is not part of a name, a version, a date or an address."""
_OF_OTHER_UNITS = re.compile(
    r"per (?:second|minute|hour|day)|\b(?:[tr]p[md]|bytes?|[km]i?b|characters?|chars|seconds?|max_\w*tokens)\b", re.I
)


def _numbers(message: str) -> dict[str, int]:
    text = message[:_MAX_TEXT]
    for pattern in _OVERFLOWS:
        if (match := pattern.search(text)) is not None:
            groups = {name: number for name, number in match.groupdict().items() if number is not None}
            return {name: _figure(number) if number[0].isdigit() else 1 for name, number in groups.items()}
    if _OF_OTHER_UNITS.search(text):
        return {}
    # In an unknown wording with two numbers, the lower one is the limit that the higher one exceeds.
    numbers = {_figure(number) for number in _BARE_NUMBER.findall(text) if known_or_hash(number) != number}
    return {"limit": min(numbers), "used": max(numbers)} if len(numbers) == 2 else {}


def _figure(number: str) -> int:
    return int(number.replace(",", ""))


_OF_CHAT = re.compile(r".*(?:maximum context length is [\d,]+ tokens|exceeds the context window of this model)", re.I)
_OWN_WORDS: Mapping[CallApi, re.Pattern[str]] = {
    "chat": _OF_CHAT,
    "embeddings": _OF_CHAT,
    "messages": re.compile(r"prompt is too long|input length and `max_tokens` exceed context limit", re.I),
    "responses": re.compile(r".*exceeds the context window of this model", re.I),
}
"""The wordings of each API's maker."""
_WINDOW = "Your input exceeds the context window of this model"
_ADJUST = "Please adjust your input and try again."


def overflow_message(message: str, api: CallApi) -> str:
    """Returns the refusal of a call that is too long, in the wording of the client's API.

    Args:
        message: the provider's message. It is returned unchanged if it has that wording, and appended to it if it
            states no figures.
        api: the API of the client's request.
    """
    if _OWN_WORDS[api].match(message):
        return message
    figures = _figures(message)
    if figures is None:
        return ": ".join(filter(None, ("prompt is too long" if api == "messages" else _WINDOW, message)))
    limit, used, output = figures
    if api == "messages":
        return _as_message(limit, used, output)
    sentence = f"This model's maximum context length is {limit} tokens. However, "
    if output:
        parts = f"{used} in the messages, {output} in the completion"
        sentence += f"you requested {used + output} tokens ({parts}). "
        sentence += "Please reduce the length of the messages or completion."
    else:
        sentence += f"your messages resulted in {used} tokens. Please reduce the length of the messages."
    return f"{_WINDOW}. {_ADJUST} {sentence}" if api == "responses" else sentence


def overflow_summary(message: str) -> str | None:
    """Returns the figures of a refusal, without the provider's own words; None if it states none."""
    figures = _figures(message)
    return None if figures is None else _as_message(*figures)


def _as_message(limit: int, used: int, output: int) -> str:
    if not output or used > limit:
        return f"prompt is too long: {used} tokens > {limit} maximum"
    why = "decrease input length or `max_tokens` and try again"
    return f"input length and `max_tokens` exceed context limit: {used} + {output} > {limit}, {why}"


def _figures(message: str) -> tuple[int, int, int] | None:
    """Returns the limit, the conversation's tokens and the requested output tokens; None unless they explain it."""
    numbers = _numbers(message)
    limit = numbers.get("limit")
    output = numbers.get("output", 0)
    used = numbers.get("input", numbers.get("used"))
    if limit is None or used is None or used + output <= limit or max(used, output) > MAX_FIGURE:
        return None
    return limit, used, output
