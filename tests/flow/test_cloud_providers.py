"""Gemini and Vertex on a whole plane, called with OpenAI's SDK and as Anthropic's SDK calls."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from breakwater.identity.api_keys import create_key
from breakwater.local.ports import free_port
from breakwater.local.provider import SimulatedProvider
from tests.anthropic_client import Accumulation
from tests.flow.fixtures import StartPlane
from tests.flow.kit import PRICE, Plane, model
from tests.openai_client import openai_client

pytest.importorskip("google.genai", reason="`make install` brings it")

from tests.calls.providers.cloud_doubles import ServiceAccount, TokenIssuer, vertex
from tests.calls.providers.gemini_double import KEY as GEMINI_KEY
from tests.calls.providers.gemini_double import gemini, response

USAGE = {"promptTokenCount": 120, "cachedContentTokenCount": 100, "candidatesTokenCount": 40, "totalTokenCount": 160}
CALLED = {"functionCall": {"name": "find_ship", "args": {"name": "ferry"}}, "thoughtSignature": "c2lnbmVk"}
CALLS = [response({"text": "A ship.", "thought": True}, finish=None), response(CALLED, usage=USAGE)]
SAYS = [response({"text": "The ferry "}, finish=None), response({"text": "is at sea."}, usage=USAGE)]
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
TOOL = {"type": "function", "function": {"name": "find_ship", "parameters": SCHEMA}}
ASKED = {"role": "user", "content": "Where is the ferry?"}
CLAUDE: dict[str, Any] = {
    **model(),
    "turns": [
        [
            {"type": "thinking", "text": "A ship; look it up."},
            {"type": "tool_call", "name": "find_ship", "arguments": {"name": "ferry"}},
        ],
        [{"type": "thinking", "text": "It is known now."}, {"type": "text", "text": "The ferry is at sea."}],
    ],
}


@dataclass
class Clouds:
    """A plane whose agents are `gemini` and `claude`, and what Gemini was sent."""

    plane: Plane
    url: str
    key: str
    seen: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    refused: list[str] = field(default_factory=list[str])

    @property
    def sdk(self) -> Any:
        return openai_client(f"{self.url}/v1", self.key, max_retries=0)

    async def message(self, agent: str, messages: list[Any], *, stream: bool = False) -> dict[str, Any]:
        """One call of Anthropic's Messages, and its message as an SDK has it."""
        body = {
            "model": agent,
            "max_tokens": 2000,
            "messages": messages,
            "tools": [{"name": "find_ship", "input_schema": SCHEMA}],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "stream": stream,
        }
        headers = {"x-api-key": self.key, "anthropic-version": "2023-06-01"}
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{self.url}/v1/messages", json=body, headers=headers) as answer,
        ):
            text = await answer.text()
            assert answer.status == 200, text
        if not stream:
            return json.loads(text)
        accumulation = Accumulation()
        for line in text.splitlines():
            if line.startswith("data: "):
                accumulation.add(json.loads(line.removeprefix("data: ")))
        assert accumulation.stopped
        return accumulation.message


@asynccontextmanager
async def clouds(start_plane: StartPlane, tmp_path: Path, *answers: Any) -> AsyncGenerator[Clouds]:
    port, keys = free_port(), tmp_path / "keys.json"
    key = create_key(keys, "app", ("submit", "read"))
    issuer = TokenIssuer()
    seen: list[dict[str, Any]] = []
    refused: list[str] = []
    async with AsyncExitStack() as stack:
        sim = await stack.enter_async_context(SimulatedProvider({"models": {"claude-x": CLAUDE}}))
        gemini_url = await stack.enter_async_context(gemini(*answers, seen=seen))
        vertex_url = await stack.enter_async_context(vertex(issuer, sim.url, refused))
        account = await stack.enter_async_context(ServiceAccount(issuer).serve())
        providers = {
            "gemini": {"kind": "gemini", "base_url": gemini_url, "api_key": {"env": "GEMINI_KEY"}},
            "vertex": {
                "kind": "vertex",
                "base_url": vertex_url,
                "project": "my-project",
                "location": "europe-west4",
                "auth": {"credentials": {"env": "GOOGLE_KEY"}},
            },
        }
        price = {**PRICE, "cached_input_usd_per_mtok": "0.05"}
        plane = await stack.enter_async_context(
            start_plane(
                {"sim/x": model()},
                {"gemini": {"model": "gemini/gemini-3-x"}, "claude": {"model": "vertex/claude-x"}},
                services=("worker", "request", "breaker", "budget"),
                environment={
                    "BREAKWATER_HTTP_PORT": str(port),
                    "BREAKWATER_API_KEYS_FILE": str(keys),
                    "GEMINI_KEY": GEMINI_KEY,
                    "GOOGLE_KEY": json.dumps(account),
                },
                more_providers=providers,
                more_models={name: {"price": price} for name in ("gemini/gemini-3-x", "vertex/claude-x")},
            )
        )
        await plane.ready("request")
        yield Clouds(plane, f"http://127.0.0.1:{port}", key, seen, refused)


