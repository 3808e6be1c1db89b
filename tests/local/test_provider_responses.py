"""The simulated provider's Responses and embeddings, read by OpenAI's own client."""

from __future__ import annotations

import math
from array import array
from base64 import b64decode
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson
import pytest
from openai import APIError, BadRequestError

from breakwater.local.provider import ScriptError, SimulatedProvider
from tests.openai_client import openai_client
from tests.tables import each_row

from .provider_kit import COST_NANO, MODEL, PRICE, script

ANSWER = "".join(f"{number:03d} " for number in range(10))
THOUGHT = "Which ship is meant?"
FIND = {"type": "function", "name": "find_ship", "parameters": {"type": "object"}, "strict": False}
PATCH = {"type": "custom", "name": "apply_patch"}
CALL = {"type": "tool_call", "name": "find_ship", "arguments": {"name": "ferry"}}
ALL: list[dict[str, Any]] = [
    {"type": "thinking", "text": THOUGHT},
    {"type": "hosted", "query": "ferries"},
    {"type": "text", "text": "It is {prompt}.", "cites": ["https://example.org/a"]},
    CALL,
    {"type": "tool_call", "name": "apply_patch", "input": "*** Begin Patch"},
]
"""A turn with a part of each kind but for a refusal."""
THINKS = {"reasoning": {"effort": "low", "summary": "auto"}, "include": ["reasoning.encrypted_content"]}


def body(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "hello", **more}


def sdk(sim: SimulatedProvider) -> Any:
    return openai_client(sim.url, "any", max_retries=0)


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as opened:
        yield opened


async def events(session: aiohttp.ClientSession, sim: SimulatedProvider, **more: Any) -> list[dict[str, Any]]:
    """The events of a stream, up to one that is not whole."""
    found = b""
    async with session.post(f"{sim.url}/responses", json=body(stream=True, **more)) as response:
        try:
            async for data in response.content.iter_any():
                found += data
        except aiohttp.ClientPayloadError:
            pass
    sent: list[dict[str, Any]] = []
    for event in found.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        sent.append(orjson.loads(data.removeprefix("data: ")))
        assert name == f"event: {sent[-1]['type']}"
    return sent


async def test_a_response_has_the_fields_of_the_specification_and_is_in_the_ledger() -> None:
    async with SimulatedProvider(script()) as sim:
        response = await sdk(sim).responses.create(**body(instructions="be brief", metadata={"a": "b"}))
        [call] = sim.ledger.calls
    assert (response.status, response.output_text) == ("completed", f"Simulated answer 1 of {MODEL} to: hello")
    assert (response.instructions, response.metadata, response.error) == ("be brief", {"a": "b"}, None)
    assert (response.tool_choice, response.tools, response.truncation, response.service_tier) == (
        "auto",
        [],
        "disabled",
        "default",
    )
    assert response.usage.to_dict() == {
        "input_tokens": 120,
        "input_tokens_details": {"cached_tokens": 20, "cache_write_tokens": 0},
        "output_tokens": 40,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 160,
    }
    assert (call.billed, call.delivered, call.cost_nano) == (True, True, COST_NANO)


async def test_the_events_come_in_the_order_of_the_specification(session: aiohttp.ClientSession) -> None:
    async with SimulatedProvider(script(turns=[ALL], stream={"tokens_per_chunk": 100})) as sim:
        sent = await events(session, sim, tools=[FIND, PATCH], **THINKS)
    assert [event["sequence_number"] for event in sent] == list(range(len(sent)))
    assert [event["type"].removeprefix("response.") for event in sent] == [
        "created",
        "in_progress",
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
        "output_item.added",
        "web_search_call.in_progress",
        "web_search_call.searching",
        "web_search_call.completed",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.annotation.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
        "completed",
    ]
    done = [event["item"] for event in sent if event["type"] == "response.output_item.done"]
    assert done == sent[-1]["response"]["output"]


async def test_a_stream_comes_to_what_the_whole_answer_has() -> None:
    more = {"tools": [FIND, PATCH], **THINKS}
    async with SimulatedProvider(script(turns=[ALL])) as sim:
        whole = await sdk(sim).responses.create(**body(**more))
        async with sdk(sim).responses.stream(**body(**more)) as stream:
            kinds = {event.type async for event in stream}
            streamed = await stream.get_final_response()
    assert "response.output_text.delta" in kinds

    def named(response: Any) -> list[dict[str, Any]]:
        return [item.to_dict() | {"id": "", "call_id": "", "parsed_arguments": None} for item in response.output]

    assert [item | {"content": None} for item in named(whole)] == [item | {"content": None} for item in named(streamed)]
    assert whole.output_text == streamed.output_text == "It is hello."
    assert [item.type for item in whole.output] == [
        "reasoning",
        "web_search_call",
        "message",
        "function_call",
        "custom_tool_call",
    ]
    assert whole.output[0].summary[0].text == THOUGHT
    assert whole.output[3].arguments == '{"name":"ferry"}'
    assert whole.output[4].input == "*** Begin Patch"


