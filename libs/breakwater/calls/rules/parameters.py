"""Finds the parameters that a provider refuses, and that may be left out of the next call.

Parameters have their names in chat completions here, whatever the API. A refused parameter that the plane or the agent
added is always left out; one that the client sent, only if the agent allows it and the model does not know it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from breakwater.calls.rules.classify import INSTEAD, NOT_SENT, UNSUPPORTED, Classification, says_unsupported
from breakwater.dialects.rules.context_overflow import most_output_in
from breakwater.kernel.formats import words
from breakwater.prices.rules.price import OUTPUT_LIMITS

MAX_LEFT_OUT = 8
"""The most parameters that are left out for one model; after that, its refusals count as the request's fault."""

_ALIASES: Mapping[str, tuple[str, ...]] = {
    "max_tokens": ("max_output_tokens",),
    "parallel_tool_calls": ("tool_choice.disable_parallel_tool_use", "disable_parallel_tool_use"),
    "reasoning_effort": ("reasoning.effort", "output_config.effort", "effort"),
    "response_format": ("text.format", "output_config.format", "output_format", "response format"),
    "stop": ("stop_sequences",),
    "stream_options": ("include_usage",),
    "thinking": ("thinking.budget_tokens", "budget_tokens"),
    "user": ("metadata.user_id",),
    "verbosity": ("text.verbosity",),
}
"""Names of the parameters in other APIs."""
_PLAIN = words("logprobs reasoning seed temperature thinking tools verbosity")
"""Single words that are parameters wherever an error contains them."""
_CONVERSATION = words(
    """
    conversation input instructions max_output_tokens messages model previous_response_id prompt stream system
    """
)
"""Fields of requests that can't be left out without changing the question."""
TRANSLATED = (*OUTPUT_LIMITS, "encoding_format")
"""Parameters that are sent under another name, or that the plane implements itself."""
_REFUSALS = frozenset({400, 415, 422})
_MAX_TEXT = 4_000
"""The number of characters of a provider's text that are searched."""


@dataclass(frozen=True, slots=True)
class RefusedParams:
    """Parameters to leave out.

    Attributes:
        names: their names in chat completions.
        lasting: True if the model does not know them, so that later calls omit them, too.
    """

    names: tuple[str, ...]
    lasting: bool


def refused_params(
    failure: Classification, added: Collection[str], droppable: Collection[str], client_params: Collection[str]
) -> RefusedParams | None:
    """Returns the parameters that a provider names in its refusal and that may be left out; None if there are none.

    Args:
        failure: the refusal.
        added: parameters of the call that its client did not send.
        droppable: the client's parameters that may be left out if the model does not know them.
        client_params: all parameters that the client sent.
    """
    if failure.kind != "client" or failure.status_code not in _REFUSALS:
        return None
    unsupported = failure.class_name in {UNSUPPORTED, NOT_SENT} or says_unsupported(failure.message)
    text = INSTEAD.sub("", failure.message[:_MAX_TEXT])
    # An output limit that is too high is lowered.
    renames = unsupported and most_output_in(failure.message) is None
    candidates = [name for name in sorted(added) if renames or name not in OUTPUT_LIMITS]
    if names := _candidates_in(failure.param, text, candidates):
        mentioned = [name for name in {*added, *client_params} if _position(text, name) is not None]
        return RefusedParams(names, lasting=unsupported and len(mentioned) <= len(names))
    if not unsupported:
        return None
    optional = [name for name in sorted(droppable) if name not in _CONVERSATION and name not in OUTPUT_LIMITS]
    names = _candidates_in(failure.param, text, optional, is_param=_is_whole)
    return RefusedParams(names, lasting=False) if names else None


def _candidates_in(
    param: str | None, text: str, candidates: Iterable[str], *, is_param: Callable[[str], bool] = bool
) -> tuple[str, ...]:
    """Returns the candidates that the place at fault names, or else the candidate that the text mentions first."""
    if param is not None and is_param(param):
        names = tuple(name for name in candidates if _is_named_by(param, name))
        if names:
            return names
    positions = [(position, name) for name in candidates if (position := _position(text, name)) is not None]
    return (min(positions)[1],) if positions else ()


def _is_whole(param: str) -> bool:
    """Returns True for a parameter, False for an element of one: `tools[0].name` is the request's fault."""
    return re.search(r"\[|\.\d", param) is None


@lru_cache(maxsize=1024)
def _is_named_by(param: str, name: str) -> bool:
    head = _normal(field_of(param))
    for alias in (name, *_ALIASES.get(name, ())):
        if _normal(alias) == _normal(param) or (alias == name and _normal(name) == head):
            return True
        if "." in alias and _normal(param) == _normal(alias.partition(".")[0]):
            return True
    return False


def _normal(name: str) -> str:
    """Returns the common form of a name in any spelling, such as `presencePenalty` and `presence-penalty`."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _position(text: str, name: str) -> int | None:
    match = _mention(name).search(text)
    return None if match is None else match.start()


@lru_cache(maxsize=1024)
def _mention(name: str) -> re.Pattern[str]:
    patterns: list[str] = []
    for alias in (name, *_ALIASES.get(name, ())):
        first, *more = alias.split("_")
        word = "|".join(map(re.escape, dict.fromkeys((alias, first + "".join(part.title() for part in more)))))
        if more or "." in alias or " " in alias or alias in _PLAIN:
            patterns.append(rf"(?<![\w.])(?:{word})(?!\w)")
            continue
        kind = r"(?:parameter|param|argument|field|property|properties|key|option|name|input)s?"
        patterns += [
            rf"['\"`\u2018\u201c\[(](?:{word})['\"`\u2019\u201d\])]",
            rf"^(?:{word}):",
            rf"\b{kind}\b[^.;]{{0,60}}?\b(?:{word})\b",
            rf"\b(?:{word}) {kind}\b",
        ]
    return re.compile("|".join(patterns), re.I | re.M)


def is_droppable(path: str) -> bool:
    """Returns True for the path of a parameter, False for one in the conversation or in a list."""
    return _is_whole(path) and field_of(path) not in _CONVERSATION


def field_of(path: str) -> str:
    """Returns the field of a request that a path is in."""
    return re.split(r"[.\[]", path)[0]


def own_params(params: Iterable[str], body: Iterable[str] = ()) -> frozenset[str]:
    """Returns the parameters that a client sent.

    Args:
        params: the request's parameters, by their names in chat completions.
        body: the fields of the request in its own API.
    """
    return frozenset(params) | {name for name in body if name not in _CONVERSATION}


def without_fields(body: Mapping[str, object], paths: Iterable[str]) -> dict[str, object]:
    """Returns a body without the fields at some paths, such as `reasoning.effort`. An object left empty is removed."""
    remaining = dict(body)
    for path in paths:
        head, _, inner = path.partition(".")
        value = remaining.get(head)
        if not inner:
            remaining.pop(head, None)
        elif isinstance(value, dict):
            part = {name: item for name, item in value.items() if name != inner}  # pyright: ignore[reportUnknownVariableType]
            if part:
                remaining[head] = part
            else:
                del remaining[head]
    return remaining
