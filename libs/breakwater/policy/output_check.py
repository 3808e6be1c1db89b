"""A JSON schema made ready to check many answers: bounded in time, and with no way out to other documents."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, cast

import re2
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError, best_match
from jsonschema.validators import extend
from pydantic import JsonValue
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012, SchemaRegistry

from breakwater.policy.output_text import flaw_of, levels

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
    # Whole or not at all, as a path. What is escaped takes up to ten times its own length.
    shown = repr(name)
    return shown if len(shown) <= _NAMES + len("''") else f"a name of {len(name)} characters"


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


MAX_PROBLEMS = 10
MIN_STEPS, STEPS_PER_VALUE = 2_000, 10
"""How many references one check may follow. Alternatives that refer to themselves could take for ever on a tree."""

Schema = Mapping[str, JsonValue]
_Found = Iterator[ValidationError]

_NOTHING_ELSE: SchemaRegistry = Registry()
"""References lead nowhere outside; the validator's own registry would fetch them."""

_REFUSED = {
    "$dynamicRef": "write `$ref`",
    "$recursiveRef": "write `$ref`",
    "patternProperties": "write `propertyNames` with a pattern, and `additionalProperties` for the values",
}


class SchemaCheck:
    """Checks values against one schema."""

    def __init__(self, schema: Schema) -> None:
        """Prepares the check.

        Raises:
            ValueError: it is no JSON schema, or one that can't be checked safely; the text has the path within it.
        """
        _require_safe(schema)
        _every_ref_leads_somewhere(schema)
        self._steps = 0

        def follow(validator: Any, ref: str, instance: Any, schema: Any) -> _Found:
            self._steps -= 1
            if self._steps < 0:
                raise RecursionError
            yield from Draft202012Validator.VALIDATORS["$ref"](validator, ref, instance, schema)

        keywords = {
            "$ref": follow,
            "anyOf": _any_of,
            "oneOf": _one_of,
            "pattern": _pattern,
            "uniqueItems": _unique_items,
        }
        self._validator = extend(Draft202012Validator, keywords)(schema, registry=_NOTHING_ELSE)
        probes: tuple[JsonValue, ...] = (None, {}, [], "", 0)
        for probe in probes:
            if self.problems(probe) == (_INTRICATE,):
                raise ValueError("is a JSON schema that refers to itself without end")

    def problems(self, value: JsonValue) -> tuple[str, ...]:
        """What is wrong with a value, each with its path; empty where it satisfies the schema."""
        self._steps = MIN_STEPS + STEPS_PER_VALUE * sum(map(len, levels(value)))
        try:
            found = cast(_Found, self._validator.iter_errors(value))
            return tuple(dict.fromkeys(describe(error) for error in islice(found, MAX_PROBLEMS)))
        except (RecursionError, OverflowError):
            return (_INTRICATE,)


_INTRICATE = "$: is too deep or too intricate to be checked"


def _require_safe(schema: Schema) -> None:
    """Raises ValueError where a schema is wrong, or can't be checked safely."""
    if (flaw := flaw_of(schema)) is not None:
        raise ValueError(flaw)
    language = Draft202012Validator(Draft202012Validator.META_SCHEMA)
    error = best_match(cast(_Found, language.iter_errors(cast(Any, schema))))
    if error is not None:
        raise ValueError(f"is not a JSON schema: {describe(cast(ValidationError, error))}")
    for path, place in subschemas(schema):
        for keyword, instead in _REFUSED.items():
            if keyword in place:
                raise ValueError(f"{path}.{keyword}: is not taken here; {instead}")
        ref = place.get("$ref")
        if ref is not None and not str(ref).startswith("#"):
            raise ValueError(f"{path}.$ref: only schemas within this one are followed; write it like '#/$defs/name'")
        if path != "$" and "$id" in place:
            raise ValueError(f"{path}.$id: is taken at the root alone")
        if "pattern" in place:
            _compilable(f"{path}.pattern", str(place["pattern"]))


def _every_ref_leads_somewhere(schema: Schema) -> None:
    places = dict(subschemas(schema))
    resolver = _NOTHING_ELSE.resolver_with_root(DRAFT202012.create_resource(schema))
    for path, place in places.items():
        if (ref := place.get("$ref")) is None:
            continue
        try:
            target = resolver.lookup(str(ref)).contents
        except Unresolvable:
            target = None
        if not isinstance(target, bool) and not any(target is known for known in places.values()):
            raise ValueError(f"{path}.$ref: {str(ref)[:100]!r} leads to no schema; write it like '#/$defs/name'")


def subschemas(schema: Schema, path: str = "$") -> Iterator[tuple[str, Schema]]:
    """Every schema within a schema, itself first, with its path. What is data in it, such as `enum`, is passed over."""
    yield path, schema
    for keyword, value in schema.items():
        if keyword in NAMED and isinstance(value, dict):
            below = [(f"{path}.{keyword}.{name}", item) for name, item in value.items()]
        elif keyword in LISTED and isinstance(value, list):
            below = [(f"{path}.{keyword}[{index}]", item) for index, item in enumerate(value)]
        else:
            below = [(f"{path}.{keyword}", value)] if keyword in SINGLE else []
        for place, item in below:
            if isinstance(item, dict):
                yield from subschemas(item, place)


NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
LISTED = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
SINGLE = frozenset(
    {
        "items", "contains", "additionalProperties", "propertyNames", "unevaluatedItems", "unevaluatedProperties",
        "not", "if", "then", "else", "contentSchema",
    }
)  # fmt: skip


def _compilable(path: str, pattern: str) -> None:
    try:
        _compiled(pattern)
    except re2.error as error:
        raise ValueError(f"{path}: {pattern[:100]!r} is not a regular expression that RE2 takes: {error}") from None


@lru_cache(maxsize=1000)
def _compiled(pattern: str) -> Any:
    options = re2.Options()
    options.log_errors = False
    return re2.compile(pattern, options)


def _any_of(validator: Any, forms: Sequence[Any], instance: Any, schema: Any) -> _Found:  # noqa: ARG001
    # The library's check looks for every mistake in every form, and in a tree that doubles the work at each level.
    mistakes = [next(validator.descend(instance, form), None) for form in forms]
    if None not in mistakes:
        yield ValidationError("", context=cast(Any, mistakes))


def _one_of(validator: Any, forms: Sequence[Any], instance: Any, schema: Any) -> _Found:  # noqa: ARG001
    mistakes = [next(validator.descend(instance, form), None) for form in forms]
    fitting = mistakes.count(None)
    if fitting != 1:
        yield ValidationError("", context=() if fitting else cast(Any, mistakes))


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> _Found:  # noqa: ARG001
    # Python's `re` could be kept busy endlessly by a crafted answer.
    if isinstance(instance, str) and not _compiled(pattern).search(instance):
        yield ValidationError("")


def _unique_items(validator: Any, wanted: bool, instance: Any, schema: Any) -> _Found:  # noqa: ARG001
    # The library's check compares each object with each other one.
    if wanted and isinstance(instance, list):
        items = cast(list[Any], instance)
        if len({_identity(item) for item in items}) < len(items):
            yield ValidationError("")


def _identity(value: Any) -> Any:
    """What two values have in common exactly if they are equal as JSON: 1 and 1.0 are, 1 and true are not."""
    match value:
        case dict():
            pairs = cast(dict[str, Any], value).items()
            return "object", frozenset((key, _identity(item)) for key, item in pairs)
        case list():
            return "array", tuple(_identity(item) for item in cast(list[Any], value))
        case bool():
            return "boolean", value
        case _:
            return value
