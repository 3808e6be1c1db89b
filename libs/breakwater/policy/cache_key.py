"""The identity of a question: two jobs that have it in common may have the same answer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

from pydantic import JsonValue

VERSION = "v1"
"""To be raised with whatever changes what is asked for the same job, or what is made of an answer."""


def cache_key(
    *,
    agent: str,
    tenant: str | None,
    requested_model: str,
    messages: Sequence[Mapping[str, JsonValue]],
    input: JsonValue,  # noqa: A002  the job's word
    params: Mapping[str, JsonValue],
    schema: JsonValue,
    owner: str | None = None,
) -> str:
    """Names a question: `v1:` and 64 hex digits.

    The order of an object's keys says nothing; all else does. Values that are written differently are different, `1`
    and `1.0` or null and absent too: a call too many costs little, an answer to another question much.
    """
    parts: dict[str, JsonValue] = {
        "agent": agent,
        "tenant": tenant,
        "requested_model": requested_model,
        "messages": [dict(message) for message in messages],
        "input": input,
        "params": dict(params),
        "schema": schema,
    }
    if owner is not None:
        # Whoever can ask for an answer that is another's learns what that one has asked.
        parts["owner"] = owner
    # One document, so that no two parts run into each other; escaped, so that any text has bytes.
    document = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return f"{VERSION}:{hashlib.sha256(document.encode()).hexdigest()}"
