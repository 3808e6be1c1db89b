"""Doubles of the clouds that all have the same answers: models of each kind of provider, in threads of one process."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import Any

from google.genai import types

from breakwater.local.provider import SimulatedProvider
from tests.bedrock import BEARER, REGION, Bedrock, bedrock, ship_reply
from tests.calls.providers.cloud_doubles import ServiceAccount, TokenIssuer, azure, managed_identity, vertex
from tests.calls.providers.gemini_double import KEY as GEMINI_KEY
from tests.calls.providers.gemini_double import gemini, response

TOKEN_LIFETIME_S = 20
"""Of Google's and Entra's tokens: calls of a minute need several."""
AZURE_KEY = "azure-planted-0123456789"
THOUGHT, ANSWER = "A ship; look it up.", "The ferry is at sea."
CALLED: dict[str, Any] = {"name": "find_ship", "arguments": {"name": "ferry"}}
SHIP: dict[str, Any] = {
    "turns": [
        [{"type": "thinking", "text": THOUGHT}, {"type": "tool_call", **CALLED}],
        [{"type": "text", "text": ANSWER}],
    ],
    "usage": {"input_tokens": 1220, "output_tokens": 9, "cached_tokens": 1000, "reasoning_tokens": 5},
}
"""What the simulated provider answers: it thinks and calls a tool, and answers when it has the result."""
CLAUDE_SHIP: dict[str, Any] = {**SHIP, "usage": {**SHIP["usage"], "cache_write_tokens": 200}}
"""The same with writes to the prompt cache, which other models do not report."""

_SIGNED = {"functionCall": {"name": "find_ship", "args": {"name": "ferry"}}, "thoughtSignature": "c2lnbmVk"}
_USAGE = {
    "promptTokenCount": 1220,
    "cachedContentTokenCount": 1000,
    "candidatesTokenCount": 4,
    "thoughtsTokenCount": 5,
    "totalTokenCount": 1229,
}


def gemini_reply(body: dict[str, Any]) -> Sequence[Any]:
    """Answers as SHIP does. Gemini shows its thoughts to those who ask, and wants its signatures back."""
    parts = [part for content in body["contents"] for part in content["parts"]]
    if any("functionResponse" in part for part in parts):
        [call] = [part for part in parts if "functionCall" in part]
        if call.get("thoughtSignature") != _SIGNED["thoughtSignature"]:
            text = "Function call is missing a thought_signature in functionCall parts."
            return 400, {"error": {"code": 400, "message": text, "status": "INVALID_ARGUMENT"}}
        half = len(ANSWER) // 2
        return [response({"text": ANSWER[:half]}, finish=None), response({"text": ANSWER[half:]}, usage=_USAGE)]
    thinking = types.GenerationConfig.model_validate(body.get("generationConfig", {})).thinking_config
    shows = thinking is not None and thinking.include_thoughts
    thoughts = [response({"text": THOUGHT, "thought": True}, finish=None)] if shows else []
    return [*thoughts, response(_SIGNED, usage=_USAGE)]


@dataclass(frozen=True, slots=True)
class Clouds:
    """The running doubles.

    Attributes:
        providers: the settings of a provider of each kind.
        environment: variables that the plane needs for their credentials.
        bedrock: the double of Bedrock's.
        issuers: of tokens, by the cloud.
        refused: the reasons of the refusals of Azure and Vertex.
    """

    providers: Mapping[str, dict[str, Any]]
    environment: Mapping[str, str]
    bedrock: Bedrock
    issuers: Mapping[str, TokenIssuer]
    refused: list[str] = field(default_factory=list[str])

    def refusals(self) -> list[str]:
        """Returns what the doubles have refused since they were asked before."""
        refusals = [*self.refused, *self.bedrock.refused]
        self.refused.clear()
        self.bedrock.refused.clear()
        return refusals


@asynccontextmanager
async def clouds(directory: Path) -> AsyncGenerator[Clouds]:
    """Runs them; credentials are files in the directory."""
    issuers = {name: TokenIssuer(TOKEN_LIFETIME_S) for name in ("entra", "google")}
    refused = list[str]()
    models = {"ship": SHIP, "gemini-3-pro": SHIP, "claude-opus-4-5@20251101": CLAUDE_SHIP}
    priced = {"price": {"input_usd_per_mtok": 1, "output_usd_per_mtok": 1}, "stream": {"tokens_per_s": 100}}
    async with AsyncExitStack() as stack:
        sim = await stack.enter_async_context(
            SimulatedProvider({"models": {name: {**priced, **script} for name, script in models.items()}})
        )
        account = await stack.enter_async_context(ServiceAccount(issuers["google"]).serve())
        variables = await stack.enter_async_context(managed_identity(issuers["entra"]))
        azure_url = await stack.enter_async_context(azure(issuers["entra"], sim.url, refused, AZURE_KEY))
        vertex_url = await stack.enter_async_context(vertex(issuers["google"], sim.url, refused))
        gemini_url = await stack.enter_async_context(gemini(gemini_reply))
        frankfurt = await stack.enter_async_context(bedrock(ship_reply))
        secrets = {"azure": AZURE_KEY, "bedrock": BEARER, "gemini": GEMINI_KEY, "google": json.dumps(account)}
        files = dict[str, dict[str, str]]()
        for name, secret in secrets.items():
            (directory / f"{name}.key").write_text(secret)
            files[name] = {"file": str(directory / f"{name}.key")}
        on_vertex = {
            "kind": "vertex",
            "base_url": vertex_url,
            "project": "my-project",
            "auth": {"credentials": files["google"]},
        }
        providers = {
            "azure": {"kind": "azure", "base_url": azure_url, "api_key": files["azure"]},
            "azure-v1": {
                "kind": "azure",
                "base_url": azure_url,
                "api_version": "v1",
                "api": "responses",
                "auth": {"entra": "managed_identity"},
            },
            "bedrock": {
                "kind": "bedrock",
                "base_url": frankfurt.origin,
                "region": REGION,
                "api_key": files["bedrock"],
            },
            "gemini-api": {"kind": "gemini", "base_url": gemini_url, "api_key": files["gemini"]},
            "vertex": {**on_vertex, "location": "global"},
            "vertex-eu": {**on_vertex, "location": "europe-west4"},
        }
        yield Clouds(providers, variables, frankfurt, issuers, refused)


@contextmanager
def clouds_in_thread(directory: Path) -> Generator[Clouds]:
    """Runs them with an event loop of their own."""
    started: Queue[Clouds] = Queue()
    stop = threading.Event()

    async def serve() -> None:
        async with clouds(directory) as running:
            started.put(running)
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    try:
        yield started.get(timeout=30)
    finally:
        stop.set()
        thread.join(30)
