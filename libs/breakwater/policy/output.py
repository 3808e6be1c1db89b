"""Output guardrails: whether an answer satisfies the agent's schema, and the feedback to the model when it does not.

The JSON in the text of an answer is found in time linear in the text, whatever the text is. The schema that it must
satisfy is made ready to check many answers: bounded in time, and with no way out to other documents.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import re2
from pydantic import Field, JsonValue, ValidationInfo, field_validator

from breakwater.contracts.types import Message
from breakwater.policy.chat_messages import objects

if TYPE_CHECKING:  # a third of a second to import, so only where there is a schema
    from jsonschema.exceptions import ValidationError

_Schema = dict[str, JsonValue]


def ready_schemas() -> Mapping[str, dict[str, JsonValue]]:
    """The schemas by name. Programs define the data of a task, and an action's arguments: `strict` leaves them open."""
    return json.loads(files("breakwater.policy").joinpath("output_schemas.json").read_text(encoding="utf-8"))


class OutputRules(Message):
    """Rules for the form of answers.

    Raw JSON is accepted, and JSON in a fenced block. Where `strict`, the answer must be nothing but that, and objects
    may have no properties that the schema does not name; otherwise the first JSON value in the text counts.
    """

    schema_: str | dict[str, JsonValue] = Field(
        alias="schema",
        description="A JSON schema, or the name of a built-in one: task_result, task_report, agent_decision.",
    )
    strict: bool = False
    native: bool = Field(default=True, description="Have providers enforce the schema, if they can.")
    max_corrections: int = Field(
        default=2, ge=0, le=10, description="How often an invalid answer is sent back to the model with its errors."
    )

    @field_validator("schema_")
    @classmethod
    def _usable(cls, schema: str | dict[str, JsonValue]) -> str | dict[str, JsonValue]:
        _SchemaCheck(_schema_of(schema))
        return schema

    @field_validator("strict")
    @classmethod
    def _closable(cls, strict: bool, info: ValidationInfo) -> bool:
        # Without a schema here, that one is wrong, and said to be.
        if strict and "schema_" in info.data:
            closed(_schema_of(info.data["schema_"]))
        return strict


@dataclass(frozen=True, slots=True)
class Valid:
    """An answer that may be given."""

    value: JsonValue
    """The JSON of the answer; the message itself where the model calls tools."""


@dataclass(frozen=True, slots=True)
class Invalid:
    """An answer that does not satisfy the schema."""

    problems: tuple[str, ...]
    """The mistakes, each with its path and what would be right. Hardly anything of the answer is repeated."""


@dataclass(frozen=True, slots=True)
class OutputGuard:
    """The rules of one agent, prepared for many answers.

    Attributes:
        rules: as they were configured.
        schema: what answers must satisfy; with `strict`, with every object closed that does not say whether it is.
        fits_strict_mode: whether OpenAI's strict mode takes the schema. It refuses optional properties, for one.
    """

    rules: OutputRules
    schema: Mapping[str, JsonValue]
    fits_strict_mode: bool
    _check: _SchemaCheck

    @classmethod
    def compile(cls, rules: OutputRules) -> OutputGuard:
        """Prepares the rules.

        Raises:
            ValueError: a schema is not known, or wrong.
        """
        schema = _schema_of(rules.schema_)
        if rules.strict:
            schema = closed(schema)
        return cls(rules, schema, fits_strict_mode(schema), _SchemaCheck(schema))

    def check(self, output: JsonValue) -> Valid | Invalid:
        """Checks an answer.

        Args:
            output: the answer's text, a whole assistant message, or any JSON of a process or python agent. A message
                that calls tools is no answer yet, and passes as it is.
        """
        message = _as_message(output)
        if message is not None and _calls_tools(message):
            return Valid(output)
        said = output if message is None else _text_of(message)
        try:
            value = self._json_of(said)
        except NoJsonError as error:
            return Invalid((f"$: {error}",))
        problems = self._check.problems(value)
        return Invalid(problems) if problems else Valid(value)

    def _json_of(self, said: JsonValue) -> JsonValue:
        if isinstance(said, str):
            if self.schema.get("type") == "string":
                return _string_of(said)
            openers = {"object": "{", "array": "["}.get(str(self.schema.get("type")), "{[")
            return find_json(said, strict=self.rules.strict, openers=openers)
        if (flaw := flaw_of(said)) is not None:
            raise NoJsonError(flaw)
        return said


def correction_message(problems: Iterable[str]) -> dict[str, JsonValue]:
    """The message to the model after an answer that was not valid."""
    listed = "\n".join(f"- {problem}" for problem in problems)
    text = (
        "Your answer does not satisfy the JSON schema that it must satisfy:\n"
        f"{listed}\n\n"
        "Answer again, in full, with nothing but JSON that satisfies the schema."
    )
    return {"role": "user", "content": text}


