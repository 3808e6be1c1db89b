"""APIs of others that this service speaks, too: parsed to one job, and answered from its result."""

from __future__ import annotations

OTHER_APIS = {
    "/responses": "the Responses API is not served yet; have the client use chat completions instead: "
    '`openai.chat("…")` in the AI SDK, `set_default_openai_api("chat_completions")` in the Agents SDK, '
    "`OpenAIChatModel` (`openai-chat:…`) in Pydantic AI, `use_responses_api=False` in LangChain",
}
"""Parts of such APIs that are not served yet, by their path below the root, with the setting that a client needs."""

SERVED = (
    "POST /v1/chat/completions, /v1/embeddings, /v1/messages and /v1/messages/count_tokens, GET /v1/models and "
    "GET /v1/models/{model}"
)


def nothing_at(path: str) -> str:
    """The message for a URL at which nothing is, for the person who has set up the client."""
    missing = f"there is nothing at {path}"
    for part, advice in OTHER_APIS.items():
        # A root that lacks `/v1`, or has it twice as Anthropic's SDK adds it, is the second mistake.
        if path.removeprefix("/v1").removeprefix("/v1").startswith(part):
            return f"{missing}: {advice}. Served are {SERVED}"
    if path.endswith(("/messages", "/messages/count_tokens")):
        return f"{missing}: the base URL of an Anthropic client ends before /v1"
    if path.endswith("/chat/completions"):
        return f"{missing}: the base URL of an OpenAI client ends in /v1, once"
    return f"{missing}; served are {SERVED}" if path.startswith("/v1") else f"{missing}; /docs lists all operations"
