"""Explains what is wrong with a message: the path of each field, and what would be right."""

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
    """Returns the problems of a validation, one for each path, without the values, which may be secret.

    Args:
        error: pydantic's error.
        model: the message's model, to suggest a field for an unknown one.
        document: the message as parsed JSON, with which paths name its fields and not pydantic's branches of unions.
    """
    field_names = list(model.model_fields) if model is not None else []
    messages_by_path: dict[str, list[str]] = {}
    for detail in error.errors(include_url=False, include_input=False):
        path = ".".join(str(part) for part in detail["loc"]) if document is None else _place(detail, document)
        messages = messages_by_path.setdefault(path, [])
        if (message := _message(detail, field_names)) not in messages:
            messages.append(message)
    return [FieldError(path, ", or ".join(messages)) for path, messages in messages_by_path.items()]


def explain(error: ValidationError, model: type[BaseModel] | None = None, document: Any = None) -> str:
    """Returns all problems in one line."""
    mistakes = problems(error, model, document)
    return "; ".join(f"{problem.path}: {problem.message}" if problem.path else problem.message for problem in mistakes)


def ambiguity(document: bytes) -> str | None:
    """Returns the reason why valid JSON is refused as ambiguous; None if all readers understand it alike.

    Readers differ on a repeated key, and on a number that no double can hold: the checked value would not be the one
    that a provider gets.
    """
    try:
        _DECODER.decode(document.decode(errors="surrogatepass"))
    except ValueError as error:
        return str(error)
    return None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        keys: set[str] = set()
        twice = next(key for key, _ in pairs if key in keys or keys.add(key))
        raise ValueError(f"the key {twice[:100]!r} occurs twice in one object")
    return fields


def _finite(number: str) -> float:
    value = float(number)
    if math.isinf(value):
        raise ValueError(f"the number {number[:40]} is too large")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite, parse_constant=_no_constant)


def about_controls(detail: Any) -> str | None:
    """Explains the refusal of a text with control characters; None for other mistakes."""
    pattern = detail["ctx"]["pattern"] if detail["type"] == "string_pattern_mismatch" else None
    if pattern == NO_SPACES:
        return "must not contain spaces or control characters; use a hyphen instead"
    if pattern in {NO_CONTROLS, NO_CONTROLS_OR_EMPTY}:
        return "must not contain control characters, line breaks or bidirectional control characters"
    return None


def _place(detail: Any, document: Any) -> str:
    """Returns the part of pydantic's location that is in the document, or missing there, without branches of unions."""
    parts: list[str] = []
    value: Any = document
    for part in detail["loc"]:
        if isinstance(value, dict) and (part in value or detail["type"] == "missing"):
            parts.append(part)
            value = cast(dict[str, Any], value).get(part)
        elif isinstance(value, list) and isinstance(part, int):
            parts.append(str(part))
            value = cast(list[Any], value)[part]
    return ".".join(parts)


def _message(detail: Any, field_names: Iterable[str]) -> str:
    if detail["type"] == "extra_forbidden":
        unknown = str(detail["loc"][-1])
        close = difflib.get_close_matches(unknown, list(field_names), n=1) if len(detail["loc"]) == 1 else []
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