def _string_of(said: str) -> str:
    """A string, in quotes as JSON has it, or as it is."""
    try:
        value = parse_json(said)
    except NoJsonError:
        return said
    return value if isinstance(value, str) else said


def _schema_of(given: str | dict[str, JsonValue]) -> dict[str, JsonValue]:
    if not isinstance(given, str):
        return given
    ready = ready_schemas()
    if given not in ready:
        raise ValueError(f"{given[:100]!r} is not a ready schema; name one of {', '.join(sorted(ready))}, or write one")
    return ready[given]


def _as_message(output: JsonValue) -> Mapping[str, JsonValue] | None:
    if isinstance(output, dict) and output.get("role") == "assistant":
        return output if {"content", "tool_calls", "function_call"} & output.keys() else None
    return None


def _calls_tools(message: Mapping[str, JsonValue]) -> bool:
    return bool(message.get("tool_calls") or message.get("function_call")) or any(
        block.get("type") == "tool_use" for block in objects(message.get("content"))
    )


def _text_of(message: Mapping[str, JsonValue]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "".join(str(block.get("text") or "") for block in objects(content))


# JSON in texts

MAX_DEPTH = 100
"""Deeper JSON has no use here, and other programs refuse it: pydantic reads 200 levels, with those that are put around
an answer, and writes 255."""
MAX_CANDIDATES = 100
"""Parts of a text that are tried. Who writes a hundred that look like JSON and are none has no answer."""


class NoJsonError(ValueError):
    """There is no JSON in the text, or none that may be used. The text says why, without what the answer says."""


def find_json(text: str, *, strict: bool, openers: str = "{[") -> JsonValue:
    """The JSON value of an answer: all of its text, or a fenced block.

    Args:
        text: of the answer.
        strict: true if nothing may be around it; otherwise the first fenced block that is JSON counts, or the first
            object or array in the text.
        openers: what an object or array in the text may begin with.

    Raises:
        NoJsonError: there is none. A value that is written in full but is wrong is not looked into for others.
    """
    text = text.strip().strip("\ufeff")
    if not text:
        raise NoJsonError("is empty")
    first: NoJsonError | None = None
    for candidate in islice(_candidates(text, strict=strict, openers=openers), MAX_CANDIDATES):
        try:
            return parse_json(candidate)
        except NoJsonError as error:
            first = first or error
    if text[0] in '{["' or text.startswith("```"):
        assert first is not None
        raise first
    raise NoJsonError("is not JSON" if strict else "has no JSON in it")


def parse_json(text: str) -> JsonValue:
    """One JSON value, as RFC 8259 has it, and no key twice in an object.

    Raises:
        NoJsonError: it is none, or is one that can't be written down again.
    """
    try:
        value = json.loads(text, object_pairs_hook=_object)
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
    """Reason why a value can't be written as JSON, or shouldn't be; None where it can."""
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
    """True if a value is nested deeper than all who read it on the way take, with what holds it."""
    if not isinstance(value, dict | list | tuple):
        return False
    return any(depth > MAX_DEPTH for depth, _ in enumerate(levels(cast(object, value))))


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
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise NoJsonError(f"has the property {twice[:40]!r} twice in one object")
    return found


def _candidates(text: str, *, strict: bool, openers: str) -> Iterator[str]:
    yield text
    if text.startswith("```") and text.endswith("```") and len(text) >= 6:
        yield _inside(text[3:-3])
    if not strict:
        yield from _fenced_blocks(text)
        yield from _balanced(text, openers)


def _fenced_blocks(text: str) -> Iterator[str]:
    end = 0
    while (start := text.find("```", end)) >= 0:
        line_end = text.find("\n", start)
        line_end = len(text) if line_end < 0 else line_end
        close = text.rfind("```", start + 3, line_end)
        if close < 0:
            # No string of JSON has a line break in it, so a fence that begins a line is none of the content.
            closing = _FENCE.search(text, line_end)
            if closing is None:
                return
            close, end = closing.start(), closing.end()
        else:
            end = close + 3
        yield _inside(text[start + 3 : close])


_FENCE = re.compile(r"\n[ \t]*```")
_LANGUAGE = re.compile(r"[A-Za-z][\w+-]*(?=[\s{\[\"])")


def _inside(block: str) -> str:
    """The content of a fenced block, without the name of its language."""
    language = _LANGUAGE.match(block)
    return block[language.end() :] if language is not None else block


def _balanced(text: str, openers: str) -> Iterator[str]:
    """Objects and arrays in a text, one after the other, none of them within another one."""
    end = 0
    begins = re.compile("|".join(_BEGINNINGS[opener] for opener in openers))
    while (start := begins.search(text, end)) is not None:
        close = _closing(text, start.start())
        if close is None:
            return  # cut off: a part of it is not the answer
        yield text[start.start() : close]
        end = close


_BEGINNINGS = {"{": r'\{\s*["}]', "[": r"\[\s*[\[{\]\"\-0-9tfn]"}
"""Beginnings that prose does not have by chance."""
_STRUCTURE = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[{}\[\]]', re.S)


def _closing(text: str, start: int) -> int | None:
    """The end of what begins at `start`; None where there is none."""
    depth = 0
    for token in _STRUCTURE.finditer(text, start):
        if token[0] in "{[":
            depth += 1
        elif token[0] in "}]":
            depth -= 1
            if depth == 0:
                return token.end()
    return None


# Schemas

_PATH, _NAMES, _OURS = 200, 200, 200
"""Characters of a path, of a name that the value brought (longer ones are not shown), and shown of the schema."""

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
    "unevaluatedProperties": "has properties that are named nowhere in the schema",
    "unevaluatedItems": "has more items than the schema allows",
}


