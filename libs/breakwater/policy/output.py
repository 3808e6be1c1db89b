"""Output guardrails: whether an answer satisfies the agent's schema, and what the model is told when it does not."""

from __future__ import annotations

from pydantic import Field, JsonValue

from breakwater.contracts.types import Message


class OutputRules(Message):
    """What answers must look like.

    Raw JSON is accepted, and JSON in a fenced block. Where `strict`, the answer must be nothing but that, and objects
    may have no properties that the schema does not name; otherwise the first JSON value in the text counts.
    """

    schema_: str | dict[str, JsonValue] = Field(
        alias="schema",
        description="A JSON schema, or the name of a ready one: task_result, agent_decision.",
    )
    strict: bool = False
    native: bool = Field(default=True, description="Hold providers to the schema where they can be held to one.")
    max_corrections: int = Field(
        default=2, ge=0, le=10, description="How often a model is told what was wrong and asked again."
    )
