"""The texts that people know a job by: the beginnings of its prompt and of its answer."""

from __future__ import annotations

from typing import Any

from pydantic import JsonValue

from breakwater.jobs.rules.chat_messages import encode_json, fields, objects, parts_of
from breakwater.redaction.rules.redact import cut

PREVIEW_CHARACTERS = 120


def prompt_in(document: JsonValue) -> str | None:
    """Returns the text that a person would know a job by: its prompt, its last user's message, or its text input.

    Args:
        document: the body of the job, valid or not.
    """
    job = fields(document)
    native = fields(fields(job.get("api_request")).get("body"))
    texts = (job.get("prompt"), job.get("messages"), native.get("messages"), native.get("input"), job.get("input"))
    return next((text for value in texts if (text := _text_of(value))), None)


def preview(value: JsonValue) -> str | None:
    """Returns the beginning of a redacted text or of other JSON, in one line; None without one."""
    if value is None or value == "":
        return None
    text = value if isinstance(value, str) else encode_json(value).decode(errors="replace")
    # The rest of a long text would take long to split.
    return cut(" ".join(text[: 10 * PREVIEW_CHARACTERS].split()), PREVIEW_CHARACTERS) or None


def _text_of(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        return None
    by_users = [message for message in objects(value) if message.get("role") == "user"]
    for message in reversed(by_users):
        if text := parts_of(message.get("content"))[0]:
            return text
    # Inputs for embeddings are texts without roles.
    return next((text for text in value if isinstance(text, str)), None)
