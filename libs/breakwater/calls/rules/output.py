"""Output guardrails: answers are checked against the agent's schema, and the model gets feedback on mistakes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import Field, JsonValue, ValidationInfo, field_validator

from breakwater.jobs.rules.chat_messages import objects
from breakwater.kernel.json_values import NoJsonError, find_json, flaw_of, parse_json, subschemas
from breakwater.kernel.types import Message

if TYPE_CHECKING:
    from breakwater.calls.rules.schema_check import SchemaCheck

_MESSAGE = frozenset({"content", "tool_calls", "function_call"})


def ready_schemas() -> Mapping[str, dict[str, JsonValue]]:
    """The schemas by name. Programs define the data of a task, and an action's arguments: `strict` leaves them open."""
    return json.loads(Path(__file__).with_name("output_schemas.json").read_text(encoding="utf-8"))


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
        _check_of(_schema_of(schema))
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
    _check: SchemaCheck

    @classmethod
    def compile(cls, rules: OutputRules) -> OutputGuard:
        """Prepares the rules.

        Raises:
            ValueError: a schema is not known, or wrong.
        """
        schema = _schema_of(rules.schema_)
        if rules.strict:
            schema = closed(schema)
        return cls(rules, schema, fits_strict_mode(schema), _check_of(schema))

    def check(self, output: JsonValue) -> Valid | Invalid:
        """Checks an answer.

        Args:
            output: the answer's text, a whole assistant message, or any JSON of a process or python agent. A message
                that calls tools is no answer yet, and passes as it is.
        """
        said = output
        if isinstance(output, dict) and output.get("role") == "assistant" and not _MESSAGE.isdisjoint(output):
            content = objects(output.get("content"))
            if output.get("tool_calls") or output.get("function_call"):
                return Valid(output)
            if any(block.get("type") == "tool_use" for block in content):
                return Valid(output)
            text = output.get("content")
            said = text if isinstance(text, str) else "".join(str(block.get("text") or "") for block in content)
        try:
            value = self._json_of(said)
        except NoJsonError as error:
            return Invalid((f"$: {error}",))
        problems = self._check.problems(value)
        return Invalid(problems) if problems else Valid(value)

    def _json_of(self, said: JsonValue) -> JsonValue:
        if isinstance(said, str):
            if self.schema.get("type") == "string":  # in quotes as JSON has it, or as it is
                with suppress(NoJsonError):
                    value = parse_json(said)
                    return value if isinstance(value, str) else said
                return said
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


def _check_of(schema: dict[str, JsonValue]) -> SchemaCheck:
    from breakwater.calls.rules.schema_check import SchemaCheck  # a third of a second to import

    return SchemaCheck(schema)


def _schema_of(given: str | dict[str, JsonValue]) -> dict[str, JsonValue]:
    if not isinstance(given, str):
        return given
    ready = ready_schemas()
    if given not in ready:
        raise ValueError(f"{given[:100]!r} is not a ready schema; name one of {', '.join(sorted(ready))}, or write one")
    return ready[given]


# The strict form: objects with no other properties than the schema names


def closed(schema: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """The schema with every object closed that does not say whether it is.

    Raises:
        ValueError: it can't be: where an object's properties are named in several places, each would close it.
    """
    for path, place in subschemas(schema):
        several = ("anyOf", "oneOf", "$ref") if "properties" in place else ()
        for keyword in ("allOf", "if", "dependentSchemas", *several):
            if keyword in place:
                what = f"`properties` next to `{keyword}`" if keyword in several else f"`{keyword}`"
                words = f"does not go with {what} (at {path}): name the properties of an object in one place"
                raise ValueError(words)
    copy = json.loads(json.dumps(schema))
    for _, place in subschemas(copy, but="not"):  # what is closed within `not` would forbid less
        if _is_object(place) and not place.keys() & {"additionalProperties", "unevaluatedProperties"}:
            place["additionalProperties"] = False
    return copy


def _is_object(schema: dict[str, JsonValue]) -> bool:
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


def fits_strict_mode(schema: dict[str, JsonValue]) -> bool:
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
            required = set(cast(list[str], place.get("required", [])))
            if place.get("additionalProperties") is not False or names != required:
                return False
    return True
