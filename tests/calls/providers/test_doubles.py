"""The doubles of clouds, called by their makers' own SDKs directly: they speak what those understand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncAzureOpenAI, AsyncOpenAI

pytest.importorskip("google.genai", reason="`make install` brings it")

from google import genai
from google.genai import errors, types

from tests.calls.providers.gemini_double import KEY
from tests.clouds import ANSWER, AZURE_KEY, THOUGHT, clouds

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
TOOL: Any = {"type": "function", "function": {"name": "find_ship", "parameters": SCHEMA}}
QUESTION: Any = {"role": "user", "content": "Where is the ferry?"}


async def test_google_s_sdk_calls_the_double_of_gemini_with_tools_and_thinking(tmp_path: Path) -> None:
    async with clouds(tmp_path) as running:
        base_url = running.providers["gemini-api"]["base_url"].removesuffix("/v1beta")
        client = genai.Client(api_key=KEY, http_options=types.HttpOptions(base_url=base_url, api_version="v1beta"))
        config = types.GenerateContentConfig(
            tools=[types.Tool(function_declarations=[types.FunctionDeclaration(name="find_ship")])],
            thinking_config=types.ThinkingConfig(include_thoughts=True),
        )
        asked = types.Content(role="user", parts=[types.Part(text="Where is the ferry?")])
        for streamed in (False, True):

            async def answer(*contents: types.Content, streamed: bool = streamed) -> list[Any]:
                request: dict[str, Any] = {"model": "gemini-3-x", "contents": list(contents), "config": config}
                if not streamed:
                    return [await client.aio.models.generate_content(**request)]
                return [chunk async for chunk in await client.aio.models.generate_content_stream(**request)]

            first = await answer(asked)
            parts = [part for response in first for part in response.candidates[0].content.parts]
            assert [part.text for part in parts if part.thought] == [THOUGHT]
            assert parts[-1].function_call.args == {"name": "ferry"}
            assert first[-1].usage_metadata.cached_content_token_count == 1000
            result = types.Part.from_function_response(name="find_ship", response={"result": "at sea"})
            said = types.Content(role="model", parts=parts)
            second = await answer(asked, said, types.Content(role="user", parts=[result]))
            assert "".join(response.text for response in second) == ANSWER
        unsigned = types.Content(role="model", parts=[types.Part.from_function_call(name="find_ship", args={})])
        with pytest.raises(errors.ClientError, match="thought_signature"):
            await answer(asked, unsigned, types.Content(role="user", parts=[result]))
        await client.aio.aclose()


async def test_openai_s_sdk_calls_the_doubles_of_azure_and_vertex(tmp_path: Path) -> None:
    async with clouds(tmp_path) as running:
        azure_url = running.providers["azure"]["base_url"]
        place = f"{running.providers['vertex']['base_url']}/v1/projects/my-project/locations/global"
        token = running.issuers["google"].new_token()
        dated = AsyncAzureOpenAI(azure_endpoint=azure_url, api_key=AZURE_KEY, api_version="2024-10-21")
        v1 = AsyncOpenAI(base_url=f"{azure_url}/openai/v1", api_key=running.issuers["entra"].new_token())
        vertex = AsyncOpenAI(base_url=f"{place}/endpoints/openapi", api_key=token)
        for client, model in ((dated, "ship"), (v1, "ship"), (vertex, "google/gemini-3-pro")):
            created = await client.chat.completions.create(model=model, messages=[QUESTION], tools=[TOOL])
            [call] = created.choices[0].message.tool_calls or ()
            stream: Any = await client.chat.completions.create(
                model=model, messages=[QUESTION], tools=[TOOL], stream=True
            )
            pieces = [
                piece.function.arguments or ""
                async for chunk in stream
                for choice in chunk.choices
                for piece in choice.delta.tool_calls or ()
            ]
            for arguments in (call.function.arguments, "".join(pieces)):  # pyright: ignore[reportAttributeAccessIssue]
                assert json.loads(arguments) == {"name": "ferry"}
            await client.close()
        assert not running.refusals()
