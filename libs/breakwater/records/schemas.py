"""The contract as documents: messages as JSON Schema (2020-12), and what the channels add to FastStream's AsyncAPI."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

from breakwater.alerts.contract import AlertDigest, WebhookEnvelope
from breakwater.jobs.contract.job import Job
from breakwater.kernel.nats.channel import Channel
from breakwater.kernel.nats.subjects import Header
from breakwater.records.channels import CHANNELS

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
    return schema_with_id(schema, message.__name__)


def schema_with_id(schema: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns a schema with its dialect, its id and its title first."""
    without_title = {key: value for key, value in schema.items() if key != "title"}
    return {"$schema": DIALECT, "$id": f"urn:breakwater:schema:{name}", "title": name, **without_title}


_BUS = """\
The bus from the services' side: `worker.receive.jobs` is what the worker reads of the jobs, `worker.send.results` what
it publishes. Programs publish jobs and requests to cancel them, and may read the others. JSON in UTF-8. Times are RFC
3339 UTC with milliseconds, costs are decimal strings in USD, durations milliseconds in `*_ms` and seconds in `*_s`. A
job with an unknown field is rejected; ignore unknown fields in messages from Breakwater.

A subject's parameters are encoded: every byte of their UTF-8 outside `A-Z a-z 0-9 _ -` is written as `%XX` with
upper-case digits, so `gpt-4.1:mini` is the token `gpt-4%2E1%3Amini`.
"""

ABOUT: dict[str, Any] = {
    "title": "Breakwater",
    "version": "1.0.0",
    "description": _BUS,
    "license": {"name": "Apache-2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"},
}
"""The head of the AsyncAPI document."""

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


def asyncapi_document(document: dict[str, Any]) -> dict[str, Any]:
    """FastStream's AsyncAPI document of the brokers, with what it does not know of the channels.

    These are the parameters and the stream of each, headers, and the messages' own schemas in `schemas/<Message>.json`:
    FastStream makes schemas of what is read, and events are written. All in a fixed order; FastStream has none.
    """
    by_address = {channel.address: channel for channel in CHANNELS}
    channels = dict(sorted(document["channels"].items(), key=lambda item: _place(item[1]["address"], item[0])))
    operations = {name: document["operations"][name] for name in sorted(document["operations"])}
    for described in channels.values():
        channel = by_address[described["address"]]
        described["description"] = f"{channel.summary} {_storage(channel)}"
        described["parameters"] = {name: {"description": text} for name, text in channel.parameters.items()}
        if channel.stream is not None:
            described["x-jetstream-stream"] = channel.stream.value
        described["messages"] = {
            name: {"$ref": f"#/components/messages/{channel.message.__name__}"} for name in described["messages"]
        }
    return {
        **document,
        "channels": channels,
        "operations": operations,
        "components": {
            "messages": {channel.message.__name__: _message(channel) for channel in CHANNELS},
            "schemas": {
                "JobHeaders": _headers(_MSG_ID | _TRACEPARENT, required=()),
                "EventHeaders": _headers(_CLOUD_EVENT | _TRACEPARENT, required=_CLOUD_EVENT),
            },
        },
    }


def _place(address: str, name: str) -> tuple[int, str]:
    """The place of a channel in the document: in the contract's order, those of one address by the service."""
    return [channel.address for channel in CHANNELS].index(address), name


def _storage(channel: Channel) -> str:
    if channel.stream is None:
        return "Core NATS: only current subscribers receive it; not stored."
    return f"Stream {channel.stream}."


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