async def test_openai_s_sdk_calls_gemini_with_thinking_and_tools(start_plane: StartPlane, tmp_path: Path) -> None:
    async with clouds(start_plane, tmp_path, CALLS, SAYS, SAYS) as here:
        asked: dict[str, Any] = {"model": "gemini", "tools": [TOOL], "reasoning_effort": "low"}
        first = await here.sdk.chat.completions.create(messages=[ASKED], **asked)
        choice = first.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.reasoning_content == "A ship."
        made = choice.message.tool_calls[0]
        assert json.loads(made.function.arguments) == {"name": "ferry"}
        assert first.usage.prompt_tokens_details.cached_tokens == 100
        result = {"role": "tool", "tool_call_id": made.id, "content": '{"place": "at sea"}'}
        conversation = [ASKED, choice.message.model_dump(exclude_none=True), result]
        second = await here.sdk.chat.completions.create(messages=conversation, **asked)
        assert second.choices[0].message.content == "The ferry is at sea."
        stream = await here.sdk.chat.completions.create(messages=conversation, stream=True, **asked)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
        assert text == "The ferry is at sea."
    for body in here.seen[1:]:
        assert body["contents"][1]["parts"][-1]["thoughtSignature"] == "c2lnbmVk"
        assert body["contents"][2]["parts"][0]["functionResponse"]["name"] == "find_ship"


async def test_a_client_that_drops_gemini_s_signature_gets_an_answer(start_plane: StartPlane, tmp_path: Path) -> None:
    text = "Function call is missing a thought_signature in functionCall parts."
    unsigned = (400, {"error": {"code": 400, "message": text, "status": "INVALID_ARGUMENT"}})
    async with clouds(start_plane, tmp_path, CALLS, unsigned, SAYS) as here:
        asked: dict[str, Any] = {"model": "gemini", "tools": [TOOL]}
        first = await here.sdk.chat.completions.create(messages=[ASKED], **asked)
        call = first.choices[0].message.tool_calls[0].model_dump(include={"id", "type", "function"})
        said = {"role": "assistant", "content": None, "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "at sea"}
        second = await here.sdk.chat.completions.create(messages=[ASKED, said, result], **asked)
        assert second.choices[0].message.content == "The ferry is at sea."
    signatures = [body["contents"][1]["parts"][-1].get("thoughtSignature") for body in here.seen[1:]]
    assert signatures == [None, "skip_thought_signature_validator"]


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropic_s_sdk_calls_gemini_and_sends_its_signatures_back(
    start_plane: StartPlane, tmp_path: Path, stream: bool
) -> None:
    async with clouds(start_plane, tmp_path, CALLS, SAYS) as here:
        first = await here.message("gemini", [ASKED], stream=stream)
        assert first["stop_reason"] == "tool_use"
        [used] = [block for block in first["content"] if block["type"] == "tool_use"]
        assert used["input"] == {"name": "ferry"}
        assert any(block["type"] == "thinking" for block in first["content"])
        result = {"type": "tool_result", "tool_use_id": used["id"], "content": "at sea"}
        turns = [ASKED, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
        second = await here.message("gemini", turns, stream=stream)
        assert second["content"][-1]["text"] == "The ferry is at sea."
        assert second["usage"]["cache_read_input_tokens"] == 100
    assert here.seen[1]["contents"][1]["parts"][-1]["thoughtSignature"] == "c2lnbmVk"
    for body in here.seen:
        assert body["generationConfig"]["thinkingConfig"] == {"thinkingBudget": 1024, "includeThoughts": True}


async def test_both_sdks_call_claude_on_vertex(start_plane: StartPlane, tmp_path: Path) -> None:
    async with clouds(start_plane, tmp_path, SAYS) as here:
        for stream in (False, True):
            first = await here.message("claude", [ASKED], stream=stream)
            assert [block["type"] for block in first["content"]] == ["thinking", "tool_use"]
            result = {"type": "tool_result", "tool_use_id": first["content"][1]["id"], "content": "at sea"}
            turns = [ASKED, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
            second = await here.message("claude", turns, stream=stream)
            assert second["content"][-1]["text"] == "The ferry is at sea."
        answer = await here.sdk.chat.completions.create(model="claude", messages=[ASKED], tools=[TOOL])
        assert answer.choices[0].message.tool_calls[0].function.name == "find_ship"
        stream_of_chunks = await here.sdk.chat.completions.create(
            model="claude", messages=[ASKED], tools=[TOOL], stream=True
        )
        names = [
            call.function.name
            async for chunk in stream_of_chunks
            for choice in chunk.choices
            for call in choice.delta.tool_calls or ()
            if call.function.name
        ]
        assert names == ["find_ship"]
    assert not here.refused
