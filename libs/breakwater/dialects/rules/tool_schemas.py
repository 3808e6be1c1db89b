"""Tools of a translated request with input schemas that any maker's API takes, and that mean the same.

MCP servers describe tools in any draft of JSON Schema. OpenAI requires `type`, `properties` and the `items` of arrays;
Anthropic requires `type` and draft 2020-12; both refuse a composition at the top, and with one tool the whole request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from breakwater.jobs.rules.chat_messages import encoded, fields, objects

_COMPOSED = ("allOf", "anyOf", "oneOf")
_NOT_AT_TOP = (*_COMPOSED, "not", "enum", "const")
"""Keywords that describe the arguments as a whole, which no API takes at the top of a schema."""
_OF_NO_TYPE = (None, "", "any", "null", "None")
_MAX_REFERENCES = 10

Schema = dict[str, Any]


def portable_function(function: Mapping[str, Any]) -> dict[str, Any]:
    """A function of a chat with parameters that every API takes.

    What a schema says of the arguments as a whole, such as `anyOf`, becomes a part of the description; the properties
    of its variants are listed. A strict function keeps it: its schema is enforced, and can't be described.
    """
    schema = _valid(_resolved(function.get("parameters")))
    kind = schema.get("type")
    if kind in _OF_NO_TYPE or (isinstance(kind, list) and "object" in kind):
        schema["type"] = "object"
    if schema["type"] != "object":
        return {**function, "parameters": schema}
    if not isinstance(schema.get("properties"), dict):
        schema["properties"] = {}
    described = {name: schema[name] for name in _NOT_AT_TOP if name in schema}
    if not described or function.get("strict"):
        return {**function, "parameters": schema}
    words = f"The arguments must also satisfy this JSON schema: {encoded(described).decode()}"
    description = function.get("description")
    description = f"{description}\n\n{words}" if description else words
    return {**function, "description": description, "parameters": _merged(schema)}


def portable_params(params: Mapping[str, Any]) -> Mapping[str, Any]:
    """Params of a chat with such tools; without any, what is said about their choice is left out, too."""
    if not isinstance(tools := params.get("tools"), list) or not tools:
        return {name: value for name, value in params.items() if name not in _NEED_TOOLS}
    return {**params, "tools": [portable_tool(fields(tool)) for tool in cast(list[Any], tools)]}


_NEED_TOOLS = ("tools", "tool_choice", "parallel_tool_calls")


def portable_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool of a chat; one that is no function stays as it is."""
    if not isinstance(tool.get("function"), dict):
        return dict(tool)
    return {**tool, "function": portable_function(tool["function"])}


def anthropic_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool of a chat in Anthropic's words; one of Anthropic's own stays as it is."""
    if tool.get("type") != "function":
        return dict(tool)
    function = portable_function(fields(tool.get("function")))
    named = {name: function[name] for name in ("name", "description", "strict") if function.get(name) is not None}
    mark = tool.get("cache_control") or function.get("cache_control")
    return {**named, "input_schema": function["parameters"], **({"cache_control": mark} if mark else {})}


def _resolved(schema: Any) -> Schema:
    """A schema with what it refers to at its top in place; its definitions stay. Empty for one that is no object."""
    found: Schema = dict(fields(schema))
    for _ in range(_MAX_REFERENCES):
        if not isinstance(reference := found.get("$ref"), str):
            break
        target = _target(found, reference)
        if target is None:
            break
        found = {**target, **{name: value for name, value in found.items() if name != "$ref"}}
    return found


def _target(root: Schema, reference: str) -> Mapping[str, Any] | None:
    """The schema that a reference within a document leads to; None for none."""
    found: Any = root
    start, *steps = reference.split("/")
    if start != "#" or not steps:
        return None
    for step in steps:
        found = fields(found).get(step.replace("~1", "/").replace("~0", "~"))
    return cast(Schema, found) if isinstance(found, dict) else None


def _valid(schema: Mapping[str, Any]) -> Schema:
    """The schema in draft 2020-12, with the keywords that older drafts leave out or write differently."""
    found: Schema = {}
    for name, value in schema.items():
        if (valid := _VALID.get(name)) is not None:
            value = valid(value)
            if value is None:
                continue
        found[name] = value
    for bound, limit in _BOUNDS:
        if isinstance(found.get(bound), bool):
            is_exclusive = found.pop(bound)
            if is_exclusive and limit in found:
                found[bound] = found.pop(limit)
    if isinstance(found.get("items"), list):
        found["prefixItems"] = found["items"]
        found["items"] = found.pop("additionalItems", {})
    kind = found.get("type")
    if (kind == "array" or (isinstance(kind, list) and "array" in kind)) and "items" not in found:
        found["items"] = {}
    return found


def _part(part: Any) -> Any:
    if part is None:
        return {}
    if not isinstance(part, dict) or (part.keys() <= _OF_VALUES and part.get("type") in _VALUES):
        return part
    return _valid(cast(Schema, part))


_OF_VALUES = frozenset({"type", "title", "default", "description", "format", "minLength", "maxLength", "pattern"})
_VALUES = ("string", "integer", "number", "boolean")
"""Schemas of single values, which most are, have nothing to look at."""


def _parts(parts: Any) -> Any:
    return [_part(part) for part in cast(list[Any], parts)] if isinstance(parts, list) else parts


def _part_or_parts(value: Any) -> Any:
    return _parts(value) if isinstance(value, list) else _part(value)


def _by_name(parts: Any) -> Any:
    if parts == []:
        return {}  # as PHP writes an empty object
    return {key: _part(part) for key, part in cast(Schema, parts).items()} if isinstance(parts, dict) else parts


def _list_or_nothing(value: Any) -> Any:
    return value if isinstance(value, list) else None


def _unchanged(value: Any) -> Any:
    return value


_VALID: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"), _by_name),
    **dict.fromkeys((*_COMPOSED, "prefixItems"), _parts),
    **dict.fromkeys(
        ("additionalItems", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else"), _part
    ),
    "items": _part_or_parts,
    "required": _list_or_nothing,  # of draft 3: the property itself says that it must be there
    **dict.fromkeys(("enum", "type"), _unchanged),
}
"""Keywords whose values are looked at; one for which nothing is returned is left out, as is null."""
_BOUNDS = (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum"))


def _merged(schema: Schema) -> Schema:
    """An object with the properties of all its variants, of which those are required that each of them requires."""
    listed: dict[str, list[Any]] = {}
    required = _required(schema)
    for name in _COMPOSED:
        variants = [_variant(schema, variant) for variant in objects(schema.get(name, []))]
        for variant in variants:
            for key, part in fields(variant.get("properties")).items():
                alternatives = listed.setdefault(key, [])
                if part not in alternatives:
                    alternatives.append(part)
        demanded = [set(_required(variant)) for variant in variants]
        if demanded:
            together = demanded[0].union if name == "allOf" else demanded[0].intersection
            required += sorted(together(*demanded))
    new = {key: parts[0] if len(parts) == 1 else {"anyOf": parts} for key, parts in listed.items()}
    whole = {name: value for name, value in schema.items() if name not in _NOT_AT_TOP}
    whole["properties"] = {**new, **schema["properties"]}
    return {**whole, "required": list(dict.fromkeys(required))} if required else whole


def _required(schema: Schema) -> list[str]:
    """The names of the properties that a schema requires."""
    required = schema.get("required")
    return [name for name in cast(list[Any], required) if isinstance(name, str)] if isinstance(required, list) else []


def _variant(root: Schema, variant: Schema) -> Schema:
    if isinstance(reference := variant.get("$ref"), str):
        return dict(_target(root, reference) or {})
    return variant
