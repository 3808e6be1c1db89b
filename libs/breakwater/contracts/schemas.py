"""The contract as documents: messages as JSON Schema (2020-12), and the bus as AsyncAPI 3.0, made from the channels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

from breakwater.contracts.alerts import AlertDigest, WebhookEnvelope
from breakwater.contracts.channels import CHANNELS, Channel
from breakwater.contracts.job import Job
from breakwater.contracts.subjects import Header

DIALECT = "https://json-schema.org/draft/2020-12/schema"

ON_WEBHOOKS: tuple[type[BaseModel], ...] = (AlertDigest, WebhookEnvelope)
"""Messages without a subject: webhooks carry them."""


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


VERSION = "1.0.0"

ABOUT = """\
The bus from Breakwater's side: it reads from `receive` channels and publishes on `send` channels. JSON in UTF-8. Times
are RFC 3339 UTC with milliseconds, costs are decimal strings in USD, durations milliseconds in `*_ms` and seconds in
`*_s`. A job with an unknown field is rejected; ignore unknown fields in messages from Breakwater.

A subject's parameters are encoded: every byte of their UTF-8 outside `A-Z a-z 0-9 _ -` is written as `%XX` with
upper-case digits, so `gpt-4.1:mini` is the token `gpt-4%2E1%3Amini`.
"""

_STRING = {"type": "string"}
_CLOUD_EVENT = {
    Header.CE_ID: {**_STRING, "description": "Unique per event, and unchanged if the event is published again."},
    Header.CE_TYPE: {**_STRING, "description": "`breakwater.` and the message's name."},
    Header.CE_SOURCE: {**_STRING, "description": "`breakwater/` and the service."},
    Header.CE_TIME: {**_STRING, "format": "date-time"},
    Header.CE_SPECVERSION: {"const": "1.0"},
}
_TRACEPARENT = {Header.TRACEPARENT: {**_STRING, "description": "W3C trace context of the job."}}
_MSG_ID = {
    Header.MSG_ID: {
        **_STRING,
        "description": "The job's id if the body has none. JetStream stores each message; the worker runs a "
        "repeated id only once.",
    }
}


def asyncapi_document() -> dict[str, Any]:
    """The bus as an AsyncAPI 3.0 document. Payloads are references to `schemas/<Message>.json` next to it."""
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Breakwater",
            "version": VERSION,
            "description": ABOUT,
            "license": {"name": "Apache-2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"},
        },
        "defaultContentType": "application/json",
        "servers": {
            "local": {
                "host": "127.0.0.1:4222",
                "protocol": "nats",
                "description": "NATS with JetStream; `.breakwater/endpoints.json` has the address and the password.",
                "security": [{"$ref": "#/components/securitySchemes/user"}],
            }
        },
        "channels": {channel.name: _channel(channel) for channel in CHANNELS},
        "operations": {f"{channel.action}_{channel.name}": _operation(channel) for channel in CHANNELS},
        "components": {
            "messages": {channel.message.__name__: _message(channel) for channel in CHANNELS},
            "schemas": {
                "JobHeaders": _headers(_MSG_ID | _TRACEPARENT, required=()),
                "EventHeaders": _headers(_CLOUD_EVENT | _TRACEPARENT, required=_CLOUD_EVENT),
            },
            "securitySchemes": {"user": {"type": "userPassword", "description": "One NATS user for each role."}},
        },
    }


def _channel(channel: Channel) -> dict[str, Any]:
    name = channel.message.__name__
    kept = (
        "Core NATS: only current subscribers receive it; not stored."
        if channel.stream is None
        else f"Stream {channel.stream}."
    )
    return {
        "address": channel.address,
        "description": f"{channel.summary} {kept}",
        "parameters": {name: {"description": text} for name, text in channel.parameters.items()},
        "messages": {name: {"$ref": f"#/components/messages/{name}"}},
        **({"x-jetstream-stream": channel.stream.value} if channel.stream is not None else {}),
    }


def _operation(channel: Channel) -> dict[str, Any]:
    return {
        "action": channel.action,
        "channel": {"$ref": f"#/channels/{channel.name}"},
        "summary": channel.summary,
        "messages": [{"$ref": f"#/channels/{channel.name}/messages/{channel.message.__name__}"}],
    }


def _message(channel: Channel) -> dict[str, Any]:
    name = channel.message.__name__
    headers = "JobHeaders" if channel.message is Job else "EventHeaders"
    message = {
        "name": name,
        "title": name,
        "contentType": "application/json",
        "payload": {"$ref": f"./schemas/{name}.json"},
    }
    # Live steps and answers to reply_to are plain core messages, without headers.
    return message if channel.stream is None else {**message, "headers": {"$ref": f"#/components/schemas/{headers}"}}


def _headers(properties: dict[Header, Any], *, required: Iterable[Header]) -> dict[str, Any]:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {header.value: described for header, described in properties.items()},
    }
    names = [header.value for header in required]
    return {**schema, "required": names} if names else schema
