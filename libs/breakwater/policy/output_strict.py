"""A JSON schema in strict form: objects with no other properties than it names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from pydantic import JsonValue

from breakwater.policy.output_check import LISTED, NAMED, SINGLE, subschemas

Schema = Mapping[str, JsonValue]

_SPREAD = ("allOf", "if", "dependentSchemas")
_BESIDE = ("anyOf", "oneOf", "$ref")


def closing_objection(schema: Schema) -> str | None:
    """Why a schema can't be closed: where an object's properties are named in several places, each would close it."""
    for path, place in subschemas(schema):
        for keyword in _SPREAD:
            if keyword in place:
                return f"does not go with `{keyword}` (at {path}): name the properties of an object in one place"
        for keyword in _BESIDE:
            if keyword in place and "properties" in place:
                return f"does not go with `properties` beside `{keyword}` (at {path}): name them in one place"
    return None


def closed(schema: Schema) -> dict[str, JsonValue]:
    """The schema with every object closed that does not say whether it is."""
    here: dict[str, JsonValue] = {}
    for keyword, value in schema.items():
        if keyword in NAMED and isinstance(value, dict):
            here[keyword] = {name: _closed(item) for name, item in value.items()}
        elif keyword in LISTED and isinstance(value, list):
            here[keyword] = [_closed(item) for item in value]
        else:
            # What is closed within `not` would forbid less.
            here[keyword] = _closed(value) if keyword in SINGLE and keyword != "not" else value
    if _is_object(here) and "additionalProperties" not in here and "unevaluatedProperties" not in here:
        here["additionalProperties"] = False
    return here


def _closed(schema: JsonValue) -> JsonValue:
    return closed(schema) if isinstance(schema, dict) else schema


def _is_object(schema: Schema) -> bool:
    kind = schema.get("type")
    return (
        kind == "object" or (isinstance(kind, list) and "object" in kind) or (kind is None and "properties" in schema)
    )


_STRICT_MODE = frozenset(
    {
        "$schema", "$id", "$comment", "$defs", "definitions", "$ref", "$anchor", "title", "description", "type",
        "properties", "required", "additionalProperties", "items", "anyOf", "enum", "const", "pattern", "format",
        "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minItems", "maxItems",
    }
)  # fmt: skip
_MEANING = frozenset({"type", "anyOf", "$ref", "enum", "const"})


def fits_strict_mode(schema: Schema) -> bool:
    """Whether OpenAI's strict mode takes a schema; it answers 400 to others.

    Source: the subset of JSON schema that OpenAI documents for structured outputs: an object at the root, every object
    closed and all of its properties required, every schema with a type, and only some of the keywords.
    """
    if schema.get("type") != "object" or "anyOf" in schema:
        return False
    for _, place in subschemas(schema):
        if not place.keys() <= _STRICT_MODE or not place.keys() & _MEANING:
            return False
        if _is_object(place):
            names = set(cast(Mapping[str, Any], place.get("properties", {})))
            if place.get("additionalProperties") is not False or names != set(
                cast(list[str], place.get("required", []))
            ):
                return False
    return True
