"""Checks values against a JSON schema: bounded in time, and with no way out to other documents.

It is jsonschema's walk with five keywords in other ways. jsonschema-rs 0.61 has a linear regex engine and can be kept
offline, but has no limit of steps: it took 8 s to list the errors of an array 14 levels deep under two alternatives
that refer to themselves, over twice as long for each level, and the event loop waits meanwhile.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from breakwater.kernel.json_values import flaw_of, levels, subschemas

_Schema = dict[str, JsonValue]

_PATH = 200
"""The longest path, in characters, that an error shows."""

_NAMES = 200
"""The longest name out of the value, in characters, that an error shows."""

_OURS = 200
"""The characters of the schema that an error shows."""

_WORDS = {
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
    "uniqueItems": "has an item twice",
    "unevaluatedProperties": "has properties that the schema does not define",
    "unevaluatedItems": "has more items than the schema allows",
}


def _describe(error: ValidationError) -> str:
    """A mistake: its path, and what would be right."""
    # Of the ways in which none of several forms fits, the one that comes nearest says most.
    nearest = cast(ValidationError, best_match([error]))
    path = nearest.json_path
    # Whole or not at all: a part of a secret would not be known for one.
    path = path if len(path) <= _PATH else "$…"
    return f"{path}: {_words(nearest)}"


def _words(error: ValidationError) -> str:
    keyword = cast(str | None, error.validator)
    expected = cast(Any, error.validator_value)
    actual = cast(Any, error.instance)
    if keyword == "type":
        return f"should be {_kinds(expected)}, is {_kind(actual)}"
    if keyword == "required":
        missing = [name for name in expected if name not in actual]
        return f"is missing {_shorten(', '.join(map(repr, missing)), _OURS)}"
    if keyword == "additionalProperties":
        properties = cast(Mapping[str, Any], cast(Mapping[str, Any], error.schema).get("properties", {}))
        more = [name for name in cast(Mapping[str, Any], actual) if name not in properties]
        named = ", ".join(map(_name, more[:5]))
        return f"may not have {named}{f' and {len(more) - 5} more' if len(more) > 5 else ''}"
    if keyword in {"anyOf", "oneOf"}:
        if not error.context:
            return "matches more than one of the allowed forms; should match exactly one"
        types = [
            form.get("type") if isinstance(form, dict) else None for form in cast(list[dict[str, Any] | bool], expected)
        ]
        if not all(isinstance(kind, str) for kind in types):
            return "matches none of the allowed forms"
        return f"should be {_kinds(cast(list[str], types))}, is {_kind(actual)}"
    if keyword in _WORDS:
        return _WORDS[keyword].format(_json(expected))
    return f"does not satisfy `{keyword}`: {_json(expected)}" if keyword is not None else "is not allowed"


def _name(name: str) -> str:
    # A name is shown whole or not at all, as a path is: escapes make it up to ten times as long.
    quoted = repr(name)
    return quoted if len(quoted) <= _NAMES + len("''") else f"a name of {len(name)} characters"


def _kinds(types: str | list[str]) -> str:
    return types if isinstance(types, str) else " or ".join(dict.fromkeys(types))


def _kind(value: object) -> str:
    return _KINDS.get(type(value), "array")


_KINDS: dict[type, str] = {
    type(None): "null",
    bool: "boolean",
    int: "number",
    float: "number",
    str: "string",
    dict: "object",
}


def _json(value: object) -> str:
    return _shorten(json.dumps(value, ensure_ascii=False), _OURS)


def _shorten(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


MAX_PROBLEMS = 10
MIN_STEPS = 2_000
"""The references that every check may follow. Alternatives that refer to themselves could take for ever."""

STEPS_PER_VALUE = 10
"""The further references that a check may follow for each part of its value."""

_INTRICATE = "$: is too deep or too complex to check"


class SchemaCheck:
    """Checks values against one schema."""

    def __init__(self, schema: _Schema) -> None:
        """Prepares the check.

        Raises:
            ValueError: it is no JSON schema, or one that can't be checked safely; the text has the path within it.
        """
        _require_safe(schema)
        self._steps = 0

        def follow() -> None:
            self._steps -= 1
            if self._steps < 0:
                raise RecursionError

        self._validator = _validator_of(schema, follow)
        probes: tuple[JsonValue, ...] = (None, {}, [], "", 0)
        for probe in probes:
            if self.problems(probe) == (_INTRICATE,):
                raise ValueError("is a JSON schema with an endless reference to itself")

    def problems(self, value: JsonValue) -> tuple[str, ...]:
        """The mistakes of a value, each with its path; empty where it satisfies the schema."""
        self._steps = MIN_STEPS + STEPS_PER_VALUE * sum(map(len, levels(value)))
        try:
            errors = islice(self._validator.iter_errors(value), MAX_PROBLEMS)
            return tuple(dict.fromkeys(map(_describe, errors)))
        except (RecursionError, OverflowError):
            return (_INTRICATE,)


def _validator_of(schema: _Schema, follow: Callable[[], None]) -> Any:
    """A validator of the library, with five of its keywords in other ways.

    Args:
        schema: which was found safe.
        follow: called for each reference.
    """

    def ref(validator: Any, ref: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
        follow()
        yield from Draft202012Validator.VALIDATORS["$ref"](validator, ref, instance, schema)

    def forms(max_fitting: float) -> Callable[..., Iterator[ValidationError]]:
        def check(validator: Any, forms: Sequence[Any], instance: Any, _: Any) -> Iterator[ValidationError]:
            # The library's check looks for every mistake in every form, and in a tree that doubles the work at each
            # level.
            mistakes = [next(validator.descend(instance, form), None) for form in forms]
            fitting = mistakes.count(None)
            if not 1 <= fitting <= max_fitting:
                yield ValidationError("", context=() if fitting else cast(Any, mistakes))

        return check

    def pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[ValidationError]:  # noqa: ARG001
        # Python's `re` could be kept busy endlessly by a crafted answer.
        if isinstance(instance, str) and not _compile(pattern).search(instance):
            yield ValidationError("")

    def unique_items(validator: Any, wanted: bool, instance: Any, schema: Any) -> Iterator[ValidationError]:  # noqa: ARG001
        # The library's check compares each object with each other one.
        if wanted and isinstance(instance, list):
            items = cast(list[Any], instance)
            if len({_identity(item) for item in items}) < len(items):
                yield ValidationError("")

    keywords = {
        "$ref": ref,
        "anyOf": forms(math.inf),
        "oneOf": forms(1),
        "pattern": pattern,
        "uniqueItems": unique_items,
    }
    # References lead nowhere outside; the validator's own registry would fetch them.
    nothing_else: SchemaRegistry = Registry()
    return extend(Draft202012Validator, keywords)(schema, registry=nothing_else)


@lru_cache(maxsize=1000)
def _compile(pattern: str) -> Any:
    options = re2.Options()
    options.log_errors = False
    return re2.compile(pattern, options)


def _identity(value: Any) -> Any:
    """An identity that two values share exactly if they are equal as JSON: 1 and 1.0 are, 1 and true are not."""
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


_REFUSED = {
    "$dynamicRef": "write `$ref`",
    "$recursiveRef": "write `$ref`",
    "patternProperties": "write `propertyNames` with a pattern, and `additionalProperties` for the values",
}


def _require_safe(schema: _Schema) -> None:
    """Raises ValueError where a schema is wrong, or can't be checked safely."""
    if (flaw := flaw_of(schema)) is not None:
        raise ValueError(flaw)
    language = Draft202012Validator(Draft202012Validator.META_SCHEMA)
    error = best_match(cast(Iterator[ValidationError], language.iter_errors(cast(Any, schema))))
    if error is not None:
        raise ValueError(f"is not a JSON schema: {_describe(cast(ValidationError, error))}")
    places = dict(subschemas(schema))
    nothing_else: SchemaRegistry = Registry()
    resolver = nothing_else.resolver_with_root(DRAFT202012.create_resource(schema))
    for path, place in places.items():
        for keyword, instead in _REFUSED.items():
            if keyword in place:
                raise ValueError(f"{path}.{keyword}: is not supported; {instead}")
        if path != "$" and "$id" in place:
            raise ValueError(f"{path}.$id: is supported only at the root")
        if "pattern" in place:
            pattern = str(place["pattern"])
            try:
                _compile(pattern)
            except re2.error as wrong:
                raise ValueError(
                    f"{path}.pattern: {pattern[:100]!r} is not a regular expression that RE2 supports: {wrong}"
                ) from None
        if (ref := place.get("$ref")) is None:
            continue
        if not str(ref).startswith("#"):
            raise ValueError(
                f"{path}.$ref: only references within this schema are supported; write it like '#/$defs/name'"
            )
        try:
            target = resolver.lookup(str(ref)).contents
        except Unresolvable:
            target = None
        if not isinstance(target, bool) and not any(target is schema_place for schema_place in places.values()):
            raise ValueError(f"{path}.$ref: {str(ref)[:100]!r} refers to no schema; write it like '#/$defs/name'")
