from __future__ import annotations

from typing import Any

from jsonschema import Draft202012Validator

from breakwater.calls.providers.anthropic import closed_schema
from tests.tables import each_row

TEXT = {"type": "string"}


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [], "additionalProperties": False}


@each_row(
    ("schema", "sent"),
    [
        ({"type": "object", "properties": {"a": TEXT}}, closed(a=TEXT)),
        ({"properties": {"a": TEXT}, "required": ["a"]}, {**closed(a=TEXT), "required": ["a"]}),
        ({"type": "object", "properties": {"a": TEXT}, "additionalProperties": True}, closed(a=TEXT)),
        ({"type": "number", "minimum": 0, "maximum": 1, "title": "How sure"}, {"type": "number", "title": "How sure"}),
        ({"type": "string", "pattern": "^a", "minLength": 2, "description": "d"}, {**TEXT, "description": "d"}),
        ({"type": "string", "format": "date"}, {**TEXT, "format": "date"}),
        ({"type": "string", "format": "ours"}, TEXT),
        ({"type": "string", "enum": ["a", "b"]}, {"enum": ["a", "b"]}),
        ({"const": 1}, {"const": 1}),
        ({"type": ["string", "null"]}, {"anyOf": [TEXT, {"type": "null"}]}),
        ({"oneOf": [TEXT, {"type": "null"}]}, {"anyOf": [TEXT, {"type": "null"}]}),
        ({"type": "array", "items": TEXT, "minItems": 3}, {"type": "array", "items": TEXT, "minItems": 1}),
        ({"type": "array", "items": TEXT, "maxItems": 3}, {"type": "array", "items": TEXT}),
        (
            {"$defs": {"a/b": TEXT}, "properties": {"x": {"$ref": "#/$defs/a~1b", "description": "d"}}},
            closed(x={**TEXT, "description": "d"}),
        ),
    ],
)
def test_a_schema_becomes_the_nearest_that_can_be_held_to(schema: dict[str, Any], sent: dict[str, Any]) -> None:
    assert closed_schema(schema) == sent


@each_row(
    "schema",
    [
        {},
        {"type": "object"},
        {"type": "object", "additionalProperties": TEXT},
        {"type": "array"},
        {"type": "array", "items": True},
        {"type": "whatever"},
        {"not": TEXT},
        {"allOf": [{"type": "object", "properties": {"a": TEXT}}, {"type": "object", "properties": {"b": TEXT}}]},
        {"properties": {"a": TEXT}, "anyOf": [{"properties": {"b": TEXT}}]},
        {"$ref": "#"},
        {"$ref": "#/$defs/gone"},
        {"$ref": "https://elsewhere.invalid/schema"},
        {"$defs": {"n": {"properties": {"next": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"},
        {"properties": {"a": {"type": "object"}}},
    ],
)
def test_what_a_closed_schema_cannot_say_is_not_sent(schema: dict[str, Any]) -> None:
    assert closed_schema(schema) is None


def test_what_satisfies_the_closed_schema_satisfies_the_shape_of_the_whole_one() -> None:
    whole = {
        "$defs": {"step": {"type": "object", "properties": {"name": TEXT}, "required": ["name"]}},
        "type": "object",
        "properties": {
            "confidence": {"type": "number", "minimum": 0, "maximum": 1},
            "steps": {"type": "array", "items": {"$ref": "#/$defs/step"}, "minItems": 1},
        },
        "required": ["confidence", "steps"],
    }
    sent = closed_schema(whole)
    assert sent is not None
    Draft202012Validator.check_schema(sent)
    good, bad = {"confidence": 0.5, "steps": [{"name": "a"}]}, {"confidence": 0.5, "steps": [{}]}
    assert Draft202012Validator(sent).is_valid(good)
    assert Draft202012Validator(whole).is_valid(good)
    assert not Draft202012Validator(sent).is_valid(bad)