async def test_turns_answer_a_conversation_in_order_and_thoughts_come_back_unchanged() -> None:
    content = script(turns=[ALL, [{"type": "text", "text": "in {prompt}, {n}"}]], usage={})
    more = {"tools": [FIND, PATCH], **THINKS}
    async with SimulatedProvider(content) as sim:
        client = sdk(sim)
        first = await client.responses.create(**body(**more))
        items = [item.to_dict() for item in first.output]
        results = [
            {"type": "function_call_output", "call_id": items[3]["call_id"], "output": "found"},
            {"type": "custom_tool_call_output", "call_id": items[4]["call_id"], "output": "done"},
        ]
        said = [{"role": "user", "content": "port"}, *items, *results]
        second = await client.responses.create(**body(**more) | {"input": said})
        assert second.output_text == "in port, 2"
        third = await client.responses.create(
            **body(**more) | {"input": [*said, {"role": "assistant", "content": "in port"}]}
        )
        assert third.output_text.startswith("Simulated answer 3")
        without = await client.responses.create(**body())
        assert without.output_text.startswith("Simulated answer 4")
        items[0]["encrypted_content"] = items[0]["encrypted_content"][:-8]
        with pytest.raises(BadRequestError, match="could not be verified"):
            await client.responses.create(**body(**more) | {"input": said})


async def test_orphans_are_named_as_this_interface_does() -> None:
    asked = [{"role": "user", "content": "x"}, {"type": "function_call", "call_id": "c1", "name": "f", "arguments": ""}]
    async with SimulatedProvider(script({"when": "orphan_tool_calls", "status": 400})) as sim:
        with pytest.raises(BadRequestError, match="No tool output found for function call c1"):
            await sdk(sim).responses.create(**body(input=asked))


@each_row(
    ("change", "param"),
    [
        ({"unknown": 1}, "unknown"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": None}, "input.str"),
        ({"service_tier": "cheap"}, "service_tier"),
    ],
)
async def test_what_this_interface_does_not_take_is_refused(change: dict[str, Any], param: str) -> None:
    async with SimulatedProvider(script()) as sim:
        with pytest.raises(BadRequestError) as refused:
            await sdk(sim).responses.create(**{**body(), "extra_body": change})
        assert sim.ledger.totals.billed_calls == 0
    assert refused.value.param == param


async def test_an_answer_over_its_limit_is_incomplete() -> None:
    turn = [{"type": "thinking", "text": "t" * 40}, {"type": "text", "text": "a" * 40}, CALL]
    async with SimulatedProvider(script(turns=[turn], usage={"reasoning_tokens": 9})) as sim:
        response = await sdk(sim).responses.create(**body(max_output_tokens=16, tools=[FIND]))
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [item.type for item in response.output] == ["reasoning", "message"]
    # 16 of the 25 tokens that thought, text and call have: 51 of the 80 characters, 40 of which are the thought.
    assert (response.output[1].status, response.output_text) == ("incomplete", "a" * 11)
    assert (response.usage.output_tokens, response.usage.output_tokens_details.reasoning_tokens) == (16, 9)


@each_row(
    ("fault", "last", "text"),
    [
        ({"kind": "failed", "error": {"code": "server_error", "message": "broke"}}, "response.failed", ANSWER[:20]),
        ({"stream": "error", "after_chunks": 3, "error": {"message": "broke"}}, "error", ANSWER[:12]),
        ({"stream": "cut", "after_chunks": 3}, "response.output_text.delta", ANSWER[:12]),
        ({"stream": "cut"}, "response.output_item.done", ANSWER),
        ({"stream": "no_end"}, "response.output_item.done", ANSWER),
        ({"kind": "truncated"}, "response.output_text.delta", ANSWER[:20]),
        ({"status": 200, "finish_reason": "content_filter"}, "response.incomplete", ANSWER),
        ({"kind": "no_content"}, "response.completed", ""),
    ],
)
async def test_a_stream_breaks_as_the_script_says(
    session: aiohttp.ClientSession, fault: dict[str, Any], last: str, text: str
) -> None:
    async with SimulatedProvider(script(fault, answer=ANSWER)) as sim:
        sent = await events(session, sim)
    assert [event["sequence_number"] for event in sent] == list(range(len(sent)))
    assert sent[-1]["type"] == last
    assert "".join(event["delta"] for event in sent if "delta" in event) == text
    if last == "response.failed":
        assert sent[-1]["response"]["status"] == "failed"
        assert sent[-1]["response"]["error"] == {"code": "server_error", "message": "broke"}


async def test_an_error_in_a_stream_is_one_for_openais_client() -> None:
    fault = {"stream": "error", "after_chunks": 1, "error": {"message": "broke"}}
    async with SimulatedProvider(script(fault, answer=ANSWER)) as sim:
        stream = await sdk(sim).responses.create(**body(stream=True))
        with pytest.raises(APIError, match="broke"):
            async for _ in stream:
                pass


async def test_a_response_that_failed_is_no_error_of_http() -> None:
    fault = {"kind": "failed", "error": {"code": "rate_limit_exceeded", "message": "full"}}
    async with SimulatedProvider(script(fault)) as sim:
        response = await sdk(sim).responses.create(**body())
        assert (response.status, response.error.code, response.usage) == ("failed", "rate_limit_exceeded", None)
        assert sim.ledger.totals.billed_calls == 0
        with pytest.raises(APIError, match="full"):
            async for _ in await sdk(sim).chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "x"}], stream=True
            ):
                pass


