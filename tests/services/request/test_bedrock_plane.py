"""OpenAI's client and Anthropic's Messages through a plane, to models of Bedrock's by Converse and by `invoke`."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from breakwater.config import load_config
from breakwater.identity.api_keys import create_key
from breakwater.kernel.nats import subjects
from tests.anthropic_client import accumulated, blocks_of
from tests.bedrock import (
    ACCESS_KEY,
    COHERE_V4,
    REGION,
    SECRET_KEY,
    TITAN_V2,
    TOKEN,
    Bedrock,
    bedrock,
    ship_reply,
)
from tests.flow.kit import model
from tests.openai_client import openai_client
from tests.server_sources import RunningServer
from tests.services.request.conftest import HttpApi, running, settings_for
from tests.services.request.test_messages import events
from tests.services.request.test_messages_plane import MessagesPlane
from tests.services.worker.harness import WorkerPlane, running_worker
from tests.tables import each_row

NOVA = "eu.amazon.nova-pro-v1:0"
CLAUDE = "eu.anthropic.claude-sonnet-4-5-20250929-v1:0"
THOUGHT = "A ship; look it up."
QUESTION = {"role": "user", "content": "Where is the ferry?"}
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "find_ship", "parameters": PARAMETERS}}
ONCE = {"retry": {"max_attempts": 1}, "breaker": "off"}
AGENTS = {
    "nova": {"model": f"frankfurt/{NOVA}", **ONCE},
    "claude": {"model": f"frankfurt/{CLAUDE}", **ONCE},
    "closed": {"model": "frankfurt/eu.amazon.nova-premier-v1:0", **ONCE},
    "titan": {"model": f"frankfurt/{TITAN_V2}", **ONCE},
    "cohere": {"model": f"frankfurt/{COHERE_V4}", **ONCE},
    "open": {"model": "frankfurt/eu.amazon.nova-premier-v1:0", "fallback_models": [f"frankfurt/{NOVA}"], **ONCE},
}


@dataclass(frozen=True, slots=True)
class BedrockPlane:
    api: HttpApi
    worker: WorkerPlane
    double: Bedrock

    def openai(self) -> Any:
        key = create_key(self.api.settings.api_keys_file, "app", ("submit", "read"))
        return openai_client(f"{self.api.url}/v1", key)

    async def messages(self, agent: str, **body: Any) -> Any:
        """The message that Anthropic's SDK makes of the answer."""
        answer = await MessagesPlane(self.api, self.worker).ask(agent, **body)
        assert answer.status == 200, answer.body
        return accumulated(events(answer)) if body.get("stream") else json.loads(answer.body)

    async def record(self, agent: str, execution_id: str) -> dict[str, Any]:
        [record] = await self.worker.messages("EVENTS", subjects.execution(agent, execution_id), at_least=1)
        return record

    async def recorded(self, agent: str, execution_id: str) -> dict[str, Any]:
        """The attempt that answered, and the output."""
        record = await self.record(agent, execution_id)
        [attempt] = record["attempts"]
        names = ("input_tokens", "output_tokens", "cached_tokens", "cost", "cost_source")
        return {"output": record["output"], **{name: attempt.get(name) for name in names}}


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def plane(
    module_nats_server: RunningServer, redis_server: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[BedrockPlane]:
    directory = tmp_path_factory.mktemp("bedrock")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        patch.setenv("AWS_SESSION_TOKEN", TOKEN)
        async with (
            bedrock(ship_reply) as double,
            running_worker(
                directory,
                nats_url=module_nats_server.url,
                redis_url=redis_server.url,
                script={"models": {"sim/m": model()}},
                agents=AGENTS,
                more_models={
                    **{f"frankfurt/{name}": {} for name in (NOVA, CLAUDE)},
                    **{
                        f"frankfurt/{name}": {"price": {"input_usd_per_mtok": "10", "output_usd_per_mtok": 0}}
                        for name in (TITAN_V2, COHERE_V4)
                    },
                },
                more_providers={"frankfurt": {"kind": "bedrock", "region": REGION, "base_url": double.origin}},
            ) as worker,
        ):
            settings = settings_for(module_nats_server.url, redis_server.url, directory)
            config = load_config(directory / "breakwater.yaml")
            async with running(settings, config, create_key(settings.api_keys_file, "tests")) as api:
                yield BedrockPlane(api, worker, double)


@each_row("agent", ["nova", "claude"])
async def test_chats_with_tools_and_thinking(plane: BedrockPlane, agent: str) -> None:
    create = plane.openai().chat.completions.create
    asked = await create(model=agent, messages=[QUESTION], tools=[TOOL])
    [choice] = asked.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.reasoning_content == THOUGHT
    [call] = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("find_ship", {"name": "ferry"})
    messages = [QUESTION, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "at sea"}]
    answer = await create(model=agent, messages=messages, tools=[TOOL])
    assert answer.choices[0].message.content == "The ferry is at sea."
    assert answer.usage.prompt_tokens == 1220
    assert answer.usage.prompt_tokens_details.cached_tokens == 1000


