"""Conversations with tools and thinking, on providers that refuse what the real ones refuse, over each API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from itertools import combinations_with_replacement, cycle, product
from typing import Any

import pytest
import pytest_asyncio

from breakwater.config import load_config
from breakwater.dialects.rules.chat_chunks import Assembly
from breakwater.identity.api_keys import create_key
from tests.anthropic_client import accumulated
from tests.flow.kit import model
from tests.server_sources import RunningServer
from tests.services.request.conftest import HttpApi, running, settings_for
from tests.services.request.strict_providers import AUTHORS, DOWN, TEXT_TURNS, StrictProviders, strict_providers
from tests.services.worker.harness import WorkerPlane, running_worker

APIS = ("chat", "responses", "messages")
TURNS = 8
"""The last comes when the first model has answered once more, after those of the second."""
PARAMETERS = {"type": "object", "properties": {"by": {"type": "string"}, "turn": {"type": "integer"}}}
THINKING = {"thinking": {"type": "enabled", "budget_tokens": 1024}}


@dataclass(frozen=True, slots=True)
class TurnsPlane:
    api: HttpApi
    worker: WorkerPlane
    providers: StrictProviders
    key: str

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, bytes, str]:
        """Status, body and model of an answer."""
        headers = {"Authorization": f"Bearer {self.key}"}
        async with self.api.http.post(f"{self.api.url}{path}", json=body, headers=headers) as answer:
            return answer.status, await answer.read(), answer.headers.get("x-breakwater-model", "")


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def plane(
    module_nats_server: RunningServer, redis_server: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[TurnsPlane]:
    directory = tmp_path_factory.mktemp("turns")
    async with strict_providers() as providers:
        kinds = {"anthropic": {"kind": "anthropic"}, "responses": {"api": "responses"}}
        started = running_worker(
            directory,
            nats_url=module_nats_server.url,
            redis_url=redis_server.url,
            script={"models": {"sim/unused": model()}},
            agents={
                f"{first}-{second}": {
                    "model": f"{first}/busy",
                    "fallback_models": [f"{second}/steady"],
                    "retry": {"max_attempts": 1},
                    "breaker": "off",
                    "guard": {"max_cost_usd": 1000, "max_tokens": 100_000_000, "max_iterations": 1000},
                    "params": THINKING if "anthropic" in (first, second) else {},
                }
                for first, second in product(AUTHORS, AUTHORS)
            },
            more_providers={
                name: {"base_url": f"{providers.url}/{name}/v1", **kinds.get(name, {})} for name in AUTHORS
            },
        )
        async with started as worker:
            settings = settings_for(module_nats_server.url, redis_server.url, directory)
            config = load_config(directory / "breakwater.yaml")
            async with running(settings, config, create_key(settings.api_keys_file, "tests")) as api:
                key = create_key(settings.api_keys_file, "app", ("submit",))
                yield TurnsPlane(api, worker, providers, key)


def _events(body: bytes) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in body.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@dataclass(slots=True)
class Conversation:
    """A client that sends back what it was answered, as the SDKs of its API do.

    Attributes:
        agent: that is called.
        plane: that answers.
        sent: messages, or items.
        models: that answered.
        previous: the id of the latest stored response.
    """

    agent: str
    plane: TurnsPlane
    sent: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    models: list[str] = field(default_factory=list[str])
    previous: str | None = None

    def remembered(self, content: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """What the client keeps of an answer."""
        return content

    async def run(self, turns: int = TURNS, *, stream_odd: bool = True) -> None:
        self.sent.append({"role": "user", "content": "Where is the ferry?"})
        for turn in range(1, turns + 1):
            calls = await self._turn(stream=(turn % 2 == 1) is stream_odd)
            if turn in TEXT_TURNS:
                assert not calls, (self.agent, turn)
                self.sent.append({"role": "user", "content": "And the tug?"})
            else:
                assert len(calls) == 1, (self.agent, turn)
                self.sent.append(self._result(calls[0]))

    async def _ask(self, path: str, **body: Any) -> bytes:
        status, answer, model = await self.plane.post(path, {"model": self.agent, **body})
        assert status == 200, (self.agent, len(self.models) + 1, answer)
        self.models.append(model)
        return answer

    async def _turn(self, *, stream: bool) -> Sequence[str]:
        """Takes one turn. Returns the ids of the calls in it."""
        raise NotImplementedError

    def _result(self, called: str) -> dict[str, Any]:
        raise NotImplementedError


class ChatConversation(Conversation):
    async def _turn(self, *, stream: bool) -> Sequence[str]:
        function = {"name": "look", "parameters": PARAMETERS}
        tools = [{"type": "function", "function": function}]
        answer = await self._ask("/v1/chat/completions", messages=self.sent, tools=tools, stream=stream)
        if stream:
            said = Assembly()
            for chunk in _events(answer):
                assert "error" not in chunk, (self.agent, chunk)
                said.add(chunk)
            message = said.messages()[0]
        else:
            message = json.loads(answer)["choices"][0]["message"]
        self.sent += self.remembered([{name: value for name, value in message.items() if value is not None}])
        return [call["id"] for call in message.get("tool_calls") or ()]

    def _result(self, called: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": called, "content": "at sea"}


class ResponsesConversation(Conversation):
    async def _turn(self, *, stream: bool) -> Sequence[str]:
        tools = [{"type": "function", "name": "look", "parameters": PARAMETERS, "strict": False}]
        more = {"store": False, "include": ["reasoning.encrypted_content"]}
        answer = await self._ask("/v1/responses", input=self.sent, tools=tools, stream=stream, **more)
        if stream:
            found = _events(answer)
            assert found[-1]["type"] == "response.completed", (self.agent, found[-1])
            done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
            output = found[-1]["response"]["output"]
            assert done == output
        else:
            output = json.loads(answer)["output"]
        self.sent += self.remembered(output)
        return [item["call_id"] for item in output if item["type"] == "function_call"]

    def _result(self, called: str) -> dict[str, Any]:
        return {"type": "function_call_output", "call_id": called, "output": "at sea"}


class MessagesConversation(Conversation):
    async def _turn(self, *, stream: bool) -> Sequence[str]:
        tools = [{"name": "look", "input_schema": PARAMETERS}]
        answer = await self._ask("/v1/messages", messages=self.sent, tools=tools, stream=stream, max_tokens=2000)
        message = accumulated(_events(answer)) if stream else json.loads(answer)
        self.sent.append({"role": "assistant", "content": self.remembered(message["content"])})
        return [block["id"] for block in message["content"] if block["type"] == "tool_use"]

    def _result(self, called: str) -> dict[str, Any]:
        return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": called, "content": "at sea"}]}


CLIENTS = {"chat": ChatConversation, "responses": ResponsesConversation, "messages": MessagesConversation}


async def test_no_turn_of_a_conversation_over_any_two_providers_is_refused(
    plane: TurnsPlane, subtests: pytest.Subtests
) -> None:
    limit, failed = asyncio.Semaphore(8), list[tuple[str, BaseException]]()

    async def converse(api: str, first: str, second: str, *, stream_odd: bool) -> None:
        conversation = CLIENTS[api](f"{first}-{second}", plane)
        async with limit:
            try:
                await conversation.run(stream_odd=stream_odd)
            except AssertionError as error:
                failed.append((f"{api}: {first}, {second}, {stream_odd}", error))
                return
        expected = [f"{second}/steady" if turn in DOWN else f"{first}/busy" for turn in range(1, TURNS + 1)]
        assert conversation.models == expected

    # In either order: the second has the turns of the first to read, and then the first those of the second. Each pair
    # over one API, and each provider over all of them: what a provider reads of another doesn't depend on the API.
    pairs = combinations_with_replacement(range(len(AUTHORS)), 2)
    conversations = [
        converse(APIS[(first + second) % len(APIS)], AUTHORS[first], AUTHORS[second], stream_odd=bool(number % 2))
        for number, (first, second) in enumerate(pairs)
    ]
    await asyncio.gather(*conversations)
    for name, error in failed:
        with subtests.test(name):
            raise error
    assert not failed
    # Each has refused conversations of another kind a few times, until the worker knew it.
    assert sum(plane.providers.refusals.values()) < 100, plane.providers.refusals
    assert plane.providers.own.keys() == set(AUTHORS)


class WithoutThinking(MessagesConversation):
    """A client that keeps no thinking, as some do."""

    def remembered(self, content: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [block for block in content if block["type"] not in ("thinking", "redacted_thinking")]


class WithoutReasoning(ResponsesConversation):
    def remembered(self, content: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [item for item in content if item["type"] != "reasoning"]


class StandardChat(ChatConversation):
    def remembered(self, content: list[dict[str, Any]]) -> list[dict[str, Any]]:
        [message] = content
        plain = {name: message[name] for name in ("role", "content", "tool_calls") if name in message}
        for call in plain.get("tool_calls", ()):
            call.pop("extra_content", None)
        return [plain]


class CutTokens(MessagesConversation):
    """A client that cuts what it can't read."""

    def remembered(self, content: list[dict[str, Any]]) -> list[dict[str, Any]]:
        names = ("signature", "data")
        return [{**block, **{name: block[name][:-4] for name in names if name in block}} for block in content]


