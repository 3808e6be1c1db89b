"""Output guardrails: check answers against the agent's schema, and send the mistakes back to the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from pydantic import JsonValue

from breakwater.calls.settings import OutputRules, schema_check_of, schema_of
from breakwater.jobs.rules.chat_messages import objects
from breakwater.kernel.json_values import (
    NoJsonError,
    closed_schema,
    find_json,
    flaw_of,
    is_object_schema,
    parse_json,
    subschemas,
)

if TYPE_CHECKING:
    from breakwater.kernel.schema_check import SchemaCheck

_MESSAGE = frozenset({"content", "tool_calls", "function_call"})


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
        schema: the schema that answers must satisfy; with `strict`, as `closed_schema` returns it.
        fits_strict_mode: True if OpenAI's strict mode accepts the schema. It refuses optional properties, for example.
    """

    rules: OutputRules
    schema: Mapping[str, JsonValue]
    fits_strict_mode: bool
    _check: SchemaCheck

    @classmethod
    def compile(cls, rules: OutputRules) -> OutputGuard:
        """Prepares the rules.

        Raises:
            ValueError: the schema is unknown or invalid.
        """
        schema = schema_of(rules.schema_)
        if rules.strict:
            schema = closed_schema(schema)
        return cls(rules, schema, fits_strict_mode(schema), schema_check_of(schema))

    def check(self, output: JsonValue) -> Valid | Invalid:
        """Checks an answer.

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
    """Returns the message to the model after an invalid answer."""
    listed = "\n".join(f"- {problem}" for problem in problems)
    text = (
        "Your answer does not satisfy the JSON schema that it must satisfy:\n"
        f"{listed}\n\n"
        "Answer again, in full, with nothing but JSON that satisfies the schema."
    )
    return {"role": "user", "content": text}


_STRICT_MODE = frozenset(
    {
        "$schema", "$id", "$comment", "$defs", "definitions", "$ref", "$anchor", "title", "description", "type",
        "properties", "required", "additionalProperties", "items", "anyOf", "enum", "const", "pattern", "format",
        "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minItems", "maxItems",
    }
)  # fmt: skip
_MEANING = frozenset({"type", "anyOf", "$ref", "enum", "const"})


def fits_strict_mode(schema: dict[str, JsonValue]) -> bool:
    """Returns True if OpenAI's strict mode accepts a schema; it answers 400 to others.

    OpenAI documents this subset of JSON schema for structured outputs: an object at the root, every object closed and
    all of its properties required, every schema with a type, and only some of the keywords.
    """
    if schema.get("type") != "object" or "anyOf" in schema:
        return False
    for _, place in subschemas(schema):
        if not place.keys() <= _STRICT_MODE or not place.keys() & _MEANING:
            return False
        if is_object_schema(place):
            names = set(cast(Mapping[str, Any], place.get("properties", {})))
            required = set(cast(list[str], place.get("required", [])))
            if place.get("additionalProperties") is not False or names != required:
                return False
    return True
