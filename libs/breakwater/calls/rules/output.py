"""Output guardrails: check answers against the agent's schema, and send the mistakes back to the model."""

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
    """Return the built-in schemas by name. `strict` leaves a task's data and an action's arguments open."""
    return json.loads(Path(__file__).with_name("output_schemas.json").read_text(encoding="utf-8"))


class OutputRules(Message):
    """Rules for the form of answers.

    Answers may be raw JSON, or JSON in a fenced block. With `strict`, they must contain nothing else, and objects must
    have no properties that the schema does not name; otherwise the first JSON value in the text counts.
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
        # If the schema is missing here, its own validation has failed and reports the mistake.
        if strict and "schema_" in info.data:
            closed(_schema_of(info.data["schema_"]))
        return strict


@dataclass(frozen=True, slots=True)
class Valid:
    """An answer that satisfies the schema.

    Attributes:
        value: the JSON of the answer; the message itself if the model calls tools.
    """

    value: JsonValue


@dataclass(frozen=True, slots=True)
class Invalid:
    """An answer that does not satisfy the schema.

    Attributes:
        problems: the mistakes, each with its path and a correction. They quote hardly anything from the answer.
    """

    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OutputGuard:
    """The rules of one agent, prepared for many answers.

    Attributes:
        rules: the configured rules.
        schema: the schema that answers must satisfy; with `strict`, as `closed` returns it.
        fits_strict_mode: True if OpenAI's strict mode accepts the schema. It refuses optional properties, for example.
    """

    rules: OutputRules
    schema: Mapping[str, JsonValue]
    fits_strict_mode: bool
    _check: SchemaCheck

    @classmethod
    def compile(cls, rules: OutputRules) -> OutputGuard:
        """Prepare the rules.

        Raises:
            ValueError: the schema is unknown or invalid.
        """
        schema = _schema_of(rules.schema_)
        if rules.strict:
            schema = closed(schema)
        return cls(rules, schema, fits_strict_mode(schema), _check_of(schema))

    def check(self, output: JsonValue) -> Valid | Invalid:
        """Check an answer.

        Args:
            output: the answer's text, a whole assistant message, or any JSON of a process or python agent. A message
                that calls tools is no answer yet, and is valid as it is.
        """
        answer = output
        if isinstance(output, dict) and output.get("role") == "assistant" and not _MESSAGE.isdisjoint(output):
            content = objects(output.get("content"))
            if output.get("tool_calls") or output.get("function_call"):
                return Valid(output)
            if any(block.get("type") == "tool_use" for block in content):
                return Valid(output)
            text = output.get("content")
            answer = text if isinstance(text, str) else "".join(str(block.get("text") or "") for block in content)
        try:
            value = self._json_of(answer)
        except NoJsonError as error:
            return Invalid((f"$: {error}",))
        problems = self._check.problems(value)
        return Invalid(problems) if problems else Valid(value)

    def _json_of(self, answer: JsonValue) -> JsonValue:
        if isinstance(answer, str):
            if self.schema.get("type") == "string":  # a JSON string, or plain text
                with suppress(NoJsonError):
                    value = parse_json(answer)
                    return value if isinstance(value, str) else answer
                return answer
            openers = {"object": "{", "array": "["}.get(str(self.schema.get("type")), "{[")
            return find_json(answer, strict=self.rules.strict, openers=openers)
        if (flaw := flaw_of(answer)) is not None:
            raise NoJsonError(flaw)
        return answer


def correction_message(problems: Iterable[str]) -> dict[str, JsonValue]:
    """Return the message to the model after an invalid answer."""
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


def _schema_of(setting: str | dict[str, JsonValue]) -> dict[str, JsonValue]:
    if not isinstance(setting, str):
        return setting
    built_in = ready_schemas()
    if setting not in built_in:
        raise ValueError(
            f"{setting[:100]!r} is not a ready schema; name one of {', '.join(sorted(built_in))}, or write one"
        )
    return built_in[setting]


# Closed schemas: objects have no other properties than the schema names


def closed(schema: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Return the schema with `additionalProperties: false` for every object that leaves it undefined.

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
    """Return True if OpenAI's strict mode accepts a schema; it answers 400 to others.

    OpenAI documents this subset of JSON schema for structured outputs: an object at the root, every object closed and
    all of its properties required, every schema with a type, and only some of the keywords.
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
