"""A JSON schema as Anthropic's structured outputs take it: a part of the language, and closed objects only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

_KEPT = ("title", "description", "enum", "const", "format", "default")
_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "uri", "ipv4", "ipv6", "uuid"})


class _InexpressibleError(Exception):
    """The schema allows what a closed one can't."""


def closed_schema(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """The nearest schema that structured outputs can hold a model to; None where there is none.

    Bounds of numbers, lengths and patterns are left out, so answers are still to be checked against the whole schema.
    Objects are closed; references are put in place. An object without named properties, a recursive schema and the
    intersection of objects (`allOf`) can't be expressed.

    Source: the limits of JSON schema that Anthropic documents for structured outputs.
    """
    try:
        return _closed(schema, schema, ())
    except _InexpressibleError:
        return None


def _closed(schema: Any, root: Mapping[str, Any], within: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(schema, Mapping):
        raise _InexpressibleError  # `true` allows anything
    here = cast(Mapping[str, Any], schema)
    if isinstance(ref := here.get("$ref"), str):
        if ref in within:
            raise _InexpressibleError
        more = {name: value for name, value in here.items() if name in ("title", "description")}
        return _closed(_at(root, ref), root, (*within, ref)) | more
    variants = here.get("anyOf", here.get("oneOf"))
    if "allOf" in here or (variants is not None and "properties" in here):
        raise _InexpressibleError  # closed objects have no intersection
    closed = {name: here[name] for name in _KEPT if name in here}
    if closed.get("format") not in _FORMATS:
        closed.pop("format", None)
    if variants is not None:
        return closed | {"anyOf": [_closed(variant, root, within) for variant in variants]}
    if "enum" not in closed and "const" not in closed:
        closed |= _typed(here, root, within)
    return closed


def _typed(here: Mapping[str, Any], root: Mapping[str, Any], within: tuple[str, ...]) -> dict[str, Any]:
    kind = here.get("type", "object" if "properties" in here else None)
    if isinstance(kind, list):
        return {"anyOf": [_typed({**here, "type": one}, root, within) for one in cast(list[Any], kind)]}
    match kind:
        case "object":
            properties = here.get("properties")
            if not isinstance(properties, Mapping) or not properties:
                raise _InexpressibleError
            named = cast(Mapping[str, Any], properties)
            return {
                "type": "object",
                "properties": {name: _closed(value, root, within) for name, value in named.items()},
                "required": [name for name in here.get("required", ()) if name in named],
                "additionalProperties": False,
            }
        case "array":
            items = _closed(here.get("items"), root, within)
            return {"type": "array", "items": items, **({"minItems": 1} if here.get("minItems") else {})}
        case "string" | "integer" | "number" | "boolean" | "null":
            return {"type": kind}
        case _:
            raise _InexpressibleError


def _at(root: Mapping[str, Any], ref: str) -> Any:
    """What a reference inside the same document means."""
    found: Any = root
    for step in ref.removeprefix("#").split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if not ref.startswith("#") or not isinstance(found, Mapping) or name not in found:
            raise _InexpressibleError
        found = cast(Mapping[str, Any], found)[name]
    return found