async def test_clients_that_lose_thinking_keep_the_conversation(plane: TurnsPlane, subtests: pytest.Subtests) -> None:
    plane.providers.knows_own = False
    try:
        # Each provider with one of the three: what it is sent in place of its own doesn't depend on who has lost that.
        clients = (WithoutThinking, WithoutReasoning, StandardChat)
        for client, first in zip(cycle(clients), AUTHORS[1:], strict=False):
            with subtests.test(f"{client.__name__}: {first}"):
                await client(f"{first}-plain", plane).run(TURNS)
        for first in ("deepseek", "gemini", "kimi"):
            with subtests.test(f"cut tokens: {first}"):
                await CutTokens(f"{first}-plain", plane).run(TURNS)
    finally:
        plane.providers.knows_own = True


class StoredConversation(ResponsesConversation):
    """A client that names the response before, and may poll for the next."""

    async def _turn(self, *, stream: bool) -> Sequence[str]:
        tools = [{"type": "function", "name": "look", "parameters": PARAMETERS, "strict": False}]
        more = {"previous_response_id": self.previous} if self.previous else {}
        asked = {"input": self.sent[-1:], "tools": tools, "background": stream, **more}
        response = json.loads(await self._ask("/v1/responses", **asked))
        async with asyncio.timeout(60):
            while response["status"] in ("queued", "in_progress"):
                await asyncio.sleep(0.05)
                answer = await self.plane.api.ask(
                    "GET", f"/v1/responses/{response['id']}", headers={"Authorization": f"Bearer {self.plane.key}"}
                )
                response = answer.json
        assert response["status"] == "completed", response
        self.previous = response["id"]
        return [item["call_id"] for item in response["output"] if item["type"] == "function_call"]


async def test_stored_responses_carry_what_their_models_want_back(plane: TurnsPlane, subtests: pytest.Subtests) -> None:
    for first, second in zip(AUTHORS, [*AUTHORS[1:], AUTHORS[0]], strict=True):
        with subtests.test(f"{first}, {second}"):
            await StoredConversation(f"{first}-{second}", plane).run()


async def test_a_refused_conversation_is_repaired_once_and_recorded(plane: TurnsPlane) -> None:
    """Two providers of Responses, the first down; the second can't decrypt the reasoning of the first."""
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA-another-1"}
    asked = {"role": "user", "content": "Where is the ferry?"}
    status, body, _ = await plane.post(
        "/v1/responses", {"model": "responses-plain", "input": [asked, reasoning, asked]}
    )
    assert status == 200, body
    record = await plane.api.ask("GET", f"/api/v1/jobs/{json.loads(body)['id'].removeprefix('resp_')}")
    attempts = record.json["attempts"]
    assert [(one["cause"], one["outcome"]) for one in attempts] == [("first", "error"), ("provider_state", "success")]
    assert attempts[0]["error"]["class"] == "UnreadableReasoningError"