@each_row("agent", ["nova", "claude"])
async def test_streamed_chats_with_tools_and_thinking(plane: BedrockPlane, agent: str) -> None:
    create = plane.openai().chat.completions.create
    asked = {"model": agent, "stream": True, "stream_options": {"include_usage": True}, "tools": [TOOL]}
    arguments = ""
    thought = ""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    async for chunk in await create(messages=[QUESTION], **asked):
        for choice in chunk.choices:
            thought += getattr(choice.delta, "reasoning_content", "")
            for call in choice.delta.tool_calls or ():
                arguments += call.function.arguments or ""
                message["thinking_blocks"] = getattr(choice.delta, "thinking_blocks", message.get("thinking_blocks"))
                message["tool_calls"] = [{"id": call.id or message["tool_calls"][0]["id"], "type": "function"}]
    message["tool_calls"][0]["function"] = {"name": "find_ship", "arguments": arguments}
    assert (thought, json.loads(arguments)) == (THOUGHT, {"name": "ferry"})
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "at sea"}
    text = ""
    usage = None
    heads = set[Any]()
    async for chunk in await create(messages=[QUESTION, message, result], **asked):
        heads.add((chunk.id, chunk.created, chunk.model))
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert text == "The ferry is at sea."
    assert usage.prompt_tokens_details.cached_tokens == 1000
    [(name, created, named)] = heads
    assert (name[:9], named, created > 0) == ("chatcmpl-", agent, True)


@each_row("agent", ["nova", "claude"])
async def test_responses_with_tools_and_thinking(plane: BedrockPlane, agent: str) -> None:
    tool = {"type": "function", "name": "find_ship", "parameters": PARAMETERS}
    asked: dict[str, Any] = {
        "model": agent,
        "tools": [tool],
        "store": False,
        "include": ["reasoning.encrypted_content"],
    }
    for streamed in (False, True):
        create = plane.openai().responses.create
        first = await create(input=[QUESTION], stream=streamed, **asked)
        if streamed:
            first = [event async for event in first][-1].response
        [call] = [item for item in first.output if item.type == "function_call"]
        assert json.loads(call.arguments) == {"name": "ferry"}
        assert [item.content[0].text for item in first.output if item.type == "reasoning" and item.content] == [THOUGHT]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "at sea"}
        second = await create(input=[QUESTION, *first.output, result], **asked)
        assert second.output_text == "The ferry is at sea."


@each_row(("agent", "stream"), [("nova", False), ("nova", True), ("claude", False), ("claude", True)])
async def test_messages_with_tools_and_thinking(plane: BedrockPlane, agent: str, stream: bool) -> None:
    asked = await plane.messages(agent, messages=[QUESTION], stream=stream)
    assert asked["stop_reason"] == "tool_use"
    thought, *_, call = blocks_of(asked)
    assert (thought["type"], thought["thinking"]) == ("thinking", THOUGHT)
    assert thought["signature"]
    assert (call["name"], call["input"]) == ("find_ship", {"name": "ferry"})
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "at sea"}
    turns = [QUESTION, {"role": "assistant", "content": asked["content"]}, {"role": "user", "content": [result]}]
    answer = await plane.messages(agent, messages=turns, stream=stream)
    assert [block["text"] for block in blocks_of(answer)] == ["The ferry is at sea."]
    assert answer["usage"]["cache_read_input_tokens"] == 1000
    operations = {request.operation for request in plane.double.requests[-2:]}
    assert (
        operations
        == {
            ("nova", False): {"Converse"},
            ("nova", True): {"ConverseStream"},
            ("claude", False): {"InvokeModel"},
            ("claude", True): {"InvokeModelWithResponseStream"},
        }[agent, stream]
    )


