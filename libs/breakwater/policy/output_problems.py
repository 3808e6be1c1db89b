"""Says what is wrong with a JSON value in words that a model or a person can act on.

Of the value itself only the names of its properties are repeated: the rest may be long, or secret.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, cast

from jsonschema.exceptions import ValidationError, best_match

_PATH, _NAMES, _OURS = 200, 200, 200
"""Characters of a path, of a name that the value brought (longer ones are not shown), and shown of the schema."""

_BOUNDS = {
    "minimum": "should be at least {}",
    "maximum": "should be at most {}",
    "exclusiveMinimum": "should be more than {}",
    "exclusiveMaximum": "should be less than {}",
    "multipleOf": "should be a multiple of {}",
    "minLength": "should be at least {} characters long",
    "maxLength": "should be at most {} characters long",
    "pattern": "should match the regular expression {}",
    "minItems": "should have at least {} items",
    "maxItems": "should have at most {} items",
    "minProperties": "should have at least {} properties",
    "maxProperties": "should have at most {} properties",
    "minContains": "should have at least {} of the items asked for",
    "maxContains": "should have at most {} of the items asked for",
    "enum": "should be one of {}",
    "const": "should be {}",
}
_FIXED = {
    "uniqueItems": "has an item twice",
    "unevaluatedProperties": "has properties that are named nowhere in the schema",
    "unevaluatedItems": "has more items than the schema allows",
}
_CHOICES = frozenset({"anyOf", "oneOf"})


def describe(error: ValidationError) -> str:
    """One thing that is wrong: its path, and what would be right."""
    # Of the ways in which none of several forms fits, the one that comes nearest says most.
    nearest = cast(ValidationError, best_match([error]))
    path = nearest.json_path
    # Whole or not at all: a part of a secret would not be known for one.
    path = path if len(path) <= _PATH else "$…"
    return f"{path}: {_words(nearest)}"


def _words(error: ValidationError) -> str:
    keyword = cast(str | None, error.validator)
    asked, found = cast(Any, error.validator_value), cast(Any, error.instance)
    if keyword == "type":
        return f"should be {_kinds(asked)}, is {_kind(found)}"
    if keyword == "required":
        missing = [name for name in asked if name not in found]
        return f"is missing {_shown(', '.join(map(repr, missing)), _OURS)}"
    if keyword == "additionalProperties":
        known = cast(Mapping[str, Any], cast(Mapping[str, Any], error.schema).get("properties", {}))
        more = [name for name in cast(Mapping[str, Any], found) if name not in known]
        named = ", ".join(map(_name, more[:5]))
        return f"may not have {named}{f' and {len(more) - 5} more' if len(more) > 5 else ''}"
    if keyword in _FIXED:
        return _FIXED[keyword]
    if keyword in _CHOICES:
        types = _types_of(cast(Iterable[Any], asked))
        if not error.context:
            return "fits more than one of the forms it may have; should fit exactly one"
        return f"should be {_kinds(types)}, is {_kind(found)}" if types else "has none of the forms it may have"
    if keyword in _BOUNDS:
        return _BOUNDS[keyword].format(_json(asked))
    return f"does not satisfy `{keyword}`: {_json(asked)}" if keyword is not None else "is not allowed"


def _name(name: str) -> str:
    # Whole or not at all, as a path.
    return repr(name) if len(name) <= _NAMES else f"a name of {len(name)} characters"


def _types_of(forms: Iterable[Any]) -> list[str]:
    """The types of alternatives that are nothing but types."""
    types = [cast(dict[str, Any], form).get("type") if isinstance(form, dict) else None for form in forms]
    return [kind for kind in types if isinstance(kind, str)] if all(isinstance(kind, str) for kind in types) else []


def _kinds(types: str | list[str]) -> str:
    return types if isinstance(types, str) else " or ".join(dict.fromkeys(types))


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case Mapping():
            return "object"
        case _:
            return "array"


def _json(value: object) -> str:
    return _shown(json.dumps(value, ensure_ascii=False), _OURS)


def _shown(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"
