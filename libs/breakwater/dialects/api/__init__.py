"""The APIs of OpenAI and Anthropic: a request becomes one job, and the response comes from its result."""

from __future__ import annotations

from breakwater.identity.rules.callers import OPENAI, is_openai

SERVED = (
    "POST /v1/chat/completions, /v1/responses, /v1/embeddings, /v1/messages and /v1/messages/count_tokens, "
    "GET and DELETE /v1/responses/{response_id} with /cancel and /input_items, GET /v1/models and /v1/models/{model}"
)


UNSERVED_PATHS = ("/v1/responses/compact", "/v1/responses/input_tokens")
"""OpenAI's operations that are not served, and whose URLs look like those of responses."""


def is_messages(path: str) -> bool:
    """Returns True for a path of Anthropic's API, even if its root has `/v1` twice."""
    return path.removeprefix(OPENAI).removeprefix(OPENAI).startswith("/messages") and is_openai(path)


def nothing_at(path: str) -> str:
    """Returns the message for a URL that does not exist, for the person who has set up the client."""
    missing = f"there is nothing at {path}"
    if path in UNSERVED_PATHS:
        return f"{missing}: compaction and the counting of tokens are not served; served are {SERVED}"
    if path.endswith(("/messages", "/messages/count_tokens")):
        return f"{missing}: the base URL of an Anthropic client ends before /v1"
    if path.endswith(("/chat/completions", "/responses", "/embeddings")):
        return f"{missing}: the base URL of an OpenAI client ends in /v1, once"
    return f"{missing}; served are {SERVED}" if path.startswith("/v1") else f"{missing}; /docs lists all operations"