async def test_hosted_calls_and_writes_to_the_cache_have_their_prices() -> None:
    price = {**PRICE, "cache_write_usd_per_mtok": "0.30", "hosted_usd": {"web_search": "0.01"}}
    usage = {"input_tokens": 100, "output_tokens": 10, "cached_tokens": 20, "cache_write_tokens": 30}
    turn = [{"type": "hosted", "query": "a"}, {"type": "hosted", "query": "b"}, {"type": "text", "text": "c"}]
    async with SimulatedProvider(script(turns=[turn], price=price, usage=usage)) as sim:
        response = await sdk(sim).responses.create(**body())
        [call] = sim.ledger.calls
    assert response.usage.input_tokens_details.to_dict() == {"cached_tokens": 20, "cache_write_tokens": 30}
    assert response.to_dict()["tool_usage"] == {"web_search": {"num_requests": 2}}
    assert call.cost_nano == 50 * 150 + 20 * 75 + 30 * 300 + 10 * 600 + 2 * 10_000_000


async def test_a_search_that_is_demanded_is_made() -> None:
    async with SimulatedProvider(script()) as sim:
        response = await sdk(sim).responses.create(
            **body(tools=[{"type": "web_search"}], tool_choice={"type": "web_search"})
        )
    assert [item.type for item in response.output] == ["web_search_call", "message"]
    assert (response.output[0].action.query, response.output[0].status) == ("hello", "completed")


def test_a_hosted_tool_that_is_not_known_needs_its_forms() -> None:
    with pytest.raises(ScriptError, match="needs both"):
        SimulatedProvider(script(turns=[[{"type": "hosted", "tool": "code_interpreter"}]]))


async def test_vectors_depend_on_model_and_input_alone_and_both_encodings_agree() -> None:
    content = {"models": {name: {"price": PRICE, "dimensions": 64} for name in (MODEL, "sim/other")}}
    async with SimulatedProvider(content) as sim:
        client = sdk(sim)

        async def vectors(*texts: str, model: str = MODEL, **more: Any) -> list[Any]:
            made = await client.embeddings.create(model=model, input=list(texts), **more)
            assert [one.index for one in made.data] == list(range(len(texts)))
            return [one.embedding for one in made.data]

        a, b, again = await vectors("a", "b", "a", encoding_format="float")
        assert a == again
        assert a != b
        assert [a] != await vectors("a", model="sim/other", encoding_format="float")
        assert (len(a), round(math.hypot(*a), 6)) == (64, 1.0)
        [encoded] = await vectors("a", encoding_format="base64")
        assert b64decode(encoded) == array("f", a).tobytes()
        [short] = await vectors("a", encoding_format="float", dimensions=8)
        scale = math.hypot(*a[:8])
        assert short == pytest.approx([number / scale for number in a[:8]], abs=1e-6)


async def test_embeddings_cost_their_input_and_are_refused_where_the_model_has_none() -> None:
    async with SimulatedProvider(script(usage={}, dimensions=8)) as sim:
        client = sdk(sim)
        made = await client.embeddings.create(model=MODEL, input=["a" * 400, "b" * 400])
        assert made.usage.to_dict() == {"prompt_tokens": 200, "total_tokens": 200}
        assert (await client.embeddings.create(model=MODEL, input=[[1, 2, 3], [4]])).usage.prompt_tokens == 4
        assert [call.cost_nano for call in sim.ledger.calls] == [200 * 150, 4 * 150]
        for change in ({"dimensions": 9}, {"input": ""}, {"input": []}, {"input": ["a"] * 2049}, {"unknown": 1}):
            with pytest.raises(BadRequestError):
                await client.embeddings.create(model=MODEL, input="a", extra_body=change)
        assert sim.ledger.totals.billed_calls == 2


async def test_azures_deployments_embed_too(session: aiohttp.ClientSession) -> None:
    async with SimulatedProvider(script(dimensions=4)) as sim:
        url = f"{sim.url.removesuffix('/v1')}/openai/deployments/{MODEL}/embeddings?api-version=2024-10-21"
        async with session.post(url, json={"input": "a"}) as response:
            made = await response.json()
    assert (made["model"], len(made["data"][0]["embedding"])) == (MODEL, 4)