def _described(error: ValidationError) -> str:
    """One thing that is wrong: its path, and what would be right."""
    from jsonschema.exceptions import best_match

    # Of the ways in which none of several forms fits, the one that comes nearest says most.
    nearest = cast("ValidationError", best_match([error]))
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
    if keyword in {"anyOf", "oneOf"}:
        if not error.context:
            return "fits more than one of the forms it may have; should fit exactly one"
        types = [
            form.get("type") if isinstance(form, dict) else None for form in cast(list[dict[str, Any] | bool], asked)
        ]
        if not all(isinstance(kind, str) for kind in types):
            return "has none of the forms it may have"
        return f"should be {_kinds(cast(list[str], types))}, is {_kind(found)}"
    if keyword in _WORDS:
        return _WORDS[keyword].format(_json(asked))
    return f"does not satisfy `{keyword}`: {_json(asked)}" if keyword is not None else "is not allowed"


def _name(name: str) -> str:
    # Whole or not at all, as a path. What is escaped takes up to ten times its own length.
    shown = repr(name)
    return shown if len(shown) <= _NAMES + len("''") else f"a name of {len(name)} characters"


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
"""Number of references that one check may follow. Alternatives that refer to themselves could take for ever."""

_INTRICATE = "$: is too deep or too intricate to be checked"


class _SchemaCheck:
    """Checks values against one schema."""

    def __init__(self, schema: _Schema) -> None:
        """Prepares the check.

        Raises:
            ValueError: it is no JSON schema, or one that can't be checked safely; the text has the path within it.
        """
        _require_safe(schema)
        self._steps = 0
        self._validator = _validator_of(schema, self._follow)
        probes: tuple[JsonValue, ...] = (None, {}, [], "", 0)
        for probe in probes:
            if self.problems(probe) == (_INTRICATE,):
                raise ValueError("is a JSON schema that refers to itself without end")

    def _follow(self) -> None:
        self._steps -= 1
        if self._steps < 0:
            raise RecursionError

    def problems(self, value: JsonValue) -> tuple[str, ...]:
        """The mistakes of a value, each with its path; empty where it satisfies the schema."""
        self._steps = MIN_STEPS + STEPS_PER_VALUE * sum(map(len, levels(value)))
        try:
            found = islice(self._validator.iter_errors(value), MAX_PROBLEMS)
            return tuple(dict.fromkeys(map(_described, found)))
        except (RecursionError, OverflowError):
            return (_INTRICATE,)


