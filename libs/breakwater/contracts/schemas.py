"""The messages as JSON Schema (2020-12), for validation and for code generation in other languages."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from breakwater.contracts.alerts import AlertDigest, WebhookEnvelope
from breakwater.contracts.channels import CHANNELS
from breakwater.contracts.job import Job

DIALECT = "https://json-schema.org/draft/2020-12/schema"

ON_WEBHOOKS: tuple[type[BaseModel], ...] = (AlertDigest, WebhookEnvelope)
"""Messages that stand on no subject: webhooks carry them."""


def message_schemas() -> dict[str, dict[str, Any]]:
    """The schema of every message, by its name."""
    messages = (*(channel.message for channel in CHANNELS), *ON_WEBHOOKS)
    return {message.__name__: message_schema(message) for message in messages}


def message_schema(message: type[BaseModel]) -> dict[str, Any]:
    """One message: a job as it is read, all others as they are written."""
    schema = message.model_json_schema(mode="validation" if message is Job else "serialization", by_alias=True)
    if message is Job:
        # pydantic can't derive this from a validator; without it a generated client could send invalid jobs.
        schema["oneOf"] = [
            {"required": ["prompt"], "properties": {"prompt": {"type": "string"}}},
            {"required": ["messages"], "properties": {"messages": {"type": "array"}}},
            {"required": ["input"], "properties": {"input": {"not": {"type": "null"}}}},
        ]
    return identified(schema, message.__name__)


def identified(schema: dict[str, Any], name: str) -> dict[str, Any]:
    """A schema with its dialect, its id and its title in front."""
    rest = {key: value for key, value in schema.items() if key != "title"}
    return {"$schema": DIALECT, "$id": f"urn:breakwater:schema:{name}", "title": name, **rest}
