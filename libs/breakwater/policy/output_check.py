"""A JSON schema made ready to check many answers: bounded in time, and with no way out to other documents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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

from breakwater.policy.output_problems import describe
from breakwater.policy.output_text import flaw_of, levels

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
    # The usual check looks for every mistake in every form, and in a tree that doubles the work at each level.
    mistakes = [next(validator.descend(instance, form), None) for form in forms]
    if None not in mistakes:
        yield ValidationError("", context=cast(Any, mistakes))


def _one_of(validator: Any, forms: Sequence[Any], instance: Any, schema: Any) -> _Found:  # noqa: ARG001
    mistakes = [next(validator.descend(instance, form), None) for form in forms]
    fitting = mistakes.count(None)
    if fitting != 1:
        yield ValidationError("", context=() if fitting else cast(Any, mistakes))


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> _Found:  # noqa: ARG001
    # The usual engine could be kept busy for ever by an answer that is made for it.
    if isinstance(instance, str) and not _compiled(pattern).search(instance):
        yield ValidationError("")


def _unique_items(validator: Any, wanted: bool, instance: Any, schema: Any) -> _Found:  # noqa: ARG001
    # The usual check compares objects each with each.
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