def _validator_of(schema: _Schema, follow: Callable[[], None]) -> Any:
    """A validator of the library, with five of its keywords in other ways.

    Args:
        schema: which was found safe.
        follow: called for each reference.
    """
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import ValidationError
    from jsonschema.validators import extend
    from referencing import Registry
    from referencing.jsonschema import SchemaRegistry

    def ref(validator: Any, ref: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
        follow()
        yield from Draft202012Validator.VALIDATORS["$ref"](validator, ref, instance, schema)

    def any_of(validator: Any, forms: Sequence[Any], instance: Any, schema: Any) -> Iterator[ValidationError]:  # noqa: ARG001
        # The library's check looks for every mistake in every form, and in a tree that doubles the work at each level.
        mistakes = [next(validator.descend(instance, form), None) for form in forms]
        if None not in mistakes:
            yield ValidationError("", context=cast(Any, mistakes))

    def one_of(validator: Any, forms: Sequence[Any], instance: Any, schema: Any) -> Iterator[ValidationError]:  # noqa: ARG001
        mistakes = [next(validator.descend(instance, form), None) for form in forms]
        fitting = mistakes.count(None)
        if fitting != 1:
            yield ValidationError("", context=() if fitting else cast(Any, mistakes))

    def pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[ValidationError]:  # noqa: ARG001
        # Python's `re` could be kept busy endlessly by a crafted answer.
        if isinstance(instance, str) and not _compiled(pattern).search(instance):
            yield ValidationError("")

    def unique_items(validator: Any, wanted: bool, instance: Any, schema: Any) -> Iterator[ValidationError]:  # noqa: ARG001
        # The library's check compares each object with each other one.
        if wanted and isinstance(instance, list):
            items = cast(list[Any], instance)
            if len({_identity(item) for item in items}) < len(items):
                yield ValidationError("")

    keywords = {"$ref": ref, "anyOf": any_of, "oneOf": one_of, "pattern": pattern, "uniqueItems": unique_items}
    # References lead nowhere outside; the validator's own registry would fetch them.
    nothing_else: SchemaRegistry = Registry()
    return extend(Draft202012Validator, keywords)(schema, registry=nothing_else)


@lru_cache(maxsize=1000)
def _compiled(pattern: str) -> Any:
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
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match
    from referencing import Registry
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012, SchemaRegistry

    if (flaw := flaw_of(schema)) is not None:
        raise ValueError(flaw)
    language = Draft202012Validator(Draft202012Validator.META_SCHEMA)
    error = best_match(cast("Iterator[ValidationError]", language.iter_errors(cast(Any, schema))))
    if error is not None:
        raise ValueError(f"is not a JSON schema: {_described(cast('ValidationError', error))}")
    places = dict(subschemas(schema))
    nothing_else: SchemaRegistry = Registry()
    resolver = nothing_else.resolver_with_root(DRAFT202012.create_resource(schema))
    for path, place in places.items():
        for keyword, instead in _REFUSED.items():
            if keyword in place:
                raise ValueError(f"{path}.{keyword}: is not taken here; {instead}")
        if path != "$" and "$id" in place:
            raise ValueError(f"{path}.$id: is taken at the root alone")
        if "pattern" in place:
            pattern = str(place["pattern"])
            try:
                _compiled(pattern)
            except re2.error as wrong:
                raise ValueError(
                    f"{path}.pattern: {pattern[:100]!r} is not a regular expression that RE2 takes: {wrong}"
                ) from None
        if (ref := place.get("$ref")) is None:
            continue
        if not str(ref).startswith("#"):
            raise ValueError(f"{path}.$ref: only schemas within this one are followed; write it like '#/$defs/name'")
        try:
            target = resolver.lookup(str(ref)).contents
        except Unresolvable:
            target = None
        if not isinstance(target, bool) and not any(target is known for known in places.values()):
            raise ValueError(f"{path}.$ref: {str(ref)[:100]!r} leads to no schema; write it like '#/$defs/name'")


_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_LISTED = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_SINGLE = frozenset(
    {
        "items", "contains", "additionalProperties", "propertyNames", "unevaluatedItems", "unevaluatedProperties",
        "not", "if", "then", "else", "contentSchema",
    }
)  # fmt: skip


def subschemas(schema: _Schema, path: str = "$", but: str | None = None) -> Iterator[tuple[str, _Schema]]:
    """Every schema within a schema, itself first, with its path. What is data in it, such as `enum`, is passed over.

    Args:
        schema: the outermost.
        path: of it.
        but: a keyword whose schema is passed over, too.
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


# Strict form: objects with no other properties than the schema names


def closed(schema: _Schema) -> _Schema:
    """The schema with every object closed that does not say whether it is.

    Raises:
        ValueError: it can't be: where an object's properties are named in several places, each would close it.
    """
    for path, place in subschemas(schema):
        for keyword in ("allOf", "if", "dependentSchemas"):
            if keyword in place:
                words = f"does not go with `{keyword}` (at {path}): name the properties of an object in one place"
                raise ValueError(words)
        for keyword in ("anyOf", "oneOf", "$ref"):
            if keyword in place and "properties" in place:
                raise ValueError(
                    f"does not go with `properties` next to `{keyword}` (at {path}): name them in one place"
                )
    copy = json.loads(json.dumps(schema))
    for _, place in subschemas(copy, but="not"):  # what is closed within `not` would forbid less
        if _is_object(place) and not place.keys() & {"additionalProperties", "unevaluatedProperties"}:
            place["additionalProperties"] = False
    return copy


def _is_object(schema: _Schema) -> bool:
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


def fits_strict_mode(schema: _Schema) -> bool:
    """True if OpenAI's strict mode takes a schema; it answers 400 to others.

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
