"""Output guardrails: whether an answer satisfies the agent's schema, and the feedback to the model when it does not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from pydantic import Field, JsonValue, ValidationInfo, field_validator

from breakwater.contracts.types import Message
from breakwater.policy.output_text import NoJsonError, find_json, flaw_of, parse_json

Schema = dict[str, JsonValue]


def ready_schemas() -> Mapping[str, Schema]:
    """The schemas by name."""
    return {"task_result": _task_result(), "task_report": _task_report(), "agent_decision": _agent_decision()}


def _task_result() -> Schema:
    return {
        "title": "task_result",
        "description": "What came of a task.",
        "type": "object",
        "properties": {
            "success": {"description": "Whether what was asked for was done.", "type": "boolean"},
            "message": {"description": "What came of it, or why it failed, in a sentence or two.", "type": "string"},
            "data": {
                "description": "What was asked for, where that is more than the message.",
                "type": ["object", "null"],
                "additionalProperties": True,  # under `strict`, too: it is anybody's
            },
        },
        "required": ["success", "message"],
    }


def _task_report() -> Schema:
    return {
        "title": "task_report",
        "description": "What came of a task of several parts.",
        "type": "object",
        "properties": {
            "status": {
                "description": "success: all is done; partial: a part is done; failure: nothing usable came of it.",
                "enum": ["success", "partial", "failure"],
            },
            "summary": {
                "description": "What was done and what came of it, in a few sentences that stand for themselves.",
                "type": "string",
                "minLength": 1,
            },
            "result": {"description": "What was asked for, in whatever form the task calls for."},
            "artifacts": {
                "description": "What was made or changed along the way: files, pages, records.",
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "name": {"description": "What it is called.", "type": "string", "minLength": 1},
                        "uri": {"description": "Where it is: a path or an address.", "type": "string"},
                        "description": {"description": "What it is for.", "type": "string"},
                    },
                    "required": ["name"],
                },
            },
            "errors": {
                "description": "What went wrong; empty or left out where all is well.",
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "message": {
                            "description": "What happened, and what could be done about it.",
                            "type": "string",
                            "minLength": 1,
                        },
                        "code": {"description": "A short name for this kind of error.", "type": "string"},
                        "recoverable": {"description": "Whether trying again can help.", "type": "boolean"},
                    },
                    "required": ["message"],
                },
            },
        },
        "required": ["status", "summary"],
    }


def _agent_decision() -> Schema:
    confidence: Schema = {
        "description": "How sure you are that this is right, from 0 (a guess) to 1 (certain).",
        "type": "number",
        "minimum": 0,
        "maximum": 1,
    }
    return {
        "title": "agent_decision",
        "description": "What to do next, and why.",
        "type": "object",
        "properties": {
            "action": {"description": "The name of what is to be done.", "type": "string", "minLength": 1},
            "reasoning": {"description": "Why this and nothing else, in short.", "type": "string"},
            "confidence": confidence,
            "arguments": {
                "description": "What the action is to be done with, by name.",
                "type": "object",
                "additionalProperties": True,
            },
            "alternatives": {
                "description": "What else was considered, the best first.",
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "action": {"description": "The name of the action.", "type": "string", "minLength": 1},
                        "reasoning": {"description": "Why it was not chosen.", "type": "string"},
                        "confidence": dict(confidence),
                    },
                    "required": ["action"],
                },
            },
        },
        "required": ["action", "reasoning", "confidence"],
    }


if TYPE_CHECKING:
    from breakwater.policy.output_check import SchemaCheck


class OutputRules(Message):
    """What answers must look like.

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
            _closed(_schema_of(info.data["schema_"]))
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
    """What is wrong, each with its path and what would be right. Hardly anything of the answer is repeated."""


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
        from breakwater.policy.output_strict import fits_strict_mode

        schema = _schema_of(rules.schema_)
        if rules.strict:
            schema = _closed(schema)
        return cls(rules, schema, fits_strict_mode(schema), _check_of(schema))

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
    """What goes back to the model after an answer that was not valid."""
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


def _schema_of(given: str | dict[str, JsonValue]) -> Schema:
    if not isinstance(given, str):
        return given
    ready = ready_schemas()
    if given not in ready:
        raise ValueError(f"{given[:100]!r} is not a ready schema; name one of {', '.join(sorted(ready))}, or write one")
    return ready[given]


def _check_of(schema: Schema) -> SchemaCheck:
    # A third of a second to import, so only where there is a schema.
    from breakwater.policy.output_check import SchemaCheck

    return SchemaCheck(schema)


def _closed(schema: Schema) -> Schema:
    from breakwater.policy.output_strict import closed, closing_objection

    if (objection := closing_objection(schema)) is not None:
        raise ValueError(objection)
    return closed(schema)


def _as_message(output: JsonValue) -> Mapping[str, JsonValue] | None:
    if isinstance(output, dict) and output.get("role") == "assistant":
        return output if {"content", "tool_calls", "function_call"} & output.keys() else None
    return None


def _calls_tools(message: Mapping[str, JsonValue]) -> bool:
    return bool(message.get("tool_calls") or message.get("function_call")) or any(
        block.get("type") == "tool_use" for block in _blocks(message)
    )


def _text_of(message: Mapping[str, JsonValue]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else "".join(str(block.get("text") or "") for block in _blocks(message))


def _blocks(message: Mapping[str, JsonValue]) -> list[dict[str, Any]]:
    content = message.get("content")
    return (
        [cast(dict[str, Any], block) for block in content if isinstance(block, dict)]
        if isinstance(content, list)
        else []
    )
