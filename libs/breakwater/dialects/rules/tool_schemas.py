"""Translates input schemas of tools to equivalent ones that every provider's API accepts.

MCP servers describe tools in any draft of JSON Schema. OpenAI requires `type`, `properties` and the `items` of arrays.
Anthropic requires `type` and draft 2020-12. Both refuse a composition at the top level, and for one bad tool they
refuse the whole request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from breakwater.jobs.rules.chat_messages import encode_json, fields, objects

_COMPOSED = ("allOf", "anyOf", "oneOf")
_NOT_AT_TOP = (*_COMPOSED, "not", "enum", "const")
"""Keywords about the arguments as a whole, which no API accepts at the top level of a schema."""
_OF_NO_TYPE = (None, "", "any", "null", "None")
_MAX_REFERENCES = 10

Schema = dict[str, Any]


def portable_function(function: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a function of a chat with parameters that every API accepts.

    Keywords about the arguments as a whole, such as `anyOf`, move into the description, and the properties of their
    variants are listed. A strict function keeps them, as its schema is enforced.
    """
    schema = _valid(_resolve(function.get("parameters")))
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
    words = f"The arguments must also satisfy this JSON schema: {encode_json(described).decode()}"
    description = function.get("description")
    description = f"{description}\n\n{words}" if description else words
    return {**function, "description": description, "parameters": _merge_variants(schema)}


def portable_params(params: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns params of a chat with portable tools. Without tools, `tool_choice` and the like are left out, too."""
    if not isinstance(tools := params.get("tools"), list) or not tools:
        return {name: value for name, value in params.items() if name not in _NEED_TOOLS}
    return {**params, "tools": [portable_tool(fields(tool)) for tool in cast(list[Any], tools)]}


_NEED_TOOLS = ("tools", "tool_choice", "parallel_tool_calls")


def portable_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a tool of a chat with portable parameters. A tool that is not a function stays as it is."""
    if not isinstance(tool.get("function"), dict):
        return dict(tool)
    return {**tool, "function": portable_function(tool["function"])}


def anthropic_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a tool of a chat in Anthropic's format. A tool of Anthropic's own stays as it is."""
    if tool.get("type") != "function":
        return dict(tool)
    function = portable_function(fields(tool.get("function")))
    named = {name: function[name] for name in ("name", "description", "strict") if function.get(name) is not None}
    mark = tool.get("cache_control") or function.get("cache_control")
    return {**named, "input_schema": function["parameters"], **({"cache_control": mark} if mark else {})}


def _resolve(schema: Any) -> Schema:
    """Resolves the references at the top level of a schema, and keeps its definitions. Empty if it is not an object."""
    resolved: Schema = dict(fields(schema))
    for _ in range(_MAX_REFERENCES):
        if not isinstance(reference := resolved.get("$ref"), str):
            break
        target = _target(resolved, reference)
        if target is None:
            break
        resolved = {**target, **{name: value for name, value in resolved.items() if name != "$ref"}}
    return resolved


def _target(root: Schema, reference: str) -> Mapping[str, Any] | None:
    """Returns the schema that a reference within a document points to; None if there is none."""
    target: Any = root
    start, *steps = reference.split("/")
    if start != "#" or not steps:
        return None
    for step in steps:
        target = fields(target).get(step.replace("~1", "/").replace("~0", "~"))
    return cast(Schema, target) if isinstance(target, dict) else None


def _valid(schema: Mapping[str, Any]) -> Schema:
    """Translates a schema to draft 2020-12, whose keywords differ in older drafts."""
    result: Schema = {}
    for name, value in schema.items():
        if (translate := _VALID.get(name)) is not None:
            value = translate(value)
            if value is None:
                continue
        result[name] = value
    for bound, limit in _BOUNDS:
        if isinstance(result.get(bound), bool):
            is_exclusive = result.pop(bound)
            if is_exclusive and limit in result:
                result[bound] = result.pop(limit)
    if isinstance(result.get("items"), list):
        result["prefixItems"] = result["items"]
        result["items"] = result.pop("additionalItems", {})
    kind = result.get("type")
    if (kind == "array" or (isinstance(kind, list) and "array" in kind)) and "items" not in result:
        result["items"] = {}
    return result


def _part(part: Any) -> Any:
    if part is None:
        return {}
    if not isinstance(part, dict) or (part.keys() <= _OF_VALUES and part.get("type") in _VALUES):
        return part
    return _valid(cast(Schema, part))


_OF_VALUES = frozenset({"type", "title", "default", "description", "format", "minLength", "maxLength", "pattern"})
_VALUES = ("string", "integer", "number", "boolean")
"""Types of single values. Most schemas are of these, and need no translation."""


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


def _identity(value: Any) -> Any:
    return value


_VALID: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"), _by_name),
    **dict.fromkeys((*_COMPOSED, "prefixItems"), _parts),
    **dict.fromkeys(
        ("additionalItems", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else"), _part
    ),
    "items": _part_or_parts,
    "required": _list_or_nothing,  # in draft 3, it is a boolean of the property itself
    **dict.fromkeys(("enum", "type"), _identity),
}
"""Translations of the values of keywords. A keyword whose value becomes None is left out."""
_BOUNDS = (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum"))


def _merge_variants(schema: Schema) -> Schema:
    """Merges the variants of an object into one with the properties of all of them.

    Required are the properties that every variant of `anyOf` or `oneOf` requires, or any variant of `allOf`.
    """
    listed: dict[str, list[Any]] = {}
    required = _required_names(schema)
    for name in _COMPOSED:
        variants = [_variant(schema, variant) for variant in objects(schema.get(name, []))]
        for variant in variants:
            for key, part in fields(variant.get("properties")).items():
                alternatives = listed.setdefault(key, [])
                if part not in alternatives:
                    alternatives.append(part)
        demanded = [set(_required_names(variant)) for variant in variants]
        if demanded:
            together = demanded[0].union if name == "allOf" else demanded[0].intersection
            required += sorted(together(*demanded))
    new = {key: parts[0] if len(parts) == 1 else {"anyOf": parts} for key, parts in listed.items()}
    merged = {name: value for name, value in schema.items() if name not in _NOT_AT_TOP}
    merged["properties"] = {**new, **schema["properties"]}
    return {**merged, "required": list(dict.fromkeys(required))} if required else merged


def _required_names(schema: Schema) -> list[str]:
    """Returns the names of the properties that a schema requires."""
    required = schema.get("required")
    return [name for name in cast(list[Any], required) if isinstance(name, str)] if isinstance(required, list) else []


def _variant(root: Schema, variant: Schema) -> Schema:
    if isinstance(reference := variant.get("$ref"), str):
        return dict(_target(root, reference) or {})
    return variant
