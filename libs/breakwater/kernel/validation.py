"""Says what is wrong with a message: the path of each field, and what would be right."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn, cast

from pydantic import BaseModel, Field, ValidationError

from breakwater.kernel.types import NO_CONTROLS, NO_CONTROLS_OR_EMPTY, NO_SPACES


@dataclass(frozen=True, slots=True)
class FieldError:
    """One mistake in a message, and where it is."""

    path: Annotated[str, Field(description="A field path such as `messages.0.role`; empty for the whole message.")]
    message: Annotated[str, Field(description="What is wrong, or what would be right.")]


def problems(error: ValidationError, model: type[BaseModel] | None = None, document: Any = None) -> list[FieldError]:
    """Every problem of a validation, a line for each place, without the values that were given.

    Those may be secret.

    Args:
        error: what pydantic found.
        model: the message's model, to suggest the field that was meant.
        document: the message as parsed JSON; with it a path names places in it, and not pydantic's branches of unions.
    """
    known = list(model.model_fields) if model is not None else []
    found: dict[str, list[str]] = {}
    for detail in error.errors(include_url=False, include_input=False):
        path = ".".join(str(part) for part in detail["loc"]) if document is None else _place(detail, document)
        messages = found.setdefault(path, [])
        if (message := _message(detail, known)) not in messages:
            messages.append(message)
    return [FieldError(path, ", or ".join(messages)) for path, messages in found.items()]


def explain(error: ValidationError, model: type[BaseModel] | None = None, document: Any = None) -> str:
    """All problems in one line."""
    found = problems(error, model, document)
    return "; ".join(f"{problem.path}: {problem.message}" if problem.path else problem.message for problem in found)


def ambiguity(document: bytes) -> str | None:
    """Reason why JSON that was parsed is refused all the same; None where all readers take it alike.

    A second value of the same key, or a number that no double holds, is one thing to this reader and another to the
    next: what is checked would not be what a provider gets.
    """
    try:
        _DECODER.decode(document.decode(errors="surrogatepass"))
    except ValueError as error:
        return str(error)
    return None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {twice[:100]!r} occurs twice in one object")
    return found


def _finite(number: str) -> float:
    value = float(number)
    if math.isinf(value):
        raise ValueError(f"the number {number[:40]} is too large")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite, parse_constant=_no_constant)


def about_controls(detail: Any) -> str | None:
    """Words for a text that is refused for a control character; None for other mistakes."""
    pattern = detail["ctx"]["pattern"] if detail["type"] == "string_pattern_mismatch" else None
    if pattern == NO_SPACES:
        return "must not contain spaces or control characters; use a hyphen instead"
    if pattern in {NO_CONTROLS, NO_CONTROLS_OR_EMPTY}:
        return "must not contain control characters, line breaks or bidirectional control characters"
    return None


def _place(detail: Any, document: Any) -> str:
    """The part of a location that is in the document, or is missing there; the rest names branches of unions."""
    parts: list[str] = []
    here: Any = document
    for part in detail["loc"]:
        if isinstance(here, dict) and (part in here or detail["type"] == "missing"):
            parts.append(part)
            here = cast(dict[str, Any], here).get(part)
        elif isinstance(here, list) and isinstance(part, int):
            parts.append(str(part))
            here = cast(list[Any], here)[part]
    return ".".join(parts)


def _message(detail: Any, known: Iterable[str]) -> str:
    if detail["type"] == "extra_forbidden":
        wrong = str(detail["loc"][-1])
        close = difflib.get_close_matches(wrong, list(known), n=1) if len(detail["loc"]) == 1 else []
        return f"is not a field here; did you mean {close[0]!r}?" if close else "is not a field here"
    if detail["type"] == "missing":
        return "is missing"
    if detail["type"] in {"too_short", "string_too_short"} and detail["ctx"]["min_length"] == 1:
        return "is empty"
    if (refused := about_controls(detail)) is not None:
        return refused
    message = str(detail["msg"]).removeprefix("Value error, ")
    if message.startswith("Input should be"):
        message = "should be" + message.removeprefix("Input should be")
    return message