@each_row("agent", ["nova", "claude"])
async def test_a_record_is_the_same_by_whatever_way(plane: BedrockPlane, agent: str) -> None:
    """Whole or streamed, by OpenAI's or Anthropic's client: one output, one usage, and a cost by AWS' list."""
    records = list[dict[str, Any]]()
    client = plane.openai().chat.completions.with_raw_response
    for streamed in (False, True):
        raw = await client.create(model=agent, messages=[QUESTION], stream=streamed)
        if streamed:
            assert [chunk async for chunk in raw.parse()]
        records.append(await plane.recorded(agent, raw.headers["x-breakwater-execution-id"]))
        answer = await MessagesPlane(plane.api, plane.worker).ask(agent, messages=[QUESTION], tools=[], stream=streamed)
        records.append(await plane.recorded(agent, answer.headers["x-breakwater-execution-id"]))
    assert records[0]["output"] == "The ferry is at sea."
    assert (records[0]["input_tokens"], records[0]["cached_tokens"]) == (1220, 1000)
    if agent == "claude":  # 20 fresh, 1000 read from a cache, 200 written to it and 9 of output, at AWS' prices
        assert records[0]["cost"] == "0.001369500"
    assert records == [records[0]] * 4


async def test_a_model_without_access_says_what_to_do_and_a_fallback_answers(plane: BedrockPlane) -> None:
    raw = await plane.openai().chat.completions.with_raw_response.create(model="open", messages=[QUESTION])
    assert raw.parse().choices[0].message.content == "The ferry is at sea."
    record = await plane.record("open", raw.headers["x-breakwater-execution-id"])
    refused, _ = record["attempts"]
    assert refused["error"]["class"] == "ForbiddenError"
    assert "the account has no access to this model in this region" in refused["error"]["message"]


async def test_no_secret_leaves_the_worker(plane: BedrockPlane) -> None:
    raw = await plane.openai().chat.completions.with_raw_response.create(model="open", messages=[QUESTION])
    record = await plane.record("open", raw.headers["x-breakwater-execution-id"])
    said_of_it = f"{record} {plane.worker.log('worker')} {raw.headers} {raw.text}"
    assert not any(secret in said_of_it for secret in (SECRET_KEY, TOKEN))


@each_row(("agent", "calls"), [("titan", 3), ("cohere", 1)])
async def test_embeddings(plane: BedrockPlane, agent: str, calls: int) -> None:
    texts = ["a", "four", "seven77"]
    before = len(plane.double.requests)
    answer = await plane.openai().embeddings.create(model=agent, input=texts)
    assert [item.embedding for item in answer.data] == [[float(len(text)), 0.5, 0.5] for text in texts]
    assert len(plane.double.requests) == before + calls
    [record] = [
        record
        for record in await plane.worker.messages("EVENTS", f"bw.executions.{agent}.*", at_least=1)
        if record["agent"] == agent
    ]
    assert {attempt["cost_basis"] for attempt in record["attempts"]} == {"billed"}
    assert (record["input_tokens"], record["total_cost"]) == (12, "0.000120000")


async def test_inputs_of_embeddings_that_bedrock_has_not_are_refused_in_words(plane: BedrockPlane) -> None:
    for agent, asked, words in (
        ("titan", [[1, 2]], "Bedrock embeds texts, and no token ids"),
        ("nova", ["x"], "has no embeddings"),
    ):
        with pytest.raises(Exception, match=words):
            await plane.openai().embeddings.create(model=agent, input=asked)
