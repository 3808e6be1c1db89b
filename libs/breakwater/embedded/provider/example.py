"""An answer that satisfies a JSON schema, as a model gives it that is held to one. Plain schemas only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

MAX_DEPTH = 20


def example_of(schema: object, text: str, depth: int = 0) -> Any:
    """A value for a schema.

    Args:
        schema: types, properties, items, bounds, `enum`, `const` and alternatives are understood; the rest is not.
        text: what strings say.
        depth: how deep it is already.
    """
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return text
    rules = cast(Mapping[str, Any], schema)
    for keyword in ("const", "default"):
        if keyword in rules:
            return rules[keyword]
    for keyword in ("enum", "examples"):
        if rules.get(keyword):
            return rules[keyword][0]
    for keyword in ("anyOf", "oneOf"):
        if rules.get(keyword):
            return example_of(rules[keyword][0], text, depth + 1)
    kinds = rules.get("type", "object" if "properties" in rules else "string")
    match kinds[0] if isinstance(kinds, list) else kinds:
        case "object":
            properties = cast(Mapping[str, Any], rules.get("properties", {}))
            return {
                name: example_of(properties.get(name, {}), text, depth + 1)
                for name in rules.get("required", properties)
            }
        case "array":
            return [example_of(rules.get("items", {}), text, depth + 1)] * int(rules.get("minItems", 0))
        case "integer" | "number":
            return rules.get("minimum", rules.get("exclusiveMinimum", 0) + 1 if "exclusiveMinimum" in rules else 0)
        case "boolean":
            return True
        case "null":
            return None
        case _:
            least, most = int(rules.get("minLength", 0)), int(rules.get("maxLength", len(text)))
            return text[:most].ljust(least, ".")
