"""Finds JSON in the texts of models, in time linear in the text; adds fields; measures depths; walks JSON schemas."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, cast

from pydantic import JsonValue

from breakwater.kernel.errors import BreakwaterError
from breakwater.kernel.surrogates import whole_escapes

MAX_DEPTH = 100
"""The deepest nesting of JSON. Other programs refuse deeper values: pydantic reads 200 levels, including those around
an answer, and writes 255."""
MAX_CANDIDATES = 100
"""The most parts of a text that are tried. A text with a hundred parts that only look like JSON has no answer."""


class NoJsonError(BreakwaterError, ValueError):
    """A text has no JSON, or no usable one. The message has the reason, without the text's content."""


def find_json(text: str, *, strict: bool, openers: str = "{[") -> JsonValue:
    """Returns the JSON value of an answer: its whole text, or a fenced block.

    Args:
        text: the answer's text.
        strict: True if there may be nothing around the value; otherwise the first fenced block that is JSON counts, or
            else the first object or array in the text.
        openers: the characters that such an object or array may begin with.

    Raises:
        NoJsonError: there is none. A complete but invalid value is not searched for values inside it.
    """
    text = text.strip().strip("\ufeff")
    if not text:
        raise NoJsonError("is empty")
    first_problem = ""
    for candidate in islice(_candidates(text, strict=strict, openers=openers), MAX_CANDIDATES):
        try:
            return parse_json(candidate)
        except NoJsonError as error:
            # Not the error itself: its traceback would have this frame, and all that its callers hold, refer to it.
            first_problem = first_problem or str(error)
    if text[0] in '{["' or text.startswith("```"):
        raise NoJsonError(first_problem)
    raise NoJsonError("is not JSON" if strict else "has no JSON in it")


def parse_json(text: str) -> JsonValue:
    """Parses one JSON value according to RFC 8259, without repeated keys in an object.

    Raises:
        NoJsonError: the text is no JSON, or its value can't be written as JSON again.
    """
    try:
        value = json.loads(whole_escapes(text), object_pairs_hook=_object)
    except NoJsonError:
        raise
    except json.JSONDecodeError as error:
        problem = error.msg[:1].lower() + error.msg[1:]
        raise NoJsonError(f"is not JSON: {problem} (line {error.lineno}, column {error.colno})") from None
    except ValueError:
        raise NoJsonError("has a number with too many digits") from None
    except RecursionError:
        raise NoJsonError(TOO_DEEP) from None
    if (flaw := flaw_of(value)) is not None:
        raise NoJsonError(flaw)
    return cast(JsonValue, value)


TOO_DEEP = f"is nested deeper than {MAX_DEPTH} levels"


def flaw_of(value: object) -> str | None:
    """Returns the reason why a value can't or shouldn't be written as JSON; None if it can."""
    for depth, level in enumerate(levels(value)):
        if depth > MAX_DEPTH:
            return TOO_DEEP
        for item in level:
            if isinstance(item, float) and not math.isfinite(item):
                return "has a number that JSON does not know, such as NaN or Infinity"
            if isinstance(item, str) and not item.isascii() and _SURROGATE.search(item):
                return "has half of a surrogate pair in a string"
    return None


def is_too_deep(value: object) -> bool:
    """Returns True if a value is nested too deeply for all programs that read it inside a message."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        below: list[Any] = []
        for item in level:
            if type(item) in _LEAVES:
                continue
            if isinstance(item, dict):
                below += cast(dict[Any, Any], item).values()
            elif isinstance(item, list | tuple):
                below += cast(list[Any], item)
        if not below:
            return False
        level = below
    return True


_LEAVES = frozenset({str, int, float, bool, type(None)})


def levels(value: object) -> Iterator[list[Any]]:
    """The content of a JSON value, level by level: first itself, then its keys and items, then theirs."""
    level: list[Any] = [value]
    while level:
        yield level
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(cast(dict[Any, Any], item).keys())
                below.extend(cast(dict[Any, Any], item).values())
            elif isinstance(item, list | tuple):
                below.extend(cast(list[Any], item))
        level = below


_SURROGATE = re.compile("[\ud800-\udfff]")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        keys: set[str] = set()
        twice = next(key for key, _ in pairs if key in keys or keys.add(key))
        raise NoJsonError(f"has the property {twice[:40]!r} twice in one object")
    return fields


def _candidates(text: str, *, strict: bool, openers: str) -> Iterator[str]:
    yield text
    if text.startswith("```") and text.endswith("```") and len(text) >= 6:
        yield _inside(text[3:-3])
    if not strict:
        yield from _fenced_blocks(text)
        yield from _outermost_values(text, openers)


def _fenced_blocks(text: str) -> Iterator[str]:
    end = 0
    while (start := text.find("```", end)) >= 0:
        line_end = text.find("\n", start)
        line_end = len(text) if line_end < 0 else line_end
        close = text.rfind("```", start + 3, line_end)
        if close < 0:
            # JSON strings contain no line breaks, so a fence at the beginning of a line is not part of the content.
            closing = _FENCE.search(text, line_end)
            if closing is None:
                return
            close = closing.start()
            end = closing.end()
        else:
            end = close + 3
        yield _inside(text[start + 3 : close])


_FENCE = re.compile(r"\n[ \t]*```")
_LANGUAGE = re.compile(r"[A-Za-z][\w+-]*(?=[\s{\[\"])")


def _inside(block: str) -> str:
    """Returns the content of a fenced block, without the name of its language."""
    language = _LANGUAGE.match(block)
    return block[language.end() :] if language is not None else block


def _outermost_values(text: str, openers: str) -> Iterator[str]:
    """Yields the outermost objects and arrays in a text, in order."""
    end = 0
    begins = re.compile("|".join(_BEGINNINGS[opener] for opener in openers))
    while (start := begins.search(text, end)) is not None:
        close = _closing(text, start.start())
        if close is None:
            return  # it is truncated, and a part of it is not the answer
        yield text[start.start() : close]
        end = close


_BEGINNINGS = {"{": r'\{\s*["}]', "[": r"\[\s*[\[{\]\"\-0-9tfn]"}
"""The beginnings of objects and arrays that prose does not contain by chance."""
_STRUCTURE = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[{}\[\]]', re.S)


def _closing(text: str, start: int) -> int | None:
    """Returns the end of the object or array that begins at `start`; None if it is not closed."""
    depth = 0
    for token in _STRUCTURE.finditer(text, start):
        if token[0] in "{[":
            depth += 1
        elif token[0] in "}]":
            depth -= 1
            if depth == 0:
                return token.end()
    return None


_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_LISTED = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_SINGLE = frozenset(
    {
        "items", "contains", "additionalProperties", "propertyNames", "unevaluatedItems", "unevaluatedProperties",
        "not", "if", "then", "else", "contentSchema",
    }
)  # fmt: skip


def subschemas(
    schema: dict[str, JsonValue], path: str = "$", but: str | None = None
) -> Iterator[tuple[str, dict[str, JsonValue]]]:
    """Yields a schema and every schema within it, each with its path. Data in them, such as `enum`, is skipped.

    Args:
        schema: the outermost schema.
        path: its path.
        but: a keyword whose schema is skipped, too.
    """
    yield path, schema
    for keyword, value in schema.items():
        if keyword in _NAMED and isinstance(value, dict):
            below = [(f"{path}.{keyword}.{name}", item) for name, item in value.items()]
        elif keyword in _LISTED and isinstance(value, list):
            below = [(f"{path}.{keyword}[{index}]", item) for index, item in enumerate(value)]
        else:
            below = [(f"{path}.{keyword}", value)] if keyword in _SINGLE and keyword != but else []
        for place, item in below:
            if isinstance(item, dict):
                yield from subschemas(item, place, but)


def closed_schema(schema: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Returns the schema with `additionalProperties: false` for every object that leaves it undefined.

    Raises:
        ValueError: an object names its properties in several places, each of which would exclude the others.
    """
    for path, place in subschemas(schema):
        several = ("anyOf", "oneOf", "$ref") if "properties" in place else ()
        for keyword in ("allOf", "if", "dependentSchemas", *several):
            if keyword in place:
                conflict = f"`properties` next to `{keyword}`" if keyword in several else f"`{keyword}`"
                problem = f"does not go with {conflict} (at {path}): name the properties of an object in one place"
                raise ValueError(problem)
    copy = json.loads(json.dumps(schema))
    for _, place in subschemas(copy, but="not"):  # a closed object within `not` would forbid less
        if is_object_schema(place) and not place.keys() & {"additionalProperties", "unevaluatedProperties"}:
            place["additionalProperties"] = False
    return copy


def is_object_schema(schema: Mapping[str, JsonValue]) -> bool:
    """Returns True if a schema describes objects."""
    kind = schema.get("type")
    return (
        kind == "object" or (isinstance(kind, list) and "object" in kind) or (kind is None and "properties" in schema)
    )


def with_field(document: bytes, name: str, value: str) -> bytes:
    """Returns a JSON object with a field in front of its other fields. It must have some, but not this one."""
    opening = document.index(b"{") + 1
    return b"%s%s:%s,%s" % (
        document[:opening],
        json.dumps(name).encode(),
        json.dumps(value).encode(),
        document[opening:],
    )
